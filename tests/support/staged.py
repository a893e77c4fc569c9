"""Models that are cut into stages: their pipelines against one device, in float64."""

from functools import partial
from math import prod
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.pipeline import interleaved_1f1b, value_and_grad

WIDTH, HIDDEN, WORDS, SEQUENCE = 4, 8, 16, 8


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape)


def normed(x, scale):
    """Without an epsilon, so that zeros, which idle passes see, give NaN."""
    return x * scale / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True))


def mlp(w, x):
    return jnp.tanh(normed(x, w["scale"]) @ w["up"]) @ w["down"]


def layers_of(w):
    """The layers of a stack, one after the other."""
    return [{name: leaf[number] for name, leaf in w.items()} for number in range(len(w["scale"]))]


def summed(x, axes, axis="tp"):
    """The sum over an axis, if the mesh has it."""
    return lax.psum(x, axis) if axis in axes else x


def part_of(x, axes, like):
    """The part of [b, s] along dimension 1 that belongs to rows [b, s/n, d]."""
    if not axes:
        return x
    start = lax.axis_index("pp") * like.shape[1]
    return lax.dynamic_slice_in_dim(x, start, like.shape[1], 1)


class Model:
    """A tied embedding, stages of some MLPs each, and losses of labels above 2.

    Its functions know the mesh by the names of its axes: there are none on one device.

    Attributes:
      of_stage: layers of a stage.
      batch_axes: axes that losses are spread over, if the mesh has them.
      specs, shared_specs, batch_spec: as in `jax.shard_map`, less the axes that the mesh lacks.
    """

    of_stage = 1
    batch_axes = ("dp",)
    specs: ClassVar = {"scale": P("pp"), "up": P("pp", None, "tp"), "down": P("pp", "tp")}
    shared_specs: ClassVar = {"table": P(), "scale": P()}
    batch_spec = P("dp")

    def __init__(self, stages):
        count = stages * self.of_stage
        self.layers = {
            "scale": 1 + normal(1, count, WIDTH) / 10,
            "up": normal(2, count, WIDTH, HIDDEN),
            "down": normal(3, count, HIDDEN, WIDTH) / 4,
        }
        self.shared = {"table": normal(4, WORDS, WIDTH), "scale": 1 + normal(5, WIDTH) / 10}

    def batch(self, size):
        random = np.random.default_rng(0)
        return {name: random.integers(0, WORDS, (size, SEQUENCE)) for name in ("tokens", "labels")}

    def laid_out(self, batch, mesh):
        """The batch as the devices of a mesh have it."""
        return batch

    def stage(self, w, x, batch, axes=()):
        for layer in layers_of(w):
            x += summed(mlp(layer, x), axes)
        return x

    def first(self, shared, batch, axes=()):
        return 3.0 * shared["table"][batch["tokens"]]

    def losses(self, shared, x, labels, axes):
        logits = (x * shared["scale"]) @ shared["table"].T
        right = jnp.take_along_axis(logits, labels[..., None], -1)[..., 0]
        return jax.nn.logsumexp(logits, -1) - right

    def last(self, shared, x, batch, axes=()):
        labels = part_of(batch["labels"], axes, x)
        counts = labels > 2
        return jnp.sum(jnp.where(counts, self.losses(shared, x, labels, axes), 0)), jnp.sum(counts)

    def sums(self, params, batch):
        """The sum of losses and its weight, on one device."""
        layers, shared = params
        stages = {name: w.reshape(-1, self.of_stage, *w.shape[1:]) for name, w in layers.items()}
        x, _ = lax.scan(
            lambda x, own: (self.stage(own, x, batch), None), self.first(shared, batch), stages
        )
        return self.last(shared, x, batch)

    def on_one_device(self, params, microbatches):
        losses, weights = lax.map(partial(self.sums, params), microbatches)
        return losses.sum() / weights.sum().astype(losses.dtype)


def on(names, spec):
    """The spec on a mesh of these axes, without others."""

    def kept(entry):
        entry = entry if isinstance(entry, tuple) else (entry,)
        return tuple(name for name in entry if name in names) or None

    return P(*map(kept, spec))


def check(kind, axes, microbatches, virtual, check_vma, *, rows=2, last_dim=1, batch=None):
    """Compares the loss and all gradients.

    Args:
      rows: of a microbatch, on each device.
      batch: leaves that differ from those of the model.
    """
    mesh = jaxpar.make_mesh(axes)
    model = kind(mesh.shape["pp"] * virtual)
    over = model.batch_spec[0] or ()
    parts = prod(mesh.shape.get(name, 1) for name in (over if isinstance(over, tuple) else [over]))
    whole = {**model.batch(parts * microbatches * rows), **(batch or {})}
    found = pipelined(model, mesh, microbatches, virtual, check_vma, whole, last_dim)
    params = model.layers, model.shared
    cut = jax.tree.map(partial(by_microbatch, parts, microbatches), whole)
    wanted = jax.jit(jax.value_and_grad(model.on_one_device))(params, cut)
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(one, right, rtol=0, atol=1e-10 * np.abs(right).max())


def by_microbatch(parts, count, x):
    """The rows of each microbatch, of all devices."""
    x = x.reshape(parts, count, -1, *x.shape[1:]).swapaxes(0, 1)
    return x.reshape(count, -1, *x.shape[3:])


def pipelined(model, mesh, microbatches, virtual, check_vma, batch, last_dim=1):
    """The loss of a pipeline, and its gradients in the order of the layers."""
    devices, names = mesh.shape["pp"], mesh.axis_names
    specs = (
        {name: on(names, spec) for name, spec in model.specs.items()},
        {name: on(names, spec) for name, spec in model.shared_specs.items()},
    )
    step = value_and_grad(
        lambda w, x, batch: model.stage(w, x, batch, names),
        lambda shared, batch: model.first(shared, batch, names),
        lambda shared, x, batch: model.last(shared, x, batch, names),
        interleaved_1f1b(devices, microbatches, virtual),
        "pp",
        batch_axes=tuple(name for name in model.batch_axes if name in names),
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
        in_specs=(*specs, on(names, model.batch_spec)),
        out_specs=(P(), specs),
        check_vma=check_vma,
    )
    batch = model.laid_out(batch, mesh)
    loss, (of_layers, of_shared) = jax.jit(local)(stacked, model.shared, batch)
    assert jax.tree.map(lambda g: g.dtype, (of_layers, of_shared)) == jax.tree.map(
        lambda w: w.dtype, (model.layers, model.shared)
    )
    back = np.argsort(order)
    return loss, (jax.tree.map(lambda g: np.asarray(g)[back], of_layers), of_shared)
