"""What a collective sends: which one an instruction is, its bytes, and the links it takes."""

from dataclasses import dataclass
from math import prod

from jax.sharding import Mesh

from jaxpar.schedule._assumed import Assumed, share
from jaxpar.schedule._hlo import COLLECTIVES, Computation, Instruction, Module
from jaxpar.schedule._links import Links, Route, lane_of, lane_of_groups


@dataclass(frozen=True)
class Message:
    """A collective of one device."""

    row: str  # where the timeline shows it
    sent: float  # bytes that one device sends
    size: float  # bytes of which `route` gives the cost of one
    route: Route


def collective_in(module: Module, i: Instruction) -> Instruction | None:
    """The collective that an instruction is, or has inside it; None without one."""
    if i.opcode.removesuffix("-start") in COLLECTIVES:
        return i
    if i.opcode not in ("fusion", "async-start", "call-start"):
        return None
    return next((x for x in module.reached(i) if x.opcode in COLLECTIVES), None)


def has_call(module: Module, i: Instruction, call: str) -> bool:
    """Whether an instruction is a fusion with a custom call of this name."""
    return i.opcode == "fusion" and any(f'"{call}"' in x.attributes for x in module.reached(i))


def message_of(
    module: Module,
    mesh: Mesh,
    links: Links,
    computation: Computation,
    i: Instruction,
    inner: Instruction,
    assumed: Assumed,
) -> Message:
    """What instruction `i` sends, whose collective is `inner`."""
    kind = inner.opcode.removesuffix("-start")
    if kind == "ragged-all-to-all":
        payload = _ragged_payload(module, inner, assumed)
    else:
        payload = _payload(computation, i)
    if kind == "collective-permute":
        row = lane_of(mesh, inner.pairs)
        return Message(row, payload, payload, links.permute(inner.pairs))
    if kind == "all-reduce" and i is not inner and i.bytes < payload:
        kind = "reduce-scatter"  # what TPU makes of it: a fusion of all-reduce and slice
    groups = inner.groups(links.devices)
    size = len(groups[0])
    row = f"{lane_of_groups(mesh, groups)} {kind}"
    if kind in ("all-to-all", "ragged-all-to-all"):
        return Message(row, payload * (size - 1) / size, payload, links.all_to_all(groups))
    whole = payload * size if kind == "all-gather" else payload
    passes = 2 if kind == "all-reduce" else 1
    sent = passes * whole * (size - 1) / size
    # Both directions of one axis, and of more axes where the compiler speaks of more colours.
    ways = max(2, int(_after(i.attributes, "colors:") or 2)) if links.chip.torus else 1
    share = passes * (size - 1) / size / ways
    return Message(row, sent, whole, links.ring(groups, share, passes / min(ways, 2)))


def _ragged_payload(module: Module, inner: Instruction, assumed: Assumed) -> float:
    """Bytes of the rows that a ragged all-to-all takes from its first operand.

    The second one is only what they are written over. Where in its operand a slice begins and
    how long it is are data: all rows travel, or as many as is assumed.
    """
    place = next(c for c in module.computations.values() if c.by_name.get(inner.name) is inner)
    operand = place.by_name[inner.operands[0]]
    rows = operand.arrays[0].shape[0]
    return operand.bytes * share(rows, assumed.sent_rows)


def _payload(computation: Computation, i: Instruction) -> float:
    """Bytes of what a collective takes from one device."""
    by_name = computation.by_name
    operands = [by_name[name] for name in i.operands if name in by_name]
    operands = [operand for operand in operands if operand.opcode != "call-start"]
    if sizes := _after(i.attributes, "slice_sizes={{"):
        first = operands[0].arrays[0]
        width = first.bytes / max(prod(first.shape), 1)
        return prod(int(n) for n in sizes.split(",")) * width
    if "collective-permute" in i.opcode:  # further operands say where in a buffer it lands
        operands = operands[:1]
    return float(sum(operand.bytes for operand in operands))


def _after(text: str, key: str) -> str:
    _, _, rest = text.partition(key)
    end = next((n for n, c in enumerate(rest) if not (c.isdigit() or c == ",")), len(rest))
    return rest[:end].rstrip(",")
