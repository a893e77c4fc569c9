"""Pipelined losses and gradients against one device, in float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.axis.axis import Ring
from jaxpar.layers import vocab_parallel_cross_entropy, vocab_parallel_embedding
from jaxpar.pipeline import gpipe, interleaved_1f1b, value_and_grad
from jaxpar.pipeline._stage_residuals import residuals_of
from jaxpar.testing import poisoned_rows

WIDTH, HIDDEN, WORDS, SEQUENCE = 4, 8, 16, 8


@pytest.fixture(autouse=True)
def float64():
    """Memory that is read before it is written shows as NaN."""
    with jax.enable_x64(True), poisoned_rows():
        yield


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def mlp(w, x):
    """Without an epsilon, so that zeros, which idle passes see, give NaN."""
    h = x * w["scale"] / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))
    return jnp.tanh(h @ w["up"]) @ w["down"]


def part_of(x, axis, like):
    """The part of [b, s] along dimension 1 that belongs to rows [b, s/n, d]."""
    if axis is None:
        return x
    start = lax.axis_index(axis) * like.shape[1]
    return lax.dynamic_slice_in_dim(x, start, like.shape[1], 1)


class Model:
    """A tied embedding, stages of some MLPs each, and losses of labels above 2."""

    of_stage = 1
    table = P()

    def __init__(self, stages):
        count = stages * self.of_stage
        self.layers = {
            "scale": 1 + normal(1, count, WIDTH) / 10,
            "up": normal(2, count, WIDTH, HIDDEN),
            "down": normal(3, count, HIDDEN, WIDTH) / 4,
        }
        self.shared = {"table": normal(4, WORDS, WIDTH), "scale": 1 + normal(5, WIDTH) / 10}
        self.shared_specs = {"table": self.table, "scale": P()}
        self.specs = {"scale": P("pp"), "up": P("pp", None, "tp"), "down": P("pp", "tp")}

    def sum(self, x, tp):
        return x if tp is None else lax.psum(x, tp)

    def stage(self, w, x, batch, tp=None):
        for number in range(len(w["scale"])):
            x += self.sum(mlp({name: leaf[number] for name, leaf in w.items()}, x), tp)
        return x

    def first(self, shared, batch, pp=None):
        return 3.0 * shared["table"][batch["tokens"]]

    def losses(self, shared, x, labels, pp):
        logits = (x * shared["scale"]) @ shared["table"].T
        right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, -1) - right

    def last(self, shared, x, batch, pp=None):
        labels = part_of(batch["labels"], pp, x)
        counts = labels > 2
        return jnp.sum(jnp.where(counts, self.losses(shared, x, labels, pp), 0)), jnp.sum(counts)

    def on_one_device(self, params, batch):
        layers, shared = params
        x = self.first(shared, batch)
        for start in range(0, len(layers["scale"]), self.of_stage):
            own = {name: w[start : start + self.of_stage] for name, w in layers.items()}
            x = self.stage(own, x, batch)
        loss, weight = self.last(shared, x, batch)
        return loss / weight.astype(loss.dtype)


class Scanned(Model):
    """Stages of two layers in a scan."""

    of_stage = 2
    layer = staticmethod(lambda f: f)

    def stage(self, w, x, batch, tp=None):
        def layer(x, w):
            return x + self.sum(mlp(w, x), tp), None

        return lax.scan(self.layer(layer), x, w)[0]


class Recomputed(Scanned):
    layer = staticmethod(jax.checkpoint)


class Vocabulary(Model):
    """The table is sharded over pp: embedding and losses are those of the vocabulary layers."""

    table = P("pp")

    def first(self, shared, batch, pp=None):
        if pp is None:
            return super().first(shared, batch)
        tokens, table = batch["tokens"], shared["table"]
        return 3.0 * vocab_parallel_embedding(tokens, table, pp, sequence_dim=None)

    def losses(self, shared, x, labels, pp):
        if pp is None:
            return super().losses(shared, x, labels, pp)
        x = x * shared["scale"]
        return vocab_parallel_cross_entropy(x, shared["table"].T, labels, pp, vocabulary=WORDS)


class Auxiliary(Model):
    """Each stage adds to a loss of its own, which travels beside the activations."""

    def first(self, shared, batch, pp=None):
        return super().first(shared, batch), jnp.zeros(())

    def stage(self, w, x, batch, tp=None):
        x, loss = x
        y = super().stage(w, x, batch, tp)
        return y, loss + jnp.sum(jnp.sin(y)) / 100

    def last(self, shared, x, batch, pp=None):
        x, more = x
        loss, weight = super().last(shared, x, batch, pp)
        return loss + more, weight


class Dropped(Model):
    """Each microbatch has keys of its own, of which a recomputed stage keeps only the keys."""

    def stage(self, w, x, batch, tp=None):
        def run(w, x, keys):
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
            return Model.stage(self, w, jnp.where(kept, x, 0) + 0.1, batch, tp)

        return jax.checkpoint(run)(w, x, batch["keys"])


def check(kind, axes, microbatches, virtual, check_vma, rows=2, last_dim=1):
    mesh = jaxpar.make_mesh(axes)
    devices = mesh.shape["pp"]
    model = kind(devices * virtual)
    size = mesh.shape.get("dp", 1) * microbatches * rows
    random = np.random.default_rng(0)
    batch = {name: random.integers(0, WORDS, (size, SEQUENCE)) for name in ("tokens", "labels")}
    if kind is Dropped:
        batch["keys"] = jax.random.split(jax.random.key(3), size)
    tp = "tp" if "tp" in mesh.axis_names else None
    model.specs = model.specs if tp else dict.fromkeys(model.specs, P("pp"))
    batch_axes = "dp" if "dp" in mesh.axis_names else ()
    specs = model.specs, model.shared_specs

    def stage(w, x, batch):
        return model.stage(w, x, batch, tp)

    step = value_and_grad(
        stage,
        lambda shared, batch: model.first(shared, batch, "pp"),
        lambda shared, x, batch: model.last(shared, x, batch, "pp"),
        interleaved_1f1b(devices, microbatches, virtual),
        "pp",
        batch_axes=batch_axes,
        specs=specs,
        last_dim=last_dim,
    )
    # Device i has stages i, i + devices, ..., so the stack is in the order of devices.
    order = np.arange(devices * virtual * model.of_stage).reshape(virtual, devices, -1)
    order = order.swapaxes(0, 1).ravel()
    stacked = jax.tree.map(lambda w: w[order], model.layers)
    local = jax.shard_map(
        step,
        mesh=mesh,
        in_specs=(*specs, P(batch_axes or None)),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    loss, (of_layers, of_shared) = jax.jit(local)(stacked, model.shared, batch)
    of_layers = jax.tree.map(lambda g: np.asarray(g)[np.argsort(order)], of_layers)
    wanted = jax.jit(jax.value_and_grad(model.on_one_device))((model.layers, model.shared), batch)
    for found, right in zip(
        jax.tree.leaves((loss, (of_layers, of_shared))), jax.tree.leaves(wanted), strict=True
    ):
        np.testing.assert_allclose(found, right, rtol=0, atol=1e-10 * np.abs(right).max())


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize(
    ("axes", "microbatches", "virtual"),
    [
        ("pp=2,dp=2,tp=2", 4, 2),
        ("pp=4,tp=2", 8, 1),
        ("dp=2,pp=4", 5, 2),  # a last group that is not full
        ("pp=8", 3, 1),  # fewer microbatches than devices
        ("tp=2,pp=4", 2, 4),
        ("pp=2,dp=4", 1, 1),
        ("pp=8", 32, 2),
        ("pp=1,tp=8", 3, 2),
    ],
)
def test_gradients_are_those_of_one_device(axes, microbatches, virtual, check_vma):
    check(Model, axes, microbatches, virtual, check_vma)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("kind", [Scanned, Recomputed, Vocabulary, Auxiliary, Dropped])
def test_kinds_of_models(kind, check_vma):
    check(kind, "pp=4,tp=2", 6, 2, check_vma)


def test_rows_that_are_counted_from_the_back():
    check(Model, "pp=4,tp=2", 4, 1, True, last_dim=-2)


def test_a_nan_reaches_the_loss_and_its_gradients():
    model = Model(8)
    model.shared["table"][3, 1] = np.nan
    batch = {"tokens": np.full((4, SEQUENCE), 3), "labels": np.full((4, SEQUENCE), 5)}
    step = value_and_grad(
        model.stage,
        model.first,
        lambda shared, x, batch: model.last(shared, x, batch, "pp"),
        interleaved_1f1b(8, 2),
        "pp",
        last_dim=1,
    )
    mesh, specs = jaxpar.make_mesh("pp=8"), (P("pp"), P())
    local = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P()), out_specs=(P(), specs))
    found = jax.jit(local)(model.layers, model.shared, batch)
    assert all(np.isnan(x).any() for x in jax.tree.leaves(found))


def test_no_copy_of_a_weight_is_kept():
    """Casts of weights, also those in a scan or a jitted function, are made again."""

    def layer(x, w):
        return jnp.tanh(x @ w.astype(x.dtype)), None

    @jax.jit
    def scanned(w, x, batch):
        return lax.scan(layer, x, w)[0]

    def kept(w, x):
        found = residuals_of(scanned, Ring(("pp",), size=1), w, x, {})
        shapes.extend(leaf.shape for leaf in found.forward(w, x, {})[1])
        return x

    shapes = []
    jax.eval_shape(kept, jnp.ones((3, 8, 8), "float64"), jnp.ones((2, 8), "float32"))
    assert shapes
    assert all(shape[-2:] == (2, 8) for shape in shapes)


def run(mesh, stage, schedule, *, layers=(8, 4, 4), first=None, last=None, **options):
    def mean(shared, x, batch):
        return jnp.sum((x @ shared) ** 2), x.size

    step = value_and_grad(
        stage, first or (lambda shared, x: x @ shared), last or mean, schedule, "pp", **options
    )
    specs = P("pp"), P()
    local = jax.shard_map(step, mesh=mesh, in_specs=(*specs, P()), out_specs=(P(), specs))
    return jax.eval_shape(local, jnp.ones(layers), jnp.ones((4, 4)), jnp.ones((16, 4)))


def stage(w, x, batch):
    return x @ w[0]


def test_wrong_arguments():
    mesh, schedule = jaxpar.make_mesh("pp=8"), interleaved_1f1b(8, 2)
    run(mesh, stage, schedule)
    with pytest.raises(ValueError, match=r"^value_and_grad: schedule is for 4 devices, and axis"):
        run(mesh, stage, interleaved_1f1b(4, 2))
    with pytest.raises(ValueError, match=r"^value_and_grad: .* as gpipe does; choose inter"):
        run(mesh, stage, gpipe(8, 2))
    with pytest.raises(ValueError, match=r"layers has local shape \(3, 4, 4\).*the 2 virtual"):
        run(mesh, stage, interleaved_1f1b(8, 2, 2), layers=(24, 4, 4))
    with pytest.raises(ValueError, match=r"batch has local shape \(16, 4\).*microbatches=3"):
        run(mesh, stage, interleaved_1f1b(8, 3))
    with pytest.raises(TypeError, match=r"stage_fn must return what the next stage is given"):
        run(mesh, lambda w, x, batch: x[:, :2], schedule)
    with pytest.raises(ValueError, match=r"^value_and_grad: stage_fn uses psum over axis 'pp'"):
        run(mesh, lambda w, x, batch: lax.psum(x @ w[0], "pp"), schedule)
    with pytest.raises(ValueError, match=r"loss_sum"):
        run(mesh, stage, schedule, last=lambda s, x, b: (lax.psum(jnp.sum(x), "pp"), 1))
    with pytest.raises(ValueError, match=r"last_dim=0.*local shape \(4, 4\).*8 devices"):
        run(mesh, stage, interleaved_1f1b(8, 4))
    with pytest.raises(ValueError, match=r"^value_and_grad: last_dim=2 is out of range"):
        run(mesh, stage, schedule, last_dim=2)
    with pytest.raises(TypeError, match=r"first_fn must return floats, got int32\[8, 4\]"):
        run(mesh, stage, schedule, first=lambda shared, x: x.astype("int32"))
