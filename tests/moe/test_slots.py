"""Experts in slots, and in blocks beyond them, against each expert by itself."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.choose.of_experts import applies_experts_in_slots
from jaxpar.moe import Experts
from jaxpar.moe._grouped import bind_kernels
from jaxpar.moe._mlp import Mlp
from jaxpar.moe._slots import Inputs, SlotMlp, experts_in_slots, plan_slots, slots_for

ROWS, K, GROUPS, D, F = 40, 3, 4, 6, 5


def make(seed=0, *, gate=True, bias=True, dtype="float64"):
    """Choices of four experts: many of 1, none of 2, and some of nobody, whose rows are NaN."""
    rng = np.random.default_rng(seed)
    keys = rng.integers(-1, GROUPS + 1, (ROWS, K)).astype(np.int32)
    keys[keys == 2] = -1
    keys[5:25, 0] = 1
    draw = lambda *shape: jnp.asarray(rng.normal(size=shape), dtype)  # noqa: E731
    experts = Experts(
        up=draw(GROUPS, D, F),
        down=draw(GROUPS, F, D),
        gate=draw(GROUPS, D, F) if gate else None,
        up_bias=draw(GROUPS, F) if bias else None,
        gate_bias=draw(GROUPS, F) if gate and bias else None,
        down_bias=draw(GROUPS, D) if bias else None,
    )
    chosen = ((keys >= 0) & (keys < GROUPS)).any(axis=1)
    x = jnp.where(chosen[:, None], draw(ROWS, D), jnp.nan)
    return jnp.asarray(keys), Inputs(x, experts, draw(ROWS, K))


def reference(keys, inputs):
    x, experts, weights = inputs
    x = jnp.where(jnp.isnan(x), 0, x)
    bias = lambda b: 0 if b is None else b[:, None]  # noqa: E731
    hidden = x @ experts.up + bias(experts.up_bias)  # [group, row, feature]
    if experts.gate is None:
        hidden = jax.nn.silu(hidden)
    else:
        hidden = jax.nn.silu(x @ experts.gate + bias(experts.gate_bias)) * hidden
    of_group = keys == np.arange(GROUPS, dtype=np.int32)[:, None, None]
    share = jnp.sum(jnp.where(of_group, weights, 0), axis=-1, keepdims=True)
    return jnp.sum(share * (hidden @ experts.down + bias(experts.down_bias)), axis=0)


def in_slots(slots, lengths, keys, inputs, pairs=ROWS * K):
    mlp = Mlp(bind_kernels("auto", None), jax.nn.silu, None, inputs.x.dtype)
    plan = plan_slots(keys, GROUPS, slots, pairs)
    return experts_in_slots(SlotMlp(mlp, slots, lengths), inputs, plan)


def loss(function):
    return lambda keys, inputs: jnp.sum(jnp.sin(function(keys, inputs)))


def second(function):
    """Of the gradients with respect to all inputs."""
    gradient = jax.grad(loss(function), argnums=1)
    return lambda keys, inputs: sum(
        jnp.sum(jnp.cos(d)) for d in jax.tree.leaves(gradient(keys, inputs))
    )


def assert_alike(found, wanted, **tolerances):
    jax.tree.map(partial(np.testing.assert_allclose, **tolerances), found, wanted)


def value_and_gradients(function):
    """Under the loss, in one program."""

    def run(keys, inputs):
        def total(inputs):
            out = function(keys, inputs)
            return jnp.sum(jnp.sin(out)), out

        gradients, out = jax.grad(total, has_aux=True)(inputs)
        return out, gradients

    return jax.jit(run)


@cache
def of_slots(slots, lengths):
    """The program, for tests that differ in rows alone."""
    return value_and_gradients(partial(in_slots, slots, lengths))


def test_with_all_beyond_slots_some_or_none():
    with jax.enable_x64(True):
        keys, inputs = make()
        out, gradients = value_and_gradients(reference)(keys, inputs)
        for slots, lengths in ((2, (8, 4)), (8, (4,)), (ROWS, (8,))):
            found = of_slots(slots, lengths)(keys, inputs)
            assert_alike(found[0], out, atol=1e-10)
            assert_alike(found[1], gradients, atol=1e-6)


def test_second_derivatives():
    """Of rows in slots and beyond them."""
    with jax.enable_x64(True):
        keys, inputs = make()
        own = partial(in_slots, 2, (8,))
        found, wanted = (jax.jit(jax.grad(second(f), argnums=1)) for f in (own, reference))
        assert_alike(found(keys, inputs), wanted(keys, inputs), atol=1e-6)


def test_without_a_gate():
    with jax.enable_x64(True):
        keys, inputs = make(gate=False)
        own = partial(in_slots, 8, (8,))
        found, wanted = (jax.grad(loss(f), argnums=1) for f in (own, reference))
        assert_alike(jax.jit(found)(keys, inputs), jax.jit(wanted)(keys, inputs), atol=1e-10)


def test_the_last_pairs_are_dropped():
    """Of 30, in the order of experts, whether they had slots or not."""
    keys, inputs = make(dtype="float32")
    flat = np.asarray(keys).ravel()
    order = np.argsort(np.where((flat < 0) | (flat >= GROUPS), GROUPS, flat), kind="stable")
    kept = np.full(flat.size, -1)
    kept[order[:30]] = flat[order[:30]]
    for slots in (4, 16):
        found = jax.jit(partial(in_slots, slots, (8, 4), pairs=30))(keys, inputs)
        wanted = jax.jit(reference)(kept.reshape(keys.shape), inputs)
        assert_alike(found, wanted, rtol=1e-4, atol=1e-4)


def test_no_rows_at_all():
    with jax.enable_x64(True):
        keys, inputs = make()
        nobody = np.full(keys.shape, -1, keys.dtype)
        inputs = inputs._replace(x=jnp.asarray(np.full(inputs.x.shape, np.nan)))
        out, grads = of_slots(2, (8, 4))(nobody, inputs)
    assert not np.any(out)
    assert not any(np.any(d) for d in jax.tree.leaves(grads))


def test_bfloat16_is_summed_in_float32():
    """Also the gradients of weights that come in several blocks."""
    keys, inputs = make(dtype="bfloat16", bias=False)
    wide = jax.tree.map(lambda a: a.astype("float32"), inputs)

    def gradients(function, inputs):
        def total(inputs):
            return jnp.sum(function(keys, inputs).astype("float32"))

        return jax.tree.leaves(jax.jit(jax.grad(total))(inputs))

    found = gradients(partial(in_slots, 4, (8, 4)), inputs)
    for a, b in zip(found, gradients(reference, wide), strict=True):
        assert a.dtype == "bfloat16"
        assert np.abs(np.asarray(a, "float32") - b).max() < 0.02 * np.abs(b).max()


def test_on_devices_with_loads_of_their_own():
    mesh = make_mesh("x=8")
    keys, inputs = make(dtype="float32")
    all_keys = jnp.stack([jnp.where(keys < i, keys, -1) for i in range(8)])

    def total(inputs):
        return jnp.sum(jax.vmap(loss(reference), (0, None))(all_keys, inputs))

    wanted = jax.jit(jax.grad(total))(inputs)

    def local(keys, inputs, *, check_vma):
        grads = jax.grad(loss(partial(in_slots, 8, (4,))), argnums=1)(keys[0], inputs)
        return jax.lax.psum(grads, "x") if not check_vma else grads

    for vma in (True, False):
        one = partial(local, check_vma=vma)
        mapped = jax.shard_map(one, mesh=mesh, in_specs=(P("x"), P()), out_specs=P(), check_vma=vma)
        assert_alike(jax.jit(mapped)(all_keys, inputs), wanted, atol=2e-3, rtol=1e-3)


def test_vmap():
    keys, inputs = make(dtype="float32")
    own = partial(in_slots, 4, (8, 4))
    both = jnp.stack([keys, jnp.roll(keys, 3, axis=1) % GROUPS])
    inputs = inputs._replace(x=jnp.nan_to_num(inputs.x))
    found = jax.jit(jax.vmap(own, (0, None)))(both, inputs)
    wanted = jax.jit(jax.vmap(reference, (0, None)))(both, inputs)
    assert_alike(found, wanted, rtol=1e-4, atol=1e-4)


def test_slots_have_room_for_three_deviations():
    assert slots_for(1024.0, 128, 10**6) == 1152
    assert slots_for(256.0, 16, 10**6) == 304
    assert slots_for(1.0, 16, 10**6) == 16
    assert slots_for(1024.0, 128, 100) == 100


def test_loops_where_most_experts_have_no_rows():
    mesh = make_mesh("x=8")

    def chosen(average):
        found = []

        def local(x):
            found.append(applies_experts_in_slots(average))
            return x

        jax.eval_shape(
            jax.shard_map(local, mesh=mesh, in_specs=P("x"), out_specs=P("x")), jnp.ones(8)
        )
        return found[0]

    assert chosen(1.0)
    assert not chosen(0.5)
