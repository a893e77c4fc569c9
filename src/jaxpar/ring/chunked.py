"""The algorithm with a collective for each chunk of the blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jax import lax

from jaxpar.platforms.chips import fitted_to
from jaxpar.ring.cuts import Block, Whole, even_cuts, join_dims, split_dim, unwritten
from jaxpar.ring.naive import Naive, sent_time
from jaxpar.ring.seconds import (
    SCATTERED_SHARE,
    Flow,
    copy_time,
    gathered_again,
    quantizing_time,
    work_on_kept,
    work_time,
)
from jaxpar.ring.ways import Forms, Positions, Result

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem


@dataclass(frozen=True)
class Comb:
    """The same positions of each of the `blocks`: `size` of each from `start` on."""

    # Blocks are a dimension of their own when positions are cut, multiplied and placed. Flattened,
    # a matmul's result is placed by a separate pass:
    #     convolution.1 = bf16[n*size, cols] fusion(chunk, rhs)
    #     fusion.2 = dynamic-update-slice(...)
    start: int
    size: int
    blocks: int

    def cut(self, x: Whole, dim: int) -> Block:
        if self.size * self.blocks == x.shape[dim]:
            return x
        apart = split_dim(x, dim, self.blocks)
        cut = lax.slice_in_dim(apart, self.start, self.start + self.size, axis=dim + 1)
        return join_dims(cut, dim)

    def of_blocks(self, x: Whole, dim: int, length: int) -> Block:
        return x

    def place(self, whole: Whole | None, part: Block, dim: int, length: int) -> Whole:
        if part.shape[dim] == length:
            return part
        into = split_dim(unwritten(whole, part, dim, length), dim, self.blocks)
        start = [0] * into.ndim
        start[dim + 1] = self.start
        return join_dims(
            lax.dynamic_update_slice(into, split_dim(part, dim, self.blocks), start), dim
        )


@dataclass(frozen=True)
class InChunks(Naive):
    """An asynchronous collective of each chunk overlaps with work on the chunk before.

    A chunk is the same part of every block, unless a matmul cuts along another label.
    """

    chunks: int = 1
    derived_by_jax = False

    @property
    def mode(self) -> str:
        return f"chunked-{self.chunks}"

    def seconds(self, problem: Problem, flows: Sequence[Flow], kept: int = 0) -> float:
        chip = problem.figures
        if kept:
            first, last = flows
            return self._in_chunks(problem, first) + work_on_kept(chip, last, kept)
        ahead = quantizing_time(chip, flows)
        return ahead + sum(self._in_chunks(problem, flow) for flow in flows)

    def _in_chunks(self, problem: Problem, flow: Flow) -> float:
        chip, shared = problem.figures, problem.messages("collective")
        size, chunks, comb = self.ring.size, self.chunks, flow
        flow = flow.in_chunks(chunks)
        fit = chunks * flow.sums <= chip.vmem
        work = work_time(chip, flow, chunks, fitted_to(chip.kind).chunk_passes, kept=fit)
        kind = "gather" if flow.kind == "gather" else "scatter"
        sent = sent_time(problem, flow, kind)
        # Chunks are cut from the block, or joined to it: slower if they lie apart in blocks.
        moved = flow.block_bytes
        copied = copy_time(chip, moved) if flow is comb else 2 * moved / chip.hbm
        rest = copied + chunks * chip.start
        rest += 2 * flow.minor / (SCATTERED_SHARE * chip.hbm)
        # Each chunk is written alone and placed, and the full array is copied once more.
        rest += 2 * copy_time(chip, flow.unaligned) if flow is comb else 0.0
        rest += gathered_again(chip, flow, size, shared)
        if ("all-gather" if kind == "gather" else "reduce-scatter") not in problem.beside:
            return work + sent + rest
        return rest + (work + sent + (chunks - 1) * max(work, sent)) / chunks

    def _parts(self, length: int) -> list[tuple[int, int, Positions]]:
        cuts = even_cuts(length, self.chunks)
        return [(start, size, Comb(start, size, self.ring.size)) for start, size in cuts]

    def perform(self, forms: Forms[Result]) -> Result:
        return forms.across(self.chunks)

    def kept(self, length: int) -> None:
        return None
