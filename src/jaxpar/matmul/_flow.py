"""What a matmul over a ring does and sends, as the cost model sees it."""

from collections.abc import Sequence
from dataclasses import replace
from math import prod

from jaxpar.collectives._cost_model import Flow, FlowKind
from jaxpar.matmul._product import Product


def flow_of(
    kind: FlowKind,
    label: str,
    size: int,
    products: Sequence[Product],
    sizes: Sequence[dict[str, int]],
    width: int,
    wire: int,
) -> Flow:
    """Returns what a device does for products, and what it sends.

    Of a gather the left operand travels, which is the same in all products; of a scatter their sum.

    Args:
      kind: which of them.
      label: that is sharded over the ring.
      size: of the ring.
      products: one or more.
      sizes: by label, of the whole, for each product.
      width: bytes of a number.
      wire: bytes of one that travels.
    """
    moving = products[0].left if kind == "gather" else products[0].out
    block = prod(sizes[0][name] for name in moving) // size * wire

    def cut_along(cut: str) -> Flow:
        whole, shared, sums, minor, sliced, partners, exchanged = 0, 0, 0, 0, 0, 0, 0
        for product, numbers_of in zip(products, sizes, strict=True):
            operands = (product.left, product.right)
            for labels in (*operands, product.out):
                numbers = prod(numbers_of[name] for name in labels)
                travels = kind == "gather" and labels is product.left
                if cut in labels:
                    shared += numbers * width
                    last = 0 if travels or not labels.endswith(cut) else numbers * width
                    minor += last if cut == label else 0
                    sliced += 0 if labels is product.out else last
                elif labels in operands:
                    whole += numbers * width
                else:
                    sums += numbers * 4
                if kind == "gather" and not travels:
                    exchanged += numbers * width if label in labels else 0
                    partners += 0 if label in labels else numbers * width
        flops = sum(2.0 * prod(numbers_of.values()) for numbers_of in sizes)
        read = (whole, shared, sums, minor, sliced, partners, exchanged)
        return Flow(kind, flops, block, *read, along=cut)

    others = moving.replace(label, "")
    return replace(cut_along(label), across=tuple(map(cut_along, others)))
