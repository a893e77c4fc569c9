"""Reasons why a matmul exceeds its bound, with evidence."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import jaxpar
from jaxpar.schedule import CompiledProgram, Event, Floor, Timeline
from jaxpar.tools.cli.gpu_clocks import Clocks
from jaxpar.tools.cli.ops import Ring
from jaxpar.tools.program.flops import Dot, dots_of
from jaxpar.tools.timeline.floor import rings_over
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.toolkit_api import (
    Chip,
    compiler_of,
    size_text,
    stays_within_a_slice,
    us,
    why_not_closed,
)

LEAST = 0.03  # of the measured time: smaller reasons are left out
BEYOND = 0.1  # of the measured time: the largest excess over the prediction without a reason
SCATTERED = 1.3  # the third quartile over the first
LANES, ROW = 128, 16  # numbers in a TPU's row; bytes that a GPU's kernels read at a time


@dataclass(frozen=True)
class Host:
    """What devices and host add to every call."""

    call_seconds: float = 0.0
    flags: Mapping[str, str] = field(default_factory=dict[str, str])
    clocks: Clocks | None = None


@dataclass(frozen=True)
class Reason:
    seconds: float
    text: str


def reasons_of(
    program: CompiledProgram,
    played: Timeline,
    floor: Floor,
    ring: Ring,
    measured: tuple[float, float, float],
    host: Host,
) -> tuple[Reason, ...]:
    """Returns why a call exceeds its floor, the largest reason first.

    `measured` has the quartiles of a call's seconds.
    """
    reasons = [
        *_of_transfers(program, played),
        *_of_mesh(program, played, ring),
        *_of_products(program, played, floor),
        *_of_passes(played),
        *_of_host(played, measured, host),
    ]
    worth = (reason for reason in reasons if reason.seconds >= LEAST * measured[1])
    return tuple(sorted(worth, key=lambda reason: -reason.seconds))


# -- waits for transfers --------------------------------------------------------------------------


def _of_transfers(program: CompiledProgram, played: Timeline) -> Iterator[Reason]:
    by_name = {event.name: event for event in played.transfers}
    waits: dict[str, list[tuple[Event, float]]] = {}
    for event in played.events:
        if event.kind == "wait" and (transfer := by_name.get(event.name)):
            waits.setdefault(transfer.row, []).append((transfer, event.seconds))
    for row, of_row in waits.items():
        yield Reason(sum(seconds for _, seconds in of_row), _why_waited(program, row, of_row))


def _why_waited(program: CompiledProgram, row: str, waits: list[tuple[Event, float]]) -> str:
    transfers = [transfer for transfer, _ in waits]
    waited = sum(seconds for _, seconds in waits)
    latency = sum(min(transfer.latency, seconds) for transfer, seconds in waits)
    number = f"{len(transfers)} transfers" if len(transfers) > 1 else "one transfer"
    size = size_text(sum(transfer.bytes for transfer in transfers) / len(transfers))
    if any(transfer.synchronous for transfer in transfers):
        return f"{row} is synchronous, nothing is computed meanwhile{_freeing(program, row)}"
    if latency > waited / 2:
        return (
            f"{row}: {number} of {size}, so small that starts and hops take longer than the bytes; "
            "larger shapes or fewer steps (--modes naive, chunked-2) hide more"
        )
    take = "take" if len(transfers) > 1 else "takes"
    return f"{row}: {number} of {size} {take} longer than the work that overlaps"


def _freeing(program: CompiledProgram, row: str) -> str:
    kind = row.rpartition(" ")[2]
    # The compiler may turn a synchronous reduce-scatter into an all-reduce and a slice.
    kinds = (kind, "reduce-scatter") if kind == "all-reduce" else (kind,)
    known = compiler_of(program.target.mesh.devices.flat[0].device_kind)
    if kind in known.frees:
        return (
            ": this mode has no work to overlap with, a ring or chunks do "
            "(--modes bidirectional, chunked-2)"
        )
    options = [option for option in known.options if option.frees in kinds]
    texts = {name: str(value).lower() for name, value in program.compiler_options.items()}
    missing = [f"{flag.name}={flag.value}" for flag in options if texts.get(flag.name) != "true"]
    if missing:
        return f": the program is compiled without {' and '.join(missing)} (jaxpar.jit sets them)"
    if options:
        return f", though {options[0].name} is set"
    return "; no option of this compiler changes that, but a ring does (--modes bidirectional)"


# -- the mesh -------------------------------------------------------------------------------------


def _of_mesh(program: CompiledProgram, played: Timeline, ring: Ring) -> Iterator[Reason]:
    """Yields a ring whose neighbours lack a direct link."""
    mesh, chip = program.target.mesh, program.target.chip
    axes = [name for name in ring if mesh.shape[name] > 1]
    if chip is None or not axes:
        return
    named = ",".join(ring)
    beyond = ""
    if not chip.torus:
        host = Links(mesh, chip).host
        beyond = "switch" if any(len(set(host[g])) > 1 for g in rings_over(mesh, ring)) else ""
    elif not all(stays_within_a_slice(mesh, name) for name in axes):
        beyond = "slice"
    if beyond:
        yield Reason(
            played.exposed,
            f"the ring {named} goes beyond one {beyond}: {chip.network / 1e9:g} GB/s a device in "
            f"place of {chip.link / 1e9:g}; keep the axis within one {beyond} (--mesh, last axis)",
        )
    if beyond or not chip.torus:
        return
    whys = [why for name in axes if mesh.shape[name] > 2 and (why := why_not_closed(mesh, name))]
    apart = int(jaxpar.ring_hops(mesh, ring).max())
    if len(axes) > 1 and apart > 1 and not whys:
        whys = [f"neighbours on the ring {named} are up to {apart} links apart"]
    if whys:
        remedy = "choose an axis along closed dimensions of the slice (--mesh, --axis)"
        yield Reason(played.exposed, f"{'; '.join(whys)}: messages share links; {remedy}")


# -- compute --------------------------------------------------------------------------------------


def _of_products(program: CompiledProgram, played: Timeline, floor: Floor) -> Iterator[Reason]:
    spent = sum(event.seconds for event in played.events if event.is_matmul)
    products = dots_of(program.jaxpr)
    if spent <= floor.compute or not products:
        return
    largest = max(products, key=lambda product: product.m * product.k * product.n)
    yield Reason(
        spent - floor.compute,
        f"matmuls reach {floor.compute / spent:.0%} of the chip's peak, at a size of "
        f"{largest.m} x {largest.k} x {largest.n}{_why_below(largest, program.target.chip)}",
    )


def _why_below(product: Dot, chip: Chip | None) -> str:
    """Returns which size or dtype misses the peak."""
    if product.width >= 4:
        return " in 32-bit numbers: the peak is for 16 bits (--dtype bfloat16)"
    inner = (product.k, product.n)
    if chip is not None and chip.torus:
        odd = [size for size in inner if size % LANES]
        return f": {odd[0]} is padded to a multiple of {LANES}" if odd else ""
    step = ROW // product.width
    odd = [size for size in inner if size % step]
    if odd:
        return f": {odd[0]} is no multiple of {step}, which the fast kernels need"
    few = min(product.m, product.n) < LANES
    return ": too few rows or columns to fill the chip" if few else ""


def _of_passes(played: Timeline) -> Iterator[Reason]:
    spent = [event for event in played.events if event.kind == "compute" and not event.is_matmul]
    if spent:
        number = f"{len(spent)} passes" if len(spent) > 1 else "one pass"
        yield Reason(
            sum(event.seconds for event in spent),
            f"{number} over memory besides matmuls: copies, sums, updates",
        )


# -- the host -------------------------------------------------------------------------------------


def _of_host(
    played: Timeline, measured: tuple[float, float, float], host: Host
) -> Iterator[Reason]:
    low, middle, high = measured
    if high > SCATTERED * low:
        yield Reason(
            high - low,
            f"calls take from {us(low)} to {us(high)} (quartiles): something else uses the devices "
            "or their host",
        )
    beyond = middle - played.total
    if beyond < BEYOND * middle:
        return
    known = list(_known_of_host(played, beyond, host))
    yield from known
    rest = beyond - sum(reason.seconds for reason in known)
    if rest >= BEYOND * middle and not played.is_least:
        flags = " ".join(f"{name}={value}" for name, value in host.flags.items())
        told = f"the environment gives the compiler {flags}: try without; " if flags else ""
        yield Reason(
            rest,
            f"beyond the prediction, for an unknown reason; {told}record a trace with "
            "jax.profiler and run jaxpar explain --measured",
        )


def _known_of_host(played: Timeline, beyond: float, host: Host) -> Iterable[Reason]:
    if host.call_seconds > 0:
        yield Reason(
            min(host.call_seconds, beyond),
            f"a call that computes nothing takes {us(host.call_seconds)} here; it matters less "
            "with larger shapes, or with several steps in one jit",
        )
    if host.clocks is not None and host.clocks.share < 1:
        yield Reason(played.compute * (1 / host.clocks.share - 1), str(host.clocks))
