"""Optional dependencies, and commands that install them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from importlib import import_module
from importlib.metadata import PackageNotFoundError, requires, version
from typing import Any

# Distributions whose name differs from the module's.
_DISTRIBUTIONS = {"orbax": "orbax-checkpoint"}


def requirements(extra: str) -> dict[str, str]:
    return dict(_requirements(extra))


def lacking(extra: str, package: str = "jaxpar") -> list[str]:
    """Returns missing distributions, also of extras such as `jax[tpu]`."""
    names: list[str] = []
    for name, requirement in _requirements(extra, package):
        if installed(name) is None:
            names.append(name)
        else:
            names += [need for other in _extras_in(requirement) for need in lacking(other, name)]
    return list(dict.fromkeys(names))


def _extras_in(requirement: str) -> list[str]:
    match = re.search(r"\[(.*)\]", requirement)
    return re.findall(r"[\w-]+", match.group(1)) if match else []


def _requirements(extra: str, package: str = "jaxpar") -> Iterator[tuple[str, str]]:
    try:
        lines = requires(package) or []
    except PackageNotFoundError:  # the files are there, but not installed
        return
    for line in lines:
        requirement, _, marker = line.partition(";")
        of = re.search(r"extra == ['\"]([\w-]+)['\"]", marker)
        if of is None or of.group(1) != extra:
            continue
        name = re.split(r"[\[<>=!~ ]", requirement, maxsplit=1)[0]
        if name == package:  # this extra includes others
            for other in _extras_in(requirement):
                yield from _requirements(other, package)
        else:
            yield name, requirement.strip()


def install_command(extra: str, module: str | None = None) -> str:
    needed = requirements(extra)
    if module is not None:
        package = distribution(module)
        needed = {package: needed.get(package, package)}
    wanted = needed.values() or [f".[{extra}]"]
    return "pip install " + " ".join(f"'{requirement}'" for requirement in wanted)


def distribution(module: str) -> str:
    name = module.partition(".")[0]
    return _DISTRIBUTIONS.get(name, name)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def require(module: str, extra: str, what: str) -> Any:
    """Imports a module of an extra; its absence raises an error with a remedy for `what`."""
    try:
        return import_module(module)
    except ImportError as missing:
        package = distribution(module)
        raise ImportError(f"{what} needs {package}; {install_command(extra, module)}") from missing
