"""Names that are imported on demand, and types that are open at run time.

Both are read from the source under `TYPE_CHECKING`, so nothing is written twice.
"""

import ast
import sys
from collections.abc import Callable, Mapping
from functools import partial, update_wrapper
from importlib import import_module
from typing import Any
from warnings import warn

# The texts that `help` shows for aliases that are open at run time.
SHOWN: dict[str, str] = {}


def _lines(module: str) -> list[ast.stmt]:
    spec: Any = sys.modules[module].__spec__
    body = ast.parse(spec.loader.get_source(module)).body  # in a folder or a zip
    blocks = [node.body for node in body if isinstance(node, ast.If)]
    return [line for block in blocks for line in block]


def names_on_demand(
    package: str, renamed: Mapping[str, tuple[str, dict[str, Any]]] | None = None
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns a module's `__getattr__` and `__dir__`, which import names on demand.

    `renamed` names warn, and have their old defaults.
    """
    homes = {
        to.asname or to.name: (line.module, to.name)
        for line in _lines(package)
        if isinstance(line, ast.ImportFrom) and line.module is not None
        for to in line.names
    }
    for name in ("TYPE_CHECKING", "names_on_demand"):  # not names of the package
        vars(sys.modules[package]).pop(name)

    def get(name: str) -> Any:
        if renamed and name in renamed:
            new, defaults = renamed[name]
            text = f"{package}.{name} is {package}.{new} since 0.6"
            if defaults:
                text += f"; the old name goes on with {defaults} by default"
            warn(text, DeprecationWarning, stacklevel=2)
            value = getattr(sys.modules[package], new)
            return update_wrapper(partial(value, **defaults), value) if defaults else value
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, original = homes[name]
        if home == package:  # a module of the package, not a name in a module
            return import_module(f"{package}.{original}")
        value = getattr(import_module(home), original)
        setattr(sys.modules[package], name, value)
        return value

    def listed() -> list[str]:
        special = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted(special | set(homes))

    return get, listed


def open_types(module: str) -> dict[str, Any]:
    """Returns `Any` for each alias that a module defines for type checkers only."""
    # Otherwise run-time type checkers raise before jaxpar's own checks.
    texts: dict[str, str] = {}
    for line in _lines(module):
        match line:
            case (
                ast.Assign(targets=[ast.Name(name)], value=ast.expr() as value)
                | ast.AnnAssign(target=ast.Name(name), value=ast.expr() as value)
            ):
                texts[name] = _text(value)
            case _:
                pass
    SHOWN.update({name: text for name, text in texts.items() if text != "Any"})
    return dict.fromkeys(texts, Any)


def _text(value: ast.expr) -> str:
    match value:
        case ast.Constant(str(x)):
            return x
        case ast.Call(args=[_, *bounds]):  # it is a TypeVar
            return " | ".join(map(ast.unparse, bounds)) or "Any"
        case ast.Subscript(value=ast.Name("Annotated"), slice=ast.Tuple(elts=[_, ast.Constant(x)])):
            return str(x)
        case _:
            return ast.unparse(value)
