"""Jaxprs inside equations, their lines, and the names of collectives among primitives."""

from pathlib import Path
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
_NOT_OWN = str(Path(jax.__file__).parent), str(Path(__file__).parents[1])


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


def user_line(eqn: core.JaxprEqn) -> str:
    """Returns where the user's program made an equation, such as ` at model.py:12`."""
    frames = getattr(eqn.source_info.traceback, "frames", ())
    outside = (frame for frame in frames if not frame.file_name.startswith(_NOT_OWN))
    return next((f" at {Path(frame.file_name).name}:{frame.line_num}" for frame in outside), "")
