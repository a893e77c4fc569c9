"""The two ring einsums, each the other's derivative: gather an operand, or scatter the result.

Both take several products at once. A gather feeds one travelling operand to every product; a
scatter sums all products into one travelling result. The derivative of a gather is one scatter (for
the travelling operand, over all its products) and one gather (for all the others); the derivative
of a scatter is one gather of the cotangent, which feeds the gradients of all operands. So one pair
of custom_vjp functions is closed under differentiation, and residuals are the operands as they
came in: shards. Or the blocks that a gather brought are kept, too: then its derivative is a
scatter, beside whose transfers it uses them. Where both passes are naive the derivative is JAX's
own, which keeps the gathered operand.
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
    """Computes `product(all-gathered left, right)` for each product and its right operand.

    `left` is this device's block along `method.label`; the right operands and the results have that
    label whole where they have it. All operands vary over the same axes, the ring's among them.
    """
    method, left = replace(method, way=method.underived), method.sent(left)

    def in_blocks() -> tuple[Out, ...]:
        return gather_blocks(method, products, left, rights, None)[0]

    def across(chunks: int) -> tuple[Out, ...]:
        from jaxpar.matmul._across import gather_across

        run = gather_underived
        return gather_across(run, method, chunks, products, left, rights) or in_blocks()

    def staying() -> tuple[Out, ...]:
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
    """Computes a gather of blocks along the ring's label, and adds all that come to `kept`.

    Returns the results, and the scales of all blocks where they are quantized.
    """
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

    adds = any(method.label not in p.out for p in products)  # contracted: nothing is placed
    take = partial(take_partners, method, products, rights, scales)
    use = Use(consume, take, sums if adds else None, finish)
    results = method.way.gather(left, use, dim=dim, kept=kept)
    return tuple(results), scales


def _scatter(
    method: RingEinsum, products: tuple[Product, ...], pairs: tuple[tuple[Array, Array], ...]
) -> Out:
    """Sums all products over all devices, and keeps this device's block of the sum.

    Operands have `method.label` whole where they have it; the result is the block along it. All
    operands vary over the same axes, the ring's among them.
    """
    return scatter_beside(replace(method, way=method.underived), None, products, pairs)[0]


def scatter_beside(
    method: RingEinsum,
    tasks: Tasks | None,
    products: tuple[Product, ...],
    pairs: tuple[tuple[Array, Array], ...],
) -> tuple[Out, Any]:
    """As a scatter, beside whose transfers tasks of other work are taken; returns theirs, too."""

    def across(chunks: int) -> tuple[Out, Any]:
        from jaxpar.matmul._across import scatter_across
        from jaxpar.ring.tasks import at_once

        sums = scatter_across(_scatter, method, chunks, products, pairs)
        if sums is None:  # the same part of every block
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
    """As `scatter_beside`, along the ring's label; each part is of so many blocks."""

    def take(positions: Positions) -> list[tuple[Array, Array]]:
        return [
            (
                cut_operand(method.label, left, p.left, positions),
                cut_operand(method.label, right, p.right, positions),
            )
            for p, (left, right) in zip(products, pairs, strict=True)
        ]

    # One product of which nothing is added on this device is rounded as it travels.
    alone = len(products) == 1 and not method.way.relays
    dtype = method.way.ring.wire(products[0].dtype) if alone else None

    def produce(taken: list[tuple[Array, Array]]) -> Out:
        parts = [
            multiply_part(method, p, left, right, dtype, blocks=blocks)
            for p, (left, right) in zip(products, taken, strict=True)
        ]
        return sum(parts[1:], start=parts[0])  # before they travel: one sum leaves

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
    left, rights = residuals  # shards: what was gathered is not kept
    of_left, of_rights = gradients(method, products, left, rights, tuple(cts))
    return as_of(left, of_left), of_rights


def as_of(left: Any, gradient: Any) -> Any:
    """Returns the gradient of a left operand in its form: as if nothing had been rounded."""
    if isinstance(left, Quantized) and gradient is not None:
        return replace(left, values=None, scales=None, exact=gradient)
    return gradient


def gradients(
    method: RingEinsum, products: tuple[Product, ...], left: Any, rights: Any, cts: Any
) -> Any:
    """Returns the gradients of a gather's operands; the left one is gathered once more."""
    method = method.derivative()
    for_left, for_rights = gradients_of_gather(products, left.dtype, [r.dtype for r in rights])
    of_rights = gather_einsum(method, for_rights, left, cts)  # by the one gather
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
    partners = tuple(x for left, right in pairs for x in (right, left))  # of the cotangent
    if method.low_bit:
        from jaxpar.axis.rounding import straight_through

        how = method.way.ring.low_bit_cotangents(ct.dtype)
        ct = straight_through(how, ct, products[0].out.index(method.label))
    grads: Any = gather_einsum(method, gradients, ct, partners)
    return (tuple(zip(grads[::2], grads[1::2], strict=True)),)  # (left, right) of each


gather_einsum = with_derivative(gather_underived, _gather_fwd, _gather_bwd, statics=2)
scatter_einsum = with_derivative(_scatter, _scatter_fwd, _scatter_bwd, statics=2)
