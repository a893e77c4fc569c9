"""The layer against one device, over meshes, ways of dispatch, routings and capacities."""

import re
from functools import partial
from inspect import signature

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from layer_reference import choose, mlp, moe

from jaxpar import Axis, Quantized, make_mesh
from jaxpar.axis.axis import Ring
from jaxpar.choose.of_experts import choose_dispatch
from jaxpar.choose.problem import Problem
from jaxpar.layers import GatedActivation
from jaxpar.moe import (
    Routing,
    expert_capacity,
    limit_capacity,
    load_balance_loss,
    moe_layer,
    pad_experts,
    route,
    routed_moe_layer,
    router_z_loss,
    routing_statistics,
)
from jaxpar.moe._capacity import Bounds
from jaxpar.platforms.chips import chip_of

D, F = 6, 10


def parameters(
    tokens, count, *, gated=True, biased=False, shared=False, shared_gate=False, skew=0.0, seed=0
):
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
    if shared_gate:
        params["shared_gate"] = normal((D, 1))
    return params


def run(params, mesh, *, ep="ep", data=(), tp=None, fsdp=None, vma=True, masks=(None,), **how):
    """Yields results, statistics and gradients of the layer, and the cotangent these are for.

    One program, for one mask after the other.
    """
    how.setdefault("implementation", "blocks")  # "auto" traces what other platforms do as well
    mesh = make_mesh(mesh)
    ep_axes = ep.names if isinstance(ep, Axis) else (ep,) if isinstance(ep, str) else ep
    data_axes = (data,) if isinstance(data, str) else data
    size = int(np.prod([mesh.shape[name] for name in ep_axes]))
    replicated = tp is not None and how.get("sequence_dim", -2) is None
    rows = P((*data_axes, *ep_axes, *(() if tp is None or replicated else (tp,))))

    def spec(name, lead):
        hidden = {"up": 2, "gate": 2, "down": 1, "up_bias": 1, "gate_bias": 1}.get(name)
        rank = 2 if name.endswith("bias") else 3
        axes = [ep_axes] + [None] * (rank - 1)
        if tp is not None and hidden:
            axes[hidden] = tp
        if fsdp is not None:
            along = 1 if rank == 2 else how.get("fsdp_dim", 1)
            axes[along] = (*filter(None, [axes[along]]), fsdp)
        return P(*axes[1 - lead :])

    specs = {
        "tokens": rows,
        "router": P(),
        "experts": {name: spec(name, 1) for name in params["experts"]},
    }
    if "shared" in params:
        specs["shared"] = {name: spec(name, 0) for name in params["shared"]}
    if "shared_gate" in params:
        specs["shared_gate"] = P()

    if "router_bias" in how:
        how["router_bias"] = jnp.asarray(how["router_bias"])

    def layer(params, mask):
        more = {name: params[name] for name in ("shared", "shared_gate") if name in params}
        return routed_moe_layer(
            params["tokens"],
            params["router"],
            params["experts"],
            axis=ep,
            data_axis=data,
            tp_axis=tp,
            fsdp_axis=fsdp,
            mask=mask,
            **more,
            **how,
        )

    mapped = jax.shard_map(
        layer,
        mesh=mesh,
        in_specs=(specs, None if masks[0] is None else rows),
        out_specs=(rows, P()),
        check_vma=vma,
    )
    experts = jax.jit(pad_experts, static_argnums=1)(params["experts"], size)
    padded = params | {"experts": {k: w for k, w in experts._asdict().items() if w is not None}}

    def loss(params, cotangent, mask):
        out, statistics = mapped(params, mask)
        losses = statistics.load_balance_loss - 0.5 * statistics.router_z_loss
        return jnp.sum(out * cotangent, dtype=losses.dtype) + losses, (out, statistics)

    cotangent = np.cos(np.arange(params["tokens"].size).reshape(params["tokens"].shape))
    cotangent = cotangent.astype(params["tokens"].dtype)
    cotangent = np.where(np.isnan(params["tokens"]), params["tokens"], cotangent)
    gradients = jax.jit(jax.value_and_grad(loss, has_aux=True))
    count = len(params["experts"]["up"])
    for mask in masks:
        (_, (out, statistics)), grads = jax.device_get(gradients(padded, cotangent, mask))
        for name, w in grads["experts"].items():
            assert not np.any(w[count:]), f"padding of {name} has gradients"
        grads["experts"] = {name: w[:count] for name, w in grads["experts"].items()}
        yield out, statistics, grads, cotangent


@partial(jax.jit, static_argnames=("activation", "scoring", "normalize", "scale"))
def reference(params, plan, cotangent, activation, **how):
    def loss(params):
        out, found = moe(params, *plan, activation, **how)
        losses = found["load_balance_loss"] - 0.5 * found["router_z_loss"]
        return jnp.sum(out * cotangent) + losses, (out, found)

    return jax.value_and_grad(loss, has_aux=True)(params)


def check(params, mesh, *, top_k, devices, masks=(None,), tolerance=1e-10, wide=True, **how):
    """Compares values, statistics and all gradients; a NaN must be as if it was 0."""
    with jax.enable_x64(wide):
        found = list(run(params, mesh, top_k=top_k, masks=masks, **how))
    for mask, one in zip(masks, found, strict=True):
        compare(params, one, top_k, devices, mask, tolerance, how)


def compare(params, found, top_k, devices, mask, tolerance, how):
    factor, length = how.get("capacity_factor"), len(params["tokens"]) // devices
    count = params["router"].shape[1]
    capacity = None if factor is None else int(np.ceil(factor * length * top_k / count))
    usual = {"scoring": "softmax", "normalize": False, "scale": 1.0}
    given = {key: how.get(key, value) for key, value in usual.items()}

    out, statistics, grads, cotangent = found
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        exact = jax.tree.map(lambda x: np.nan_to_num(np.asarray(x, np.float64)), params)
        policy, bias = how.get("capacity_policy", "probability"), how.get("router_bias")
        plan = choose(exact, top_k, devices, capacity, policy, mask, bias, **given)

        cotangent = np.nan_to_num(np.asarray(cotangent, np.float64))
        activation = how.get("activation", jax.nn.silu)
        truth = reference(exact, plan, cotangent, activation, **given)
        (_, (wanted, found)), truth = jax.tree.map(np.asarray, truth)

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


@GatedActivation
def shifted(gate, up):  # as that of gpt-oss, not 0 where up is; and not where both are
    return (jnp.clip(up, -0.7, 0.7) + 1) * (gate * jax.nn.sigmoid(1.702 * gate) + 0.3)


MASK = np.arange(16) % 3 > 0
BIAS = np.array([0.1, 0, 0.3, 0, 0, -0.2])


# Of each dispatch with and without vma, an axis of features, of fsdp, of data, and chunks; each
# implementation, activation, precision and way to go, with one of these at least.


def test_experts_over_an_axis():
    """Masked tokens, and their cotangents, are as if they were 0; all in float32."""
    params = parameters(16, 10, skew=0.5, biased=True, shared=True, shared_gate=True)
    params = jax.tree.map(lambda x: x.astype("float32"), params)
    params["tokens"][~MASK] = np.nan
    how = {"dispatch": "all_gather", "implementation": "auto", "chunks": 2, "masks": [MASK]}
    how |= {"wide": False, "tolerance": 1e-5}
    check(params, "dp=2,ep=4", data="dp", top_k=3, devices=8, **how)


@pytest.mark.parametrize(
    ("dispatch", "mode", "chunks", "vma"),
    [("ragged", "auto", 1, True), ("all_gather", "bidirectional", 2, False)],
)
def test_hidden_features_over_another_axis(dispatch, mode, chunks, vma):
    """With an activation of gate and up; two chunks are of one token and of two."""
    params = parameters(24, 6, biased=True, shared=True, shared_gate=True)
    how = {"dispatch": dispatch, "activation": shifted, "chunks": chunks, "vma": vma}
    how |= {"ep": Axis("ep", mode=mode), "tp": "tp"}
    check(params, "tp=2,ep=4", top_k=2, devices=8, **how)


@pytest.mark.parametrize(
    ("dispatch", "vma", "implementation"),
    [("all_gather", True, "blocks"), ("ragged", False, "auto")],
)
def test_tokens_replicated_over_the_axis_of_features(dispatch, vma, implementation):
    params = parameters(16, 6, biased=True, shared=True, gated=False, shared_gate=True)
    how = {"tp": "tp", "sequence_dim": None, "capacity_factor": 0.7, "dispatch": dispatch}
    how |= {"capacity_policy": "choice"}
    how |= {"implementation": implementation, "vma": vma, "activation": jax.nn.gelu}
    check(params, "tp=2,ep=4", top_k=2, devices=4, **how)


@pytest.mark.parametrize(
    ("axis", "dispatch", "mode", "gated", "biased"),
    [(1, "ragged", "auto", True, True), (2, "all_gather", "unidirectional", False, False)],
)
def test_weights_over_fsdp(axis, dispatch, mode, gated, biased):
    params = parameters(16, 4, biased=biased, shared=True, gated=gated, shared_gate=True)
    how = {"fsdp": "fsdp", "data": "fsdp", "fsdp_dim": axis, "dispatch": dispatch}
    how |= {"ep": Axis("ep", mode=mode), "vma": axis == 1, "top_k": axis}
    check(params, "fsdp=2,ep=4", devices=8, **how)


def test_chunks_in_two_stages(monkeypatch):
    """Rows that nobody wrote are NaN, of which the activation makes what is not 0."""
    monkeypatch.setattr("jaxpar.choose.of_experts.traced_chip", lambda: chip_of("TPU v5"))
    params = parameters(8 * 3, 8, biased=True, shared=True)
    how = {"dispatch": "ragged", "chunks": 2, "implementation": "ragged_dot"}
    check(params, "tp=2,ep=4", tp="tp", top_k=2, devices=8, activation=shifted, **how)


@pytest.mark.parametrize(
    ("count", "top_k", "skew", "how"),
    [
        # Devices without experts, and nearly all tokens to one expert.
        (3, 2, 60.0, {"scoring": "selected_softmax", "vma": False}),
        (
            *(6, 6, 0.0),
            {"scoring": "sigmoid", "normalize": True, "scale": 2.5, "router_bias": BIAS}
            | {"capacity_factor": 9},
        ),
        (6, 2, 1.0, {"capacity_factor": 0}),
        (6, 2, 1.0, {"capacity_factor": 0.8, "capacity_policy": "choice", "vma": False}),
        (
            *(6, 2, 1.0),
            {"capacity_factor": 0.8, "capacity_policy": "position", "chunks": 2}
            | {"masks": (MASK, np.zeros(16, bool))},
        ),
    ],
)
def test_routings_over_axes_in_any_order(count, top_k, skew, how):
    params = parameters(16, count, skew=skew)
    if "masks" in how:
        params["tokens"][~MASK] = np.nan
    how = {"ep": ("b", "a"), "data": "c", "dispatch": "ragged"} | how
    check(params, "a=2,c=2,b=2", top_k=top_k, devices=8, **how)


def test_precision():
    params = parameters(16, 4, biased=True)
    params = jax.tree.map(lambda x: np.asarray(jnp.asarray(x, "bfloat16")), params)
    params["router"] = params["router"].astype(np.float32)
    how = {"top_k": 2, "devices": 8, "wide": False, "dispatch": "ragged"}
    check(params, "ep=8", tolerance=4e-2, **how)


def test_overflow_is_counted_and_only_loses_what_overflows():
    params = parameters(64, 8, skew=1.0)
    how = {"scoring": "softmax", "normalize": False, "scale": 1.0}
    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        plan = choose(params, 2, 8, None, None, None, None, **how)
        wanted = np.asarray(jax.jit(lambda params: moe(params, *plan, **how)[0])(params))
    ((out, statistics, grads, _),) = run(
        params, "ep=8", top_k=2, dispatch="ragged", buffer_factor=1.0
    )
    assert 0 < int(statistics.overflow) < 128
    assert all(np.all(np.isfinite(g)) for g in jax.tree.leaves(grads))
    changed = np.any(np.abs(out - wanted) > 1e-5, axis=1)
    assert 0 < changed.sum() <= int(statistics.overflow)


def test_balanced_loads_fit_into_buffers_of_their_size():
    for experts, devices in ((8, 4), (5, 4), (9, 8), (3, 8)):
        bounds = Bounds(devices, experts, -(-experts // devices), 1, None, 1.0)
        rows = bounds.rows(8 * experts)
        assert rows >= 8 * devices * bounds.local
        assert bounds.pairs(8 * experts, devices, rows) >= 8 * devices * bounds.local


def split(layer, params, *, mesh="ep=8", vma=True, **how):
    """Traces a layer of tokens, router and experts, for what it returns first."""
    specs = P("ep"), P(), P("ep")
    return jax.shard_map(
        lambda *operands: layer(*operands, axis="ep", **how)[0],
        mesh=make_mesh(mesh),
        in_specs=specs,
        out_specs=P("ep"),
        check_vma=vma,
    )(*(params[name] for name in ("tokens", "router", "experts")))


def test_a_routing_of_ones_own_is_what_the_router_makes():
    """Also with a capacity, which bounds the buffers, and with tokens that are masked."""
    params = jax.tree.map(jnp.asarray, parameters(32, 8, skew=1.0))
    mask = jnp.arange(4) % 3 > 0
    how = {"dispatch": "ragged", "implementation": "blocks"}

    def by_hand(tokens, router, experts, axis):
        routing = route(jnp.where(mask[:, None], tokens, 0) @ router, 2, mask=mask, normalize=True)
        capacity = expert_capacity(len(tokens), 2, 8, 0.5)
        routing = limit_capacity(routing, capacity, policy="position")
        return moe_layer(tokens, routing, experts, axis, capacity=capacity, **how)

    given = {"top_k": 2, "mask": mask.tolist(), "normalize": True}
    given |= {"capacity_factor": 0.5, "capacity_policy": "position", **how}

    @jax.jit
    def both(params):
        return split(by_hand, params), split(routed_moe_layer, params, **given)

    found, wanted = both(params)
    assert np.any(wanted)
    np.testing.assert_array_equal(found, wanted)


def test_any_router():
    """Experts choose their tokens here: of some tokens none, which have shared experts only."""
    params = jax.tree.map(jnp.asarray, parameters(32, 8, shared=True))
    w = params["shared"]

    def layer(tokens, router, experts, axis):
        scores = jax.nn.sigmoid(tokens @ router)  # [t, E]
        best = jax.nn.one_hot(jnp.argmax(scores, axis=0), len(tokens), dtype=bool).T  # [t, E]
        chosen = jnp.where(best, jnp.arange(8, dtype="int32"), -1)
        logits = jnp.zeros_like(scores)
        routing = Routing(chosen, scores, best, scores, logits)
        return moe_layer(tokens, routing, experts, axis, shared=w, implementation="blocks")

    found = jax.jit(lambda params: split(layer, params))(params)
    wanted = []
    for tokens in np.split(np.asarray(params["tokens"]), 8):
        scores = np.asarray(jax.nn.sigmoid(jnp.asarray(tokens @ params["router"])))
        out = np.asarray(mlp(tokens, w, jax.nn.silu)).copy()
        for expert in range(8):
            token = np.argmax(scores[:, expert])
            own = {name: x[expert] for name, x in params["experts"].items()}
            out[token] += scores[token, expert] * np.asarray(mlp(tokens[token], own, jax.nn.silu))
        wanted.append(out)
    np.testing.assert_allclose(found, np.concatenate(wanted), rtol=1e-4, atol=1e-4)


def test_help_shows_all_options():
    shown = signature(routed_moe_layer).parameters
    own = {"routing", "capacity"}
    assert set(signature(moe_layer).parameters) - own <= set(shown)
    assert not [p for p in shown.values() if p.kind is p.VAR_KEYWORD]
    assert {"top_k", "router_bias", "mask", "capacity_factor"} <= set(shown)


def test_auto():
    def choice(*sizes, kind=""):
        needed, ring = Bounds(*sizes, None, None).needed, Ring(("x",), size=sizes[0])
        return choose_dispatch(Problem("experts", ring, needed=needed, chip=chip_of(kind)))

    deepseek, mixtral = (16, 256, 16, 8), (16, 8, 1, 2)
    assert choice(4, 16, 4, 2) == choice(*deepseek) == choice(*mixtral) == "ragged"
    assert choice(4, 16, 4, 8) == "all_gather"
    assert choice(*deepseek, kind="TPU v6 lite") == "all_gather"
    assert choice(*mixtral, kind="TPU v6 lite") == "ragged"
    assert choice(*deepseek, kind="TPU v5") == "ragged"


@pytest.mark.parametrize(
    ("devices", "count", "top_k", "dispatch"),
    [
        (8, 256, 8, "ragged"),  # DeepSeek-V3: 3% ahead of an all-gather on H100
        (8, 8, 2, "ragged"),  # Mixtral
        (8, 64, 12, "all_gather"),  # 6.6 of 8 devices are needed, and 8 copies are written
        (2, 64, 8, "all_gather"),
        (64, 256, 8, "ragged"),  # over the network
    ],
)
def test_auto_behind_a_switch(devices, count, top_k, dispatch):
    bounds = Bounds(devices, count, count // devices, top_k, None, None)
    ring, shapes = Ring(("x",), size=devices), ((16, 8), (16, top_k))
    for kind in ("NVIDIA H100", "NVIDIA B200"):
        problem = Problem("experts", ring, shapes, needed=bounds.needed, chip=chip_of(kind))
        assert choose_dispatch(problem) == dispatch


ERRORS = {
    "chunks=0 must be at least 1": {"chunks": 0},
    "dispatch must be one of ragged, all_gather, auto, got 'dense'": {"dispatch": "dense"},
    "buffer_factor=-1 must be at least 0": {"buffer_factor": -1},
    "top_k=9 must be at least 1": {"top_k": 9},
    "buffer_factor=inf must be finite; None is for buffers": {"buffer_factor": float("inf")},
    "capacity_policy must be one of probability, choice, position": {"capacity_policy": "nope"},
    r"shared_gate of local shape \(6, 1\) is given without": {"shared_gate": jnp.ones((D, 1))},
    "data_axis has wire_dtype=bfloat16, which has no effect here": {
        "data": Axis("dp", wire_dtype="bfloat16")
    },
    "data_axis has mode=bidirectional, which": {"data": Axis("dp", mode="bidirectional")},
    r"router_bias has local shape \(3,\), but needs .* 8 experts": {"router_bias": jnp.zeros(3)},
    "router_bias must be floats, got int32": {"router_bias": jnp.zeros(8, "int32")},
    "groups=3 does not divide the 8 experts": {"groups": 3, "top_groups": 1},
    "scores_per_group=5 must be": {"groups": 2, "top_groups": 1, "scores_per_group": 5},
    "axis and tp_axis both have the axis 'ep'": {"tp": "ep"},
    "wire_dtype=int32 cannot carry": {"ep": Axis("ep", wire_dtype="int32")},
    "fsdp_dim=0 must be 1 or 2": {"fsdp": "dp", "fsdp_dim": 0},
    r"axis 'x' is not bound: the axes bound here are": {"tp": "x"},
}


@pytest.mark.parametrize("message", ERRORS)
def test_options_that_cannot_be(message):
    how = {"top_k": 2, "data": "dp"} | ERRORS[message]
    with pytest.raises((ValueError, TypeError), match=f"^routed_moe_layer: .*{message}"):
        call(parameters(16, 8), **how)


def call(params, *, top_k, ep="ep", tp=None, fsdp=None, data="dp", **how):
    """Traces the layer alone, with weights that are whole but for experts."""

    def layer(tokens, router, experts):
        names = {"axis": ep, "tp_axis": tp, "fsdp_axis": fsdp}
        operands = tokens, router, experts
        return routed_moe_layer(*operands, top_k=top_k, data_axis=data, **names, **how)

    specs = P(("dp", "ep")), P(), P("ep")
    mesh, out_specs = make_mesh("dp=2,ep=4"), (specs[0], P())
    mapped = jax.shard_map(layer, mesh=mesh, in_specs=specs, out_specs=out_specs)
    operands = params["tokens"], params["router"], params["experts"]
    return jax.eval_shape(mapped, *jax.tree.map(jnp.asarray, operands))


def test_activations_with_weights_of_their_own():
    def traced(scale, **how):
        return call(parameters(16, 8), top_k=2, activation=lambda x: x * scale, **how)

    for dispatch in ("ragged", "all_gather"):
        mapped = jax.eval_shape(partial(traced, dispatch=dispatch), jnp.float32(1))
        assert mapped[0].shape == (16, D)


def test_shapes_that_do_not_fit():
    params = parameters(16, 8)
    wrong = params | {"router": np.ones((D, 10))}
    with pytest.raises(
        ValueError, match=r"experts\.up has local shape \(2, 6, 10\).* ceil\(10 / 4"
    ):
        call(wrong, top_k=2)
    for shape in ((D,), (D, 0), (D + 1, 0)):
        text = f"router has local shape {shape}, but must be [d, E] = [6, E] for tokens of local"
        with pytest.raises(ValueError, match=re.escape(text)):
            call(params | {"router": np.ones(shape)}, top_k=2)
    wrong = params | {"router": np.ones((D + 1, 8))}
    with pytest.raises(ValueError, match=r"router has local shape \(7, 8\), but must be \[d, E\]"):
        call(wrong, top_k=2)
    experts = params["experts"] | {"down": np.ones((8, F + 1, D))}
    with pytest.raises(ValueError, match=r"experts\.down has local shape \(2, 11, 6\), but with"):
        call(params | {"experts": experts}, top_k=2)
    experts = params["experts"] | {"down_bias": np.ones((8, D + 1))}
    with pytest.raises(ValueError, match=r"experts\.down_bias has local shape \(2, 7\)"):
        call(params | {"experts": experts}, top_k=2)
    with pytest.raises(TypeError, match="experts have no middle"):
        call(params | {"experts": params["experts"] | {"middle": np.ones(8)}}, top_k=2)
    with pytest.raises(ValueError, match=r"tokens must be \[\.\.\., d\]"):
        call(params | {"tokens": np.ones(16)}, top_k=2)
    with pytest.raises(TypeError, match="tokens must be floats, got int32; embed them first"):
        call(params | {"tokens": np.ones((16, D), np.int32)}, top_k=2)
    with pytest.raises(
        TypeError, match=r"tokens are float32.* and experts.up .*; cast one of them"
    ):
        call(params | {"experts": experts | {"up": jnp.ones((8, D, F), "bfloat16")}}, top_k=2)
    for name in ("experts", "shared"):
        lead = (8,) if name == "experts" else ()
        weights = {"up": jnp.ones((*lead, D, F)), "down": jnp.ones((*lead, F, D))}
        weights["gate_bias"] = jnp.ones((*lead, F))
        given = {"experts": params["experts"], "shared": None} | {name: weights}
        text = (
            rf"{name}.gate_bias of local shape \(.*10,?\) is given without {name}.gate; give both"
        )
        with pytest.raises(ValueError, match=text):
            call(params | {"experts": given["experts"]}, top_k=2, shared=given["shared"])
    shared = {"up": jnp.ones((2, D, F)), "down": jnp.ones((2, F, D))}
    with pytest.raises(
        ValueError, match=r"shared.up has .* but must have 2 dimensions; shared exp"
    ):
        call(params, top_k=2, shared=shared)
    shared = {"up": jnp.ones((D, F)), "down": jnp.ones((F, D))}
    for shape in ((D,), (1, D), (D, 2), (D, 0)):
        gate = {"shared": shared, "shared_gate": jnp.ones(shape)}
        text = rf"shared_gate has local shape {shape}, but must be [d, 1] = [6, 1] for tokens of"
        with pytest.raises(ValueError, match=re.escape(text)):
            call(params, top_k=2, **gate)
    gate = {"shared": shared, "shared_gate": jnp.ones((D, 1), "int32")}
    with pytest.raises(TypeError, match="shared_gate must be floats, got int32; cast it"):
        call(params, top_k=2, **gate)
    text = r"mask has local shape \(3,\), but tokens of local shape \(2, 6\) need \(2,\)"
    with pytest.raises(ValueError, match=text):
        call(params, top_k=2, mask=jnp.ones(3, bool))
    with pytest.raises(TypeError, match=r"mask must be bool, got int32\[2\]; compare it first"):
        call(params, top_k=2, mask=jnp.ones(2, "int32"))


@pytest.mark.parametrize("kind", ["experts", "shared"])
def test_quantized_experts_are_dequantized_first(kind):
    """As the error says; they have one scale for each expert."""
    params, lead = parameters(16, 8), (8,) if kind == "experts" else ()
    values = jnp.ones((*lead, D, F), "int8")
    up = Quantized(values, jnp.ones((*lead, 1, 1)), dtype="float32")
    weights = {"up": up, "down": jnp.ones((*lead, F, D))}

    def traced(**weights):
        shared = weights if kind == "shared" else None
        experts = weights if kind == "experts" else params["experts"]
        return call(params | {"experts": experts}, top_k=2, shared=shared)[0]

    shape = "[2, 6, 10]" if kind == "experts" else "[6, 10]"
    text = f"{kind}.up is Quantized{shape}, which only an operand that is gathered may be; pass "
    with pytest.raises(TypeError, match=re.escape(text + f"{kind}.up.dequantized()")):
        traced(**weights)
    assert traced(**weights | {"up": up.dequantized()}).shape == (16, D)


def routing_of(tokens, known=8, k=2):
    zeros = jnp.zeros((tokens, known), jnp.float32)
    choices = jnp.zeros((tokens, k), "int32")
    return Routing(choices, jnp.ones((tokens, k)), choices == 0, zeros, zeros)


@pytest.mark.parametrize(
    ("error", "message", "routing"),
    [
        (TypeError, "routing must be a Routing, got ArrayImpl; make one by route, or call routed",
         jnp.zeros((D, 8))),
        (ValueError, r"routing.experts has local shape \(3, 2\), but must have 4 rows",
         routing_of(3)),
        (ValueError, r"routing.weights has local shape \(4, 1\)",
         routing_of(4)._replace(weights=jnp.ones((4, 1)))),
        (TypeError, "routing.weights is complex64, but must be floating",
         routing_of(4)._replace(weights=jnp.ones((4, 2), "complex64"))),
        (ValueError, r"routing.mask has local shape \(3,\)",
         routing_of(4)._replace(mask=jnp.ones(3, bool))),
        (TypeError, "routing.mask is int32, but must be bool",
         routing_of(4)._replace(mask=jnp.ones(4, "int32"))),
    ],
)  # fmt: skip
def test_routings_that_do_not_fit(error, message, routing):
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parameters(32, 8))
    with pytest.raises(error, match=f"^moe_layer: {message}"):
        jax.eval_shape(lambda: split(lambda x, _, w, axis: moe_layer(x, routing, w, axis), params))


def test_a_routing_of_lists():
    """As arrays, wherever a routing is taken."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parameters(32, 8))
    listed = Routing([[0, 1], [1, -1], [0, 1], [-1, -1]], [[0.5, 0.5], [1.0, 0.0]] * 2,
                     [[True, True], [True, False], [True, True], [False, False]],
                     [[0.125] * 8] * 4, [[0.0] * 8] * 4, [True, True, True, False])  # fmt: skip
    arrays = jax.tree.map(jnp.asarray, listed, is_leaf=lambda x: isinstance(x, list))

    def layer(routing):
        call = partial(moe_layer, implementation="blocks")
        return split(lambda x, _, w, axis: call(x, routing, w, axis), params)

    @jax.jit
    def run():
        limited = limit_capacity(listed, 2)
        return layer(listed), layer(arrays), limited.kept, routing_statistics(limited).dropped

    found, wanted, kept, dropped = run()
    np.testing.assert_array_equal(found, wanted)
    assert np.sum(kept) == 4
    assert dropped == 1
    losses = jax.eval_shape(lambda: (load_balance_loss(listed), router_z_loss(listed)))
    assert losses[0].shape == losses[1].shape == ()


@pytest.mark.parametrize("function", [load_balance_loss, router_z_loss, routing_statistics])
def test_only_a_routing_has_statistics(function):
    with pytest.raises(TypeError, match=f"^{function.__name__}: routing must be a Routing, got t"):
        function((1, 2))


def test_what_all_devices_have_alike():
    """Tokens of no device's own would be sent and computed n times; experts would be others."""
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), parameters(32, 8))
    replicated, ones = params["tokens"][:4], {"up": (1, D, F), "down": (1, F, D)}

    def trace(vma=True, mesh="ep=8", **changed):
        def layer(tokens, router, experts, axis):
            made = {"tokens": tokens, "experts": experts}
            made |= {name: make() for name, make in changed.items() if callable(make)}
            more = {name: w for name, w in changed.items() if not callable(w)}
            more |= {"implementation": "blocks"}  # "auto" traces what other platforms do as well
            return routed_moe_layer(made["tokens"], router, made["experts"], axis, top_k=2, **more)

        return jax.eval_shape(lambda: split(layer, params, mesh=mesh, vma=vma))

    def constants(typed):
        made = {name: jnp.ones(shape) for name, shape in ones.items()}
        return jax.lax.pcast(made, ("ep",), to="varying") if typed else made

    with pytest.raises(ValueError, match=(
        r"^routed_moe_layer: tokens of local shape \(4, 6\) is replicated over \['ep'\], but each "
        r"device of axis 'ep' \(8\) needs rows of its own; shard it in in_specs, or cut it"
    )):  # fmt: skip
        trace(tokens=lambda: replicated)
    assert trace(tokens=lambda: replicated, vma=False).shape == (32, D)
    with pytest.raises(ValueError, match=r"'tp' .* rows of its own; .* sequence_dim=None if all"):
        trace(mesh="tp=2,ep=4", tp_axis="tp")
    varying = r"tokens of local shape .* vary over \['tp'\], but every device of .* needs the same"
    with pytest.raises(ValueError, match=varying):
        trace(
            mesh="tp=2,ep=4",
            tp_axis="tp",
            sequence_dim=None,
            tokens=lambda: jax.lax.pcast(replicated, ("tp", "ep"), to="varying"),
        )
    with pytest.raises(ValueError, match=r"experts.up of local .* experts of its own; .* say so "
                       r"by jax.lax.pcast\(..., \('ep',\), to='varying'\)"):  # fmt: skip
        trace(experts=lambda: constants(False))
    assert trace(experts=lambda: constants(True)).shape == (32, D)


@pytest.mark.parametrize("name", ["experts", "shared"])
def test_hidden_features_that_every_device_has(name):
    """Each would be counted as often as there are devices."""
    experts = {"up": P("ep", None, "tp"), "down": P("ep", "tp")}
    shared = {"up": P(None, "tp"), "down": P("tp")}
    specs = {"experts": experts, "shared": shared}
    whole = {"up": P("ep"), "down": P("ep")} if name == "experts" else {"up": P(), "down": P()}
    wrong = specs | {name: whole}
    shapes = {
        "experts": {"up": (2, D, 4), "down": (2, 4, D)},
        "shared": {"up": (D, 4), "down": (4, D)},
    }
    weights = {key: {w: jnp.ones(s) for w, s in shapes[key].items()} for key in shapes}

    def trace(specs):
        def layer(tokens, weights):
            given = weights["experts"], "ep"
            router, more = jnp.eye(D, 2), {"shared": weights["shared"], "top_k": 1}
            return routed_moe_layer(
                tokens, router, *given, tp_axis="tp", sequence_dim=None, **more
            )[0]

        mapped = jax.shard_map(
            layer, mesh=make_mesh("ep=2,tp=2", devices=jax.devices()[:4]),
            in_specs=(P("ep"), specs), out_specs=P("ep"),
        )  # fmt: skip
        return jax.eval_shape(mapped, jnp.ones((4, D)), weights)

    assert trace(specs).shape == (4, D)
    with pytest.raises(ValueError, match=(
        rf"{name}.up of local shape .* is replicated over \['tp'\], but each device of axis 'tp' "
        r"\(2\) needs features of its own; shard its hidden features over tp_axis"
    )):  # fmt: skip
        trace(wrong)


def test_a_router_of_complex_numbers():
    params = parameters(16, 8)
    router = jnp.asarray(params["router"], jnp.complex64)
    with pytest.raises(TypeError, match=r"^routed_moe_layer: router must be floats, got complex64"):
        jax.eval_shape(lambda: routed_moe_layer(jnp.zeros((2, D)), router, {}, "ep", top_k=2))


def test_more_choices_than_experts():
    """Places that are not used are -1, however many there are."""
    tokens = np.ones((4, D), np.float32)
    weights = {"up": jnp.ones((1, D, 3)), "down": jnp.ones((1, 3, D))}

    def run(tokens):
        routing = routing_of(len(tokens), known=1, k=2)
        choices = jnp.array([[0, -1]] * len(tokens), "int32")
        routing = routing._replace(experts=choices, kept=choices == 0)
        ways = "ragged", "all_gather", "auto"
        return [moe_layer(tokens, routing, weights, "ep", dispatch=way)[0] for way in ways]

    mapped = jax.shard_map(
        run,
        mesh=make_mesh("ep=1", devices=jax.devices()[:1]),
        in_specs=P("ep"),
        out_specs=P("ep"),
        check_vma=False,
    )
    wanted = 3 * D * jax.nn.silu(jnp.float32(D)) / D
    for found in jax.jit(mapped)(tokens):
        np.testing.assert_allclose(found, np.full((4, D), wanted), rtol=1e-6)


def test_buffers_of_any_factor_have_at_most_what_the_worst_case_needs():
    worst, huge = (Bounds(4, 8, 2, 2, None, factor) for factor in (None, 1e308))
    assert (huge.rows(16), huge.pairs(16, 4, 64)) == (worst.rows(16), worst.pairs(16, 4, 64))


def test_a_capacity_factor_that_is_not_finite():
    with pytest.raises(ValueError, match=r"^routed_moe_layer: capacity_factor=inf must be finite"):
        routed_moe_layer(
            *(jnp.ones((4, D)), jnp.ones((D, 8)), {}, "ep"), top_k=2, capacity_factor=float("inf")
        )


def test_unknown_options_of_the_routed_layer_are_named():
    text = "no argument 'capacity'; did you mean capacity_policy or capacity_factor?"
    with pytest.raises(TypeError, match=f"^routed_moe_layer: {re.escape(text)}"):
        routed_moe_layer(jnp.ones((4, D)), jnp.ones((D, 8)), {}, "ep", top_k=2, capacity=2)
