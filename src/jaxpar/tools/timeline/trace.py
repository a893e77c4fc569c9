"""Reads a profiler's trace into a timeline."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from jax.profiler import ProfileData

from jaxpar.tools.program.operations import Control, Free, Operation
from jaxpar.tools.timeline.command_buffers import with_instructions
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.timeline import CompiledProgram, Timeline, covered
from jaxpar.tools.timeline.trace_events import Device, Ran, apart, known_devices
from jaxpar.tools.timeline.trace_to_timeline import Measured
from jaxpar.tools.toolkit_api import (
    NO_FIGURES,
    local_path,
    naming,
    readable,
    reading_profiles,
    type_error,
    value_error,
)

Run = tuple[float, float, list[Ran]]  # start and end in nanoseconds, what ran


@readable
@naming("read_trace")
def read_trace(
    folder: str | Path,
    program: Any = None,
    *,
    device: str | None = None,
    run: int | None = None,
) -> Timeline:
    """Reads one run of a program on one device from a trace of `jax.profiler`.

    With `program`, transfers have mesh axes and bytes. Without it, rows name only collectives. On
    TPU, time that the core spends in collectives counts as waiting. On GPU and CPU, a collective's
    time counts as waiting while nothing computes.

    Args:
      folder: the argument of `jax.profiler.trace`, or a file in it. The newest recording is read.
      program: from `compile_for`, by the same jax, with the arguments and options of what ran.
      device: such as `"TPU:0"`, or `"host TPU:0"` with several hosts; by default the first.
      run: which run, from 0; by default the one of median length.

    Returns:
      A `Timeline` from the start of the run.

    Raises:
      ValueError: no trace in the folder; an unknown device or run; no instruction of the program.

    Example:
      >>> here = target("here")
      >>> with jax.set_mesh(here.mesh), jax.profiler.trace(folder):
      ...     x = jax.device_put(jnp.ones(1024), P("tp"))
      ...     y = jax.block_until_ready(jax.jit(jnp.sum)(x))
      >>> measured = read_trace(folder, compile_for(jnp.sum, here, x))
      >>> measured.estimate, [event.row for event in measured.transfers]
      ('measured', ['tp all-reduce'])
    """
    if program is not None and not isinstance(program, CompiledProgram):
        raise type_error(f"program must be what compile_for returns, got {type(program).__name__}")
    files = _newest(local_path("folder", folder))
    with reading_profiles():
        hosts = {file.name.removesuffix(".xplane.pb"): _data(file) for file in files}
        traced = known_devices(hosts)
    if not traced:
        raise value_error(
            f"{folder}: the trace names no instructions that a device ran; trace the call of the "
            "program with jax.block_until_ready of what it returns"
        )
    name = device or next(iter(traced))
    if name not in traced:
        raise value_error(f"device={device!r} is not in the trace; choose from {', '.join(traced)}")
    known = _operations(program)
    schedules = [] if program is None else program.module.schedules
    device_ran = replace(traced[name], ran=with_instructions(traced[name].ran, schedules))
    runs = _runs(device_ran, _ran_of(program, device_ran, known), _once(program))
    lengths = [(end - start) * 1e-9 for start, end, _ in runs]
    if run is not None and not 0 <= run < len(runs):
        raise value_error(f"run must be one of the {len(runs)} in the trace, from 0, got {run}")
    by_length = sorted(range(len(runs)), key=lengths.__getitem__)
    number = by_length[(len(runs) - 1) // 2] if run is None else run
    start, _, ran = runs[number]
    return _timeline(program, known, ran, start, lengths[number], tuple(lengths))


def _newest(folder: Path) -> list[Path]:
    if folder.is_file():
        return [folder]
    files = sorted(folder.rglob("*.xplane.pb"))
    if not files:
        raise value_error(
            f"no *.xplane.pb under {folder}; pass the folder that jax.profiler.trace was given, "
            "after it has ended"
        )
    newest = max(file.parent.name for file in files)  # folders are named after the time
    return [file for file in files if file.parent.name == newest]


def _data(file: Path) -> Any:
    try:
        return ProfileData.from_serialized_xspace(file.read_bytes())
    except Exception as reason:  # whatever jaxlib raises for another kind of file
        said = str(reason).partition("\n")[0]
        remedy = "name what jax.profiler.trace wrote"
        if ".json" in file.name or ".perfetto" in file.name:
            said = "it is for a viewer, and names no instructions"
            beside = next(file.parent.glob("*.xplane.pb"), None)
            remedy = f"give {beside or 'the *.xplane.pb that jax.profiler.trace wrote beside it'}"
        raise value_error(f"{file} is no trace ({said}); {remedy}") from None


def _operations(program: CompiledProgram | None) -> dict[str, Operation]:
    schedules = [] if program is None else program.module.schedules
    return {op.name: op for schedule in schedules for op in schedule.operations}


def _once(program: CompiledProgram | None) -> set[str]:
    if program is None:
        return set()
    entry = program.module.entry.operations
    return {op.name for op in entry if not isinstance(op, (Control, Free))}


def _ran_of(
    program: CompiledProgram | None, device: Device, known: Mapping[str, Operation]
) -> list[Ran]:
    """Returns what ran of the longest such program."""
    programs = device.programs()
    if program is None:
        return max(programs.values(), key=_length)
    name = program.text.partition("\n")[0].removeprefix("HloModule ").partition(",")[0].strip()
    fitting = [ran for ran in programs.values() if ran[0].module in (name, "")]
    fitting = [ran for ran in fitting if any(span.name in known for span in ran)]
    if not fitting:
        raise value_error(
            f"no instruction of {name} is in the trace, which has "
            f"{', '.join(filter(None, programs)) or 'no names of programs'}; compile what ran, by "
            "the same jax, with the same arguments and options"
        )
    return max(fitting, key=lambda ran: _length(span for span in ran if span.name in known))


def _length(ran: Iterable[Ran]) -> float:
    return sum(span.end - span.start for span in ran)


def _runs(device: Device, ran: list[Ran], once: set[str]) -> list[Run]:
    by_run: dict[object, list[Ran]] = {}
    for span in ran:
        by_run.setdefault(span.run, []).append(span)
    if device.runs:  # the trace has the length of each run
        return [
            (device.runs[number].start, device.runs[number].end, spans)
            for number, spans in by_run.items()
            if isinstance(number, int)
        ]
    parts = apart(ran, once) if None in by_run else list(by_run.values())
    return [(spans[0].start, max(span.end for span in spans), spans) for spans in parts]


def _timeline(
    program: CompiledProgram | None,
    known: Mapping[str, Operation],
    ran: Sequence[Ran],
    start: float,
    total: float,
    runs: tuple[float, ...],
) -> Timeline:
    links = None
    if program is not None:
        links = Links(program.target.mesh, program.target.chip or NO_FIGURES)
    measured = Measured(ran, start, known, links)
    events = measured.events()
    transfers = [event for event in events if event.kind == "transfer"]
    waits = [event for event in events if event.kind == "wait" and event.row == "compute"]
    return Timeline(
        events=events,
        total=total,
        compute=covered(event for event in events if event.kind == "compute"),
        exposed=sum((event.seconds for event in waits), 0.0),
        transfer=covered(transfers),
        sent_bytes=sum((event.bytes for event in transfers), 0.0),
        link_utilisation=measured.utilisation(total),
        peak_bytes=0 if program is None else program.memory.peak,
        estimate="measured",
        loops_of_unknown_length=(),
        runs=runs,
    )
