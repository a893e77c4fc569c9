"""The two ring einsums, each the other's derivative: gather an operand, or scatter the result.

Both take several products at once. A gather feeds one travelling operand to every product; a
scatter sums all products into one travelling result. The derivative of a gather is one scatter (for
the travelling operand, over all its products) and one gather (for all the others); the derivative
of a scatter is one gather of the cotangent, which feeds the gradients of all operands. So one pair
of custom_vjp functions is closed under differentiation, and residuals are the operands as they
came in: shards. Where both passes are naive the derivative is JAX's own, which keeps the gathered
operand and does not gather it again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
from jax import Array, lax
from jaxtyping import Num

from jaxpar._derivatives import with_derivative
from jaxpar._quantized import Quantized, exact_of, straight_through
from jaxpar.collectives._choice import joining_is_cheaper
from jaxpar.collectives._cost_model import FlowKind
from jaxpar.collectives._parts import Span, even_cuts, join_dims, split_dim
from jaxpar.collectives._scales import gather_scales, join
from jaxpar.collectives._ways import Arrivals, Naive, Positions, Way
from jaxpar.matmul._flow import flow_of
from jaxpar.matmul._product import (
    Arithmetic,
    Left,
    Out,
    Product,
    Right,
    gradients_of_gather,
    gradients_of_scatter,
    multiply,
    partial_dtype,
    sizes_of,
)
from jaxpar.matmul._stationary import return_result, send_partner, unused_label, with_devices


@dataclass(frozen=True)
class RingEinsum:
    """How a ring einsum runs.

    Attributes:
      way: forward, where a derivative is taken.
      backward: in the derivative.
      underived: where none is taken: what a naive forward pass keeps is then of no use.
    """

    way: Way
    backward: Way
    underived: Way
    label: str  # the einsum label that is sharded over the ring
    arithmetic: Arithmetic
    # Runs again in the backward pass, within jax.checkpoint, where the result itself is dead code.
    # XLA would drop it though residuals wait for it, but schedules transfers worse, and what is
    # counted in the jaxpr would have it.
    recomputed: bool = False
    # Something that is gathered is quantized, which JAX's own derivative takes for constant.
    low_bit: bool = False

    @property
    def derived_by_jax(self) -> bool:
        """Whether JAX's own derivatives are left as they are."""
        return self.kept and self.underived.derived_by_jax

    @property
    def kept(self) -> bool:
        """Whether the derivative is JAX's own, for which the gathered operand is kept."""
        return self.way.derived_by_jax and self.way == self.backward and not self.low_bit

    def forward(self) -> RingEinsum:
        """How the einsum runs where a derivative is taken."""
        return replace(self, underived=self.way)

    def derivative(self) -> RingEinsum:
        """How the einsums of the derivative run."""
        return replace(self, way=self.backward, underived=self.backward)

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        """Returns both, the residuals not before the result, unless nobody waits for that."""
        if self.recomputed:
            return out, residuals
        for way in dict.fromkeys((self.way, self.backward)):
            out, residuals = way.forward_first(out, residuals)
        return out, residuals


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
    method = replace(method, way=method.underived)
    if method.way.stays and all(x.size for x in (left, *rights)):
        return tuple(
            _stay(method, p, exact_of(left), right)
            for p, right in zip(products, rights, strict=True)
        )
    dim = products[0].left.index(method.label)
    whole = left.shape[dim] * method.way.ring.size
    scales = None
    if isinstance(left, Quantized):
        (left,), (scales,) = gather_scales(method.way.ring.names, [left], dim)
    elif method.way.chunks > 1:
        along = _cut_label(method, "gather", products, [(left, r) for r in rights])
        if along != method.label:
            with jax.named_scope(method.way.mode):
                return _gather_across(method, along, products, left, rights)

    def take(positions: Positions) -> tuple[Any, list[Array]]:
        return None if scales is None else scales.at(positions), [
            _cut(method.label, right, p.right, positions)
            for p, right in zip(products, rights, strict=True)
        ]

    def consume(results: list[Any] | None, arrivals: Arrivals) -> list[Any]:
        results = [None] * len(products) if results is None else results
        blocks = [
            block if scale is None else Quantized(block, scale) for block, _, (scale, _) in arrivals
        ]
        uses = [
            [
                (block, taken[number], positions)
                for block, (_, positions, (_, taken)) in zip(blocks, arrivals, strict=True)
            ]
            for number in range(len(products))
        ]
        return [
            _use_blocks(method, product, result, use, whole)
            for product, result, use in zip(products, results, uses, strict=True)
        ]

    def sums(results: list[Array]) -> list[Array]:
        return [r for r, p in zip(results, products, strict=True) if method.label not in p.out]

    def finish(results: list[Array]) -> list[Array]:
        return [r.astype(p.dtype) for r, p in zip(results, products, strict=True)]

    adds = any(method.label not in p.out for p in products)
    results = method.way.gather(
        left, consume, take=take, dim=dim, sums=sums if adds else None, finish=finish
    )
    return tuple(results)


def _stay(method: RingEinsum, product: Product, left: Left, right: Right) -> Out:
    """Computes one product of a gather, `left` staying where it is."""
    ring, label = method.way.ring, method.label
    dims = [x.index(label) if label in x else None for x in (product.right, product.out)]
    device = unused_label(product.left, product.right)
    right_apart, out_apart = (with_devices(x, label, device) for x in (product.right, product.out))
    apart = Product(product.left, right_apart, out_apart, product.dtype)
    # Results travel as they are; addends of them, where the label is none of theirs, as sums do.
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

    method = replace(method, way=method.underived)
    if method.way.chunks > 1:
        along = _cut_label(method, "scatter", products, pairs)
        if along != method.label:
            with jax.named_scope(method.way.mode):
                return _scatter_across(method, along, products, pairs)

    def take(positions: Positions) -> list[tuple[Array, Array]]:
        return [
            (
                _cut(method.label, left, p.left, positions),
                _cut(method.label, right, p.right, positions),
            )
            for p, (left, right) in zip(products, pairs, strict=True)
        ]

    # One product of which nothing is added on this device is rounded as it travels.
    alone = len(products) == 1 and not method.way.adds
    dtype = method.way.ring.wire(products[0].dtype) if alone else None

    def produce(taken: list[tuple[Array, Array]]) -> Out:
        parts = [
            _multiply_part(method, p, left, right, dtype)
            for p, (left, right) in zip(products, taken, strict=True)
        ]
        return sum(parts[1:], start=parts[0])

    # All products have the result's labels, and so any of them knows its shape.
    first, sizes = products[0], sizes_of(products[0], *pairs[0])
    return method.way.scatter(
        produce,
        take,
        dim=first.out.index(method.label),
        length=sizes[method.label] // method.way.ring.size,
        dtype=first.dtype,
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
            _cut(along, left, products[0].left, chunk),
            tuple(_cut(along, r, p.right, chunk) for p, r in zip(products, rights, strict=True)),
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
                (_cut(along, left, p.left, chunk), _cut(along, right, p.right, chunk))
                for p, (left, right) in zip(products, pairs, strict=True)
            ),
        )
        for chunk in (Span(*cut) for cut in even_cuts(length, method.way.chunks))
    ]
    return lax.concatenate(parts, products[0].out.index(along))


def _gather_fwd(method: RingEinsum, products: Any, left: Left | Quantized, rights: Any) -> Any:
    run = partial(gather_einsum, method.forward(), products)
    if method.kept:
        return jax.vjp(run, left, rights)
    return method.forward_first(run(left, rights), (left, rights))


def _gather_bwd(method: RingEinsum, products: tuple[Product, ...], residuals: Any, cts: Any) -> Any:
    if method.kept:
        return residuals(cts)
    left, rights = residuals
    method = method.derivative()
    for_left, for_rights = gradients_of_gather(products, left.dtype, [r.dtype for r in rights])
    gradients = gather_einsum(method, for_rights, left, tuple(cts))
    if isinstance(left, Quantized) and left.exact is None:
        return None, gradients
    of_left: Any = scatter_einsum(method, for_left, tuple(zip(cts, rights, strict=True)))
    if isinstance(left, Quantized):  # as if nothing had been rounded
        of_left = replace(left, values=None, scales=None, exact=of_left)
    return of_left, gradients


def _scatter_fwd(method: RingEinsum, products: Any, pairs: Any) -> Any:
    run = partial(scatter_einsum, method.forward(), products)
    return jax.vjp(run, pairs) if method.kept else method.forward_first(run(pairs), pairs)


def _scatter_bwd(method: RingEinsum, products: tuple[Product, ...], residuals: Any, ct: Out) -> Any:
    if method.kept:
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
scatter_einsum = with_derivative(_scatter, _scatter_fwd, _scatter_bwd, statics=2)


def _multiply_part(
    method: RingEinsum,
    product: Product,
    left: Left | Quantized,
    right: Right,
    dtype: Any = None,
) -> Out:
    """Computes one product of a part of the positions of the ring's label.

    It is of `dtype`, or of that of partial sums.
    """
    if method.way.chunks == 1:
        return multiply(method.arithmetic, product, left, right, dtype)
    # The positions are a comb: blocks are a dimension of their own.
    label, texts = method.label, (product.left, product.right, product.out)
    block = unused_label(*texts)
    apart: list[Any] = [
        jax.tree.map(partial(split_dim, dim=labels.index(label), parts=method.way.ring.size), x)
        if label in labels
        else x
        for x, labels in ((left, product.left), (right, product.right))
    ]
    of_left, of_right, of_out = (labels.replace(label, block + label) for labels in texts)
    product_apart = Product(of_left, of_right, of_out, product.dtype)
    # Rounded before the dimensions are joined: after it, placing is no part of the matmul.
    out = multiply(method.arithmetic, product_apart, apart[0], apart[1], dtype)
    return join_dims(out, product.out.index(label)) if label in product.out else out


def _cut(label: str, x: Array, labels: str, positions: Positions) -> Array:
    """Returns these positions of an operand that has the label, all of any other."""
    return positions.cut(x, labels.index(label)) if label in labels else x


def _use_blocks(
    method: RingEinsum,
    product: Product,
    result: Out | None,
    arrivals: list[tuple[Any, Array, Positions]],  # blocks of a ring's share, which may differ
    whole: int,
) -> Out:
    """Multiplies blocks by their partners, and places or adds what they give."""
    label = method.label
    if label in product.out:
        for block, right, positions in arrivals:
            part = _multiply_part(method, product, block, right, product.dtype)
            result = positions.place(result, part, product.out.index(label), whole)
    else:
        blocks, rights = [b for b, _, _ in arrivals], [r for _, r, _ in arrivals]
        dims = product.left.index(label), product.right.index(label)
        if len(blocks) > 1 and joining_is_cheaper(blocks[0].shape[dims[0]]):
            blocks, rights = [join(blocks, dims[0])], [lax.concatenate(rights, dims[1])]
        for block, right in zip(blocks, rights, strict=True):
            # The whole at once is rounded by the matmul; sums are, when they are finished.
            dtype = product.dtype if block.shape[dims[0]] == whole else None
            part = _multiply_part(method, product, block, right, dtype)
            result = part if result is None else result + part
    assert result is not None
    return result
