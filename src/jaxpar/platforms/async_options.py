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
from jaxpar.platforms.chips import Compiler, compiler_of

Options = dict[str, bool | int | float | str]


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
    options = environment_options() if told is None else dict(told.options)
    return {name: value for name, value in options.items() if told is not None or name in names}


def _warn() -> None:
    # Points at the user's line, behind all frames of the package.
    package, frame, level = f"{Path(__file__).parents[1]}{os.sep}", currentframe(), 1
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
    pairs = [word.removeprefix("--").partition("=") for word in words]
    return {name: value or "true" for name, _, value in pairs}
