"""Public names that are imported when somebody asks for them."""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def names_on_demand(
    package: str, file: str
) -> tuple[Callable[[str], Any], Callable[[], list[str]]]:
    """Returns `__getattr__` and `__dir__` of a module whose imports stand under `TYPE_CHECKING`.

    Type checkers read these imports. So does this function, from the source: no name is written
    twice, and `import jaxpar` loads none of its parts.
    """
    homes: dict[str, tuple[str, str]] = {}
    for node in ast.parse(Path(file).read_text()).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                if isinstance(line, ast.ImportFrom) and line.module is not None:
                    homes |= {to.asname or to.name: (line.module, to.name) for to in line.names}

    def get(name: str) -> Any:
        if name not in homes:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        home, own = homes[name]
        if home == package:  # a part of the package, not a name in one
            return import_module(f"{package}.{own}")
        found = getattr(import_module(home), own)
        setattr(sys.modules[package], name, found)
        return found

    def listed() -> list[str]:
        own = {name for name in vars(sys.modules[package]) if name.startswith("__")}
        return sorted(own | set(homes))

    return get, listed
