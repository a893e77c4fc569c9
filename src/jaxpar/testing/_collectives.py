"""Counts of a function's collectives and residuals, forward and backward, from its jaxpr."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeAlias

import jax
import jax.numpy as jnp
from jax.extend import core

from jaxpar.arguments.calls import readable
from jaxpar.arguments.unit_text import bytes_of
from jaxpar.choose.jit import enclosing
from jaxpar.compiler.jaxprs import COLLECTIVES, LAX_NAMES, subjaxprs

Var: TypeAlias = Any  # jax.extend has no type of jaxpr variables that fits all versions

Sizes: TypeAlias = Mapping[str, int]  # devices along each mesh axis
Weigh: TypeAlias = Callable[[str, Any, Sizes], float]


def count(jaxpr: core.Jaxpr, platform: str | None) -> Counter[str]:
    counts = _tally(jaxpr, platform, lambda name, eqn, sizes: 1.0, {})
    return Counter({name: int(number) for name, number in counts.items()})


def sent_bytes(jaxpr: core.Jaxpr, platform: str | None) -> int:
    return round(sum(_tally(jaxpr, platform, _sent_bytes, {}).values()))


def _sent_bytes(name: str, eqn: core.JaxprEqn, sizes: Sizes) -> float:
    axes: Any = eqn.params.get("axes", eqn.params.get("axis_name"))
    n = prod(sizes.get(axis, 1) for axis in (axes if isinstance(axes, tuple) else (axes,)))
    shares = {"ppermute": 1.0, "all_gather": n - 1.0}
    reducing = 2 if name in ("psum", "pmax", "pmin") else 1
    share = shares.get(name, reducing * (n - 1) / n)
    return float(sum(share * _bytes(var.aval) for var in eqn.invars))


def _tally(jaxpr: core.Jaxpr, platform: str | None, weigh: Weigh, sizes: Sizes) -> dict[str, float]:
    """Sums `weigh` over a device's collectives, by name."""
    total: dict[str, float] = {}

    def add(part: Mapping[str, float], times: int = 1) -> None:
        for name, weight in part.items():
            total[name] = total.get(name, 0.0) + times * weight

    for eqn in jaxpr.eqns:
        primitive = eqn.primitive.name
        name = primitive.removesuffix("_start")
        name = LAX_NAMES.get(name, name)
        if name in COLLECTIVES:
            add({name: weigh(name, eqn, sizes)})
            continue
        inner_sizes = {**sizes, **eqn.params["mesh"].shape} if primitive == "shard_map" else sizes
        subs = subjaxprs(eqn.params)
        if primitive == "cond":
            subs = _branches(eqn.params, subs, platform)
        inner = [_tally(sub, platform, weigh, inner_sizes) for sub in subs]
        if primitive == "cond":
            names = {name for part in inner for name in part}
            add({name: max(part.get(name, 0.0) for part in inner) for name in names})
            continue
        for part in inner:
            if primitive == "while" and part:
                raise ValueError(
                    "count_collectives: a while loop of an unknown number of iterations runs "
                    f"{sorted(part)} each time; use lax.fori_loop with bounds known while "
                    "tracing, or lax.scan"
                )
            add(part, eqn.params["length"] if primitive == "scan" else 1)
    return total


def _branches(
    params: dict[str, Any], branches: list[core.Jaxpr], platform: str | None
) -> list[core.Jaxpr]:
    """Returns the branches that may run: one, if they depend on a known platform.

    Others may be impossible to count.
    """
    platforms = params.get("branches_platforms")
    if platforms is not None and platform is not None:
        for names, branch in zip(platforms, branches, strict=True):
            if names is None or platform in names:
                return [branch]
    return branches


def local_bytes(jaxpr: core.Jaxpr, variables: list[Var]) -> int:
    blocks = _blocks(jaxpr)
    distinct = {var: None for var in variables if not isinstance(var, core.Literal)}
    return round(sum(blocks.get(var, 1.0) * _bytes(var.aval) for var in distinct))


def _blocks(jaxpr: core.Jaxpr) -> dict[Var, float]:
    """Returns variables' parts on a device of a shard_map."""
    parts: dict[Var, float] = {}
    for eqn in jaxpr.eqns:
        for sub in subjaxprs(eqn.params):
            if (len(sub.invars), len(sub.outvars)) != (len(eqn.invars), len(eqn.outvars)):
                continue  # a branch or a loop condition, without the operands of the equation
            inside = {} if eqn.primitive.name == "shard_map" else _blocks(sub)
            outer = [*eqn.invars, *eqn.outvars]
            for var, local in zip(outer, [*sub.invars, *sub.outvars], strict=True):
                if isinstance(var, core.Literal) or isinstance(local, core.Literal):
                    continue
                if eqn.primitive.name == "shard_map":
                    size = _bytes(var.aval)
                    parts[var] = _bytes(local.aval) / size if size else 1.0
                elif local in inside:
                    parts[var] = inside[local]
    return parts


def _bytes(aval: Any) -> int:
    return bytes_of(aval.shape, aval.dtype)


@readable
@dataclass(frozen=True, repr=False)
class CollectiveCounts:
    """A device's collectives by `jax.lax` name, bytes sent, and residuals.

    Attributes:
      forward: how often each runs in the forward pass; absent ones count 0.
      backward: the same in the backward pass alone.
      forward_bytes: bytes sent in the forward pass.
      backward_bytes: bytes sent in the backward pass.
      residual_bytes: bytes saved for the backward pass.

    Example:
      >>> from collections import Counter
      >>> CollectiveCounts(Counter(ppermute=3), Counter(), 1024, 0, 512)
      CollectiveCounts(forward={'ppermute': 3}, backward={}, forward_bytes=1_024,
      backward_bytes=0, residual_bytes=512)
    """

    forward: Counter[str]
    backward: Counter[str]
    forward_bytes: int
    backward_bytes: int
    residual_bytes: int

    def __repr__(self) -> str:
        forward, backward = (dict(sorted(c.items())) for c in (self.forward, self.backward))
        return (
            f"CollectiveCounts(forward={forward}, backward={backward}, "
            f"forward_bytes={self.forward_bytes:_}, backward_bytes={self.backward_bytes:_}, "
            f"residual_bytes={self.residual_bytes:_})"
        )


@readable
def count_collectives(
    fn: Callable[..., Any], *args: Any, grad: bool = True, platform: str | None = None
) -> CollectiveCounts:
    """Counts collectives in the jaxprs of `fn` and its transpose, without compiling.

    Bodies of a scan, or of a `lax.fori_loop` with static bounds, count `length` times. A `lax.cond`
    counts, for each collective, the branch that runs it most often. The psum of a replicated
    argument's gradient counts in the backward pass. XLA may later merge or replace collectives.

    A ppermute sends its operand. Others send what the best ring algorithm does, for `n` devices and
    local operands of `b` bytes: an all_gather `(n - 1) b`, a psum_scatter or all_to_all
    `(n - 1) / n b`, a psum `2 (n - 1) / n b`.

    `residual_bytes` sums the distinct arrays that `jax.vjp` saves, inputs included. An array that a
    `shard_map` takes or returns counts with its local block, others in full. A compiled step may
    recompute, and save less.

    For a gradient taken *inside* `shard_map`, pass the shard_mapped function with `grad=False`:
    `forward` then holds both directions.

    Args:
      fn: a function of global arrays, such as a shard_mapped function.
      *args: pytrees of arrays or `jax.ShapeDtypeStruct`s.
      grad: whether to differentiate in all float arguments; the `fwd` of a `jax.custom_vjp` then
        counts.
      platform: whose branch of `lax.platform_dependent` counts, such as "tpu". None: as in
        `lax.cond`.

    Returns:
      The counts. Without `grad`, float arguments or float outputs, `backward` is empty and
      `residual_bytes` 0.

    Raises:
      ValueError: a `lax.while_loop` whose trip count is unknown runs collectives.

    Example:
      >>> mesh = make_mesh("x=8")
      >>> gather = jax.shard_map(
      ...     lambda x: jax.lax.all_gather(x, "x", tiled=True),
      ...     mesh=mesh, in_specs=P("x"), out_specs=P("x"),
      ... )
      >>> count_collectives(gather, jnp.ones(8))
      CollectiveCounts(forward={'all_gather': 1}, backward={'psum_scatter': 1}, forward_bytes=28,
      backward_bytes=28, residual_bytes=0)
    """
    with enclosing(fn):
        return _counts_of(fn, args, grad, platform)


def _counts_of(
    fn: Callable[..., Any], args: Sequence[Any], grad: bool, platform: str | None
) -> CollectiveCounts:
    # A new function each time: make_jaxpr caches by function, and fn may read changed state.
    outputs = jax.eval_shape(lambda *a: fn(*a), *args)
    if not (grad and _floats(args) and _floats(outputs)):
        forward = jax.make_jaxpr(lambda *a: fn(*a))(*args)
        return CollectiveCounts(
            count(forward.jaxpr, platform), Counter(), sent_bytes(forward.jaxpr, platform), 0, 0
        )

    def pull(*args: Any) -> Any:
        def split(*args: Any) -> tuple[list[Any], Any]:
            out = fn(*args)
            return _floats(out), out

        out, pullback, _ = jax.vjp(split, *args, has_aux=True)
        return out, pullback

    forward, (out, pullback) = jax.make_jaxpr(pull, return_shape=True)(*args)
    backward = jax.make_jaxpr(lambda pullback, ct: pullback(ct))(pullback, out)
    residuals = forward.jaxpr.outvars[len(out) :]
    return CollectiveCounts(
        count(forward.jaxpr, platform),
        count(backward.jaxpr, platform),
        sent_bytes(forward.jaxpr, platform),
        sent_bytes(backward.jaxpr, platform),
        local_bytes(forward.jaxpr, list(residuals)),
    )


def _floats(tree: Any) -> list[Any]:
    return [leaf for leaf in jax.tree.leaves(tree) if jnp.issubdtype(leaf.dtype, jnp.inexact)]
