"""Sums of float32 that travel in bfloat16."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.extend import core

from jaxpar.tools.explain.rewrite import Handler
from jaxpar.tools.program.sources import Line, line_of
from jaxpar.tools.toolkit_api import type_of


def narrowed(line: Line | None, jaxpr: core.Jaxpr) -> dict[int, Handler]:
    # Without a line, all sums count.
    handlers: dict[int, Handler] = {}
    for place, eqn in enumerate(jaxpr.eqns):
        if line is not None and line_of(eqn) != line:
            continue
        wide = any(_is_wide(type_of(x)) for x in eqn.invars)
        if wide and eqn.primitive.name in ("psum", "psum2", "psum_invariant"):
            handlers[place] = _sum_narrowly
        elif wide and eqn.primitive.name == "reduce_scatter":
            handlers[place] = _scatter_narrowly
    return handlers


def _is_wide(x: Any) -> bool:
    return x.dtype == jnp.float32 and bool(x.shape)


def _sum_narrowly(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    groups = eqn.params.get("axis_index_groups")
    return [
        lax.psum(x.astype(jnp.bfloat16), eqn.params["axes"], axis_index_groups=groups).astype(
            x.dtype
        )
        if _is_wide(x)
        else lax.psum(x, eqn.params["axes"], axis_index_groups=groups)
        for x in operands
    ]


def _scatter_narrowly(eqn: core.JaxprEqn, operands: list[Any]) -> list[Any]:
    (x,), params = operands, eqn.params
    summed = lax.psum_scatter(
        x.astype(jnp.bfloat16),
        params["axis_name"],
        scatter_dimension=params["scatter_dimension"],
        axis_index_groups=params["axis_index_groups"],
        tiled=params["tiled"],
    )
    return [summed.astype(x.dtype)]
