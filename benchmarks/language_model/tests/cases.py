"""Models of odd sizes, batches of odd sizes, and the comparison of a mesh with the reference."""

from functools import partial
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np

from language_model import experts, predict
from language_model.arguments import parse
from language_model.config import Model, Training
from language_model.parallel import AXES, build_mesh, place_batch
from language_model.tests import reference
from language_model.train import Trainer
from language_model.weights import shapes

SMALL = [  # arguments of the command
    *("--width", "16", "--layers", "1", "--heads", "2", "--hidden", "8", "--batch", "2"),
    *("--sequence", "8"),
]
ONE_DEVICE = dict.fromkeys(AXES, 1)


# So large that a router's losses are not lost in that of the text.
TRAINING = Training(balance_loss=0.5, router_z_loss=0.1)


def model(
    heads=6, kv_heads=3, vocabulary=23, hidden=13, tied=True, layers=2, dtype="float64", **more
):
    """A model of width 16: whatever a mesh of 8 devices shards of it is left to be padded."""
    return Model(
        vocabulary=vocabulary,
        width=16,
        layers=layers,
        heads=heads,
        kv_heads=kv_heads,
        head_size=4,
        hidden=hidden,
        tied=tied,
        dtype=dtype,
        **more,
    )


def draw_weights(model, seed=0):
    """Logical weights in NumPy: larger than those that training starts from, and no scale 1."""
    rng = np.random.default_rng(seed)

    def draw(path, weight):
        if path[-1].key.endswith("norm"):
            return rng.uniform(0.5, 1.5, weight.shape)
        return rng.normal(size=weight.shape) * weight.shape[-2] ** -0.5

    return jax.tree.map_with_path(draw, shapes(model))


def draw_batch(model, batch=5, sequence=13, seed=0):
    """Tokens, and labels of which some are ignored."""
    rng = np.random.default_rng(seed)
    tokens = rng.integers(0, model.vocabulary, (batch, sequence))
    labels = rng.integers(-1, model.vocabulary, (batch, sequence))
    return tokens.astype(np.int32), labels.astype(np.int32)


def make_small_step(mesh):
    """That of `predict`: one of the default sizes takes compilers longer, and says as much."""
    small = parse([*SMALL, "--layers", "2"])
    with patch("language_model.arguments.parse", lambda _: small):
        return predict.make_step(mesh)


def quick_experts(monkeypatch):
    """By default what other platforms do is traced as well, which takes longer than all else."""
    blocks = partial(experts.routed_moe_layer, implementation="blocks")
    monkeypatch.setattr(experts, "routed_moe_layer", blocks)


def place(trainer, params):
    """Pads logical weights and gives each device its shards."""
    return trainer.layout.place(
        jax.tree.map(lambda x: np.asarray(x, trainer.model.weight_dtype), params)
    )


def loss_and_gradients(trainer, params, batch):
    """Of the sharded model; the gradients as they are, padded, in NumPy."""
    placed = place_batch(batch, trainer.mesh, trainer.microbatches)
    found = jax.jit(trainer.gradient)(place(trainer, params), *placed)
    (loss, _), grads = jax.device_get(found)
    return loss, grads


def expected(model, params, batch):
    """Of the reference, in float64."""
    return jax.device_get(_of_reference(params, *batch, model, TRAINING))


_of_reference = jax.jit(jax.value_and_grad(reference.loss), static_argnums=(3, 4))


def check_float64(mesh, model, *, batch=5, sequence=13, seed=0, **how):
    """Asserts that loss and gradients are the reference's, and zero where there is padding."""
    trainer = Trainer(model, TRAINING, build_mesh(mesh), **how)
    params, data = draw_weights(model, seed), draw_batch(model, batch, sequence, seed)
    loss, grads = loss_and_gradients(trainer, params, data)
    want, truth = expected(model, params, data)
    assert abs(loss - want) <= 1e-10 * want
    padded = jax.tree.leaves_with_path(trainer.layout.pad(truth))
    for (path, true), got in zip(padded, jax.tree.leaves(grads), strict=True):
        name = jax.tree_util.keystr(path)
        worst = np.abs(got - true).max()
        assert worst <= 1e-10 * np.abs(true).max(), f"{name} is off by {worst}"


def check_float32(mesh, model, *, seed=0):
    """Asserts that float32 is as near to float64 as its roundings allow.

    A sum of K terms is off by about sqrt(K) + 1 roundings of its terms, which do what moving each
    weight by one rounding does: that is measured, in the float64 reference. Six times it is
    exceeded by none of a million (`jaxpar.testing.tolerance`).
    """
    trainer = Trainer(model, TRAINING, build_mesh(mesh))
    params, data = draw_weights(model, seed), draw_batch(model, seed=seed)
    params = jax.tree.map(lambda x: x.astype(np.float32).astype(np.float64), params)
    got = loss_and_gradients(trainer, params, data)
    want = expected(model, params, data)
    rng, unit = np.random.default_rng(seed), np.finfo(np.float32).eps / 2
    moved = [
        expected(
            model,
            jax.tree.map(lambda x: x * (1 + unit * rng.normal(size=x.shape)), params),
            data,
        )
        for _ in range(8)
    ]
    terms = max(data[0].size, model.vocabulary, model.hidden, model.width)
    got = (got[0], trainer.layout.unpad(got[1]))
    for path, true in jax.tree_util.tree_flatten_with_path(want)[0]:
        at = lambda tree, path=path: _at(tree, path)  # noqa: E731
        size = np.sqrt(np.mean([np.square(at(m) - true) for m in moved]))
        worst = np.abs(np.asarray(at(got), np.float64) - true).max()
        bound = 6 * (1 + terms**0.5) * size
        assert worst <= bound, f"{jax.tree_util.keystr(path)}: {worst} > {bound}"


def _at(tree, path):
    for key in path:
        tree = tree[getattr(key, "idx", getattr(key, "key", None))]
    return tree


def reference_curve(trainer, params, batches):
    """Losses and the last weights of training the reference with the trainer's optimizer."""
    import optax

    optimizer, state = trainer.optimizer, None
    params = jax.tree.map(jnp.asarray, params)

    @jax.jit
    def step(params, state, tokens, labels):
        loss, grads = jax.value_and_grad(reference.loss)(
            params, tokens, labels, trainer.model, trainer.training
        )
        updates, state = optimizer.update(grads, state, params)
        return optax.apply_updates(params, updates), state, loss

    state, losses = optimizer.init(params), []
    for batch in batches:
        params, state, loss = step(params, state, *batch)
        losses.append(float(loss))
    return losses, jax.device_get(params)
