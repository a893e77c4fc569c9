"""Compiler options for a traced program, and the collectives that then overlap with other work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import currentframe
from pathlib import Path
from typing import Any

import jax

from jaxpar.arguments.calls import value_error

Options = dict[str, bool | int | float | str]

# By their names in HLO.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all")

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"


@dataclass(frozen=True)
class Option:
    """A compiler option. It makes the collective that it `frees` asynchronous."""

    name: str
    value: bool | str
    reason: str
    frees: str | None = None


@dataclass(frozen=True)
class Compiler:
    """Facts of a kind of chip's compiler. It `frees` collectives without options."""

    options: tuple[Option, ...] = ()
    frees: frozenset[str] = frozenset()


_SPARSE_CORES = tuple(
    Option(
        _OFFLOAD + name.replace("-", "_"),
        "true",
        f"without it the matrix units wait for each {name}; with it a SparseCore sends meanwhile",
        frees=name,
    )
    for name in COLLECTIVES
)
_PERMUTES = Option(
    "xla_max_concurrent_async_collective_permutes",
    "16",
    "without it at most five permutes are under way, and three rings that share no link have six",
)
# Steps of plain jit with FSDP take up to a third less with it. A step with tp alone takes 4% more
# (v5e). Code in shard_map is the same with and without it.
WHOLE_MATMULS = Option(
    "xla_jf_spmd_threshold_for_windowed_einsum_mib",
    "1000000",
    "without it the partitioner cuts each large matmul of plain jit whose operand it gathers into "
    "a piece for each device, a windowed einsum, in place of a gather and one matmul",
)
_EARLY_STARTS = Option(
    "xla_gpu_enable_latency_hiding_scheduler",
    True,
    "without it a collective starts where the program has it, not as early as its operands are "
    "there",
)

# By the beginning of `device_kind`; seen in programs of jax 0.10.0, 0.10.2 and 0.12.0.1. Other
# options are refused or change nothing: the offload on v4 and v5e, the "async collective fusion"
# on v5e (no change), v5p and v6e (refused).
COMPILERS = {
    "TPU v4": Compiler((_PERMUTES, WHOLE_MATMULS)),
    "TPU v5 lite": Compiler((WHOLE_MATMULS,), frees=frozenset({"all-gather"})),  # with a matmul
    "TPU v5": Compiler((*_SPARSE_CORES, _PERMUTES, WHOLE_MATMULS)),
    "TPU v6 lite": Compiler((*_SPARSE_CORES, WHOLE_MATMULS)),
    # A SparseCore sends them without an option.
    "TPU7x": Compiler((_PERMUTES, WHOLE_MATMULS), frees=frozenset(COLLECTIVES)),
    "NVIDIA": Compiler((_EARLY_STARTS,), frozenset(COLLECTIVES)),
}


@dataclass(frozen=True)
class _Told:
    """Stated options, looked up for a `kind` of device.

    `enclosing`: the traced program is part of the function compiled with them.
    """

    options: tuple[tuple[str, Any], ...]
    kind: str | None = None
    enclosing: bool = False


# JAX traces again if the value of such a context changes. So a program that was traced with other
# options is not reused.
_told: Any = jax.make_user_context(default_value=None)


@contextmanager
def telling(options: Options, kind: str | None = None, enclosing: bool = False) -> Generator[None]:
    with _told(_Told(tuple(sorted(options.items())), kind, enclosing)):
        yield


def enclosing_options() -> Options | None:
    told: _Told | None = _told.value
    return dict(told.options) if told is not None and told.enclosing else None


def traced_asynchronous() -> frozenset[str]:
    """Returns the collectives that overlap with other work in the traced program.

    Warns if the chip needs options, and neither statements nor the environment have them.
    """
    device = jax.sharding.get_abstract_mesh().abstract_device
    compiler = Compiler() if device is None else compiler_of(device.device_kind)
    told: _Told | None = _told.value
    options = None if told is None else dict(told.options)
    if told is not None and device is not None and told.kind not in (None, device.device_kind):
        raise value_error(
            f"a program for {device.device_kind!r} is traced with the compiler options of "
            f"{told.kind!r}; give its mesh: jaxpar.jit(..., mesh=mesh), or call it in "
            "jax.set_mesh(mesh)"
        )
    freeing = [option for option in compiler.options if option.frees]
    if options is None:
        options = environment_options()
        if freeing and not any(option.name in options for option in freeing):
            _warn()
    frees = [o.frees for o in freeing if o.frees and str(options.get(o.name)).lower() == "true"]
    return compiler.frees.union(frees)


def traced_options(names: Collection[str]) -> dict[str, Any]:
    """Returns the stated options, or those of `names` in the environment."""
    told: _Told | None = _told.value
    found = environment_options() if told is None else dict(told.options)
    return {name: value for name, value in found.items() if told is not None or name in names}


def _warn() -> None:
    # Points at the user's line, behind all frames of the package.
    package, frame, level = str(Path(__file__).parent), currentframe(), 1
    while frame is not None and frame.f_code.co_filename.startswith(package):
        frame, level = frame.f_back, level + 1
    warnings.warn(
        "tracing cannot see compiler options, and jaxpar reckons without those that make "
        "collectives asynchronous on this chip. Write jaxpar.jit in place of jax.jit, which gives "
        "both; or say with which options you compile: with jaxpar.compiled_with(options)",
        stacklevel=level,
    )


def environment_options() -> Options:
    words = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {os.environ.get('XLA_FLAGS', '')}".split()
    given = [word.removeprefix("--").partition("=") for word in words]
    return {name: value or "true" for name, _, value in given}


def compiler_of(kind: str) -> Compiler:
    return next((found for name, found in COMPILERS.items() if kind.startswith(name)), Compiler())
