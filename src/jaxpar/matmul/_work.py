"""A matmul's work and transfers, for the cost model."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from jaxpar.matmul._product import Product, flops_of
from jaxpar.ring.seconds import LANES, Flow, FlowKind


def flow_of(
    kind: FlowKind,
    label: str,
    size: int,
    products: Sequence[Product],
    sizes: Sequence[dict[str, int]],
    width: int,
    wire: int,
    *,
    quantized: bool = False,
) -> Flow:
    """Returns a device's work and transfers for products with these full `sizes`.

    `width` and `wire` are bits of a number, the latter in transfer.
    """
    moving = products[0].left if kind == "gather" else products[0].out
    block = prod(sizes[0][name] for name in moving) // size * wire // 8  # bytes of a block

    def cut_along(along: str) -> Flow:
        whole, shared, sums, minor, cut, sliced, partners, exchanged, unaligned = (0,) * 9
        for product, numbers_of in zip(products, sizes, strict=True):
            for role in ("left", "right", "out"):
                labels = getattr(product, role)
                numbers = prod(numbers_of[name] for name in labels)
                nbytes = numbers * width // 8
                travels = kind == "gather" and role == "left"
                stays = role != "out" and not travels  # read on this device
                if along in labels:
                    shared += nbytes  # each piece uses its own part
                    cut += nbytes if stays else 0
                    last = not travels and labels.endswith(along)
                    minor += nbytes if last and along == label else 0
                    apart = numbers_of[labels[-1]] % LANES or moving.endswith(along)
                    placed = kind == "gather" and role == "out" and not last
                    unaligned += nbytes if placed and apart else 0
                    sliced += nbytes if last and stays else 0
                elif role == "out":
                    sums += numbers * 4  # float32
                else:
                    whole += nbytes  # each piece reads all of it
                if kind == "gather" and not travels:
                    exchanged += nbytes if label in labels else 0
                    partners += 0 if label in labels else nbytes
        flops = flops_of(sizes)
        read = (whole, shared, sums, minor, cut, sliced, partners, exchanged, unaligned)
        return Flow(kind, flops, block, *read, quantized, along=along, length=sizes[0][along])

    others = "" if quantized else moving.replace(label, "")  # scales are cut along the ring's label
    return replace(cut_along(label), across=tuple(map(cut_along, others)))
