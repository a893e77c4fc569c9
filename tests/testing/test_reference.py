"""`assert_matches_reference` accepts what is right and names what is wrong."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.testing import assert_matches_reference, meshes

N = 4
CYCLE = [(i, (i + 1) % N) for i in range(N)]
floats = pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
# Errors must be seen at the precisions that hide most and least.
ends = pytest.mark.parametrize("dtype", ["float32", "bfloat16"])


def normal(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(jnp.dtype(dtype))


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()[:N]), ("x",), axis_types=(AxisType.Auto,))


def gather_matmul(x, w):
    return lax.all_gather(x, "x", tiled=True) @ w


GATHER = {"in_specs": (P("x"), P(None, "x")), "out_specs": P(None, "x")}
SCATTER = {"in_specs": (P(None, "x"), P("x")), "out_specs": P("x")}


def matmul(x, w):
    return x @ w


def row_parallel(x, w, b):
    return lax.psum(x @ w, "x") + b


ROW = {"in_specs": (P(None, "x"), P("x"), P()), "out_specs": P()}


def linear(x, w, b):
    return x @ w + b


def linear_args(dtype):
    return normal((8, 32), dtype, 1), normal((32, 8), dtype, 2), normal(8, dtype, 3)


# -- what is right ----------------------------------------------------------------------------


@floats
@examples(2)
@given(mesh=meshes(max_axes=2), seed=st.integers(0, 99))
def test_gather_and_scatter_over_any_mesh(dtype, mesh, seed):
    axes, n = mesh.axis_names, mesh.size
    vma = (True, False) if dtype == "float32" else dtype == "float16"
    args = normal((2 * n, 3 * n), dtype, seed), normal((3 * n, n), dtype, seed + 1)
    assert_matches_reference(
        lambda x, w: lax.all_gather(x, axes, tiled=True) @ w,
        matmul,
        *args,
        mesh=mesh,
        in_specs=(P(axes), P(None, axes)),
        out_specs=P(None, axes),
        check_vma=vma,
        seed=seed,
    )
    assert_matches_reference(
        lambda x, w: lax.psum_scatter(x @ w, axes, tiled=True),
        matmul,
        *args,
        mesh=mesh,
        in_specs=(P(None, axes), P(axes)),
        out_specs=P(axes),
        check_vma=vma,
        seed=seed,
    )


@floats
def test_bias_added_once(mesh, dtype):
    assert_matches_reference(row_parallel, linear, *linear_args(dtype), mesh=mesh, **ROW)


@ends
def test_long_positive_sums(mesh, dtype):
    args = np.abs(normal((4, 4096), dtype)), np.abs(normal((4096, 4), dtype))
    assert_matches_reference(
        lambda x, w: lax.psum_scatter(x @ w, "x", tiled=True), matmul, *args, mesh=mesh, **SCATTER
    )


@ends
def test_smooth_nonlinear_layers_and_a_scalar_loss(mesh, dtype):
    def loss(x, w1, w2):
        hidden = jnp.tanh(x @ w1)
        return lax.psum(jnp.sum(jnp.sin(lax.psum(hidden @ w2, "x"))), ()) / 8

    def reference(x, w1, w2):
        return np.sum(np.sin(np.tanh(x @ w1) @ w2)) / 8

    args = normal((4, 8), dtype, 1) / 2, normal((8, 16), dtype, 2) / 2, normal((16, 2), dtype, 3)
    assert_matches_reference(
        loss,
        reference,
        *args,
        mesh=mesh,
        in_specs=(P(), P(None, "x"), P("x")),
        out_specs=P(),
        check_vma=True,
    )


def test_relu_has_kinks_and_passes(mesh):
    assert_matches_reference(
        lambda x, w: jax.nn.relu(gather_matmul(x, w)),
        lambda x, w: np.maximum(x @ w, 0),
        normal((16, 8)),
        normal((8, 32), seed=1),
        mesh=mesh,
        **GATHER,
    )


def test_a_zero_argument(mesh):
    args = normal((8, 32)), normal((32, 8)), np.zeros(8, np.float32)
    assert_matches_reference(row_parallel, linear, *args, mesh=mesh, **ROW)


def test_trees_integers_and_float64(mesh):
    def fn(tree, index):
        x = lax.all_gather(tree["x"], "x", tiled=True)
        return {"rows": x[index], "count": index + lax.psum(1, "x")}

    with jax.enable_x64(True):
        assert_matches_reference(
            fn,
            lambda tree, index: {"rows": tree["x"][index], "count": index + N},
            {"x": normal((8, 3), "float64")},
            np.array([5, 0, 5, 7]),
            mesh=mesh,
            in_specs=({"x": P("x")}, P("x")),
            out_specs=P("x"),
        )


def test_unread_nan_and_infinite_outputs(mesh):
    x = normal((8, 3))
    x[1] = np.nan
    rows = np.arange(8) != 1

    def fn(x):
        at = 2 * lax.axis_index("x") + jnp.arange(2)
        return jnp.where((at != 1)[:, None], x * 2, -jnp.inf)

    assert_matches_reference(
        fn,
        lambda x: np.where(rows[:, None], x * 2, -np.inf),
        x,
        mesh=mesh,
        in_specs=P("x"),
        out_specs=P("x"),
    )


def test_explicit_meshes_empty_arguments_and_no_floats():
    mesh = jax.make_mesh((N,), ("x",), axis_types=(AxisType.Explicit,))
    specs = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x")}
    assert_matches_reference(lambda x: x + 1, lambda x: x + 1, np.arange(8), **specs)
    assert_matches_reference(lambda x: x * 2, lambda x: x * 2, normal((8, 0)), **specs)
    assert_matches_reference(lambda x: x * 2, lambda x: x * 2, normal(8), **specs)


@ends
def test_reference_vjp_compares_every_entry(mesh, dtype):
    def vjp(args, ct):
        x, w, _ = args
        return ct @ w.T, x.T @ ct, ct.sum(0)

    options = {"mesh": mesh, "reference_vjp": vjp, "check_vma": True, **ROW}
    assert_matches_reference(row_parallel, linear, *linear_args(dtype), **options)
    with pytest.raises(AssertionError, match=r"gradient of args\[1\].* 1 of 256 wrong"):
        assert_matches_reference(
            one_wrong_entry(row_parallel, 1, (3, 2)), linear, *linear_args(dtype), **options
        )


def test_rounding_dtype_asks_for_more(mesh):
    args = normal((8, 16), "bfloat16", 1), normal((16, 8), "bfloat16", 2)

    def through(dtype):
        def fn(x, w):
            x = lax.all_gather(x, "x", tiled=True)
            y = jnp.matmul(x, w, preferred_element_type=jnp.float32)
            # XLA may drop a cast to bfloat16 and back; it keeps this.
            return lax.reduce_precision(y, jnp.finfo(dtype).nexp, jnp.finfo(dtype).nmant)

        return fn

    options = {"mesh": mesh, "check_vma": True, "grad": False, **GATHER}
    assert_matches_reference(through(jnp.bfloat16), matmul, *args, **options)
    assert_matches_reference(
        through(jnp.float32), matmul, *args, rounding_dtype=jnp.float32, **options
    )
    with pytest.raises(AssertionError, match="value of output"):
        assert_matches_reference(
            through(jnp.bfloat16), matmul, *args, rounding_dtype=jnp.float32, **options
        )


# -- what is wrong ----------------------------------------------------------------------------


def one_wrong_entry(fn, which, at):
    """`fn` with a gradient of argument `which` that is wrong in one entry of each block."""

    @jax.custom_vjp
    def spoil(x):
        return x

    spoil.defvjp(lambda x: (x, None), lambda _, ct: (ct.at[at].multiply(-1),))

    def spoiled(*args):
        first = lax.axis_index("x") == 0
        args = list(args)
        args[which] = jnp.where(first, spoil(args[which]), args[which])
        return fn(*args)

    return spoiled


def ring_gather_matmul(perm, steps=N, source=-1):
    """All-gather matmul as a ring of blocks; right for `CYCLE`, all steps and `source=-1`."""

    def fn(x, w):
        me, rows = lax.axis_index("x"), x.shape[0]
        out = jnp.zeros((N * rows, w.shape[1]), x.dtype) + 0 * w[:1]
        for step in range(steps):
            at = (me + source * step) % N * rows
            out = lax.dynamic_update_slice(out, x @ w, (at, 0 * at))
            x = lax.ppermute(x, "x", perm)
        return out

    return fn


BACKWARDS = [(j, i) for i, j in CYCLE]


@ends
def test_the_ring_below_is_right(mesh, dtype):
    args = normal((16, 8), dtype), normal((8, 16), dtype, 1)
    assert_matches_reference(ring_gather_matmul(CYCLE), matmul, *args, mesh=mesh, **GATHER)


@ends
@pytest.mark.parametrize(
    "fn",
    [ring_gather_matmul(BACKWARDS), ring_gather_matmul(CYCLE, steps=N - 1)],
    ids=["swapped direction", "dropped block"],
)
def test_wrong_rings_fail(mesh, dtype, fn):
    args = normal((16, 8), dtype), normal((8, 16), dtype, 1)
    with pytest.raises(AssertionError) as error:
        assert_matches_reference(fn, matmul, *args, mesh=mesh, check_vma=True, **GATHER)
    for what in ("value of output", "gradient of args[0]", "gradient of args[1]"):
        assert what in str(error.value)


@ends
def test_dropped_block_of_a_long_sum_fails(mesh, dtype):
    def fn(x, w):
        kept = jnp.where(lax.axis_index("x") == 2, 0, 1).astype(x.dtype)
        return lax.psum(kept * (x @ w), "x")

    with pytest.raises(AssertionError, match="value of output"):
        assert_matches_reference(
            fn,
            matmul,
            normal((8, 512), dtype, 1),
            normal((512, 8), dtype, 2),
            mesh=mesh,
            in_specs=ROW["in_specs"][:2],
            out_specs=P(),
            grad=False,
        )


@ends
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: lax.psum(x @ w, "x") + 2 * b,
        lambda x, w, b: lax.psum(x @ w + b, "x"),
        lambda x, w, b: lax.psum(x @ w, "x"),
    ],
    ids=["twice", "on every device", "never"],
)
def test_bias_not_added_once_fails(mesh, dtype, fn):
    with pytest.raises(AssertionError) as error:
        assert_matches_reference(fn, linear, *linear_args(dtype), mesh=mesh, check_vma=True, **ROW)
    assert "value of output" in str(error.value)
    assert "gradient of args[2]" in str(error.value)
    assert "gradient of args[0]" not in str(error.value)


@ends
def test_missing_psum_fails(mesh, dtype):
    with pytest.raises(AssertionError, match="check_vma=False: value of output"):
        assert_matches_reference(
            lambda x, w, b: x @ w + b,
            linear,
            *linear_args(dtype),
            mesh=mesh,
            check_vma=False,
            **ROW,
        )


@ends
def test_unsummed_weight_gradient_fails(mesh, dtype):
    """The value is right; the gradient of the replicated weight lacks its sum over devices."""

    @jax.custom_vjp
    def fn(x, w):
        return x @ w

    def backward(saved, ct):
        x, w = saved
        first = (lax.axis_index("x") == 0).astype(x.dtype)
        return ct @ w.T, first * (x.T @ ct)

    fn.defvjp(lambda x, w: (x @ w, (x, w)), backward)
    with pytest.raises(AssertionError) as error:
        assert_matches_reference(
            fn,
            matmul,
            normal((16, 8), dtype),
            normal((8, 8), dtype, 1),
            mesh=mesh,
            in_specs=(P("x"), P()),
            out_specs=P("x"),
            check_vma=False,
        )
    assert "gradient of args[1]" in str(error.value)
    assert "value" not in str(error.value)
    assert "gradient of args[0]" not in str(error.value)


@ends
@pytest.mark.parametrize("size", [16, 64])
def test_one_wrong_gradient_entry_fails(mesh, dtype, size):
    """Alone in its direction, and among others."""
    args = normal((8, size), dtype), normal((size, 4), dtype, 1)
    with pytest.raises(AssertionError, match=r"gradient of args\[0\].* 1 of ") as error:
        assert_matches_reference(
            one_wrong_entry(lambda x, w: lax.psum(x @ w, "x"), 0, (2, 1)),
            matmul,
            *args,
            mesh=mesh,
            in_specs=(P(None, "x"), P("x")),
            out_specs=P(),
            check_vma=True,
            max_directions=128,
        )
    assert ("4 random entries" in str(error.value)) == (size == 64)
    assert "args[1]" not in str(error.value)


@ends
def test_nan_fails(mesh, dtype):
    args = normal((16, 8), dtype), normal((8, 16), dtype, 1)

    def in_value(x, w):
        y = gather_matmul(x, w)
        return y.at[3, 1].set(jnp.nan)

    with pytest.raises(AssertionError, match=r"value.*4 of 256 wrong.*\(3, 1\): got nan"):
        assert_matches_reference(in_value, matmul, *args, mesh=mesh, grad=False, **GATHER)

    def in_gradient(x, w):
        @jax.custom_vjp
        def spoil(x):
            return x

        spoil.defvjp(lambda x: (x, None), lambda _, ct: (ct.at[0, 0].set(jnp.nan),))
        return gather_matmul(spoil(x), w)

    with pytest.raises(AssertionError, match=r"gradient of args\[0\].* 4 of 128 .* got nan"):
        assert_matches_reference(
            in_gradient, matmul, *args, mesh=mesh, max_directions=128, check_vma=True, **GATHER
        )


@pytest.mark.parametrize("off", [1, -1])
def test_integers_are_exact(mesh, off):
    with pytest.raises(AssertionError, match=r"int32\[8\]: 8 of 8 wrong, .* allowed 0"):
        assert_matches_reference(
            lambda i: i + off,
            lambda i: i,
            np.arange(8, dtype=np.int32),
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        )


# -- what is said -----------------------------------------------------------------------------


def test_message_names_setting_argument_error_mesh_and_specs(mesh):
    with pytest.raises(AssertionError) as error:
        assert_matches_reference(
            lambda tree: {"y": 2 * tree["a"][0]},
            lambda tree: {"y": 3 * tree["a"][0]},
            {"a": [np.ones(8, np.float32)]},
            mesh=mesh,
            in_specs=P("x"),
            out_specs=P("x"),
        )
    lines = str(error.value).splitlines()
    assert lines[0] == "assert_matches_reference: 6 of 6 comparisons fail"
    assert re.match(  # the worst of equal errors is that of the least tolerance, by draws
        r"  check_vma=True: value of output\['y'\], float32\[8\]: 8 of 8 wrong, worst at entry "
        r"\(\d,\): got 2, expected 3, error 1, allowed ",
        lines[1],
    )
    assert lines[4].startswith("  check_vma=True: gradient of args[0]['a'][0], float32[8]: 8 of 8 ")
    assert lines[-1] == (
        f"  mesh {{'x': 4}} of devices [0, 1, 2, 3], in_specs={P('x')}, out_specs={P('x')}"
    )


def test_shapes_and_structures_must_agree(mesh):
    options = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x")}
    with pytest.raises(AssertionError, match=r"float32\[8\]: the reference has shape \(4,\)"):
        assert_matches_reference(lambda x: x, lambda x: x[:4], normal(8), **options)
    with pytest.raises(AssertionError, match=r"fn returns PyTreeDef\(\*\), and the reference"):
        assert_matches_reference(lambda x: x, lambda x: (x, x), normal(8), **options)
    with pytest.raises(AssertionError, match=r"args are .*, and reference_vjp returns"):
        assert_matches_reference(
            lambda x: x, lambda x: x, normal(8), reference_vjp=lambda args, ct: ct, **options
        )


def test_errors_of_tracing_name_the_setting(mesh):
    with pytest.raises(ValueError, match="out_specs") as error:
        assert_matches_reference(
            gather_matmul,
            matmul,
            normal((8, 8)),
            normal((8, 8)),
            mesh=mesh,
            in_specs=GATHER["in_specs"],
            out_specs=P(),
        )
    assert error.value.__notes__[-1] == (
        "assert_matches_reference: this happened under check_vma=True"
    )


def test_no_setting_to_run_under(mesh):
    with pytest.raises(ValueError, match=r"check_vma=\(\) runs nothing"):
        assert_matches_reference(
            abs, abs, normal(8), mesh=mesh, in_specs=P("x"), out_specs=P("x"), check_vma=()
        )


def test_complex_numbers(mesh):
    options = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x")}
    what = r"args\[0\] is complex64\[8\]; compare real and imaginary parts, as two floats"
    with pytest.raises(TypeError, match=what):
        assert_matches_reference(jnp.conj, abs, normal(8) + 1j, **options)
    with pytest.raises(TypeError, match=r"output is complex64\[8\]"):
        assert_matches_reference(lambda x: lax.complex(x, x), abs, normal(8), **options)


def test_references_that_cannot_be_trusted(mesh):
    options = {"mesh": mesh, "in_specs": P("x"), "out_specs": P("x")}
    with pytest.raises(ValueError, match="the reference returns NaN in output"):
        assert_matches_reference(lambda x: x, lambda x: x * np.nan, normal(8), **options)
    with pytest.raises(ValueError, match="central differences of the reference do not converge"):
        assert_matches_reference(
            lambda x: x * x, lambda x: (x * x).astype(np.float32), normal(256), **options
        )

    def in_place(x):
        x *= 2
        return x

    with pytest.raises(ValueError, match="read-only"):
        assert_matches_reference(lambda x: 2 * x, in_place, normal(8), **options)
