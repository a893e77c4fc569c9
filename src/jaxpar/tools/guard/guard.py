"""A guard around a step."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from operator import attrgetter
from types import MethodType, TracebackType
from typing import Any

import jax
from jax.core import Tracer

from jaxpar.tools.guard.call import GuardedCall
from jaxpar.tools.guard.guarded_programs import TracedProgram, program_of, traced
from jaxpar.tools.guard.watch import watch
from jaxpar.tools.toolkit_api import (
    Integer,
    Number,
    check_number,
    check_whole,
    naming,
    readable,
    type_error,
    value_error,
)


@readable
def guard(what: Any = "step", *, timeout_s: Number = 60, exit_code: Integer | None = None) -> Any:
    """Watches a step: after a time limit, every process prints what each one is executing.

    All print what is wrong at the limit, if a process is gone or silent, or if programs differ: a
    silent one before JAX ends all for it (`initialize(heartbeat_timeout_seconds=)`). They name the
    first collective that needs a missing process, and each process's place in the mesh of a jitted
    function's arguments: `process 2 (pp=2)` has the stages of device 2 along a pipeline.

    Each new program of a jitted function is compared before it is compiled. If programs differ,
    each process whose program has not started raises an error with the first difference. Calls must
    come in the same order in all processes, from one thread.

    Args:
      what: a function of `jax.jit` or `jaxpar.jit`; any other function, for which the Python line
        and compilations are printed; or a step's name, for `with`.
      timeout_s: seconds without progress until all print; they print again after twice as long, and
        so on. Choose more than your longest step takes, not counting compilation if `what` is
        jitted.
      exit_code: the status with which the process ends after printing, but not of silence before
        the limit. None: it goes on waiting.

    Returns:
      For a function, a function with the same signature. For a name, a context manager and
      decorator. Its `until(arrays)` makes the step last until these are computed.

    Raises:
      ValueError: `timeout_s` is not positive; from the guarded function: programs differ.

    Cost: nothing in the compiled program. A call takes the host 5 us more (measured on a CPU), and
    up to 1 us for each array argument, while the device works. A thread sends half a kilobyte to
    process 0 twice a second. A new program is lowered and compared once.

    Example:
      >>> step = guard(jax.jit(lambda x: x + 1), timeout_s=30)
      >>> float(step(jnp.float32(1)))
      2.0
      >>> with guard("evaluation", timeout_s=30) as guarded:
      ...     guarded.until(step(jnp.zeros(3)))
    """
    with naming("guard"):
        limit = check_number("timeout_s", timeout_s)
        if limit <= 0:
            raise value_error(f"timeout_s={timeout_s} must be more than 0")
        code = None if exit_code is None else check_whole("exit_code", exit_code, 0, 255)
        if isinstance(what, str):
            return Guard(what, limit, code)
        if not callable(what):
            raise type_error(f"what must be a function or the name of a step, got {what!r}")
        return Guarded(what, limit, code)


class Guard:
    def __init__(self, name: str, limit: float, exit_code: int | None) -> None:
        self._name, self._limit, self._code = name, limit, exit_code
        self._calls: list[GuardedCall] = []
        if jax.distributed.is_initialized():
            watch().start()  # so that others know where this process is before its first call

    def __call__(self, function: Callable[..., Any]) -> Guarded:
        return Guarded(function, self._limit, self._code, self._name)

    def __enter__(self) -> Guard:  # noqa: PYI034 (checked at run time, where Self is not known)
        self._calls.append(watch().enter(self._name, self._limit, self._code))
        return self

    def until(self, arrays: Any) -> None:
        """Makes the step last until these are computed, without waiting."""
        self._calls[-1].wait_for(arrays)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        watch().leave(self._calls.pop(), raised)


class Guarded:
    def __init__(
        self, function: Callable[..., Any], limit: float, exit_code: int | None, name: str = ""
    ) -> None:
        update_wrapper(self, function)
        self._function, self._limit, self._code = function, limit, exit_code
        self._name = name or getattr(function, "__name__", type(function).__name__)
        self._is_jitted = hasattr(function, "trace") and hasattr(function, "lower")
        self._programs: dict[Any, TracedProgram] = {}  # by the kinds of arguments
        self._traced: dict[Any, TracedProgram] = {}  # by the traced jaxpr
        self._has_static = False
        self._last: tuple[Any, TracedProgram] | None = None
        if jax.distributed.is_initialized():
            watch().start()

    def __getattr__(self, name: str) -> Any:
        if name == "_function":  # before it is set
            raise AttributeError(name)
        return getattr(self._function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # Inside of another trace there is no guard.
        leaves, tree = jax.tree.flatten((args, kwargs))
        if any(issubclass(kind, Tracer) for kind in set(map(type, leaves))):
            return self._function(*args, **kwargs)
        call = watch().enter(self._name, self._limit, self._code, is_jitted=self._is_jitted)
        try:
            if self._is_jitted:
                call.run(self._program(call, tree, leaves, args, kwargs))
            out = self._function(*args, **kwargs)
            call.wait_for(out)
        except BaseException as raised:
            watch().leave(call, raised)
            raise
        watch().leave(call, None)
        return out

    def _program(
        self, call: GuardedCall, tree: Any, leaves: list[Any], args: tuple[Any, ...], kwargs: Any
    ) -> TracedProgram:
        key = tree, _kinds(leaves, self._has_static)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        if key not in self._programs:
            call.do("tracing")
            stage = traced(self._function, args, kwargs)
            # Only a new trace shows which values that are no arrays are static.
            if stage.jaxpr in self._traced:
                return self._traced[stage.jaxpr]
            program = program_of(self._name, stage, args, kwargs)
            self._has_static |= program.has_static
            key = tree, _kinds(leaves, self._has_static)
            self._programs[key] = self._traced[stage.jaxpr] = program
        self._last = key, self._programs[key]
        return self._programs[key]


_KIND = attrgetter("shape", "dtype", "weak_type", "sharding")


def _kinds(leaves: list[Any], with_values: bool) -> tuple[Any, ...]:
    try:
        return tuple(map(_KIND, leaves))
    except AttributeError:
        return tuple(
            _KIND(x) if isinstance(x, jax.Array) else _of_other(x, with_values) for x in leaves
        )


def _of_other(x: Any, with_value: bool) -> Any:
    if hasattr(x, "dtype"):
        return x.shape, x.dtype
    return (type(x), x) if with_value else type(x)
