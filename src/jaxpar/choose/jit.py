"""`jax.jit` with the compiler options of the chip."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, update_wrapper
from pathlib import Path
from types import MethodType
from typing import Any

import jax

from jaxpar.arguments.calls import naming, readable, type_error, value_error
from jaxpar.choose.trying import is_trying
from jaxpar.choose.tuning import Tuning, TuningLike, load
from jaxpar.choose.tuning import tuned as tuned_by
from jaxpar.compiler.options import kind_of, options_like, options_of
from jaxpar.platforms.async_options import Options, enclosing_options, telling


@readable
def jit(
    fun: Any = None,
    *,
    mesh: Any = None,
    compiler_options: Any = None,
    tuned: TuningLike | None = None,
    **settings: Any,
) -> Any:
    """Jits a function with the chip's compiler options, and tells `mode="auto"` of them.

    Args:
      fun: a function of global arrays. Inside another function of `jaxpar.jit`, the outer options
        hold, and must include its `compiler_options`. None: a decorator is returned.
      mesh: the program's mesh. None: the context mesh (`jax.set_mesh`), or the default devices.
      compiler_options: a mapping that extends or overrides the chip's options. None: the chip's
        alone.
      tuned: a file of `jaxpar tune`. None: that of a surrounding `jaxpar.tuned`.
      **settings: as for `jax.jit`.

    Returns:
      A function with `trace`, `lower`, `eval_shape` and `clear_cache`, as `jax.jit` returns.

    Raises:
      ValueError: at a call or trace: `tuned` is stale, the options are for another device kind, or
        an enclosing `jax.jit` or `jaxpar.jit` lacks them.

    Example:
      >>> mesh = make_mesh("tp=8")
      >>> step = jit(jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"), mesh=mesh,
      ...     in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")))
      >>> x, w = jnp.arange(64.0).reshape(16, 4), jnp.arange(128.0).reshape(4, 32)
      >>> np.testing.assert_array_equal(step(x, w), x @ w)
    """
    with naming("jit"):
        if fun is None:
            settings |= {"mesh": mesh, "compiler_options": compiler_options, "tuned": tuned}
            return partial(jit, **settings)
        if not callable(fun):
            raise type_error(f"fun must be a function, got {fun!r}")
        if mesh is not None:
            kind_of(mesh, "mesh")
        tuning: Any = tuned
        if tuning is not None and not isinstance(tuning, (str, Path, Tuning)):
            raise type_error(f"tuned must be a path or a jaxpar.Tuning, got {tuned!r}")
        more = {} if compiler_options is None else options_like(compiler_options)
        return Jitted(fun, mesh, more, tuned, settings)


class Jitted:
    """A function, jitted with the options of the chip for which it is called."""

    def __init__(
        self,
        fun: Callable[..., Any],
        mesh: Any,
        more: Options,
        tuning: TuningLike | None,
        settings: dict[str, Any],
        base: Options | None = None,
    ) -> None:
        update_wrapper(self, fun)
        self._fun, self._mesh, self._more, self._settings = fun, mesh, more, settings
        self._tuning, self._base = tuning, base
        self._jitted: dict[str, tuple[Options, Any]] = {}  # by kind of chip
        self._within: Any = jax.jit(fun, **settings)  # for calls from another `Jitted`

    def over(self, base: Options) -> tuple[Jitted, Options]:
        """Returns the function with `base` for the chip's options, and its options."""
        new = Jitted(self._fun, self._mesh, self._more, self._tuning, self._settings, base)
        return new, {**base, **self._more}

    def calling(self, caller: Callable[..., Any]) -> Jitted:
        """Jits a caller of this function, without its settings."""
        return Jitted(caller, self._mesh, self._more, self._tuning, {}, self._base)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with self.ready() as jitted:
            return jitted(*args, **kwargs)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def trace(self, *args: Any, **kwargs: Any) -> Any:
        with self.ready() as jitted:
            return jitted.trace(*args, **kwargs)

    def lower(self, *args: Any, **kwargs: Any) -> Any:
        """Lowers like `jax.jit`; the result compiles with the options."""
        with self.ready() as jitted:
            return jitted.lower(*args, **kwargs)

    def eval_shape(self, *args: Any, **kwargs: Any) -> Any:
        with self.ready() as jitted:
            return jitted.eval_shape(*args, **kwargs)

    def clear_cache(self) -> None:
        for jitted in (self._within, *(jitted for _, jitted in self._jitted.values())):
            jitted.clear_cache()

    @contextmanager
    def ready(self) -> Generator[Any]:
        """Yields the jitted function while its options and tuning hold."""
        with ExitStack() as said:
            outer = enclosing_options()
            if outer is None:
                options, jitted = self._for_chip()
                kind = kind_of(self._mesh) if self._base is None else None
                said.enter_context(telling(options, kind, enclosing=True))
            else:
                self._require(outer)
                jitted = self._within
            if self._tuning is not None and not is_trying():
                self._tuning = load(self._tuning)  # read once
                said.enter_context(tuned_by(self._tuning))
            yield jitted

    def _require(self, outer: Options) -> None:
        missing = {name: value for name, value in self._more.items() if outer.get(name) != value}
        if missing:
            name = getattr(self._fun, "__name__", self._fun)
            raise value_error(
                f"jit: {name} has compiler options that its jitted caller lacks: {missing}; only "
                "those of the outermost jitted function count: give them there"
            )

    def _for_chip(self) -> tuple[Options, Any]:
        kind = kind_of(self._mesh)
        if kind not in self._jitted:
            options = {**(options_of(kind) if self._base is None else self._base), **self._more}
            jitted = jax.jit(self._fun, compiler_options=options or None, **self._settings)
            self._jitted[kind] = options, jitted
        return self._jitted[kind]


def jitted_with(fn: Any, options: Options) -> tuple[Any, Options]:
    """Returns `fn` jitted with `options` and its own, and all options."""
    if isinstance(fn, Jitted):
        return fn.over(options)
    return fn if hasattr(fn, "trace") else Jitted(fn, None, {}, None, {}, options), options


def jitted_like(fn: Any, caller: Callable[..., Any]) -> Callable[..., Any]:
    """Jits `caller`, which calls `fn`, as `jaxpar.jit` jitted `fn`."""
    return fn.calling(caller) if isinstance(fn, Jitted) else caller


@contextmanager
def enclosing(fn: Any) -> Generator[None]:
    """Traces `fn` as a part of others, with its own options."""
    with fn.ready() if isinstance(fn, Jitted) else nullcontext():
        yield
