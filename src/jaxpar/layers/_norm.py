"""Normalization over features in float32, sharded or not."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.ad_checkpoint import checkpoint_name
from jaxtyping import Float

from jaxpar.arguments.calls import public, type_error, value_error
from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.arguments.shapes import with_rank
from jaxpar.arguments.types import Number
from jaxpar.axis.axis import AxisLike, Ring, bind
from jaxpar.axis.checks import as_array
from jaxpar.axis.checks_of_layers import check_number
from jaxpar.axis.vma import vary_wide, varying_axes

_MOMENTS = "jaxpar_moments"


@public
def rms_norm(x: Array, scale: Array, *, eps: Number = 1e-6, axis: AxisLike | None = None) -> Array:
    """Divides each token by its features' root mean square, and scales it.

    Args:
      x: local floats `[..., d]`, other dimensions sharded in any way.
      scale: floats `[d]`, replicated over the axes that shard tokens.
      eps: added to the mean square.
      axis: mesh axes that shard features, x `[..., d/n]` and scale `[d/n]`, or None.

    Returns:
      `x / sqrt(mean(x**2) + eps) * scale`, in the dtype of x.

    Raises:
      ValueError: scale has another size, or eps is negative.

    Cost: with `axis`, a psum of one float32 a token, forward and backward. Residuals are x in its
    own dtype and one float32 a token. 16-bit floats are computed in float32.

    Example:
      >>> rms_norm(jnp.array([[2.0, 2.0, 4.0, 1.0]]), jnp.ones(4), eps=0.0)
      Array([[0.8, 0.8, 1.6, 0.4]], dtype=float32)

    Source: Zhang and Sennrich, "Root mean square layer normalization" (2019).
    """
    eps = check_number("eps", eps)
    x, scale = as_array("x", x), as_array("scale", scale)
    features = _check(x, axis, scale=scale)
    return _recomputed(partial(_rms_norm, features, eps))(x, scale)


@public
def layer_norm(
    x: Array,
    scale: Array,
    bias: Array | None = None,
    *,
    eps: Number = 1e-5,
    axis: AxisLike | None = None,
) -> Array:
    """Normalizes each token to mean 0 and variance 1, then scales and shifts it.

    Args:
      x: as in `rms_norm`.
      scale: as in `rms_norm`.
      bias: like scale, or None.
      eps: added to the variance.
      axis: as in `rms_norm`.

    Returns:
      `(x - mean(x)) / sqrt(var(x) + eps) * scale + bias`, in the dtype of x.

    Raises:
      ValueError: as in `rms_norm`, also for bias.

    Cost: as `rms_norm`, with two psums.

    Example:
      >>> layer_norm(jnp.array([[3.0, 5.0]]), jnp.ones(2), eps=0.0)
      Array([[-1.,  1.]], dtype=float32)

    Source: Ba, Kiros and Hinton, "Layer normalization" (2016).
    """
    eps = check_number("eps", eps)
    params = {"scale": scale} if bias is None else {"scale": scale, "bias": bias}
    x, params = as_array("x", x), {name: as_array(name, w) for name, w in params.items()}
    features = _check(x, axis, **params)
    return _recomputed(partial(_layer_norm, features, eps))(x, *params.values())


@dataclass(frozen=True)
class _Features:
    ring: Ring | None
    size: int

    def mean(self, x: Float[Array, "*tokens d"]) -> Float[Array, "*tokens 1"]:
        total = jnp.sum(x, axis=-1, keepdims=True)
        total = total if self.ring is None else lax.psum(total, self.ring.names)
        return checkpoint_name(total / self.size, _MOMENTS)


def _rms_norm(
    features: _Features, eps: float, x: Float[Array, "*tokens d"], scale: Float[Array, " d"]
) -> Float[Array, "*tokens d"]:
    wide = x.astype(addition_dtype(x.dtype))
    y = wide * lax.rsqrt(features.mean(wide * wide) + eps)
    return (y * _like(wide, scale)).astype(x.dtype)


def _layer_norm(
    features: _Features,
    eps: float,
    x: Float[Array, "*tokens d"],
    scale: Float[Array, " d"],
    bias: Float[Array, " d"] | None = None,
) -> Float[Array, "*tokens d"]:
    wide = x.astype(addition_dtype(x.dtype))
    centred = wide - features.mean(wide)
    y = centred * lax.rsqrt(features.mean(centred * centred) + eps) * _like(wide, scale)
    return (y if bias is None else y + _like(wide, bias)).astype(x.dtype)


# The residuals are the input and the moments, not float32 copies of the input.
_recomputed = partial(
    jax.checkpoint, policy=jax.checkpoint_policies.save_only_these_names(_MOMENTS)
)


def _like(
    wide: Float[Array, "*tokens d"], parameter: Float[Array, " d"]
) -> Float[Array, "*ones d"]:
    """Returns the parameter in the dtype of its gradient's sum."""
    return with_rank(wide.ndim, vary_wide(varying_axes(wide), parameter.astype(wide.dtype)))


def _check(x: Array, axis: AxisLike | None, **parameters: Array) -> _Features:
    ring = None if axis is None else bind(axis, takes=())
    if x.ndim < 1:
        raise value_error("x must be [..., d], got an array without dimensions")
    for name, array in {"x": x, **parameters}.items():
        if not jnp.issubdtype(array.dtype, jnp.floating):
            raise type_error(f"{name} is {array.dtype}, not a float; cast it")
    sharded = "" if ring is None else f", d/n over {ring}"
    for name, array in parameters.items():
        if array.shape != x.shape[-1:]:
            raise value_error(
                f"{name} has local shape {array.shape}, but x {x.shape} has "
                f"{x.shape[-1]} features here{sharded}; {name} must be ({x.shape[-1]},), and "
                "axis must say over which axes both are sharded, None if neither is"
            )
    return _Features(ring, x.shape[-1] * (ring.size if ring else 1))
