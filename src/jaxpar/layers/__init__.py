"""Layers as functions of local blocks, the parts of arrays that a device has in `jax.shard_map`."""

# Names of dimensions in the annotations of this folder. All arrays are local blocks.
#   tokens           positions of all sequences (*tokens: in several dimensions)
#   d                features of a token
#   columns          columns of a weight, such as hidden features or local logits
#   batch            sequences, in any number of dimensions
#   queries, keys    positions of queries, and positions of keys
#   groups           key and value heads
#   repeats          query heads for each key and value head
#   heads, size      query heads, and features of a head
#   of_value         features of a value head, if they differ from size

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.layers._activation import GatedActivation
    from jaxpar.layers._attention import HeadLayout, head_layout, parallel_attention
    from jaxpar.layers._compressed import reduce_compressed_gradients
    from jaxpar.layers._fsdp import fsdp_gather, fsdp_linear
    from jaxpar.layers._fsdp_scan import fsdp_scan
    from jaxpar.layers._gradients import mean_loss, mean_value_and_grad
    from jaxpar.layers._norm import layer_norm, rms_norm
    from jaxpar.layers._reduction import global_norm, reduce_gradients
    from jaxpar.layers._regions import copy_region, gather_region, reduce_region, scatter_region
    from jaxpar.layers._ring_attention import ring_attention, zigzag_order
    from jaxpar.layers._tensor import column_parallel_linear, gated_mlp, row_parallel_linear
    from jaxpar.layers._vocabulary import vocab_parallel_cross_entropy, vocab_parallel_embedding
else:
    __getattr__, __dir__ = names_on_demand(
        __name__,
        {
            "value_and_grad": ("mean_value_and_grad", {}),
            "vocabulary_parallel_cross_entropy": (
                "vocab_parallel_cross_entropy",
                {"sequence_dim": None},
            ),
            "vocabulary_parallel_embedding": ("vocab_parallel_embedding", {"sequence_dim": None}),
        },
    )

__all__ = [
    "GatedActivation",
    "HeadLayout",
    "column_parallel_linear",
    "copy_region",
    "fsdp_gather",
    "fsdp_linear",
    "fsdp_scan",
    "gated_mlp",
    "gather_region",
    "global_norm",
    "head_layout",
    "layer_norm",
    "mean_loss",
    "mean_value_and_grad",
    "parallel_attention",
    "reduce_compressed_gradients",
    "reduce_gradients",
    "reduce_region",
    "ring_attention",
    "rms_norm",
    "row_parallel_linear",
    "scatter_region",
    "vocab_parallel_cross_entropy",
    "vocab_parallel_embedding",
    "zigzag_order",
]
