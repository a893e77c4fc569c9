"""apply_experts against NumPy: options, gradients twice, unwritten rows, meshes, errors."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import make_mesh
from jaxpar.layers import GatedActivation
from jaxpar.moe import Experts, apply_experts, as_experts, pad_experts
from jaxpar.testing import assert_matches_reference

IMPLEMENTATIONS = ["blocks", "ragged_dot"]


def silu(x):
    return x / (1 + np.exp(-x))


def gate_times_up(gate, up):
    return silu(gate) * up


def reference(*args, join=gate_times_up):
    x, experts, sizes, weights = (*jax.tree.map(np.asarray, args), None)[:4]
    out, start = np.zeros(x.shape), 0
    for i, size in enumerate(sizes):
        rows = slice(start, start + size)
        own = Experts(*(None if w is None else w[i] for w in experts))
        up, gate, down = (
            None if w is None else (lambda h, w=w, b=b: h @ w + (0 if b is None else b))
            for w, b in (
                (own.up, own.up_bias),
                (own.gate, own.gate_bias),
                (own.down, own.down_bias),
            )
        )
        hidden = silu(up(x[rows])) if gate is None else join(gate(x[rows]), up(x[rows]))
        factor = 1 if weights is None else weights[rows, None]
        out[rows] = down(hidden) * factor
        start += size
    return out


def make(sizes, rows, *, gate=True, bias=True, weights=True, d=4, f=5, seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    e = len(sizes)
    experts = Experts(
        up=draw(e, d, f),
        down=draw(e, f, d),
        gate=draw(e, d, f) if gate else None,
        up_bias=draw(e, f) if bias else None,
        gate_bias=draw(e, f) if bias and gate else None,
        down_bias=draw(e, d) if bias else None,
    )
    x, factors = draw(rows, d), draw(rows) if weights else None
    x[sum(sizes) :] = np.nan
    if weights:
        factors[sum(sizes) :] = np.nan
    return jax.tree.map(jnp.asarray, (x, experts, np.asarray(sizes, np.int32), factors))


def call(x, experts, sizes, weights=None, **options):
    return apply_experts(x, experts, sizes, weights=weights, **options)


def over_devices(devices, **how):
    def whole(*args):
        own = [jax.tree.map(lambda a, i=i: np.split(a, devices)[i], args) for i in range(devices)]
        return np.concatenate([reference(*part, **how) for part in own])

    return whole


@pytest.mark.parametrize(
    ("gate", "bias", "weights"),
    [(True, True, True), (False, True, False)],
)
def test_in_shard_map_with_rows_of_each_device(gate, bias, weights):
    sizes = [[3, 0, 4], [0, 0, 0], [0, 17, 3], [20, 0, 0]]
    parts = [
        make(own, 21, gate=gate, bias=bias, weights=weights, seed=i) for i, own in enumerate(sizes)
    ]
    args = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
    assert_matches_reference(
        partial(call, implementation="blocks"),  # "auto" traces what other platforms do as well
        over_devices(4),
        *args[: 3 + weights],
        mesh=make_mesh("dp=2,ep=4"),
        in_specs=P("ep"),
        out_specs=P("ep"),
        check_vma=gate,
        max_directions=2,
    )


def clamped(np, gate, up):
    """That of gpt-oss, with lower bounds, by NumPy or by JAX; plus what it makes of zeros."""
    gate, up = np.minimum(gate, 0.9), np.clip(up, -0.7, 0.7)
    return (up + 1) * gate / (1 + np.exp(-1.702 * gate)) + np.cos(up)


@pytest.mark.parametrize(("implementation", "check_vma"), [("blocks", True), ("auto", False)])
def test_an_activation_of_gate_and_up(implementation, check_vma):
    """Rows of no expert hold NaN, and those of another in one block are none of its own."""
    parts = [make(own, 9, seed=i) for i, own in enumerate([[3, 0, 4], [0, 1, 1]])]
    joined = GatedActivation(lambda gate, up: clamped(jnp, gate, up))
    assert_matches_reference(
        partial(call, implementation=implementation, activation=joined),
        over_devices(2, join=lambda gate, up: clamped(np, gate, up)),
        *jax.tree.map(lambda *a: jnp.concatenate(a), *parts),
        mesh=make_mesh("ep=2", devices=jax.devices()[:2]),
        in_specs=P("ep"),
        out_specs=P("ep"),
        check_vma=check_vma,
        max_directions=2,
    )


def test_experts_replicated_over_an_axis_that_rows_vary_over():
    x, experts, sizes, weights = make([3, 0, 4], 8)
    both = [jnp.concatenate([a, 2 * a]) for a in (x, weights)]

    def whole(x, experts, sizes, weights):
        halves = zip(np.split(x, 2), np.split(weights, 2), strict=True)
        return np.concatenate([reference(x, experts, sizes, w) for x, w in halves])

    assert_matches_reference(
        partial(call, implementation="blocks"),
        whole,
        *(both[0], experts, sizes, both[1]),
        mesh=make_mesh("dp=2", devices=jax.devices()[:2]),
        in_specs=(P("dp"), P(), P(), P("dp")),
        out_specs=P("dp"),
        max_directions=3,
    )


def dense(x, experts, sizes, weights, activation=jax.nn.silu):
    """The same in JAX, a weight for each row."""
    own = jax.tree.map(lambda w: w[np.repeat(np.arange(len(sizes)), np.asarray(sizes))], experts)
    total = np.asarray(sizes).sum()
    x, weights = x[:total], weights[:total]

    def project(labels, x, w, bias):
        y = jnp.einsum(labels, x, w)
        return y if bias is None else y + bias

    up = project("ad,adf->af", x, own.up, own.up_bias)
    gate = project("ad,adf->af", x, own.gate, own.gate_bias)
    out = project("af,afd->ad", activation(gate) * up, own.down, own.down_bias)
    return out * weights[:, None]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("derivatives", [1, 2])
def test_derivatives_with_nan_past_the_groups(derivatives, implementation, float64):
    """With blocks of several sizes, and then again for the derivatives of derivatives."""
    sizes = [[40, 0, 70, 301, 2], [4, 0, 7, 1]][derivatives - 1]
    x, experts, sizes, weights = wide(make(sizes, sum(sizes) + 3, bias=derivatives == 1))
    order = (0, 1, 2)

    def gradients(f):
        def loss(*args):
            return jnp.sum(jnp.sin(f(*args)))

        def norm(*args):
            return sum(jnp.sum(g**2) for g in jax.tree.leaves(jax.grad(loss, order)(*args)))

        return jax.jit(jax.grad([loss, norm][derivatives - 1], order))(x, experts, weights)

    found = gradients(lambda x, e, w: call(x, e, sizes, w, implementation=implementation))
    wanted = gradients(lambda x, e, w: dense(x, e, sizes, w))
    assert_alike(found, wanted)
    assert not np.any(found[0][-3:])
    assert not np.any(found[2][-3:])


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize(
    "activation", [lambda h: jnp.sqrt(h) / h, GatedActivation(lambda gate, up: jnp.sqrt(gate) / up)]
)
def test_activation_that_is_nan_or_steep_at_zero(implementation, activation):
    """Rows outside a block's group are 0 within it: what an activation makes of 0 is not seen."""
    x, experts, sizes, weights = make([3, 1, 2], 8, bias=False)
    x, experts = jnp.abs(x), jax.tree.map(jnp.abs, experts)

    def f(x, experts, weights):
        out = apply_experts(
            *(x, experts, sizes),
            weights=weights,
            activation=activation,
            implementation=implementation,
        )
        return jnp.sum(out**2)

    gradients = jax.jit(jax.grad(f, (0, 1, 2)))(x, experts, weights)
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(gradients))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_activation_with_a_parameter_of_its_own(implementation):
    x, experts, sizes, weights = make([3, 0, 2], 8)

    def loss(slope, x, apply):
        return jnp.sum(apply(x, lambda h: jnp.where(h > 0, h, slope * h)) ** 2)

    def ours(x, activation):
        options = {"activation": activation, "implementation": implementation}
        return call(x, experts, sizes, weights, **options)

    def theirs(x, activation):
        return dense(x, experts, sizes, weights, activation)

    gradients = jax.jit(jax.grad(loss, (0, 1)), static_argnums=2)
    found, wanted = (gradients(jnp.float32(0.3), x, apply) for apply in (ours, theirs))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)


def test_vmap_and_checkpoint():
    parts = [make(sizes, 8, bias=False, seed=i) for i, sizes in enumerate([[3, 0, 4], [0, 8, 0]])]
    stacked = jax.tree.map(lambda *a: jnp.stack(a), *parts)

    def gradient(x, experts, sizes, weights):
        def loss(x, experts, weights):
            return jnp.sum(jnp.sin(jax.checkpoint(call)(x, experts, sizes, weights)))

        return jax.grad(loss, (0, 1, 2))(x, experts, weights)

    found = jax.jit(jax.vmap(gradient))(*stacked)
    for i, part in enumerate(parts):
        wanted = jax.jit(gradient)(*part)
        for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_allclose(one[i], other, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_bfloat16(implementation):
    """Sums are float32; biases and factors may stay so."""
    x, experts, sizes, weights = make([30, 0, 41], 80, d=32, f=48)
    narrow = jax.tree.map(lambda w: w.astype(jnp.bfloat16), experts)
    narrow = narrow._replace(up_bias=experts.up_bias)
    x = jnp.asarray(x, jnp.bfloat16)

    def f(x, experts, weights):
        return call(x, experts, sizes, weights, implementation=implementation)

    @jax.jit
    def both(*args):
        out, pull = jax.vjp(f, *args)
        return out, pull(jnp.ones_like(out))

    out, gradients = both(x, narrow, weights)
    assert out.dtype == jnp.bfloat16
    wide = jax.tree.map(lambda a: np.asarray(a, np.float64), (x, narrow))
    wanted = reference(*wide, sizes, np.asarray(weights, np.float64))
    error = np.linalg.norm(np.asarray(out, np.float64) - wanted) / np.linalg.norm(wanted)
    assert error < 0.005
    assert [g.dtype for g in jax.tree.leaves(gradients)] == [
        a.dtype for a in jax.tree.leaves((x, narrow, weights))
    ]
    exact = jax.jit(jax.grad(lambda *a: jnp.sum(dense(a[0], a[1], sizes, a[2])), (0, 1, 2)))(
        *jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), (x, narrow, weights))
    )
    for one, other in zip(jax.tree.leaves(gradients), jax.tree.leaves(exact), strict=True):
        one = np.asarray(one, np.float64)
        assert np.linalg.norm(one - other) < 0.015 * np.linalg.norm(other)
    preferred = {"preferred_element_type": jnp.float32, "implementation": implementation}
    wide = jax.eval_shape(lambda: call(x, narrow, sizes, weights, **preferred))
    assert wide.dtype == jnp.float32
    assert jax.eval_shape(lambda: f(x, narrow, None)).dtype == jnp.bfloat16


def test_no_rows_and_no_hidden_rows_are_kept():
    x, experts, sizes, _ = make([0, 0], 0)
    assert call(x, experts, sizes).shape == (0, 4)
    x, experts, sizes, weights = make([3, 4], 8)
    _, pull = jax.vjp(lambda x: call(x, experts, sizes, weights, implementation="blocks"), x)
    kept = [leaf.shape for leaf in jax.tree.leaves(pull) if hasattr(leaf, "shape")]
    assert kept
    assert (8, 5) not in kept


def test_mapping_and_padding():
    x, experts, sizes, _ = make([2, 1, 3], 8)
    mapping = {key: w for key, w in experts._asdict().items() if w is not None}
    assert as_experts(mapping) == experts
    padded = pad_experts(mapping, 4)
    assert [len(w) for w in padded] == [4] * 6
    assert not np.any(padded.up[3])
    more = jnp.append(sizes, 0)
    found = apply_experts(x, padded._asdict(), more)
    np.testing.assert_allclose(found, reference(x, experts, sizes), rtol=1e-5, atol=1e-5)
    assert pad_experts(experts, 3) is experts
    assert pad_experts(experts._replace(gate=None, gate_bias=None), 2).gate is None


def test_sizes_and_weights_may_be_lists():
    x, experts, sizes, _ = make([2, 1, 3], 8)
    found = apply_experts(x, experts, [2, 1, 3], weights=[0.5] * 8, implementation="blocks")
    wanted = reference(x, experts, sizes, np.full(8, 0.5))
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


WHOLE = make([3, 4], 8)[1]

ERRORS = [
    (
        {"x": jnp.zeros((2, 8, 4), jnp.float32)},
        ValueError,
        "apply_experts: x must be [a, d], got local shape (2, 8, 4); reshape it to two dimensions",
    ),
    (
        {"x": jnp.zeros((8, 3), jnp.float32)},
        ValueError,
        "apply_experts: x of local shape (8, 3) has 3 features, but experts.up of local shape "
        "(2, 4, 5) takes 4; they are multiplied and must be as many",
    ),
    (
        {"x": jnp.zeros((8, 4), jnp.bfloat16)},
        TypeError,
        "apply_experts: x is bfloat16 and experts.up float32; cast one to the other's dtype",
    ),
    (
        {"group_sizes": jnp.zeros(3, jnp.int32)},
        ValueError,
        "apply_experts: group_sizes has local shape (3,), but experts.up of local shape (2, 4, 5) "
        "has 2 groups; give one size for each",
    ),
    (
        {"weights": jnp.zeros(9, jnp.float32)},
        ValueError,
        "apply_experts: weights have local shape (9,), but x of local shape (8, 4) has 8 rows; "
        "give one weight for each",
    ),
    (
        {"weights": jnp.zeros(8, jnp.int32)},
        TypeError,
        "apply_experts: weights must be floats, got int32; cast them",
    ),
    (
        {"weights": jnp.zeros(8, jnp.complex64)},
        TypeError,
        "apply_experts: weights must be floats, got complex64; cast them",
    ),
    (
        {"experts": WHOLE._replace(up_bias=WHOLE.up_bias.astype(jnp.complex64))},
        TypeError,
        "apply_experts: x is float32 and experts.up_bias complex64, which it cannot hold; cast "
        "one of them",
    ),
    (
        {"experts": WHOLE._replace(down_bias=WHOLE.down_bias.astype(bool))},
        TypeError,
        "apply_experts: x is float32 and experts.down_bias bool, which it cannot hold; cast one of "
        "them",
    ),
    *(
        (
            {
                "x": jnp.zeros((8, 4), dtype),
                "experts": jax.tree.map(lambda w, dtype=dtype: w.astype(dtype), WHOLE),
            },
            TypeError,
            f"apply_experts: x and experts are {dtype}, but hidden features are fractions; cast "
            "them to floats, or multiply integers by grouped_matmul",
        )
        for dtype in ("bool", "int8")
    ),
    (
        {"group_sizes": np.array([2**32, 2])},
        ValueError,
        "apply_experts: group_sizes are int64 from 2 to 4294967296, of which int32 does not hold "
        "all; number them anew, or set jax_enable_x64",
    ),
    (
        {"preferred_element_type": "int32"},
        TypeError,
        "apply_experts: preferred_element_type=int32 cannot hold products of float32 operands; "
        "choose a float dtype, or None",
    ),
    (
        {"experts": WHOLE._replace(up=WHOLE.up[0])},
        ValueError,
        "apply_experts: experts.up must be [e, d, f], got local shape (4, 5); stack the experts' "
        "matrices",
    ),
    (
        {"experts": WHOLE._replace(down=WHOLE.up)},
        ValueError,
        "apply_experts: experts.down has local shape (2, 4, 5), but with experts.up of local shape "
        "(2, 4, 5) it must have (2, 5, 4)",
    ),
    (
        {"experts": WHOLE._replace(gate=None)},
        ValueError,
        "apply_experts: experts.gate_bias of local shape (2, 5) is given without experts.gate; "
        "give both or neither",
    ),
    (
        {"experts": {**WHOLE._asdict(), "w3": 0}},
        TypeError,
        "apply_experts: experts have no w3; the keys are up, down, gate, up_bias, gate_bias, "
        "down_bias",
    ),
    (
        {"experts": {"up": WHOLE.up}},
        TypeError,
        "apply_experts: experts lack down; the keys are up, down, gate, up_bias, gate_bias, "
        "down_bias",
    ),
    (
        {"activation": lambda h: h[:, :2]},
        ValueError,
        "apply_experts: activation returned local shape (1, 2) for (1, 5); it must keep the shape",
    ),
    (
        {
            "experts": WHOLE._replace(gate=None, gate_bias=None),
            "activation": GatedActivation(lambda gate, up: gate * up),
        },
        ValueError,
        "apply_experts: activation is a GatedActivation, but there is no gate; give a gate, or a "
        "function of one array",
    ),
    (
        {"activation": lambda h: h.astype(jnp.complex64)},
        TypeError,
        "apply_experts: activation returned complex64 for float32; cast it",
    ),
    (
        {"implementation": "dense"},
        ValueError,
        "apply_experts: implementation must be one of auto, ragged_dot, blocks, got 'dense'",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), ERRORS)
def test_errors(changed, error, message):
    x, experts, sizes, _ = make([3, 4], 8)
    given = {"x": x, "experts": experts, "group_sizes": sizes, **changed}
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        apply_experts(**given)


def test_errors_of_padding_and_of_what_is_no_mapping():
    with pytest.raises(ValueError, match=re.escape("pad_experts: shards=0 must be at least 1")):
        pad_experts(WHOLE, 0)
    message = "as_experts: experts must be Experts or a mapping, got list"
    with pytest.raises(TypeError, match=re.escape(message)):
        as_experts([1])
