"""Plays a schedule on a model of a chip: a clock for what computes, and one for every link."""

from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from jax.sharding import Mesh

from jaxpar._chips import Chip
from jaxpar.schedule import _cost
from jaxpar.schedule._assumed import Assumed
from jaxpar.schedule._collective import Message, collective_in, has_call, message_of
from jaxpar.schedule._hlo import Computation, Instruction, Module
from jaxpar.schedule._links import Links
from jaxpar.schedule._loops import trip_count

Kind = Literal["compute", "transfer", "copy", "wait"]


@dataclass(frozen=True)
class Event:
    """One interval on one row of the timeline.

    `kind` is `compute`; `transfer`, of a collective; `copy`, between the memories of the chip; or
    `wait`, when nothing computes because a transfer or a copy has not arrived.
    """

    name: str  # of the HLO instruction
    op: str  # the operation of the traced program it comes from
    kind: Kind
    row: str  # "compute", "memory", or where a transfer goes, such as "tp +1"
    start: float  # seconds
    end: float
    bytes: float = 0.0  # that one device sends
    synchronous: bool = False  # of a transfer: nothing can run beside it
    covers: tuple[str, ...] = ()  # of a transfer: the matmuls between its start and its done
    is_matmul: bool = False

    @property
    def seconds(self) -> float:
        """The length of the interval."""
        return self.end - self.start


@dataclass
class _Transfer:
    """A transfer or copy that was started and is not done; one without an event has arrived."""

    start: Instruction
    event: dict[str, Any] | None
    covers: list[str] = field(default_factory=list[str])


class Player:
    """The state of one device while its program is played."""

    def __init__(self, module: Module, mesh: Mesh, chip: Chip, assumed: Assumed) -> None:
        self.module, self.mesh, self.chip, self.assumed = module, mesh, chip, assumed
        self.links = Links(mesh, chip)
        self.now = 0.0  # of the compute units
        self.free = np.zeros(self.links.count)  # when each link has nothing left to send
        self.busy = np.zeros(self.links.count)
        self.stream = 0.0  # a GPU's transfers take turns on one stream
        self.memory = 0.0  # as do copies between memories
        self.events: list[Event] = []
        # In the order of their starts, by the name by which the program knows them now. A loop can
        # start one again before it waits for the one of the iteration before.
        self.open: list[tuple[str, _Transfer]] = []
        self.messages: dict[str, Message] = {}
        self.unknown: dict[str, None] = {}

    def run(self, computation: Computation) -> None:
        for instruction in computation.instructions:
            self._step(computation, instruction)

    def _step(self, computation: Computation, i: Instruction) -> None:
        opcode = i.opcode
        if opcode == "while":
            self._loop(computation, i)
        elif opcode == "conditional":
            self._longest(i)
        elif opcode == "call":
            self.run(self.module.computations[i.called[0]])
        elif opcode.endswith("-done") or has_call(self.module, i, "AsyncCollectiveDone"):
            self._done(computation, i)
        elif opcode == "async-update":
            self._rename(i.operands[0], i.name)
        elif opcode == "call-start" and not i.operands:
            pass  # of a core of its own; what it works on comes with the update
        elif (inner := self._starts(computation, i)) is not None:
            self._start(computation, i, inner)
        elif opcode in ("copy-start", "slice-start", "async-start"):
            self._copy(i)
        elif opcode == "call-update":
            self._elsewhere(i)
        elif not _cost.is_free(i):
            self._compute(computation, i)

    def _loop(self, computation: Computation, i: Instruction) -> None:
        trips = trip_count(self.module, computation, i)
        if trips is None:
            trips = self.assumed.trips_of(i)
        if trips is None:
            self.unknown[i.name] = None
        body = i.attributes.partition("body=")[2].partition(",")[0].strip().removeprefix("%")
        for _ in range(1 if trips is None else trips):
            self.run(self.module.computations[body])

    def _longest(self, i: Instruction) -> None:
        """Takes the branch of a conditional that computes the longest, as all devices may."""

        self.run(self.module.computations[max(i.called, key=self._work)])

    def _work(self, name: str) -> float:
        """Seconds of what a computation computes; one trip of a loop tells branches apart."""
        computation, total = self.module.computations[name], 0.0
        for i in computation.instructions:
            if i.opcode == "conditional":
                total += max(map(self._work, i.called))
            elif i.opcode in ("call", "while"):
                total += sum(map(self._work, i.called), 0.0)
            elif not _cost.is_free(i):
                total += self._seconds(computation, i)
        return total

    def _seconds(self, computation: Computation, i: Instruction) -> float:
        return _cost.seconds(self.module, computation, i, self.chip, self.assumed)

    def _compute(self, computation: Computation, i: Instruction) -> None:
        seconds = self._seconds(computation, i)
        start, self.now = self.now, self.now + seconds
        is_matmul = _cost.is_matmul(self.module, i)
        self._add(i, "compute", "compute", start, self.now, is_matmul=is_matmul)
        if is_matmul:
            for _, transfer in self.open:
                transfer.covers.append(i.name)

    # -- transfers ----------------------------------------------------------------------------

    def _starts(self, computation: Computation, i: Instruction) -> Instruction | None:
        """The collective that an instruction is or starts, not one that it goes on with."""
        if i.opcode == "call-update":
            return collective_in(self.module, computation.by_name[i.operands[0]])
        inner = collective_in(self.module, i)
        if inner is None or inner is i or has_call(self.module, i, "AsyncCollectiveStart"):
            return inner
        # A fusion that computes while a collective is under way has that collective in it too.
        goes_on = _cost.is_matmul(self.module, i) or self._source(computation, i) is not None
        return None if goes_on else inner

    def _start(self, computation: Computation, i: Instruction, inner: Instruction) -> None:
        if i.name not in self.messages:
            self.messages[i.name] = message_of(
                self.module, self.mesh, self.links, computation, i, inner, self.assumed
            )
        message = self.messages[i.name]
        route = message.route
        seconds = route.seconds * message.size
        begin = self.now if self.chip.torus else max(self.now, self.stream)
        ends = np.maximum(self.free[route.links], begin) + seconds
        first = float((ends - seconds).min()) if ends.size else begin
        end = float(ends.max(initial=begin)) + route.hops * self.chip.latency
        self.free[route.links] = ends
        self.busy[route.links] += seconds
        self.stream = end
        event: dict[str, Any] = {
            "row": message.row,
            "start": first,
            "end": end,
            "bytes": message.sent,
        }
        is_async = i.opcode.endswith(("-start", "call-update"))
        is_async = is_async or has_call(self.module, i, "AsyncCollectiveStart")
        if is_async and not i.is_synchronous:
            self.open.append((i.name, _Transfer(i, event)))
            return
        self._add(i, "transfer", synchronous=True, **event)
        self._wait(i, end)
        if is_async:  # a done follows, which has nothing left to wait for
            self.open.append((i.name, _Transfer(i, None)))

    def _done(self, computation: Computation, i: Instruction) -> None:
        at = self._source(computation, i)
        if at is None:  # carried by a loop: the oldest of its kind
            kind = i.opcode.removesuffix("-done")
            carried = (n for n, (_, t) in enumerate(self.open) if t.start.opcode.startswith(kind))
            at = next(carried, None)
        if at is None:
            return
        _, transfer = self.open.pop(at)
        if transfer.event is not None:
            kind = "copy" if transfer.event["row"] == "memory" else "transfer"
            self._add(transfer.start, kind, covers=tuple(transfer.covers), **transfer.event)
            self._wait(transfer.start, transfer.event["end"], is_copy=kind == "copy")

    def _source(self, computation: Computation, i: Instruction) -> int | None:
        """Which of the open transfers an instruction uses: an operand, or what that is part of."""
        seen: set[str] = set()
        names = list(i.operands)
        while names:
            name = names.pop(0)
            if name in seen or name not in computation.by_name:
                continue
            for at in reversed(range(len(self.open))):
                if self.open[at][0] == name:
                    return at
            seen.add(name)
            names += computation.by_name[name].operands
        return None

    def _rename(self, old: str, new: str) -> None:
        self.open = [(new if name == old else name, transfer) for name, transfer in self.open]

    def _copy(self, i: Instruction) -> None:
        # Destination, source and a context; of a slice the source is the larger one.
        size = min((array.bytes for array in i.arrays if array.shape), default=0)
        start = max(self.now, self.memory)
        self.memory = start + size / self.chip.hbm
        event = {"row": "memory", "start": start, "end": self.memory, "bytes": 0.0}
        self.open.append((i.name, _Transfer(i, event)))

    def _elsewhere(self, i: Instruction) -> None:
        """What a core of its own computes from memory to memory, such as a gather of rows."""
        start = max(self.now, self.memory)
        self.memory = start + i.bytes / self.chip.hbm  # its type is of operands and results
        event = {"row": "memory", "start": start, "end": self.memory, "bytes": 0.0}
        self.open.append((i.name, _Transfer(i, event)))

    def _wait(self, i: Instruction, until: float, *, is_copy: bool = False) -> None:
        if until > self.now:
            row = "memory" if is_copy else "compute"
            self._add(i, "wait", row, self.now, until)
            self.now = until

    def _add(
        self, i: Instruction, kind: Kind, row: str, start: float, end: float, **more: Any
    ) -> None:
        self.events.append(Event(i.name, i.op_name, kind, row, start, end, **more))

    def finish(self) -> tuple[Event, ...]:
        """The events by time, with the transfers that nothing has waited for."""
        for _, transfer in self.open:
            if transfer.event is not None and transfer.event["row"] != "memory":
                self._add(transfer.start, "transfer", **transfer.event)
        return tuple(sorted(self.events, key=lambda e: (e.start, e.end)))
