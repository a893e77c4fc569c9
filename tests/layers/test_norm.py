"""Norms against NumPy, features whole and sharded; what they send and keep."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.layers import layer_norm, rms_norm
from jaxpar.testing import assert_matches_reference, count_collectives

MESH = {"dp": 2, "tp": 4}


def rms(x, scale, bias, eps=1e-3):
    return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps) * scale + bias


def layer(x, scale, bias, eps=1e-3):
    centred = x - np.mean(x, -1, keepdims=True)
    return centred / np.sqrt(np.mean(centred**2, -1, keepdims=True) + eps) * scale + bias


def rms_and_bias(x, scale, bias, **how):
    return rms_norm(x, scale, **how) + bias


def normal(*shape, seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype("float32")


@pytest.mark.parametrize(
    ("fn", "axis", "dtype", "check_vma"),
    [
        (rms_and_bias, None, "float32", True),
        (rms_and_bias, ("tp", "dp"), "bfloat16", False),
        (rms_and_bias, "tp", "float32", False),
        (layer_norm, None, "bfloat16", False),
        (layer_norm, ("tp", "dp"), "float32", True),
        (layer_norm, "tp", "bfloat16", True),
    ],
)
def test_values_and_gradients(fn, axis, dtype, check_vma):
    """Tokens over what features leave; a mean far from 0 for the variance not to cancel."""
    x = normal(2, 8, 8) + (5 if fn is layer_norm else 0)
    tokens, features = {
        None: (P("dp", "tp"), P()),
        "tp": (P("dp", None, "tp"), P("tp")),
        ("tp", "dp"): (P(None, None, ("tp", "dp")), P(("tp", "dp"))),
    }[axis]
    assert_matches_reference(
        lambda *args: fn(*args, eps=1e-3, axis=axis),
        layer if fn is layer_norm else rms,
        *(jnp.asarray(a, dtype) for a in (x, normal(8), normal(8, seed=1))),
        mesh=make_mesh(MESH),
        in_specs=(tokens, features, features),
        out_specs=tokens,
        check_vma=check_vma,
        max_directions=4,
    )


def count(fn, axis, check_vma=True):
    tokens, features = (P("dp", "tp"), P()) if axis is None else (P("dp", None, "tp"), P("tp"))
    mapped = jax.shard_map(
        lambda *args: fn(*args, axis=axis),
        mesh=make_mesh(MESH),
        in_specs=(tokens, features),
        out_specs=tokens,
        check_vma=check_vma,
    )
    found = count_collectives(
        mapped,
        jax.ShapeDtypeStruct((2, 8, 64), jnp.bfloat16),
        jax.ShapeDtypeStruct((64,), jnp.bfloat16),
    )
    return found, (2 * 64, 64) if axis is None else (8 * 16, 16)


@pytest.mark.parametrize(("fn", "moments"), [(rms_norm, 1), (layer_norm, 2)])
@pytest.mark.parametrize("axis", [None, "tp"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_what_is_sent_and_kept(fn, moments, axis, check_vma):
    """x as it came in, the scale, and the moments; sums of moments, and the scale's gradient."""
    found, (x, scale) = count(fn, axis, check_vma)
    sums = moments * (axis is not None)
    assert found.forward == ({"psum": sums} if sums else {})
    assert found.backward == {"psum": sums + 1}
    assert found.residual_bytes == 2 * x + 2 * scale + 4 * moments * (2 if axis is None else 8)


def test_float64():
    with jax.enable_x64(True):
        x = jnp.asarray(normal(3, 8), "float64")
        for fn, reference in ((rms_norm, rms), (layer_norm, layer)):
            y = fn(x, jnp.ones(8, "float32"), eps=1e-3)
            assert y.dtype == jnp.float64
            np.testing.assert_allclose(y, reference(np.asarray(x), 1.0, 0.0), rtol=1e-12)


def test_numpy_numbers():
    x, eps = jnp.full((1, 4), 2.0, "bfloat16"), np.float32(1.0)
    assert layer_norm(x, jnp.ones(4), eps=eps).dtype == "bfloat16"
    np.testing.assert_allclose(rms_norm(x.astype("float32"), jnp.ones(4), eps=eps), 2 / 5**0.5)


def test_errors():
    def message(kind, *args, **how):
        with pytest.raises(kind) as caught:
            layer_norm(*args, **how)
        return str(caught.value)

    ones = jnp.ones
    assert message(ValueError, ones(()), ones(3)) == (
        "layer_norm: x must be [..., d], got an array without dimensions"
    )
    assert message(TypeError, ones((2, 3), "int32"), ones(3)) == (
        "layer_norm: x is int32, not a float; cast it"
    )
    assert message(ValueError, ones((2, 3)), ones(3), ones(6)) == (
        "layer_norm: bias has local shape (6,), but x (2, 3) has 3 features here; bias must be "
        "(3,), and axis must say over which axes both are sharded, None if neither is"
    )
    assert message(ValueError, ones((2, 3)), ones(3), eps=-1.0) == (
        "layer_norm: eps=-1.0 must be at least 0"
    )
    assert message(TypeError, ones((2, 3)), ones(3), eps="1e-5") == (
        "layer_norm: eps must be a number known while tracing, got '1e-5' of type str"
    )
    assert message(ValueError, ones((2, 3)), ones(3), axis="tp") == (
        "layer_norm: axis 'tp' is not bound: no mesh axis is bound here. Call it inside "
        "jax.shard_map over a mesh with an axis 'tp'"
    )
