"""Asserting that a compiler's schedule hides the communication of a program."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jaxpar._calls import readable
from jaxpar._types import MeshAxes, Number
from jaxpar.schedule import Event, Target, Timeline, compile_for, timeline
from jaxpar.schedule import target as describe

_WORST = 3  # transfers that the text names
_REMEDY = (
    "Remedy: compute where the transfers are, with a ring mode of jaxpar's matmuls "
    "(mode='unidirectional' or 'bidirectional') in place of a collective beside a matmul; cut less "
    "finely, so that a piece computes for longer than its transfer takes; or raise "
    "exposed_at_most. `jaxpar predict module:function --plot FILE.png` draws the "
    "schedule."
)


@readable
def assert_overlapped(
    fn: Callable[..., Any],
    target: Target | str,
    *args: Any,
    exposed_at_most: Number = 0.05,
    mesh: MeshAxes | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> None:
    """Asserts that a compiler's schedule of `fn` waits little for communication.

    The program is compiled for devices that need not be there, and its schedule played on a model
    of the chip (`jaxpar.schedule.timeline`): not a measurement, but what a later change of the
    program, of JAX or of the compiler does to the overlap shows in it. On GPUs, whose compiler
    gives no times without a device, matmuls take what a roofline says.

    Args:
      fn: a function of global arrays, as for `jaxpar.schedule.compile_for`. A `jax.shard_map` in it
        may leave out its mesh.
      target: from `jaxpar.schedule.target`, or its text such as `"v5e:2x4"` or `"h100:8"`.
      *args: global arrays or `jax.ShapeDtypeStruct`s, whose `sharding` may be a `PartitionSpec`.
      exposed_at_most: the share of the total time that may go into waiting for transfers.
      mesh: with a text only: as for `jaxpar.make_mesh`; None is `"tp=-1"`.
      compiler_options: as for `jaxpar.schedule.compile_for`.

    Raises:
      AssertionError: more is exposed. The text has the target, the shares, the transfers that are
        waited for the longest, and all synchronous ones.
      ImportError: the compiler is not installed; the message names the extra that brings it.
      TypeError: `mesh` beside a target that has one.
      ValueError: an unknown target, or a limit that is not between 0 and 1.

    Example:
      >>> x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=P("tp"))
      >>> w = jax.ShapeDtypeStruct((4096, 16384), jnp.bfloat16, sharding=P(None, "tp"))
      >>> layer = jax.shard_map(
      ...     lambda x, w: all_gather_matmul(x, w, "tp", mode="unidirectional"),
      ...     in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"),
      ... )
      >>> assert_overlapped(layer, "v5e:2x2", x, w)
    """
    if not 0 <= exposed_at_most <= 1:
        raise ValueError(
            f"assert_overlapped: exposed_at_most={exposed_at_most} is a share of the time and must "
            "be between 0 and 1"
        )
    if isinstance(target, str):
        target = describe(target, "tp=-1" if mesh is None else mesh)
    elif mesh is not None:
        raise TypeError(
            f"assert_overlapped: mesh={mesh!r} is for a target given as text; {target.name} has a "
            "mesh already"
        )
    played = timeline(compile_for(fn, target, *args, compiler_options=compiler_options))
    share = played.exposed / played.total if played.total else 0.0
    if share > exposed_at_most:
        raise AssertionError(_text(target, played, share, exposed_at_most))


def _text(target: Target, played: Timeline, share: float, limit: float) -> str:
    axes = ",".join(f"{name}={size}" for name, size in target.mesh.shape.items())
    kind = target.mesh.devices.flat[0].device_kind
    about = "" if target.platform == "tpu" else "about "  # a roofline
    lines = [
        f"assert_overlapped: for {target.name} ({target.mesh.size} x {kind}, mesh {axes}) "
        f"{about}{share:.1%} of {_time(played.total)} is exposed communication, more than "
        f"exposed_at_most={limit:.1%}. This is the compiler's schedule under published figures "
        f"({played.estimate}), not a measurement.",
        "Transfers waited for the longest, and all synchronous ones:",
        *_named(played),
        _REMEDY,
    ]
    return "\n".join(lines)


def _named(played: Timeline) -> list[str]:
    """A line for each transfer instruction worth naming; one in a loop runs several times."""
    waited: dict[str, float] = {}
    for event in played.events:
        if event.kind == "wait" and event.row == "compute":
            waited[event.name] = waited.get(event.name, 0.0) + event.seconds
    runs: dict[str, list[Event]] = {}
    for event in played.transfers:
        runs.setdefault(event.name, []).append(event)
    order = sorted(runs, key=lambda name: -waited.get(name, 0.0))
    return [
        _line(runs[name], waited.get(name, 0.0))
        for rank, name in enumerate(order)
        if runs[name][0].synchronous or (rank < _WORST and waited.get(name))
    ]


def _line(runs: list[Event], waited: float) -> str:
    first = runs[0]
    times = f" in {len(runs)} runs" if len(runs) > 1 else ""
    covered = list(dict.fromkeys(name for event in runs for name in event.covers))
    if first.synchronous:
        how = "synchronous: nothing can run beside it"
    elif covered:
        how = f"between its start and its done: {', '.join(covered)}"
    else:
        how = "no matmul between its start and its done"
    return (
        f"  {first.name} ({first.op or 'of the compiler'}), {first.row}: waited "
        f"{_time(waited)} of {_time(sum(event.seconds for event in runs))}{times}, sends "
        f"{sum(event.bytes for event in runs):_.0f} bytes; {how}"
    )


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
