"""The activation of an MLP: a function of a projection, or of gate and up together."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from inspect import signature
from typing import TYPE_CHECKING, Any, TypeAlias

import jax
import jax.numpy as jnp
from jax import Array

from jaxpar.arguments.calls import naming, of_user, readable, type_error, value_error
from jaxpar.arguments.lazy_names import open_types

if TYPE_CHECKING:
    Activation: TypeAlias = "Callable[[Array], Array] | GatedActivation"
else:
    globals().update(open_types(__name__))


@readable
@dataclass(frozen=True)
class GatedActivation:
    """An activation of gate and up together, in place of `activation(gate) * up`.

    Pass it as `activation` of `gated_mlp` or of an MoE layer. It is also a decorator.

    Args:
      function: an elementwise `function(gate, up)` of two arrays of equal shape.

    Example:
      >>> @GatedActivation
      ... def clamped(gate, up):  # as in gpt-oss
      ...     gate, up = jnp.minimum(gate, 7), jnp.clip(up, -7, 7)
      ...     return (up + 1) * gate * jax.nn.sigmoid(1.702 * gate)
      >>> mesh = make_mesh("tp=8")
      >>> f = jaxpar.jit(jax.shard_map(lambda x, *w: gated_mlp(x, *w, "tp", activation=clamped),
      ...     mesh=mesh, in_specs=(P(None, "tp"), P(None, "tp"), P(None, "tp"), P("tp")),
      ...     out_specs=P(None, "tp")))
      >>> x, w = jnp.arange(128.0).reshape(2, 16, 4) / 128, jnp.arange(96.0).reshape(4, 24) / 96
      >>> wanted = clamped.function(x @ w, x @ w[::-1]) @ w.T
      >>> np.testing.assert_allclose(f(x, w, w[::-1], w.T), wanted, rtol=1e-5)

    Source: OpenAI, "gpt-oss-120b & gpt-oss-20b model card" (2025).
    """

    function: Callable[[Array, Array], Array]

    def __post_init__(self) -> None:
        with naming("GatedActivation"):
            function: Any = self.function
            if not callable(function):
                raise type_error(f"function must be one of gate and up, got {function!r}")


def activate(activation: Activation, up: Array, gate: Array | None) -> Array:
    operand = up if gate is None else gate
    if not isinstance(activation, GatedActivation):
        active = _call(activation, "wrap a function of gate and up in GatedActivation", operand)
    elif gate is None:
        raise value_error(
            "activation is a GatedActivation, but there is no gate; give a gate, or a function of "
            "one array"
        )
    else:
        remedy = "give GatedActivation a function of both, or leave it out"
        active = _call(activation.function, remedy, gate, up)
    if getattr(active, "shape", None) != operand.shape:
        returned = f"local shape {active.shape}" if hasattr(active, "shape") else repr(active)
        raise value_error(
            f"activation returned {returned} for {operand.shape}; it must keep the shape"
        )
    if jnp.iscomplexobj(active) and not jnp.iscomplexobj(operand):
        raise type_error(f"activation returned {active.dtype} for {operand.dtype}; cast it")
    if gate is None or isinstance(activation, GatedActivation):
        return active
    with jax.numpy_dtype_promotion("standard"):  # an activation may return a wider dtype
        return active * up


def _call(function: Callable[..., Any], remedy: str, *arrays: Array) -> Any:
    try:
        return of_user(function, "activation")(*arrays)
    except TypeError as reason:
        # Checked only after a failure: the signature of a wrapper may be the wrapped function's.
        if _takes(function, len(arrays)):
            raise
        operands = "gate and up" if len(arrays) > 1 else "one array"
        raise type_error(f"activation is called with {operands}: {reason}; {remedy}") from None


def _takes(function: Callable[..., Any], count: int) -> bool:
    try:
        signature(function).bind(*range(count))
    except ValueError:  # functions in C may have no signature
        return True
    except TypeError:
        return False
    return True
