"""What tracing gives of a step that a framework has jitted, or that computes while it is traced."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh


def traced_by_jax(traced: Any) -> Any:
    """Returns the stage of JAX's that is in a framework's; one of JAX's as it is."""
    return getattr(traced, "traced", traced)  # flax has one around that of JAX


@dataclass(frozen=True)
class Traced:
    """What tracing a function gave.

    Attributes:
      stage: one of JAX's.
      is_of_function: whether it is what compiling the function compiles. Else the function is a
        framework's, or described devices cannot do what it computes while it is traced.
    """

    stage: Any
    is_of_function: bool


def traced_for(mesh: Mesh, jitted: Any, args: Sequence[Any]) -> Traced:
    """Traces a jitted function in the context of a mesh.

    Raises:
      Exception: what tracing raises.
    """
    try:
        with jax.set_mesh(mesh):
            found = jitted.trace(*args)
    except (AttributeError, jax.errors.JaxRuntimeError) as reason:
        # Described devices run nothing, also not what `jax.ensure_compile_time_eval` is for. An
        # abstract mesh leaves that to the devices at hand.
        try:
            with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
                found = jitted.trace(*args)
        except Exception:
            raise reason from None
        return Traced(traced_by_jax(found), is_of_function=False)
    stage = traced_by_jax(found)
    return Traced(stage, is_of_function=stage is found)


def donated_by(traced: Any) -> set[core.Var]:
    """Returns the arguments that a jitted function donates."""
    infos = jax.tree.leaves(traced.args_info)
    return {var for var, x in zip(traced.jaxpr.jaxpr.invars, infos, strict=False) if x.donated}


def donated_inside(jaxpr: core.Jaxpr) -> set[core.Var]:
    """Returns the arguments that the jitted functions which a function calls donate.

    Called by itself, without `jax.jit`, it donates them.
    """
    given = {
        var
        for eqn in jaxpr.eqns
        for var, gives in zip(eqn.invars, eqn.params.get("donated_invars", ()), strict=False)
        if gives and not isinstance(var, core.Literal)
    }
    return given.intersection(jaxpr.invars)
