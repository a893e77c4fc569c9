"""`jax.jit` with what a chip's compiler should be told, and `mode="auto"` told of it."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager
from functools import update_wrapper
from types import MethodType
from typing import Any

import jax

from jaxpar._calls import naming, readable, type_error
from jaxpar._options import Options, compiled_with, kind_of, options_of
from jaxpar._tuning import is_trying, load
from jaxpar._tuning import tuned as tuned_by
from jaxpar._types import TuningLike


@readable
def jit(
    fun: Any,
    *,
    mesh: Any = None,
    compiler_options: Mapping[str, Any] | None = None,
    tuned: TuningLike | None = None,
    **settings: Any,
) -> Jitted:
    """`jax.jit` with the compiler options of the chip, and `mode="auto"` told of them.

    Args:
      fun: a function of global arrays, not called from another jitted one: JAX takes compiler
        options at the outermost `jit` alone.
      mesh: for whose devices. None: the context mesh where it is called or traced
        (`jax.set_mesh`), and without one the default devices.
      compiler_options: more options, or other values; `{}` for those of the chip alone.
      tuned: a file of `python -m jaxpar tune`, as for `jaxpar.tuned`. None: what holds around it.
      **settings: as for `jax.jit`.

    Returns:
      A function with `trace`, `lower`, `eval_shape` and `clear_cache`, as `jax.jit` returns.

    Raises:
      TypeError: `fun` is no function, or `mesh` no mesh.
      ValueError: `tuned` is stale, as soon as it is called or traced.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> step = jit(jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"), mesh=mesh,
      ...     in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")))
      >>> step(jnp.ones((16, 4)), jnp.ones((4, 32))).shape
      (16, 32)
    """
    with naming("jit"):
        if not callable(fun):
            raise type_error(f"fun must be a function, got {fun!r}")
        if mesh is not None:
            kind_of(mesh, "mesh")
        return Jitted(fun, mesh, dict(compiler_options or {}), tuned, settings)


class Jitted:
    """A function that is jitted with the options of the chip for which it is called."""

    def __init__(
        self,
        fun: Callable[..., Any],
        mesh: Any,
        more: Options,
        tuning: TuningLike | None,
        settings: dict[str, Any],
    ) -> None:
        update_wrapper(self, fun)
        self._fun, self._mesh, self._more, self._settings = fun, mesh, more, settings
        self._tuning = tuning
        self._jitted: dict[str, tuple[Options, Any]] = {}  # by the kind of chip

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function."""
        options, jitted = self._for_chip()
        with self._told(options):
            return jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method of an instance, which is then the first argument."""
        return self if instance is None else MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        """As that of `jax.jit`."""
        options, jitted = self._for_chip()
        with self._told(options):
            return jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """As that of `jax.jit`; what it returns compiles with the options."""
        options, jitted = self._for_chip()
        with self._told(options):
            return jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        """As that of `jax.jit`."""
        options, jitted = self._for_chip()
        with self._told(options):
            return jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        """As that of `jax.jit`."""
        for _, jitted in self._jitted.values():
            jitted.clear_cache()

    @contextmanager
    def _told(self, options: Options) -> Generator[None]:
        with compiled_with(options):
            if self._tuning is None or is_trying():
                yield
                return
            self._tuning = load(self._tuning)  # read once
            with tuned_by(self._tuning):
                yield

    def _for_chip(self) -> tuple[Options, Any]:
        kind = kind_of(self._mesh)
        if kind not in self._jitted:
            options = {**options_of(kind), **self._more}
            jitted = jax.jit(self._fun, compiler_options=options or None, **self._settings)
            self._jitted[kind] = options, jitted
        return self._jitted[kind]
