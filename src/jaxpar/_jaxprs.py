"""The jaxprs inside the equations of a jaxpr."""

from typing import Any

import jax
from jax.extend import core


def subjaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
    """Returns the jaxprs in an equation's parameters: bodies, branches, called functions."""
    leaves = jax.tree.leaves(list(params.values()))
    opened = (leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf for leaf in leaves)
    return [leaf for leaf in opened if isinstance(leaf, core.Jaxpr)]
