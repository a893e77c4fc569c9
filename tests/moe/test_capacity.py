"""Which tokens an expert keeps, against loops in Python."""

from fractions import Fraction
from functools import partial
from math import ceil

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.moe import Routing, expert_capacity, limit_capacity, route
from jaxpar.moe._capacity import _running_count


def routing_of(tokens, experts, top_k, *, levels=None, dtype="float32", seed=0):
    """A random routing of which a fifth is dropped already; of so many levels of weights."""
    rng = np.random.default_rng([tokens, experts, top_k, seed])
    chosen = np.argsort(rng.random((tokens, experts)), axis=1)[:, :top_k]
    weights = rng.random((tokens, top_k))
    weights = weights if levels is None else np.floor(weights * levels) / levels
    return made_of(
        chosen.astype("int32"), weights.astype(dtype), rng.random((tokens, top_k)) < 0.8, experts
    )


def made_of(chosen, weights, kept, experts):
    zeros = np.zeros((len(chosen), experts), weights.dtype)
    return Routing(*(jnp.asarray(x) for x in (chosen, weights, kept, zeros, zeros)))


def limited(routing, capacity, policy="probability"):
    return jax.jit(partial(limit_capacity, capacity=capacity, policy=policy))(routing)


def reference(routing, capacity, policy):
    """Each expert in turn keeps the first of its tokens, in the order of the policy."""
    routing = jax.tree.map(np.asarray, routing)
    kept = np.zeros_like(routing.kept)
    for expert in range(routing.logits.shape[1]):
        wanted = np.argwhere((routing.experts == expert) & routing.kept)  # by token
        if policy == "probability":
            weights = np.nan_to_num(routing.weights[tuple(wanted.T)], nan=np.inf, posinf=np.inf)
            wanted = wanted[np.argsort(-weights, kind="stable")]
        if policy == "choice":
            wanted = wanted[np.argsort(wanted[:, 1], kind="stable")]
        kept[tuple(wanted[:capacity].T)] = True
    return kept


POLICIES = ("probability", "choice", "position")


@pytest.mark.parametrize("policy", POLICIES)
def test_matches_reference(policy):
    """Also where most weights are equal, or all. Two programs for all."""
    routings = [
        routing_of(40, 5, 2, levels=levels, seed=seed)
        for levels in (None, 3, 1)
        for seed in range(20)
    ]
    stacked = jax.tree.map(lambda *xs: jnp.asarray(np.stack(xs)), *routings)
    for capacity in (1, 9):
        limit = jax.jit(jax.vmap(partial(limit_capacity, capacity=capacity, policy=policy)))
        results = limit(stacked)
        for found, routing in zip(results.kept, routings, strict=True):
            np.testing.assert_array_equal(found, reference(routing, capacity, policy))
        for name in ("experts", "weights", "scores", "logits"):
            np.testing.assert_array_equal(getattr(results, name), getattr(stacked, name))


@pytest.mark.parametrize("policy", POLICIES)
def test_most_and_least(policy):
    routing = routing_of(8, 3, 3)
    for capacity in (8, 9, 10**12):
        unlimited = limit_capacity(routing, capacity, policy=policy)
        assert all(found is given for found, given in zip(unlimited, routing, strict=True))
    assert not np.any(limit_capacity(routing, 0, policy=policy).kept)
    kept = limited(routing, 7, policy).kept
    np.testing.assert_array_equal(kept, reference(routing, 7, policy))


@pytest.mark.parametrize("policy", POLICIES)
def test_one_expert_gets_all(policy):
    weights = np.random.default_rng(0).random((300, 1)).astype("float32")
    routing = made_of(np.ones((300, 1), "int32"), weights, np.ones((300, 1), bool), 2)
    for capacity in (1, 299):
        kept = limited(routing, capacity, policy).kept
        np.testing.assert_array_equal(kept, reference(routing, capacity, policy))


@pytest.mark.parametrize("top_k", [1, 2, 3, 4, 8, 9])
def test_first_choices_come_before_second_ones(top_k):
    """For numbers of choices around each width of their keys."""
    routing = routing_of(30, 9, top_k)
    for capacity in (1, 5, 20):
        kept = limited(routing, capacity, "choice").kept
        np.testing.assert_array_equal(kept, reference(routing, capacity, "choice"))


def test_policies_differ():
    """The last token's first choice takes the place of the first token's second one."""
    chosen = np.array([[0, 1], [0, 2], [1, 0]], "int32")
    weights = np.array([[0.5, 0.4], [0.9, 0.1], [0.3, 0.2]], "float32")
    routing = made_of(chosen, weights, np.ones((3, 2), bool), 3)
    kept = {policy: np.asarray(limited(routing, 1, policy).kept).tolist() for policy in POLICIES}
    assert kept == {
        "probability": [[False, True], [True, True], [False, False]],
        "choice": [[True, False], [False, True], [True, False]],
        "position": [[True, True], [False, True], [False, False]],
    }


def test_any_weights():
    """Those of one's own router can be negative or infinite, or zeros or NaN of either sign."""
    row = [0.0, -0.0, -1.0, np.inf, -np.inf, 1e-37, -1e-37, 1.0, -2.0, 0.0, -0.0, np.nan, -np.nan]
    weights = np.array(row, "float32")[:, None]
    routing = made_of(np.zeros((13, 1), "int32"), weights, np.ones((13, 1), bool), 1)
    for capacity in (2, 5, 8):
        kept = limited(routing, capacity).kept
        np.testing.assert_array_equal(kept, reference(routing, capacity, "probability"))


def test_float64_weights():
    with jax.enable_x64(True):
        routing = routing_of(30, 3, 2, dtype="float64")
        near = routing._replace(weights=1 + routing.weights * 1e-12)  # the same in float32
        kept = limited(near, 4).kept
        np.testing.assert_array_equal(kept, reference(near, 4, "probability"))


@pytest.mark.parametrize(
    ("policy", "check_vma"), [*zip(POLICIES, (True, False, True), strict=True)]
)
def test_each_device_limits_its_own(policy, check_vma):
    logits = np.random.default_rng(1).standard_normal((4 * 12, 4)).astype("float32")

    def local(x):
        routing = route(x, 2)
        return routing, limit_capacity(routing, 3, policy=policy).kept

    mesh = make_mesh("a=2,b=2", devices=jax.devices()[:4])
    split = jax.shard_map(
        local, mesh=mesh, in_specs=P(("b", "a")), out_specs=P(("b", "a")), check_vma=check_vma
    )
    routing, kept = jax.jit(split)(logits)
    for start in range(0, 48, 12):
        own = slice(start, start + 12)
        wanted = reference(jax.tree.map(lambda x, own=own: x[own], routing), 3, policy)
        np.testing.assert_array_equal(kept[own], wanted)


def test_masked_tokens_take_no_room():
    routing = jax.jit(lambda: route(jnp.zeros((6, 2)), 1, mask=jnp.arange(6) > 2))()
    for policy in POLICIES:
        kept = limited(routing, 2, policy).kept
        np.testing.assert_array_equal(kept.ravel(), [False] * 3 + [True, True, False])


def test_is_differentiable():
    """Through what is kept, to which a change of logits makes no difference."""

    def loss(logits, kept):
        routing = route(logits, 2)
        routing = limit_capacity(routing, 3) if kept is None else routing._replace(kept=kept)
        return jnp.sum(jnp.where(routing.kept, routing.weights, 0) ** 2), routing.kept

    logits = jnp.asarray(np.random.default_rng(2).standard_normal((8, 3)), "float32")
    gradient = jax.jit(jax.grad(loss, has_aux=True))
    ours, kept = gradient(logits, None)
    assert 0 < np.sum(kept) < 16
    np.testing.assert_array_equal(ours, gradient(logits, kept)[0])


@pytest.mark.parametrize("tokens", [1, 127, 128, 129, 1000])
def test_running_counts(tokens):
    flags = np.random.default_rng(tokens).random((tokens, 3)) < [0, 0.5, 1]
    counts = jax.jit(_running_count)(flags)
    np.testing.assert_array_equal(counts, np.cumsum(flags, axis=0))


def test_capacities_are_exact():
    for factor in ("0", "0.1", "0.3", "1", "1.1", "1.25", "2.7", "1e-3"):
        for tokens, top_k, experts in ((0, 1, 1), (10, 1, 1), (100, 2, 8), (4096, 8, 60)):
            wanted = ceil(Fraction(factor) * tokens * top_k / experts)
            numbers = float(factor), Fraction(factor), np.float32(factor), np.float64(factor)
            for number in numbers:
                assert expert_capacity(tokens, top_k, experts, number) == wanted
    assert expert_capacity(np.int32(7), 1, 2, 1) == 4
    assert expert_capacity(3 * 10**17, 1, 1, 0.1) == 3 * 10**16


@pytest.mark.parametrize(
    ("error", "text", "arguments"),
    [
        (ValueError, "tokens=-1 must be at least 0", (-1, 1, 1, 1.0)),
        (ValueError, "top_k=0 must be at least 1", (1, 0, 1, 1.0)),
        (ValueError, "experts=0 must be at least 1", (1, 1, 0, 1.0)),
        (TypeError, "tokens must be an integer, got 1.5", (1.5, 1, 1, 1.0)),
        (ValueError, "factor=-1.0 must be at least 0", (1, 1, 1, -1.0)),
        (ValueError, "factor=-1/2 must be at least 0", (1, 1, 1, Fraction(-1, 2))),
        (ValueError, "factor=nan must be at least 0", (1, 1, 1, float("nan"))),
        (ValueError, "factor=inf must be finite; an expert gets at most 9 tokens",
         (9, 1, 1, float("inf"))),
        (TypeError, "factor must be a number known while tracing", (1, 1, 1, "1.0")),
    ],
)  # fmt: skip
def test_errors_of_capacities(error, text, arguments):
    with pytest.raises(error, match=f"^expert_capacity: {text}"):
        expert_capacity(*arguments)


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ValueError, "capacity=-1 must be at least 0", {"capacity": -1}),
        (TypeError, "capacity must be an integer, got 1.5", {"capacity": 1.5}),
        (ValueError, "policy must be one of probability, choice, position, got 'random'",
         {"capacity": 1, "policy": "random"}),
    ],
)  # fmt: skip
def test_errors(error, text, options):
    with pytest.raises(error, match=f"^limit_capacity: {text}"):
        limit_capacity(routing_of(4, 2, 1), **options)
