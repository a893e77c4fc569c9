"""Traces steps that a framework jitted, or that compute during tracing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh


def traced_by_jax(traced: Any) -> Any:
    return getattr(traced, "traced", traced)  # flax wraps JAX's


@dataclass(frozen=True)
class Traced:
    """The result of tracing.

    `is_of_function`: whether compiling the function compiles `stage`. It is False for a
    framework's function, and if described devices cannot run what is computed during tracing.
    """

    stage: Any
    is_of_function: bool


def traced_for(mesh: Mesh, jitted: Any, args: Sequence[Any]) -> Traced:
    try:
        with jax.set_mesh(mesh):
            traced = jitted.trace(*args)
    except (AttributeError, jax.errors.JaxRuntimeError) as reason:
        # Described devices run nothing, so `jax.ensure_compile_time_eval` fails on them. With an
        # abstract mesh it runs on the devices at hand.
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                traced = jitted.trace(*args)
        except Exception:
            raise reason from None
        return Traced(traced_by_jax(traced), is_of_function=False)
    stage = traced_by_jax(traced)
    return Traced(stage, is_of_function=stage is traced)


def donated_by(traced: Any) -> set[core.Var]:
    infos = jax.tree.leaves(traced.args_info)
    return {var for var, x in zip(traced.jaxpr.jaxpr.invars, infos, strict=False) if x.donated}


def donated_inside(jaxpr: core.Jaxpr) -> set[core.Var]:
    donated = {
        var
        for eqn in jaxpr.eqns
        for var, gives in zip(eqn.invars, eqn.params.get("donated_invars", ()), strict=False)
        if gives and not isinstance(var, core.Literal)
    }
    return donated.intersection(jaxpr.invars)
