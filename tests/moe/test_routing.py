"""Routing against NumPy: which experts, which weights, and their gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.compiler.jaxprs import subjaxprs
from jaxpar.moe import (
    Routing,
    limit_capacity,
    load_balance_loss,
    route,
    router_z_loss,
    routing_statistics,
)
from jaxpar.testing import assert_matches_reference


def normal(*shape, dtype="float32"):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(dtype)


def softmax(x):
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def reference(
    logits, bias=None, mask=None, *, top_k, scoring="softmax", groups=1, top_groups=None,
    scores_per_group=None, normalize=False, scale=1.0,
):  # fmt: skip
    """`route`, token by token, in the words of its docstring."""
    tokens, count = logits.shape
    size = count // groups
    kept = np.repeat(np.ones(tokens, bool) if mask is None else mask, top_k).reshape(tokens, top_k)
    logits = np.where(kept[:, :1], logits, 0)
    scores = 1 / (1 + np.exp(-logits)) if scoring == "sigmoid" else softmax(logits)
    choice = logits if scoring == "selected_softmax" else scores
    choice = choice if bias is None else choice + bias
    experts = np.full((tokens, top_k), -1, np.int32)
    weights = np.zeros((tokens, top_k))
    for i in range(tokens):
        if not kept[i, 0]:
            scores[i] = 0
            continue
        best = -np.sort(-choice[i].reshape(groups, size), axis=-1)
        merit = np.sum(best[:, : scores_per_group or (1 if bias is None else 2)], axis=-1)
        allowed = np.argsort(-merit, kind="stable")[: top_groups or groups]
        order = [e for e in np.argsort(-choice[i], kind="stable") if e // size in allowed]
        experts[i] = order[:top_k]
        chosen = (logits if scoring == "selected_softmax" else scores)[i, experts[i]]
        if scoring == "selected_softmax":
            chosen = softmax(chosen)
        weights[i] = scale * (chosen / np.sum(chosen) if normalize else chosen)
    return Routing(experts, weights, kept, scores, logits, mask)


STATIC = ("scoring", "groups", "top_groups", "scores_per_group", "normalize", "scale")
MASK = np.arange(8) % 3 != 1


@pytest.mark.parametrize(
    ("options", "bias", "mask", "check_vma"),
    [
        ({"top_k": 1}, None, None, True),
        ({"top_k": 6, "scoring": "selected_softmax", "scale": 2.5}, None, MASK, False),
        ({"top_k": 2, "normalize": True}, normal(6), MASK, True),
        ({"top_k": 3, "scoring": "selected_softmax"}, normal(6), None, True),
        ({"top_k": 3, "scoring": "sigmoid", "normalize": True, "scale": 2.5, "groups": 3,
          "top_groups": 2}, normal(6), MASK, True),
        ({"top_k": 2, "scoring": "sigmoid", "groups": 6, "top_groups": 2}, normal(6), None, False),
        ({"top_k": 2, "groups": 2, "top_groups": 1}, None, MASK, False),
        ({"top_k": 6, "groups": 2, "top_groups": 2}, None, None, True),
        ({"top_k": 2, "groups": 2, "top_groups": 1, "scores_per_group": 1, "scoring": "sigmoid"},
         normal(6), MASK, True),
    ],
)  # fmt: skip
def test_matches_reference(options, bias, mask, check_vma):
    """Tokens over two devices, the bias on all. The logits of masked tokens may be anything."""
    logits = normal(8, 6)
    given = {"bias": bias, "mask": mask}
    given = {name: value for name, value in given.items() if value is not None}
    if mask is not None:
        logits[~mask] = np.nan

    assert_matches_reference(
        lambda x, given: route(x, **given, **options),
        lambda x, given: reference(x, **given, **options),
        *(logits, given),
        mesh=make_mesh("ep=2", devices=jax.devices()[:2]),
        in_specs=(P("ep"), {"bias": P(), "mask": P("ep")} if len(given) > 1 else
                  {name: P() if name == "bias" else P("ep") for name in given}),
        out_specs=P("ep"),
        check_vma=check_vma,
        max_directions=6,
    )  # fmt: skip


# Operations one by one take longer to compile than together.
jitted = jax.jit(route, static_argnums=1, static_argnames=STATIC)


def same(found, wanted):
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-6), found, wanted)


def test_ties_go_to_lower_experts():
    routing = jitted(jnp.zeros((2, 8)), 3)
    np.testing.assert_array_equal(routing.experts, [[0, 1, 2]] * 2)
    biased = jitted(jnp.zeros((1, 8)), 3, bias=jnp.zeros(8), groups=4, top_groups=2)
    np.testing.assert_array_equal(biased.experts, [[0, 1, 2]])


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_scores_that_round_alike_do_not_tie(scoring):
    """The probabilities are 0 or 1 in float32, and their order is still that of the logits."""
    logits = jnp.array([[-210.0, -200.0, -220.0, 120.0, 110.0, 130.0]])
    routing = jitted(logits, 5, scoring=scoring)
    np.testing.assert_array_equal(routing.experts, [[5, 3, 4, 1, 0]])


@pytest.mark.parametrize("scoring", ["softmax", "selected_softmax", "sigmoid"])
def test_normalized_weights_of_tiny_scores(scoring):
    """They sum to 1, with finite gradients, where the scores themselves underflow."""

    def weight(logits):
        routing = route(logits, 2, scoring=scoring, normalize=True, bias=jnp.arange(4.0))
        return routing.weights[0, 0], routing

    logits = jnp.array([[0.0 if scoring == "softmax" else -150.0, -150.0, -152.0, -151.0]])
    gradient, routing = jax.jit(jax.grad(weight, has_aux=True))(logits)
    assert routing.experts[0, 0] == 3
    first, second = softmax(np.asarray(logits[0, routing.experts[0]], "float64"))
    np.testing.assert_allclose(routing.weights, [[first, second]], rtol=1e-6)
    assert np.all(np.isfinite(gradient))
    np.testing.assert_allclose(gradient[0, 3], first * second, rtol=1e-5)


@pytest.mark.parametrize(
    ("scoring", "scores_per_group"),
    [
        *(("softmax", count) for count in (None, 2, 3)),
        *(("selected_softmax", count) for count in (1, 2, 4)),
        *(("sigmoid", count) for count in (None, 1, 3)),
    ],
)
def test_groups_by_several_scores(scoring, scores_per_group):
    """Of many tokens, with a bias and without. In float64, where nothing rounds."""
    options = {"scoring": scoring, "groups": 4, "top_groups": 2}
    options["scores_per_group"] = scores_per_group
    logits, biases = 3 * normal(200, 16, dtype="float64"), (None, normal(16, dtype="float64"))

    @jax.jit
    def run(logits, biases):
        return [route(logits, 3, bias=bias, **options).experts for bias in biases]

    with jax.enable_x64(True):
        found = run(logits, biases)
    wanted = [reference(logits, bias, top_k=3, **options).experts for bias in biases]
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    usual = reference(logits, None, top_k=3, **options | {"scores_per_group": None})
    assert np.array_equal(wanted[0], usual.experts) == (scores_per_group in (None, 1))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_sums_of_tiny_scores_do_not_tie(scoring):
    """The first group's logit leaves nothing to others; the last one is the better of these."""
    logits = jnp.array([[9.0, 8.0, -150.0, -152.0, -150.5, -150.5]])
    routing = jitted(logits, 4, scoring=scoring, groups=3, top_groups=2, scores_per_group=2)
    np.testing.assert_array_equal(np.sort(routing.experts), [[0, 1, 4, 5]])


def test_experts_can_be_switched_off():
    """By logits of -inf; in groups they are still better than experts that cannot be chosen."""
    logits = jnp.where(jnp.arange(6) < 4, -jnp.inf, normal(5, 6))
    np.testing.assert_array_equal(np.sort(jitted(logits, 2).experts, axis=1), [[4, 5]] * 5)
    routing = jitted(logits, 3, groups=2, top_groups=1)
    np.testing.assert_array_equal(routing.experts[:, 2], [3] * 5)
    np.testing.assert_array_equal(routing.weights[:, 2], [0] * 5)
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(route(x, 2, normalize=True).weights[:, 0])))
    assert np.all(np.isfinite(gradient(logits)))


def test_is_float32_for_16_bit_logits():
    logits = jnp.asarray(normal(6, 8), "bfloat16")
    options = {"scoring": "sigmoid", "bias": jnp.asarray(normal(8), "bfloat16"), "normalize": True}
    routing = jitted(logits, 3, **options)
    same(routing, jitted(logits.astype("float32"), 3, **options))
    assert {x.dtype.name for x in routing[:5]} == {"int32", "float32", "bool"}
    gradient = jax.jit(jax.grad(lambda x: jnp.sum(route(x, 3).weights[:, 0])))
    assert gradient(logits).dtype == "bfloat16"


def test_is_float64_for_64_bit_logits():
    with jax.enable_x64(True):
        logits = jnp.asarray(normal(6, 8, dtype="float64"))
        routing = jitted(logits, 2, bias=jnp.zeros(8, "float32"), groups=2, top_groups=1)
        assert [x.dtype.name for x in routing[:5]] == [
            "int32", "float64", "bool", "float64", "float64",
        ]  # fmt: skip


def plain(logits, top_k):
    scores = jax.nn.softmax(logits)
    return jnp.take_along_axis(scores, jax.lax.top_k(scores, top_k)[1], axis=-1)


def test_second_derivatives_and_vmap():
    logits, tangent = (jnp.asarray(x) for x in normal(2, 3, 4, 5))

    def loss(weigh):
        return lambda x: jnp.sum(jnp.sin(3 * weigh(x)))

    def second(weigh):
        product = jax.vmap(lambda x, v: jax.jvp(jax.grad(loss(weigh)), (x,), (v,)))
        return jax.jit(product)(logits, tangent)

    ours, theirs = second(lambda x: route(x, 2).weights), second(lambda x: plain(x, 2))
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5), ours, theirs)


def primitives(jaxpr):
    for equation in jaxpr.eqns:
        yield equation.primitive.name
        for inner in subjaxprs(equation.params):
            yield from primitives(inner)


def test_neither_gathers_nor_scatters():
    jaxpr = jax.make_jaxpr(jax.grad(lambda x: jnp.sum(route(x, 2).weights ** 2)))(normal(4, 8))
    names = set(primitives(jaxpr.jaxpr))
    assert "top_k" in names
    assert not [name for name in names if "gather" in name or "scatter" in name]


def test_keeps_nothing_of_choices_times_experts():
    """For the backward pass; what is kept has at most the size of the logits."""
    _, pull = jax.vjp(lambda x: route(x, 4).weights, normal(6, 8))
    assert max(leaf.size for leaf in jax.tree.leaves(pull)) <= 6 * 8


TAKE_ROUTINGS = {
    "limit_capacity": lambda routing: limit_capacity(routing, 2),
    "load_balance_loss": load_balance_loss,
    "router_z_loss": router_z_loss,
    "routing_statistics": routing_statistics,
}


@pytest.mark.parametrize("name", TAKE_ROUTINGS)
def test_routings_that_do_not_fit(name):
    """All functions of a routing refuse the same ones; `moe_layer` besides other tokens' ones."""
    routing = route(jnp.zeros((4, 3)), 2)
    wrong = {
        r"routing.weights has local shape \(4, 1\), but must have 4 rows, one for each of the "
        "tokens, of as many": (ValueError, {"weights": jnp.zeros((4, 1))}),
        r"routing.experts has local shape \(4,\)": (ValueError, {"experts": jnp.zeros(4, "int32")}),
        r"routing.experts has local shape \(\)": (ValueError, {"experts": jnp.int32(0)}),
        r"routing.scores has local shape \(4, 5\)": (ValueError, {"scores": jnp.zeros((4, 5))}),
        "routing.kept is int32, but must be bool": (TypeError, {"kept": jnp.ones((4, 2), "int32")}),
        "routing.experts is float32, but must be integer": (
            TypeError,
            {"experts": jnp.zeros((4, 2))},
        ),
    }
    for text, (error, changed) in wrong.items():
        with pytest.raises(error, match=f"^{name}: {text}"):
            TAKE_ROUTINGS[name](routing._replace(**changed))


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32", "int64"])
def test_experts_in_other_integers(dtype):
    """An int8 cannot count all experts, but names the first ones."""
    chosen = np.array([[0, 1], [2, 3], [0, 4], [44, 0]])
    zeros = jnp.zeros((4, 300))
    routing = Routing(jnp.asarray(chosen, "int32"), jnp.ones((4, 2)), chosen >= 0, zeros, zeros)

    @jax.jit
    def run(*routings):
        return [[function(one) for function in TAKE_ROUTINGS.values()] for one in routings]

    with jax.enable_x64(dtype == "int64"):
        other = routing._replace(experts=jnp.asarray(chosen.astype(dtype)))
        found, wanted = run(other, routing)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    counts = found[-1].tokens_per_expert
    np.testing.assert_array_equal(counts, np.bincount(chosen.ravel(), minlength=300))


def test_mask_and_bias_may_be_lists():
    logits, mask, bias = jnp.asarray(normal(3, 4)), [True, False, True], [0.0, 9.0, 0.0, 0.0]

    @jax.jit
    def run(logits):
        listed = route(logits, 2, mask=mask, bias=bias)
        return listed, route(logits, 2, mask=jnp.array(mask), bias=jnp.array(bias))

    found, wanted = run(logits)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    assert found.experts[0, 0] == 1
    assert found.experts[1, 0] == -1


def test_no_tokens():
    routing = jitted(jnp.zeros((0, 4)), 2, groups=2, top_groups=1, bias=jnp.zeros(4))
    assert [x.shape for x in routing[:5]] == [(0, 2), (0, 2), (0, 2), (0, 4), (0, 4)]


@pytest.mark.parametrize(
    ("error", "text", "options"),
    [
        (ValueError, "top_k=7 must be at least 1 and at most 6, the number of experts",
         {"top_k": 7}),
        (ValueError, "top_k=0 must be at least 1", {"top_k": 0}),
        (TypeError, "top_k must be an integer, got 2.0", {"top_k": 2.0}),
        (ValueError, "scoring must be one of softmax, selected_softmax, sigmoid, got 'relu'",
         {"scoring": "relu"}),
        (ValueError, r"groups=4 does not divide the 6 experts: "
         r"6 = 1 x 4 \+ 2; choose a divisor of 6", {"groups": 4, "top_groups": 1}),
        (ValueError, "scores_per_group=2 without top_groups", {"scores_per_group": 2}),
        (ValueError, "scores_per_group=4 must be at least 1 and at most 3, the experts of a group",
         {"groups": 2, "top_groups": 2, "scores_per_group": 4}),
        (ValueError, "scores_per_group=0 must be at least 1",
         {"groups": 2, "top_groups": 1, "scores_per_group": 0}),
        (ValueError, "groups=3 without top_groups", {"groups": 3}),
        (ValueError, "top_groups=4 must be at least 1 and at most 3, the number of groups",
         {"groups": 3, "top_groups": 4}),
        (ValueError, "top_k=5 is more than the experts of top_groups=2 groups: 2 x 2 = 4; choose "
         "at least 3 groups", {"top_k": 5, "groups": 3, "top_groups": 2}),
        (ValueError, r"bias has local shape \(3,\), but needs one entry for each of the 6 experts; "
         "give all of them on every device", {"bias": jnp.zeros(3)}),
        (TypeError, "bias must be floats, got int32", {"bias": jnp.zeros(6, "int32")}),
        (ValueError, r"mask has local shape \(3,\), but tokens need \(4,\), one entry for each",
         {"mask": jnp.ones(3, bool)}),
        (TypeError, "mask must be bool, got int32", {"mask": jnp.ones(4, "int32")}),
        (ValueError, "scale=-1.0 must be at least 0", {"scale": -1.0}),
        (TypeError, "logits must be floats, got int32", {"logits": jnp.zeros((4, 6), "int32")}),
        (ValueError, r"logits has local shape \(2, 4, 6\), and must be \[tokens, experts\]",
         {"logits": jnp.zeros((2, 4, 6))}),
    ],
)  # fmt: skip
def test_errors(error, text, options):
    with pytest.raises(error, match=f"^route: .*{text}"):
        route(**{"logits": jnp.zeros((4, 6)), "top_k": 2, **options})
