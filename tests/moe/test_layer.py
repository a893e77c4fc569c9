"""`moe_layer` against one device, over meshes, ways of dispatch, routings and capacities."""

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P
from layer_reference import choose, moe

from jaxpar import make_mesh
from jaxpar.moe import moe_layer, pad_experts

D, F = 6, 10


def parameters(tokens, count, *, gated=True, biased=False, shared=False, skew=0.0, seed=0):
    rng = np.random.default_rng(seed)
    normal = rng.standard_normal
    shapes = {"up": (D, F), "down": (F, D)}
    shapes |= {"gate": (D, F)} if gated else {}
    if biased:
        shapes |= {"up_bias": (F,), "down_bias": (D,)} | ({"gate_bias": (F,)} if gated else {})
    params = {
        "tokens": normal((tokens, D)),
        "router": normal((D, count)),
        "experts": {key: normal((count, *shape)) / 3 for key, shape in shapes.items()},
    }
    params["tokens"][:, 0] = 1.0
    params["router"][0] += skew * np.arange(count)
    if shared:
        params["shared"] = {key: normal(shape) / 3 for key, shape in shapes.items()}
    return params


def run(params, mesh, *, ep="ep", data=(), tp=None, fsdp=None, vma=True, mask=None, **how):
    """Returns results, statistics and gradients of the layer, the latter for `cotangents`."""
    mesh = make_mesh(mesh)
    ep_axes = (ep,) if isinstance(ep, str) else ep
    data_axes = (data,) if isinstance(data, str) else data
    size = int(np.prod([mesh.shape[name] for name in ep_axes]))
    replicated = tp is not None and how.get("sequence_axis", -2) is None
    rows = P((*data_axes, *ep_axes, *(() if tp is None or replicated else (tp,))))

    def spec(name, lead):
        hidden = {"up": 2, "gate": 2, "down": 1, "up_bias": 1, "gate_bias": 1}.get(name)
        rank = 2 if name.endswith("bias") else 3
        axes = [ep_axes] + [None] * (rank - 1)
        if tp is not None and hidden:
            axes[hidden] = tp
        if fsdp is not None:
            along = 1 if rank == 2 else how.get("fsdp_axis", 1)
            axes[along] = (*filter(None, [axes[along]]), fsdp)
        return P(*axes[1 - lead :])

    specs = {
        "tokens": rows,
        "router": P(),
        "experts": {name: spec(name, 1) for name in params["experts"]},
    }
    if "shared" in params:
        specs["shared"] = {name: spec(name, 0) for name in params["shared"]}

    if "router_bias" in how:
        how["router_bias"] = jnp.asarray(how["router_bias"])

    def layer(params, mask):
        more = {"shared": params["shared"]} if "shared" in params else {}
        return moe_layer(
            params["tokens"],
            params["router"],
            params["experts"],
            axis_name=ep,
            data_axis_name=data,
            tp_axis_name=tp,
            fsdp_axis_name=fsdp,
            mask=None if mask is None else mask,
            **more,
            **how,
        )

    mapped = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(specs, None if mask is None else rows),
        out_specs=(rows, P()),
        check_vma=vma,
    )
    experts = pad_experts(params["experts"], size)
    padded = params | {"experts": {k: w for k, w in experts._asdict().items() if w is not None}}

    def loss(params, cotangent):
        out, statistics = mapped(params, mask)
        losses = statistics.load_balance_loss - 0.5 * statistics.router_z_loss
        return jnp.sum(out * cotangent) + losses, (out, statistics)

    cotangent = np.cos(np.arange(params["tokens"].size).reshape(params["tokens"].shape))
    cotangent = cotangent.astype(params["tokens"].dtype)
    (_, (out, statistics)), grads = jax.jit(jax.value_and_grad(loss, has_aux=True))(
        padded, cotangent
    )
    count = len(params["experts"]["up"])
    for name, w in grads["experts"].items():
        assert not np.any(w[count:]), f"padding of {name} has gradients"
    grads["experts"] = {name: w[:count] for name, w in grads["experts"].items()}
    return out, statistics, grads, cotangent


def check(params, mesh, *, top_k, tolerance=1e-10, devices, mask=None, **how):
    """Compares values, statistics and all gradients."""
    factor, length = how.get("capacity_factor"), len(params["tokens"]) // devices
    count = params["router"].shape[1]
    capacity = None if factor is None else int(np.ceil(factor * length * top_k / count))
    usual = {"scoring": "softmax", "normalize": False, "scale": 1.0}
    given = {key: how.get(key, value) for key, value in usual.items()}

    with jax.enable_x64(True):
        wide = jax.tree.map(lambda x: np.asarray(x, np.float64), params)
        policy, bias = how.get("capacity_policy", "probability"), how.get("router_bias")
        with jax.numpy_dtype_promotion("standard"):
            plan = choose(wide, top_k, devices, capacity, policy, mask, bias, **given)

        def loss(params, cotangent):
            out, found = moe(params, *plan, how.get("activation", jax.nn.silu), **given)
            losses = found["load_balance_loss"] - 0.5 * found["router_z_loss"]
            return jnp.sum(out * cotangent) + losses, (out, found)

        out, statistics, grads, cotangent = run(params, mesh, top_k=top_k, mask=mask, **how)
        with jax.numpy_dtype_promotion("standard"):
            (_, (wanted, found)), truth = jax.value_and_grad(loss, has_aux=True)(wide, cotangent)

    def close(name, x, y):
        scale = np.max(np.abs(y), initial=1.0)
        np.testing.assert_allclose(
            np.asarray(x, np.float64), y, rtol=tolerance, atol=tolerance * scale, err_msg=name
        )

    close("results", out, wanted)
    np.testing.assert_array_equal(statistics.tokens_per_expert, found["tokens_per_expert"])
    assert int(statistics.dropped) == found["dropped"]
    assert int(statistics.overflow) == 0
    for name in ("load_balance_loss", "router_z_loss"):
        close(name, getattr(statistics, name), found[name])
    for (path, x), y in zip(
        jax.tree_util.tree_leaves_with_path(grads), jax.tree.leaves(truth), strict=True
    ):
        close(f"gradient of {jax.tree_util.keystr(path)}", x, y)
