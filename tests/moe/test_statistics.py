"""The router's statistics, losses and bias against NumPy, over several devices."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import Axis, make_mesh
from jaxpar.layers import mean_value_and_grad
from jaxpar.moe import (
    Routing,
    Statistics,
    limit_capacity,
    load_balance_loss,
    route,
    router_z_loss,
    routing_statistics,
    update_router_bias,
)
from jaxpar.testing import assert_matches_reference, count_collectives


def normal(*shape, dtype="float32"):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(dtype)


def mesh_of(text):
    size = int(np.prod([int(part.split("=")[1]) for part in text.split(",")]))
    return make_mesh(text, devices=jax.devices()[:size])


def reference(logits, top_k, scoring="softmax", mask=None, dropped=0, overflow=0):
    """Of all tokens at once."""
    count = logits.shape[1]
    logits = logits if mask is None else logits[mask]
    scores = np.exp(logits) if scoring == "softmax" else 1 / (1 + np.exp(-logits))
    scores = scores / np.sum(scores, axis=1, keepdims=True)
    experts = np.argsort(-logits, axis=1, kind="stable")[:, :top_k]
    loads = np.bincount(experts.ravel(), minlength=count)
    tokens = max(len(logits), 1)
    return Statistics(
        tokens_per_expert=loads.astype("int32"),
        dropped=np.int32(dropped),
        overflow=np.int32(overflow),
        entropy=-np.sum(scores * np.log(scores)) / tokens,
        largest_load=np.float64(np.max(loads) * count / (tokens * top_k)),
        load_balance_loss=count * np.sum(loads * np.sum(scores, axis=0)) / (tokens**2 * top_k),
        router_z_loss=np.sum(np.log(np.sum(np.exp(logits), axis=1)) ** 2) / tokens,
    )


@pytest.mark.parametrize(
    ("mesh", "names", "options", "masked", "check_vma"),
    [
        ("dp=2,tp=2,ep=2", ("ep", "dp"), {"top_k": 3}, True, True),
        ("ep=3", "ep", {"top_k": 1, "scoring": "sigmoid"}, True, True),
        ("dp=4,ep=2", ("dp", "ep"), {"top_k": 5, "scoring": "sigmoid"}, False, False),
        ("ep=1", "ep", {"top_k": 2}, False, True),
    ],
)
def test_matches_reference(mesh, names, options, masked, check_vma):
    """Devices have different numbers of tokens that count, and one has none."""
    logits = normal(24, 5)
    mask = (np.arange(24) % 4 > 0) & (np.arange(24) >= 8) if masked else np.ones(24, bool)
    logits[~mask] = np.nan
    devices = int(np.prod([mesh_of(mesh).shape[name] for name in np.atleast_1d(names)]))

    def local(x, mask):
        routing = limit_capacity(route(x, mask=mask if masked else None, **options), 0)
        return routing_statistics(routing, names, overflow=jnp.int32(2))

    def whole(x, mask):
        dropped = options["top_k"] * np.sum(mask)
        return reference(x, mask=mask, dropped=dropped, overflow=2 * devices, **options)

    assert_matches_reference(
        local,
        whole,
        *(logits, mask),
        mesh=mesh_of(mesh),
        in_specs=P(names),
        out_specs=P(),
        check_vma=check_vma,
        max_directions=4,
    )


def test_the_losses_alone_are_those_of_the_statistics(float64):
    logits, mask = wide(normal(16, 5)), jnp.arange(16) % 3 > 0

    def local(x, mask):
        routing = route(x, 2)
        stats = routing_statistics(routing, "ep", mask=mask)
        losses = [f(routing, "ep", mask=mask) for f in (load_balance_loss, router_z_loss)]
        return stats, losses

    split = jax.shard_map(local, mesh=mesh_of("ep=4"), in_specs=P("ep"), out_specs=P())
    stats, losses = jax.jit(split)(logits, mask)
    assert_alike(losses, [stats.load_balance_loss, stats.router_z_loss])
    assert_alike(stats, type(stats)(*reference(logits, 2, mask=np.asarray(mask))))


def losses_of(routing, names):
    stats = routing_statistics(routing, names)
    return (
        stats.load_balance_loss
        + 0.5 * router_z_loss(routing, names)
        + 0.25 * stats.entropy
        + 0.125 * load_balance_loss(routing, names)
    )


@pytest.mark.parametrize(("names", "check_vma"), [(("dp", "ep"), True), (("ep", "dp"), False)])
def test_gradients_inside(names, check_vma, float64):
    """`mean_value_and_grad` gives one device's, of a replicated router, under either setting."""
    x, w = wide((normal(24, 4), normal(4, 6)))

    def loss(w, x):
        routing = route(x @ w, 2)
        own = jnp.sum(routing.weights**2)
        return own + len(x) * losses_of(routing, names), len(x)

    def wanted(w):
        routing = route(x @ w, 2)
        return jnp.sum(routing.weights**2) / len(x) + losses_of(routing, ())

    step = jax.shard_map(
        mean_value_and_grad(loss, names, specs=P()),
        mesh=mesh_of("dp=2,tp=2,ep=2"),
        in_specs=(P(), P(names)),
        out_specs=P(),
        check_vma=check_vma,
    )
    assert_alike(jax.jit(step)(w, x), jax.jit(jax.value_and_grad(wanted))(w))


def test_gradients_inside_by_jax(float64):
    """Under `check_vma=True`, where results are typed as replicated, `jax.grad` does."""
    x, w = wide((normal(24, 4), normal(4, 6)))
    gradient = jax.shard_map(
        lambda w, x: jax.grad(lambda w: losses_of(route(x @ w, 2), "ep"))(w),
        mesh=mesh_of("ep=4"),
        in_specs=(P(), P("ep")),
        out_specs=P(),
    )
    wanted = jax.grad(lambda w: losses_of(route(x @ w, 2), ()))
    assert_alike(jax.jit(gradient)(w, x), jax.jit(wanted)(w))


def test_no_tokens_count():
    """All is 0, and so are gradients, whatever the logits are."""

    def total(x):
        stats = split(x)
        return sum(stats[3:]), stats

    split = jax.shard_map(
        lambda x: routing_statistics(route(x, 2, mask=jnp.zeros(8, bool)), "ep"),
        mesh=mesh_of("ep=2"),
        in_specs=P("ep"),
        out_specs=P(),
    )
    gradient, stats = jax.jit(jax.grad(total, has_aux=True))(jnp.full((16, 3), jnp.nan))
    np.testing.assert_array_equal(gradient, np.zeros((16, 3)))
    jax.tree.map(lambda x: np.testing.assert_array_equal(x, np.zeros_like(x)), stats)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_extreme_logits(scoring):
    """Scores that underflow, all of a token's for sigmoids, and experts that are switched off."""
    logits = jnp.array([[-300.0, -200.0, -250.0], [100.0, -jnp.inf, 90.0], [0.0, 0.0, 0.0]])

    def total(x):
        stats = routing_statistics(route(x, 1, scoring=scoring))
        return stats.load_balance_loss + stats.entropy + stats.router_z_loss, stats

    gradient, stats = jax.jit(jax.grad(total, has_aux=True))(logits)
    assert all(np.all(np.isfinite(x)) for x in (gradient, *stats))
    np.testing.assert_array_equal(stats.tokens_per_expert, [2, 1, 0])


def test_a_balanced_and_a_collapsed_router():
    routed = jax.jit(lambda x: routing_statistics(route(x, 1)))
    even, collapsed = (
        routed(50 * jnp.tile(jnp.eye(4), (3, 1))),
        routed(50 * jnp.tile(jnp.eye(4)[2], (12, 1))),
    )
    np.testing.assert_allclose([even.load_balance_loss, even.largest_load], [1, 1], rtol=1e-6)
    np.testing.assert_allclose(collapsed[4:6], [4, 4], rtol=1e-6)
    assert collapsed.entropy < 1e-6


def test_a_router_of_ones_own():
    """Experts that are no experts do not count, and scores need not sum to 1."""
    experts = jnp.array([[0, 2], [2, -1], [-1, -1]], "int32")
    scores = jnp.array([[1.0, 0.0, 1.0], [0.0, 0.0, 4.0], [9.0, 9.0, 9.0]])
    routing = Routing(experts, jnp.ones((3, 2)), experts >= 0, scores, jnp.zeros((3, 3)))
    stats = jax.jit(routing_statistics)(routing)
    np.testing.assert_array_equal(stats.tokens_per_expert, [1, 0, 2])
    assert stats.dropped == 0
    np.testing.assert_allclose(stats.entropy, np.log(2) / 2, rtol=1e-6)
    np.testing.assert_allclose(stats.load_balance_loss, 3 * (0.25 / 3 + 0.75 * 2 / 3), rtol=1e-6)


def test_masks_and_loads_may_be_lists():
    routing, mask = route(jnp.asarray(normal(3, 4)), 2), [True, False, True]
    functions = (routing_statistics, load_balance_loss, router_z_loss)

    @jax.jit
    def both(routing):
        return [[f(routing, mask=given) for f in functions] for given in (mask, jnp.array(mask))]

    jax.tree.map(np.testing.assert_array_equal, *both(routing))
    np.testing.assert_array_equal(update_router_bias([0.0, 0.0], [3, 1], 0.5), [-0.5, 0.5])


@pytest.mark.parametrize(
    ("counts", "moves"),
    [
        (np.array([2**31 - 1, 2**31 - 1, 5, 0], np.int32), [-1, -1, 1, 1]),
        (np.array([2**30, 2**30], np.int32), [0, 0]),
        (np.array([100, 100, 0], np.int8), [-1, -1, 1]),
        (np.array([2**32 - 1, 2**32 - 2], np.uint32), [-1, 1]),
        (np.array([1] * 299 + [2], np.uint8), [1] * 299 + [-1]),
    ],
)
def test_counts_whose_sum_their_dtype_does_not_hold(counts, moves):
    np.testing.assert_array_equal(update_router_bias(jnp.zeros(len(counts)), counts, 1.0), moves)


def test_update_router_bias():
    rng = np.random.default_rng(0)
    update = jax.jit(update_router_bias)
    for tokens in rng.integers(0, 4, (20, 7)):
        signs = np.sign(np.mean(tokens) - tokens)
        found = update(jnp.ones(7), jnp.asarray(tokens, "int32"), 0.25)
        np.testing.assert_array_equal(found, 1 + 0.25 * signs)
    # Exact where float32 is not: the mean is a quarter above three of them.
    tokens = jnp.array([300_000_001, 300_000_000, 300_000_000, 300_000_000], "int32")
    found = update(jnp.zeros(4, "bfloat16"), tokens, jnp.float32(1))
    assert found.dtype == "bfloat16"
    np.testing.assert_array_equal(found.astype("float32"), [-1, 1, 1, 1])


@pytest.mark.parametrize("check_vma", [True, False])
def test_biases_of_several_layers(check_vma):
    """Layers over pp, counts summed over dp, as a pipeline has them."""
    counts = np.random.default_rng(1).integers(0, 9, (2, 4, 5)).astype("int32")  # [dp, layers, E]
    bias = normal(4, 5)

    def update(bias, counts):
        return update_router_bias(bias, jax.lax.psum(counts[0], "dp"), 0.25)

    found = jax.jit(jax.shard_map(
        update, mesh=mesh_of("dp=2,pp=2"), in_specs=(P("pp"), P("dp", "pp")), out_specs=P("pp"),
        check_vma=check_vma,
    ))(bias, counts)  # fmt: skip
    total = np.sum(counts, axis=0)
    wanted = bias + np.float32(0.25) * np.sign(np.mean(total, axis=1, keepdims=True) - total)
    np.testing.assert_array_equal(found, wanted.astype("float32"))
    np.testing.assert_array_equal(
        found, jax.vmap(update_router_bias, (0, 0, None))(bias, total, 0.25)
    )


def test_biases_that_would_drift_apart():
    def update(bias, counts):
        return update_router_bias(bias, counts, 0.25)

    mapped = jax.shard_map(update, mesh=mesh_of("dp=2"), in_specs=(P(), P("dp")), out_specs=P("dp"))
    with pytest.raises(ValueError, match=(
        r"^update_router_bias: tokens_per_expert of local shape \(5,\) varies over \['dp'\], and "
        r"bias does not: .* sum it by jax.lax.psum\(..., \('dp',\)\)"
    )):  # fmt: skip
        jax.eval_shape(mapped, jnp.zeros(5), jnp.zeros(10, "int32"))


def test_the_bias_balances():
    """A router that prefers two experts comes to use all, without a loss."""
    logits = jnp.asarray(normal(256, 8) + 3 * (np.arange(8) < 2).astype("float32"))

    def step(bias, _):
        routing = route(logits, 2, scoring="sigmoid", bias=bias)
        stats = routing_statistics(routing)
        return update_router_bias(bias, stats.tokens_per_expert, 0.01), stats.largest_load

    _, loads = jax.jit(lambda: jax.lax.scan(step, jnp.zeros(8), length=200))()
    assert loads[0] > 3
    assert np.max(loads[-20:]) < 1.2


@pytest.mark.parametrize("function", [routing_statistics, load_balance_loss, router_z_loss])
@pytest.mark.parametrize(
    ("text", "options"),
    [
        ("axis has wire_dtype=bfloat16, which has no effect here", {"wire_dtype": "bfloat16"}),
        (
            "axis has keep_gathered=False, which has no effect here",
            {"mode": "naive", "keep_gathered": False},
        ),
        ("axis has gather_dtype=bfloat16, which has no effect here", {"gather_dtype": "bfloat16"}),
    ],
)
def test_an_axis_of_sums_has_no_options(function, text, options):
    def trace(**options):
        call = lambda x: function(route(x, 1), Axis("dp", **options))  # noqa: E731
        mapped = jax.shard_map(call, mesh=mesh_of("dp=2"), in_specs=P("dp"), out_specs=P())
        return jax.eval_shape(mapped, jnp.ones((4, 3)))

    with pytest.raises(ValueError, match=f"^{function.__name__}: {text}"):
        trace(**options)
    assert trace() is not None


def test_what_is_sent():
    """Two psums for all, one of integers and one of floats, and that of the overflow."""

    names = ("ep", "dp")

    def counts(fn, check_vma=True):
        split = jax.shard_map(
            lambda x: fn(route(x, 2), names),
            mesh=mesh_of("dp=2,ep=2"),
            in_specs=P(("dp", "ep")),
            out_specs=P(),
            check_vma=check_vma,
        )
        return count_collectives(split, jnp.ones((8, 4)))

    statistics = counts(routing_statistics)
    assert (statistics.forward, statistics.backward) == ({"psum": 3}, {})
    assert statistics.forward_bytes == 1.5 * 4 * ((4 + 2) + (4 + 2) + 1)
    assert counts(routing_statistics, check_vma=False).backward == {"psum": 1}
    balance = counts(load_balance_loss)
    assert (balance.forward, balance.backward) == ({"psum": 2}, {})


@pytest.mark.parametrize(
    ("error", "text", "call"),
    [
        (ValueError, r"routing_statistics: mask has local shape \(3,\), but tokens need \(4,\)",
         lambda r: routing_statistics(r, mask=jnp.ones(3, bool))),
        (TypeError, "router_z_loss: mask must be bool, got float32",
         lambda r: router_z_loss(r, mask=jnp.ones(4))),
        (ValueError, r"overflow must be a scalar integer, got float32\[\]",
         lambda r: routing_statistics(r, overflow=jnp.float32(0))),
        (ValueError, r"overflow must be a scalar integer, got int32\[2\]",
         lambda r: routing_statistics(r, overflow=jnp.zeros(2, "int32"))),
        (ValueError, "load_balance_loss: axis 'ep' is not bound",
         lambda r: load_balance_loss(r, "ep")),
        (TypeError, "routing_statistics: axis must be a mesh axis name, a tuple or list of them, "
         "or an Axis, got 3", lambda r: routing_statistics(r, 3)),
        (ValueError, r"update_router_bias: bias has local shape \(4,\) and tokens_per_expert "
         r"\(3,\)", lambda _: update_router_bias(jnp.ones(4), jnp.ones(3, "int32"))),
        (ValueError, r"update_router_bias: rate has local shape \(3,\), not \(\); call once for ",
         lambda _: update_router_bias(jnp.ones(3), jnp.ones(3, "int32"), jnp.ones(3))),
        (TypeError, "update_router_bias: bias must be floats, got int32",
         lambda _: update_router_bias(jnp.ones(3, "int32"), jnp.ones(3, "int32"))),
        (TypeError, "update_router_bias: tokens_per_expert must be integers, got float32",
         lambda _: update_router_bias(jnp.ones(3), jnp.ones(3))),
    ],
)  # fmt: skip
def test_errors(error, text, call):
    routing = jax.eval_shape(lambda: route(jnp.zeros((4, 2)), 1))
    with pytest.raises(error, match=text):
        jax.eval_shape(call, routing)
