"""Jaxprs inside equations, and the names of collectives among primitives."""

from typing import Any

import jax
from jax.extend import core

# Primitives on the left have other names than the `jax.lax` functions that bind them. Names depend
# on the version and on whether varying axes are checked.
LAX_NAMES = {
    "all_gather_invariant": "all_gather",
    "all_gather_reduced": "all_gather",
    "pbroadcast_dynamic": "pbroadcast",
    "psum2": "psum",
    "psum_invariant": "psum",
    "reduce_scatter": "psum_scatter",
    "unreduced_pmax": "pmax",
    "unreduced_pmin": "pmin",
    "unreduced_psum": "psum",
    "unreduced_reduce_scatter": "psum_scatter",
}
COLLECTIVES = {
    *LAX_NAMES.values(),
    *("all_to_all", "pmax", "pmin", "ppermute", "precv", "psend", "ragged_all_to_all"),
}


def subjaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
    """Returns jaxprs in parameters: bodies, branches, called functions."""
    leaves = jax.tree.leaves(list(params.values()))
    opened = (leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf for leaf in leaves)
    return [leaf for leaf in opened if isinstance(leaf, core.Jaxpr)]


def named_axes(jaxpr: core.Jaxpr) -> set[str]:
    """Returns all texts in equations' parameters, among them axes."""
    # Names of functions and values are left out: they may equal an axis' name.
    named: set[str] = set()
    for eqn in jaxpr.eqns:
        texts = [value for key, value in eqn.params.items() if key != "name"]
        named |= {leaf for leaf in jax.tree.leaves(texts) if type(leaf) is str}
        named |= set[str]().union(*map(named_axes, subjaxprs(eqn.params)))
    return named


def type_of(x: core.Var | core.Literal) -> Any:
    return x.aval
