"""Whatever names a mesh axis does so everywhere, and an Axis says how data travel over it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import (
    Axis,
    all_gather,
    all_gather_matmul,
    make_mesh,
    matmul_reduce_scatter,
    reduce_scatter,
    ring_hops,
    ring_order,
    ring_shift,
)
from jaxpar.axis.axis import Ring, bind
from jaxpar.layers import column_parallel_linear
from jaxpar.testing import count_collectives

MODES = ("naive", "chunked-2", "unidirectional", "bidirectional", "auto")


# -- the Axis itself ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "names"),
    [
        ("tp", ("tp",)),
        (("tp",), ("tp",)),
        (["tp"], ("tp",)),
        (("tp", "dp"), ("tp", "dp")),
        (["tp", "dp"], ("tp", "dp")),
        (Axis("tp"), ("tp",)),
        (Axis(["tp", "dp"]), ("tp", "dp")),
    ],
)
def test_names_in_every_form(given, names):
    assert Axis(given).names == names


def test_an_axis_of_an_axis_keeps_what_is_not_said_anew():
    inner = Axis("tp", mode="bidirectional", wire_dtype="bfloat16")
    assert Axis(inner) == inner
    assert Axis(inner, mode="naive") == Axis("tp", mode="naive", wire_dtype="bfloat16")
    assert Axis(inner, wire_dtype="float32") == Axis("tp", "bidirectional", "float32")


def test_what_an_axis_is_when_nothing_else_is_said():
    axis = Axis("tp")
    assert (axis.mode, axis.wire_dtype) == ("auto", None)
    assert (
        repr(axis)
        == "Axis(names=('tp',), mode='auto', wire_dtype=None, backward=None, keep_gathered=None, "
        "gather_dtype=None)"
    )


@pytest.mark.parametrize("mode", MODES)
def test_every_mode(mode):
    assert Axis("tp", mode).mode == Axis("tp", mode=mode).mode == mode


@pytest.mark.parametrize("dtype", ["bfloat16", jnp.bfloat16, jnp.dtype("bfloat16")])
def test_a_wire_in_every_form(dtype):
    assert Axis("tp", wire_dtype=dtype) == Axis("tp", wire_dtype="bfloat16")
    assert isinstance(Axis("tp", wire_dtype=dtype).wire_dtype, np.dtype)


def test_equal_axes_are_one_key():
    """JAX takes what it has traced for an equal one."""
    axis = Axis("tp", mode="naive", wire_dtype=jnp.bfloat16)
    same = Axis(["tp"], mode="naive", wire_dtype="bfloat16")
    assert axis == same
    assert hash(axis) == hash(same)
    others = [
        Axis("dp", "naive", "bfloat16"),
        Axis(("tp", "dp"), "naive", "bfloat16"),
        Axis("tp", "auto", "bfloat16"),
        Axis("tp", "naive", "float16"),
        Axis("tp", "naive"),
    ]
    assert len({axis, same, *others}) == 1 + len(others)
    assert Axis(("a", "b")) != Axis(("b", "a"))
    assert axis != "tp"


def test_an_axis_does_not_change():
    with pytest.raises(AttributeError, match="names"):
        Axis("tp").names = ("dp",)


NAMES = "axis must be a mesh axis name, a tuple or list of them, or an Axis, got"


@pytest.mark.parametrize(
    ("names", "error", "message"),
    [
        (3, TypeError, f"{NAMES} 3"),
        (None, TypeError, f"{NAMES} None"),
        ({"tp"}, TypeError, f"{NAMES} {{'tp'}}"),
        (("tp", 1), TypeError, f"{NAMES} ('tp', 1)"),
        (["tp", None], TypeError, f"{NAMES} ['tp', None]"),
        ((("tp",),), TypeError, f"{NAMES} (('tp',),)"),
        ((), ValueError, "axis () must name at least one mesh axis, and each once"),
        ([], ValueError, "axis [] must name at least one mesh axis, and each once"),
        ("", ValueError, "axis '' must name at least one mesh axis, and each once"),
        (("tp", "tp"), ValueError, "axis ('tp', 'tp') must name at least one mesh axis, and each"),
    ],
)
def test_names_that_name_no_axes(names, error, message):
    with pytest.raises(error) as caught:
        Axis(names)
    assert str(caught.value).startswith(f"Axis: {message}")


@pytest.mark.parametrize("mode", ["ring", None, 1, ["naive"]])
def test_an_unknown_mode(mode):
    with pytest.raises(ValueError, match="mode") as caught:
        Axis("tp", mode=mode)
    choices = "naive, stationary, chunked-2, chunked-4, chunked-8"
    choices += ", unidirectional, bidirectional, multi-ring, auto"
    assert str(caught.value) == f"Axis: mode must be one of {choices}, got {mode!r}"


def test_a_wire_that_is_no_dtype():
    with pytest.raises(TypeError, match=r"^Axis: wire_dtype='nope' is not a dtype; pass one such"):
        Axis("tp", wire_dtype="nope")


# -- wherever a mesh axis is named --------------------------------------------------------------

FORMS = {
    "list": lambda names: list(names),
    "axis": lambda names: Axis(names),
    "axis of a list": lambda names: Axis(list(names)),
    "axis of an axis": lambda names: Axis(Axis(names)),
}
every_form = pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
both_orders = pytest.mark.parametrize("names", [("x", "y"), ("y", "x")], ids=str)


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def assert_same(function, names, axis, *args, in_specs, out_specs):
    """Asserts that `function` makes of `axis` the program that it makes of the tuple."""
    mesh = make_mesh("x=2,y=4")

    def lowered(axis):
        mapped = jax.jit(
            jax.shard_map(
                lambda *args: function(*args, axis),
                mesh=mesh,
                in_specs=in_specs,
                out_specs=out_specs,
            )
        )
        return mapped.lower(*args)

    program = lowered(axis)
    assert program.as_text() == lowered(names).as_text()
    return program.compile()(*args)


@every_form
@both_orders
def test_of_a_matmul(form, names):
    x, w = normal(16, 4), normal(4, 8, seed=1)
    specs = {"in_specs": (P(names), P(None, names)), "out_specs": P(None, names)}
    found = assert_same(all_gather_matmul, names, form(names), x, w, **specs)
    np.testing.assert_allclose(found, x @ w, rtol=1e-5, atol=1e-5)


@every_form
@both_orders
def test_of_a_ring_collective(form, names):
    x = normal(8, 3)
    specs = {"in_specs": P(names), "out_specs": P(names)}
    assert_same(lambda x, axis: all_gather(x, axis, tiled=True), names, form(names), x, **specs)
    found = assert_same(ring_shift, names, form(names), x, **specs)
    np.testing.assert_array_equal(found, np.roll(x, 1, axis=0))


@every_form
@both_orders
def test_of_a_layer(form, names):
    x, w = normal(8, 4), normal(4, 16, seed=1)
    specs = {"in_specs": (P(names), P(None, names)), "out_specs": P(None, names)}
    found = assert_same(column_parallel_linear, names, form(names), x, w, **specs)
    np.testing.assert_allclose(found, x @ w, rtol=1e-5, atol=1e-5)


@every_form
@both_orders
def test_of_a_mesh(form, names):
    mesh = make_mesh("x=2,y=4")
    for function in (ring_order, ring_hops):
        np.testing.assert_array_equal(function(mesh, form(names)), function(mesh, names))


# -- how data travel over it --------------------------------------------------------------------


def counts(function, *shapes):
    mapped = jax.shard_map(
        function, mesh=make_mesh("tp=8"), in_specs=P("tp"), out_specs=P("tp"), check_vma=False
    )
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    return set(count_collectives(mapped, *args, grad=False).forward)


CALLS = {
    "matmul": lambda x, axis, **mode: all_gather_matmul(x, x[:2].T, axis, **mode),
    "collective": lambda x, axis, **mode: all_gather(x, axis, tiled=True, **mode),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS)
def test_a_mode_given_goes_before_that_of_the_axis(call):
    def run(*args, **mode):
        return counts(lambda x: call(x, *args, **mode), (16, 4))

    naive, ring = {"all_gather"}, {"ppermute"}
    assert run(Axis("tp", mode="naive")) == naive
    assert run(Axis("tp", mode="bidirectional")) == ring
    assert run(Axis("tp", mode="bidirectional"), mode="naive") == naive
    assert run(Axis("tp", mode="naive"), mode="unidirectional") == ring
    assert run(Axis("tp", mode="naive"), mode=None) == naive


def test_a_layer_takes_the_mode_of_its_axis():
    def run(axis):
        return counts(lambda x: column_parallel_linear(x, x[:2].T, axis, sequence_dim=0), (16, 4))

    assert run(Axis("tp", mode="naive")) == {"all_gather"}
    assert run(Axis("tp", mode="unidirectional")) == {"ppermute"}


WIRES = {
    "matmul": lambda x, axis, **wire: matmul_reduce_scatter(x, x.T, axis, **wire),
    "collective": lambda x, axis, **wire: reduce_scatter(x @ x.T, axis, tiled=True, **wire),
}


@pytest.mark.parametrize("call", WIRES.values(), ids=WIRES)
def test_a_wire_given_goes_before_that_of_the_axis(call):
    def run(*args, **wire):
        """The dtype of what travels."""
        mapped = jax.shard_map(
            lambda x: call(x, *args, mode="unidirectional", **wire),
            mesh=make_mesh("tp=8"),
            in_specs=P("tp"),
            out_specs=P("tp"),
        )
        lines = str(jax.make_jaxpr(mapped)(jnp.ones((128, 4), jnp.bfloat16))).splitlines()
        sent = [line.split(":")[1].split("[")[0] for line in lines if "= ppermute[" in line]
        assert len(sent) == 7
        return set(sent)

    assert run("tp") == {"bf16"}
    assert run(Axis("tp")) == {"bf16"}
    assert run(Axis("tp", wire_dtype="float32")) == {"f32"}
    assert run("tp", wire_dtype="float32") == {"f32"}
    assert run(Axis("tp", wire_dtype="float32"), wire_dtype="bfloat16") == {"bf16"}
    assert run(Axis("tp", wire_dtype="bfloat16"), wire_dtype="float32") == {"f32"}
    assert run(Axis("tp", wire_dtype="bfloat16"), wire_dtype=None) == {"bf16"}


def test_a_backward_mode_is_one_of_the_modes():
    assert Axis("tp", backward="naive").backward == "naive"
    assert Axis(Axis("tp", backward="naive"), mode="chunked-2").backward == "naive"
    with pytest.raises(
        ValueError, match=r"^Axis: backward must be one of naive, stationary, .*'up'"
    ):
        Axis("tp", backward="up")


def test_a_bound_axis_has_all_that_the_axis_had():
    found = []

    def run(x):
        found.append(bind(Axis(["y", "x"], mode="naive", wire_dtype="bfloat16")))
        found.append(bind(found[0]))
        return x

    jax.eval_shape(
        jax.shard_map(run, mesh=make_mesh("x=2,y=4"), in_specs=P("x"), out_specs=P("x")),
        jnp.ones(8),
    )
    assert found == [Ring(("y", "x"), "naive", "bfloat16", size=8)] * 2
    assert str(found[0]) == "axis ('y', 'x') (8)"


@pytest.mark.parametrize("axis", ["v", ("x", "v"), Axis("v", mode="naive")])
def test_an_axis_of_vmap(axis):
    def run(x):
        return jax.vmap(lambda x: ring_shift(x, axis), axis_name="v")(x)

    mapped = jax.shard_map(run, mesh=make_mesh("x=8"), in_specs=P("x"), out_specs=P("x"))
    wrong = "^ring_shift: axis 'v' is an axis of jax.vmap.* over a mesh with an axis 'v'"
    with pytest.raises(ValueError, match=wrong):
        jax.eval_shape(mapped, jnp.ones(16))


def test_vmap_over_devices():
    """With an axis of the mesh `spmd_axis_name`, and beside another axis of vmap."""
    mesh = make_mesh("x=2,v=4")
    mapped = jax.shard_map(
        lambda x: jax.vmap(lambda x: ring_shift(x, "x"), axis_name="w")(x),
        mesh=mesh,
        in_specs=P(None, "x"),
        out_specs=P(None, "x"),
        check_vma=False,
    )
    x = jnp.arange(32).reshape(4, 2, 4)
    shifted = jax.jit(jax.vmap(mapped, spmd_axis_name="v"))(x)
    np.testing.assert_array_equal(shifted, np.roll(x, 2, axis=2))


# -- errors name what was called ----------------------------------------------------------------

FUNCTIONS = {
    "all_gather_matmul": lambda x, axis: all_gather_matmul(x, x.T, axis),
    "matmul_reduce_scatter": lambda x, axis: matmul_reduce_scatter(x, x.T, axis),
    "all_gather": lambda x, axis: all_gather(x, axis),
    "column_parallel_linear": lambda x, axis: column_parallel_linear(x, x.T, axis),
}


@pytest.mark.parametrize(
    ("axis", "error", "message"),
    [
        (3, TypeError, f"{NAMES} 3"),
        ({"tp"}, TypeError, f"{NAMES} {{'tp'}}"),
        ([], ValueError, "axis [] must name at least one mesh axis, and each once"),
        ("", ValueError, "axis '' must name at least one mesh axis, and each once"),
        (["tp", "tp"], ValueError, "axis ['tp', 'tp'] must name at least one mesh axis, and each"),
        ("dp", ValueError, "axis 'dp' is not bound: the axes bound here are {'tp': 8}. Call it"),
        (["tp", "dp"], ValueError, "axis 'dp' is not bound: the axes bound here are {'tp': 8}."),
        (Axis("dp"), ValueError, "axis 'dp' is not bound: the axes bound here are {'tp': 8}. "),
    ],
)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_wrong_axis(name, axis, error, message):
    mapped = jax.shard_map(
        lambda x: FUNCTIONS[name](x, axis),
        mesh=make_mesh("tp=8"),
        in_specs=P("tp"),
        out_specs=P("tp"),
    )
    with pytest.raises(error) as caught:
        jax.eval_shape(mapped, jnp.ones((8, 4)))
    assert str(caught.value).startswith(f"{name}: {message}")


@pytest.mark.parametrize("axis", ["tp", Axis("tp"), Axis("tp", wire_dtype="int32")])
def test_a_wire_that_carries_no_floats_is_the_call_s(axis):
    """An Axis does not know what will travel."""
    wire = {} if isinstance(axis, Axis) and axis.wire_dtype else {"wire_dtype": "int32"}
    mapped = jax.shard_map(
        lambda x: reduce_scatter(x, axis, tiled=True, **wire),
        mesh=make_mesh("tp=8"),
        in_specs=P(),
        out_specs=P("tp"),
    )
    wrong = r"^reduce_scatter: wire_dtype=int32 cannot carry sums"
    with pytest.raises(TypeError, match=wrong):
        jax.eval_shape(mapped, jnp.ones((8, 4)))


@pytest.mark.parametrize("wire", ["int4", "int32", "bool"])
def test_a_gather_whose_gradient_no_wire_carries(wire):
    gather = jax.shard_map(
        lambda x: all_gather(x, "tp", wire_dtype=wire),
        mesh=make_mesh("tp=8"),
        in_specs=P("tp"),
        out_specs=P(None, "tp"),
    )
    with pytest.raises(TypeError, match=f"^all_gather: wire_dtype={wire} cannot carry sums"):
        jax.eval_shape(gather, jnp.ones((8, 4)))
    assert jax.eval_shape(gather, jnp.ones((8, 4), "int8")).dtype == "int8"  # it has none
