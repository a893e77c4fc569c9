"""Small programs with one mistake each, and the same programs mended.

Each function takes a mesh and whether to mend the mistake, and returns a step and its arguments.
The line that `explain` should name ends with "# the mistake".
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar


def shape(mesh, sizes, *spec, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(sizes, dtype, sharding=NamedSharding(mesh, P(*spec)))


def heads_on_the_wrong_axis(mesh, mend):
    """Attention whose queries and keys are cut by what they contract, not by heads."""

    def attend(params, x):  # x: bf16[b, s, d]
        q, k, v = (jnp.einsum("bsd,dhe->bshe", x, params[name]) for name in "qkv")
        scores = jnp.einsum("bshe,bthe->bhst", q, k)  # the mistake
        return jnp.einsum("bhst,bthe,hed->bsd", jax.nn.softmax(scores), v, params["o"])

    good, bad = (None, "tp", None), (None, None, "tp")
    params = {
        "q": shape(mesh, (512, 8, 64), *(good if mend else bad)),
        "k": shape(mesh, (512, 8, 64), *(good if mend else bad)),
        "v": shape(mesh, (512, 8, 64), *good),
        "o": shape(mesh, (8, 64, 512), "tp", None, None),
    }
    return attend, (params, shape(mesh, (4, 256, 512), "dp"))


def constraint_that_gathers(mesh, mend):
    """A constraint that says nothing of the batch, which is then whole on each device."""

    def layer(x, w):
        h = x @ w["up"]
        spec = P("dp", "tp") if mend else P(None, "tp")
        h = lax.with_sharding_constraint(h, NamedSharding(mesh, spec))  # the mistake
        return jax.nn.relu(h) @ w["down"]

    def step(params, x):
        return lax.scan(lambda h, w: (layer(h, w), None), x, params)[0]

    params = {
        "up": shape(mesh, (2, 512, 2048), None, None, "tp"),
        "down": shape(mesh, (2, 2048, 512), None, "tp"),
    }
    return step, (params, shape(mesh, (2048, 512), "dp"))


def gather_in_a_loop(mesh, mend):
    """A scan over blocks of rows that gathers the same weight for each of them."""

    def local(x, w):  # x: bf16[blocks, m, k], w: bf16[k/n, n]
        if mend:
            w = lax.all_gather(w, "fsdp", tiled=True)

        def block(total, rows):
            whole = w if mend else lax.all_gather(w, "fsdp", tiled=True)  # the mistake
            return total + jnp.sum((rows @ whole).astype(jnp.float32)), None

        total = lax.pcast(jnp.float32(0), "fsdp", to="varying")
        return lax.scan(block, total, x)[0][None]

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")), out_specs=P("fsdp")
    )
    return step, (shape(mesh, (8, 2048, 1024), None, "fsdp"), shape(mesh, (1024, 1024), "fsdp"))


def gather_as_a_sum(mesh, mend):
    """A weight that is written into zeros, each device its rows, and summed."""

    def local(x, w):
        if mend:
            whole = lax.all_gather(w, "fsdp", tiled=True)
        else:
            rows = w.shape[0]
            zeros = jnp.zeros((lax.axis_size("fsdp") * rows, w.shape[1]), w.dtype)
            zeros = lax.pcast(zeros, "fsdp", to="varying")
            place = lax.axis_index("fsdp") * rows
            placed = lax.dynamic_update_slice_in_dim(zeros, w, place, 0)
            whole = lax.psum(placed, "fsdp")  # the mistake
        return x @ whole

    step = jax.shard_map(local, mesh=mesh, in_specs=(P("fsdp"), P("fsdp")), out_specs=P("fsdp"))
    return step, (shape(mesh, (2048, 1024), "fsdp"), shape(mesh, (1024, 2048), "fsdp"))


def gather_behind_a_barrier(mesh, mend):
    """Two projections that gather the same activations, with a barrier between them."""

    def local(x, q, k):
        whole = lax.all_gather(x, "tp", tiled=True)
        queries = whole @ q
        if not mend:
            x, queries = lax.optimization_barrier((x, queries))
            whole = lax.all_gather(x, "tp", tiled=True)  # the mistake
        return queries, whole @ k

    specs = (P("tp"), P(None, "tp"), P(None, "tp"))
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(None, "tp"),) * 2)
    w = shape(mesh, (512, 1024), None, "tp")
    return step, (shape(mesh, (2048, 512), "tp"), w, w)


def checkpoint_that_gathers_again(mesh, mend):
    """A checkpointed layer that gathers its activations once more for the backward pass."""

    def layer(w, x):  # x: bf16[m/n, k], w: bf16[k, n]
        x = checkpoint_name(lax.all_gather(x, "tp", tiled=True), "whole")  # the mistake
        return jnp.sum(jnp.tanh(x @ w).astype(jnp.float32)[None], 0)

    def local(w, x):
        names = ["whole"] if mend else []
        policy = jax.checkpoint_policies.save_only_these_names(*names)
        loss = lambda w: jnp.sum(jax.checkpoint(layer, policy=policy)(w, x) ** 2)  # noqa: E731
        return jax.grad(loss)(w)

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "tp"), P("tp")), out_specs=P(None, "tp")
    )
    return step, (shape(mesh, (512, 2048), None, "tp"), shape(mesh, (1024, 512), "tp"))


def float32_gradients(mesh, mend):
    """Gradients that are summed in float32, leaf by leaf, and kept in bfloat16."""

    def local(params, x):
        def loss(params):
            h = x
            for w in params:
                h = jax.nn.relu(h @ w)
            return jnp.sum(h.astype(jnp.float32) ** 2)

        gradients = jax.grad(loss)(jax.tree.map(lambda w: lax.pcast(w, "dp", to="varying"), params))
        if mend:
            return [lax.psum(g, "dp") for g in gradients]
        return [
            lax.psum(g.astype(jnp.float32), "dp").astype(g.dtype)  # the mistake
            for g in gradients
        ]

    step = jax.shard_map(local, mesh=mesh, in_specs=(P(), P("dp")), out_specs=P())
    params = [shape(mesh, (1024, 1024)) for _ in range(2)]
    return step, (params, shape(mesh, (8 * 128, 1024), "dp"))


def mesh_in_the_wrong_order(mesh, mend):
    """Devices in the order of their numbers, so that neighbours on an axis are far apart."""

    def local(x, w):
        return jaxpar.all_gather_matmul(x, w, "tp", mode="bidirectional")  # the mistake

    if not mend:
        mesh = disordered(mesh)
    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(("dp", "tp")), P(None, "tp")), out_specs=P("dp", "tp")
    )
    args = (shape(mesh, (4096, 512), ("dp", "tp")), shape(mesh, (512, 1024), None, "tp"))
    return step, args


def disordered(mesh):
    """The same axes over the same devices, in the order of their numbers."""
    devices = sorted(mesh.devices.flat, key=lambda d: d.id)
    return Mesh(np.array(devices).reshape(mesh.devices.shape), mesh.axis_names)


def naive_tensor_parallelism(mesh, mend):
    """A gather, two matmuls and a reduce-scatter, one after the other."""

    def local(x, up, down):
        if mend:
            h = jaxpar.all_gather_matmul(x, up, "tp", mode="bidirectional")
        else:
            h = lax.all_gather(x, "tp", tiled=True) @ up  # the mistake
        return lax.psum_scatter(jax.nn.relu(h) @ down, "tp", tiled=True)

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P("tp"), P(None, "tp"), P("tp")), out_specs=P("tp")
    )
    args = (
        shape(mesh, (2048, 2048), "tp"),
        shape(mesh, (2048, 4096), None, "tp"),
        shape(mesh, (4096, 512), "tp"),
    )
    return step, args


def small_sums(mesh, mend):
    """A norm that sums twice, the second time what needs the first sum, in each of four layers."""

    def norm(x):  # x: bf16[m, d/n]
        y = x.astype(jnp.float32)
        if mend:
            mean, square = lax.psum(jnp.stack([jnp.sum(y, -1), jnp.sum(y * y, -1)]), "tp") / 8192
            variance = square - mean**2
        else:
            mean = lax.psum(jnp.sum(y, -1), "tp") / 8192  # the mistake
            variance = lax.psum(jnp.sum((y - mean[:, None]) ** 2, -1), "tp") / 8192
        return ((y - mean[:, None]) * lax.rsqrt(variance + 1e-6)[:, None]).astype(x.dtype)

    def local(x, ws):
        for w in ws:
            x = norm(x) * w
        return x

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P(None, "tp"), [P("tp")] * 4), out_specs=P(None, "tp")
    )
    return step, (shape(mesh, (64, 8192), None, "tp"), [shape(mesh, (8192,), "tp")] * 4)


def barrier_before_work(mesh, mend):
    """Work that needs no gather stands behind a barrier that waits for it."""

    def local(x, w, y, v):
        whole = lax.all_gather(x, "tp", tiled=True)  # the mistake
        if not mend:
            whole, y = lax.optimization_barrier((whole, y))
        other = y @ v
        return whole @ w, other

    specs = (P("tp"), P(None, "tp"), P("tp"), P())
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=(P(None, "tp"), P("tp")))
    args = (
        shape(mesh, (2048, 2048), "tp"),
        shape(mesh, (2048, 1024), None, "tp"),
        shape(mesh, (8192, 1024), "tp"),
        shape(mesh, (1024, 2048)),
    )
    return step, args


def two_on_the_same_links(mesh, mend):
    """Keys and values that both go one way around, while the links of the other way are idle."""

    def local(q, k, v):  # bf16[s/n, d]
        n = lax.axis_size("tp")
        up = [(i, (i + 1) % n) for i in range(n)]
        down = [(i, (i - 1) % n) for i in range(n)]
        out = jnp.zeros_like(q)
        for _ in range(n):
            if mend:  # a half of each in each direction: the sum over all blocks is the same
                half = k.shape[0] // 2
                moved = [
                    jnp.concatenate(
                        [lax.ppermute(x[:half], "tp", up), lax.ppermute(x[half:], "tp", down)]
                    )
                    for x in (k, v)
                ]
            else:
                moved = [lax.ppermute(x, "tp", up) for x in (k, v)]  # the mistake
            out = out + jnp.exp(q @ k.T) @ v
            k, v = moved
        return out

    specs = (P("tp"), P("tp"), P("tp"))
    step = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P("tp"))
    return step, tuple(shape(mesh, (2048, 1024), "tp") for _ in range(3))


def coarse_chunks(mesh, mend):
    """A gather in four chunks beside its matmul, of which the first has nothing to hide behind."""

    def local(x, w):  # x: bf16[m/n, k]
        mode = "bidirectional" if mend else "chunked-4"
        return jaxpar.all_gather_matmul(x, w, "tp", mode=mode)  # the mistake

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")
    )
    return step, (shape(mesh, (8192, 8192), "tp"), shape(mesh, (8192, 28672), None, "tp"))


def loop_that_copies(mesh, mend):
    """A ring that keeps the block before in its state, which the loop has to copy for it."""

    def local(x, w):
        n = lax.axis_size("tp")
        pairs = [(i, (i + 1) % n) for i in range(n)]

        def turn(i, state):
            block, before, out = state
            out = lax.dynamic_update_slice(out, (block @ w)[None], (i, 0, 0))
            if mend:
                return lax.ppermute(block, "tp", pairs), before, out
            return lax.ppermute(before, "tp", pairs), block, out

        out = lax.pcast(jnp.zeros((n, x.shape[0], w.shape[1]), x.dtype), "tp", to="varying")
        state = (x, x[:1] if mend else x, out)
        return lax.fori_loop(0, n, turn, state)[2]  # the mistake

    step = jax.shard_map(
        local, mesh=mesh, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")
    )
    return step, (shape(mesh, (2048, 4096), "tp"), shape(mesh, (4096, 32768), None, "tp"))
