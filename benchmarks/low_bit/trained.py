"""Matmuls of a language model that was trained: what goes into them, and what comes back."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from jaxpar import LowBit
from language_model.config import Model, Training
from language_model.data import Batch, Text, standard_library, training_batch
from language_model.parallel import build_mesh, place_batch
from language_model.run import validate
from language_model.tests import reference
from language_model.train import Trainer
from low_bit.errors import EXACT, WIRES, error
from low_bit.operands import Case

MODEL = Model(257, width=384, layers=3, heads=6, kv_heads=6, head_size=64, hidden=1024)
TRAINING = Training(
    steps=300, batch=8, sequence=128, learning_rate=3e-4, warmup=100, validation_batches=32
)
MESH = "fsdp=4,tp=2"


@dataclass(frozen=True)
class Trained:
    """A model after its training: on the host, without padding; and the batch that comes next."""

    model: Model
    training: Training
    text: Text
    params: Any
    batch: Batch


def train(model: Model = MODEL, training: Training = TRAINING) -> Trained:
    """Trains on Python's standard library, in float32."""
    text, trainer = standard_library(), Trainer(model, training, build_mesh(MESH))
    state: Any = trainer.init()
    sizes = training.batch, training.sequence, training.seed
    for step in range(training.steps):
        batch = training_batch(text, *sizes, step)
        state, found = trainer.step(state, *place_batch(batch, trainer.mesh))
        jax.block_until_ready(found)
    params = jax.device_get(trainer.layout.unpad(state["params"]))
    return Trained(model, training, text, params, training_batch(text, *sizes, training.steps))


def steps(trained: Trained, kinds: Sequence[tuple[str, str]]) -> Iterator[tuple[float, float]]:
    """Yields for each dtype and wire the loss on held-out text, relative, and the gradient's error.

    Both are compared with those of float32 gathered as it is, at the same weights.
    """
    loss, gradient = _step(trained, "float32", None)
    for dtype, wire in kinds:
        found = _step(trained, dtype, {**WIRES, **EXACT}[wire])
        yield found[0] / loss - 1, error(found[1], gradient)[0]


def _step(trained: Trained, dtype: str, wire: LowBit | None) -> tuple[float, np.ndarray]:
    model = replace(trained.model, dtype=dtype)
    trainer = Trainer(model, trained.training, build_mesh(MESH), wire_dtype=wire)
    params = trainer.layout.place(trained.params)
    batch = place_batch(trained.batch, trainer.mesh)
    _, gradient = jax.jit(trainer.gradient)(params, *batch)
    leaves = jax.tree.leaves(jax.device_get(trainer.layout.unpad(gradient)))
    loss = validate(trainer, {"params": params}, trained.text)
    assert loss is not None
    return loss, np.concatenate([x.ravel() for x in leaves])


def inputs_and_cotangents(trained: Trained) -> tuple[Any, Any]:
    """Of each layer, the inputs of its matmuls, and the cotangents of what each half adds to x.

    Both are [layers, tokens, features], by the names of the weights that they meet.
    """
    model, params, (tokens, labels) = trained.model, trained.params, trained.batch
    # Added to what a half of a layer gives: its gradient is the cotangent of that.
    zeros = jnp.zeros((model.layers, *tokens.shape, model.width))

    def loss(added: Any) -> tuple[Array, Any]:
        x, found = jnp.asarray(params["embedding"])[tokens], []
        for layer in range(model.layers):
            w = {name: stacked[layer] for name, stacked in params["layers"].items()}
            inputs = {"query": reference.rms_norm(x, w["attention_norm"])}
            # With an identity in the place of its last weight, attention is what that one meets.
            apart = {**w, "output": jnp.eye(len(w["output"]))}
            inputs["output"] = reference.attention(inputs["query"], apart, model)
            x = x + inputs["output"] @ w["output"] + added["output"][layer]
            inputs["gate"] = normed = reference.rms_norm(x, w["mlp_norm"])
            inputs["down"] = jax.nn.silu(normed @ w["gate"]) * (normed @ w["up"])
            x = x + inputs["down"] @ w["down"] + added["down"][layer]
            found.append(inputs)
        logits = reference.rms_norm(x, params["final_norm"]) @ params["embedding"].T
        chosen = jnp.take_along_axis(logits, jnp.maximum(labels, 0)[..., None], -1)[..., 0]
        losses = jnp.where(labels >= 0, jax.nn.logsumexp(logits, -1) - chosen, 0)
        mean = losses.sum() / (labels >= 0).sum().astype(losses.dtype)
        return mean, jax.tree.map(lambda *layers: jnp.stack(layers), *found)

    cts, inputs = jax.jit(jax.grad(loss, has_aux=True))({"output": zeros, "down": zeros})
    return jax.tree.map(_rows, inputs), jax.tree.map(_rows, cts)


def _rows(x: Array) -> np.ndarray:
    """[layers, tokens, features]."""
    return np.asarray(x).reshape(len(x), -1, x.shape[-1])


def cases(trained: Trained) -> dict[str, list[Case]]:
    """Cases of activations, of weights and of cotangents that are gathered."""
    inputs, cts = inputs_and_cotangents(trained)
    found: dict[str, list[Case]] = {"activations": [], "weights": [], "cotangents": []}
    for layer in range(trained.model.layers):
        w = {name: stacked[layer] for name, stacked in trained.params["layers"].items()}
        for name, label in (("query", "attention"), ("gate", "MLP")):
            x = inputs[name][layer]
            found["activations"].append(Case(f"activations into {label} {layer}", x, w[name]))
        for name, dim in (("query", 0), ("gate", 0), ("down", 1)):
            x = inputs[name][layer]
            found["weights"].append(Case(f"weights, {name} {layer}", x, w[name], None, "rhs", dim))
        # The derivative of the last matmul of each half gathers the cotangent.
        for name, label in (("output", "attention"), ("down", "MLP")):
            x, ct = inputs[name][layer], cts[name][layer]
            found["cotangents"].append(Case(f"behind {label} {layer}", x, w[name], ct))
    return found
