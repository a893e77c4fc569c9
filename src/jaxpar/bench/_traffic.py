"""Bytes that a device sends, read from the traced program rather than from a formula for each op.

What is counted is thus what the program asks for, in the backward pass too and in the dtype on the
wire. A ppermute sends its operand. XLA's own collectives are charged what the bandwidth-optimal
ring algorithm sends, for `n` devices and a local operand of `b` bytes:

    all_gather (n - 1) b    psum_scatter, all_to_all (n - 1) / n b    psum 2 (n - 1) / n b
"""

from collections.abc import Callable
from math import prod
from typing import Any

from jax.sharding import Mesh

# Names of primitives. `_invariant` marks the forms that shard_map's check_vma types as replicated.
_SENT: dict[str, Callable[[int, int], float]] = {
    "ppermute": lambda n, b: b,
    "all_gather": lambda n, b: (n - 1) * b,
    "all_gather_invariant": lambda n, b: (n - 1) * b,
    "all_gather_reduced": lambda n, b: (n - 1) * b,
    "reduce_scatter": lambda n, b: (n - 1) / n * b,
    "all_to_all": lambda n, b: (n - 1) / n * b,
    "psum": lambda n, b: 2 * (n - 1) / n * b,
    "psum_invariant": lambda n, b: 2 * (n - 1) / n * b,
}


def sent_bytes(jaxpr: Any, mesh: Mesh) -> float:
    """Bytes that one device sends while `jaxpr`, a traced program over `mesh`, runs once.

    A loop counts as often as it turns; of a conditional the costliest branch counts.

    Raises:
      ValueError: a `while` loop sends; how often it turns is not known before it runs.
    """
    jaxpr = getattr(jaxpr, "jaxpr", jaxpr)  # a ClosedJaxpr wraps one
    return sum((_equation_bytes(eqn, mesh) for eqn in jaxpr.eqns), 0.0)


def _equation_bytes(eqn: Any, mesh: Mesh) -> float:
    name = eqn.primitive.name
    if name in _SENT:
        axes = eqn.params.get("axes", eqn.params.get("axis_name"))
        devices = prod(mesh.shape[axis] for axis in ((axes,) if isinstance(axes, str) else axes))
        operands = [v.aval.size * v.aval.dtype.itemsize for v in eqn.invars]
        return float(sum(_SENT[name](devices, size) for size in operands))
    inner = [sent_bytes(program, mesh) for program in _programs(eqn.params)]
    if name == "cond":
        return max(inner)
    once = sum(inner, 0.0)
    if name == "while" and once:
        raise ValueError("sent_bytes: a while loop of unknown trip count sends")
    return once * (eqn.params["length"] if name == "scan" else 1)


def _programs(params: dict[str, Any]) -> list[Any]:
    values = [v for p in params.values() for v in (p if isinstance(p, tuple) else (p,))]
    return [v for v in values if hasattr(getattr(v, "jaxpr", v), "eqns")]
