"""The model's weights: their shapes, how they lie on a mesh, and what they start from.

Every mesh starts from the same values, and a checkpoint holds no padding: arrays are drawn and
saved in their logical shapes, and padded with zeros where a mesh does not divide them.
"""

from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import AbstractMesh, Mesh

from jaxpar.layers import head_layout
from jaxpar.layout import REPLICATED, Interleaved, Layout, LayoutError, LayoutMap, Padded
from jaxpar.tools.cli.console import UsageError
from language_model.config import Model
from language_model.parallel import LABELS

RULES = {
    "embedding": "vocabulary width",
    "logits": "width vocabulary",
    "final_norm": REPLICATED,
    "layers/.*norm": "layers scale",
    "layers/query": "layers width heads",
    "layers/(key|value)": "layers width kv_heads",
    "layers/output": "layers heads width",
}
MLP = {"layers/(gate|up)": "layers width hidden", "layers/down": "layers hidden width"}
EXPERTS = {
    "layers/(gate|up)": "layers experts width hidden",
    "layers/down": "layers experts hidden width",
    "layers/router": "layers width choices",
}


def shapes(model: Model) -> dict[str, Any]:
    """Returns the parameters' shapes, without padding."""
    width, hidden, size = model.width, model.hidden, model.head_size
    experts = (model.experts,) if model.experts else ()
    layer = {
        "attention_norm": (width,),
        "query": (width, model.heads * size),
        "key": (width, model.kv_heads * size),
        "value": (width, model.kv_heads * size),
        "output": (model.heads * size, width),
        "mlp_norm": (width,),
        "gate": (*experts, width, hidden),
        "up": (*experts, width, hidden),
        "down": (*experts, hidden, width),
        **({"router": (width, model.experts)} if experts else {}),
    }
    table = {
        "embedding": (model.vocabulary, width),
        "final_norm": (width,),
        "layers": {name: (model.layers, *shape) for name, shape in layer.items()},
        **({} if model.tied else {"logits": (width, model.vocabulary)}),
    }
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, model.weight_dtype),
        table,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def check_stages(layers: int, devices: int, virtual_stages: int) -> None:
    """Raises UsageError if stages do not have equally many layers."""
    if devices == 1 and virtual_stages > 1:
        raise UsageError(
            f"--virtual-stages {virtual_stages} is of a pipeline; give pp in --mesh, as in 'pp=2'"
        )
    stages = devices * virtual_stages
    if layers % stages:
        raise UsageError(
            f"--layers {layers} does not divide among {stages} stages, of pp={devices} and "
            f"--virtual-stages {virtual_stages}: {layers} = {layers // stages} x {stages} + "
            f"{layers % stages}; give --layers {layers + -layers % stages}, or fewer stages"
        )


def lay_out(model: Model, mesh: Mesh | AbstractMesh, virtual_stages: int = 1) -> Layout:
    """Returns how the weights lie on a mesh.

    Raises:
      UsageError: a width that fsdp does not divide.
    """
    heads = head_layout(model.heads, model.kv_heads, mesh.shape["tp"])
    axes = {
        **dict.fromkeys(("scale", "choices")),
        "layers": Interleaved("pp", virtual_stages),
        "width": "fsdp",
        "vocabulary": Padded("tp"),
        "hidden": Padded("tp"),
        "heads": Padded("tp", size=heads.padded_heads * model.head_size),
        "kv_heads": "tp" if heads.kv_sharded else None,
        "experts": Padded("ep"),
    }
    rules = LayoutMap(RULES | (EXPERTS if model.experts else MLP), axes=axes, batch=LABELS)
    if model.tied:
        rules.pop("logits")
    try:
        return rules.layout(shapes(model), mesh)
    except LayoutError as error:
        raise UsageError(f"the mesh does not fit the model: {error.problems[0]}") from None


def initialise(model: Model, layout: Layout, seed: int) -> Any:
    """Draws the weights, each device its own shards: the same values on every mesh."""

    def draw(key: Array) -> Any:
        leaves, tree = jax.tree.flatten_with_path(shapes(model))
        keys = jax.random.split(key, len(leaves))
        return tree.unflatten(
            start(jax.tree_util.keystr(path[-1:], simple=True), leaf, model.layers, key)
            for (path, leaf), key in zip(leaves, keys, strict=True)
        )

    return layout.init(draw, jax.random.key(seed))


def start(name: str, shape: jax.ShapeDtypeStruct, layers: int, key: Array) -> Array:
    """Draws one weight.

    Uniformly: one multiplication rounds alike wherever it runs. What a normal distribution needs
    does not, and each mesh would start from weights that differ in their last bits.
    """
    if name.endswith("norm"):
        return jnp.ones(shape.shape, shape.dtype)
    # What goes into the residual stream is added up 2 * layers times.
    std = 0.02 / (2 * layers) ** 0.5 if name in ("output", "down") else 0.02
    bits = lax.bitcast_convert_type(jax.random.bits(key, shape.shape, jnp.uint32), jnp.int32)
    return bits.astype(shape.dtype) * jnp.asarray(std * 3**0.5 / 2**31, shape.dtype)


def count(model: Model) -> int:
    """Returns how many numbers the model has, without padding."""
    return sum(prod(weight.shape) for weight in jax.tree.leaves(shapes(model)))
