"""`jaxpar doctor`: checks installation, devices and collectives."""

import argparse
import json
import os
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import numpy as np
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import Description, agree, describe
from jaxpar.tools.cli.console import UsageError, print_error, status_of
from jaxpar.tools.cli.shared_options import (
    add_processes,
    parse_processes,
    require_folders,
)
from jaxpar.tools.cli.workers import compilers, first_line, start_jax
from jaxpar.tools.toolkit_api import compiler_of, install_command, installed, lacking, write_text

DESCRIPTION = """\
Prints what is installed, which devices there are and which extras are missing. Runs a few
collectives over all devices of all processes. Warns of versions and options that do not
work together.

Without an accelerator it makes 8 CPU devices, as JAX_NUM_CPU_DEVICES does. They are simulated: all
of them run on the cores of this host.
"""
EPILOG = """\
exit status: 1 if JAX does not start, processes differ or are missing, or a result is wrong.

examples:
  jaxpar doctor
  JAX_NUM_CPU_DEVICES=4 jaxpar doctor --json doctor.json
in each of two processes:
  jaxpar doctor --coordinator host:9876 --num-processes 2 --process-id 0
"""

EXTRAS = {
    "bench": "tables, progress and pictures of bench, predict and tune",
    "tpu": "TPUs, and the compiler for TPUs without the devices",
    "gpu": "the compiler for GPUs without the devices",
    "checkpoint": "jaxpar.layout: save, restore",
    "testing": "jaxpar.testing: property tests",
}
PACKAGES = (
    *("jax", "jaxlib", "libtpu", "jax-cuda12-plugin", "jax-cuda13-plugin"),
    *("numpy", "jaxtyping"),
)


@dataclass(frozen=True)
class Check:
    """A collective that ran on all devices; `seconds` times its second run, without compilation."""

    name: str
    seconds: float
    wrong: str


@dataclass(frozen=True)
class Health:
    """All that doctor finds; packages that are not installed have version None."""

    description: Description
    packages: Mapping[str, str | None]
    missing: Mapping[str, tuple[str, ...]]
    compilers: tuple[str, ...]
    checks: tuple[Check, ...]
    hints: tuple[str, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.description, parser.epilog = DESCRIPTION, EPILOG
    add = parser.add_argument
    add_processes(add)
    add(
        "--timeout",
        type=float,
        default=60.0,
        help="seconds to wait for other processes (default: %(default)g)",
    )
    add("--json", metavar="FILE", help="write everything")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    return status_of("jaxpar doctor", partial(_run, args))


def _run(args: argparse.Namespace) -> int:
    rank, count = parse_processes(args)
    require_folders(args, ["json"])
    if args.timeout <= 0:
        raise UsageError(f"--timeout {args.timeout:g} is not positive")
    packages = {name: installed(name) for name in PACKAGES}
    processes = (args.coordinator, rank, count, args.timeout)
    try:
        with start_jax(*processes) as said:
            agree(timeout_s=args.timeout)
            description, checks = describe(), tuple(_checks())
    except (RuntimeError, ValueError) as reason:
        print_error("jaxpar doctor", first_line(str(reason)))
        for hint in hints(packages, os.environ, said="", platform=None):
            print(f"jaxpar doctor: hint: {hint}", file=sys.stderr)
        return 1
    health = Health(
        description,
        packages,
        {extra: tuple(lacking(extra)) for extra in EXTRAS},
        tuple(sorted(compilers())),
        checks,
        (
            *hints(packages, os.environ, said, description.platform, description.devices),
            *starts_that_wait(packages, description.device_kind),
        ),
    )
    if rank == 0:
        if args.json:
            write_text(args.json, json.dumps(asdict(health), indent=1) + "\n")
        print(text(health))
    return 1 if any(check.wrong for check in checks) else 0


def text(health: Health) -> str:
    return "\n".join(_lines(health))


def _lines(health: Health) -> Iterator[str]:
    yield f"jaxpar {jaxpar.__version__}, Python {platform.python_version()}, {platform.platform()}"
    yield ", ".join(f"{name} {number}" for name, number in health.packages.items() if number)
    yield ""
    yield _devices(health.description)
    chip = {"tpu": "TPU", "gpu": "GPU"}
    names = " and ".join(chip[name] for name in health.compilers)
    yield f"compilers that need no devices: {names or 'none'}"
    yield ""
    yield "extras:"
    for extra, what in EXTRAS.items():
        lacks = health.missing[extra]
        state = f"lacks {', '.join(lacks)}: {install_command(extra)}" if lacks else "installed"
        yield f"  {extra:<12}{what}: {state}"
    yield ""
    yield f"collectives over {health.description.devices} devices:"
    for check in health.checks:
        yield f"  {check.name:<21}{check.wrong or f'right, {check.seconds * 1e3:.2f} ms'}"
    if health.hints:
        yield ""
        yield "hints:"
        yield from (f"  {hint}" for hint in health.hints)


def _devices(machine: Description) -> str:
    # More than one CPU device is simulated.
    if machine.platform != "cpu" or machine.devices == machine.processes:
        return str(machine).splitlines()[0]
    here = f"process {machine.process} of {machine.processes} on {machine.host}"
    number = f"{machine.local_devices} simulated CPU devices"
    if machine.processes > 1:
        number += f", of {machine.devices} in all processes"
    return f"{here}: no accelerator; {number}, which share the cores of this host"


def _checks() -> Iterator[Check]:
    mesh = jax.make_mesh((jax.device_count(),), ("all",), axis_types=(AxisType.Auto,))
    n = mesh.size
    x = np.arange(n * n, dtype=np.float32).reshape(n, n)  # a row for each device
    w = np.arange(n * n, dtype=np.float32).reshape(n, n) % 3
    to_all = partial(lax.all_to_all, axis_name="all", split_axis=1, concat_axis=0, tiled=True)
    gathered = partial(jaxpar.all_gather_matmul, axis="all", mode="bidirectional")
    cases: dict[str, tuple[Callable[..., Any], tuple[np.ndarray, ...], np.ndarray]] = {
        "psum": (lambda x: lax.psum(x, "all"), (x,), np.tile(x.sum(0), (n, 1))),
        "all_gather": (lambda x: lax.all_gather(x, "all")[:, 0], (x,), np.tile(x, (n, 1))),
        "psum_scatter": (
            lambda x: lax.psum_scatter(x, "all", scatter_dimension=1, tiled=True),
            (x,),
            x.sum(0)[:, None],
        ),
        "all_to_all": (to_all, (x,), x.T.reshape(-1, 1)),
        "ring_shift": (lambda x: jaxpar.ring_shift(x, "all"), (x,), np.roll(x, 1, 0)),
        "all_gather_matmul": (gathered, (x, np.tile(w, (n, 1))), np.tile(x @ w, (n, 1))),
    }
    for name, (local, args, expected) in cases.items():
        yield _check(name, local, args, expected, mesh)


def _check(
    name: str,
    local: Callable[..., Any],
    args: tuple[np.ndarray, ...],
    expected: np.ndarray,
    mesh: Mesh,
) -> Check:
    rows = NamedSharding(mesh, P("all"))
    placed = [jax.make_array_from_callback(a.shape, rows, a.__getitem__) for a in args]
    run = jaxpar.jit(jax.shard_map(local, mesh=mesh, in_specs=P("all"), out_specs=P("all")))
    jax.block_until_ready(run(*placed))
    start = time.perf_counter()
    array = jax.block_until_ready(run(*placed))
    seconds = time.perf_counter() - start
    wrong = [
        f"device {shard.device.id} has {np.asarray(shard.data).ravel()[:4]}"
        for shard in array.addressable_shards
        if not np.allclose(shard.data, expected[shard.index])
    ]
    return Check(name, seconds, f"WRONG: {wrong[0]} ..." if wrong else "")


def hints(
    packages: Mapping[str, str | None],
    environment: Mapping[str, str],
    said: str,
    platform: str | None,
    devices: int = 0,
) -> Iterator[str]:
    """Yields known problems, each with what to do.

    Args:
      said: the output of JAX's backends during their start.
      platform: None if JAX did not start.
    """
    jax_version, jaxlib = packages.get("jax"), packages.get("jaxlib")
    if jax_version and jaxlib and _numbers(jax_version) != _numbers(jaxlib):
        yield (
            f"jax {jax_version} with jaxlib {jaxlib}: pip install 'jax=={jax_version}' "
            f"'jaxlib=={jax_version}'"
        )
    plugins = {name: packages.get(f"jax-cuda{name}-plugin") for name in ("12", "13")}
    if all(plugins.values()):
        yield (
            "the CUDA plugins for 12 and 13 are both installed, and JAX may take either: "
            "pip uninstall jax-cuda12-plugin jax-cuda12-pjrt"
        )
    for name, version in plugins.items():
        if version and jaxlib and _numbers(version) != _numbers(jaxlib):
            yield (
                f"jax-cuda{name}-plugin {version} with jaxlib {jaxlib}: "
                f"pip install 'jax[cuda{name}]=={jaxlib}'"
            )
    if platform == "cpu" and any(plugins.values()):
        reason = _reason(said, "RuntimeError") or "JAX gives no reason"
        yield f"the CUDA plugin is installed, but finds no GPU that it can use ({reason})"
    if platform == "cpu" and packages.get("libtpu") and os.path.exists("/dev/accel0"):
        yield "libtpu is installed and /dev/accel0 exists, but another process has the TPU"
    wanted = environment.get("JAX_PLATFORMS", "")
    if platform is None and wanted:
        yield f"JAX_PLATFORMS={wanted} allows no other platform; unset it, or add ',cpu'"
    if platform == "cpu" and devices == 1:
        yield "with one CPU device there are no collectives to check: set JAX_NUM_CPU_DEVICES=8"
    flag = "xla_force_host_platform_device_count"
    if flag in environment.get("XLA_FLAGS", "") and "JAX_NUM_CPU_DEVICES" in environment:
        yield f"--{flag} in XLA_FLAGS and JAX_NUM_CPU_DEVICES: JAX refuses both; unset the first"
    if environment.get("LIBTPU_INIT_ARGS") and platform not in (None, "tpu"):
        yield "LIBTPU_INIT_ARGS is set, but there is no TPU: predict compiles with it, too"
    for name in ("JAX_DISABLE_JIT", "JAX_DEBUG_NANS", "JAX_DISABLE_MOST_OPTIMIZATIONS"):
        if environment.get(name, "0").lower() not in ("0", "false", ""):
            yield f"{name}={environment[name]}: programs are right but slow; unset it for timings"
    if jax_version and _numbers(jax_version) < (0, 11):
        yield (
            f"jax {jax_version}: lax.ppermute over several axes numbers devices in the order of "
            "the mesh, not of the tuple (jaxpar's rings do not); vmap(spmd_axis_name=...) needs "
            "check_vma=False"
        )


def starts_that_wait(packages: Mapping[str, str | None], kind: str) -> Iterator[str]:
    """Yields a hint if starts become synchronous."""
    known = compiler_of(kind)
    if not known.options or _numbers(packages.get("jax") or "") < (0, 12):
        return
    what = "reduce-scatter"
    if what in known.frees:
        return
    start = f"jax.lax.psum_scatter_start on {kind}"
    told = (
        "it has no derivative, and an enforced program_order binds the gradient, too; jaxpar "
        "explain finds the starts that a step waits for"
    )
    if option := next((o.name for o in known.options if o.frees == what), None):
        yield (
            f"{start} overlaps only if {option} is set. Without it, program_order aborts the "
            f"compiler. jaxpar.compiler_options(mesh) sets it; {told}"
        )
    else:
        yield (
            f"{start} is synchronous, and in program_order aborts the compiler. Write permutes, or "
            f"use jaxpar's matmul_reduce_scatter; {told}"
        )


def _numbers(version: str) -> tuple[int, ...]:
    digits = [part for part in version.split(".")[:3] if part.isdecimal()]
    return tuple(map(int, digits))


def _reason(said: str, kind: str) -> str | None:
    reasons = [line.partition(f"{kind}: ")[2] for line in said.splitlines() if f"{kind}: " in line]
    return reasons[-1].strip()[:120] if reasons else None
