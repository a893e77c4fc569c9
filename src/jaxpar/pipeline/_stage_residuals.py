"""What a stage keeps for its backward pass, without copies of its parameters."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun

from jaxpar.arguments.calls import value_error
from jaxpar.axis.axis import Ring
from jaxpar.compiler.jaxprs import COLLECTIVES, LAX_NAMES, subjaxprs, user_line


@dataclass(frozen=True, eq=False)
class StageResiduals:
    """A stage's forward pass, and what it keeps for the backward pass.

    Attributes:
      closed: `(params, x, microbatch) -> (y, leaves of the pullback)`, traced once.
      of_y, of_pullback: their trees.
      kept: for each leaf, whether it depends on x.
    """

    closed: ClosedJaxpr
    of_y: Any
    of_pullback: Any
    kept: list[bool]

    def forward(self, params: Any, x: Any, microbatch: Any) -> tuple[Any, list[Any]]:
        out = jaxpr_as_fun(self.closed)(*jax.tree.leaves((params, x, microbatch)))
        count = self.of_y.num_leaves
        leaves = [leaf for leaf, kept in zip(out[count:], self.kept, strict=True) if kept]
        return self.of_y.unflatten(out[:count]), leaves

    def pullback(self, params: Any, like_x: Any, microbatch: Any, leaves: list[Any]) -> Any:
        # What does not depend on x, such as casts of weights and masks, is made again: otherwise
        # each microbatch would keep a copy. The compiler drops the rest of this forward pass.
        out = jaxpr_as_fun(self.closed)(*jax.tree.leaves((params, like_x, microbatch)))
        given = iter(leaves)
        made = out[self.of_y.num_leaves :]
        return self.of_pullback.unflatten(
            [next(given) if kept else leaf for leaf, kept in zip(made, self.kept, strict=True)]
        )


def residuals_of(
    stage: Callable[..., Any], ring: Ring, params: Any, x: Any, microbatch: Any
) -> StageResiduals:
    def forward(params: Any, x: Any, microbatch: Any) -> tuple[Any, Any]:
        return jax.vjp(lambda params, x: stage(params, x, microbatch), params, x)

    closed, out = jax.make_jaxpr(forward, return_shape=True)(params, x, microbatch)
    _check_collectives(closed.jaxpr, ring)
    of_y, of_pullback = map(jax.tree.structure, out)
    is_x = [tree is x for tree in (params, x, microbatch) for _ in jax.tree.leaves(tree)]
    kept = _depends(closed.jaxpr, is_x)[of_y.num_leaves :]
    return StageResiduals(closed, of_y, of_pullback, kept)


def check_closed_over(closed: ClosedJaxpr, given: Any) -> None:
    """Refuses parameters among the values that a stage closes over."""
    for (argument, *path), leaf in jax.tree_util.tree_leaves_with_path(given):
        if any(leaf is value for value in closed.consts):
            place = f"{argument.key}{jax.tree_util.keystr(tuple(path))}"
            raise value_error(
                f"stage_fn closes over {place}, which gets no gradient there; give each stage a "
                "copy in layers, or close over jax.lax.stop_gradient of it"
            )


def _depends(jaxpr: Jaxpr, inputs: Sequence[bool]) -> list[bool]:
    """Returns which results depend on the marked inputs."""
    marked = {var for var, mark in zip(jaxpr.invars, inputs, strict=True) if mark}

    def is_marked(x: Any) -> bool:
        return not isinstance(x, Literal) and x in marked

    for eqn in jaxpr.eqns:
        marks = _marks(eqn, list(map(is_marked, eqn.invars)))
        marked |= {var for var, mark in zip(eqn.outvars, marks, strict=True) if mark}
    return list(map(is_marked, jaxpr.outvars))


def _marks(eqn: JaxprEqn, inputs: list[bool]) -> list[bool]:
    bodies = subjaxprs(eqn.params)
    is_call = len(bodies) == 1 and len(bodies[0].invars) == len(inputs)
    if not any(inputs) or not is_call or len(bodies[0].outvars) != len(eqn.outvars):
        return [any(inputs)] * len(eqn.outvars)
    (body,) = bodies
    if eqn.primitive.name != "scan":
        return _depends(body, inputs)
    # Of a scan, stacked operands and results have one dimension more than those of the body. What
    # a step carries on is marked for the next one.
    carried = sum(map(_same_rank, eqn.outvars, body.outvars))
    first = sum(map(_same_rank, eqn.invars, body.invars)) - carried
    while True:
        found = _depends(body, inputs)
        next_one = [a or b for a, b in zip(inputs[first:], found[:carried], strict=False)]
        if next_one == inputs[first : first + carried]:
            return found
        inputs = [*inputs[:first], *next_one, *inputs[first + carried :]]


def _same_rank(one: Any, other: Any) -> bool:
    return one.aval.ndim == other.aval.ndim


def _check_collectives(jaxpr: Jaxpr, ring: Ring) -> None:
    for eqn in jaxpr.eqns:
        name = LAX_NAMES.get(eqn.primitive.name, eqn.primitive.name)
        axes = {leaf for leaf in jax.tree.leaves(list(eqn.params.values())) if type(leaf) is str}
        if name in COLLECTIVES and axes & set(ring.names):
            raise value_error(
                f"stage_fn uses {name} over {ring}{user_line(eqn)}, where devices compute other "
                "microbatches; leave it out: the pipeline itself sends what a stage returns to the "
                "next one"
            )
        for body in subjaxprs(eqn.params):
            _check_collectives(body, ring)
