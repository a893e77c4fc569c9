"""Trip counts of HLO loops, counted by running what their conditions depend on."""

import operator
from collections.abc import Callable
from typing import Any

from jaxpar.schedule._hlo import Computation, Instruction, Module

MOST_TRIPS = 1_000_000

_COMPARE = {"LT": "lt", "LE": "le", "GT": "gt", "GE": "ge", "EQ": "eq", "NE": "ne"}
_ARITHMETIC: dict[str, Callable[..., Any]] = {
    "add": operator.add,
    "subtract": operator.sub,
    "multiply": operator.mul,
    "minimum": min,
    "maximum": max,
    "and": operator.and_,
    "or": operator.or_,
    "not": lambda x: not x if isinstance(x, bool) else ~x,
    "negate": operator.neg,
    "select": lambda which, yes, no: yes if which else no,
}
_SAME = ("bitcast", "copy", "convert", "reshape", "copy-done", "broadcast", "optimization-barrier")


class _UnknownError(Exception):
    """A value that depends on data."""


def trip_count(module: Module, caller: Computation, loop: Instruction) -> int | None:
    """Returns how often the body of a while loop runs, None if that depends on data.

    The compiler's own annotation is used where there is one. Otherwise the loop is run, but only
    the scalars that its condition needs: their initial values, their step in the body.
    """
    if (known := _annotated(loop)) is not None:
        return known
    condition, body = _called(module, loop, "condition"), _called(module, loop, "body")
    needed = _elements(condition)
    try:
        initial = _value(module, caller, loop.operands[0], None, wanted=needed)
        state = {n: initial[n] for n in needed}
        for trips in range(MOST_TRIPS):
            arguments = [state].__getitem__
            if not _value(module, condition, condition.root.name, arguments):
                return trips
            state = _value(module, body, body.root.name, arguments, wanted=needed)
    except (_UnknownError, KeyError, TypeError):
        return None
    return None


def _annotated(loop: Instruction) -> int | None:
    _, _, after = loop.attributes.partition('"known_trip_count":{"n":"')
    number = after.partition('"')[0]
    return int(number) if number.isdecimal() else None


def _called(module: Module, loop: Instruction, role: str) -> Computation:
    name = loop.attributes.partition(f"{role}=")[2].partition(",")[0].strip().removeprefix("%")
    return module.computations[name]


def _elements(condition: Computation) -> set[int]:
    """The elements of the loop's state that its condition reads."""
    reads = [i for i in condition.instructions if i.opcode == "get-tuple-element"]
    return {_index(read) for read in reads}


def _index(element: Instruction) -> int:
    return int(element.attributes.partition("index=")[2].partition(",")[0])


def _value(
    module: Module,
    computation: Computation,
    name: str,
    arguments: Callable[[int], Any] | None,
    wanted: set[int] | None = None,
) -> Any:
    """The value of an instruction that results in an integer scalar, or in a tuple (a dict).

    Of a tuple only the elements `wanted` are computed, all if None.
    """
    instruction = computation.by_name[name]

    def value(operand: str, wanted: set[int] | None = None) -> Any:
        return _value(module, computation, operand, arguments, wanted)

    match instruction.opcode:
        case "constant":
            return _constant(instruction)
        case "parameter":
            if arguments is None:
                raise _UnknownError
            return arguments(int(instruction.operand_text))
        case "tuple":
            chosen = range(len(instruction.operands)) if wanted is None else wanted
            return {n: value(instruction.operands[n]) for n in chosen}
        case "get-tuple-element":
            index = _index(instruction)
            return value(instruction.operands[0], {index})[index]
        case "copy-start":  # (destination, source, context)
            return {0: value(instruction.operands[0])}
        case "copy-done":
            return value(instruction.operands[0], {0})[0]
        case opcode if opcode in _SAME:
            return value(instruction.operands[0], wanted)
        case "compare":
            direction = instruction.attributes.partition("direction=")[2][:2]
            return getattr(operator, _COMPARE[direction])(*map(value, instruction.operands))
        case opcode if opcode in _ARITHMETIC:
            return _ARITHMETIC[opcode](*map(value, instruction.operands))
        case "fusion" | "call":
            called = module.computations[instruction.called[0]]
            # Only what the result needs: other operands of a fusion may be arrays.
            operands = instruction.operands
            return _value(module, called, called.root.name, lambda n: value(operands[n]), wanted)
        case _:
            raise _UnknownError


def _constant(instruction: Instruction) -> Any:
    text = instruction.operand_text.strip()
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        raise _UnknownError from None
