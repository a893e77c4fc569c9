"""Assertions about a compiled program: its overlap, collectives and memory."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.schedule import ExposedCollective, Finding, Target, compile_for, explain, timeline
from jaxpar.schedule import target as describe
from jaxpar.tools.explain.explanation_text import place_of, title_of
from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.explain.memory import live_at_peak
from jaxpar.tools.toolkit_api import MeshAxes, Number, readable
from jaxpar.tools.toolkit_api import size_text as size

_WORST = 3  # findings in a text
_RESHARDS = ("all-gather", "all-to-all", "collective-permute")
_SHOWN = 8  # arrays in a text
_REMEDY = (
    "Remedy: the edits above; or raise exposed_at_most. `jaxpar explain module:function` compiles "
    "edits and says what they gain."
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
    """Asserts that `fn`, as compiled, waits for communication at most a given share of its time.

    The program is compiled for devices that need not be present. Its schedule is simulated
    (`jaxpar.schedule.timeline`), not measured; on GPUs without XLA's tables, times are rooflines.
    Time is exposed while a device only waits for a transfer.

    Args:
      fn: a function of global arrays, as for `jaxpar.schedule.compile_for`. A `jax.shard_map` in it
        may leave out its mesh.
      target: from `jaxpar.schedule.target`, or its text such as `"v5e:2x4"` or `"h100:8"`.
      *args: global arrays or `jax.ShapeDtypeStruct`s, whose `sharding` may be a `PartitionSpec`.
      exposed_at_most: the largest exposed share of the total time.
      mesh: as for `jaxpar.make_mesh`, only if `target` is text. None: `"tp=-1"`.
      compiler_options: as for `jaxpar.schedule.compile_for`.

    Raises:
      AssertionError: more is exposed. The text has the longest waits with line, cause and edit.
      ImportError: the compiler is not installed; the message names the pip extra.
      ValueError: the target is unknown, or the limit is not between 0 and 1.

    Example:
      >>> x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=P("tp"))
      >>> w = jax.ShapeDtypeStruct((4096, 16384), jnp.bfloat16, sharding=P(None, "tp"))
      >>> layer = jax.shard_map(
      ...     lambda x, w: all_gather_matmul(x, w, "tp", mode="unidirectional"),
      ...     in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"),
      ... )
      >>> assert_overlapped(layer, "v5e:2x2", x, w)
    """
    name = "assert_overlapped"
    if not 0 <= exposed_at_most <= 1:
        raise ValueError(
            f"{name}: exposed_at_most={exposed_at_most} is a share of the time and must "
            "be between 0 and 1"
        )
    target = _described(name, target, mesh)
    program = compile_for(fn, target, *args, compiler_options=compiler_options)
    played = timeline(program)
    share = played.exposed / played.total if played.total else 0.0
    if share <= exposed_at_most:
        return
    about = "" if target.platform == "tpu" else "about "  # a roofline
    findings = explain(program, tries=0, findings=_WORST).findings
    lines = [
        f"{name}: for {_text(target)} {about}{share:.1%} of {_time(played.total)} is exposed "
        f"communication, more than exposed_at_most={exposed_at_most:.1%}. This is the compiler's "
        f"schedule on a model of the chip ({played.estimate}), not a measurement.",
        "Waited for the longest:",
        *(line for finding in findings for line in _lines(finding)),
        _REMEDY,
    ]
    raise AssertionError("\n".join(lines))


@readable
def assert_no_resharding(
    fn: Callable[..., Any],
    target: Target | str,
    *args: Any,
    mesh: MeshAxes | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> None:
    """Asserts that the partitioner moves no array to another sharding.

    All-gathers, all-to-alls and permutes that it inserts are refused. Sums are not: a product over
    a sharded dimension needs them. Arguments and other errors are as for `assert_overlapped`.

    Raises:
      AssertionError: there are such moves. The text has each move's line, the array, and its
        sharding before and after.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P())
      >>> assert_no_resharding(lambda x, w: x @ w, "v5e:2x2", x, w)
    """
    name = "assert_no_resharding"
    target = _described(name, target, mesh)
    moves = [
        e
        for e in _sent(fn, target, args, compiler_options).all()
        if e.inserted and e.collective in _RESHARDS
    ]
    if moves:
        lines = [
            f"{name}: for {_text(target)} the partitioner moves arrays that lie otherwise than "
            f"they are wanted, in {len(moves)} place{'s' * (len(moves) > 1)}:",
            *(f"  {title_of(e)}\n    {place_of(e)}\n    {e.moved}" for e in moves),
            "Remedy: give each array where it is made the sharding that is wanted (in_shardings, "
            "with_sharding_constraint), or write the collective, with jax.shard_map.",
        ]
        raise AssertionError("\n".join(lines))


@readable
def assert_collectives(
    fn: Callable[..., Any],
    target: Target | str,
    *args: Any,
    expected: Mapping[str, Any],
    mesh: MeshAxes | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> None:
    """Asserts which collectives a compiled program runs, how often, and how much they send.

    Counts are those of the compiled module: with collectives that the compiler adds, without those
    it joins or drops. A loop's collective counts as often as it runs. Other arguments and errors
    are as for `assert_overlapped`.

    Args:
      expected: all collectives. A key is phase (forward, backward or recomputation), collective and
        axes, as in `"forward all-gather over tp"`. A value is the number of runs, or
        `(runs, bytes)`, with the bytes that a device sends in all runs.

    Raises:
      AssertionError: the program runs other collectives. The text has expected and found ones, with
        lines.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> gather = jax.shard_map(lambda x: lax.all_gather(x, "tp", tiled=True), in_specs=P("tp"),
      ...     out_specs=P(None), check_vma=False)
      >>> assert_collectives(gather, "v5e:2x2", x,
      ...     expected={"forward all-gather over tp": (1, 1024 * 1024 * 2 * 3 // 4)})
    """
    name = "assert_collectives"
    target = _described(name, target, mesh)
    sent = _sent(fn, target, args, compiler_options).all()
    runs, moved = Counter[str](), Counter[str]()
    for e in sent:
        runs[_key(e)] += e.runs
        moved[_key(e)] += round(e.bytes)
    wrong: list[str] = []
    for key in dict.fromkeys((*expected, *runs)):
        wanted = expected.get(key, 0)
        times, sends = wanted if isinstance(wanted, tuple) else (wanted, None)
        if runs[key] != times or sends not in (None, moved[key]):
            more = "" if sends is None else f" sending {sends:_} bytes"
            wrong.append(
                f"  {key}: expected {times}{more}, found {runs[key]} sending {moved[key]:_} bytes"
            )
            wrong += [f"    {place_of(e)}: {e.runs}" for e in sent if _key(e) == key]
    if wrong:
        lines = [
            f"{name}: for {_text(target)} the compiled program has other collectives than expected "
            "(runs in a step, bytes that one device sends):",
            *wrong,
        ]
        raise AssertionError("\n".join(lines))


@readable
def assert_peak_memory(
    fn: Callable[..., Any],
    target: Target | str,
    *args: Any,
    at_most: Number,
    mesh: MeshAxes | None = None,
    compiler_options: dict[str, Any] | None = None,
) -> None:
    """Asserts how much memory a compiled program needs at most on a device.

    Other arguments and errors are as for `assert_overlapped`.

    Args:
      at_most: bytes in the compiler's plan, with arguments and results.

    Raises:
      AssertionError: it needs more. The text has the largest arrays at the peak, with their lines.

    Example:
      >>> x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
      >>> assert_peak_memory(jnp.sin, "v5e:2x2", x, at_most=2 * 1024 * 1024)
    """
    name = "assert_peak_memory"
    target = _described(name, target, mesh)
    program = compile_for(fn, target, *args, compiler_options=compiler_options)
    peak = program.memory.peak
    if peak > at_most:
        arrays = live_at_peak(Exposures(program, timeline(program)))[:_SHOWN]
        lines = [
            f"{name}: for {_text(target)} a device needs {peak:_} bytes ({size(peak)}), more than "
            f"at_most={at_most:_} ({size(at_most)}). The largest arrays at the peak:",
            *(
                f"  {size(live.bytes)} {live.array} {live.what}"
                + (f" at {live.line}" if live.line else "")
                + f", {live.phase}"
                for live in arrays
            ),
            "Remedy: shard what is large over more axes, donate arguments that results replace, "
            "recompute activations with jax.checkpoint, or cut the batch into microbatches.",
        ]
        raise AssertionError("\n".join(lines))


def _described(name: str, target: Target | str, mesh: MeshAxes | None) -> Target:
    if isinstance(target, str):
        return describe(target, "tp=-1" if mesh is None else mesh)
    if mesh is not None:
        raise TypeError(
            f"{name}: mesh={mesh!r} is for a target given as text; {target.name} has a mesh already"
        )
    return target


def _sent(
    fn: Callable[..., Any], target: Target, args: Any, options: dict[str, Any] | None
) -> Exposures:
    program = compile_for(fn, target, *args, compiler_options=options)
    return Exposures(program, timeline(program))


def _key(e: ExposedCollective) -> str:
    return f"{e.phase} {e.collective} over {','.join(e.axes)}"


def _lines(finding: Finding) -> list[str]:
    return [
        f"  {_time(finding.of.seconds)}: {title_of(finding.of)}",
        f"    {place_of(finding.of)}",
        f"    {finding.cause}: {finding.why}",
        f"    edit: {finding.edit}",
    ]


def _text(target: Target) -> str:
    axes = ",".join(f"{name}={size}" for name, size in target.mesh.shape.items())
    kind = target.mesh.devices.flat[0].device_kind
    return f"{target.name} ({target.mesh.size} x {kind}, mesh {axes})"


def _time(seconds: float) -> str:
    return f"{seconds * 1e3:.3f} ms"
