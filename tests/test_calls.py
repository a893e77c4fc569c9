"""Errors and profiles name the public function that the user called."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import (
    Axis,
    all_gather,
    all_gather_matmul,
    all_reduce,
    make_mesh,
    matmul_all_reduce,
    matmul_reduce_scatter,
    reduce_scatter,
    ring_shift,
)
from jaxpar.arguments.calls import called, naming, of_user, public, type_error, value_error
from jaxpar.axis.vma import vary_over
from jaxpar.layers import (
    column_parallel_linear,
    fsdp_scan,
    gated_mlp,
    head_layout,
    mean_value_and_grad,
    ring_attention,
    zigzag_order,
)
from jaxpar.moe import moe_layer, route, routed_moe_layer

# -- names in errors ----------------------------------------------------------------------------


@public
def outer(function):
    return function()


@public
def inner():
    raise value_error("no")


class Layout:
    @public
    def method(self):
        raise type_error("no")


def message(function, *args):
    with pytest.raises((TypeError, ValueError)) as caught:
        function(*args)
    return str(caught.value)


def test_the_outermost_function_is_named():
    assert message(inner) == "inner: no"
    assert message(outer, inner) == "outer: no"
    assert message(outer, lambda: outer(inner)) == "outer: no"


def test_a_method_is_named_with_its_class():
    assert message(Layout().method) == "Layout.method: no"
    assert message(outer, Layout().method) == "outer: no"


def test_a_function_of_the_user_names_its_own_calls():
    assert message(outer, of_user(inner, "f")) == "inner: no"
    assert message(outer, lambda: outer(of_user(lambda: outer(inner), "f"))) == "outer: no"

    def then(function):
        of_user(lambda: None, "f")()
        return function()

    assert message(outer, lambda: then(inner)) == "outer: no"  # restored behind the user's


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda x: make_mesh((4, 2), ("dp", "tp")),
            "make_mesh: 2 arguments without a name, of which it takes 1; give devices, axis_types "
            'by name (as in make_mesh("dp=4,tp=2"))',
        ),
        (
            lambda x: make_mesh(axis_shapes=(4, 2), axis_names=("dp", "tp")),
            "make_mesh: no argument 'axis_shapes'; give names with their sizes as axes (as in",
        ),
        (
            lambda x: make_mesh(axes="tp=8", axis_names=("tp",)),
            "make_mesh: no argument 'axis_names'; give names with their sizes as axes (as in",
        ),
        (
            lambda x: all_gather_matmul(x, x, axis_name="tp"),
            "all_gather_matmul: no argument 'axis_name'; name the mesh axis as axis",
        ),
        (
            lambda x: matmul_reduce_scatter(x, x, "tp", scatter_dimension=1),
            "matmul_reduce_scatter: no argument 'scatter_dimension'; give a dimension of an array "
            "as dim",
        ),
        (
            lambda x: all_gather_matmul(x, x, "tp", tiled=True),
            "all_gather_matmul: no argument 'tiled'; it takes lhs, rhs, axis, gather, dim, mode, ",
        ),
        (
            lambda x: all_gather_matmul(x, x, "tp", mod="naive"),
            "all_gather_matmul: no argument 'mod'; did you mean mode?",
        ),
        (
            lambda x: ring_shift(x, "tp", unheard=1),
            "ring_shift: no argument 'unheard'; it takes x, axis, offset",
        ),
        (
            lambda x: ring_shift(x, "tp", 1, 2),
            "ring_shift: 4 arguments without a name, of which it takes 3; leave out the extra",
        ),
        (
            lambda x: zigzag_order(16, size=4),
            "zigzag_order: no argument 'size'; give the number of devices as shards",
        ),
        (
            lambda x: all_gather(x, "tp", axis=1),
            "all_gather: axis is given by its place and by its name; give a dimension of an array "
            "as dim",
        ),
        (
            lambda x: all_gather(x, 1),
            "all_gather: axis must be a mesh axis name, a tuple or list of them, or an Axis, got "
            "1; give a dimension of an array as dim",
        ),
    ],
)
def test_arguments_that_do_not_fit(call, text):
    with pytest.raises(TypeError, match=f"^{re.escape(text)}"):
        call(jnp.ones((8, 8)))


def test_arguments_of_a_function_that_takes_any():
    """Those that are given on to the user's own function have any name."""

    class Any:
        @public
        def call(self, function, *args, option=None, **kwargs):
            return args, option, kwargs

    assert Any().call(print, 1, 2, option=3, args=4) == ((1, 2), 3, {"args": 4})
    with pytest.raises(
        TypeError, match=r"Any.call: function is given by its place and by its name"
    ):
        Any().call(print, 1, function=2)


def test_no_name_is_left_behind():
    assert called() == "jaxpar"
    for function in (inner, lambda: outer(of_user(inner, "f"))):
        message(function)
        assert called() == "jaxpar"
    with naming("one"):
        message(inner)
        assert called() == "one"
    assert called() == "jaxpar"


def trace(function, *shapes):
    mapped = jax.shard_map(function, mesh=make_mesh("dp=2,tp=4"), in_specs=P(), out_specs=None)
    jax.eval_shape(mapped, *(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes))


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("column_parallel_linear", lambda x: column_parallel_linear(x, x.T, "no")),
        ("column_parallel_linear", lambda x: column_parallel_linear(x, x, "tp")),
        ("gated_mlp", lambda x: gated_mlp(x, x.T, x.T, x, "no")),
        ("gated_mlp", lambda x: gated_mlp(x, x, x, x, "tp")),
        ("ring_attention", lambda x: ring_attention(x, x, x, "no")),
        ("head_layout", lambda x: head_layout(3, 2, 1)),
        ("HeadLayout.pad_query", lambda x: head_layout(4, 2, 2).pad_query(x[0, 0])),
    ],
)
def test_what_is_called_inside_is_not_named(name, call):
    """A layer calls matmuls and collectives whose checks refuse what it was given."""
    assert message(trace, call, (8, 4)).startswith(f"{name}: ")


def test_a_layer_of_the_user_inside_fsdp_scan_names_its_own_call():
    def network(layer, axis):
        return lambda x: fsdp_scan(layer, vary_over(["dp"], jnp.zeros((3, 4, 8))), x, axis)

    def wrong(w, x):
        return column_parallel_linear(x, w, "no")

    def right(w, x):
        return x @ w

    bound = "is not bound: the axes bound here are {'dp': 2, 'tp': 4}."
    found = message(trace, network(wrong, "dp"), (4, 8))
    assert found.startswith(f"column_parallel_linear: axis 'no' {bound}")
    found = message(trace, network(right, "never"), (4, 8))
    assert found.startswith(f"fsdp_scan: axis 'never' {bound}")
    found = message(trace, network(lambda w, x: right(w, x)[:2], "dp"), (4, 8))
    assert found.startswith("fsdp_scan: ")  # what it returns is fsdp_scan's to refuse


@pytest.mark.parametrize("argument", ["tp_axis", "fsdp_axis", "data_axis"])
def test_an_axis_that_is_not_there_is_named_by_its_argument(argument):
    def layer(x):
        return routed_moe_layer(x, x.T, {"up": x, "down": x}, "dp", top_k=1, **{argument: "no"})

    found = message(trace, layer, (4, 8))
    assert found.startswith(f"routed_moe_layer: {argument} 'no' is not bound: the axes bound here")


def test_a_loss_of_the_user_names_its_own_call():
    def loss(params, batch):
        return all_reduce(params * batch, "no").sum(), jnp.float32(batch.size)

    found = message(trace, lambda x: mean_value_and_grad(loss, "dp")(x, x), (8, 4))
    assert found.startswith("all_reduce: axis 'no' is not bound")


# -- scopes in profiles -------------------------------------------------------------------------

SENT = r"/(ppermute|all_gather|reduce_scatter|psum\w*)$"


def names(function, *shapes, in_specs, out_specs, mesh="tp=4", backward=False):
    """The names of all operations in a jitted program, or in that of its derivative."""
    devices = jax.devices()[: 8 if "," in mesh else 4]
    mapped = jax.shard_map(
        function, mesh=make_mesh(mesh, devices=devices), in_specs=in_specs, out_specs=out_specs
    )

    def pulled(*args):
        out, pull = jax.vjp(mapped, *args)
        return pull(out)

    args = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    text = jax.jit(pulled if backward else mapped).lower(*args).as_text(debug_info=True)
    return set(re.findall(r'loc\("([^"]*)"', text))


def sent(*args, **options):
    """The names of what communicates."""
    return {name for name in names(*args, **options) if re.search(SENT, name)}


MATMUL = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": P(None, "tp")}
ROWS = {"in_specs": P("tp"), "out_specs": P("tp")}
COLUMNS = {"in_specs": P(None, "tp"), "out_specs": P()}


@pytest.mark.parametrize("mode", ["naive", "unidirectional", "bidirectional", "auto"])
def test_a_matmul_and_its_derivative_show_axis_and_way(mode):
    def run(x, w):
        return all_gather_matmul(x, w, "tp", mode=mode)

    # The way that was taken: on CPU devices auto is naive.
    scope = f"all_gather_matmul[tp]/{'naive' if mode == 'auto' else mode}"
    naive = "naive" in scope
    forward = names(run, (8, 8), (8, 8), **MATMUL)
    assert f"{scope}/ak,kn->an/dot_general" in forward
    assert {n for n in forward if re.search(SENT, n)} == {
        f"{scope}/{'all_gather' if naive else 'ppermute'}"
    }
    backward = names(run, (8, 8), (8, 8), **MATMUL, backward=True)
    if naive:
        assert {f"{scope}/all_gather", f"{scope}/reduce_scatter"} <= backward
    else:  # whose derivatives are products of their own
        assert {f"{scope}/an,kn->ak/dot_general", f"{scope}/ak,an->kn/dot_general"} <= backward
    assert {n.rpartition("/")[0] for n in backward if re.search(SENT, n)} == {scope}


FLOWS = [
    ("matmul_reduce_scatter", lambda x, axis: matmul_reduce_scatter(x, x.T, axis), ROWS),
    ("matmul_all_reduce", lambda x, axis: matmul_all_reduce(x, x.T, axis), COLUMNS),
    ("all_gather", lambda x, axis: all_gather(x, axis, tiled=True), ROWS),
    ("reduce_scatter", lambda x, axis: reduce_scatter(x, axis, tiled=True), ROWS),
    ("all_reduce", all_reduce, COLUMNS),
    ("ring_attention", lambda x, axis: ring_attention(*[x[None, :, None]] * 3, axis)[0], ROWS),
    ("column_parallel_linear", lambda x, axis: column_parallel_linear(x, x.T, axis), ROWS),
]
WAYS = ("unidirectional", "bidirectional")


@pytest.mark.parametrize(
    ("name", "call", "specs", "mode"),
    [(*flow, mode) for number, flow in enumerate(FLOWS) for mode in ("naive", WAYS[number % 2])],
)
def test_every_flow_shows_its_way(name, call, specs, mode):
    axis = Axis("tp", mode=mode)
    for backward in (False, True):
        found = sent(lambda x: call(x, axis), (64, 64), **specs, backward=backward)
        assert {n.rpartition("/")[0] for n in found} == {f"{name}[tp]/{mode}"}


@pytest.mark.parametrize("axis", [("tp", "dp"), ["tp", "dp"], Axis(("tp", "dp"))])
def test_a_scope_shows_all_axes_in_their_order(axis):
    specs = {"in_specs": P(("tp", "dp")), "out_specs": P(("tp", "dp")), "mesh": "dp=2,tp=4"}
    found = sent(lambda x: ring_shift(x, axis=axis), (8,), **specs)
    assert found == {"ring_shift[tp,dp]/ppermute"}


def test_scopes_of_nested_calls_are_nested():
    def network(x, w):
        def layer(w, x):
            return x + matmul_all_reduce(vary_over(["tp"], x), w, "tp", mode="naive")

        return fsdp_scan(layer, w, x, Axis("dp", mode="naive"))

    mapped = jax.shard_map(
        network,
        mesh=make_mesh("dp=2,tp=4"),
        in_specs=(P("dp"), P(None, "dp")),
        out_specs=P("dp"),
    )
    # In the compiled program: lowered, the body of a loop has names of its own.
    text = jax.jit(mapped).lower(jnp.ones((8, 4)), jnp.ones((3, 4, 4))).compile().as_text()
    found = re.findall(r'op_name="[^"]*(fsdp_scan[^"]*)"', text)
    loop = "fsdp_scan[dp]/while/body/"
    assert loop in found[0]
    for inside in ("naive/all_gather", "matmul_all_reduce[tp]/naive/psum_invariant"):
        assert any(name.startswith(loop) and name.endswith(inside) for name in found), found


def test_no_axis_no_brackets():
    text = jax.jit(lambda x: outer(lambda: x + 1)).lower(jnp.ones(2)).as_text(debug_info=True)
    assert '"jit(<lambda>)/outer/add"' in text


def test_a_gradient_shows_its_axes():
    step = mean_value_and_grad(lambda w, x: (jnp.sum(w * x), x.size), "tp", specs=P())
    found = sent(step, (), (8,), in_specs=(P(), P("tp")), out_specs=P())
    assert found
    assert all(name.startswith("mean_value_and_grad[tp]/") for name in found)


@pytest.mark.parametrize("dispatch", ["ragged", "all_gather"])
def test_experts_show_how_tokens_reach_them(dispatch):
    def layer(x, up, down):
        experts = {"up": up, "down": down}
        return moe_layer(x, route(x, 2), experts, "tp", dispatch=dispatch)[0]

    specs = {"in_specs": P("tp"), "out_specs": P("tp")}
    found = names(layer, (16, 8), (8, 8, 4), (8, 4, 8), **specs)
    assert any(name.startswith(f"moe_layer[tp]/{dispatch}/") for name in found)


def test_what_a_user_gives_as_a_function():
    with (
        naming("gated_mlp"),
        pytest.raises(TypeError, match=r"^gated_mlp: activation must be a function, got None"),
    ):
        of_user(None, "activation")
