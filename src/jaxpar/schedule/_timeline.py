"""From a scheduled module to a timeline: what computes, what travels, and what waits for it."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np

from jaxpar._chips import Chip
from jaxpar.schedule import _cost
from jaxpar.schedule._compile import CompiledProgram
from jaxpar.schedule._hlo import COLLECTIVES, Computation, Instruction
from jaxpar.schedule._links import Links, Route, lane_of, lane_of_groups
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


@dataclass(frozen=True)
class Timeline:
    """A program's schedule under the published model of a chip; seconds, for one device."""

    events: tuple[Event, ...]
    total: float
    compute: float  # in compute instructions
    exposed: float  # waiting for transfers, synchronous ones included
    transfer: float  # with at least one transfer under way
    sent_bytes: float  # by one device
    link_utilisation: float  # of the links in use: mean share of the total time that they are busy
    peak_bytes: int  # of HBM
    estimate: str  # where the times of compute instructions come from
    loops_of_unknown_length: tuple[str, ...]  # counted as one trip each

    @property
    def hidden_share(self) -> float:
        """The share of transfer time that nothing waits for; 1 without transfers."""
        return 1.0 if not self.transfer else max(0.0, 1 - self.exposed / self.transfer)

    @property
    def transfers(self) -> tuple[Event, ...]:
        """The transfers, in the order of their starts."""
        return tuple(event for event in self.events if event.kind == "transfer")


def timeline(program: CompiledProgram, chip: Chip | None = None) -> Timeline:
    """Plays a compiled program's schedule on a model of its chip.

    The order of instructions, starts and dones is the compiler's. A compute instruction takes the
    compiler's cycles over the clock (TPU), or a roofline (GPU, whose compiler gives no times
    without a device, and TPU instructions without cycles). A transfer takes one latency a hop and
    its bytes over the bandwidth of the links on its way; transfers that share a link take turns. A
    done waits.

    Args:
      program: from `compile_for`.
      chip: figures to use in place of the published ones, made with `dataclasses.replace` of
        `program.target.chip`.

    Returns:
      A `Timeline`. It is a schedule under a model, not a measurement.

    Raises:
      ValueError: a chip that jaxpar has no figures of, and none given.
    """
    chip = program.target.chip if chip is None else chip
    if chip is None:
        kind = program.target.mesh.devices.flat[0].device_kind
        raise ValueError(
            f"timeline: no figures are known of {kind!r} ({program.target.name}); pass "
            "chip=jaxpar.schedule.Chip(...)"
        )
    player = _Player(program, chip)
    player.run(program.module.entry)
    return player.result()


@dataclass
class _Transfer:
    event: dict[str, Any]
    covers: list[str] = field(default_factory=list[str])


class _Player:
    def __init__(self, program: CompiledProgram, chip: Chip) -> None:
        self.program, self.chip, self.module = program, chip, program.module
        self.mesh = program.target.mesh
        self.links = Links(self.mesh, chip)
        self.now = 0.0  # of the compute units
        self.free = np.zeros(self.links.count)  # when each link has nothing left to send
        self.busy = np.zeros(self.links.count)
        self.stream = 0.0  # a GPU's transfers take turns on one stream
        self.memory = 0.0  # as do copies between memories
        self.events: list[Event] = []
        self.open: dict[str, _Transfer] = {}
        self.unknown: list[str] = []
        self.matmuls: dict[str, bool] = {}

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
        elif opcode.endswith("-done") or self._has(i, "AsyncCollectiveDone"):
            self._done(computation, i)
        elif opcode == "async-update":
            self._rename(i.operands[0], i.name)
        elif (inner := self._collective(i)) is not None:
            self._start(computation, i, inner)
        elif opcode in ("copy-start", "slice-start") or opcode == "async-start":
            self._copy(i)
        elif not _cost.is_free(i):
            self._compute(computation, i)

    def _loop(self, computation: Computation, i: Instruction) -> None:
        trips = trip_count(self.module, computation, i)
        if trips is None:
            self.unknown.append(i.name)
        body = i.attributes.partition("body=")[2].partition(",")[0].strip().removeprefix("%")
        for _ in range(1 if trips is None else trips):
            self.run(self.module.computations[body])

    def _longest(self, i: Instruction) -> None:
        """Takes the branch of a conditional that computes the longest, as all devices may."""

        def work(name: str) -> float:
            inner = self.module.computations[name]
            return sum(
                _cost.seconds(self.module, inner, item, self.chip)
                for item in inner.instructions
                if not _cost.is_free(item)
            )

        self.run(self.module.computations[max(i.called, key=work)])

    def _compute(self, computation: Computation, i: Instruction) -> None:
        seconds = _cost.seconds(self.module, computation, i, self.chip)
        if i.name not in self.matmuls:
            self.matmuls[i.name] = _cost.is_matmul(self.module, i)
        start, self.now = self.now, self.now + seconds
        is_matmul = self.matmuls[i.name]
        self._add(i, "compute", "compute", start, self.now, is_matmul=is_matmul)
        if is_matmul:
            for transfer in self.open.values():
                transfer.covers.append(i.name)

    # -- transfers ----------------------------------------------------------------------------

    def _collective(self, i: Instruction) -> Instruction | None:
        """The collective that an instruction is or starts, not one that it goes on with."""
        if i.opcode.removesuffix("-start") in COLLECTIVES:
            return i
        if i.opcode not in ("fusion", "async-start"):
            return None
        inside = list(self.module.reached(i))
        found = next((x for x in inside if x.opcode in COLLECTIVES), None)
        computes = any(x.opcode in ("dot", "convolution") for x in inside)
        return None if computes and not self._has(i, "AsyncCollectiveStart") else found

    def _start(self, computation: Computation, i: Instruction, inner: Instruction) -> None:
        sent, route, row = self._route(computation, i, inner)
        seconds = route.seconds * sent
        begin = self.now if self.chip.torus else max(self.now, self.stream)
        ends = np.maximum(self.free[route.links], begin) + seconds
        first = float((ends - seconds).min(initial=np.inf))
        first = begin if first == np.inf else first
        end = float(ends.max(initial=begin)) + route.hops * self.chip.latency
        self.free[route.links] = ends
        self.busy[route.links] += seconds
        self.stream = end
        is_async = i.opcode.endswith("-start") or self._has(i, "AsyncCollectiveStart")
        event: dict[str, Any] = {
            "start": first,
            "end": end,
            "row": row,
            "bytes": self._sent(inner, sent),
        }
        if is_async and not i.is_synchronous:
            self.open[i.name] = _Transfer({"i": i, **event})
            return
        self._add(i, "transfer", synchronous=True, **event)
        self._wait(i, end)
        if is_async:  # a done follows, which has nothing left to wait for
            self.open[i.name] = _Transfer({})

    def _route(
        self, computation: Computation, i: Instruction, inner: Instruction
    ) -> tuple[float, Route, str]:
        """Bytes of the message, the links that it takes, and the row that shows it."""
        kind = inner.opcode.removesuffix("-start")
        message = _payload(computation, i)
        if kind == "collective-permute":
            return message, self.links.permute(inner.pairs), lane_of(self.mesh, inner.pairs)
        groups = inner.groups(self.links.devices)
        size = len(groups[0])
        row = f"{lane_of_groups(self.mesh, groups)} {kind}"
        if kind in ("all-to-all", "ragged-all-to-all"):
            return message, self.links.all_to_all(groups), row
        if kind == "all-reduce" and i is not inner and i.bytes < message:
            kind = "reduce-scatter"  # what TPU makes of it: a fusion of all-reduce and slice
        whole = message * size if kind == "all-gather" else message
        passes = 2 if kind == "all-reduce" else 1
        # Both directions of one axis, and of more axes where the compiler speaks of more colours.
        ways = max(2, int(_after(i.attributes, "colors:") or 2)) if self.chip.torus else 1
        share = passes * (size - 1) / size / ways
        rounds = passes * (size - 1) / min(ways, 2)
        return whole, self.links.ring(groups, share, rounds), row

    def _sent(self, inner: Instruction, message: float) -> float:
        """Bytes that one device sends."""
        kind = inner.opcode.removesuffix("-start")
        if kind == "collective-permute":
            return message
        size = len(inner.groups(self.links.devices)[0])
        return (2 if kind == "all-reduce" else 1) * message * (size - 1) / size

    def _done(self, computation: Computation, i: Instruction) -> None:
        name = self._started(computation, i)
        if name is None:
            return
        transfer = self.open.pop(name)
        if not transfer.event:
            return
        event = dict(transfer.event)
        start = event.pop("i")
        kind = "copy" if event["row"] == "memory" else "transfer"
        self._add(start, kind, covers=tuple(transfer.covers), **event)
        self._wait(start, event["end"])

    def _started(self, computation: Computation, i: Instruction) -> str | None:
        """The start that a done belongs to: an operand, or what its operands are parts of."""
        seen: set[str] = set()
        names = list(i.operands)
        while names:
            name = names.pop(0)
            if name in self.open:
                return name
            if name in seen or name not in computation.by_name:
                continue
            seen.add(name)
            names += computation.by_name[name].operands
        # Carried by a loop: the oldest of its kind.
        kind = i.opcode.removesuffix("-done")
        carried = (
            n for n, t in self.open.items() if t.event and t.event["i"].opcode.startswith(kind)
        )
        return next(carried, None)

    def _rename(self, old: str, new: str) -> None:
        if old in self.open:
            self.open[new] = self.open.pop(old)

    def _copy(self, i: Instruction) -> None:
        size = i.arrays[0].bytes if i.arrays else 0
        start = max(self.now, self.memory)
        self.memory = start + size / self.chip.hbm
        event = {"i": i, "start": start, "end": self.memory, "row": "memory", "bytes": 0.0}
        self.open[i.name] = _Transfer(event)

    def _wait(self, i: Instruction, until: float) -> None:
        if until > self.now:
            row = "memory" if i.opcode in ("copy-start", "slice-start") else "compute"
            self._add(i, "wait", row, self.now, until)
            self.now = until

    def _has(self, i: Instruction, call: str) -> bool:
        return i.opcode == "fusion" and any(
            f'"{call}"' in x.attributes for x in self.module.reached(i)
        )

    def _add(
        self, i: Instruction, kind: Kind, row: str, start: float, end: float, **more: Any
    ) -> None:
        self.events.append(Event(i.name, i.op_name, kind, row, start, end, **more))

    def result(self) -> Timeline:
        for name in list(self.open):  # never waited for
            event = dict(self.open.pop(name).event)
            if event and event["row"] != "memory":
                self._add(event.pop("i"), "transfer", **event)
        transfers = [e for e in self.events if e.kind == "transfer"]
        total = max([self.now, *(e.end for e in transfers)])
        used = self.busy[self.busy > 0]
        return Timeline(
            events=tuple(sorted(self.events, key=lambda e: (e.start, e.end))),
            total=total,
            compute=sum((e.seconds for e in self.events if e.kind == "compute"), 0.0),
            exposed=sum(
                (e.seconds for e in self.events if e.kind == "wait" and e.row == "compute"), 0.0
            ),
            transfer=covered(transfers),
            sent_bytes=sum((e.bytes for e in transfers), 0.0),
            link_utilisation=float(used.mean() / total) if used.size and total else 0.0,
            peak_bytes=self.program.memory.peak,
            estimate="the compiler's cycles" if self.chip.clock else "roofline",
            loops_of_unknown_length=tuple(self.unknown),
        )


def covered(events: Iterable[Event]) -> float:
    """Seconds in which at least one of the events is under way."""
    total, reached = 0.0, 0.0
    for start, end in sorted((e.start, e.end) for e in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def _payload(computation: Computation, i: Instruction) -> float:
    """Bytes of what a collective takes from one device."""
    by_name = computation.by_name
    operands = [by_name[name] for name in i.operands if name in by_name]
    if sizes := _after(i.attributes, "slice_sizes={{"):
        shape = [int(n) for n in sizes.split(",")]
        first = operands[0].arrays[0]
        width = first.bytes / max(int(np.prod(first.shape)), 1)
        return float(np.prod(shape)) * width
    if "collective-permute" in i.opcode:  # further operands say where in a buffer it lands
        operands = operands[:1]
    return float(sum(operand.bytes for operand in operands))


def _after(text: str, key: str) -> str:
    _, _, rest = text.partition(key)
    end = next((n for n, c in enumerate(rest) if not (c.isdigit() or c == ",")), len(rest))
    return rest[:end].rstrip(",")
