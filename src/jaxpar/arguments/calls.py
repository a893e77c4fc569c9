"""Calls of public functions: as `help`, errors and profiles show them."""

import re
import sys
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from difflib import get_close_matches
from functools import wraps
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, cast, get_args, get_origin

import jax

from jaxpar.arguments.lazy_names import SHOWN

Given = ParamSpec("Given")
Result = TypeVar("Result")
Shown = TypeVar("Shown")

# Names of arguments in other libraries and earlier versions, and their names here.
ELSEWHERE = {
    "axis_name": ("axis", "name the mesh axis as axis"),
    **dict.fromkeys(("axis_names", "axis_shapes"), ("axes", "give names with their sizes as axes")),
    **dict.fromkeys(
        ("scatter_dimension", "split_axis", "concat_axis", "axis"),
        ("dim", "give a dimension of an array as dim"),
    ),
    "size": ("shards", "give the number of devices as shards"),
}
USAGE = {"make_mesh": ' (as in make_mesh("dp=4,tp=2"))'}

_BY_PLACE = (Parameter.POSITIONAL_ONLY, Parameter.POSITIONAL_OR_KEYWORD)
_called: ContextVar[str | None] = ContextVar("called", default=None)


def called(otherwise: str = "jaxpar") -> str:
    """Returns the public function that the user called."""
    return _called.get() or otherwise


def public(function: Callable[Given, Result], *, over: Any = None) -> Callable[Given, Result]:
    """Makes errors and profiles show a function's name, and `help` readable annotations.

    In nested calls, errors name the outer function. `over` stands for a missing `axis`.
    """
    takes = signature(function).parameters
    place = list(takes).index("axis") if "axis" in takes else None

    @wraps(function)
    def call(*args: Given.args, **kwargs: Given.kwargs) -> Result:
        axis = kwargs.get("axis", args[place] if place is not None and place < len(args) else over)
        with (
            naming(_called.get() or function.__qualname__),
            jax.named_scope(_scope(function, axis)),
        ):
            _check_fit(function, takes, args, kwargs)
            return as_one_program(function, *args, **kwargs)

    return readable(call)


def _check_fit(
    function: Any, takes: Mapping[str, Parameter], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> None:
    kinds = {name: parameter.kind for name, parameter in takes.items()}
    usage = USAGE.get(function.__qualname__, "")
    unknown = next((name for name in kwargs if name not in takes), None)
    if unknown is not None and Parameter.VAR_KEYWORD not in kinds.values():
        near = " or ".join(get_close_matches(unknown, takes, 2))
        remedy = f"did you mean {near}?" if near else f"it takes {', '.join(takes)}"
        target, told = ELSEWHERE.get(unknown, ("", ""))
        raise type_error(f"no argument {unknown!r}; {told if target in takes else remedy}{usage}")
    places = [name for name, kind in kinds.items() if kind in _BY_PLACE]
    twice = next((name for name in places[: len(args)] if name in kwargs), None)
    if twice is not None:
        dim = twice == "axis" and "dim" in takes
        once = "give a dimension of an array as dim" if dim else "give it once"
        raise type_error(f"{twice} is given by its place and by its name; {once}")
    if len(args) > len(places) and Parameter.VAR_POSITIONAL not in kinds.values():
        this = "self" in places
        named = [name for name, kind in kinds.items() if kind is Parameter.KEYWORD_ONLY]
        remedy = f"give {', '.join(named)} by name" if named else "leave out the extra arguments"
        raise type_error(
            f"{len(args) - this} arguments without a name, of which it takes {len(places) - this}; "
            f"{remedy}{usage}"
        )


class _Text(str):
    def __repr__(self) -> str:
        return str(self)


def readable(shown: Shown) -> Shown:
    """Makes `help` show annotations unquoted, with aliases expanded."""
    known = vars(sys.modules[shown.__module__])

    def meaning(name: re.Match[str]) -> str:
        return SHOWN.get(name[0]) or _written(known.get(name[0], 0)) or name[0]

    def text(annotation: Any) -> Any:
        annotation = getattr(annotation, "__forward_arg__", annotation)  # of a NamedTuple
        if not isinstance(annotation, str):
            return annotation
        return _Text(re.sub(r"\w+", meaning, annotation))

    original = signature(cast(Any, shown))
    parameters = [p.replace(annotation=text(p.annotation)) for p in original.parameters.values()]
    back = text(original.return_annotation)
    cast(Any, shown).__signature__ = original.replace(parameters=parameters, return_annotation=back)
    return shown


def _written(alias: Any) -> str:
    parts = get_args(alias) if get_origin(alias) in (Union, UnionType) else (alias,)
    if not all(part is NoneType or get_origin(part) in (Literal, dict) for part in parts):
        return ""  # types of JAX: users know their names
    texts = ("None" if part is NoneType else str(part).removeprefix("typing.") for part in parts)
    return " | ".join(texts)


def value_error(text: str) -> ValueError:
    return ValueError(f"{called()}: {text}")


def type_error(text: str) -> TypeError:
    return TypeError(f"{called()}: {text}")


def check_among(argument: str, value: Any, known: Sequence[str]) -> None:
    if not isinstance(value, str) or value not in known:
        raise value_error(f"{argument} must be one of {', '.join(known)}, got {value!r}")


def of_user(function: Any, argument: str) -> Callable[..., Any]:
    """Returns a user's function; errors inside name what it calls."""
    if not callable(function):
        raise type_error(f"{argument} must be a function, got {function!r}")

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        with naming(None):
            return function(*args, **kwargs)

    return call


@contextmanager
def naming(name: str | None) -> Generator[None]:
    """Makes errors inside show this name; None: the inner one."""
    token = _called.set(name)
    try:
        yield
    finally:
        _called.reset(token)


def _scope(function: Any, axis: Any) -> str:
    names = getattr(axis, "names", axis)  # from an Axis
    names = (names,) if isinstance(names, str) else names
    if not isinstance(names, tuple | list):  # no axis, or a wrong axis that the function refuses
        return function.__qualname__
    return f"{function.__qualname__}[{','.join(map(str, names))}]"


def as_one_program(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compiles a function as one program inside an eager `jax.shard_map`."""
    # It is not cached, since functions may read changing values.
    if not jax.sharding.get_abstract_mesh().manual_axes:
        return function(*args, **kwargs)
    leaves, tree = jax.tree.flatten((args, kwargs))
    evaluated = [_is_evaluated(x) for x in leaves]
    if not any(evaluated):
        return function(*args, **kwargs)

    def program(arrays: list[jax.Array]) -> Any:
        left = iter(arrays)
        whole = [next(left) if known else x for x, known in zip(leaves, evaluated, strict=True)]
        args, kwargs = tree.unflatten(whole)
        return function(*args, **kwargs)

    return jax.jit(program)([x for x, known in zip(leaves, evaluated, strict=True) if known])


def _is_evaluated(x: Any) -> bool:
    return type(x).__name__ == "ShardMapTracer"
