"""Options of the wrong kind are refused by name, and empty arrays are not."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import (
    all_gather_matmul,
    all_reduce,
    collective_einsum,
    make_mesh,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
)

MODES = ("naive", "unidirectional", "bidirectional")


def trace(function, *shapes, dtype=np.float32, check_vma=False):
    mapped = jax.shard_map(
        function, mesh=make_mesh("dp=2,tp=4"), in_specs=P(), out_specs=P(), check_vma=check_vma
    )
    return jax.eval_shape(mapped, *(jax.ShapeDtypeStruct(shape, dtype) for shape in shapes))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wire_dtype": "int32"}, "wire_dtype=int32 cannot carry sums of float32; choose a float"),
        ({"wire_dtype": "bf16"}, "wire_dtype='bf16' is not a dtype; pass one such as"),
        ({"preferred_element_type": "int32"}, "int32 cannot hold products of float32 operands"),
        ({"preferred_element_type": "f"}, None),
        ({"precision": ("highest", "default")}, "precision must be one value for both operands"),
        ({"dim": 1.0}, "dim must be an integer, got 1.0 of type float"),
        ({"dim": True}, "dim must be an integer, got True of type bool"),
    ],
)
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("function", [all_gather_matmul, matmul_reduce_scatter])
def test_options(function, mode, options, message):
    def run():
        return trace(lambda x, w: function(x, w, "tp", mode=mode, **options), (8, 4), (4, 8))

    if message is None:  # NumPy's short names are dtypes, too
        run()
        return
    with pytest.raises(TypeError, match=f"{function.__name__}: .*{message}"):
        run()


@pytest.mark.parametrize("function", [reduce_scatter, all_reduce])
@pytest.mark.parametrize("mode", MODES)
def test_wire_of_plain_collectives(function, mode):
    with pytest.raises(TypeError, match=f"{function.__name__}: wire_dtype=int32 cannot carry sums"):
        trace(lambda x: function(x, "tp", mode=mode, wire_dtype="int32"), (4, 4))
    with pytest.raises(TypeError, match=f"{function.__name__}: wire_dtype='nope' is not a dtype"):
        trace(lambda x: function(x, "tp", mode=mode, wire_dtype="nope"), (4, 4))


def test_weights_in_a_list():
    for function in (
        lambda x, w: all_gather_matmul(x, [w, w], "tp"),
        lambda x, w: collective_einsum("mk,kn->mn", x, [w, w], "tp", gather="m"),
    ):
        with pytest.raises(TypeError, match="rhs is a list; pass one array, or a tuple of weights"):
            trace(function, (8, 4), (4, 8))


@pytest.mark.parametrize("argument", ["gather", "scatter"])
def test_labels_that_are_no_text(argument):
    call = partial(collective_einsum, "mk,kn->mn", axis="tp", **{argument: 1})
    with pytest.raises(TypeError, match=f"_einsum: {argument} must be a string of labels"):
        trace(call, (8, 4), (4, 8))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("check_vma", [True, False])
def test_empty_results(mode, check_vma):
    mesh = make_mesh("dp=2,tp=4")
    x, w = np.ones((0, 8), np.float32), np.ones((8, 4), np.float32)

    def forms(x, w):
        rows = all_gather_matmul(x, w, "tp", mode=mode)
        block = matmul_reduce_scatter(x, w, "tp", mode=mode)
        return rows.sum() + block.sum() + all_reduce(x, "tp", mode=mode).sum(), (
            matmul_all_reduce(x, w, "tp", mode=mode)
        )

    mapped = jax.shard_map(
        lambda x, w: forms(x, w)[1],
        mesh=mesh,
        in_specs=(P("tp"), P()),
        out_specs=P(),
        check_vma=check_vma,
    )
    assert jax.jit(mapped)(x, w).shape == (0, 4)
    mapped = jax.shard_map(
        lambda x, w: forms(x, w)[0][None],
        mesh=mesh,
        in_specs=(P("tp"), P()),
        out_specs=P("tp"),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(mapped)(x, w), np.zeros(4))


@pytest.mark.parametrize("mode", ["naive", "stationary", "unidirectional", "bidirectional"])
def test_explicit_axes_that_are_not_of_the_ring(mode):
    """The batch is sharded over an explicit axis that the shard_map leaves alone."""
    mesh = make_mesh("dp=2,tp=4", axis_types=AxisType.Explicit)
    x = np.arange(4 * 8 * 8, dtype=np.float32).reshape(4, 8, 8) % 7
    w = np.arange(64, dtype=np.float32).reshape(8, 8) % 5

    def run(function, x_spec, w_spec, x_in, out):
        placed = [
            jax.device_put(a, NamedSharding(mesh, spec)) for a, spec in ((x, x_spec), (w, w_spec))
        ]
        mapped = jax.shard_map(function, axis_names={"tp"}, in_specs=(x_in, w_spec), out_specs=out)
        with jax.set_mesh(mesh):
            np.testing.assert_array_equal(jax.jit(mapped)(*placed), x @ w)

    run(
        lambda x, w: all_gather_matmul(x, w, "tp", dim=1, mode=mode),
        *(P("dp", "tp"), P(None, "tp"), P(None, "tp"), P(None, None, "tp")),
    )
    run(
        lambda x, w: matmul_reduce_scatter(x, w, "tp", dim=1, mode=mode),
        *(P("dp", None, "tp"), P("tp"), P(None, None, "tp"), P(None, "tp")),
    )


def test_strict_promotion_is_kept_by_derivatives():
    x, w = jnp.ones((8, 4), "bfloat16"), jnp.ones((4, 8), "bfloat16")

    def loss(x, w):
        wide = all_gather_matmul(x, w, "tp", mode="bidirectional", preferred_element_type="float32")
        return jax.lax.psum(wide.sum(), "tp")

    mapped = jax.shard_map(
        loss, mesh=make_mesh("dp=2,tp=4"), in_specs=(P("tp"), P(None, "tp")), out_specs=P()
    )
    gradients = jax.jit(jax.grad(mapped, (0, 1)))(x, w)
    assert [str(g.dtype) for g in gradients] == ["bfloat16", "bfloat16"]
    np.testing.assert_array_equal(gradients[0], np.full((8, 4), 8))
