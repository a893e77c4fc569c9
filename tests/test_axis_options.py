"""Options of an `Axis`: every public argument that takes one obeys them, or refuses them."""

import inspect
import re
from importlib import import_module

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import Axis, layers, layout, moe
from jaxpar.moe import RaggedDispatcher, route
from jaxpar.tools.timeline.floor import rings_over

PACKAGES = ["collectives", "layers", "layout", "matmul", "mesh", "moe", "pipeline", "schedule"]
OPTIONS = {
    "mode": "bidirectional",
    "wire_dtype": "bfloat16",
    "backward": "chunked-2",
    "keep_gathered": False,
    "gather_dtype": "bfloat16",
}
PARAMS, MAP = {"w": np.ones((8, 8))}, layout.LayoutMap({"w": ("x",)})
EXPERTS = {"up": np.ones((2, 8, 8), "float32"), "down": np.ones((2, 8, 8), "float32")}
ONES = np.ones(4, "int32")


def mesh():
    return jaxpar.make_mesh("x=4,y=2")


def routing(x):
    return route(x @ jnp.ones((8, 8), x.dtype), 2)


# Nothing that an option is about travels over these axes: floats `[8, 8]` on each device.
INSIDE = {
    "ring_shift.axis": jaxpar.ring_shift,
    "ragged_all_to_all.axis": lambda x, a: jaxpar.ragged_all_to_all(x, x, *[ONES] * 4, a),
    "gather_region.axis": layers.gather_region,
    "scatter_region.axis": layers.scatter_region,
    "vocab_parallel_embedding.axis": lambda x, a: layers.vocab_parallel_embedding(
        jnp.asarray(ONES), x, a
    ),
    "mean_loss.axis": lambda x, a: layers.mean_loss(x.sum(), 1, a),
    "mean_value_and_grad.groups": lambda x, a: layers.mean_value_and_grad(
        lambda x: (x.sum(), 1), "y", groups=a
    )(x),
    "global_norm.groups": lambda x, a: layers.global_norm(x, groups=a),
    "rms_norm.axis": lambda x, a: layers.rms_norm(x, x[0], axis=a),
    "layer_norm.axis": lambda x, a: layers.layer_norm(x, x[0], axis=a),
    "routing_statistics.axis": lambda x, a: moe.routing_statistics(routing(x), a),
    "load_balance_loss.axis": lambda x, a: moe.load_balance_loss(routing(x), a),
    "router_z_loss.axis": lambda x, a: moe.router_z_loss(routing(x), a),
    "moe_layer.data_axis": lambda x, a: moe.moe_layer(x, routing(x), EXPERTS, "y", data_axis=a),
    "routed_moe_layer.data_axis": lambda x, a: moe.routed_moe_layer(
        x, jnp.ones((8, 8), x.dtype), EXPERTS, "y", top_k=2, data_axis=a
    ),
    "RaggedDispatcher.axis": lambda x, a: RaggedDispatcher.from_target_device_ids(ONES, axis=a),
}
OUTSIDE = {
    "ring_order.axis": lambda a: jaxpar.ring_order(mesh(), a),
    "ring_hops.axis": lambda a: jaxpar.ring_hops(mesh(), a),
    "edge_disjoint_rings.axis": lambda a: jaxpar.edge_disjoint_rings(mesh(), a),
    "matmul_floor.axis": lambda a: rings_over(mesh(), a),
    "Split.count": layout.Split,
    "Padded.axes": layout.Padded,
    "Interleaved.axes": lambda a: layout.Interleaved(a, 2),
    "data_parallel.axis": lambda a: layout.data_parallel(PARAMS, mesh(), axis=a),
    "fully_sharded.axis": lambda a: layout.fully_sharded(PARAMS, mesh(), axis=a),
    "tensor_parallel.axis": lambda a: layout.tensor_parallel(PARAMS, mesh(), axis=a, columns="w"),
    "expert_parallel.axis": lambda a: layout.expert_parallel(PARAMS, mesh(), axis=a),
    "fsdp_dims.axis": lambda a: MAP.layout(PARAMS, mesh(), strict=False).fsdp_dims(a),
}
# These pass options on to matmuls, which have all of them.
OBEY = {
    *("all_gather_matmul.axis", "matmul_all_reduce.axis", "matmul_reduce_scatter.axis"),
    *("collective_einsum.axis", "fsdp_linear.axis", "parallel_attention.axis"),
    *(f"{name}.axis" for name in ("column_parallel_linear", "row_parallel_linear", "gated_mlp")),
}
OF_MATMULS = ["backward", "keep_gathered"]
SQUARE = jnp.arange(64.0).reshape(8, 8) / 64


def ones_over_y():
    return 1 + jax.lax.axis_index("y").astype("float32")


def sharded(x):
    """Blocks of rows of a weight, which vary over x: all rows of 4 devices are `[8, 8]`."""
    return x[:2, :8]


def experts(x, rows=8):
    w = jnp.stack([SQUARE[:rows] * x[0, 0]] * 2)
    return {"up": w, "down": w}


def experts_over(x, **options):
    x, w = x * ones_over_y(), SQUARE[:, :4]
    return moe.moe_layer(x, route(x @ w, 2), experts(x), "y", **options)[0]


def attention(x, **options):
    return layers.parallel_attention(
        x,
        *(sharded(x) for _ in range(4)),
        "y",
        lambda q, k, v: q + k + v,
        heads=4,
        kv_heads=4,
        fsdp_dim=(0, 0),
        **options,
    )


# These refuse some options, and obey `wire_dtype`, and those named here.
OF_PSUMS = {
    "copy_region.axis": lambda x, a: layers.copy_region(jax.lax.psum(x, "x"), a),
    "reduce_region.axis": layers.reduce_region,
    "reduce_gradients.axis": layers.reduce_gradients,
    "reduce_compressed_gradients.axis": lambda x, a: layers.reduce_compressed_gradients(
        jnp.concatenate([x] * 256), a
    )[0],
    "mean_value_and_grad.axis": lambda x, a: layers.mean_value_and_grad(
        lambda w, x: (jnp.sum(x @ w), 8), a, specs=P()
    )(SQUARE, x)[1],
    "moe_layer.tp_axis, sequence_dim=None": lambda x, a: experts_over(
        jax.lax.psum(x, "x"), tp_axis=a, sequence_dim=None
    ),
}
OF_COLLECTIVES = {
    "all_gather.axis": jaxpar.all_gather,
    "all_reduce.axis": jaxpar.all_reduce,
    "reduce_scatter.axis": lambda x, a: jaxpar.reduce_scatter(x, a, tiled=True),
    "ring_attention.axis": lambda x, a: layers.ring_attention(*[x[:, None]] * 3, a),
    "vocab_parallel_cross_entropy.axis": lambda x, a: layers.vocab_parallel_cross_entropy(
        x, x, jnp.arange(8, dtype="int32") + jax.lax.axis_index("x"), a
    ),
    "moe_layer.axis": lambda x, a: moe.moe_layer(
        x, routing(x), experts(x), a, dispatch="all_gather"
    )[0],
    "moe_layer.tp_axis": lambda x, a: experts_over(x, tp_axis=a),
    "routed_moe_layer.axis": lambda x, a: moe.routed_moe_layer(
        x, SQUARE, experts(x), a, top_k=2, dispatch="all_gather"
    )[0],
    "routed_moe_layer.tp_axis": lambda x, a: moe.routed_moe_layer(
        x * ones_over_y(), SQUARE[:, :4], experts(x), "y", top_k=2, tp_axis=a
    )[0],
}
OF_FSDP = {
    "fsdp_gather.axis": layers.fsdp_gather,
    "fsdp_scan.axis": lambda x, a: layers.fsdp_scan(
        lambda w, x: jnp.tanh(x @ w), jnp.stack([sharded(x)] * 2), x, a
    ),
    "column_parallel_linear.fsdp_axis": lambda x, a: layers.column_parallel_linear(
        x, sharded(x), "y", fsdp_axis=a
    ),
    "row_parallel_linear.fsdp_axis": lambda x, a: layers.row_parallel_linear(
        x, sharded(x), "y", fsdp_axis=a
    ),
    "gated_mlp.fsdp_axis": lambda x, a: layers.gated_mlp(
        x, *[sharded(x)] * 3, "y", fsdp_axis=a, fsdp_dim=0
    ),
    "parallel_attention.fsdp_axis": lambda x, a: attention(x, fsdp_axis=a),
    "moe_layer.fsdp_axis": lambda x, a: moe.moe_layer(
        x, route(x @ SQUARE[:, :4], 2), experts(x, 2), "y", fsdp_axis=a
    )[0],
    "routed_moe_layer.fsdp_axis": lambda x, a: moe.routed_moe_layer(
        x, SQUARE[:, :4], experts(x, 2), "y", top_k=2, fsdp_axis=a
    )[0],
}
PARTLY = {
    **{name: ([*OF_MATMULS, "gather_dtype", "mode"], f) for name, f in OF_PSUMS.items()},
    **{name: ([*OF_MATMULS, "gather_dtype"], f) for name, f in OF_COLLECTIVES.items()},
    **{name: (OF_MATMULS, f) for name, f in OF_FSDP.items()},
}
PIPELINES = {
    f"{name}.{argument}"
    for name in ("value", "value_and_grad")
    for argument in ("axis", "batch_axes")
}


def test_every_argument_is_here():
    """A new one obeys all options, or is a line above."""
    found = {
        f"{name}.{argument}"
        for package in PACKAGES
        for name in import_module(f"jaxpar.{package}").__all__
        if callable(function := getattr(import_module(f"jaxpar.{package}"), name))
        for argument, parameter in _parameters(function)
        if re.search(r"\bAxis\b", str(parameter.annotation))
    }
    others = {"RaggedDispatcher.axis", "fsdp_dims.axis", "moe_layer.tp_axis, sequence_dim=None"}
    assert found == (INSIDE.keys() | OUTSIDE.keys() | OBEY | PARTLY.keys() | PIPELINES) - others


def _parameters(function):
    try:
        return inspect.signature(function).parameters.items()
    except ValueError:
        return ()


def refused(argument, option, value, call):
    shown = re.escape(f"{argument} has {option}={value}, which has no effect here; give its names")
    with pytest.raises(ValueError, match=rf"^[\w.]+: {shown} alone, \('x',\)"):
        call()


def inside(call, axis):
    def local(x):
        call(x, axis)
        return x

    return jax.eval_shape(
        jax.shard_map(local, mesh=mesh(), in_specs=P("x"), out_specs=P("x")),
        jax.ShapeDtypeStruct((32, 8), "float32"),
    )


@pytest.mark.parametrize("option", OPTIONS)
@pytest.mark.parametrize("name", INSIDE)
def test_options_of_what_only_counts(name, option):
    axis = Axis("x", **{option: OPTIONS[option]})
    argument = name.partition(".")[2]
    refused(argument, option, OPTIONS[option], lambda: inside(INSIDE[name], axis))


@pytest.mark.parametrize("name", OUTSIDE)
def test_options_of_names(name):
    for option, value in OPTIONS.items():
        axis = Axis("x", **{option: value})
        refused(name.partition(".")[2], option, value, lambda axis=axis: OUTSIDE[name](axis))
    # What changes nothing is no option.
    if name not in ("edge_disjoint_rings.axis", "expert_parallel.axis"):
        OUTSIDE[name](Axis("x", mode="naive"))


@pytest.mark.parametrize("name", PARTLY)
def test_some_options(name):
    without, function = PARTLY[name]
    argument = name.partition(".")[2].partition(",")[0]
    for option, value in OPTIONS.items():
        axis = Axis("x", **{option: value})
        if option in without:
            refused(argument, option, value, lambda axis=axis: inside(function, axis))


def test_what_no_backward_pass_reads_is_refused_in_any_mode():
    for option, value in {"backward": "naive", "keep_gathered": True}.items():
        axis = Axis("x", mode="bidirectional", **{option: value})
        refused("axis", option, value, lambda axis=axis: inside(jaxpar.all_gather, axis))


@pytest.mark.parametrize("dispatch", ["ragged", "all_gather", "auto"])
def test_a_mode_of_experts_belongs_to_gathers(dispatch):
    def layer(x, axis):
        return moe.moe_layer(x, routing(x), experts(x), axis, dispatch=dispatch)

    def call():
        return inside(layer, Axis("x", mode="bidirectional"))

    if dispatch == "ragged":
        refused("axis", "mode", "bidirectional", call)
    else:
        call()


def program(call, axis):
    """The text of a program of a call and its derivative."""

    def local(x):
        out, pull = jax.vjp(lambda x: call(x, axis), x)
        return pull(out)[0]

    axes = P(("x", "y"))
    mapped = jax.shard_map(local, mesh=mesh(), in_specs=axes, out_specs=axes, check_vma=False)
    return jax.jit(mapped).lower(jax.ShapeDtypeStruct((64, 8), "float32")).as_text()


@pytest.mark.parametrize("name", PARTLY)
def test_other_options_are_obeyed(name):
    without, function = PARTLY[name]
    wire = "int8" if "compressed" in name else "float64"
    with jax.enable_x64(True):
        plain = program(function, "x")
        assert program(function, Axis("x", wire_dtype=wire)) != plain
        if "mode" not in without:
            assert program(function, Axis("x", mode="bidirectional")) != plain
