"""Compiled programs and their timelines."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property, wraps
from math import inf
from pathlib import Path
from typing import Any

import jax
from jax.extend import core

from jaxpar import compiled_with
from jaxpar import compiler_options as options_of
from jaxpar.tools.program.literals import text_of
from jaxpar.tools.program.mesh_axes import places_of_slices
from jaxpar.tools.program.operations import Module, read
from jaxpar.tools.timeline.cache import keep, kept, key_of
from jaxpar.tools.timeline.event import Event, idle_share
from jaxpar.tools.timeline.frameworks import donated_by, donated_inside, traced_for
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.per_device import Places
from jaxpar.tools.timeline.player import Assumptions, Player
from jaxpar.tools.timeline.target import LONG, Target, figures_of, measured_of, under_load
from jaxpar.tools.toolkit_api import (
    Chip,
    is_array,
    local_path,
    naming,
    readable,
    value_error,
)

_FEW = 0.05  # of a total: a smaller share outside of the tables has no mark
_ROUNDING, _ROUNDED = 1e-6, 1e-3  # tolerances for sums of seconds, and for a transfer


@readable
@dataclass(frozen=True)
class Memory:
    """Bytes of HBM on one device, as the compiler planned them.

    Attributes:
      arguments: all arguments.
      outputs: all results.
      temporaries: intermediate results.
      aliased: outputs in the place of donated arguments.
      peak: the most at a time; an upper bound if the program keeps arrays on the host.

    Example:
      >>> Memory(arguments=8, outputs=4, temporaries=0, aliased=4, peak=8).peak
      8
    """

    arguments: int
    outputs: int
    temporaries: int
    aliased: int
    peak: int


@readable
@dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for a target.

    Attributes:
      target: the described devices.
      text: the scheduled HLO.
      memory: the planned bytes.
      seconds: seconds of tracing and compiling.
      jaxpr: the traced program, a `ClosedJaxpr`.
      function: the function, to compile it again; None if unknown.
      args: its arguments.
      compiler_options: its options.
      cache: the folder of compiled programs, or None.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=P("tp"))
      >>> compile_for(jnp.sin, target("v5e:2x2"), x).memory.arguments
      1024
    """

    target: Target
    text: str = field(repr=False)
    memory: Memory
    seconds: float
    jaxpr: Any = field(repr=False)
    function: Any = None
    args: tuple[Any, ...] = field(default=(), repr=False)
    compiler_options: dict[str, Any] = field(default_factory=dict[str, Any])
    cache: Path | None = field(default=None, repr=False)

    @cached_property
    def module(self) -> Module:
        # Imported here: a text without a traced program does not need it.
        """Returns the program's operations."""
        from jaxpar.tools.program.flops import kernels_in

        return read(self.text, None if self.jaxpr is None else kernels_in(self.jaxpr))

    @cached_property
    def flops(self) -> float:
        """Returns a device's FLOPs in the traced matmuls; 0 without a trace."""
        from jaxpar.tools.program.flops import device_flops

        return 0.0 if self.jaxpr is None else device_flops(self.jaxpr, self.target.mesh.size)


@readable
@naming("compile_for")
def compile_for(
    fn: Any,
    target: Target,
    *args: Any,
    compiler_options: dict[str, Any] | None = None,
    cache: str | Path | None = None,
) -> CompiledProgram:
    """Compiles `fn` for devices that need not be present.

    Args:
      fn: a function of global arrays, plain or jitted by JAX or a framework (`nnx.jit`). It is
        traced with the target's mesh as context mesh (`jax.set_mesh`), so a `jax.shard_map` inside
        may leave out its mesh.
      target: from `jaxpar.schedule.target`.
      *args: `jax.ShapeDtypeStruct`s of global arrays with a `sharding` (a `PartitionSpec` will do);
        without it the compiler chooses. A plain `fn` gets leaves that are not arrays, such as
        functions, unchanged. In results, such leaves become None.
      compiler_options: as for `jax.stages.Lowered.compile`; `mode="auto"` knows of them. None:
        those of `jaxpar.compiler_options(target)`; `{}`: none. A `jaxpar.jit` function also keeps
        its own options.
      cache: a folder for compiled programs, by program, devices, options and versions.

    Raises:
      ValueError: a sharding on other devices than the target's.
      Exception: errors of tracing and of the compiler.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=P("tp"))
      >>> "all-reduce" in compile_for(jnp.sum, target("v5e:2x2"), x).text
      True
    """
    start = time.perf_counter()
    options = options_of(target) if compiler_options is None else compiler_options
    is_plain = not hasattr(fn, "trace")
    if is_plain:  # a jitted function knows its static arguments
        fn, args = of_arrays(fn, args)
    from jaxpar.tools.toolkit_api import jitted_with  # a program at hand is not jitted

    jitted, options = jitted_with(fn, options)
    with compiled_with(options), _other_devices_refused():
        traced = traced_for(target.mesh, jitted, args)
    stage = traced.stage
    donated = donated_inside(stage.jaxpr.jaxpr) if is_plain else set()
    if donated or not traced.is_of_function:
        donated = donated or donated_by(stage)
        fn, args = replayed(fn, stage, args, donated)
        with jax.set_mesh(target.mesh), compiled_with(options):
            stage = fn.trace(*args)
    with jax.set_mesh(target.mesh), compiled_with(options), _other_devices_refused(stage):
        lowered = stage.lower()
        folder = None if cache is None else local_path("cache", cache, writes=True)
        key = "" if folder is None else key_of(lowered, target, options)
        if folder is not None and (record := kept(folder, key)) is not None:
            text, memory = record["text"], _memory(record["text"], **record["memory"])
        else:
            text, memory = _text_and_memory(lowered.compile(compiler_options=options or None))
            if folder is not None:
                keep(folder, key, text, memory)
    return CompiledProgram(
        target=target,
        text=text,
        memory=memory,
        seconds=time.perf_counter() - start,
        jaxpr=stage.jaxpr,
        function=fn,
        args=args,
        compiler_options=options,
        cache=folder,
    )


@contextmanager
def _other_devices_refused(stage: Any = None) -> Generator[None]:
    try:
        yield
    except jax.errors.JaxRuntimeError as reason:
        if "to StableHLO" not in str(reason) or "scaled_dot[" not in str(stage.jaxpr):
            raise
        raise value_error(
            "this compiler has no jax.lax.scaled_dot, which ends in its INTERNAL error; use "
            "jax.nn.scaled_matmul, or multiply by the scales and use jnp.matmul"
        ) from reason
    except ValueError as reason:
        # JAX has no class for this error, so its text tells it from others.
        if "incompatible devices" not in str(reason):
            raise
        raise value_error(
            "the step has shardings on other devices than the target's; make them with the "
            "target's mesh, or give the function as it was before jax.jit"
        ) from reason


def of_arrays(
    function: Callable[..., Any], args: Sequence[Any]
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    leaves, tree = jax.tree.flatten(tuple(args))
    if all(map(is_array, leaves)):
        return function, tuple(args)

    @wraps(function)
    def of_given(*inputs: Any) -> Any:
        arrays = iter(jax.tree.leaves(inputs))
        filled = tree.unflatten([next(arrays) if is_array(leaf) else leaf for leaf in leaves])
        return jax.tree.map(lambda leaf: leaf if is_array(leaf) else None, function(*filled))

    return of_given, tree.unflatten([leaf if is_array(leaf) else None for leaf in leaves])


def replayed(
    function: Any, traced: Any, args: Sequence[Any], donated: Collection[core.Var]
) -> tuple[Any, tuple[Any, ...]]:
    """Returns a jitted repetition; results include changed arguments."""
    leaves, closed = jax.tree.leaves(tuple(args)), traced.jaxpr
    places = list(_places(closed.in_avals, leaves))

    @wraps(function)
    def replay(*inputs: Any) -> list[Any]:
        flat = jax.tree.leaves(inputs)
        return core.jaxpr_as_fun(closed)(*(flat[place] for place in places))

    given_away = {
        place for place, var in zip(places, closed.jaxpr.invars, strict=True) if var in donated
    }
    replaying, arrays = of_arrays(replay, args)
    return _donating(replaying, args, given_away), arrays


def _donating(function: Callable[..., Any], args: Sequence[Any], donated: set[int]) -> Any:
    numbers, first = list[int](), 0
    for number, arg in enumerate(args):
        leaves = jax.tree.leaves(arg)
        places = {first + n for n, leaf in enumerate(leaves) if is_array(leaf)}
        first += len(leaves)
        if places and places <= donated:
            numbers.append(number)
    return jax.jit(function, donate_argnums=numbers)


def _places(inputs: Sequence[Any], leaves: Sequence[Any]) -> Iterator[int]:
    # Frameworks may trace a shared array once.
    places = [place for place, leaf in enumerate(leaves) if is_array(leaf)]
    if len(places) > len(inputs):
        places = sorted({id(leaves[place]): place for place in reversed(places)}.values())
    for number, aval in enumerate(inputs):
        types = [jax.typeof(leaves[place]) for place in places[number : number + 1]]
        if [(x.shape, x.dtype) for x in types] != [(aval.shape, aval.dtype)]:
            raise value_error(
                f"argument {number} of the traced program, {aval.dtype}{list(aval.shape)}, is not "
                "the array that was given in its place; have a function of arrays alone jitted by "
                "jax.jit, such as one of what nnx.split returns"
            )
        yield places[number]


def program_of(
    target: Target, traced: Any, compiled: Any, options: Mapping[str, Any]
) -> CompiledProgram:
    text, memory = _text_and_memory(compiled)
    return CompiledProgram(target, text, memory, 0.0, traced.jaxpr, compiler_options=dict(options))


def _text_and_memory(compiled: Any) -> tuple[str, Memory]:
    stats: Any = compiled.memory_analysis()
    if stats is None:  # not every backend has them
        return text_of(compiled), Memory(0, 0, 0, 0, 0)
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
    }
    text = text_of(compiled)
    return text, _memory(text, **sizes, peak=getattr(stats, "peak_memory_in_bytes", 0))


def _memory(text: str, *, peak: int, **sizes: int) -> Memory:
    # The compiler's peak also counts host arrays (`S(5)`).
    held = sizes["arguments"] + sizes["outputs"] + sizes["temporaries"] - sizes["aliased"]
    return Memory(**sizes, peak=held if "S(5)" in text or not peak else peak)


@readable
@dataclass(frozen=True)
class Timeline:
    """A program's schedule on one device, simulated or measured, in seconds.

    Attributes:
      events: intervals of computation, transfers, copies and waits.
      total: the step's time.
      compute: time in compute instructions.
      exposed: time in which the device only waits for transfers, also synchronous ones.
      transfer: time with at least one transfer under way.
      sent_bytes: bytes that a device sends.
      link_utilisation: the mean share of `total` that a used link is busy.
      peak_bytes: bytes of HBM at the peak.
      estimate: the source of compute times: `"the compiler's cycles"`, `"published and XLA's
        tables"`, `"roofline"` or `"measured"`. `"and rooflines"` is appended if more than 5% of
        `total` is in no table.
      loops_of_unknown_length: loops whose length is neither known nor assumed; each runs once.
      kernels_of_unknown_cost: kernels of which only bytes are known: figures are lower limits.
      runs: the time of each run in the trace, if measured.
      at_peak: time of the program's FLOPs at the chip's peak, if simulated.
      compute_by_place: time in compute instructions by place in the mesh, such as `"pp=3"`, where
        devices take different branches. The timeline is of devices that end last.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024,), jnp.float32, sharding=P("tp"))
      >>> timeline(compile_for(jnp.sin, target("v5e:2x2"), x)).hidden_share  # of no transfers
      1.0
    """

    events: tuple[Event, ...]
    total: float
    compute: float
    exposed: float
    transfer: float
    sent_bytes: float
    link_utilisation: float
    peak_bytes: int
    estimate: str
    loops_of_unknown_length: tuple[str, ...]
    kernels_of_unknown_cost: tuple[str, ...] = ()
    runs: tuple[float, ...] = ()
    at_peak: float = inf
    compute_by_place: Mapping[str, float] = field(default_factory=dict[str, float])

    @property
    def hidden_share(self) -> float:
        """Returns the share of transfer time without waits; 1 without transfers."""
        return 1.0 if not self.transfer else max(0.0, 1 - self.exposed / self.transfer)

    @property
    def bubble(self) -> float:
        """Returns the seconds in which a device of a `jaxpar.pipeline` is idle.

        It then computes on old numbers.
        """
        computed = (event for event in self.events if event.kind == "compute")
        return sum((event.seconds * idle_share(event.op) for event in computed), 0.0)

    @property
    def is_least(self) -> bool:
        """Returns whether `total` is only a lower limit: part of a loop or kernel is missing."""
        return bool(self.loops_of_unknown_length or self.kernels_of_unknown_cost)

    @property
    def transfers(self) -> tuple[Event, ...]:
        """Returns the transfers by their starts."""
        return tuple(event for event in self.events if event.kind == "transfer")


@readable
@naming("timeline")
def timeline(
    program: CompiledProgram, chip: Chip | None = None, *, assumed: Assumptions | None = None
) -> Timeline:
    """Simulates a compiled program's schedule on a model of its chip.

    A TPU's matmul takes the compiler's cycles, but at most a time computed from its bytes and
    FLOPs. GPU matmuls and collectives take published or XLA's measured times if there are any,
    else a roofline: the longer of FLOPs at peak and bytes at full speed. The model gives transfers
    no memory bandwidth and, on a SparseCore, no compute: contention is not published. The guide
    "How predictions are made" has all rules.

    Args:
      program: from `compile_for`.
      chip: figures instead of the target's, as from `dataclasses.replace(program.target.chip)`.
      assumed: sizes and trip counts that depend on data.

    Raises:
      ValueError: no figures of the chip, and none given.
      RuntimeError: a prediction below the program's floor, or a transfer faster than its links: a
        fault of jaxpar. The message names a file for a report.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> timeline(compile_for(lambda x: x @ x, target("v5e:2x2"), x)).transfers[0].row
      'tp all-gather'
    """
    chip = figures_of(program.target, chip)
    links = Links(program.target.mesh, chip)
    module, assumed = program.module, assumed or Assumptions()
    slower = under_load(chip)
    if slower != chip and Player(links, assumed).length(module.entry) >= LONG:
        links = Links(program.target.mesh, slower)
    of_slices = places_of_slices(program.target.mesh)
    places = Places(Player(links, assumed), of_slices.shape[1], len(of_slices), assumed.trips_of)
    player = places.run(module.entry)
    events = player.finish()
    transfers = [e for e in events if e.kind == "transfer"]
    total = player.end
    used = player.busy[player.busy > 0]
    played = Timeline(
        events=events,
        total=total,
        compute=player.computed,
        exposed=sum((e.seconds for e in events if e.kind == "wait" and e.row == "compute"), 0.0),
        transfer=covered(transfers),
        sent_bytes=sum((e.bytes for e in transfers), 0.0),
        link_utilisation=float(used.mean() / total) if used.size and total else 0.0,
        peak_bytes=program.memory.peak,
        estimate=_estimate(chip, player.beyond / total if total else 0.0),
        loops_of_unknown_length=tuple(places.unknown),
        kernels_of_unknown_cost=tuple(player.unsaid),
        at_peak=min(program.flops / chip.flops, player.at_peak),
        compute_by_place=places.computed(program.target.mesh, of_slices),
    )
    _require_possible(program, played, links)
    return played


def _require_possible(program: CompiledProgram, played: Timeline, links: Links) -> None:
    for sent in played.transfers:
        taken = sent.seconds - sent.latency
        if links.least(sent) > (1 + _ROUNDED) * taken:
            raise impossible(
                f"{sent.name} sends {sent.bytes:,.0f} bytes a device in {taken * 1e6:,.1f} us over "
                f"{links.there(sent)} links of {links.speed(sent) / 1e9:g} GB/s",
                program.text,
            )
    least = links.least_of_all(played.transfers)
    floor = max(played.at_peak, least)
    if played.total < (1 - _ROUNDING) * floor:
        raise impossible(
            f"{played.total * 1e6:,.1f} us are predicted of a program that takes at least "
            f"{floor * 1e6:,.1f} us on {program.target.name} (its matmuls at peak: "
            f"{played.at_peak * 1e6:,.1f}, its bytes over all links: {least * 1e6:,.1f})",
            program.text,
        )


def _estimate(chip: Chip, beyond: float) -> str:
    if chip.clock:
        return "the compiler's cycles"
    if measured_of(chip) is None:
        return "roofline"
    return "published and XLA's tables" + (" and rooflines" if beyond > _FEW else "")


def covered(events: Iterable[Event]) -> float:
    total, reached = 0.0, 0.0
    for start, end in sorted((e.start, e.end) for e in events):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total


def impossible(why: str, text: str) -> RuntimeError:
    file = Path(tempfile.mkdtemp(prefix="jaxpar-report-")) / "program.txt"
    file.write_text(text)
    return RuntimeError(
        f"timeline: {why}; this is a fault of jaxpar; please report it with the program's text, "
        f"which is in {file}"
    )
