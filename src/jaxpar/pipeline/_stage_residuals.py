"""What a stage keeps for its backward pass, without copies of its parameters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from jaxpar.arguments.calls import value_error
from jaxpar.axis.axis import Ring
from jaxpar.compiler.jaxprs import user_line
from jaxpar.pipeline._traced_functions import TracedPart, collectives_over, depends, traced


@dataclass(frozen=True, eq=False)
class StageResiduals:
    """A stage's forward pass, and what it keeps for the backward pass.

    Attributes:
      run: `(params, x, microbatch) -> ((y, aux), pullback)`, traced once.
      kept: for each leaf of the pullback, whether it depends on x.
    """

    run: TracedPart
    kept: list[bool]

    def forward(self, params: Any, x: Any, microbatch: Any) -> tuple[Any, Any, list[Any]]:
        """Returns the result, what is beside it, and leaves of the pullback."""
        (y, aux), pullback = self.run(params, x, microbatch)
        leaves = zip(jax.tree.leaves(pullback), self.kept, strict=True)
        return y, aux, [leaf for leaf, kept in leaves if kept]

    def pullback(self, params: Any, like_x: Any, microbatch: Any, leaves: list[Any]) -> Any:
        # What does not depend on x, such as casts of weights and masks, is made again: otherwise
        # each microbatch would keep a copy. The compiler drops the rest of this forward pass.
        _, made = self.run(params, like_x, microbatch)
        made, tree = jax.tree.flatten(made)
        left = iter(leaves)
        return tree.unflatten(
            [next(left) if kept else leaf for leaf, kept in zip(made, self.kept, strict=True)]
        )


def residuals_of(
    stage: Callable[..., Any],
    ring: Ring,
    user_params: Any,
    params: Any,
    x: Any,
    microbatch: Any,
    *,
    pulls: bool = True,
) -> StageResiduals:
    """Traces `(params, x, microbatch) -> (y, aux)`; without `pulls` it keeps nothing."""

    def forward(params: Any, x: Any, microbatch: Any) -> tuple[Any, Any]:
        def of(params: Any, x: Any) -> Any:
            return stage(params, x, microbatch)

        if not pulls:
            return of(params, x), None
        y, pullback, aux = jax.vjp(of, params, x, has_aux=True)
        return (y, aux), pullback

    run = traced("stage_fn", forward, user_params, params, x, microbatch)
    for name, eqn in collectives_over(run.closed.jaxpr, ring):
        raise value_error(
            f"stage_fn uses {name} over {ring}{user_line(eqn)}, where devices compute other "
            "microbatches; leave it out: the pipeline itself sends what a stage returns to the "
            "next one"
        )
    is_x = [tree is x for tree in (params, x, microbatch) for _ in jax.tree.leaves(tree)]
    result, _ = run.of_out.children()
    return StageResiduals(run, depends(run.closed.jaxpr, is_x)[result.num_leaves :])
