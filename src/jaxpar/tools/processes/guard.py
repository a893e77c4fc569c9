"""A guard around a step: no silent hang, but who is where."""

from __future__ import annotations

from collections.abc import Callable
from functools import update_wrapper
from operator import attrgetter
from types import MethodType, TracebackType
from typing import Any

import jax
from jax.core import Tracer

from jaxpar.tools.private_names import (
    Integer,
    Number,
    check_number,
    check_whole,
    naming,
    readable,
    type_error,
    value_error,
)
from jaxpar.tools.processes.call import GuardedCall
from jaxpar.tools.processes.guarded_programs import TracedProgram, program_of, traced
from jaxpar.tools.processes.watch import watch


@readable
def guard(what: Any = "step", *, timeout_s: Number = 60, exit_code: Integer | None = None) -> Any:
    """Has every process say who is where, once a step takes longer than a limit.

    A collective waits for all processes: one that is missing, ended, slow, still compiling or runs
    another program hangs the others without a word, or has them compute garbage. Around a step,
    each process reports to process 0 what it is at; past the limit, as soon as a process is gone,
    or where two run different programs, all of them print where each is, what is wrong, and the
    line of the collective that the others wait in.

    Around a function of `jax.jit` or `jaxpar.jit` programs are compared, too, whenever one is new,
    and before it is compiled: if they differ, all processes that have not started it yet raise an
    error with the first difference. Calls must come in the same order in all processes, from one
    thread.

    Args:
      what: a jitted function; any other function, of which it is known where its Python is and
        which functions it compiles; or the name of a step, for `with`.
      timeout_s: seconds without progress after which everyone prints, again after twice that, four
        times that, and so on. Longer than your longest step takes; where `what` is jitted, without
        its compilation.
      exit_code: ends the process with this status once it has printed; None: it goes on waiting.

    Returns:
      Of a function, one that is called in the same way. Of a name, a context manager, which is a
      decorator, too; `until(arrays)` of it has the step last until these are computed.

    Raises:
      ValueError: from the guarded function: processes run different programs.
      TypeError: `what` is neither a function nor a name.

    Cost: nothing in the compiled program. A call takes 5 us longer, and up to 1 us for each array
    of its arguments, while the device works on the step before (measured on a CPU); a thread sends
    half a kilobyte to process 0 twice a second. A new program is lowered and compared before it is
    compiled, once; the smallest of a step's results is kept until it is computed.

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
    """A guard with a name, around whatever stands in a `with`."""

    def __init__(self, name: str, limit: float, exit_code: int | None) -> None:
        self._name, self._limit, self._code = name, limit, exit_code
        self._calls: list[GuardedCall] = []
        if jax.distributed.is_initialized():
            watch().start()  # others can then be told where this process is before its first call

    def __call__(self, function: Callable[..., Any]) -> Guarded:
        """Guards a function, under this guard's name."""
        return Guarded(function, self._limit, self._code, self._name)

    def __enter__(self) -> Guard:  # noqa: PYI034 (checked at run time, where Self is not known)
        self._calls.append(watch().enter(self._name, self._limit, self._code))
        return self

    def until(self, arrays: Any) -> None:
        """Has the step last until these arrays are computed; does not wait for them."""
        self._calls[-1].wait_for(arrays)

    def __exit__(
        self,
        kind: type[BaseException] | None,
        raised: BaseException | None,
        _: TracebackType | None,
    ) -> None:
        watch().leave(self._calls.pop(), raised)


class Guarded:
    """A function with a guard around each of its calls."""

    def __init__(
        self, function: Callable[..., Any], limit: float, exit_code: int | None, name: str = ""
    ) -> None:
        update_wrapper(self, function)
        self._function, self._limit, self._code = function, limit, exit_code
        self._name = name or getattr(function, "__name__", type(function).__name__)
        self._is_jitted = hasattr(function, "trace") and hasattr(function, "lower")
        self._programs: dict[Any, TracedProgram] = {}  # by the kinds of arguments
        self._traced: dict[Any, TracedProgram] = {}  # by what jit has traced
        self._has_static = False
        self._last: tuple[Any, TracedProgram] | None = None
        if jax.distributed.is_initialized():
            watch().start()

    def __getattr__(self, name: str) -> Any:
        """What the function has besides, such as `lower`."""
        if name == "_function":  # before it is set
            raise AttributeError(name)
        return getattr(self._function, name)

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        """As a method of an instance, which is then the first argument."""
        return self if instance is None else MethodType(self, instance)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the function; while another one is traced, that is all."""
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
        """The program for arguments of this kind, traced if it is new."""
        key = tree, _kinds(leaves, self._has_static)
        if self._last is not None and self._last[0] == key:
            return self._last[1]
        if key not in self._programs:
            call.do("tracing")
            found = traced(self._function, args, kwargs)
            # Which of the values that are no arrays are static is seen by what jit traces anew.
            if found.jaxpr in self._traced:
                return self._traced[found.jaxpr]
            program = program_of(self._name, found, args, kwargs)
            self._has_static |= program.has_static
            key = tree, _kinds(leaves, self._has_static)
            self._programs[key] = self._traced[found.jaxpr] = program
        self._last = key, self._programs[key]
        return self._programs[key]


_KIND = attrgetter("shape", "dtype", "weak_type", "sharding")


def _kinds(leaves: list[Any], with_values: bool) -> tuple[Any, ...]:
    """By what jit tells arguments apart; by the values of those that are no arrays if asked."""
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
