"""The origins of instructions: lines, operations and arguments."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Sequence
from functools import cached_property

from jaxpar.tools.program.hlo import Instruction
from jaxpar.tools.program.operations import Control, Loop, Schedule
from jaxpar.tools.program.sources import (
    Line,
    Sources,
    chain_text,
    line_of,
    own_line,
    phase_of,
    primitive_of,
)
from jaxpar.tools.program.values import Value, Values, reached
from jaxpar.tools.timeline.timeline import CompiledProgram
from jaxpar.tools.toolkit_api import COLLECTIVES, LAX_NAMES, subjaxprs

_NEAREST = 3  # frames in the text of an instruction
_HALVES = re.compile("_(start|done)$")  # of a collective that the program starts itself


class Origins:
    def __init__(self, program: CompiledProgram) -> None:
        self.program = program
        self.values = Values(program.module.hlo)
        self.sources = Sources(program.text)
        self.homes = {
            operation.name: (schedule, operation)
            for schedule in program.module.schedules
            for operation in schedule.operations
        }
        self.callers: dict[Schedule, list[Control]] = defaultdict(list)
        for _, operation in self.homes.values():
            if isinstance(operation, Control):
                for schedule in operation.runs:
                    self.callers[schedule].append(operation)
        self._origins: dict[Instruction, tuple[str, tuple[Line, ...]]] = {}

    def instruction(self, name: str) -> Instruction:
        return self.values.instructions[name]

    def loop_around(self, name: str) -> Loop | None:
        level, seen = [self.homes[name][0]], set[Schedule]()
        while level:
            schedule = level.pop()
            for caller in self.callers[schedule]:
                if isinstance(caller, Loop):
                    return caller
                home = self.homes[caller.name][0]
                if home not in seen:
                    seen.add(home)
                    level.append(home)
        return None

    def origin(self, i: Instruction) -> tuple[str, tuple[Line, ...]]:
        """Returns an instruction's traced operation and lines.

        Merged instructions have those of an inner instruction, else of the nearest operand or user.
        """
        if i not in self._origins:
            self._origins[i] = self._origin(i)
        return self._origins[i]

    def _origin(self, i: Instruction) -> tuple[str, tuple[Line, ...]]:
        steps: tuple[Callable[[Instruction], Sequence[Instruction]], ...] = (
            lambda x: x.operands,
            lambda x: self._used_by[x],
        )
        for near in steps:
            level, seen = [i], {i}
            while level:
                for node in level:
                    for part in (node, *node.inside):
                        if lines := self.sources.of(part):
                            return part.op_name, lines
                following = {x: None for node in level for x in near(node) if x not in seen}
                seen.update(following)
                level = list(following)
        return i.op_name, ()

    @cached_property
    def recomputed(self) -> frozenset[str]:
        """Returns the instructions that the compiler, not the program, computes again."""
        names, seen = set[str](), set[str]()
        for name in self.values.instructions:
            original, again, _ = name.partition(".remat")
            if again and original in seen:  # else it is only computed later
                names.add(name)
            seen.add(original)
        return frozenset(names)

    def phase(self, name: str, op_name: str) -> str:
        return "recomputation" if name in self.recomputed else phase_of(op_name)

    @cached_property
    def _used_by(self) -> dict[Instruction, list[Instruction]]:
        users: dict[Instruction, list[Instruction]] = defaultdict(list)
        for i in self.values.instructions.values():
            for operand in i.operands:
                users[operand].append(i)
        return users

    def is_inserted(self, name: str) -> bool:
        named = self._primitives(name)
        if not named:  # the compiler made it, so its line decides
            i = self.instruction(name)
            return own_line(self.origin(i)[1]) not in self._lines_that_send
        return not any(map(_is_collective, named))

    def is_written(self, name: str, collective: str) -> bool:
        return any(_lax_name(p) == collective for p in self._primitives(name))

    def is_started(self, name: str) -> bool:
        return any(_HALVES.search(p) and _is_collective(p) for p in self._primitives(name))

    def _primitives(self, name: str) -> list[str]:
        i, collective = self.instruction(name), self.values.collective(name)
        parts = [i, *i.inside, *([collective] if collective else [])]
        return [primitive_of(part.op_name) for part in parts if part.op_name]

    @cached_property
    def _lines_that_send(self) -> set[Line | None]:
        lines, level = set[Line | None](), [self.program.jaxpr.jaxpr]
        while level:
            for eqn in level.pop().eqns:
                level += subjaxprs(eqn.params)
                if _is_collective(eqn.primitive.name):
                    lines.add(line_of(eqn))
        return lines

    def text(self, name: str) -> str:
        op_name, lines = self.origin(self.instruction(name))
        what = primitive_of(op_name) or name
        chain = self.sources.chain(lines)[:_NEAREST]
        return f"{what} ({chain_text(chain, own_line(lines))})" if chain else what

    def argument(self, value: Value) -> str | None:
        # State that a loop changes is no argument.
        names, seen, level = set[str](), set[Value](), [value]
        while level:
            value = level.pop()
            if value in seen:
                continue
            seen.add(value)
            i = value.instruction
            if i.opcode == "parameter" and self.values.home[i] is self.values.hlo.entry:
                names.add(i.op_name.replace("\\'", "'") or f"argument {i.operand_text}")
            elif value.moves:
                level += self.values.sources(value)
            else:
                return None
        return names.pop() if len(names) == 1 else None

    def arguments(self, name: str) -> list[str]:
        """Returns operands' and users' arguments, the nearest first."""
        collective = self.values.collective(name)
        if collective is None:
            return []
        values = [self.values.value(self.instruction(name)), self.values.value(collective)]
        users = reached(values, lambda v: [] if v.multiplies else self.values.users[v])
        near = [*map(self.values.value, collective.operands), *users]
        names: dict[str, None] = {}
        for value in reached(near, self.values.sources):
            i = value.instruction
            if i.opcode == "parameter" and self.values.home[i] is self.values.hlo.entry:
                names[i.op_name.replace("\\'", "'")] = None
        return list(names)


def _is_collective(primitive: str) -> bool:
    return _lax_name(primitive) in COLLECTIVES


def _lax_name(primitive: str) -> str:
    primitive = _HALVES.sub("", primitive)
    return LAX_NAMES.get(primitive, primitive)
