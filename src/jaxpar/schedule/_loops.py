"""Trip counts of HLO loops, counted by running what their conditions depend on."""

import operator
from collections.abc import Callable
from typing import Any

from jaxpar.schedule._hlo import Instruction

MOST_TRIPS = 1_000_000

Value = Any  # an integer or a truth value; of a tuple, a dict of those of its elements in question

_ARITHMETIC: dict[str, Callable[..., Value]] = {
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


def trip_count(loop: Instruction) -> int | None:
    """Returns how often the body of a while loop runs, None if that depends on data.

    The compiler's own annotation is used where there is one. Otherwise the loop is run, but only
    the scalars that its condition needs: their initial values, their step in the body.
    """
    if (known := loop.after('"known_trip_count":{"n":"')).isdecimal():
        return int(known)
    condition, body = loop.called_as("condition"), loop.called_as("body")
    # The elements of the loop's state that its condition reads.
    needed = {_index(i) for i in condition.instructions if i.opcode == "get-tuple-element"}
    try:
        initial = _value(loop.operands[0], None, wanted=needed)
        state = {n: initial[n] for n in needed}
        for trips in range(MOST_TRIPS):
            arguments = [state].__getitem__  # both have one parameter: the state
            if not _value(condition.root, arguments):
                return trips
            state = _value(body.root, arguments, wanted=needed)
    except (_UnknownError, KeyError, TypeError):
        return None
    return None


def _index(element: Instruction) -> int:
    return int(element.after("index="))


def _value(
    instruction: Instruction,
    arguments: Callable[[int], Value] | None,
    wanted: set[int] | None = None,
) -> Value:
    """The value of an instruction that results in an integer scalar, or in a tuple.

    Of a tuple only the elements `wanted` are computed, all if None. `arguments` gives the values of
    the parameters of the instruction's computation; None: those depend on data.
    """
    operands = instruction.operands

    def value(operand: Instruction, wanted: set[int] | None = None) -> Value:
        return _value(operand, arguments, wanted)

    match instruction.opcode:
        case "constant":
            return _constant(instruction.operand_text.strip())
        case "parameter":
            if arguments is None:
                raise _UnknownError
            return arguments(int(instruction.operand_text))
        case "tuple":
            chosen = range(len(operands)) if wanted is None else wanted
            return {n: value(operands[n]) for n in chosen}
        case "get-tuple-element":
            index = _index(instruction)
            return value(operands[0], {index})[index]
        case "copy-start":  # (destination, source, context)
            return {0: value(operands[0])}
        case "copy-done":
            return value(operands[0], {0})[0]
        case opcode if opcode in _SAME:
            return value(operands[0], wanted)
        case "compare":
            compare = getattr(operator, instruction.after("direction=").lower())  # such as LT
            return compare(*map(value, operands))
        case opcode if opcode in _ARITHMETIC:
            return _ARITHMETIC[opcode](*map(value, operands))
        case "fusion" | "call":
            # Only what the result needs: other operands of a fusion may be arrays.
            return _value(instruction.called[0].root, lambda n: value(operands[n]), wanted)
        case _:
            raise _UnknownError


def _constant(text: str) -> int | bool:
    if text in ("true", "false"):
        return text == "true"
    try:
        return int(text)
    except ValueError:
        raise _UnknownError from None
