"""The jaxprs inside the equations of a jaxpr."""

from collections.abc import Iterator
from typing import Any

from jax.extend import core


def subjaxprs(value: Any) -> Iterator[core.Jaxpr]:
    """Yields the jaxprs in an equation's parameters: bodies, branches, called functions."""
    match value:
        case core.ClosedJaxpr():
            yield value.jaxpr
        case core.Jaxpr():
            yield value
        case dict():
            for item in value.values():
                yield from subjaxprs(item)
        case tuple() | list():
            for item in value:
                yield from subjaxprs(item)
        case _:
            pass
