"""The labels of ring einsums and matmuls."""

from collections import Counter
from dataclasses import dataclass

from jaxpar.arguments.calls import type_error, value_error
from jaxpar.axis.axis import Ring
from jaxpar.axis.quantized import MaybeQuantized


@dataclass(frozen=True)
class Labels:
    """The labels of operands and result, a letter each dimension."""

    lhs: str
    rhs: str
    out: str

    def __str__(self) -> str:
        return f"{self.lhs},{self.rhs}->{self.out}"


def parse_labels(subscripts: str) -> Labels:
    text = subscripts.replace(" ", "")
    inputs, arrow, out = text.partition("->")
    operands = inputs.split(",")
    if not arrow or len(operands) != 2 or not all(s.isalpha() or not s for s in (*operands, out)):
        raise value_error(
            f"subscripts {subscripts!r} must spell two operands and the result with "
            "one letter a dimension, as in 'bmk,kn->bmn'; write out an ellipsis"
        )
    labels = Labels(operands[0], operands[1], out)
    for name, letters in (("lhs", labels.lhs), ("rhs", labels.rhs), ("the result", out)):
        repeated = [label for label, count in Counter(letters).items() if count > 1]
        if repeated:
            raise value_error(
                f"subscripts {subscripts!r} repeat {repeated[0]!r} in {name}; "
                "take the diagonal before the call"
            )
    counts = Counter(labels.lhs + labels.rhs + out)
    single = [label for label, count in counts.items() if count == 1]
    if single:
        raise value_error(
            f"subscripts {subscripts!r} have {single[0]!r} only once, but each label "
            "must be in two of lhs, rhs and the result; sum over it before the call, or broadcast "
            "after it"
        )
    return labels


def matmul_labels(lhs: MaybeQuantized, *weights: MaybeQuantized) -> Labels:
    """Returns the labels of `lhs [..., k] @ rhs [k, n]`, or raises."""
    if lhs.ndim < 1:
        raise value_error("lhs must be [..., k], got a local array without dimensions")
    for rhs in weights:
        if rhs.ndim != 2:
            raise value_error(
                f"rhs must be [k, n], got local shape {rhs.shape} with {rhs.ndim} "
                "dimensions; reshape it, or use collective_einsum"
            )
    rows = "abcdefghijlmopqrstuvwxyz"[: lhs.ndim - 1]
    return Labels(rows + "k", "kn", rows + "n")


def check_ranks(labels: Labels, lhs: MaybeQuantized, rhs: MaybeQuantized) -> None:
    for name, x, letters in (("lhs", lhs, labels.lhs), ("rhs", rhs, labels.rhs)):
        if x.ndim != len(letters):
            raise value_error(
                f"{name} has local shape {x.shape}, {x.ndim} dimensions, but must have a "
                f"dimension for each of {len(letters)} labels of '{labels}'"
            )


def local_sizes(
    labels: Labels,
    lhs: MaybeQuantized,
    rhs: MaybeQuantized,
    ring: Ring,
    gathered: tuple[str, str] | None = None,
) -> dict[str, int]:
    """Returns each label's size, or raises; the `gathered` (operand, label) is full."""
    check_ranks(labels, lhs, rhs)
    if lhs.dtype != rhs.dtype:
        where = ""
        if gathered is not None and ring.gather_dtype is not None:
            where = f", where {gathered[0]} is as gather_dtype says"
        raise type_error(
            f"lhs is {lhs.dtype}{list(lhs.shape)} and rhs is "
            f"{rhs.dtype}{list(rhs.shape)}{where}; cast one of them with .astype, and choose the "
            "dtype of the result with preferred_element_type"
        )
    if lhs.dtype == bool:
        raise type_error(
            f"lhs and rhs are bool{list(lhs.shape)} and bool{list(rhs.shape)}, which have no sums; "
            "cast them to int8 to count, with .astype"
        )
    sizes: dict[str, int] = {}
    for name, x, letters in (("lhs", lhs, labels.lhs), ("rhs", rhs, labels.rhs)):
        for dim, label in enumerate(letters):
            size = x.shape[dim] * (ring.size if (name, label) == gathered else 1)
            if sizes.setdefault(label, size) != size:  # contracted, or on both sides
                raise value_error(_size_mismatch(labels, lhs, rhs, ring, label, gathered))
    return sizes


def _size_mismatch(
    labels: Labels,
    lhs: MaybeQuantized,
    rhs: MaybeQuantized,
    ring: Ring,
    label: str,
    gathered: tuple[str, str] | None,
) -> str:
    left, right = labels.lhs.index(label), labels.rhs.index(label)
    texts = {"lhs": str(lhs.shape[left]), "rhs": str(rhs.shape[right])}
    remedy = f"they must be equal; if one is a shard over {ring}, gather that operand along it"
    if gathered is not None and gathered[1] == label:
        operand = gathered[0]
        whole = (lhs.shape[left] if operand == "lhs" else rhs.shape[right]) * ring.size
        texts[operand] += f" x {ring.size} = {whole} when gathered over {ring}"
        remedy = f"{operand} must be 1/{ring.size} of the other along it"
    return (
        f"lhs has local shape {lhs.shape} and rhs {rhs.shape}, but label {label!r} of "
        f"'{labels}' is dimension {left} of lhs, {texts['lhs']}, and dimension {right} of rhs, "
        f"{texts['rhs']}; {remedy}"
    )
