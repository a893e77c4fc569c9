"""What carries blocks carries every kind of number as it is: keys, booleans, few bits, nothing."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from wide import assert_alike

from jaxpar import (
    Axis,
    all_gather,
    all_reduce,
    make_mesh,
    ragged_all_to_all,
    reduce_scatter,
    ring_shift,
)
from jaxpar.layers import fsdp_gather, fsdp_scan, gather_region, scatter_region
from jaxpar.ring import order

RINGS = ("unidirectional", "bidirectional")
MODES = (*RINGS, "naive", "stationary", "chunked-2", "auto")
ROWS = 2  # of a block
FLOATS = ("float8_e4m3fn", "float4_e2m1fn")
INTEGERS = ("int4", "uint4")
KINDS = ("bool", *INTEGERS, *FLOATS, "float8_e8m0fnu", "complex64")
# XLA's CPU compiler ends the process at an all-gather, an exchange or a sum of them.
TWO_BITS = ("int2", "uint2")
N = 4
AXES = ("a", "b")
# Each kind of types goes round a ring, and by a collective.
each_mode = pytest.mark.parametrize(
    ("mode", "check_vma"), [(mode, number % 2 == 0) for number, mode in enumerate(MODES)]
)
both_kinds_of_types = pytest.mark.parametrize("check_vma", [True, False])


def blocks(*, two_bits=False):
    """Arrays of all devices' blocks: numbers that differ, keys of two kinds, and none."""
    ones = np.random.default_rng(0).random((N * ROWS, 3)) < 0.5
    kinds = (*KINDS, *TWO_BITS) if two_bits else KINDS
    return {
        **{kind: ones.astype(jnp.dtype(kind)) for kind in kinds},
        "keys": jax.random.split(jax.random.key(1), N * ROWS),
        "wide": jax.random.split(jax.random.key(2, impl="rbg"), (N * ROWS, 2)),
        "no columns": jnp.zeros((N * ROWS, 0), "int4"),
        "no keys": jax.random.split(jax.random.key(3), (N * ROWS, 0)),
        "no rows": jnp.zeros((0, 3), "bool"),
    }


def plain(x):
    """Numbers of NumPy, which are compared and moved by it: JAX lacks some of that for 2 bits."""
    if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
        x = jax.random.key_data(x)
    return np.asarray(x)


def check(found, x, expected):
    """Compares with `expected` of each plain array and its rank."""
    assert found.keys() == x.keys()
    for name, leaf in x.items():
        assert found[name].dtype == leaf.dtype, name
        wanted = expected(plain(leaf), leaf.ndim)
        np.testing.assert_array_equal(bits(plain(found[name])), bits(wanted), err_msg=name)


def bits(x):
    return x.view("uint8") if x.dtype.itemsize == 1 else x  # NaNs, too


def on_devices(function, x, *, check_vma):
    mesh = make_mesh("a=2,b=2", devices=jax.devices()[:N])
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=P(AXES), out_specs=P(AXES), check_vma=check_vma
    )
    return jax.jit(mapped)(x)


def on_each(x, _):
    """All of x on every device."""
    return np.concatenate([x] * N)


def of_devices(x):
    return x.reshape(N, len(x) // N, *x.shape[1:])


@each_mode
def test_gathers(mode, check_vma):
    x = blocks(two_bits=mode in RINGS)

    def gathers(x):
        stacked = all_gather(x, AXES, dim=-1, mode=mode)
        shards = fsdp_gather(x, Axis(AXES, mode=mode), dim=0)
        return all_gather(x, AXES, tiled=True, mode=mode), shards, stacked

    tiled, shards, stacked = on_devices(gathers, x, check_vma=check_vma)
    check(tiled, x, on_each)
    check(shards, x, on_each)
    check(stacked, x, lambda leaf, rank: on_each(np.moveaxis(of_devices(leaf), 0, rank), rank))


@both_kinds_of_types
def test_shifts_and_regions(check_vma):
    x = blocks(two_bits=True)

    def moves(x):
        return ring_shift(x, AXES, 2), ring_shift(x, AXES, -1)

    for found, offset in zip(on_devices(moves, x, check_vma=check_vma), (2, -1), strict=True):
        check(found, x, lambda leaf, _, by=offset: np.roll(leaf, by * (len(leaf) // N), 0))

    def there_and_back(x):
        return jax.tree.map(lambda leaf: scatter_region(gather_region(leaf, AXES), AXES), x)

    x = {name: leaf for name, leaf in x.items() if leaf.size and name not in TWO_BITS}
    check(on_devices(there_and_back, x, check_vma=check_vma), x, lambda leaf, _: leaf)


@both_kinds_of_types
def test_exchanges(check_vma):
    """Each device sends row 1 to the next and row 0 to the one before, in front of its rows."""
    x = {name: leaf for name, leaf in blocks(two_bits=False).items() if leaf.shape[0]}

    def exchanges(x):
        i = lax.axis_index(AXES)
        after, before = (i + 1) % N, (i - 1) % N
        senders = jnp.stack([after, before])
        here = jnp.array([0, 1])

        def exchange(rows):
            starts = jnp.zeros(N, "int32").at[senders].set(1 - here)
            sizes = jnp.zeros(N, "int32").at[senders].set(1)
            places = jnp.zeros(N, "int32").at[senders].set(here)
            return ragged_all_to_all(rows, rows, starts, sizes, places, sizes, AXES)

        return jax.tree.map(exchange, x)

    found = on_devices(exchanges, x, check_vma=check_vma)
    source = np.arange(N * ROWS).reshape(N, ROWS)
    wanted = np.stack([np.roll(source, 1, 0)[:, 1], np.roll(source, -1, 0)[:, 0]], 1).ravel()
    check(found, x, lambda leaf, _: leaf[wanted])


@each_mode
def test_sums(mode, check_vma):
    """Of every kind that has sums, and of arrays without numbers. Two ones are added, or none."""
    ones = np.add.outer(np.arange(N), np.arange(N * 6)).reshape(N, N, 6) % 2 == 0
    x = {kind: ones.astype(jnp.dtype(kind)) for kind in (*INTEGERS, *FLOATS)}
    x |= {"no columns": np.zeros((N, N, 0), "int8"), "no rows": np.zeros((N, 0, 3), "float32")}

    def sums(x):
        x = jax.tree.map(lambda leaf: leaf[0], x)
        whole = all_reduce(x, AXES, mode=mode)
        return reduce_scatter(x, AXES, tiled=True, mode=mode), whole

    parts, whole = on_devices(sums, x, check_vma=check_vma)

    def added(leaf, _):
        return leaf.astype("int32").sum(0).astype(leaf.dtype)

    check(parts, x, added)
    check(whole, x, lambda leaf, rank: on_each(added(leaf, rank), rank))


@pytest.mark.parametrize(
    "kind",
    [order.Order, order.TpuOrder, order.CpuOrder, order.ClusterOrder],
    ids=lambda o: o.__name__,
)
def test_keys_in_the_order_of_each_backend(kind, monkeypatch):
    for module in ("of_mode", "order"):
        monkeypatch.setattr(f"jaxpar.ring.{module}.traced_order", kind)
    x = {name: leaf for name, leaf in blocks(two_bits=False).items() if "keys" in name}

    def gathers(x):
        return all_gather(x, AXES, tiled=True, mode="bidirectional")

    check(on_devices(gathers, x, check_vma=True), x, on_each)


@pytest.mark.parametrize(("mode", "check_vma"), [("naive", True), ("bidirectional", False)])
def test_gradients_beside_keys(mode, check_vma, float64):
    """Of parameters that are gathered with keys, in a scan over layers too."""
    axis, draw = Axis("tp", mode=mode), jax.vmap(jax.random.uniform)
    params = {
        "w": np.random.default_rng(1).standard_normal((2, 8)),
        "key": jax.random.split(jax.random.key(1), (2, 8)),
    }

    def layer(weights, x):
        return jnp.tanh(x * jnp.sum(weights["w"]) + jnp.vdot(draw(weights["key"]), weights["w"]))

    def loss(w, key, x):
        first = fsdp_gather({"w": w[0], "key": key[0]}, axis)
        return lax.psum(
            jnp.sum(fsdp_scan(layer, {"w": w, "key": key}, layer(first, x), axis)), "tp"
        )

    def on_one_device(w, key, x):
        for index in (0, 0, 1):
            x = layer({"w": w[index], "key": key[index]}, x)
        return jnp.sum(x)

    mapped = jax.shard_map(
        loss,
        mesh=make_mesh("tp=4", devices=jax.devices()[:4]),
        in_specs=(P(None, "tp"), P(None, "tp"), P("tp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    args = params["w"], params["key"], np.linspace(0.0, 1.0, 4)
    found, wanted = (jax.jit(jax.value_and_grad(f))(*args) for f in (mapped, on_one_device))
    assert_alike(found, wanted)
