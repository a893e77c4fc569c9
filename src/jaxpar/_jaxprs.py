"""What is inside a traced program: the jaxprs in its equations, and the FLOPs of its matmuls."""

from collections.abc import Sequence
from math import prod
from typing import Any

import jax
from jax.extend import core

Results = Sequence[core.Var | core.Literal]


def subjaxprs(params: dict[str, Any]) -> list[core.Jaxpr]:
    """Returns the jaxprs in an equation's parameters: bodies, branches, called functions."""
    leaves = jax.tree.leaves(list(params.values()))
    opened = (leaf.jaxpr if isinstance(leaf, core.ClosedJaxpr) else leaf for leaf in leaves)
    return [leaf for leaf in opened if isinstance(leaf, core.Jaxpr)]


def device_flops(jaxpr: core.ClosedJaxpr, devices: int) -> float:
    """Counts the FLOPs of all matmuls that one of `devices` runs.

    Inside a `shard_map` shapes are those of one device; outside, work is shared by all. A loop
    whose length is not known while tracing counts once.
    """
    return _count(jaxpr.jaxpr, 1.0 / devices, jaxpr.jaxpr.outvars)


def _count(jaxpr: core.Jaxpr, share: float, results: Results) -> float:
    """Counts what `results` need: a compiler drops the rest, as the forward pass of a gradient."""
    needed: set[core.Var] = {var for var in results if not isinstance(var, core.Literal)}
    total = 0.0
    for eqn in reversed(jaxpr.eqns):
        if not eqn.effects and needed.isdisjoint(eqn.outvars):
            continue
        name = eqn.primitive.name
        if name == "dot_general":
            total += share * _dot(eqn)
        elif name in ("ragged_dot", "ragged_dot_general"):
            lhs, out = _shapes(eqn)
            total += share * 2.0 * prod(lhs) * prod(out[-1:])
        else:
            inner = [
                _count(sub, _share(eqn, share), _needed_inside(eqn, sub, needed))
                for sub in subjaxprs(eqn.params)
            ]
            counted = max(inner, default=0.0) if name == "cond" else sum(inner)
            total += counted * (eqn.params["length"] if name == "scan" else 1)
        needed |= {var for var in eqn.invars if not isinstance(var, core.Literal)}
    return total


def _needed_inside(eqn: core.JaxprEqn, sub: core.Jaxpr, needed: set[core.Var]) -> Results:
    # What a loop carries may be needed by its next trip.
    if eqn.primitive.name in ("scan", "while") or len(sub.outvars) != len(eqn.outvars):
        return sub.outvars
    return [inside for inside, out in zip(sub.outvars, eqn.outvars, strict=True) if out in needed]


def _share(eqn: core.JaxprEqn, share: float) -> float:
    if eqn.primitive.name != "shard_map":
        return share
    key = "manual_axes" if "manual_axes" in eqn.params else "newly_manual_axes"  # from jax 0.12
    manual = eqn.params[key]
    return share * prod(eqn.params["mesh"].shape[name] for name in manual)


def _dot(eqn: core.JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs, out = _shapes(eqn)
    width = max(var.aval.dtype.itemsize for var in eqn.invars)  # type: ignore[attr-defined]
    # Narrow operands are multiplied faster; wide ones are counted as if they were not slower.
    return min(1.0, width / 2) * 2.0 * prod(out) * prod(lhs[dim] for dim in contracted)


def _shapes(eqn: core.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the left operand and of the result."""
    lhs: Any = eqn.invars[0].aval
    out: Any = eqn.outvars[0].aval
    return lhs.shape, out.shape
