"""Chooses the algorithm of `mode="auto"` for each pass over a ring.

A rule for each kind of `Problem` excludes modes; the fastest of the others is taken.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import product
from typing import TypeVar

from jaxpar.arguments.types import Mode
from jaxpar.axis.axis import CHUNKED, Ring
from jaxpar.choose.problem import Kind, Problem
from jaxpar.choose.sites import NAMED, notes, settled
from jaxpar.platforms.async_options import traced_asynchronous
from jaxpar.platforms.chips import traced_chip
from jaxpar.ring.naive import Naive
from jaxpar.ring.seconds import MARGIN, Flow
from jaxpar.ring.ways import Way

# The GPU compiler joins the sums of more than two chunks again, and of two chunks with fewer bytes
# than this together.
JOINED = 2**28

T = TypeVar("T")
Flows = tuple[Flow, ...]
Ways = tuple[Way, Way]  # forward and backward pass
# `(problem, mode, flows of a pass)` to the reason why the mode is excluded, in words for a user.
# "" if it is not. The fastest of these is taken.
Rule = Callable[[Problem, Mode, Flows], str]


def choose_way(problem: Problem) -> Way:
    return choose_ways(problem)[0]


def choose_ways(problem: Problem) -> Ways:
    named = settled(problem)
    ways = ways_of_passes(named)
    if notes.value is not None:
        notes.value.passes(problem, ways, named.ring != problem.ring)
    return ways


def ways_of_passes(problem: Problem) -> Ways:
    forward, backward = problem.ring.mode, problem.ring.backward or problem.ring.mode
    if problem.told is None and {forward, backward} & CHUNKED.keys():
        traced_asynchronous()  # warns if no option makes collectives asynchronous
    predicted = Predictions(problem)
    firsts = ways_of(problem, forward, problem.forward)
    if not problem.backward:
        others = ways_of(problem, backward, problem.forward)
        return _least(firsts, predicted.forward), _least(others, predicted.forward)
    pairs = list(product(firsts, ways_of(problem, backward, problem.backward)))
    return _least(pairs, predicted.of_both)


def _least(candidates: list[T], seconds: Callable[[T], float]) -> T:
    return candidates[0] if len(candidates) == 1 else min(candidates, key=seconds)


def ways_of(problem: Problem, mode: Mode, flows: Flows) -> list[Way]:
    """Returns the algorithms that a mode allows."""
    if mode != "auto":
        return [way_of(problem, mode, flows)]
    rule = RULES[problem.kind]
    # Among algorithms of equal time, the first is taken.
    return [way_of(problem, mode, flows) for mode in NAMED if not rule(problem, mode, flows)]


@dataclass(frozen=True)
class Predictions:
    problem: Problem
    _known: dict[tuple[Way, Flows, int], float] = field(default_factory=dict)

    def seconds(self, way: Way, flows: Flows, kept: int = 0) -> float:
        key = way, flows, kept
        if key not in self._known:
            self._known[key] = way.seconds(self.problem, flows, kept)
        return self._known[key]

    def forward(self, way: Way) -> float:
        return self._compared(way, self.seconds(way, self.problem.forward))

    def backward(self, way: Way, first: Way) -> float:
        kept = self.kept(first, way)
        return self._compared(way, self.seconds(way, self.problem.backward, kept))

    def of_both(self, pair: Ways) -> float:
        first, second = pair
        return self.forward(first) + self.backward(second, first)

    def kept(self, first: Way, second: Way) -> int:
        problem = self.problem
        if not problem.forward or problem.forward[0].kind != "gather":
            return 0
        if problem.keeps and (kept := first.kept(problem.forward[0].length // problem.ring.size)):
            return len(kept.places)
        # A forward pass by collectives saves its gathered array for a backward pass like itself.
        return int(problem.keeps_by_jax and first == second and first.derived_by_jax)

    def _compared(self, way: Way, seconds: float) -> float:
        if way == Naive(self.problem.ring):
            return seconds
        # Across a cube, blocks are cut into thirds, whose layout the compiler chooses.
        thirds = way.mode == "multi-ring" and self.problem.ring.disjoint()[0].crosses_a_cube
        return seconds / (MARGIN**2 if thirds else MARGIN)


def way_of(problem: Problem, mode: Mode, flows: Flows = ()) -> Way:
    if mode == "naive":
        return Naive(problem.ring)
    # Other algorithms are loaded only if a program may use them.
    if mode == "stationary":
        from jaxpar.ring.staying import Stationary

        return Stationary(problem.ring)
    if mode in CHUNKED:
        from jaxpar.ring.chunked import InChunks

        return InChunks(problem.ring, CHUNKED[mode])
    from jaxpar.ring.of_mode import stepwise

    return stepwise(problem, mode, flows)


def beside_a_matmul(problem: Problem, mode: Mode, flows: Flows) -> str:
    """Returns why a matmul may not take a mode."""
    chip, size = problem.chip, problem.ring.size
    if mode == "naive":
        return ""
    if size == 1:
        return "one device"
    if chip is None:
        return "the chip is not in the table"
    if mode == "stationary":
        moves = any(flow.partners + flow.exchanged for flow in problem.forward)
        return "" if moves else "no other operand can travel"
    if mode in CHUNKED:
        return _not_in_chunks(problem, CHUNKED[mode], flows)
    if out := _not_stepwise(problem):
        return out
    if mode == "multi-ring":
        return _not_by_disjoint_rings(problem, flows)
    if chip.torus:
        return "half of the links are idle" if mode == "unidirectional" else ""
    return "both directions leave by one port" if mode == "bidirectional" else ""


def of_attention(problem: Problem, mode: Mode, flows: Flows) -> str:
    if problem.near is None:
        return beside_a_matmul(problem, mode, flows)
    return "" if mode == "unidirectional" else "the blocks of near devices are fewer bytes"


def in_a_layer(problem: Problem, mode: Mode, flows: Flows) -> str:
    """Returns why a layer's matmul may not take a mode."""
    # Other matmuls hide its collectives, except the gather before attention. On TPUs, sums may go
    # in chunks of another label than the sequence's.
    if mode == "naive":
        return ""
    gathers = bool(problem.forward) and problem.forward[0].kind == "gather"
    # Two chunks are predicted to be as fast as four, but leave more of the sums exposed.
    scatters = bool(flows) and all(flow.kind == "scatter" for flow in flows)
    pieces = mode == "bidirectional" if gathers else mode == "chunked-4" and scatters
    if not pieces or problem.chip is None or not problem.chip.torus:
        return "a layer's other matmuls hide its collectives"
    if not is_asynchronous(problem):
        return "the compiler overlaps no collective with other work"
    if gathers:
        return _not_stepwise(problem)
    across = all(flow.in_chunks(CHUNKED[mode]).along != flow.along for flow in flows)
    return "" if across else "chunks of rows are placed apart"


def by_links(problem: Problem, mode: Mode, flows: Flows) -> str:
    """Returns why a lone collective may not take a mode."""
    # Behind a switch, permutes are slower.
    chip = problem.chip
    best: Mode = "multi-ring" if problem.spans_a_torus else "bidirectional"
    if chip is None or not chip.torus:
        best = "naive" if chip else "unidirectional"
    return "" if mode == best else f"{best} uses the links best"


def naively(problem: Problem, mode: Mode, flows: Flows) -> str:
    """Returns why work that hides no transfer may not."""
    return "" if mode == "naive" else "it has no work of its own to overlap with"


RULES: dict[Kind, Rule] = {
    "matmul": beside_a_matmul,
    "projection": in_a_layer,
    "attention": of_attention,
    "collective": by_links,
    "weights": naively,
    "loss": naively,
    "experts": naively,
}


def is_asynchronous(problem: Problem) -> bool:
    """Returns whether gathers and scatters overlap with other work."""
    return {"all-gather", "reduce-scatter"} <= problem.beside


def _not_in_chunks(problem: Problem, chunks: int, flows: Flows) -> str:
    if problem.kind == "attention":
        return "blocks are used one by one"
    if not problem.beside:
        return "the compiler overlaps no collective with other work"
    if problem.figures.torus:
        return ""
    if chunks > 2:
        return "the compiler joins more than two chunks again"
    sent = sum(flow.block_bytes * problem.ring.size for flow in flows if flow.kind == "scatter")
    if 0 < sent < JOINED:
        return f"the compiler joins sums of less than {JOINED >> 20} MiB again"
    # If a gather's products are added, each chunk waits for the product before.
    waits = any(f.kind == "all-reduce" or (f.kind == "gather" and f.sums) for f in flows)
    return "each chunk would wait for the one before" if waits else ""


def _not_stepwise(problem: Problem) -> str:
    chip, size = problem.figures, problem.ring.size
    if size == 2:
        return "two devices have one transfer, and nothing overlaps with it"
    if chip.switched is not None and size > chip.switched:
        return f"beyond one switch, of {chip.switched} devices, all hops wait for one port"
    if _is_synchronous(problem):
        return f"the compiler makes permutes synchronous on dimensions of {chip.synchronous_around}"
    return ""


def _not_by_disjoint_rings(problem: Problem, flows: Flows) -> str:
    if not problem.spans_a_torus:
        return "its axes are not known to have the links of more than one ring"
    # Attention's matmuls are far from peak and hide one ring. More rings only cost.
    if problem.kind == "attention":
        return "one ring hides"
    # Across a cube, thirds that are not rows need more passes over memory than predicted.
    rows = not any(flow.sums or flow.minor for flow in flows)
    if (rows and {flow.kind for flow in flows} in ({"gather"}, {"scatter"})) or (
        not problem.ring.disjoint()[0].crosses_a_cube
    ):
        return ""
    return "across a cube, thirds of anything but rows cost more than they save"


def _is_synchronous(problem: Problem) -> bool:
    """Returns whether the compiler makes permutes synchronous, so that a ring only loses."""
    # It does on wrap-around links, in a slice of eight times the dimension. A ring that fills the
    # dimension uses them, and so does a shorter ring with gaps.
    around, size = problem.figures.synchronous_around, problem.ring.size
    if around is None or problem.devices < 8 * around:
        return False
    return size == around or (size < around and not problem.innermost)


def may_keep(ring: Ring) -> bool:
    """Returns whether a matmul may save what it gathered."""
    # `auto` does so on TPUs only: a GPU adds sums in separate passes, and gathers again meanwhile.
    # On a GPU, 8192x8192x28672 over 8 H100 takes 1510 us, and 1770 us with what was saved.
    if ring.keep_gathered is not None:
        return ring.keep_gathered
    chip = traced_chip()
    return ring.mode == "auto" and chip is not None and chip.torus
