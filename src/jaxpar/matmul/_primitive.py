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

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jaxtyping import Num

from jaxpar.axis.quantized import Quantized, exact_of, straight_through
from jaxpar.compiler.derivatives import as_residuals, with_derivative
from jaxpar.matmul._arrivals import cut_operand, multiply_part, take_partners, use_arrivals
from jaxpar.matmul._gathered_blocks import GatheredBlocks, steps_of
from jaxpar.matmul._product import (
    Left,
    Out,
    Product,
    Right,
    flops_of,
    gradients_of_gather,
    gradients_of_scatter,
    multiply,
    partial_dtype,
    sizes_of,
)
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.matmul._stationary import return_result, send_partner, unused_label, with_devices
from jaxpar.matmul._work import flow_of
from jaxpar.ring.flow import FlowKind
from jaxpar.ring.naive import Naive
from jaxpar.ring.parts import Span, even_cuts
from jaxpar.ring.scales import Scales, gather_scales
from jaxpar.ring.steps import Step, at_once
from jaxpar.ring.ways import Arrivals, Positions


def _gather(
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
    if method.way.stays and all(x.size for x in (left, *rights)):
        return tuple(
            _stay(method, p, exact_of(left), right)
            for p, right in zip(products, rights, strict=True)
        )
    if method.way.chunks > 1 and not isinstance(left, Quantized):
        along = _cut_label(method, "gather", products, [(left, r) for r in rights])
        if along != method.label:
            with jax.named_scope(method.way.mode):
                return _gather_across(method, along, products, left, rights)
    return _gather_blocks(method, products, left, rights, None)[0]


def _gather_blocks(
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
    whole = left.shape[dim] * method.way.ring.size
    if isinstance(left, Quantized):
        (left,), (scales,) = gather_scales(method.way.ring.names, [left], dim)

    def take(positions: Positions) -> Any:
        return take_partners(method, products, rights, scales, positions)

    def consume(results: list[Any] | None, arrivals: Arrivals) -> list[Any]:
        return use_arrivals(method, products, results, arrivals, whole)

    def sums(results: list[Array]) -> list[Array]:
        return [r for r, p in zip(results, products, strict=True) if method.label not in p.out]

    def finish(results: list[Array]) -> list[Array]:
        return [r.astype(p.dtype) for r, p in zip(results, products, strict=True)]

    adds = any(method.label not in p.out for p in products)
    results = method.way.gather(
        left,
        consume,
        take=take,
        dim=dim,
        sums=sums if adds else None,
        finish=finish,
        kept=kept,
    )
    return tuple(results), scales


def _stay(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    """Computes one product of a gather, `left` staying where it is."""
    ring, label = method.way.ring, method.label
    dims = [x.index(label) if label in x else None for x in (product.right, product.out)]
    device = unused_label(product.left, product.right)
    right_apart, out_apart = (with_devices(x, label, device) for x in (product.right, product.out))
    apart = Product(product.left, right_apart, out_apart, product.dtype)
    # Results travel in their own dtype, and partial sums, which lack the label, in the wire's.
    wire = product.dtype if dims[1] is not None else ring.wire(product.dtype)
    y = multiply(method.arithmetic, apart, left, send_partner(ring, right, dims[0]), wire)
    return return_result(ring, y, dims[1]).astype(product.dtype)


def _scatter(
    method: RingEinsum, products: tuple[Product, ...], pairs: tuple[tuple[Array, Array], ...]
) -> Out:
    """Sums all products over all devices, and keeps this device's block of the sum.

    Operands have `method.label` whole where they have it; the result is the block along it. All
    operands vary over the same axes, the ring's among them.
    """

    return _scatter_beside(replace(method, way=method.underived), (), products, pairs)[0]


def _scatter_beside(
    method: RingEinsum,
    steps: Sequence[Step],
    products: tuple[Product, ...],
    pairs: tuple[tuple[Array, Array], ...],
) -> tuple[Out, Any]:
    """As a scatter, beside whose transfers steps of other work are taken; returns theirs, too."""
    if method.way.chunks > 1:
        along = _cut_label(method, "scatter", products, pairs)
        if along != method.label:
            with jax.named_scope(method.way.mode):
                return _scatter_across(method, along, products, pairs), at_once(
                    steps, method.way.ring.index()
                )

    def take(positions: Positions) -> list[tuple[Array, Array]]:
        return [
            (
                cut_operand(method.label, left, p.left, positions),
                cut_operand(method.label, right, p.right, positions),
            )
            for p, (left, right) in zip(products, pairs, strict=True)
        ]

    blocks = method.way.ring.size if method.way.chunks > 1 else 1
    # One product of which nothing is added on this device is rounded as it travels.
    alone = len(products) == 1 and not method.way.relays
    dtype = method.way.ring.wire(products[0].dtype) if alone else None

    def produce(taken: list[tuple[Array, Array]]) -> Out:
        parts = [
            multiply_part(method, p, left, right, dtype, blocks=blocks)
            for p, (left, right) in zip(products, taken, strict=True)
        ]
        return sum(parts[1:], start=parts[0])

    # All products have the result's labels, and so any of them knows its shape.
    first, label = products[0], method.label
    sizes = [sizes_of(p, *pair) for p, pair in zip(products, pairs, strict=True)]
    return method.way.scatter(
        produce,
        take,
        dim=first.out.index(label),
        length=sizes[0][label] // method.way.ring.size,
        dtype=first.dtype,
        steps=steps,
        flops=flops_of(sizes),
    )


def _cut_label(
    method: RingEinsum,
    kind: FlowKind,
    products: Sequence[Product],
    pairs: Sequence[tuple[Array, Array]],
) -> str:
    """Returns the label of what travels along which chunks are cut, at the least cost."""
    ring, width = method.way.ring, pairs[0][0].dtype.itemsize
    sizes: list[dict[str, int]] = []
    for p, (left, right) in zip(products, pairs, strict=True):
        sizes.append(sizes_of(p, left, right))
        if kind == "gather":
            sizes[-1][method.label] = left.shape[p.left.index(method.label)] * ring.size
    flow = flow_of(kind, method.label, ring.size, products, sizes, width, width)
    return flow.in_chunks(method.way.chunks).along


def _at_once(method: RingEinsum) -> RingEinsum:
    """The naive way, for one chunk of arrays that are cut along another label than the ring's."""
    way = Naive(method.way.ring)
    return replace(method, way=way, backward=way, underived=way)


def _gather_across(
    method: RingEinsum,
    along: str,
    products: tuple[Product, ...],
    left: Left,
    rights: tuple[Num[Array, "..."], ...],
) -> tuple[Num[Array, "..."], ...]:
    """A gather for each chunk of another label than the ring's, of all operands that have it."""
    once = _at_once(method)
    length = left.shape[products[0].left.index(along)]
    wide = [
        p if along in p.out else replace(p, dtype=partial_dtype(method.arithmetic, left, right))
        for p, right in zip(products, rights, strict=True)
    ]
    results: list[Any] = [None] * len(products)
    for start, size in even_cuts(length, method.way.chunks):
        chunk = Span(start, size)
        parts = _gather(
            once,
            tuple(wide),
            cut_operand(along, left, products[0].left, chunk),
            tuple(
                cut_operand(along, r, p.right, chunk) for p, r in zip(products, rights, strict=True)
            ),
        )
        for number, (p, part) in enumerate(zip(products, parts, strict=True)):
            result = results[number]
            if along in p.out:
                results[number] = chunk.place(result, part, p.out.index(along), length)
            else:
                results[number] = part if result is None else result + part
    return tuple(r.astype(p.dtype) for r, p in zip(results, products, strict=True))


def _scatter_across(
    method: RingEinsum,
    along: str,
    products: tuple[Product, ...],
    pairs: tuple[tuple[Array, Array], ...],
) -> Out:
    """A scatter for each chunk of another label than the ring's, of all operands that have it."""
    once, length = _at_once(method), sizes_of(products[0], *pairs[0])[along]
    parts = [
        _scatter(
            once,
            products,
            tuple(
                (cut_operand(along, left, p.left, chunk), cut_operand(along, right, p.right, chunk))
                for p, (left, right) in zip(products, pairs, strict=True)
            ),
        )
        for chunk in (Span(*cut) for cut in even_cuts(length, method.way.chunks))
    ]
    return lax.concatenate(parts, products[0].out.index(along))


def _gather_fwd(method: RingEinsum, products: Any, left: Left | Quantized, rights: Any) -> Any:
    if method.keeps:
        out, kept = _gather_and_keep(method, products, left, rights)
        return method.forward_first(out, (left, rights, kept))
    run = partial(gather_einsum, method.forward(), products)
    if method.left_to_jax:
        return jax.vjp(run, left, rights)
    return method.forward_first(run(left, rights), (left, rights, None))


def _gather_bwd(method: RingEinsum, products: tuple[Product, ...], residuals: Any, cts: Any) -> Any:
    if method.left_to_jax:
        return residuals(cts)
    left, rights, kept = residuals
    if kept is None:
        of_left, of_rights = _gradients(method, products, left, rights, tuple(cts))
    else:
        of_left, of_rights = _gradients_by_kept(method, products, left, rights, tuple(cts), kept)
    if isinstance(left, Quantized) and of_left is not None:  # as if nothing had been rounded
        of_left = replace(left, values=None, scales=None, exact=of_left)
    return of_left, of_rights


def _gradients(
    method: RingEinsum, products: tuple[Product, ...], left: Any, rights: Any, cts: Any
) -> Any:
    """Returns the gradients of a gather's operands; the left one is gathered once more."""
    method = method.derivative()
    for_left, for_rights = gradients_of_gather(products, left.dtype, [r.dtype for r in rights])
    of_rights = gather_einsum(method, for_rights, left, cts)
    if isinstance(left, Quantized) and left.exact is None:
        return None, of_rights
    return scatter_einsum(method, for_left, tuple(zip(cts, rights, strict=True))), of_rights


def _keep(method: RingEinsum, products: Any, left: Left | Quantized, rights: Any) -> Any:
    """A gather that returns what it brought, too, for its own derivative."""
    blocks: list[Array] = []
    results, scales = _gather_blocks(method, products, method.sent(left), rights, blocks)
    # The own block, which is used first, is kept anyway.
    return results, GatheredBlocks(blocks[1:] if method.way.keeps_own_first else blocks, scales)


def _keep_fwd(method: RingEinsum, products: Any, left: Any, rights: Any) -> Any:
    out, kept = _gather_and_keep(method, products, left, rights)
    return (out, kept), as_residuals((left, rights, kept))


def _keep_bwd(method: RingEinsum, products: Any, residuals: Any, cts: Any) -> Any:
    return _gather_bwd(method, products, residuals, cts[0])


def _by_kept(
    method: RingEinsum,
    products: tuple[Product, ...],
    left: Any,
    rights: Any,
    cts: Any,
    kept: GatheredBlocks,
) -> Any:
    """Returns the same of what was kept: the gradients of the right operands send nothing.

    They are made, a few blocks a turn, beside the transfers of the left one's.
    """
    for_left, for_rights = gradients_of_gather(products, left.dtype, [r.dtype for r in rights])
    own = left.values if isinstance(left, Quantized) else method.sent(left)
    blocks = [own, *kept.blocks] if method.way.keeps_own_first else kept.blocks
    steps = steps_of(method, for_rights, blocks, kept.scales, cts)
    back = method.derivative()
    if isinstance(left, Quantized) and left.exact is None:
        of_left, made = None, at_once(steps, back.way.ring.index())
    else:
        pairs = tuple(zip(cts, rights, strict=True))
        of_left, made = _scatter_beside(back, steps, for_left, pairs)
    results: Any = made
    return of_left, tuple(results)


def _by_kept_fwd(
    method: RingEinsum, products: Any, left: Any, rights: Any, cts: Any, kept: GatheredBlocks
) -> Any:
    return _gradients_by_kept(method, products, left, rights, cts, kept), as_residuals(
        (left, rights, cts)
    )


def _by_kept_bwd(method: RingEinsum, products: Any, residuals: Any, cts: Any) -> Any:
    # What was kept is a function of the left operand, and so everything goes on to that.
    _, gradients = jax.vjp(partial(_gradients, method.derivative(), products), *residuals)
    return *gradients(cts), None


def _scatter_fwd(method: RingEinsum, products: Any, pairs: Any) -> Any:
    run = partial(scatter_einsum, method.forward(), products)
    return jax.vjp(run, pairs) if method.left_to_jax else method.forward_first(run(pairs), pairs)


def _scatter_bwd(method: RingEinsum, products: tuple[Product, ...], residuals: Any, ct: Out) -> Any:
    if method.left_to_jax:
        return residuals(ct)
    pairs, method = residuals, method.derivative()
    gradients = gradients_of_scatter(products, [(left.dtype, right.dtype) for left, right in pairs])
    partners = tuple(x for left, right in pairs for x in (right, left))
    if method.low_bit:
        how = method.way.ring.low_bit_cotangents(ct.dtype)
        ct = straight_through(how, ct, products[0].out.index(method.label))
    grads: Any = gather_einsum(method, gradients, ct, partners)
    return (tuple(zip(grads[::2], grads[1::2], strict=True)),)


gather_einsum = with_derivative(_gather, _gather_fwd, _gather_bwd, statics=2)
_gather_and_keep = with_derivative(_keep, _keep_fwd, _keep_bwd, statics=2)
_gradients_by_kept = with_derivative(_by_kept, _by_kept_fwd, _by_kept_bwd, statics=2)
scatter_einsum = with_derivative(_scatter, _scatter_fwd, _scatter_bwd, statics=2)
