"""Constants of a traced program."""

from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.core import Tracer
from jax.extend import core

Atom = core.Var | core.Literal
Known = Mapping[core.Var, np.ndarray]

MOST = 1 << 16  # numbers of an array that is read: masks of blocks are small
_SAME = {"copy", "copy_p", "device_put", "optimization_barrier", "pvary", "sharding_constraint"}


def value_of(atom: Atom, known: Known) -> np.ndarray | None:
    if isinstance(atom, core.Literal):
        return _as_array(atom.val)
    return known.get(atom)


def _as_array(value: Any) -> np.ndarray | None:
    if isinstance(value, Tracer):
        return None
    dtype = getattr(value, "dtype", None)
    if np.size(value) > MOST or (dtype is not None and not isinstance(dtype, np.dtype)):
        return None
    return np.asarray(value)


def opened(jaxpr: Any) -> tuple[core.Jaxpr, Known]:
    # Only the small constants are known.
    # From jax 0.12 on a ClosedJaxpr is a Jaxpr.
    inner = jaxpr.jaxpr if isinstance(jaxpr, core.ClosedJaxpr) else jaxpr
    consts = zip(inner.constvars, getattr(jaxpr, "consts", ()), strict=False)
    values = ((var, _as_array(array)) for var, array in consts)
    return inner, {var: value for var, value in values if value is not None}


def learned(jaxpr: core.Jaxpr, known: Known) -> Known:
    """Returns known variables, also passed-on ones."""
    all_known = dict(known)
    for eqn in jaxpr.eqns:
        asked = [value_of(atom, all_known) for atom in eqn.invars]
        values = [value for value in asked if value is not None]
        if len(values) < len(asked):
            continue
        results: Sequence[np.ndarray | None]
        if eqn.primitive.name in _SAME:
            results = values
        elif eqn.primitive.name in ("reshape", "squeeze"):
            results = [values[0].reshape(_shape(eqn.outvars[0]))]
        elif eqn.primitive.name in ("jit", "pjit"):
            inner, consts = opened(eqn.params["jaxpr"])
            within = learned(inner, {**consts, **dict(zip(inner.invars, values, strict=True))})
            results = [value_of(atom, within) for atom in inner.outvars]
        else:
            continue
        pairs = zip(eqn.outvars, results, strict=True)
        all_known |= {var: value for var, value in pairs if value is not None}
    return all_known


def bodies(eqn: core.JaxprEqn, known: Known) -> list[tuple[core.Jaxpr, Known]]:
    leaves = jax.tree.leaves(list(eqn.params.values()))
    parts = [opened(leaf) for leaf in leaves if isinstance(leaf, core.ClosedJaxpr | core.Jaxpr)]
    return [(inner, {**consts, **_handed(eqn, inner, known)}) for inner, consts in parts]


def _handed(eqn: core.JaxprEqn, inner: core.Jaxpr, known: Known) -> Known:
    """Returns known variables with equal outer shapes."""
    name = eqn.primitive.name
    operands = eqn.invars[1:] if name == "cond" else eqn.invars
    if name == "while" or len(operands) != len(inner.invars):
        return {}
    pairs = list(zip(operands, inner.invars, strict=True))
    if name == "scan":
        # Its carry changes. Only the shapes tell which operands are its carry.
        stacked = sum(_shape(outer) != _shape(var) for outer, var in pairs)
        outs = zip(eqn.outvars, inner.outvars, strict=True)
        carried = sum(_shape(outer) == _shape(var) for outer, var in outs)
        pairs = pairs[: len(pairs) - stacked - carried]
    same = [(outer, var) for outer, var in pairs if _shape(outer) == _shape(var)]
    values = [(var, value_of(outer, known)) for outer, var in same]
    return {var: value for var, value in values if value is not None}


def _shape(atom: Atom) -> tuple[int, ...]:
    aval: Any = atom.aval
    return getattr(aval, "shape", ())
