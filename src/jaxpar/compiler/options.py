"""What the compiler should be told on each chip, and what it then runs beside other work."""

from __future__ import annotations

import os
import warnings
from collections.abc import Collection, Generator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import currentframe
from pathlib import Path
from typing import Any

import jax

from jaxpar.arguments.calls import naming, readable, type_error, value_error
from jaxpar.arguments.checks import check_whole
from jaxpar.arguments.types import Integer

Options = dict[str, bool | int | float | str]

# By their names in HLO.
COLLECTIVES = ("all-gather", "reduce-scatter", "all-reduce", "ragged-all-to-all")

_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload_"


@dataclass(frozen=True)
class Option:
    """An option of the compiler that programs on a chip should have.

    Attributes:
      reason: what goes without it.
      frees: the collective that it makes asynchronous, None if it does something else.
    """

    name: str
    value: bool | str
    reason: str
    frees: str | None = None


@dataclass(frozen=True)
class Compiler:
    """What is known of the compiler of one kind of chip: `options`, and what needs none of them.

    Attributes:
      frees: the collectives that are asynchronous in any case.
    """

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
# Bytes of a whole array that takes no longer than a SparseCore's start: 128x8192x8192 over v6e:2x4
# takes 33 us with the offload and 30 without, 512 rows 70 and 70 (`jaxpar predict --mesh tp=8
# --ops scatter-rows --modes naive`, and that with `--compiler-options none`).
FEW = 2**22
_PERMUTES = Option(
    "xla_max_concurrent_async_collective_permutes",
    "16",
    "without it at most five permutes are under way, and three rings that share no link have six",
)
# Steps of plain jit with FSDP take up to a third less with it. One with tp alone took 4% more
# (v5e). What is written in shard_map is the same either way.
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

# By the beginning of `device_kind`; seen in programs of jax 0.10.0, 0.10.2 and 0.12.0.1. What is
# missing was tried, and is refused or changes nothing: the offload on v4 and v5e, the "async
# collective fusion" on v5e (no change), v5p and v6e (refused).
COMPILERS = {
    "TPU v4": Compiler((_PERMUTES, WHOLE_MATMULS)),
    "TPU v5 lite": Compiler((WHOLE_MATMULS,), frees=frozenset({"all-gather"})),  # with a matmul
    "TPU v5": Compiler((*_SPARSE_CORES, _PERMUTES, WHOLE_MATMULS)),
    "TPU v6 lite": Compiler((*_SPARSE_CORES, WHOLE_MATMULS)),
    # A SparseCore sends them without being told.
    "TPU7x": Compiler((_PERMUTES, WHOLE_MATMULS), frees=frozenset(COLLECTIVES)),
    "NVIDIA": Compiler((_EARLY_STARTS,), frozenset(COLLECTIVES)),
}


@dataclass(frozen=True)
class _Told:
    """Options that are said.

    Attributes:
      kind: for which kind of device they were looked up, if they were.
      enclosing: whether what is traced now is part of the function that they are compiled with.
    """

    options: tuple[tuple[str, Any], ...]
    kind: str | None = None
    enclosing: bool = False


# JAX traces again where the value of such a context is another one: a program that was traced with
# other options is not taken for this one.
_told: Any = jax.make_user_context(default_value=None)


@readable
def compiler_options(devices: Any = None, *, largest: Integer | None = None) -> Options:
    """Returns the compiler options that programs with overlapped communication should have.

    Args:
      devices: a `jax.sharding.Mesh`, one of its devices, or a `jaxpar.schedule.Target`. None: the
        context mesh (`jax.set_mesh`), and without one the default devices.
      largest: bytes of the largest array that the program gathers or sums, of all devices together.
        Up to 4 MiB, as where 128 rows are decoded, SparseCores are told to send nothing: there is
        nothing to hide, and each collective would wait some microseconds for them. None: larger.

    Returns:
      A new dictionary for `jax.jit(compiler_options=...)`, by the kind of chip. Empty where the
      compiler needs none, or none is known to help. On TPUs one of them is for plain `jit`:
      `xla_jf_spmd_threshold_for_windowed_einsum_mib` keeps matmuls of gathered operands whole.

    Raises:
      TypeError: what is no mesh, device or target, or no whole number of bytes.

    Tracing cannot see options, and `mode="auto"` chooses by what they make of collectives:
    `jaxpar.jit` gives both to a program, `jaxpar.compiled_with` says it where programs are lowered
    and compiled by hand.

    Example:
      >>> from jaxpar.schedule import target
      >>> sorted(compiler_options(target("v5p:2x2x1")))[2]
      'xla_tpu_enable_sparse_core_collective_offload_all_gather'
      >>> compiler_options(target("v5e:2x2")), compiler_options(jax.devices("cpu")[0])
      ({'xla_jf_spmd_threshold_for_windowed_einsum_mib': '1000000'}, {})
    """
    with naming("compiler_options"):
        kind = kind_of(devices)
        if largest is None:
            return options_of(kind)
        few = check_whole("largest", largest, 0) <= FEW
        return {
            option.name: "false" if few and option.frees else option.value
            for option in compiler_of(kind).options
        }


@readable
@contextmanager
def compiled_with(options: Any) -> Generator[None]:
    """Says with which compiler options what is traced here will be compiled.

    Args:
      options: a mapping, as for `jax.jit(compiler_options=...)`; `{}` for none.

    Raises:
      TypeError: what is no mapping.

    Cost: programs are traced again that were traced with other options.

    `mode="auto"` takes other ways where the compiler makes collectives asynchronous, which depends
    on its options, which tracing cannot see. Where nothing says what they are, it looks for them
    in the environment (`LIBTPU_INIT_ARGS`, `XLA_FLAGS`), reckons without them, and warns on chips
    that should have some.

    Example:
      >>> options = compiler_options()
      >>> with compiled_with(options):
      ...     lowered = jax.jit(lambda x: 2 * x).lower(jnp.ones(8))
      >>> compiled = lowered.compile(compiler_options=options)
    """
    with naming("compiled_with"):
        options = options_like(options)
    with telling(options):
        yield


@contextmanager
def telling(options: Options, kind: str | None = None, enclosing: bool = False) -> Generator[None]:
    """Says the options of what is traced here, as `_Told` has them."""
    with _told(_Told(tuple(sorted(options.items())), kind, enclosing)):
        yield


def enclosing_options() -> Options | None:
    """Returns the options of the function of `jaxpar.jit` that is traced here, None if none is."""
    told: _Told | None = _told.value
    return dict(told.options) if told is not None and told.enclosing else None


def options_like(options: Any) -> Options:
    """Returns a new dictionary of compiler options, or raises a `TypeError` of what is none."""
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise type_error(
            f"compiler options must be a mapping of names to values, got {options!r}; pass what "
            "jaxpar.compiler_options returns, or {} for none"
        )
    return dict(options)


def traced_asynchronous() -> frozenset[str]:
    """Returns the collectives that the compiler runs beside other work, where it is traced.

    They are those of the chip that the enclosing `shard_map` is traced for and of the options that
    are said, or found in the environment. On a chip that should have some, none found is a warning.
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
    """Returns the options that are said, where it is traced; or those of `names` found elsewhere.

    The environment has options of other programs, too: there only those count that are asked for.
    """
    told: _Told | None = _told.value
    found = environment_options() if told is None else dict(told.options)
    return {name: value for name, value in found.items() if told is not None or name in names}


def _warn() -> None:
    # The line of the user's, behind however many of the package's.
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
    """The options of `--name=value` and `--name` in the variables that XLA reads."""
    words = f"{os.environ.get('LIBTPU_INIT_ARGS', '')} {os.environ.get('XLA_FLAGS', '')}".split()
    given = [word.removeprefix("--").partition("=") for word in words]
    return {name: value or "true" for name, _, value in given}


def options_of(kind: str) -> Options:
    """The options that programs for a kind of chip should have."""
    return {option.name: option.value for option in compiler_of(kind).options}


def compiler_of(kind: str) -> Compiler:
    """Returns what is known of the compiler of a kind of chip; of an unknown kind nothing."""
    return next((found for name, found in COMPILERS.items() if kind.startswith(name)), Compiler())


def kind_of(devices: Any, argument: str = "devices") -> str:
    """The `device_kind` of a mesh, a device or a target; of None that of the context."""
    if devices is None:
        device = jax.sharding.get_abstract_mesh().abstract_device
        return jax.devices()[0].device_kind if device is None else device.device_kind
    mesh = getattr(devices, "mesh", devices)  # of a target
    if isinstance(mesh, jax.sharding.Mesh):
        return mesh.devices.flat[0].device_kind
    device = getattr(mesh, "abstract_device", mesh)  # of an AbstractMesh
    kind = getattr(device, "device_kind", None)
    if not isinstance(kind, str):
        raise type_error(
            f"{argument} must be a mesh, a device or a target, got {devices!r}; pass a "
            "jax.sharding.Mesh, or none to take the context's (jax.set_mesh)"
        )
    return kind
