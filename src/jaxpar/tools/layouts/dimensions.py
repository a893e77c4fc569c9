"""Traces a function once to find which dimensions belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr

from jaxpar.tools.layouts.classes import Made, Tokens
from jaxpar.tools.layouts.dim_follower import DimFollower
from jaxpar.tools.toolkit_api import arrays_of, filling, is_array

Classes = tuple[int, ...]  # a class's key for each dimension of an array


class Dimensions:
    """Dimensions of parameters and data, as classes to shard alike.

    `arrays` and `classes` are by path. `data` has the classes of each array of the data.
    """

    def __init__(self, closed: ClosedJaxpr, paths: Sequence[str | None]) -> None:
        # The path of an argument is None for data.
        self.flow = flow = DimFollower()
        shapes = [var.aval for var in closed.jaxpr.invars]
        tokens: list[Tokens] = [
            flow.fresh(x.shape) if path is None else Made.of(flow.fresh(x.shape), frozenset([path]))
            for path, x in zip(paths, shapes, strict=True)
        ]
        flow.follow(closed.jaxpr, [Made(flow.fresh(jnp.shape(c))) for c in closed.consts], tokens)
        classes: list[Classes] = [tuple(map(flow.of, keys)) for keys in tokens]
        known = list(zip(paths, shapes, classes, strict=True))
        self.arrays = {path: _shape_of(x) for path, x, _ in known if path is not None}
        self.classes = {path: keys for path, _, keys in known if path is not None}
        self.data = [keys for path, _, keys in known if path is None]

    @classmethod
    def of(cls, function: Callable[..., Any], params: Any, data: Any) -> Dimensions:
        filled, filled_data = filling(params), filling(data)
        weights, shapes = _shapes_in(params), _shapes_in(data)
        jaxpr = jax.make_jaxpr(
            lambda arrays, others: function(filled(arrays), filled_data(others))
        )(weights, shapes)
        paths = [array[0] for array in arrays_of(params)[0] if array is not None]
        return cls(jaxpr, [*paths, *[None] * len(shapes)])


def _shapes_in(tree: Any) -> list[jax.ShapeDtypeStruct]:
    return [_shape_of(leaf) for leaf in jax.tree.leaves(tree) if is_array(leaf)]


def _shape_of(x: Any) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(jnp.shape(x), jnp.result_type(x))
