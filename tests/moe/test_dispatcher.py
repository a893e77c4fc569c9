"""Rows sent to devices and back against NumPy: order, overflow, gradients, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.moe import RaggedDispatcher
from jaxpar.testing import assert_matches_reference

from_ids = RaggedDispatcher.from_target_device_ids


# References see the local arrays of all devices: dimension 0 counts those of the axis, and
# dimension 1 the groups of devices that exchange among themselves.


def every_device(function):
    return lambda *xs: jax.tree.map(lambda y: y[None, None], function(*(x[0, 0] for x in xs)))


def arrivals(ids, capacity):
    """For each group and device: (source, row) of all that is meant for it, in order."""
    n, groups, rows = ids.shape[:3]
    return {
        (g, d): [(s, r) for s in range(n) for r in range(rows) if d in np.ravel(ids[s, g, r])]
        for g in range(groups)
        for d in range(n)
    }


def expected(x, weights, scale, ids, capacity):
    """What `there_and_back` computes, row after row."""
    n, groups, rows = ids.shape[:3]
    received = np.zeros((n, groups, capacity, *x.shape[3:]), x.dtype)
    tags = np.zeros((n, groups, capacity), np.int32)
    combined, made_it = np.zeros_like(x), np.zeros(ids.shape, bool)
    overflow, sizes = np.zeros((n, groups), np.int32), np.zeros((n, groups, n), np.int32)
    for (g, d), rows in arrivals(ids, capacity).items():
        for place, (s, r) in enumerate(rows):
            sizes[s, g, d] += 1
            if place >= capacity:
                overflow[d, g] += 1
                continue
            received[d, g, place] = x[s, g, r]
            tags[d, g, place] = 100 * s + r
            combined[s, g, r] += x[s, g, r] ** 2 * weights[s, g, r] * scale[d, g]
            named = np.ravel(ids[s, g, r] == d)
            made_it[s, g, r] = made_it[s, g, r] | (np.cumsum(named) * named == 1).reshape(
                ids[s, g, r].shape
            )
    valid = np.arange(capacity) < sizes.sum(0).T[..., None]
    sizes = (sizes, sizes.transpose(2, 1, 0))
    return received, tags, valid, combined, made_it, overflow, sizes


def there_and_back(axes, capacity):
    def run(x, weights, scale, ids):
        plan = from_ids(ids, axis=axes)
        tags = 100 * lax.axis_index(axes) + jnp.arange(len(x), dtype="int32")
        sent = {"x": x, "weights": weights, "tag": tags}
        received, valid = plan.dispatch(sent, capacity)
        masked = jnp.where(valid[:, None], received["x"], 0)
        result = masked**2 * jnp.where(valid, received["weights"], 0)[:, None] * scale
        # Nor does combine read rows that are not valid.
        result = jnp.where(valid[:, None], result, jnp.nan)
        combined, made_it = plan.combine(result, capacity)
        tags = jnp.where(valid, received["tag"], 0)
        sizes = (plan.send_sizes, plan.recv_sizes)
        return masked, tags, valid, combined, made_it, plan.overflow(capacity), sizes

    return run


def everything(axes, ring):
    names = (ring,) if isinstance(ring, str) else ring
    size = int(np.prod([int(part[-1]) for part in axes.split(",")]))
    mesh = make_mesh(axes, devices=jax.devices()[:size])
    n = int(np.prod([mesh.shape[name] for name in names]))
    others = tuple(name for name in mesh.axis_names if name not in names)
    return mesh, n, size // n, P(names, others or None)


def drawn_ids(n, groups, rows, k, skew, seed):
    rng = np.random.default_rng(seed)
    shape = (n, groups, rows, k) if k else (n, groups, rows)
    if skew:  # almost everything to the last device
        return np.where(rng.random(shape) < 0.9, n - 1, 0).astype(np.int32)
    return rng.integers(-1, n + 1, shape, dtype=np.int32)


CASES = [  # mesh, axes, rows, k (0: ids of one dimension), capacity, skew, dtype, check_vma
    ("x=1", "x", 3, 2, 2, False, "float32", True),
    ("x=3", "x", 4, 2, 30, False, "bfloat16", False),
    ("x=4,y=2", "x", 3, 2, 5, True, "float32", True),
    ("x=2,y=4", ("y", "x"), 2, 9, 9, False, "float32", True),
    ("x=2,y=2,z=2", ("z", "x"), 5, 0, 4, False, "float32", False),
    ("x=2", "x", 3, 2, 0, False, "float32", True),
    ("x=2", "x", 0, 2, 3, False, "float32", True),
]


@pytest.mark.parametrize(("axes", "ring", "rows", "k", "capacity", "skew", "dtype", "vma"), CASES)
def test_there_and_back(axes, ring, rows, k, capacity, skew, dtype, vma):
    mesh, n, groups, spec = everything(axes, ring)
    rng = np.random.default_rng(n)
    x = rng.standard_normal((n, groups, rows, 16)).astype(dtype)
    weights, scale = (
        rng.standard_normal(shape).astype("float32").astype(dtype)
        for shape in ((n, groups, rows), (n, groups))
    )
    ids = drawn_ids(n, groups, rows, k, skew, seed=k)
    assert_matches_reference(
        every_device(there_and_back(ring, capacity)),
        lambda *args: expected(*args, capacity),
        *(x, weights, scale, ids),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=vma,
        max_directions=2,
        grad=rows * capacity > 0,
    )


def test_mask():
    """A masked entry sends nothing, nor hides a later entry for the same device."""
    mesh, n, groups, spec = everything("x=4", "x")
    ids = drawn_ids(n, groups, 5, 3, False, seed=1)
    mask = np.random.default_rng(2).random(ids.shape) < 0.6
    x = np.random.default_rng(3).standard_normal((n, groups, 5, 2)).astype("float32")

    def run(x, ids, mask):
        plan = from_ids(ids, axis="x", mask=mask)
        received, _ = plan.dispatch(x, 6)
        return plan.combine(received, 6)

    def reference(x, ids, mask):
        ones = np.ones((n, groups, 5)), np.ones((n, groups))
        out = expected(np.sqrt(np.abs(x)), *ones, np.where(mask, ids, -1), 6)
        return out[3] * np.sign(x), out[4]

    assert_matches_reference(
        every_device(run),
        reference,
        *(x, ids, mask),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=False,
        grad=False,
    )


def test_second_derivatives():
    """The gradient of a cubic is taken inside shard_map, and its own gradient outside."""
    mesh, n, groups, spec = everything("x=4", "x")
    ids = drawn_ids(n, groups, 3, 2, False, seed=5)
    x = np.random.default_rng(3).standard_normal((n, groups, 3, 2)).astype("float32")

    def gradient(x, ids):
        def cubes(x):
            plan = from_ids(ids, axis="x")
            received, valid = plan.dispatch(x, 4)
            return plan.combine(jnp.where(valid[:, None], received, 0) ** 3, 4)[0]

        out, pull = jax.vjp(cubes, x)
        return pull(out)[0]

    def reference(x, ids):
        ones = np.ones((n, groups, 3)), np.ones((n, groups))
        count = expected(np.ones_like(x), *ones, ids, 4)[3]
        return count**2 * x**3 * 3 * x**2

    assert_matches_reference(
        every_device(gradient),
        reference,
        *(x, ids),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=True,
        max_directions=3,
    )


def test_batches():
    """Plans and rows under vmap are as many of them, one by one."""
    mesh, n, groups, spec = everything("x=2", "x")
    ids = np.stack([drawn_ids(n, groups, 3, 2, skew, seed=7) for skew in (True, False)], 2)
    x = np.random.default_rng(3).standard_normal((n, groups, 3, 4)).astype("float32")
    weights, scale = x[..., 0].copy(), x[:, :, 0, 0].copy()
    run = there_and_back("x", 4)

    def reference(x, weights, scale, ids):
        each = [expected(x, weights, scale, ids[:, :, i], 4) for i in (0, 1)]
        return jax.tree.map(lambda *ys: np.stack(ys, 2), *each)

    assert_matches_reference(
        every_device(lambda x, w, s, ids: jax.vmap(lambda ids: run(x, w, s, ids))(ids)),
        reference,
        *(x, weights, scale, ids),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
        check_vma=True,
        max_directions=2,
    )


def test_replicated_rows():
    """Rows and ids that all devices share: their gradient is summed over the devices."""
    mesh = make_mesh("x=4,y=2")
    ids = np.array([[0, 3], [1, 1]], "int32")

    def run(x):
        plan = from_ids(ids, axis=("x",))
        received, _ = plan.dispatch(x, plan.dropless_capacity)
        return plan.combine(received, plan.dropless_capacity)[0]

    assert_matches_reference(
        run,
        lambda x: np.concatenate([x * [[2], [1]]] * 4),
        np.array([[1.0, 2.0], [3.0, 4.0]], "float32"),
        mesh=mesh,
        in_specs=P(),
        out_specs=P("x"),
    )


def test_integers_are_summed():
    mesh, _, _, spec = everything("x=2", "x")
    ids = np.array([[[[0, 1]]], [[[1, 1]]]], "int32")

    def run(ids):
        plan = from_ids(ids, axis="x")
        received, valid = plan.dispatch({"n": jnp.array([7]), "yes": jnp.array([True])}, 3)
        assert received["yes"].dtype == bool
        return plan.combine(received["n"], 3)[0], jnp.sum(received["yes"] & valid), plan

    sums, yes, plan = jax.jit(
        jax.shard_map(every_device(run), mesh=mesh, in_specs=spec, out_specs=spec)
    )(ids)
    assert sums.tolist() == [[[14]], [[7]]]
    assert yes.tolist() == [[1], [2]]
    assert plan._sizes.shape == (2, 1, 2, 2)  # a pytree, which leaves jit and shard_map


def test_exchanges():
    """A plan gathers once; what rides beside the rows costs no exchange, nor does any gradient."""
    mesh = make_mesh("ep=8")

    def loss(x, weights, ids):
        plan = from_ids(ids, axis="ep")
        (x, weights, ids), valid = plan.dispatch((x, weights, ids), 32)
        result = jnp.where(valid[:, None], x * jnp.sum(weights, -1, keepdims=True), 0)
        return lax.psum(jnp.sum(plan.combine(result, 32)[0] ** 2), "ep")

    def lowered(function):
        mapped = jax.shard_map(function, mesh=mesh, in_specs=P("ep"), out_specs=P())
        args = [jax.ShapeDtypeStruct((64, size), t) for size, t in SIZES]
        # jit would find a trace of `loss` itself for another platform.
        traced = jax.jit(lambda *xs: mapped(*xs)).trace(*args)
        return traced.lower(lowering_platforms=("tpu",)).as_text()

    def gradients(x, weights, ids):
        return jax.tree.map(jnp.sum, jax.grad(loss, (0, 1))(x, weights, ids))

    forward, both = lowered(loss), lowered(lambda *xs: lax.psum(gradients(*xs), "ep"))
    assert forward.count("@ragged_all_to_all") == 2
    assert both.count("@ragged_all_to_all") == 4
    assert [text.count('"stablehlo.all_gather"') for text in (forward, both)] == [1, 1]
    assert 'all_to_all"' not in both.replace("@ragged_all_to_all", "")


SIZES = ((32, "float32"), (2, "float32"), (2, "int32"))
X, IDS = np.ones((3, 2), "float32"), np.zeros((3, 2), "int32")
FROM = "RaggedDispatcher.from_target_device_ids: "
ERRORS = [
    (
        lambda: from_ids(X, axis="x"),
        TypeError,
        FROM + "target_device_ids must be integers, got float32; cast them",
    ),
    (
        lambda: from_ids(IDS[None], axis="x"),
        ValueError,
        FROM + "target_device_ids has local shape (1, 3, 2), but needs one dimension of rows, or a "
        "second one of the devices of each; reshape it",
    ),
    (
        lambda: from_ids(IDS, axis="x", mask=IDS),
        TypeError,
        FROM + "mask must be bool, got int32[3, 2]; compare it first",
    ),
    (
        lambda: from_ids(IDS, axis="x", mask=IDS[:, 0] == 0),
        ValueError,
        FROM + "mask has local shape (3,), but target_device_ids of local shape (3, 2) need (3, 2),"
        " one entry for each; reshape it, or repeat it by jnp.broadcast_to",
    ),
    (
        lambda: from_ids(IDS, axis="x").dispatch(X, 2.0),
        TypeError,
        "RaggedDispatcher.dispatch: capacity must be an integer, got 2.0 of type float",
    ),
    (
        lambda: from_ids(IDS, axis="x").overflow(-1),
        ValueError,
        "RaggedDispatcher.overflow: capacity=-1 must be at least 0",
    ),
    (
        lambda: from_ids(IDS, axis="x").dispatch({"a": X, "b": X[:2]}, 4),
        ValueError,
        "RaggedDispatcher.dispatch: data has an array of local shape (2, 2), with 2 rows, but the "
        "ids that the plan was made from have 3; give one row for each of them",
    ),
    (
        lambda: from_ids(IDS, axis="x").dispatch(jax.random.split(jax.random.key(0), 3), 4),
        TypeError,
        "RaggedDispatcher.dispatch: data has an array of key<fry>, which cannot travel; send "
        "jax.random.key_data of it",
    ),
    (
        lambda: from_ids(IDS, axis="x").combine(X, 4),
        ValueError,
        "RaggedDispatcher.combine: data has an array of local shape (3, 2), with 3 rows, but "
        "capacity=4; give a result for each row that dispatch returned",
    ),
    (
        lambda: from_ids(IDS, axis="x").combine(X > 0, 3),
        TypeError,
        "RaggedDispatcher.combine: data has an array of bool[3, 2], which has no sum; cast it to "
        "int32",
    ),
]


@pytest.mark.parametrize(("call", "error", "text"), ERRORS)
def test_errors(call, error, text):
    mesh = make_mesh("x=4,y=2")
    with pytest.raises(error) as raised:
        jax.eval_shape(
            jax.shard_map(lambda _: call(), mesh=mesh, in_specs=P(), out_specs=P("x")), X
        )
    assert str(raised.value) == text
