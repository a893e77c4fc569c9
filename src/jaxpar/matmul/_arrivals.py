"""Multiplies arriving blocks by their partners, and places or adds the products."""

from __future__ import annotations

from functools import partial
from math import prod
from typing import TYPE_CHECKING, Any

import jax
from jax import Array, lax

from jaxpar.axis.quantized import Quantized
from jaxpar.matmul._product import Left, Out, Product, Right, multiply, sizes_of, unused_label
from jaxpar.matmul._ring_einsum import RingEinsum
from jaxpar.ring.cuts import join_dims, split_dim
from jaxpar.ring.seconds import joining_is_cheaper
from jaxpar.ring.ways import Arrivals, Positions

if TYPE_CHECKING:
    from jaxpar.ring.scales import Scales


def take_partners(
    method: RingEinsum,
    products: tuple[Product, ...],
    rights: tuple[Array, ...],
    scales: Scales | None,
    positions: Positions,
) -> tuple[Any, list[Array]]:
    return None if scales is None else scales.at(positions), [
        cut_operand(method.label, right, p.right, positions)
        for p, right in zip(products, rights, strict=True)
    ]


def use_arrivals(
    method: RingEinsum,
    products: tuple[Product, ...],
    results: list[Any] | None,
    arrivals: Arrivals,
    whole: int,
    *,
    joined: bool = False,
) -> list[Any]:
    """Multiplies blocks by their partners, and places or adds the results.

    `whole` is the label's full length. `joined` always joins blocks that are added.
    """
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
        _use_blocks(method, product, result, use, whole, joined)
        for product, result, use in zip(products, results, uses, strict=True)
    ]


def _use_blocks(
    method: RingEinsum,
    product: Product,
    result: Out | None,
    arrivals: list[tuple[Any, Array, Positions]],  # blocks of different rings may differ in size
    whole: int,
    joined: bool,
) -> Out:
    label = method.label
    if label in product.out:  # each block gives a part of the result
        for block, right, positions in arrivals:
            part = multiply_part(
                method, product, block, right, product.dtype, blocks=positions.blocks
            )
            result = positions.place(result, part, product.out.index(label), whole)
    else:
        blocks, rights = [b for b, _, _ in arrivals], [r for _, r, _ in arrivals]
        apart = arrivals[0][2].blocks  # n for a comb, whose positions lie in all blocks
        dims = product.left.index(label), product.right.index(label)
        sizes = sizes_of(product, blocks[0], rights[0])
        sums = 4 * prod(sizes[name] for name in product.out)  # bytes of float32
        if len(blocks) > 1 and (joined or joining_is_cheaper(sizes[label], sums)):
            blocks, rights = [_joined(blocks, dims[0])], [lax.concatenate(rights, dims[1])]
            apart = 1  # joined blocks are contiguous
        for block, right in zip(blocks, rights, strict=True):
            # A matmul of the full length rounds its result. Partial sums are rounded at the end.
            dtype = product.dtype if block.shape[dims[0]] == whole else None
            part = multiply_part(method, product, block, right, dtype, blocks=apart)
            result = part if result is None else result + part  # fused into the matmul on TPUs
    assert result is not None
    return result


def _joined(blocks: list[Any], dim: int) -> Any:
    if isinstance(blocks[0], Quantized):
        from jaxpar.ring.scales import join

        return join(blocks, dim)
    return lax.concatenate(blocks, dim)


def multiply_part(
    method: RingEinsum,
    product: Product,
    left: Left | Quantized,
    right: Right,
    dtype: Any = None,
    *,
    blocks: int = 1,
) -> Out:
    """Computes a product for a part of the ring's label."""
    # Several `blocks` become a dimension of their own.
    if blocks == 1:
        return multiply(method.arithmetic, product, left, right, dtype)
    label, texts = method.label, (product.left, product.right, product.out)
    block = unused_label(*texts)  # "ak,kn->an", cut along a: "Aak,kn->Aan"
    apart: list[Any] = [
        jax.tree.map(partial(split_dim, dim=labels.index(label), parts=blocks), x)
        if label in labels
        else x
        for x, labels in ((left, product.left), (right, product.right))
    ]
    of_left, of_right, of_out = (labels.replace(label, block + label) for labels in texts)
    product_apart = Product(of_left, of_right, of_out, product.dtype)
    # Round before the dimensions are joined: only then XLA fuses the matmul with the placing.
    out = multiply(method.arithmetic, product_apart, apart[0], apart[1], dtype)
    return join_dims(out, product.out.index(label)) if label in product.out else out


def cut_operand(label: str, x: Array, labels: str, positions: Positions) -> Array:
    """Cuts these positions, if the operand has the label."""
    return positions.cut(x, labels.index(label)) if label in labels else x
