"""FLOPs of a traced program on one device."""

from collections.abc import Iterator
from math import prod
from typing import Any

from jax.extend import core


def device_flops(jaxpr: Any, devices: int) -> float:
    """Counts the FLOPs of all matmuls that one of `devices` runs.

    Inside a `shard_map` shapes are those of one device; outside, work is shared by all. A loop
    whose length is not known while tracing counts once.
    """
    return _count(jaxpr.jaxpr, 1.0 / devices)


def _count(jaxpr: core.Jaxpr, share: float) -> float:
    total = 0.0
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        if name == "dot_general":
            total += share * _dot(eqn)
            continue
        if name in ("ragged_dot", "ragged_dot_general"):
            lhs, out = _shapes(eqn)
            total += share * 2.0 * prod(lhs) * prod(out[-1:])
            continue
        inner = [_count(sub, _share(eqn, share)) for sub in _subjaxprs(list(eqn.params.values()))]
        if name == "cond":
            total += max(inner, default=0.0)
        else:
            total += (eqn.params["length"] if name == "scan" else 1) * sum(inner)
    return total


def _share(eqn: core.JaxprEqn, share: float) -> float:
    if eqn.primitive.name != "shard_map":
        return share
    manual = eqn.params.get("manual_axes", eqn.params["mesh"].axis_names)
    return share * prod(eqn.params["mesh"].shape[name] for name in manual)


def _dot(eqn: core.JaxprEqn) -> float:
    (contracted, _), _ = eqn.params["dimension_numbers"]
    lhs, out = _shapes(eqn)
    return 2.0 * prod(out) * prod(lhs[dim] for dim in contracted)


def _shapes(eqn: core.JaxprEqn) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of the left operand and of the result."""
    lhs: Any = eqn.invars[0].aval
    out: Any = eqn.outvars[0].aval
    return lhs.shape, out.shape


def _subjaxprs(value: Any) -> Iterator[core.Jaxpr]:
    match value:
        case core.ClosedJaxpr():
            yield value.jaxpr
        case core.Jaxpr():
            yield value
        case tuple() | list():
            for item in value:
                yield from _subjaxprs(item)
        case _:
            pass
