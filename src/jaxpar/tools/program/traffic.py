"""Bytes that an instruction reads and writes."""

from collections.abc import Iterator
from math import prod

from jaxpar.tools.program.hlo import Computation, Instruction

_SLICES = ("dynamic-slice", "gather", "slice")
_UPDATES = ("dynamic-update-slice", "scatter")
_ALIKE = ("convert", "copy", "transpose")  # each number comes from one number
_IN_PLACE = "output_to_operand_aliasing={{}: (0, {})}"  # of a fusion whose result is its operand
_HBM = 0  # HLO's number of the memory


def moved_by(i: Instruction) -> tuple[int, int, int]:
    """Returns bytes moved, bytes in VMEM, and numbers."""
    moved = in_vmem = elements = 0.0
    for x, size in (*zip(i.operands, _read(i), strict=True), (i, _written(i))):
        share = size / max(sum(array.bytes for array in x.results), 1)
        moved += size
        # Single numbers are in scalar memory.
        near = (array for array in x.results if array.memory != _HBM or not array.shape)
        in_vmem += share * sum(array.bytes for array in near)
        elements += share * sum(prod(array.shape) for array in x.results)
    return max(0, int(moved)), max(0, int(in_vmem)), max(0, int(elements))


def _read(i: Instruction) -> list[int]:
    """Returns bytes read; of slices the used part."""
    read, kind = [operand.bytes for operand in i.operands], i.opcode.removesuffix("-start")
    if kind in _SLICES:
        read[0] = min(read[0], _made(i))
    elif kind in _UPDATES:
        read[: _buffers(i)] = [0] * _buffers(i)
    elif kind == "fusion":
        inner, results = i.called[0], frozenset(_results(i))
        for number, parameter in inner.parameters.items():
            taken = _taken(inner, parameter, results)
            if taken is not None and number < len(read):
                read[number] = min(read[number], taken)
    return read


def _written(i: Instruction) -> int:
    """Returns bytes written; of updates, only the update."""
    return sum(
        _updates(x) if x.opcode.removesuffix("-start") in _UPDATES else _made(x)
        for x in _results(i)
    )


def _made(i: Instruction) -> int:
    return sum(array.bytes for array in i.results)


def _buffers(i: Instruction) -> int:
    return 1 if "dynamic-update-slice" in i.opcode else len(i.operands) // 2


def _updates(i: Instruction) -> int:
    if "dynamic-update-slice" in i.opcode:
        return i.operands[1].bytes
    # A scatter changes no more than its buffers, and reads only what it combines with updates.
    number = _buffers(i)
    buffers, updates = i.operands[:number], i.operands[number + 1 :]
    changed = min(sum(x.bytes for x in arrays) for arrays in (buffers, updates))
    return (2 if _combines(i, number) else 1) * changed


def _combines(scatter: Instruction, buffers: int) -> bool:
    """Returns whether old values are read; also where the text does not say how they are used."""
    for combiner in scatter.called:
        before = {combiner.parameters[place] for place in range(buffers)}
        return any(before & {*x.operands} for x in combiner.instructions)
    return True


def _results(i: Instruction, around: tuple[Instruction, ...] = ()) -> Iterator[Instruction]:
    """Yields the results' makers, also inside fusions.

    Of an update in a fusion, also the maker of what it updates, unless an operand is updated.
    """
    if around and (i.opcode == "tuple" or _is_a_view(i)):
        for operand in i.operands:
            yield from _results(operand, around)
    elif i.opcode.removesuffix("-start") == "fusion":
        yield from _results(i.called[0].root, (*around, i))
    elif i.opcode == "parameter" and len(around) > 1:
        yield from _results(around[-1].operands[int(i.operand_text)], around[:-1])
    else:
        yield i
        if i.opcode in _UPDATES and around:
            for buffer in i.operands[: _buffers(i)]:
                makers = _results(buffer, around)
                yield from (maker for maker in makers if maker.opcode != "parameter")


def _taken(inner: Computation, value: Instruction, results: frozenset[Instruction]) -> int | None:
    """Returns bytes read; None if all are."""
    taken = 0
    for user in inner.instructions:
        for number, operand in enumerate(user.operands):
            if operand is not value:
                continue
            part = None
            if _is_a_view(user) or user.opcode in _ALIKE:
                taken_of = None if user.is_root else _taken(inner, user, results)
                part = taken_of and taken_of * value.bytes // user.bytes
            elif user.opcode in _SLICES:
                part = user.bytes if number == 0 else None
            elif user.opcode == "fusion":
                part = _taken(user.called[0], user.called[0].parameters[number], results)
            elif user.opcode in _UPDATES and user in results:
                part = 0 if number < _buffers(user) else None
            if part is None:
                return None
            taken += part
    return taken


def _is_a_view(i: Instruction) -> bool:
    if i.opcode == "fusion" and len(i.operands) == 1:
        # A copy to another tiling, in place, is how a fusion reads its operand: nothing is moved.
        free = ("parameter", "copy") if _IN_PLACE in i.attributes else ("parameter",)
        return all(x.opcode in free or _is_a_view(x) for x in i.called[0].instructions)
    return i.opcode in ("bitcast", "reshape")
