"""Packages that only the benchmark needs, and the command that installs them."""

from importlib import import_module
from typing import Any

from jaxpar.cli._console import UsageError


def require(module: str) -> Any:
    """Imports a module of the extra `train`, or says how to install it."""
    try:
        return import_module(module)
    except ImportError as missing:
        package = {"orbax": "orbax-checkpoint"}.get(module.partition(".")[0])
        raise UsageError(
            f"{package or module.partition('.')[0]} is not installed; pip install 'jaxpar[train]'"
        ) from missing
