"""Chunked modes that cut another label than the ring's, with a collective for each chunk."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
from jax import Array, lax
from jaxtyping import Num

from jaxpar.arguments.dtypes import bits_of
from jaxpar.axis.quantized import Quantized
from jaxpar.matmul._arrivals import cut_operand
from jaxpar.matmul._product import Left, Out, Product, partial_dtype, sizes_of
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.matmul._work import flow_of
from jaxpar.ring.cuts import Span, even_cuts
from jaxpar.ring.naive import Naive
from jaxpar.ring.seconds import FlowKind


def _label_of_chunks(
    method: RingEinsum,
    kind: FlowKind,
    products: Sequence[Product],
    pairs: Sequence[tuple[Array, Array]],
    chunks: int,
) -> str:
    ring, width = method.way.ring, bits_of(pairs[0][0].dtype)
    sizes: list[dict[str, int]] = []
    for p, (left, right) in zip(products, pairs, strict=True):
        sizes.append(sizes_of(p, left, right))
        if kind == "gather":
            sizes[-1][method.label] = left.shape[p.left.index(method.label)] * ring.size
    flow = flow_of(kind, method.label, ring.size, products, sizes, width, width)
    return flow.in_chunks(chunks).along


def _at_once(method: RingEinsum) -> RingEinsum:
    way = Naive(method.way.ring)
    return replace(method, way=way, backward=way, underived=way)


def gather_across(
    run: Callable[..., tuple[Array, ...]],
    method: RingEinsum,
    chunks: int,
    products: tuple[Product, ...],
    left: Left | Quantized,
    rights: tuple[Num[Array, "..."], ...],
) -> tuple[Num[Array, "..."], ...] | None:
    """Gathers in chunks of another label, unless the ring's costs less."""
    if isinstance(left, Quantized):
        return None
    pairs = [(left, right) for right in rights]
    along = _label_of_chunks(method, "gather", products, pairs, chunks)
    if along == method.label:
        return None
    # Rows are sharded: [m/n, k] and [k, c]. A chunk of k is a matmul of all rows, and its result
    # is added. A chunk of a batch or of c is placed. Both gather contiguous rows. A chunk of the
    # rows themselves would arrive as n pieces.
    once, run = _at_once(method), jax.named_scope(method.way.mode)(run)
    length = left.shape[products[0].left.index(along)]
    wide = [
        p if along in p.out else replace(p, dtype=partial_dtype(method.arithmetic, left, right))
        for p, right in zip(products, rights, strict=True)
    ]
    results: list[Any] = [None] * len(products)
    for start, size in even_cuts(length, chunks):
        chunk = Span(start, size)
        parts = run(
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


def scatter_across(
    run: Callable[..., Out],
    method: RingEinsum,
    chunks: int,
    products: tuple[Product, ...],
    pairs: tuple[tuple[Array, Array], ...],
) -> Out | None:
    along = _label_of_chunks(method, "scatter", products, pairs, chunks)
    if along == method.label:
        return None
    once, run = _at_once(method), jax.named_scope(method.way.mode)(run)
    length = sizes_of(products[0], *pairs[0])[along]
    parts = [
        run(
            once,
            products,
            tuple(
                (cut_operand(along, left, p.left, chunk), cut_operand(along, right, p.right, chunk))
                for p, (left, right) in zip(products, pairs, strict=True)
            ),
        )
        for chunk in (Span(*cut) for cut in even_cuts(length, chunks))
    ]
    return lax.concatenate(parts, products[0].out.index(along))
