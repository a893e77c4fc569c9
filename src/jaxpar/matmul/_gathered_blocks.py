"""What a gather brought and kept for its derivative, and the work on it, in steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import jax
from jax import Array

from jaxpar.arguments.types import Leaf
from jaxpar.matmul._arrivals import take_partners, use_arrivals
from jaxpar.matmul._product import Product
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.ring.parts import Span, even_cuts
from jaxpar.ring.scales import Scales
from jaxpar.ring.seconds import joins_kept
from jaxpar.ring.steps import Step
from jaxpar.ring.ways import Arrivals


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class GatheredBlocks:
    """What a gather brought: the whole, or blocks as they came, if not the own; and all scales."""

    blocks: list[Leaf]
    scales: Scales | None


def steps_of(
    method: RingEinsum,
    products: tuple[Product, ...],
    kept: list[Array],
    scales: Scales | None,
    cts: Any,
) -> list[Step]:
    """Returns the work on blocks that were kept, in steps: of as many as are best joined."""
    dim, way = products[0].left.index(method.label), method.way
    adds = method.label not in products[0].out
    whole = sum(block.shape[dim] for block in kept)
    blocks = list(zip(kept, way.places(whole // way.ring.size), strict=True))
    cuts: list[Span | None] = [None] * len(blocks)
    if len(blocks) == 1:  # the whole, of which each turn gets a part
        cuts = [Span(*cut) for cut in even_cuts(whole, method.backward.parts)]
        blocks = [(kept[0], lambda _, at=cut: at) for cut in cuts]

    def step(numbers: list[int]) -> Step:
        def take(index: Array) -> Any:
            places = [blocks[number][1](index) for number in numbers]
            return [take_partners(method, products, cts, scales, at) for at in places]

        def fold(index: Array, taken: Any, results: list[Any] | None) -> list[Any]:
            arrivals: Arrivals = []
            for number, at in zip(numbers, taken, strict=True):
                (block, place), cut = blocks[number], cuts[number]
                # Cut here, not taken: as part of the matmul it is no copy.
                block = block if cut is None else cut.cut(block, dim)
                arrivals.append((block, place(index), at))
            return use_arrivals(method, products, results, arrivals, whole)

        return Step(take, fold, adds=adds)

    def finish(results: list[Array]) -> list[Array]:
        return [x.astype(p.dtype) for x, p in zip(results, products, strict=True)]

    groups: list[list[int]] = [[0]]
    for number in range(1, len(blocks)):
        joined = [blocks[n][0].shape[dim] for n in groups[-1]]
        if adds and joins_kept(joined) and cuts[number] is None:
            groups[-1].append(number)
        else:
            groups.append([number])
    return [*map(step, groups[:-1]), step(groups[-1])._replace(finish=finish)]
