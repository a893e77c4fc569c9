"""Which dimensions of a function's parameters and data go together, found by one trace of it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.tools.layouts.classes import Made, Tokens
from jaxpar.tools.layouts.dim_follower import DimFollower
from jaxpar.tools.private_names import arrays_of, filling, is_array

Classes = tuple[int, ...]  # one for each dimension of an array


class Dimensions:
    """The dimensions of parameters and data as classes of those that must be sharded alike.

    Attributes:
      flow: what the trace says of matmuls and sums.
      arrays: path -> shape and dtype of each parameter.
      classes: path -> the classes of its dimensions.
      data: the classes of the dimensions of each leaf of the data.
    """

    def __init__(self, function: Callable[..., Any], params: Any, data: Any) -> None:
        """Traces `function(params, data)`."""
        filled = filling(params)
        given = [_shape_of(leaf) for leaf in jax.tree.leaves(params) if is_array(leaf)]
        shapes = jax.tree.map(_shape_of, data)
        jaxpr = jax.make_jaxpr(lambda arrays, data: function(filled(arrays), data))(given, shapes)
        self.flow = flow = DimFollower()
        paths = [found[0] for found in arrays_of(params)[0] if found is not None]
        weights: list[Tokens] = [
            Made.of(flow.fresh(x.shape), frozenset([path]))
            for path, x in zip(paths, given, strict=True)
        ]
        tokens = weights + [flow.fresh(x.shape) for x in jax.tree.leaves(shapes)]
        flow.follow(jaxpr.jaxpr, [Made(flow.fresh(jnp.shape(c))) for c in jaxpr.consts], tokens)
        classes: list[Classes] = [tuple(map(flow.of, own)) for own in tokens]
        self.arrays = dict(zip(paths, given, strict=True))
        self.classes = dict(zip(paths, classes, strict=False))
        self.data = classes[len(given) :]


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
