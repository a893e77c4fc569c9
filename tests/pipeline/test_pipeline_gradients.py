"""Pipelined losses and gradients against one device, in float64."""

from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from staged import SEQUENCE, WORDS, Model, check, mlp, normal, summed

import jaxpar
from jaxpar.axis.axis import Ring
from jaxpar.layers import vocab_parallel_cross_entropy, vocab_parallel_embedding
from jaxpar.pipeline import gpipe, interleaved_1f1b, value_and_grad
from jaxpar.pipeline._stage_residuals import residuals_of
from jaxpar.testing import poisoned_rows


@pytest.fixture(autouse=True)
def float64():
    """Memory that is read before it is written shows as NaN."""
    with jax.enable_x64(True), poisoned_rows():
        yield


class Scanned(Model):
    """Stages of two layers in a scan."""

    of_stage = 2
    layer = staticmethod(lambda f: f)

    def stage(self, w, x, batch, axes=()):
        def layer(x, w):
            return x + summed(mlp(w, x), axes), None

        return lax.scan(self.layer(layer), x, w)[0]


class Recomputed(Scanned):
    layer = staticmethod(jax.checkpoint)


class Vocabulary(Model):
    """The table is sharded over pp: embedding and losses are those of the vocabulary layers."""

    shared_specs: ClassVar = {"table": P("pp"), "scale": P()}

    def first(self, shared, batch, axes=()):
        if not axes:
            return super().first(shared, batch)
        tokens, table = batch["tokens"], shared["table"]
        return 3.0 * vocab_parallel_embedding(tokens, table, "pp", sequence_dim=None)

    def losses(self, shared, x, labels, axes):
        if not axes:
            return super().losses(shared, x, labels, axes)
        x = x * shared["scale"]
        return vocab_parallel_cross_entropy(x, shared["table"].T, labels, "pp", vocabulary=WORDS)


class Auxiliary(Model):
    """Each stage adds to a loss of its own, which travels beside the activations."""

    def first(self, shared, batch, axes=()):
        return super().first(shared, batch), jnp.zeros(())

    def stage(self, w, x, batch, axes=()):
        x, loss = x
        y = super().stage(w, x, batch, axes)
        return y, loss + jnp.sum(jnp.sin(y)) / 100

    def last(self, shared, x, batch, axes=()):
        x, more = x
        loss, weight = super().last(shared, x, batch, axes)
        return loss + more, weight


class Masked(Auxiliary):
    """The auxiliary loss reads the batch, and varies over dp; what enters does not."""

    def stage(self, w, x, batch, axes=()):
        x, loss = x
        y = Model.stage(self, w, x, batch, axes)
        counts = batch["labels"] != 2
        return y, loss + jnp.sum(jnp.where(counts[..., None], jnp.sin(y), 0)) / 100


class Dropped(Model):
    """Each microbatch has keys of its own, of which a recomputed stage keeps only the keys."""

    def batch(self, size):
        return {**super().batch(size), "keys": jax.random.split(jax.random.key(3), size)}

    def stage(self, w, x, batch, axes=()):
        def run(w, x, keys):
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
            return Model.stage(self, w, jnp.where(kept, x, 0) + 0.1, batch, axes)

        return jax.checkpoint(run)(w, x, batch["keys"])


class DroppedInScan(Dropped):
    """Layers have numbers: each drops others. Keys are of rows, and the same in all stages."""

    of_stage = 2
    specs: ClassVar = {**Model.specs, "number": P("pp")}

    def __init__(self, stages):
        super().__init__(stages)
        self.layers["number"] = np.arange(float(stages * self.of_stage))

    def stage(self, w, x, batch, axes=()):
        @jax.checkpoint
        def layer(x, w):
            number = w["number"].astype("int32")
            keys = jax.vmap(lambda key: jax.random.fold_in(key, number))(batch["keys"])
            kept = jax.vmap(lambda key: jax.random.bernoulli(key, 0.8, x.shape[1:]))(keys)
            return x + jnp.where(kept, summed(mlp(w, x), axes), 0), None

        return lax.scan(layer, x, w)[0]


@pytest.mark.parametrize(
    ("axes", "microbatches", "virtual", "check_vma"),
    [
        ("pp=2,dp=2,tp=2", 4, 2, True),
        ("pp=4,tp=2", 8, 1, False),
        ("dp=2,pp=4", 5, 2, False),  # a last group that is not full
        ("pp=8", 3, 1, True),  # fewer microbatches than devices
        ("tp=2,pp=4", 2, 4, True),
        ("pp=2,dp=4", 1, 1, True),
        ("pp=8", 32, 2, False),
        ("pp=1,tp=8", 3, 2, False),
    ],
)
def test_gradients_are_those_of_one_device(axes, microbatches, virtual, check_vma):
    check(Model, axes, microbatches, virtual, check_vma)


# Types differ where a table is sharded over pp, so that both settings are of it.
@pytest.mark.parametrize(
    ("kind", "check_vma"),
    [
        (Scanned, False),
        (Recomputed, True),
        (Vocabulary, True),
        (Vocabulary, False),
        (Auxiliary, True),
        (Dropped, True),
        (DroppedInScan, False),
    ],
)
def test_kinds_of_models(kind, check_vma):
    check(kind, "pp=2,tp=4", 5, 2, check_vma)


def test_a_stage_that_reads_the_batch():
    check(Masked, "pp=2,dp=2,tp=2", 4, 2, True)


def test_rows_that_are_counted_from_the_back():
    check(Model, "pp=2,tp=4", 2, 1, True, last_dim=-2)


def test_a_nan_reaches_the_loss_and_its_gradients():
    model = Model(8)
    model.shared["table"][3, 1] = np.nan
    batch = {"tokens": np.full((4, SEQUENCE), 3), "labels": np.full((4, SEQUENCE), 5)}
    step = value_and_grad(
        model.stage,
        model.first,
        lambda shared, x, batch: model.last(shared, x, batch, ("pp",)),
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
        return lax.scan(layer, x, w)[0], None

    def kept(w, x):
        found = residuals_of(scanned, Ring(("pp",), size=1), {}, w, x, {})
        shapes.extend(leaf.shape for leaf in found.forward(w, x, {})[-1])
        return x

    shapes = []
    jax.eval_shape(kept, jnp.ones((3, 8, 8), "float64"), jnp.ones((2, 8), "float32"))
    assert shapes
    assert all(shape[-2:] == (2, 8) for shape in shapes)


LINE = r"axis 'pp' \(8\) at test_pipeline_gradients.py:\d+"


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
    with pytest.raises(ValueError, match=rf"^value_and_grad: stage_fn uses psum over {LINE},"):
        run(mesh, lambda w, x, batch: lax.psum(x @ w[0], "pp"), schedule)
    with pytest.raises(ValueError, match=r"loss_sum"):
        run(mesh, stage, schedule, last=lambda s, x, b: (lax.psum(jnp.sum(x), "pp"), 1))
    with pytest.raises(ValueError, match=r"last_dim=0.*local shape \(4, 4\).*8 devices"):
        run(mesh, stage, interleaved_1f1b(8, 4))
    with pytest.raises(ValueError, match=r"^value_and_grad: last_dim=2 is out of range"):
        run(mesh, stage, schedule, last_dim=2)
    with pytest.raises(TypeError, match=r"first_fn must return floats, got int32\[8, 4\]"):
        run(mesh, stage, schedule, first=lambda shared, x: x.astype("int32"))


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_a_stage_closes_over(check_vma):
    """A parameter would get no gradient there; other values are constants."""
    mesh, specs = jaxpar.make_mesh("pp=8"), (P("pp"), P())
    options = {"mesh": mesh, "in_specs": (*specs, P()), "check_vma": check_vma}

    def loss_and_gradients(closed_over):
        def local(layers, shared, x):
            more = closed_over(layers, shared, x)
            step = value_and_grad(
                lambda w, x, batch: jnp.tanh(x @ w[0]) + jnp.mean(more),
                lambda shared, x: x @ shared["w"],
                lambda shared, x, batch: (jnp.sum(x**2), x.size),
                interleaved_1f1b(8, 2),
                "pp",
                specs=specs,
            )
            return step(layers, shared, x)

        step = jax.shard_map(local, out_specs=(P(), specs), **options)
        return jax.jit(step)(layers, {"w": np.eye(4)}, x)

    def on_one_device(params):
        layers, shared = params
        y = x @ shared["w"]
        for w in layers:
            y = jnp.tanh(y @ w) + 0.25 + jnp.mean(x)
        return jnp.mean(y**2)

    layers, x = normal(1, 8, 4, 4), normal(2, 16, 4)
    for name, closed_over in {
        r"shared\['w'\]": lambda layers, shared, x: shared["w"],
        "layers": lambda layers, shared, x: layers,
    }.items():
        match = f"^value_and_grad: stage_fn closes over {name}, which gets no gradient there; "
        with pytest.raises(ValueError, match=match):
            loss_and_gradients(closed_over)
    found = loss_and_gradients(lambda _, shared, x: lax.stop_gradient(shared["w"]).mean() + x)
    wanted = jax.jit(jax.value_and_grad(on_one_device))((layers, {"w": np.eye(4)}))
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-10 * np.abs(right).max())
