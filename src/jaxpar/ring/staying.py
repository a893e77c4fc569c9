"""The algorithm in which a matmul's other operand travels, not the sharded operand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import hypot
from typing import TYPE_CHECKING

from jaxpar.ring.naive import Naive, sent_time
from jaxpar.ring.seconds import MATMUL_SHARE, Flow, all_to_all_time, work_time
from jaxpar.ring.ways import Forms, Result

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem


@dataclass(frozen=True)
class Stationary(Naive):
    """The gathered operand stays, because its partners and results have fewer bytes."""

    @property
    def mode(self) -> str:
        return "stationary"

    def seconds(self, problem: Problem, flows: Sequence[Flow], kept: int = 0) -> float:
        return sum((self._staying(problem, flow, kept > 0) for flow in flows), 0.0)

    def perform(self, forms: Forms[Result]) -> Result:
        return forms.staying()

    def kept(self, length: int) -> None:
        return None

    def _staying(self, problem: Problem, flow: Flow, kept: bool) -> float:
        chip, size = problem.figures, self.ring.size
        if flow.kind != "gather" and not kept:
            return work_time(chip, flow, 1, 0.0) + sent_time(problem, flow, flow.kind)
        moved = flow.block_bytes + size * (flow.partners + flow.exchanged)
        computed = flow.flops / (MATMUL_SHARE * chip.flops)
        # If the flow adds, its partners are sums, which are scattered.
        travels = "scatter" if flow.sums else "gather"
        sent = sent_time(problem, replace(flow, block_bytes=flow.partners), travels)
        sent += all_to_all_time(chip, flow.exchanged, size)
        return hypot(computed, moved / chip.hbm) + (sent if flow.kind == "gather" else 0.0)
