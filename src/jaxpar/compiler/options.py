"""The compiler options of each chip."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any

import jax

from jaxpar.arguments.calls import naming, readable, type_error
from jaxpar.arguments.types import Integer
from jaxpar.axis.checks import check_whole
from jaxpar.platforms.async_options import Options, telling
from jaxpar.platforms.chips import compiler_of

# Bytes of a full array whose transfer takes no longer than a SparseCore's start. Over v6e:2x4,
# 128x8192x8192 takes 33 us with the offload and 30 without; 512 rows take 70 with and without it
# (`jaxpar predict --mesh tp=8 --ops scatter-rows --modes naive`, then `--compiler-options none`).
FEW = 2**22


@readable
def compiler_options(devices: Any = None, *, largest: Integer | None = None) -> Options:
    """Returns the compiler options for programs whose communication overlaps with work.

    `jaxpar.jit` gives them to the program and to `mode="auto"`. Use `jaxpar.compiled_with` if you
    lower and compile by hand.

    Args:
      devices: a `jax.sharding.Mesh`, one of its devices, or a `jaxpar.schedule.Target`. None: the
        context mesh (`jax.set_mesh`), or the default devices.
      largest: bytes of the largest array that the program gathers or sums, on all devices together.
        For 4 MiB or less, the options leave out SparseCores, whose start costs microseconds a
        collective. None: more than 4 MiB.

    Returns:
      A new dictionary for `jax.jit(compiler_options=...)`, empty if no option is known to help.

    Raises:
      TypeError: `devices` is no mesh, device or target.

    Example:
      >>> from jaxpar.schedule import target
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
    """Tells `mode="auto"` the compiler options of programs traced in the `with` block.

    Args:
      options: a mapping, as for `jax.jit(compiler_options=...)`; `{}` for none.

    Cost: programs that were traced with other options are traced again.

    Tracing cannot see options. Outside of the block and of `jaxpar.jit`, `"auto"` reads them from
    the environment (`LIBTPU_INIT_ARGS`, `XLA_FLAGS`), and warns if a chip needs options and there
    are none.

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


def options_like(options: Any) -> Options:
    if not isinstance(options, Mapping) or not all(isinstance(name, str) for name in options):
        raise type_error(
            f"compiler options must be a mapping of names to values, got {options!r}; pass what "
            "jaxpar.compiler_options returns, or {} for none"
        )
    return dict(options)


def options_of(kind: str) -> Options:
    return {option.name: option.value for option in compiler_of(kind).options}


def kind_of(devices: Any, argument: str = "devices") -> str:
    """Returns a `device_kind`; None: of the context."""
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
