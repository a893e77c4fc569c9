"""A pipeline's functions as programs: what they close over, read, and send."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxpar.arguments.calls import value_error
from jaxpar.axis.axis import Ring
from jaxpar.axis.vma import varying_axes
from jaxpar.compiler.jaxprs import COLLECTIVES, LAX_NAMES, subjaxprs

# The parameters of each function, and how those of others come there.
OWN = {
    "stage_fn": ("layers", "give each stage a copy in layers"),
    **dict.fromkeys(("first_fn", "last_fn"), ("shared", "put it into shared")),
}


@dataclass(frozen=True, eq=False)
class TracedPart:
    """A user's function of a pipeline, traced for arguments of these types.

    Attributes:
      of_out: the tree of its results.
    """

    closed: ClosedJaxpr
    of_out: Any

    def __call__(self, *args: Any) -> Any:
        out = jaxpr_as_fun(self.closed)(*jax.tree.leaves(args))
        return self.of_out.unflatten(map(jnp.asarray, out))  # of literals, too


def traced(name: str, function: Callable[..., Any], params: Any, *args: Any) -> TracedPart:
    """Traces a function, and refuses `params` among the values that it closes over."""
    closed, out = jax.make_jaxpr(function, return_shape=True)(*args)
    for (argument, *path), leaf in jax.tree_util.tree_leaves_with_path(params):
        if any(leaf is value for value in closed.consts):
            local, put = OWN[name]
            place = f"{argument.key}{jax.tree_util.keystr(tuple(path))}"
            remedy = f"read it from {local}, its argument" if argument.key == local else put
            raise value_error(
                f"{name} closes over {place}, which gets no gradient there; {remedy}, or close "
                "over jax.lax.stop_gradient of it"
            )
    return TracedPart(closed, jax.tree.structure(out))


def check_entering(
    first: TracedPart, shared: Any, sharded: list[set[str]], batch: Any, ring: Ring
) -> None:
    """Refuses arrays of which device 0 has a part: what it computes enters for all devices."""
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(shared)]
    read = depends_on(first.closed.jaxpr)
    for number, (path, axes) in enumerate(zip(paths, sharded, strict=True)):
        over = [name for name in ring.names if name in axes and lax.axis_size(name) > 1]
        if over and read[number] and not any(collectives_over(first.closed.jaxpr, ring)):
            raise value_error(
                f"shared{jax.tree_util.keystr(path)} is sharded over {over}, and first_fn reads "
                f"it, but device 0 of {ring} computes what enters the pipeline, for all devices; "
                f"leave {over} out of its spec, or gather in first_fn what it reads"
            )
    for place, over in _parts_read(first, shared, batch, ring):
        raise value_error(
            f"{place} varies over {over}, and first_fn reads it, but device 0 of {ring} computes "
            f"what enters the pipeline, for all devices; leave {over} out of its in_specs, or "
            "gather in first_fn what it reads"
        )


def check_rows(stage: TracedPart, args: Any, dim: int, batch: Any, ring: Ring) -> None:
    """Refuses rows that are cut over a ring before they are cut into microbatches."""
    arrays = [x for x in jax.tree.leaves(args[1]) if x.ndim]
    rows = {x.shape[0] for x in arrays}
    for place, over in _parts_read(stage, args, batch, ring, rows):
        raise value_error(
            f"{place} varies over {over}, and stage_fn reads it, but each stage computes all "
            f"{sorted(rows)} rows of a microbatch; leave {over} out of its in_specs"
        )
    rows = {x.shape[0] for x in arrays if not dim % x.ndim}
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if leaf.shape[0] > 1 and (over := _spread(leaf, ring, rows)):
            raise value_error(
                f"{_placed(path, leaf)} varies over {over}, so that its microbatches are of other "
                f"rows than what last_fn gets by last_dim={dim}, the rows of each microbatch; "
                f"leave {over} out of its in_specs and cut it in last_fn, or choose another "
                "last_dim"
            )


def _parts_read(
    part: TracedPart, args: Any, batch: Any, ring: Ring, rows: set[int] | None = None
) -> Iterator[tuple[str, list[str]]]:
    """Yields leaves of which a device has a part, if the function reads them and gathers nothing.

    `args` come before a microbatch. Of `rows`, only leaves that have too few of them count.
    """
    if any(collectives_over(part.closed.jaxpr, ring)):
        return
    leaves = jax.tree_util.tree_leaves_with_path(batch)
    before = len(jax.tree.leaves(args))
    for number, (path, leaf) in enumerate(leaves, before):
        marks = [place == number for place in range(before + len(leaves))]
        over = _spread(leaf, ring, rows)
        if over and any(depends(part.closed.jaxpr, marks)):
            yield _placed(path, leaf), over


def _placed(path: Any, leaf: Any) -> str:
    shape = leaf.shape[0] * leaf.shape[1], *leaf.shape[2:]  # of [microbatches, rows, ...]
    return f"batch{jax.tree_util.keystr(path)} of local shape {shape}"


def _spread(leaf: Any, ring: Ring, rows: set[int] | None = None) -> list[str]:
    """Returns axes of the ring over which a leaf varies, if it has too few of these rows."""
    if rows is not None and leaf.shape[1] * ring.size not in rows:
        return []
    return [name for name in ring.names if name in varying_axes(leaf) and lax.axis_size(name) > 1]


def collectives_over(jaxpr: Jaxpr, ring: Ring) -> Iterator[tuple[str, JaxprEqn]]:
    """Yields the names and equations of collectives over the axes of a ring."""
    for eqn in jaxpr.eqns:
        name = LAX_NAMES.get(eqn.primitive.name, eqn.primitive.name)
        axes = {leaf for leaf in jax.tree.leaves(list(eqn.params.values())) if type(leaf) is str}
        if name in COLLECTIVES and axes & set(ring.names):
            yield name, eqn
        for body in subjaxprs(eqn.params):
            yield from collectives_over(body, ring)


def depends(jaxpr: Jaxpr, inputs: list[bool]) -> list[bool]:
    """Returns which results depend on the marked inputs."""
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}

    def is_marked(x: Any) -> bool:
        return not isinstance(x, Literal) and x in marked

    for eqn in jaxpr.eqns:
        marks = _marks(eqn, list(map(is_marked, eqn.invars)))
        marked |= {var for var, mark in zip(eqn.outvars, marks, strict=True) if mark}
    return list(map(is_marked, jaxpr.outvars))


def depends_on(jaxpr: Jaxpr) -> list[bool]:
    """Returns of which inputs any result depends."""
    count = len(jaxpr.invars)
    return [any(depends(jaxpr, [at == n for at in range(count)])) for n in range(count)]


def _marks(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    bodies = subjaxprs(eqn.params)
    is_call = len(bodies) == 1 and len(bodies[0].invars) == len(inputs)
    if not any(inputs) or not is_call or len(bodies[0].outvars) != len(eqn.outvars):
        return [any(inputs)] * len(eqn.outvars)
    (body,) = bodies
    if eqn.primitive.name != "scan":
        return depends(body, inputs)
    # Of a scan, stacked operands and results have a dimension more than those of the body. What
    # a step carries on is marked for the next.
    carried = sum(map(_same_rank, eqn.outvars, body.outvars))
    first = sum(map(_same_rank, eqn.invars, body.invars)) - carried
    while True:
        marks = depends(body, inputs)
        next_one = [a or b for a, b in zip(inputs[first:], marks[:carried], strict=False)]
        if next_one == inputs[first : first + carried]:
            return marks
        inputs = [*inputs[:first], *next_one, *inputs[first + carried :]]


def _same_rank(outer: Any, inner: Any) -> bool:
    return outer.aval.ndim == inner.aval.ndim
