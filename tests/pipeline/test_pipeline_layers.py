"""Layers in the stages of a pipeline, against one device, in float64."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from layer_reference import moe
from staged import (
    HIDDEN,
    SEQUENCE,
    WIDTH,
    WORDS,
    Model,
    by_microbatch,
    check,
    layers_of,
    mlp,
    normal,
    normed,
    pipelined,
    summed,
)

import jaxpar
from jaxpar import Axis, all_gather_matmul, matmul_reduce_scatter
from jaxpar.layers import (
    fsdp_gather,
    fsdp_scan,
    gated_mlp,
    parallel_attention,
    ring_attention,
    zigzag_order,
)
from jaxpar.moe import moe_layer, route
from jaxpar.testing import poisoned_rows

HEADS, SIZE, EXPERTS = 4, 2, 8


@pytest.fixture(autouse=True)
def float64():
    """Memory that is read before it is written shows as NaN."""
    with jax.enable_x64(True), poisoned_rows():
        yield


# -- weights over fsdp ----------------------------------------------------------------------------


class Gathered(Model):
    """Weights are sharded over fsdp, too; a stage gathers them at once."""

    batch_axes = ("dp", "fsdp")
    specs: ClassVar = {"scale": P("pp"), "up": P("pp", "fsdp", "tp"), "down": P("pp", "tp", "fsdp")}
    batch_spec = P(("dp", "fsdp"))

    def stage(self, w, x, batch, axes=()):
        if axes:
            w = fsdp_gather(w, "fsdp", dim={"scale": None, "up": 1, "down": 2})
        return super().stage(w, x, batch, axes)


class GatheredByLayer(Gathered):
    """A stage gathers the weights of one layer after the other, and again for its gradients."""

    of_stage = 2

    def stage(self, w, x, batch, axes=()):
        if not axes:
            return Model.stage(self, w, x, batch)

        def layer(w, x):
            return x + summed(mlp(w, x), axes)

        return fsdp_scan(layer, w, x, "fsdp", dim={"scale": None, "up": 0, "down": 1})


@pytest.mark.parametrize(
    ("kind", "axes", "check_vma"),
    [
        (Gathered, "pp=2,fsdp=2,tp=2", True),
        (GatheredByLayer, "pp=2,fsdp=2,tp=2", False),
        (GatheredByLayer, "dp=2,pp=2,fsdp=2", True),
    ],
)
def test_fsdp(kind, axes, check_vma):
    check(kind, axes, 4, 2, check_vma)


def test_layers_of_zeros():
    """Seven layers over eight stages: the last one returns what it is given, and stays zero."""
    model, mesh = Model(7), jaxpar.make_mesh("pp=4,tp=2")
    batch = model.batch(4)
    cut = jax.tree.map(lambda x: by_microbatch(1, 2, x), batch)
    loss, wanted = jax.jit(jax.value_and_grad(model.on_one_device))(
        (model.layers, model.shared), cut
    )
    model.layers = {
        name: np.concatenate([w, np.zeros_like(w[:1])]) for name, w in model.layers.items()
    }
    found, (of_layers, of_shared) = pipelined(model, mesh, 2, 2, True, batch)
    np.testing.assert_allclose(found, loss, rtol=1e-12)
    assert not any(g[7:].any() for g in of_layers.values())
    of_layers = {name: g[:7] for name, g in of_layers.items()}
    for one, right in zip(
        jax.tree.leaves((of_layers, of_shared)), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-10 * np.abs(right).max())


# -- experts --------------------------------------------------------------------------------------


class Routed(Model):
    """Experts and tokens are sharded over ep. The loss of balance travels beside the tokens."""

    batch_axes = ("dp", "ep")
    specs: ClassVar = {
        "scale": P("pp"),
        "router": P("pp"),
        "up": P("pp", "ep", None, "tp"),
        "down": P("pp", "ep", "tp"),
    }
    batch_spec = P(("dp", "ep"))
    dispatch = "ragged"

    def __init__(self, stages):
        super().__init__(stages)
        self.layers |= {
            "router": normal(6, stages, WIDTH, EXPERTS),
            "up": normal(7, stages, EXPERTS, WIDTH, HIDDEN),
            "down": normal(8, stages, EXPERTS, HIDDEN, WIDTH) / 4,
        }

    def first(self, shared, batch, axes=()):
        return super().first(shared, batch), jnp.zeros(())

    def stage(self, w, x, batch, axes=()):
        x, total = x
        for layer in layers_of(w):
            h = normed(x, layer["scale"]).reshape(-1, WIDTH)
            y, loss = self.experts(layer, h, axes)
            x, total = x + y.reshape(x.shape), total + loss
        return x, total

    def experts(self, w, h, axes):
        routing = route(h @ w["router"], 2)
        experts = {name: w[name] for name in ("up", "down")}
        if not axes:
            given = {"tokens": h, "router": w["router"], "experts": experts}
            how = {"scoring": "softmax", "normalize": False, "scale": 1.0}
            with jax.numpy_dtype_promotion("standard"):
                y, statistics = moe(given, routing.experts, routing.experts >= 0, **how)
            return y, statistics["load_balance_loss"]
        how = {"dispatch": self.dispatch, "implementation": "blocks"}
        if "tp" in axes:
            how |= {"tp_axis": "tp", "sequence_dim": None}
        y, statistics = moe_layer(h, routing, experts, "ep", **how)
        return y, statistics.load_balance_loss

    def last(self, shared, x, batch, axes=()):
        # The loss of balance is of the tokens of all devices over ep.
        x, balance = x
        loss, weight = super().last(shared, x, batch, axes)
        return loss + balance / (lax.axis_size("ep") if axes else 1), weight


class RoutedByGathers(Routed):
    dispatch = "all_gather"


@pytest.mark.parametrize(
    ("kind", "axes", "virtual", "check_vma"),
    [
        (Routed, "pp=2,ep=2,tp=2", 2, True),
        (RoutedByGathers, "pp=2,ep=4", 1, False),
    ],
)
def test_experts(kind, axes, virtual, check_vma):
    check(kind, axes, 4, virtual, check_vma)


def attention(q, k, v):
    scores = jnp.einsum("bqhe,bkhe->bhqk", q, k) / jnp.sqrt(float(q.shape[-1]))
    seen = jnp.tril(jnp.ones(scores.shape[-2:], bool))
    weights = jax.nn.softmax(jnp.where(seen, scores, -jnp.inf))
    return jnp.einsum("bhqk,bkhe->bqhe", weights, v)


# -- the sequence over cp -------------------------------------------------------------------------


class Attending(Model):
    """Attention whose sequences are sharded over cp."""

    batch_axes = ("dp", "cp")
    specs: ClassVar = {
        "scale": P("pp"),
        "qkv": P("pp", None, None, "tp"),
        "out": P("pp", "tp"),
    }
    batch_spec = P("dp", "cp")
    order = "contiguous"

    def __init__(self, stages):
        super().__init__(stages)
        self.layers = {
            "scale": self.layers["scale"],
            "qkv": normal(6, stages, WIDTH, 3, HEADS, SIZE),
            "out": normal(7, stages, HEADS, SIZE, WIDTH) / 4,
        }

    def stage(self, w, x, batch, axes=()):
        for layer in layers_of(w):
            q, k, v = jnp.einsum("bsd,dxhe->xbshe", normed(x, layer["scale"]), layer["qkv"])
            y = ring_attention(q, k, v, "cp", order=self.order) if axes else attention(q, k, v)
            x += summed(jnp.einsum("bshe,hed->bsd", y, layer["out"]), axes)
        return x


class Zigzag(Attending):
    order = "zigzag"

    def laid_out(self, batch, mesh):
        order = zigzag_order(SEQUENCE, mesh.shape["cp"])
        return {name: x[:, order] for name, x in batch.items()}


@pytest.mark.parametrize(
    ("kind", "axes", "virtual", "check_vma"),
    [(Zigzag, "pp=2,cp=4", 2, True), (Attending, "pp=2,cp=2,tp=2", 1, False)],
)
def test_ring_attention(kind, axes, virtual, check_vma):
    check(kind, axes, 3, virtual, check_vma)


# -- overlapped matmuls, the sequence over tp -----------------------------------------------------


class Overlapped(Model):
    """Stages of some layers, of whose matmuls each has an algorithm of its own."""

    of_stage = 2
    batch_axes = ("tp",)
    batch_spec = P(None, "tp")
    modes = "naive", "naive"

    def stage(self, w, x, batch, axes=()):
        for layer, mode in zip(layers_of(w), self.modes, strict=True):
            h, axis = normed(x, layer["scale"]), Axis("tp", mode=mode)
            if axes:
                h = jnp.tanh(all_gather_matmul(h, layer["up"], axis))
                x += matmul_reduce_scatter(h, layer["down"], axis)
            else:
                x += jnp.tanh(h @ layer["up"]) @ layer["down"]
        return x


class Block(Overlapped):
    """Attention, and a gated MLP, by the layers of `jaxpar.layers`."""

    specs: ClassVar = {
        **dict.fromkeys(("scale",), P("pp")),
        **dict.fromkeys(("q", "k", "v", "gate", "up"), P("pp", None, "tp")),
        **dict.fromkeys(("out", "down"), P("pp", "tp")),
    }

    def __init__(self, stages):
        super().__init__(stages)
        count = stages * self.of_stage
        wide = {name: normal(6, count, WIDTH, HEADS * SIZE) for name in "qkv"}
        self.layers |= {
            **wide,
            "gate": normal(7, count, WIDTH, HIDDEN),
            "out": normal(8, count, HEADS * SIZE, WIDTH) / 4,
        }

    def stage(self, w, x, batch, axes=()):
        for layer, mode in zip(layers_of(w), self.modes, strict=True):
            *wide, out = (layer[name] for name in ("q", "k", "v", "out"))
            gated = [layer[name] for name in ("gate", "up", "down")]
            h = normed(x, layer["scale"])
            if axes:
                axis, heads = Axis("tp", mode=mode), {"heads": HEADS, "kv_heads": HEADS}
                x += parallel_attention(h, *wide, out, axis, attention, **heads)
                x += gated_mlp(normed(x, layer["scale"]), *gated, axis)
                continue
            q, k, v = ((h @ one).reshape(*h.shape[:2], HEADS, SIZE) for one in wide)
            x += attention(q, k, v).reshape(*h.shape[:2], -1) @ out
            h, (gate, up, down) = normed(x, layer["scale"]), gated
            x += (jax.nn.silu(h @ gate) * (h @ up)) @ down
        return x


def of_modes(kind, *modes):
    return type(kind.__name__, (kind,), {"modes": modes, "of_stage": len(modes)})


@pytest.mark.parametrize(
    ("kind", "modes", "check_vma"),
    [
        (Overlapped, ("unidirectional", "bidirectional"), True),
        (Overlapped, ("chunked-2", "multi-ring", "naive", "auto"), False),
        (Block, ("bidirectional", "stationary"), True),
    ],
)
def test_overlapped_matmuls(kind, modes, check_vma):
    check(of_modes(kind, *modes), "pp=2,tp=4", 3, 1, check_vma)


# -- tokens that do not count ---------------------------------------------------------------------


def test_padded_tokens():
    """None counts in a microbatch, in a device's part of another one, or on a device over dp."""
    microbatches, rows = 5, 2
    labels = np.random.default_rng(1).integers(0, WORDS, (2, microbatches, rows, SEQUENCE))
    labels[:, 1] = 0
    labels[:, 2, :, SEQUENCE // 2 :] = 0
    labels[:, 3, 1, 2:] = 0
    labels[1] = 0
    batch = {"labels": labels.reshape(-1, SEQUENCE)}
    check(Model, "pp=2,dp=2,tp=2", microbatches, 2, True, rows=rows, batch=batch)


def test_no_token_counts():
    mesh, model = jaxpar.make_mesh("pp=4,dp=2"), Model(4)
    batch = {**model.batch(16), "labels": np.zeros((16, SEQUENCE), int)}
    found = pipelined(model, mesh, 4, 1, False, batch)
    for leaf in jax.tree.leaves(found):
        np.testing.assert_array_equal(leaf, 0)


# -- dtypes ---------------------------------------------------------------------------------------


class Mixed(Model):
    """MLPs in bfloat16, whose sum is in float32 within a stage.

    Attributes:
      kept: the dtype of parameters.
      sent: the dtype of what travels between stages.
    """

    kept, sent = "float32", "bfloat16"

    def __init__(self, stages):
        super().__init__(stages)
        params = self.layers, self.shared
        self.layers, self.shared = jax.tree.map(lambda w: w.astype(self.kept), params)

    def first(self, shared, batch, axes=()):
        return super().first(shared, batch).astype(self.sent)

    def stage(self, w, x, batch, axes=()):
        total = x.astype("float32")
        for layer in layers_of(w):
            narrow = {name: leaf.astype("bfloat16") for name, leaf in layer.items()}
            y = mlp(narrow, total.astype("bfloat16"))
            total += summed(y.astype("float32"), axes)
        return total.astype(self.sent)

    def losses(self, shared, x, labels, axes):
        wide = jax.tree.map(lambda w: w.astype("float32"), shared)
        return super().losses(wide, x.astype("float32"), labels, axes)


class Wide(Mixed):
    sent = "float32"


class Narrow(Mixed):
    kept = "bfloat16"


@pytest.mark.parametrize(("kind", "check_vma"), [(Mixed, False), (Wide, True), (Narrow, False)])
def test_dtypes(kind, check_vma):
    """Errors, against float64, are those of one device with the same dtypes."""
    mesh, model, exact = jaxpar.make_mesh("pp=2,dp=2,tp=2"), kind(4), Model(4)
    params = model.layers, model.shared
    batch = model.batch(16)
    cut = jax.tree.map(lambda x: by_microbatch(2, 4, x), batch)
    wide = jax.tree.map(lambda w: w.astype("float64"), params)
    right = jax.jit(jax.value_and_grad(exact.on_one_device))(wide, cut)

    def error(found):
        pairs = zip(jax.tree.leaves(found), jax.tree.leaves(right), strict=True)
        return max(np.abs(np.float64(one) - two).max() / np.abs(two).max() for one, two in pairs)

    one_device = error(jax.jit(jax.value_and_grad(model.on_one_device))(params, cut))
    found = pipelined(model, mesh, 4, 2, check_vma, batch)  # gradients have the parameters' dtypes
    assert 1e-4 < error(found) < 1.5 * one_device < 0.1
