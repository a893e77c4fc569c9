"""One of two processes of two CPU devices each: the layer and its gradients against one device."""

import sys

import jax

rank, port = int(sys.argv[1]), sys.argv[2]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 2)
jax.config.update("jax_enable_x64", True)
jax.distributed.initialize(f"localhost:{port}", 2, rank)

import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
from jax.sharding import NamedSharding  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402
from layer_reference import choose, moe  # noqa: E402

from jaxpar import make_mesh  # noqa: E402
from jaxpar.moe import routed_moe_layer  # noqa: E402

HOW = {"scoring": "softmax", "normalize": False, "scale": 1.0}
rng = np.random.default_rng(0)
params = {
    "tokens": rng.standard_normal((16, 4)),
    "router": rng.standard_normal((4, 6)),
    "experts": {"up": rng.standard_normal((6, 4, 5)), "down": rng.standard_normal((6, 5, 4))},
}
specs = {"tokens": P(("ep", "dp")), "router": P(), "experts": {"up": P("ep"), "down": P("ep")}}
mesh = make_mesh("ep=2,dp=2")  # experts are exchanged between the processes


def layer(params):
    operands = params["tokens"], params["router"], params["experts"]
    # By default what other platforms do is traced as well.
    how = {"axis": "ep", "data_axis": "dp", "top_k": 2, "implementation": "blocks"}
    return routed_moe_layer(*operands, dispatch="ragged", **how)[0]


mapped = jax.shard_map(layer, mesh=mesh, in_specs=(specs,), out_specs=specs["tokens"])
placed = jax.tree.map(
    lambda x, spec: jax.make_array_from_callback(
        x.shape, NamedSharding(mesh, spec), lambda index: x[index]
    ),
    params,
    specs,
)
grads = jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(mapped(params)))))(placed)

plan = choose(params, 2, 4, None, "probability", None, None, **HOW)
truth = jax.jit(jax.grad(lambda params: jnp.sum(jnp.sin(moe(params, *plan, **HOW)[0]))))(params)
for (path, found), wanted in zip(
    jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(truth), strict=True
):
    for shard in found.addressable_shards:
        np.testing.assert_allclose(
            shard.data, wanted[shard.index], rtol=1e-10, atol=1e-10, err_msg=str(path)
        )
