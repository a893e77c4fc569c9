"""Changes equations of a traced program.

Unchanged equations keep their lines and scopes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
from jax.extend import core
from jax.sharding import Mesh, NamedSharding

from jaxpar.tools.timeline.frameworks import donated_inside
from jaxpar.tools.toolkit_api import manual_axes, subjaxprs

# Computes the results of an equation from its operands. An operand may be a stand-in that the
# handler of an earlier equation returned.
Handler = Callable[[core.JaxprEqn, list[Any]], Sequence[Any]]


def _no_change(jaxpr: core.Jaxpr) -> dict[int, Handler]:
    return {}


@dataclass(frozen=True)
class Change:
    """A change of a program.

    `equations` returns handlers by equations' places. `meshes` are a mesh and its replacement.
    """

    equations: Callable[[core.Jaxpr], dict[int, Handler]] = _no_change
    meshes: tuple[Mesh, Mesh] | None = None

    def touches(self, jaxpr: core.Jaxpr) -> bool:
        return bool(self.equations(jaxpr)) or any(map(self.touches_inside, jaxpr.eqns))

    def touches_inside(self, eqn: core.JaxprEqn) -> bool:
        inside = any(map(self.touches, subjaxprs(eqn.params)))
        return inside or self.of(eqn.params) != eqn.params

    def of(self, parameter: Any) -> Any:
        """Returns an equation's parameter on the new mesh."""
        if self.meshes is None:
            return parameter
        old, new = self.meshes
        match parameter:
            case dict():
                return {key: self.of(part) for key, part in parameter.items()}
            case tuple() if not hasattr(parameter, "_fields"):
                return tuple(map(self.of, parameter))
            case Mesh() if parameter == old:
                return new
            case NamedSharding() if parameter.mesh == old:
                return NamedSharding(new, parameter.spec, memory_kind=parameter.memory_kind)
            case _:
                return parameter


def rewritten(jitted: Any, change: Change, *args: Any) -> Any | None:
    """Returns the changed function, with flat arguments and results; None if nothing changes.

    Donations stay. Call it in the context of the mesh.
    """
    closed = jax.make_jaxpr(jitted)(*args)
    if not change.touches(closed.jaxpr):
        return None
    donated = donated_inside(closed.jaxpr)
    numbers = [number for number, var in enumerate(closed.jaxpr.invars) if var in donated]

    def whole(*leaves: Any) -> list[Any]:
        return evaluated(closed.jaxpr, closed.consts, leaves, change)

    return jax.jit(whole, donate_argnums=numbers)


def evaluated(
    jaxpr: core.Jaxpr, consts: Sequence[Any], args: Sequence[Any], change: Change
) -> list[Any]:
    names, values = (*jaxpr.constvars, *jaxpr.invars), (*consts, *args)
    known: dict[core.Var, Any] = dict(zip(names, values, strict=True))

    def value(x: core.Var | core.Literal) -> Any:
        return x.val if isinstance(x, core.Literal) else known[x]

    handlers = change.equations(jaxpr)
    for place, eqn in enumerate(jaxpr.eqns):
        handler = handlers.get(place)
        if handler is None:
            handler = partial(_changed_inside, change) if change.touches_inside(eqn) else bound
        known.update(zip(eqn.outvars, handler(eqn, list(map(value, eqn.invars))), strict=True))
    return list(map(value, jaxpr.outvars))


# A jaxpr made from equations needs this, for JAX's messages.
_DEBUG_INFO = jax.make_jaxpr(lambda: ())().jaxpr.debug_info


def bound(eqn: core.JaxprEqn, operands: Sequence[Any], **params: Any) -> Sequence[Any]:
    # Unused results are no variables, so all variables are made anew.
    invars: list[Any] = [core.Var(x.aval) for x in eqn.invars]
    outvars: list[Any] = [core.Var(x.aval) for x in eqn.outvars]
    copy = eqn.replace(invars=invars, outvars=outvars, params={**eqn.params, **params})
    whole = core.Jaxpr([], invars, outvars, [copy], eqn.effects, _DEBUG_INFO)
    return core.jaxpr_as_fun(core.ClosedJaxpr(whole, []))(*operands)


def _changed_inside(change: Change, eqn: core.JaxprEqn, operands: Sequence[Any]) -> Sequence[Any]:
    params = change.of(eqn.params)
    if eqn.primitive.name == "shard_map":  # its axes are bound only inside it
        return _shard_map(params, change)(*operands)

    def changed(parameter: Any) -> Any:
        match parameter:
            case core.ClosedJaxpr() if hasattr(parameter, "consts"):
                return _retraced(parameter, change)
            case core.Jaxpr():
                closed = _retraced(core.ClosedJaxpr(parameter, []), change)
                if closed.consts:
                    raise NotImplementedError("a change with constants where none can stand")
                return closed.jaxpr
            case tuple() if not hasattr(parameter, "_fields"):
                return tuple(map(changed, parameter))
            case _:
                return parameter

    return bound(eqn, operands, **{key: changed(parameter) for key, parameter in params.items()})


def _retraced(closed: core.ClosedJaxpr, change: Change) -> core.ClosedJaxpr:
    def again(*args: Any) -> list[Any]:
        return evaluated(closed.jaxpr, closed.consts, args, change)

    return jax.make_jaxpr(again)(*(_shape_of(var.aval) for var in closed.jaxpr.invars))


def _shape_of(aval: Any) -> jax.ShapeDtypeStruct:
    """Returns an equally sharded and varying shape."""
    more: dict[str, Any] = {"manual_axis_type": aval.manual_axis_type}
    if not aval.sharding.mesh.empty:
        more["sharding"] = aval.sharding
    return jax.ShapeDtypeStruct(aval.shape, aval.dtype, weak_type=aval.weak_type, **more)


def _shard_map(params: dict[str, Any], change: Change) -> Callable[..., Any]:

    def local(*args: Any) -> tuple[Any, ...]:
        return tuple(evaluated(params["jaxpr"], (), args, change))

    return jax.shard_map(
        local,
        mesh=params["mesh"],
        in_specs=tuple(params["in_specs"]),
        out_specs=tuple(params["out_specs"]),
        axis_names=set(manual_axes(params)),
        check_vma=params["check_vma"],
    )
