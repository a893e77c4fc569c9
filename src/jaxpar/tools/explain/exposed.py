"""Each collective's exposed time and source lines."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from jaxpar.tools.explain.disguises import Disguise, Disguises
from jaxpar.tools.program.operations import Collective, Control, Operation, Schedule
from jaxpar.tools.program.sources import Line, chain_text, own_line, scopes_of, shown
from jaxpar.tools.program.values import reached
from jaxpar.tools.timeline.event import Event
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.origins import Origins
from jaxpar.tools.timeline.queueing import Charged, Charges
from jaxpar.tools.timeline.target import figures_of
from jaxpar.tools.timeline.timeline import CompiledProgram, Timeline
from jaxpar.tools.toolkit_api import NO_FIGURES, readable

THE_END = "the end of the step"
BEHIND = "the wait for "  # a transfer that queues behind on the same links
_MATMULS = ("convolution", "dot", "ragged-dot")


@readable
@dataclass(frozen=True)
class ExposedCollective:
    """The waits of a device, in a step, for the collectives of a source line.

    Attributes:
      name: the instruction with the longest wait.
      names: all instructions of the same line and axes, in places that differ only in numbers.
      collective: the kind in HLO, such as `"all-gather"`.
      over: the mesh axes, with a permute's step, as in `"tp +1"`.
      seconds: all waits that it causes.
      held: the part of `seconds` in which other transfers wait for its links.
      runs: how often it runs.
      bytes: bytes that a device sends in all runs.
      transfer: seconds from start to end.
      queued: seconds before its links are free.
      latency: the part of `transfer` before the first byte arrives.
      links: how many links a device uses for it.
      links_there: how many links a device has.
      line: the user's innermost line, else the innermost; None if unknown.
      lines: all lines that it comes from, the innermost first.
      chain: at most five of `lines`, up to the callers of the user's line.
      places: lines and scopes of `names`, the longest wait first.
      scopes: named scopes around it, such as modules.
      phase: `"forward"`, `"backward"` or `"recomputation"`.
      inserted: whether XLA's partitioner added it.
      moved: the array that moves; if inserted, with the change of its sharding.
      before: the last work before the wait.
      after: the next work after the wait.
      covered: seconds of compute during the transfer.
      independent: seconds of independent work that ran at another time.
      synchronous: whether no work can overlap with it.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> explanation = explain(compile_for(lambda x: x @ x, target("v5e:2x2"), x))
      >>> explanation.findings[0].of.inserted
      True
    """

    name: str
    names: tuple[str, ...]
    collective: str
    over: str
    seconds: float
    held: float
    runs: int
    bytes: float
    transfer: float
    queued: float
    latency: float
    links: float
    links_there: int
    line: Line | None
    lines: tuple[Line, ...]
    chain: tuple[Line, ...]
    places: tuple[str, ...]
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
        """Returns the mesh axes."""
        parts = (part.split()[0] for part in self.over.split(",") if part.strip())
        return tuple(dict.fromkeys(parts))


class Exposures(Origins):
    def __init__(self, program: CompiledProgram, played: Timeline) -> None:
        super().__init__(program)
        self.played, self.target = played, program.target
        measured = played.estimate == "measured"  # a measurement needs no figures of the chip
        self.chip = (program.target.chip or NO_FIGURES) if measured else figures_of(program.target)
        self.links = Links(program.target.mesh, self.chip)
        self._look, self._disguises = Disguises(self.values), dict[str, Disguise | None]()
        self.seconds: dict[str, float] = defaultdict(float)  # computed, by instruction
        self.transfers: dict[str, list[Event]] = defaultdict(list)
        self.waits: dict[str, list[int]] = defaultdict(list)  # places in `order`
        # A trace may have events of other programs.
        events = (event for event in played.events if event.name in self.homes)
        self.events = list(Charges(program, self.links).of(events))
        # The work and the waits of the compute units, in order.
        self.order = [e for e in self.events if e.row == "compute"]
        for event in self.events:
            if event.kind == "compute":
                self.seconds[event.name] += event.seconds
            elif event.kind == "transfer":
                self.transfers[event.name].append(event)
        for place, event in enumerate(self.order):
            if event.kind == "wait":
                self.waits[event.name].append(place)

    def found(self) -> list[ExposedCollective]:
        """Returns the exposed collectives, the longest wait first."""
        return [e for e in self.all() if e.seconds]

    def all(self) -> list[ExposedCollective]:
        """Returns hidden collectives too, the longest wait first."""
        groups: dict[Any, list[str]] = defaultdict(list)
        for name, source in self._sources.items():
            groups[source].append(name)
        exposed = [self._exposed(names) for names in groups.values()]
        return sorted(exposed, key=lambda e: e.seconds, reverse=True)

    def runs(self, exposed: ExposedCollective) -> list[tuple[Event, float]]:
        waits: dict[str, list[Event]] = defaultdict(list)
        for event in self.order:
            if event.kind == "wait":
                waits[event.name].append(event)
        events = [event for name in exposed.names for event in self.transfers[name]]
        pairs: list[tuple[Event, float]] = []
        for event in sorted(events, key=lambda e: e.start):
            ended = [wait for wait in waits[event.name] if event.start < wait.end <= event.end]
            pairs.append((event, sum((wait.seconds for wait in ended), 0.0)))
            waits[event.name] = [wait for wait in waits[event.name] if wait not in ended]
        return pairs

    @cached_property
    def _sources(self) -> dict[str, Any]:
        """Returns a key for each collective.

        Equal keys come from one place of the traced program, or send the same shapes from places
        that differ only in numbers.
        """
        places: dict[Any, list[str]] = defaultdict(list)
        for name, events in self.transfers.items():
            if events:
                places[self._place(name)].append(name)
        alike: dict[Any, Any] = {}  # links a key to another key of the same group

        def head(key: Any) -> Any:
            while alike.setdefault(key, key) != key:
                key = alike[key]
            return key

        firsts: dict[str, Any] = {}
        for (kind, axes, chain, scopes, phase), names in places.items():
            functions = tuple((line.file, line.function) for line in chain)
            what = kind, axes, chain[:1], functions, tuple(map(_unnumbered, scopes)), phase
            first, *others = {(*what, self._shapes(name)) for name in names}
            alike |= {head(other): head(first) for other in others}
            firsts |= dict.fromkeys(names, first)
        return {name: head(first) for name, first in firsts.items()}

    def _place(self, name: str) -> tuple[Any, ...]:
        op_name, lines = self.origin_of(name)
        axes = tuple(part.split()[0] for part in self._over(name).split(",") if part)
        chain = self.sources.chain(lines)
        return self._kind(name), axes, chain, scopes_of(op_name), self.phase(name, op_name)

    def origin_of(self, name: str) -> tuple[str, tuple[Line, ...]]:
        """Returns the operation and the lines of a collective.

        Joined sums may be named after any of them. The largest array of inserted sums counts.
        """
        collective = self.values.collective(name)
        if collective is None or len(collective.operands) == 1 or not self.is_inserted(name):
            return self.origin(self.instruction(name))
        largest = max(collective.operands, key=lambda operand: operand.bytes)
        return self.origin(self.values.maker(largest).instruction)

    def _shapes(self, name: str) -> tuple[str, ...]:
        collective = self.values.collective(name)
        operands = () if collective is None else collective.operands
        return tuple(str(array) for operand in operands for array in operand.arrays)

    def _kind(self, name: str) -> str:
        operation = self.homes[name][1]
        assert isinstance(operation, Collective)
        return operation.message.kind

    def _over(self, name: str) -> str:
        return self.transfers[name][0].row.removesuffix(self._kind(name)).strip()

    def _exposed(self, names: list[str]) -> ExposedCollective:
        waited = {key: sum((self.order[n].seconds for n in self.waits[key]), 0.0) for key in names}
        waiting = [key for key in names if waited[key]]
        name = max(names, key=waited.__getitem__)
        events = [event for key in names for event in self.transfers[key]]
        longest = max(self.waits[name], key=lambda n: self.order[n].seconds, default=None)
        op_name, lines = self.origin_of(name)
        inserted = self.is_inserted(name)
        covered = self._computed_beside(events)
        independent = max((self._independent(self.homes[x][1]) for x in waiting), default=0.0)
        held = (self.order[n] for key in names for n in self.waits[key])
        behind = (e.seconds for e in held if isinstance(e, Charged) and e.standing not in names)
        return ExposedCollective(
            name=name,
            names=tuple(names),
            collective=self._kind(name),
            over=", ".join(dict.fromkeys(map(self._over, names))),
            seconds=sum(waited.values(), 0.0),
            held=sum(behind, 0.0),
            runs=len(events),
            bytes=sum(e.bytes for e in events),
            transfer=sum(e.seconds for e in events),
            queued=sum(e.queued for e in events),
            latency=sum(e.latency for e in events),
            links=events[0].links,
            links_there=self.links.there(events[0]),
            line=own_line(lines),
            lines=lines,
            chain=shown(self.sources.chain(lines)),
            places=self._places(sorted(names, key=waited.__getitem__, reverse=True)),
            scopes=scopes_of(op_name),
            phase=self.phase(name, op_name),
            inserted=inserted,
            moved=self._moved(name, inserted),
            before="" if longest is None else self._neighbour(longest, -1),
            after="" if longest is None else self._neighbour(longest, +1),
            covered=covered,
            independent=max(0.0, independent - covered),
            synchronous=all(e.synchronous for e in events),
        )

    def _places(self, names: list[str]) -> tuple[str, ...]:
        texts: dict[str, None] = {}
        for name in names:
            op_name, lines = self.origin_of(name)
            chain = chain_text(shown(self.sources.chain(lines)), own_line(lines))
            texts[", in ".join(filter(None, (chain, "/".join(scopes_of(op_name)))))] = None
        return tuple(texts)

    def disguise(self, name: str) -> Disguise | None:
        """Returns what an all-reduce really is, or None."""
        if name not in self._disguises:
            collective = self.values.collective(name)
            disguise = None if collective is None else self._look.of(collective)
            self._disguises[name] = disguise
        return self._disguises[name]

    def is_beside_a_matmul(self, name: str) -> bool:
        # A matmul uses a gather's result, or makes a sum's operand.
        collective = self.values.collective(name)
        if collective is None:
            return False
        if self._kind(name) == "all-gather":
            start, step = [self.values.value(collective)], self.values.users.__getitem__
        else:
            start, step = list(map(self.values.value, collective.operands)), self.values.sources
        # Only through elementwise operations: a lookup or a reduction ends the search.
        values = reached(start, lambda value: step(value) if value.is_elementwise else ())
        return any(value.kind in _MATMULS for value in values)

    def _moved(self, name: str, inserted: bool) -> str:
        collective = self.values.collective(name) or self.instruction(name)
        operands = [operand for operand in collective.operands if operand.opcode != "after-all"]
        if not operands:
            return ""
        largest = max(operands, key=lambda operand: operand.bytes)
        disguise = self.disguise(name)
        if disguise is not None and disguise.really == "gather":
            largest = disguise.part
        value = self.values.maker(largest)
        shape = f"{largest.arrays[0]} of each device, " if largest.arrays else ""
        what = self.argument(value) or self.text(value.instruction.name)
        n = len(operands) - 1
        more = f", and {n} more array{'s' * (n > 1)}" if n else ""
        text = f"{shape}{what}{more}"
        if disguise is not None:
            over = f"over {self._over(name)!r}"
            if disguise.really == "gather":
                return f"{text}; it is sharded {over} and is needed unsharded"
            return f"{text}; a sum {over}, but each device needs only its shard"
        if not inserted:
            return text
        over, kind = self._over(name), self._kind(name)
        dims = collective.after("dimensions={")
        match kind:
            case "all-gather":
                what = f"dimension {dims}" if dims else "it"  # between slices, none is named
                return f"{text}; {what} is sharded over {over!r} and is needed unsharded"
            case "all-to-all":
                return f"{text}; the sharding over {over!r} moves to another dimension"
            case "collective-permute":
                return f"{text}; it is needed in another order of the devices, or only in part"
            case _:
                return f"{text}; each device has a partial sum over {over!r}"

    # -- work around the wait -----------------------------------------------------------------

    def _neighbour(self, place: int, step: int) -> str:
        wait = self.order[place]
        if step > 0 and isinstance(wait, Charged):
            return f"{BEHIND}{self.text(wait.standing)}, which the links send next"
        place += step
        while 0 <= place < len(self.order):
            event = self.order[place]
            if event.kind == "compute" and event.seconds:
                return self.text(event.name)
            place += step
        return "the start of the step" if step < 0 else THE_END

    def _computed_beside(self, events: Iterable[Event]) -> float:
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
        """Returns seconds of independent work, also in callers."""
        total, level, seen = 0.0, [operation], set[Operation]()
        while level:
            operation = level.pop()
            if operation in seen:
                continue
            seen.add(operation)
            schedule, _ = self.homes[operation.name]
            tied = self._tied(schedule, operation)
            total += sum((self.work[x] for x in schedule.operations if x not in tied), 0.0)
            level += self.callers[schedule]
        return total

    @staticmethod
    def _tied(schedule: Schedule, start: Operation) -> set[Operation]:
        needed, after = set[Operation](), {start}
        level = [start]
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
        """Returns each operation's seconds, with all it runs."""
        seconds: dict[Operation, float] = {}
        for schedule in self.program.module.schedules:  # callees come before their callers
            for operation in schedule.operations:
                seconds[operation] = self.seconds.get(operation.name, 0.0)
                if isinstance(operation, Control):
                    inner = (x for run in operation.runs for x in run.operations)
                    seconds[operation] += sum(seconds[x] for x in inner)
        return seconds


def _unnumbered(scope: str) -> str:
    # `layers_3` and `layers.0` are alike.
    return re.sub(r"[_.\-]?\d+", "", scope)
