"""The model's weights: one table of their shapes, their padding, their shards and their start.

Every mesh starts from the same values, and a checkpoint holds no padding: arrays are drawn and
saved in their logical shapes, and padded with zeros where a mesh does not divide them.
"""

from dataclasses import dataclass
from functools import cached_property
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar.cli._console import UsageError
from jaxpar.layers import head_layout
from language_model.config import Model
from language_model.parallel import Sizes


@dataclass(frozen=True)
class Weight:
    """One weight: a leaf of the tables below."""

    shape: tuple[int, ...]  # logical
    padded: tuple[int, ...]  # what the mesh divides; padding is zeros at the end of a dimension
    spec: P
    std: float | None  # of the uniform distribution that it starts from; None: ones

    @cached_property
    def logical_spec(self) -> P:
        """The shards of the logical array: whole along a dimension that has padding."""
        sizes = zip(self.spec, self.shape, self.padded, strict=True)
        return P(*(name if size == padded else None for name, size, padded in sizes))

    def fsdp_dim(self, stacked: int) -> int | None:
        """The dimension that fsdp shards, counted behind that of layers; None where it does not."""
        return self.spec.index("fsdp") - stacked if "fsdp" in self.spec else None


def weights(model: Model, sizes: Sizes) -> dict[str, Any]:
    """Returns the table, shaped like the parameters, for a mesh of these sizes.

    Raises:
      UsageError: a width that fsdp does not divide.
    """
    fsdp, tp = sizes["fsdp"], sizes["tp"]
    if model.width % fsdp:
        raise UsageError(
            f"fsdp={fsdp} shards each weight along the width {model.width}, which it does not "
            f"divide; choose a width of {-(-model.width // fsdp) * fsdp}, or a smaller fsdp"
        )
    width, layers, size = model.width, model.layers, model.head_size
    heads = head_layout(model.heads, model.kv_heads, tp)
    vocabulary, hidden = _ceil(model.vocabulary, tp), _ceil(model.hidden, tp)
    deep = 0.02 / (2 * layers) ** 0.5  # into the residual stream, which adds up 2 * layers of them

    def into(count: int, padded: int, axis: str | None) -> Weight:
        return Weight((layers, width, count), (layers, width, padded), P(None, "fsdp", axis), 0.02)

    def out_of(count: int, padded: int) -> Weight:
        return Weight((layers, count, width), (layers, padded, width), P(None, "tp", "fsdp"), deep)

    def of_each_expert(one: Weight) -> Weight:
        shape = (layers, model.experts, *one.shape[1:])
        padded = (layers, _ceil(model.experts, sizes["ep"]), *one.padded[1:])
        return Weight(shape, padded, P(None, "ep", *one.spec[1:]), one.std)

    def scale(*shape: int) -> Weight:
        return Weight(shape, shape, P(*(None for _ in shape)), None)

    queries = (model.heads * size, heads.padded_heads * size)
    keys = (model.kv_heads * size, model.kv_heads * size, "tp" if heads.kv_sharded else None)
    table: dict[str, Any] = {
        "embedding": Weight((model.vocabulary, width), (vocabulary, width), P("tp", "fsdp"), 0.02),
        "final_norm": scale(width),
        "layers": {
            "attention_norm": scale(layers, width),
            "query": into(*queries, "tp"),
            "key": into(*keys),
            "value": into(*keys),
            "output": out_of(*queries),
            "mlp_norm": scale(layers, width),
            "gate": into(model.hidden, hidden, "tp"),
            "up": into(model.hidden, hidden, "tp"),
            "down": out_of(model.hidden, hidden),
        },
    }
    if model.experts:
        of_layer = table["layers"]
        of_layer |= {name: of_each_expert(of_layer[name]) for name in ("gate", "up", "down")}
        of_layer["router"] = into(model.experts, model.experts, None)
    if not model.tied:
        table["logits"] = Weight(
            (width, model.vocabulary), (width, vocabulary), P("fsdp", "tp"), 0.02
        )
    return table


def specs(table: Any) -> Any:
    """Returns the `PartitionSpec` of each weight."""
    return _map(lambda weight: weight.spec, table)


def shardings(table: Any, mesh: Mesh, *, logical: bool = False) -> Any:
    """Returns the sharding of each padded, or each logical, weight."""
    return _map(
        lambda weight: NamedSharding(mesh, weight.logical_spec if logical else weight.spec), table
    )


def initialise(model: Model, mesh: Mesh, seed: int) -> Any:
    """Draws the weights, each device its own shards: the same values on every mesh."""
    table = weights(model, dict(mesh.shape))

    def draw(key: Array) -> Any:
        leaves, tree = jax.tree.flatten(table, is_leaf=_is_weight)
        keys = jax.random.split(key, len(leaves))
        return tree.unflatten(
            pad(weight, start(weight, key, model.weight_dtype))
            for weight, key in zip(leaves, keys, strict=True)
        )

    return jax.jit(draw, out_shardings=shardings(table, mesh))(jax.random.key(seed))


def start(weight: Weight, key: Array, dtype: str) -> Array:
    """Draws one logical weight.

    Uniformly: one multiplication rounds alike wherever it runs. What a normal distribution needs
    does not, and each mesh would start from weights that differ in their last bits.
    """
    if weight.std is None:
        return jnp.ones(weight.shape, dtype)
    bits = lax.bitcast_convert_type(jax.random.bits(key, weight.shape, jnp.uint32), jnp.int32)
    return bits.astype(dtype) * jnp.asarray(weight.std * 3**0.5 / 2**31, dtype)


def pad(weight: Weight, array: Array) -> Array:
    """Adds the zeros that a mesh needs.

    They stay zeros: their gradients are zero, and so are the optimizer's moments and the decay.
    """
    return jnp.pad(array, [(0, p - n) for n, p in zip(weight.shape, weight.padded, strict=True)])


def unpad(weight: Weight, array: Array) -> Array:
    """Takes them away."""
    return array[tuple(slice(n) for n in weight.shape)]


def count(table: Any) -> int:
    """Returns how many numbers the model has, without padding."""
    return sum(prod(weight.shape) for weight in jax.tree.leaves(table))


def _map(function: Any, table: Any) -> Any:
    return jax.tree.map(function, table, is_leaf=_is_weight)


def _is_weight(node: Any) -> bool:
    return isinstance(node, Weight)


def _ceil(count: int, parts: int) -> int:
    return -(-count // parts) * parts
