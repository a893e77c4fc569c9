"""A gather that saves its blocks. Its derivative scatters, and uses them during the transfers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax import Array

from jaxpar.arguments.types import Leaf
from jaxpar.axis.quantized import Quantized
from jaxpar.axis.ring_order import Index
from jaxpar.compiler.derivatives import as_residuals, with_derivative
from jaxpar.matmul._arrivals import take_partners, use_arrivals
from jaxpar.matmul._product import Left, Product, gradients_of_gather
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.matmul._ring_vjp import (
    as_of,
    gather_blocks,
    gather_underived,
    gradients,
    scatter_beside,
)
from jaxpar.platforms.chips import traced_chip
from jaxpar.ring.cuts import Span, even_cuts
from jaxpar.ring.scales import Scales
from jaxpar.ring.seconds import KEPT_JOINED, KEPT_TOGETHER
from jaxpar.ring.tasks import Task, at_once
from jaxpar.ring.ways import Arrivals, Kept, Place


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredBlocks:
    """All scales, and the gathered array, or its blocks without a local block used first."""

    blocks: list[Leaf]
    scales: Scales | None


def tasks_of(
    method: RingEinsum,
    products: tuple[Product, ...],
    blocks: list[tuple[Array, Place]],
    scales: Scales | None,
    cts: Any,
    parts: int,
) -> list[Task]:
    """Returns tasks on saved blocks, or a full array's `parts`."""
    dim = products[0].left.index(method.label)
    adds = method.label not in products[0].out
    whole = sum(block.shape[dim] for block, _ in blocks)
    cuts: list[Span | None] = [None] * len(blocks)
    # An unrolled ring saves single blocks. A longer ring, and a collective, save the full array.
    if len(blocks) == 1:  # the full array: each step gets a part of it
        cuts = [Span(*cut) for cut in even_cuts(whole, parts)]
        blocks = [(blocks[0][0], lambda _, at=cut: at) for cut in cuts]

    def task(numbers: list[int]) -> Task:
        def take(index: Index) -> Any:
            places = [blocks[number][1](index) for number in numbers]
            return [take_partners(method, products, cts, scales, at) for at in places]

        def fold(index: Index, taken: Any, results: list[Any] | None) -> list[Any]:
            arrivals: Arrivals = []
            for number, at in zip(numbers, taken, strict=True):
                (block, place), cut = blocks[number], cuts[number]
                # Cut it here, not in `take`: XLA fuses this cut with the matmul, without a copy.
                block = block if cut is None else cut.cut(block, dim)
                arrivals.append((block, place(index), at))
            return use_arrivals(method, products, results, arrivals, whole, joined=True)

        return Task(take, fold, adds=adds)

    def finish(results: list[Array]) -> list[Array]:
        return [x.astype(p.dtype) for x, p in zip(results, products, strict=True)]

    # A ring of 8 along the contracting dimension: two groups of four blocks of 256 rows give two
    # sums, not 8. If results are only placed, each block is a task.
    groups: list[list[int]] = [[0]]
    for number in range(1, len(blocks)):
        joined = [blocks[n][0].shape[dim] for n in groups[-1]]
        if adds and _joins_kept(joined) and cuts[number] is None:
            groups[-1].append(number)
        else:
            groups.append([number])
    return [*map(task, groups[:-1]), task(groups[-1])._replace(finish=finish)]


def _kept(method: RingEinsum, products: tuple[Product, ...], left: Any) -> Kept:
    kept = method.way.kept(left.shape[products[0].left.index(method.label)])
    assert kept is not None, "a way that keeps nothing was not asked to"
    return kept


def _joins_kept(lengths: Sequence[int]) -> bool:
    chip = traced_chip()
    few = len(lengths) < KEPT_TOGETHER and sum(lengths) <= KEPT_JOINED
    return chip is not None and chip.torus and few


def _keep(method: RingEinsum, products: Any, left: Left | Quantized, rights: Any) -> Any:
    blocks: list[Array] = []
    results, scales = gather_blocks(method, products, method.sent(left), rights, blocks)
    # A local block that is used first is a residual already.
    own_first = _kept(method, products, left).own_first
    return results, GatheredBlocks(blocks[1:] if own_first else blocks, scales)


def _keep_fwd(method: RingEinsum, products: Any, left: Any, rights: Any) -> Any:
    out, kept = _gather_and_keep(method, products, left, rights)
    return (out, kept), as_residuals((left, rights, kept))


def _keep_bwd(method: RingEinsum, products: Any, residuals: Any, cts: Any) -> Any:
    return _gather_bwd(method, products, residuals, cts[0])


def _gather_fwd(method: RingEinsum, products: Any, left: Any, rights: Any) -> Any:
    out, kept = _gather_and_keep(method, products, left, rights)
    return method.forward_first(out, (left, rights, kept))


def _gather_bwd(method: RingEinsum, products: tuple[Product, ...], residuals: Any, cts: Any) -> Any:
    left, rights, kept = residuals
    of_left, of_rights = _gradients_by_kept(method, products, left, rights, tuple(cts), kept)
    return as_of(left, of_left), of_rights


def _by_kept(
    method: RingEinsum,
    products: tuple[Product, ...],
    left: Any,
    rights: Any,
    cts: Any,
    kept: GatheredBlocks,
) -> Any:
    """Returns gradients; those of right operands need no transfer."""
    for_left, for_rights = gradients_of_gather(products, left.dtype, [r.dtype for r in rights])
    local = left.values if isinstance(left, Quantized) else method.sent(left)
    places, own_first = _kept(method, products, left)
    blocks = zip([local, *kept.blocks] if own_first else kept.blocks, places, strict=True)
    tasks = partial(tasks_of, method, for_rights, list(blocks), kept.scales, cts)
    back = method.derivative()
    if isinstance(left, Quantized) and left.exact is None:
        of_left, made = None, at_once(tasks(1), back.way.ring.index())
    else:
        pairs = tuple(zip(cts, rights, strict=True))
        of_left, made = scatter_beside(back, tasks, for_left, pairs)
    results: Any = made
    return of_left, tuple(results)


def _by_kept_fwd(
    method: RingEinsum, products: Any, left: Any, rights: Any, cts: Any, kept: GatheredBlocks
) -> Any:
    return _gradients_by_kept(method, products, left, rights, cts, kept), as_residuals(
        (left, rights, cts)
    )


def _by_kept_bwd(method: RingEinsum, products: Any, residuals: Any, cts: Any) -> Any:
    # The saved blocks are functions of the left operand, so their derivatives go to it. As
    # constants, they would make second derivatives wrong, without an error.
    _, backward = jax.vjp(partial(gradients, method.derivative(), products), *residuals)
    return *backward(cts), None


_gather_and_keep = with_derivative(_keep, _keep_fwd, _keep_bwd, statics=2)
_gradients_by_kept = with_derivative(_by_kept, _by_kept_fwd, _by_kept_bwd, statics=2)
# Equals `gather_einsum`, except for the derivative.
gather_and_keep = with_derivative(gather_underived, _gather_fwd, _gather_bwd, statics=2)
