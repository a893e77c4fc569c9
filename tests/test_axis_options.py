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


# Nothing that an option is about travels over these axes: floats `[2, 8]` on each device.
INSIDE = {
    "ring_shift.axis": jaxpar.ring_shift,
    "ragged_all_to_all.axis": lambda x, a: jaxpar.ragged_all_to_all(x, x, *[ONES] * 4, a),
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
# These obey options, and say of others what they do instead: `mode` where sums are of `jax.lax`.
OBEY = {
    *(f"{name}.axis" for name in ("all_gather", "all_reduce", "reduce_scatter")),
    *("all_gather_matmul.axis", "matmul_all_reduce.axis", "matmul_reduce_scatter.axis"),
    *("collective_einsum.axis", "copy_region.axis", "reduce_region.axis", "reduce_gradients.axis"),
    *(f"{name}.axis" for name in ("fsdp_gather", "fsdp_linear", "fsdp_scan", "ring_attention")),
    *("mean_value_and_grad.axis", "vocab_parallel_cross_entropy.axis"),
    *("vocab_parallel_embedding.axis", "moe_layer.axis", "routed_moe_layer.axis"),
    *("moe_layer.tp_axis", "routed_moe_layer.tp_axis"),
    *("moe_layer.fsdp_axis", "routed_moe_layer.fsdp_axis"),
    *(
        f"{name}.{argument}"
        for name in ("column_parallel_linear", "row_parallel_linear", "gated_mlp")
        for argument in ("axis", "fsdp_axis")
    ),
    *("parallel_attention.axis", "parallel_attention.fsdp_axis"),
}
# These refuse some, and obey others.
PARTLY = {
    "gather_region.axis": ("wire_dtype", layers.gather_region),
    "scatter_region.axis": ("wire_dtype", layers.scatter_region),
    "reduce_compressed_gradients.axis": ("mode", layers.reduce_compressed_gradients),
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
    methods = {"RaggedDispatcher.axis", "fsdp_dims.axis"}
    assert found == (INSIDE.keys() | OUTSIDE.keys() | OBEY | PARTLY.keys() | PIPELINES) - methods


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
        jax.ShapeDtypeStruct((8, 8), "float32"),
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
def test_one_option(name):
    option, function = PARTLY[name]
    axis = Axis("x", **{option: OPTIONS[option]})
    refused("axis", option, OPTIONS[option], lambda: inside(function, axis))
