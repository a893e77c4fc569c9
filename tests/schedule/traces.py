"""Traces as TPUs and GPUs are documented to record them, written from schedules.

The planes, lines and stats are those of the profiler's own schema (xplane.proto, and the names in
xplane_schema.cc). The times are made up. What one H100 did is in `traced/h100`.
"""

import json
import re
from collections import defaultdict
from dataclasses import dataclass, field

from jax.profiler import ProfileData

from jaxpar.tools.program.operations import (
    Call,
    Collective,
    Conditional,
    Copy,
    Done,
    Free,
    Loop,
)

NS = {"compute": 1000, "start": 10, "synchronous": 700, "done": 300, "copied": 200}


@dataclass
class Plane:
    """A plane: events by line, each a name, a start, a length and what else is known of it."""

    name: str
    lines: dict[str, list] = field(default_factory=lambda: defaultdict(list))

    def add(self, line, name, start, length, **stats):
        self.lines[line].append((name, start, length, stats))

    def text(self):
        names, stats = {}, {}
        lines = []
        for number, (line, events) in enumerate(self.lines.items(), 1):
            texts = []
            for name, start, length, said in events:
                values = " ".join(
                    f"stats {{ metadata_id: {stats.setdefault(key, len(stats) + 1)} {_value(x)} }}"
                    for key, x in said.items()
                )
                texts.append(
                    f"events {{ metadata_id: {names.setdefault(name, len(names) + 1)} "
                    f"offset_ps: {start * 1000} duration_ps: {length * 1000} {values} }}"
                )
            lines.append(f"lines {{ id: {number} name: {json.dumps(line)} {' '.join(texts)} }}")
        known = [("event", name, n) for name, n in names.items()]
        known += [("stat", name, n) for name, n in stats.items()]
        tables = [
            f"{kind}_metadata {{ key: {n} value {{ id: {n} name: {json.dumps(name)} }} }}"
            for kind, name, n in known
        ]
        return f"planes {{ name: {json.dumps(self.name)} {' '.join([*lines, *tables])} }}"


def _value(value):
    if isinstance(value, str):
        return f"str_value: {json.dumps(value)}"
    return f"int64_value: {value}"


def write(folder, *planes, host="host", when="2026_11_24_12_00_00"):
    """Writes what one host recorded to where `jax.profiler.trace` would."""
    path = folder / "plugins" / "profile" / when / f"{host}.xplane.pb"
    path.parent.mkdir(parents=True, exist_ok=True)
    text = "\n".join(plane.text() for plane in planes)
    path.write_bytes(ProfileData.text_proto_to_serialized_xspace(text))
    return folder


def module_name(program):
    return re.match(r"HloModule ([\w.\-]+)", program.text)[1]


class Core:
    """What a TPU's core does: everything one after the other, loops around what they run."""

    def __init__(self, program, plane, ns=NS):
        self.program, self.plane, self.ns = program, plane, ns
        self.texts = {
            found[1]: found[0].strip().removeprefix("ROOT ")
            for found in re.finditer(r"^ +(?:ROOT )?%?([\w.\-]+) = .*$", program.text, re.M)
        }
        self.spent = defaultdict(int)
        self.now = 0

    def run(self, start, number=1, beside=False):
        """One run of the program; returns when it ends."""
        self.now = start
        self.beside, self.open = beside, {}
        self._all(self.program.module.entry)
        name = f"{module_name(self.program)}(77)"
        self.plane.add("XLA Modules", name, start, self.now - start, run_id=number)
        return self.now

    def _all(self, schedule):
        for operation in schedule.operations:
            match operation:
                case Loop():
                    around = self.now
                    for _ in range(1 if operation.trips is None else operation.trips):
                        self._all(operation.runs[1])
                    self._event(operation.name, around, self.now - around)
                case Conditional() | Call():
                    around = self.now
                    self._all(operation.runs[0])
                    self._event(operation.name, around, self.now - around)
                case Free():
                    pass
                case _:
                    self._spend(operation)

    def _spend(self, operation):
        kind = "compute"
        if isinstance(operation, Done):
            kind = "copied" if operation.pair in ("copy", "slice") else "done"
        elif isinstance(operation, Copy) or (
            isinstance(operation, Collective) and operation.has_done
        ):
            kind = "start"
        elif isinstance(operation, Collective):
            kind = "synchronous"
        length = self.ns[kind]
        self._event(operation.name, self.now, length)
        self.spent[kind, getattr(operation, "pair", "")] += length
        self.now += length
        if self.beside and kind == "start":
            self.open[operation.name] = self.now - length
        for operand in operation.operands if isinstance(operation, Done) else ():
            if operand.name in self.open:  # it arrives before its done has returned
                begun = self.open.pop(operand.name)
                text = self.texts[operand.name]
                self.plane.add("Async XLA Ops", text, begun + 5, self.now - 100 - begun - 5)

    def _event(self, name, start, length):
        self.plane.add("XLA Ops", self.texts[name], start, length)


class Streams:
    """What a GPU does: kernels on one stream, and NCCL's on another, which dones wait for."""

    COMPUTE, SEND = "Stream #13(Compute,MemcpyD2D)", "Stream #21(Compute)"

    def __init__(self, program, plane, ns=NS, sending=2500):
        self.program, self.plane, self.ns, self.sending = program, plane, ns, sending
        self.waited, self.computed, self.now, self.free = 0, 0, 0, 0

    def run(self, start):
        self.now = self.free = start
        self.ends = defaultdict(list)
        self._all(self.program.module.entry)
        return max(self.now, self.free)

    def _all(self, schedule):
        for operation in schedule.operations:
            match operation:
                case Loop():
                    for _ in range(operation.trips):
                        self._all(operation.runs[1])
                case Conditional() | Call():
                    self._all(operation.runs[0])
                case Done():
                    self._wait(self.ends[operation.pair].pop(0))
                case Collective():
                    self._send(operation)
                case Free() | Copy():
                    pass
                case _:
                    self._kernel(self.COMPUTE, operation.name, self.now, self.ns["compute"])
                    self.now += self.ns["compute"]
                    self.computed += self.ns["compute"]

    def _send(self, operation):
        begin = max(self.now, self.free)
        self._kernel(self.SEND, operation.name, begin, self.sending, "ncclDevKernel_SendRecv()")
        self.free = begin + self.sending
        if operation.has_done:
            self.ends[operation.pair].append(self.free)
        if operation.is_synchronous or not operation.has_done:
            self._wait(self.free)

    def _wait(self, until):
        if until > self.now:
            self.waited += until - self.now
            self.now = until

    def _kernel(self, stream, name, start, length, kernel=None):
        said = {"hlo_op": name, "hlo_module": module_name(self.program), "program_id": 3}
        self.plane.add(stream, kernel or f"{name}_kernel", start, length, **said)
