"""What is exposed of each collective of a program: where it comes from and what stood around it."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

from jaxpar._calls import readable
from jaxpar._jaxprs import COLLECTIVES, LAX_NAMES
from jaxpar.schedule._hlo import Instruction
from jaxpar.schedule._links import Links
from jaxpar.schedule._operations import Collective, Control, Operation, Schedule
from jaxpar.schedule._player import Event
from jaxpar.schedule._sources import Line, Sources, own_line, phase_of, primitive_of, scopes_of
from jaxpar.schedule._target import figures_of
from jaxpar.schedule._timeline import CompiledProgram, Timeline
from jaxpar.schedule._values import Value, Values


@readable
@dataclass(frozen=True)
class Exposed:
    """What is exposed of one collective: all its runs in a step together, on one device.

    Attributes:
      name: of the instruction.
      collective: its kind as HLO calls it, such as `"all-gather"`.
      over: the mesh axes; of a permute with the step along them, as in `"tp +1"`.
      seconds: in which the device waits for it.
      runs: how often it runs.
      bytes: that a device sends in all runs.
      transfer: seconds in which it is under way.
      queued: seconds of those before it, in which its links were busy with others.
      latency: seconds of those in which nothing but the first byte travels.
      links: over how many a device sends, of `links_there`.
      line: the innermost line of the user's own that it comes from; None if the compiler says none.
      lines: all lines that it comes from, the innermost first.
      scopes: the named scopes around it, such as those of modules.
      phase: `"forward"`, `"backward"` or `"recomputation"`.
      inserted: whether the partitioner put it in: the traced program has no such collective there.
      moved: what is moved, and from which sharding to which where the partitioner did it.
      before: what the device computed last before it waited.
      after: what it computed next.
      covered: seconds that it computed while the collective was under way.
      independent: seconds of other work in the step that neither needs the collective nor is
        needed for it, and that ran at another time.
      synchronous: whether nothing can run beside it.
    """

    name: str
    collective: str
    over: str
    seconds: float
    runs: int
    bytes: float
    transfer: float
    queued: float
    latency: float
    links: float
    links_there: int
    line: Line | None
    lines: tuple[Line, ...]
    scopes: tuple[str, ...]
    phase: str
    inserted: bool
    moved: str
    before: str
    after: str
    covered: float
    independent: float
    synchronous: bool

    @property
    def axes(self) -> tuple[str, ...]:
        """The mesh axes that it goes over."""
        return tuple(part.split(" ")[0] for part in self.over.split(",") if part)


class Exposures:
    """Finds what is exposed in a program, and answers what its causes ask about it."""

    def __init__(self, program: CompiledProgram, played: Timeline) -> None:
        self.program, self.played = program, played
        self.target = program.target
        self.chip = figures_of(program.target, None)
        self.values = Values(program.module.hlo)
        self.sources = Sources(program.text)
        self.links = Links(program.target.mesh, self.chip)
        self.seconds: dict[str, float] = defaultdict(float)  # computed, by instruction
        self.transfers: dict[str, list[Event]] = defaultdict(list)
        self.waits: dict[str, list[int]] = defaultdict(list)  # places in `order`
        # What the compute units do, one after the other.
        self.order = [e for e in played.events if e.row == "compute"]
        for event in played.events:
            if event.kind == "compute":
                self.seconds[event.name] += event.seconds
            elif event.kind == "transfer":
                self.transfers[event.name].append(event)
        for place, event in enumerate(self.order):
            if event.kind == "wait":
                self.waits[event.name].append(place)
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

    def found(self) -> Iterator[Exposed]:
        """What is exposed, the longest first."""
        waited = {
            name: sum(self.order[place].seconds for place in places)
            for name, places in self.waits.items()
        }
        for name in sorted(waited, key=waited.__getitem__, reverse=True):
            if self.transfers[name]:
                yield self._exposed(name, waited[name])

    def _exposed(self, name: str, waited: float) -> Exposed:
        events = self.transfers[name]
        i, operation = self.instruction(name), self.homes[name][1]
        assert isinstance(operation, Collective)
        op_name, lines = self.origin(i)
        kind = operation.message.kind
        inserted = LAX_NAMES.get(primitive := primitive_of(op_name), primitive) not in COLLECTIVES
        covered = self._computed_beside(events)
        longest = max(self.waits[name], key=lambda place: self.order[place].seconds)
        return Exposed(
            name=name,
            collective=kind,
            over=events[0].row.removesuffix(kind).strip(),
            seconds=waited,
            runs=len(events),
            bytes=sum(e.bytes for e in events),
            transfer=sum(e.seconds for e in events),
            queued=sum(e.queued for e in events),
            latency=sum(e.latency for e in events),
            links=events[0].links,
            links_there=self.links.there,
            line=own_line(lines),
            lines=lines,
            scopes=scopes_of(op_name),
            phase=phase_of(op_name),
            inserted=inserted,
            moved=self._moved(name, kind, inserted),
            before=self._neighbour(longest, -1),
            after=self._neighbour(longest, +1),
            covered=covered,
            independent=max(0.0, self._independent(operation) - covered),
            synchronous=events[0].synchronous,
        )

    # -- where it comes from ------------------------------------------------------------------

    def instruction(self, name: str) -> Instruction:
        """The instruction of a name."""
        return self.values.instructions[name]

    def origin(self, i: Instruction) -> tuple[str, tuple[Line, ...]]:
        """The operation of the traced program and the lines that an instruction comes from.

        What the compiler has made of several instructions often has neither: then what is inside
        says it, or the nearest that it is made from.
        """
        level, seen = [i], set[Instruction]()
        while level:
            for one in level:
                for part in (one, *one.inside):
                    if lines := self.sources.of(part):
                        return part.op_name, lines
            seen.update(level)
            level = [x for one in level for x in one.operands if x not in seen]
        return i.op_name, ()

    def text(self, name: str) -> str:
        """An instruction in words: its operation in the traced program, and its line."""
        op_name, lines = self.origin(self.instruction(name))
        line = own_line(lines)
        what = primitive_of(op_name) or name
        return f"{what} ({line})" if line else what

    def _neighbour(self, place: int, step: int) -> str:
        place += step
        while 0 <= place < len(self.order):
            event = self.order[place]
            if event.kind == "compute" and event.seconds:
                return self.text(event.name)
            place += step
        return "the start of the step" if step < 0 else "the end of the step"

    def argument(self, value: Value) -> str | None:
        """The argument of the program that a value is, or is a part of; None of anything else.

        A loop's state that its body changes is none, though it began as one.
        """
        found, seen, level = set[str](), set[Value](), [value]
        while level:
            value = level.pop()
            if value in seen:
                continue
            seen.add(value)
            i = value.instruction
            if i.opcode == "parameter" and self.values.home[i] is self.values.hlo.entry:
                found.add(i.op_name.replace("\\'", "'") or f"argument {i.operand_text}")
            elif value.moves:
                level += self.values.sources(value)
            else:
                return None
        return found.pop() if len(found) == 1 else None

    def _moved(self, name: str, kind: str, inserted: bool) -> str:
        collective = self.values.collective(name)
        if collective is None or not collective.operands:
            return ""
        operand = collective.operands[0]
        value = self.values.value(operand)
        array = operand.arrays[0] if operand.arrays else None
        shape = (
            f"{array.dtype}[{','.join(map(str, array.shape))}] of each device, " if array else ""
        )
        what = self.argument(value) or self.text(value.instruction.name)
        text = f"{shape}{what}"
        if not inserted:
            return text
        over = self.transfers[name][0].row.removesuffix(kind).strip()
        dims = collective.after("dimensions={")
        match kind:
            case "all-gather":
                return f"{text}; dimension {dims} lies over {over!r} and was wanted whole"
            case "all-to-all":
                return f"{text}; one dimension lies over {over!r} and another was wanted so"
            case "collective-permute":
                return f"{text}; it was wanted in another order of the devices, or a part of it"
            case _:
                return f"{text}; each device has a part of a sum over {over!r}"

    # -- what stood around it -----------------------------------------------------------------

    def _computed_beside(self, events: Iterable[Event]) -> float:
        """Seconds in which the device computed while one of the transfers was under way."""
        total, place = 0.0, 0
        for transfer in sorted(events, key=lambda e: e.start):
            if transfer.synchronous:
                continue
            while place < len(self.order) and self.order[place].end <= transfer.start:
                place += 1
            at = place
            while at < len(self.order) and self.order[at].start < transfer.end:
                event = self.order[at]
                if event.kind == "compute":
                    total += min(event.end, transfer.end) - max(event.start, transfer.start)
                at += 1
        return total

    def _independent(self, operation: Operation) -> float:
        """Seconds of the work that a collective neither needs nor is needed for, in a step.

        Beside it in its own computation, and outside of the loops and calls around that one.
        """
        total, level, seen = 0.0, [operation], set[Operation]()
        while level:
            one = level.pop()
            if one in seen:
                continue
            seen.add(one)
            schedule, _ = self.homes[one.name]
            tied = self._tied(schedule, one)
            total += sum(self.work[other] for other in schedule.operations if other not in tied)
            level += self.callers[schedule]
        return total

    @staticmethod
    def _tied(schedule: Schedule, one: Operation) -> set[Operation]:
        """An operation, all that it needs and all that needs it."""
        needed, after = set[Operation](), {one}
        level = [one]
        while level:
            operation = level.pop()
            if operation not in needed:
                needed.add(operation)
                level += operation.operands
        for operation in schedule.operations:  # operands come before
            if not after.isdisjoint(operation.operands):
                after.add(operation)
        return needed | after

    @cached_property
    def work(self) -> dict[Operation, float]:
        """Seconds that each operation computes in a step, with all that it runs."""
        found: dict[Operation, float] = {}
        for schedule in self.program.module.schedules:  # those that are run come first
            for operation in schedule.operations:
                found[operation] = self.seconds.get(operation.name, 0.0)
                if isinstance(operation, Control):
                    inner = (x for run in operation.runs for x in run.operations)
                    found[operation] += sum(found[x] for x in inner)
        return found
