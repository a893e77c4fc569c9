"""KerasHub's Llama with the layout map that it publishes, and with two rules changed.

    pip install keras keras-hub
    jaxpar predict keras_llama:published --target v5p:2x2x2 --mesh batch=2,model=4    # in examples/
    jaxpar predict keras_llama:mended --target v5p:2x2x2 --mesh batch=2,model=4
    jaxpar explain keras_llama:published --target v5p:2x2x2 --mesh batch=2,model=4

A training step of two layers with the widths of Llama 3 8B, and 4 sequences of 2048 tokens for each
device of `batch`. The chips need not be there.
"""

import os

os.environ.setdefault("KERAS_BACKEND", "jax")
import jax
import jax.numpy as jnp
import keras
import keras_hub
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

SIZES = {
    "vocabulary_size": 32000,
    "num_layers": 2,
    "num_query_heads": 32,
    "num_key_value_heads": 8,
    "hidden_dim": 4096,
    "intermediate_dim": 14336,
}
LENGTH = 2048
HEADS = P("batch", "model", None)  # of [width, heads, head size]; published: model, batch, None
CHANGED = {
    "query": HEADS,
    "key": HEADS,
    "value": HEADS,
    # Rows of the table, not its features over the batch's axis; published: model, batch.
    "token_embedding/embeddings": P(("model", "batch"), None),
    "token_embedding/reverse_embeddings": P(None, ("model", "batch")),  # published: replicated
}


def published(mesh, changed=None):
    """Returns a training step, and its arguments as shapes with shardings."""
    keras.config.set_dtype_policy("mixed_bfloat16")
    devices = [f"cpu:{number}" for number in range(mesh.size)]
    sizes = tuple(mesh.shape.values())
    device_mesh = keras.distribution.DeviceMesh(sizes, mesh.axis_names, devices)
    rules = keras_hub.models.LlamaBackbone.get_layout_map(device_mesh)
    backbone = keras_hub.models.LlamaBackbone(**SIZES)
    model = keras_hub.models.LlamaCausalLM(backbone=backbone, preprocessor=None)
    model.compile(
        optimizer=keras.optimizers.AdamW(1e-4),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
    )
    model.optimizer.build(model.trainable_variables)

    def spec_of(path):
        for part, spec in (changed or {}).items():
            if part in path:
                return spec
        found = rules[path]
        return P() if found is None else P(*found.axes)

    def shape_of(variable, spec):
        sharding = NamedSharding(mesh, spec)
        return jax.ShapeDtypeStruct(variable.shape, variable.dtype, sharding=sharding)

    weights = {v.path.replace("/", "_"): spec_of(v.path) for v in model.trainable_variables}

    def moment(variable):  # like the weight in whose path it is
        spec = next((spec for name, spec in weights.items() if name in variable.path), P())
        return shape_of(variable, spec)

    state = (
        [shape_of(v, spec_of(v.path)) for v in model.trainable_variables],
        [shape_of(v, P()) for v in model.non_trainable_variables],
        [moment(v) for v in model.optimizer.variables],
    )
    rows = 4 * mesh.shape["batch"]
    tokens = jax.ShapeDtypeStruct(
        (rows, LENGTH), jnp.int32, sharding=NamedSharding(mesh, P("batch"))
    )
    batch = ({"token_ids": tokens, "padding_mask": tokens}, tokens)

    def loss_fn(trainable, frozen, x, y):
        logits, frozen = model.stateless_call(trainable, frozen, x, training=True)
        return model.loss(y, logits), frozen

    @jax.jit
    def step(state, batch):
        trainable, frozen, moments = state
        value_and_grad = jax.value_and_grad(loss_fn, has_aux=True)
        (loss, frozen), gradients = value_and_grad(trainable, frozen, *batch)
        trainable, moments = model.optimizer.stateless_apply(moments, gradients, trainable)
        return loss, (trainable, frozen, moments)

    return step, (state, batch)


def mended(mesh):
    """The same step with heads of query, key and value over `model`, and the table cut by rows."""
    return published(mesh, CHANGED)
