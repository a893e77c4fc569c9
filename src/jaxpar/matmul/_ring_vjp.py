"""The two ring einsums: gather an operand, or scatter the result.

Each is the other's derivative; a gather's is a scatter and a gather. Of several products, a gather
shares the travelling operand, and a scatter adds the products. Residuals are shards, unless a
gather saves its blocks (`_kept`), or JAX derives two naive passes.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import jax
from jax import Array
from jaxtyping import Num

from jaxpar.axis.quantized import Quantized, exact_of
from jaxpar.compiler.derivatives import with_derivative
from jaxpar.matmul._arrivals import cut_operand, multiply_part, take_partners, use_arrivals
from jaxpar.matmul._product import (
    Left,
    Out,
    Product,
    flops_of,
    gradients_of_gather,
    gradients_of_scatter,
    sizes_of,
)
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.ring.ways import Arrivals, Forms, Positions, Tasks, Use

if TYPE_CHECKING:
    from jaxpar.ring.scales import Scales


def gather_underived(
    method: RingEinsum,
    products: tuple[Product, ...],
    left: Left | Quantized,
    rights: tuple[Num[Array, "..."], ...],
) -> tuple[Num[Array, "..."], ...]:
    """Computes `product(all-gathered left, right)` for each product and right operand.

    `left` is a block along `method.label`; others have the full label. All vary over the same axes,
    including the ring's.
    """
    method, left = replace(method, way=method.underived), method.sent(left)

    def in_blocks() -> tuple[Num[Array, "..."], ...]:
        return gather_blocks(method, products, left, rights, None)[0]

    def across(chunks: int) -> tuple[Num[Array, "..."], ...]:
        from jaxpar.matmul._chunked_other_dim import gather_across

        run = gather_underived
        return gather_across(run, method, chunks, products, left, rights) or in_blocks()

    def staying() -> tuple[Num[Array, "..."], ...]:
        from jaxpar.matmul._stationary import stay

        return stay(method, products, exact_of(left), rights) or in_blocks()

    return method.way.perform(Forms(in_blocks, across, staying))


def gather_blocks(
    method: RingEinsum,
    products: tuple[Product, ...],
    left: Left | Quantized,
    rights: tuple[Num[Array, "..."], ...],
    kept: list[Any] | None,
) -> tuple[tuple[Num[Array, "..."], ...], Scales | None]:
    """Gathers, appends blocks to `kept`, and returns scales, too."""
    dim, scales = products[0].left.index(method.label), None
    whole = left.shape[dim] * method.way.ring.size  # left [m/n, k]: m
    if isinstance(left, Quantized):
        from jaxpar.ring.scales import gather_scales

        (left,), (scales,) = gather_scales(method.way.ring.names, [left], dim)

    def consume(results: list[Any] | None, arrivals: Arrivals) -> list[Any]:
        return use_arrivals(method, products, results, arrivals, whole)

    def sums(results: list[Array]) -> list[Array]:
        return [r for r, p in zip(results, products, strict=True) if method.label not in p.out]

    def finish(results: list[Array]) -> list[Array]:
        return [r.astype(p.dtype) for r, p in zip(results, products, strict=True)]

    adds = any(method.label not in p.out for p in products)  # contracted: results are added
    take = partial(take_partners, method, products, rights, scales)
    use = Use(consume, take, sums if adds else None, finish)
    results = method.way.gather(left, use, dim=dim, kept=kept)
    return tuple(results), scales


def _scatter(
    method: RingEinsum, products: tuple[Product, ...], pairs: tuple[tuple[Array, Array], ...]
) -> Out:
    return scatter_beside(replace(method, way=method.underived), None, products, pairs)[0]


def scatter_beside(
    method: RingEinsum,
    tasks: Tasks | None,
    products: tuple[Product, ...],
    pairs: tuple[tuple[Array, Array], ...],
) -> tuple[Out, Any]:
    def across(chunks: int) -> tuple[Out, Any]:
        from jaxpar.matmul._chunked_other_dim import scatter_across
        from jaxpar.ring.tasks import at_once

        sums = scatter_across(_scatter, method, chunks, products, pairs)
        if sums is None:  # a chunk is the same part of every block
            return scatter_blocks(method, tasks, products, pairs, method.way.ring.size)
        return sums, None if tasks is None else at_once(tasks(1), method.way.ring.index())

    in_blocks = partial(scatter_blocks, method, tasks, products, pairs)
    return method.way.perform(Forms(in_blocks, across, in_blocks))


def scatter_blocks(
    method: RingEinsum,
    tasks: Tasks | None,
    products: tuple[Product, ...],
    pairs: tuple[tuple[Array, Array], ...],
    blocks: int = 1,
) -> tuple[Out, Any]:
    def take(positions: Positions) -> list[tuple[Array, Array]]:
        return [
            (
                cut_operand(method.label, left, p.left, positions),
                cut_operand(method.label, right, p.right, positions),
            )
            for p, (left, right) in zip(products, pairs, strict=True)
        ]

    # If this device adds nothing to its one product, the product has the wire's dtype at once.
    alone = len(products) == 1 and not method.way.relays
    dtype = method.way.ring.wire(products[0].dtype) if alone else None

    def produce(taken: list[tuple[Array, Array]]) -> Out:
        parts = [
            multiply_part(method, p, left, right, dtype, blocks=blocks)
            for p, (left, right) in zip(products, taken, strict=True)
        ]
        return sum(parts[1:], start=parts[0])  # added before the transfer: one sum leaves

    first, label = products[0], method.label  # all have the result's labels
    sizes = [sizes_of(p, *pair) for p, pair in zip(products, pairs, strict=True)]
    return method.way.scatter(
        produce,
        take,
        dim=first.out.index(label),
        length=sizes[0][label] // method.way.ring.size,
        dtype=first.dtype,
        tasks=tasks,
        flops=flops_of(sizes),
    )


def _gather_fwd(method: RingEinsum, products: Any, left: Left | Quantized, rights: Any) -> Any:
    run = partial(gather_einsum, method.forward(), products)
    if method.left_to_jax:
        return jax.vjp(run, left, rights)
    return method.forward_first(run(left, rights), (left, rights))


def _gather_bwd(method: RingEinsum, products: tuple[Product, ...], residuals: Any, cts: Any) -> Any:
    if method.left_to_jax:
        return residuals(cts)
    left, rights = residuals  # shards: the gathered array is not saved
    of_left, of_rights = gradients(method, products, left, rights, tuple(cts))
    return as_of(left, of_left), of_rights


def as_of(left: Any, gradient: Any) -> Any:
    if isinstance(left, Quantized) and gradient is not None:
        return replace(left, values=None, scales=None, exact=gradient)
    return gradient


def gradients(
    method: RingEinsum, products: tuple[Product, ...], left: Any, rights: Any, cts: Any
) -> Any:
    """Returns a gather's gradients; gathers the left operand again."""
    method = method.derivative()
    for_left, for_rights = gradients_of_gather(products, left.dtype, [r.dtype for r in rights])
    of_rights = gather_einsum(method, for_rights, left, cts)  # one gather for all
    if isinstance(left, Quantized) and left.exact is None:
        return None, of_rights
    return scatter_einsum(method, for_left, tuple(zip(cts, rights, strict=True))), of_rights


def _scatter_fwd(method: RingEinsum, products: Any, pairs: Any) -> Any:
    run = partial(scatter_einsum, method.forward(), products)
    return jax.vjp(run, pairs) if method.left_to_jax else method.forward_first(run(pairs), pairs)


def _scatter_bwd(method: RingEinsum, products: tuple[Product, ...], residuals: Any, ct: Out) -> Any:
    if method.left_to_jax:
        return residuals(ct)
    pairs, method = residuals, method.derivative()
    gradients = gradients_of_scatter(products, [(left.dtype, right.dtype) for left, right in pairs])
    partners = tuple(x for left, right in pairs for x in (right, left))  # the cotangent's
    if method.low_bit:
        from jaxpar.axis.rounding import straight_through

        wire = method.way.ring.low_bit_cotangents(ct.dtype)
        ct = straight_through(wire, ct, products[0].out.index(method.label))
    grads: Any = gather_einsum(method, gradients, ct, partners)
    return (tuple(zip(grads[::2], grads[1::2], strict=True)),)  # (left, right) of each


gather_einsum = with_derivative(gather_underived, _gather_fwd, _gather_bwd, statics=2)
scatter_einsum = with_derivative(_scatter, _scatter_fwd, _scatter_bwd, statics=2)
