"""Weights that several arrays hold: packed numbers, their scales, vectors of channels.

Published formats differ in names and in the dimension along which numbers share a word. All parts
of a weight are sharded as the weight that they stand for.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from jaxpar.layout._paths import parts_of

Shape = tuple[int, ...]

# A weight's largest part, and the part without which the name means something else. "" is an array
# of no part's name.
LARGEST = {
    "blocks": "scales",
    "values": "scales",
    "qvalue": "scale",
    "data": "scale",
    "w_q": "zero",
    "q_weight": "q_groups",
    "packed": None,
    "qdata": None,
    "qweight": None,
    "": None,
}
PART = re.compile(
    r"_?(?:(?P<stem>.+?)_)??(?P<part>values|exact|blocks|data|packed|q(?:data|value|weight)|w_q"
    r"|q_(?:weight|groups|scale_max|(?:inv)?perm)|qzeros|zeros?|zero_points?|biases|shift|shape|format"
    r"|(?:(?:pre_quant|input|output|activation|act|[kvq])_)?(?:global_)?scales?(?:_inv|_2)?"
    r"|g_idx|perm|scb|(?:nested_)?(?:absmax|quant_map))"
)
SCALES = ("scales", "scale", "scale_inv")
# Vectors with an entry for each output, for each input, and others.
OF_OUTPUTS = (
    r"scb|.*magnitude.*|scales|(.*weight_)?scale_inv|.*weight_scale|output_scale|zero_points?"
    r"|vera_lambda_b"
)
OF_INPUTS = r"g_idx|(pre_quant|input|activation|act)_scale|perm|q_(inv)?perm"
OF_NEITHER = (
    r"(nested_)?quant_map|quant_state.*|shape|format|.*global_scale|scale_2|vera_lambda_d|lora_e|q_groups"
    r"|q_scale_max|extra_state"
)
PACKED = {"uint8": 2, "int32": 8, "uint32": 8}  # numbers of 4 bits in an entry


@dataclass(frozen=True)
class PartName:
    """A part's name, the path of its weight's largest part, and the weight's path in parts."""

    name: str
    largest: str
    weight: tuple[str, ...]


@lru_cache(maxsize=8)  # many problems share paths
def parts_in(paths: tuple[str, ...]) -> dict[str, PartName]:
    """Returns the parts of weights that several arrays, or packed ones, hold."""
    groups: dict[tuple[str, ...], list[PartName]] = defaultdict(list)
    for path in paths:
        key, part = _split(path)
        groups[key].append(part)
    parts: dict[str, PartName] = {}
    for group in groups.values():
        names = {part.name for part in group}
        for name, needs in LARGEST.items():
            largest = [part for part in group if part.name == name]
            if len(largest) == 1 and (needs is None or needs in names) and names != {""}:
                (first,) = largest
                others = [part for part in group if part.name not in LARGEST]
                for part in (first, *others):
                    parts[part.largest] = PartName(part.name, first.largest, first.weight)
                break
    return parts


def shares(path: str, dim: int, shapes: Mapping[str, Shape]) -> bool:
    """Returns whether an entry along a dimension is for several ones of a weight's largest part."""
    part = parts_in(tuple(shapes)).get(path)
    whole = shapes[part.largest] if part else ()
    return dim < len(whole) and shapes[path][dim] < whole[dim]


def _split(path: str) -> tuple[tuple[str, ...], PartName]:
    """Returns what the parts of a weight share, and a part whose own path is `largest`."""
    parts = weight = tuple(part.lower() for part in parts_of(path))
    name = ""
    if parts[-2:-1] == ("scale",) and parts[-1].isdigit():  # of a list
        parts = weight = parts[:-1]
    if "quant_state" in parts:
        weight, name = parts[: parts.index("quant_state")], "quant_state"
    elif match := PART.fullmatch(parts[-1]):
        weight, name = (*parts[:-1], match["stem"] or ""), match["part"]
        weight = weight if match["stem"] else weight[:-1] or ("",)  # the pytree is a weight
    *before, last = weight
    stem = re.sub(r"(?:^|_)(?:weight|kernel)$", "", last)
    key = (*before, stem) if stem else tuple(before)
    return key, PartName(name, path, parts if name in ("", "qweight") else weight)


@dataclass(frozen=True)
class Unpacked:
    """A weight behind its parts.

    Attributes:
      out: the output dimension, if the format fixes it.
      problem: why a block of its largest part is no block of the weight.
    """

    shape: Shape
    out: int | None = None
    problem: str | None = None


def unpacked(name: str, shape: Shape, dtype: Any, others: Mapping[str, Shape]) -> Unpacked:
    """Returns the weight behind its largest part, without dimensions of layers and experts."""
    match name:
        case "w_q" | "q_weight":
            made = "HQQ" if name == "w_q" else "ExLlamaV2"
            return Unpacked(shape, problem=f"is in the format of {made}, whose blocks mix rows")
        case _ if "absmax" in others or (str(dtype) in PACKED and shape[1:] == (1,)):
            return Unpacked(shape, problem="is a flat list of packed numbers, row after row")
        case "blocks" if len(shape) == 3:  # [out, in / numbers, bytes]
            return Unpacked((shape[0], 2 * shape[1] * shape[2]), 0)
        case "qweight" if len(shape) == 2 and PACKED.get(str(dtype)) == 8:
            return Unpacked(_of_words(shape, others), 1)
        case "values" | "qvalue":
            return Unpacked(shape)
        case _:
            per = PACKED.get(str(dtype), 2 if name == "qweight" else 1)
            return _of_bytes(name, shape, per, others)


def _of_words(shape: Shape, others: Mapping[str, Shape]) -> Shape:
    """Returns [in, out] of GPTQ's words [in / 8, out], or AWQ's [in, out / 8]."""
    rows, columns = shape
    scales, zeros = others.get("scales", shape), others.get("qzeros", ())
    if len(scales) == 2 and scales[1] > columns:
        return rows, scales[1]
    if len(order := others.get("g_idx", ())) == 1:
        return order[0], columns
    per = columns / zeros[1] if len(zeros) == 2 and zeros[1] else 8
    return round(rows * per), columns


def _of_bytes(name: str, shape: Shape, per: int, others: Mapping[str, Shape]) -> Unpacked:
    """Returns [out, in] of [out, in / per], or of [out / per, in] where scales show it."""
    if per == 1 or len(shape) != 2:
        return Unpacked(shape, 0 if name == "packed" else None)
    scales = next((others[s] for s in SCALES if len(others.get(s, ())) == 2), None)
    if scales is None and name != "packed":
        return Unpacked(shape, problem="may be packed, and no scales beside it show how")
    more = [dim for dim in (0, 1) if scales and scales[dim] > shape[dim]]
    fewer = [dim for dim in (0, 1) if scales and scales[dim] < shape[dim]]  # of groups of inputs
    dim = (more or fewer or [1])[-1]
    whole = tuple(n * (per if d == dim else 1) for d, n in enumerate(shape))
    return Unpacked(whole, 1 - fewer[0] if len(fewer) == 1 else 0)


def cut(weight: Shape, part: Shape, dim: int, devices: int) -> str | None:
    """Returns why a block of a weight along a dimension is no block of a part."""
    size, whole = part[dim], weight[dim]
    if devices == 1 or size in (1, whole):
        return None
    blocks = f"has {size} blocks for {whole} entries along dimension {dim}"
    if whole % size and not 32 * size % whole:  # 3 words hold 32 numbers of 3 bits
        wrong = whole % devices or whole // devices % 32
    else:
        # The last of several blocks of 128 may be shorter.
        wrong = whole % size or (whole != 128 * size and -(-whole // 128) == size)
        wrong = wrong or size % devices
    return f"{blocks}, of which {devices} devices would cut one" if wrong else None


def side_of(names: Iterable[str]) -> str | None:
    """Returns what the entries of a vector beside a weight belong to, if its name tells."""
    sides = {"outputs": OF_OUTPUTS, "inputs": OF_INPUTS, "neither": OF_NEITHER}
    for name in names:
        for side, pattern in sides.items():
            if re.fullmatch(pattern, name.lstrip("_")):
                return side
    return None
