"""A scan over layers that gathers weights for use and never saves them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.extend.core import ClosedJaxpr, Literal, jaxpr_as_fun

from jaxpar.arguments.calls import of_user, public, type_error, value_error
from jaxpar.arguments.dtypes import addition_dtype
from jaxpar.arguments.types import Tree, TreeDim
from jaxpar.axis.axis import OF_FSDP, AxisLike, bind
from jaxpar.axis.checks import check_uncast
from jaxpar.axis.ring_order import Index
from jaxpar.axis.rounding import scales_among
from jaxpar.axis.scale_blocks import told_blocks, with_scales_of_layers
from jaxpar.axis.trees import as_arrays, check_own_leaves
from jaxpar.axis.vma import vary_over, varying_axes
from jaxpar.compiler.compat import optimization_barrier
from jaxpar.compiler.jaxprs import type_of
from jaxpar.layers._fsdp import (
    OR_WHOLE,
    Shards,
    bind_shards,
    broadcast_dim,
    gather_shards,
    scatter_gradients,
    vary_sharded,
)

Arrays = list[Any]


def is_float(x: Any) -> bool:
    return jnp.issubdtype(x.dtype, jnp.inexact)


def floats_of(arrays: Arrays) -> Arrays:
    return [x for x in arrays if is_float(x)]


def with_floats(arrays: Arrays, floats: Arrays) -> Arrays:
    left = iter(floats)
    return [next(left) if is_float(x) else x for x in arrays]


def all_gradients(arrays: Arrays, of_floats: Arrays) -> Arrays:
    """Returns all gradients, float0 zeros for non-floats."""
    left = iter(of_floats)
    return [
        next(left).astype(x.dtype) if is_float(x) else np.zeros(x.shape, jax.dtypes.float0)
        for x in arrays
    ]


@partial(jax.tree_util.register_dataclass, data_fields=["arrays"], meta_fields=["tree", "places"])
@dataclass(frozen=True)
class KeptResiduals:
    """The residuals a policy saves, without the layer's inputs.

    Attributes:
      places: for each leaf of the pullback, its place among the inputs, or None if in `arrays`.
    """

    arrays: Arrays
    tree: Any
    places: tuple[int | None, ...]

    def pullback(self, inputs: Arrays) -> Any:
        """Returns the pullback from inputs with regathered weights."""
        saved = iter(self.arrays)
        leaves = [next(saved) if place is None else inputs[place] for place in self.places]
        return jax.tree.unflatten(self.tree, leaves)


@dataclass(frozen=True)
class Layer:
    jaxpr: Any  # from (consts; weights, state) to the next state
    shards: Shards
    count: int  # the number of layers
    policy: Any  # of jax.checkpoint; None: saves only a layer's inputs

    def __call__(self, consts: Arrays, weights: Arrays, state: Arrays) -> Arrays:
        return jaxpr_as_fun(ClosedJaxpr(self.jaxpr, consts))(*weights, *state)

    def gather(self, stacked: Arrays, index: Any, after: Arrays) -> tuple[Arrays, Arrays]:
        """Gathers weights once `after` is computed; returns both."""
        shards = [lax.dynamic_index_in_dim(x, index, 0, keepdims=False) for x in stacked]
        # Otherwise a compiler could gather more layers at once than memory holds.
        shards, after = optimization_barrier((shards, after))
        return gather_shards(self.shards, shards), after

    def scatter(self, gradients: Arrays, weights: Arrays) -> Arrays:
        left = iter(gradients)
        of_all = [next(left) if is_float(x) else None for x in weights]
        scattered: Any = scatter_gradients(self.shards, of_all)
        return [x for x in scattered if x is not None]

    def keep(
        self, consts: Arrays, weights: Arrays, state: Arrays
    ) -> tuple[Arrays, Arrays | KeptResiduals]:
        if self.policy is None:
            return self(consts, weights, state), []
        trees: list[Any] = []

        def forward(*inputs: Arrays) -> tuple[Arrays, Arrays]:
            out, pullback = self._differentiate(*inputs)
            residuals, tree = jax.tree.flatten(pullback)
            trees.append(tree)
            return out, residuals

        # Traced by itself to find which residuals are inputs: weights must not be saved.
        closed, (out, _) = jax.make_jaxpr(forward, return_shape=True)(consts, weights, state)
        inputs = {var: place for place, var in enumerate(closed.jaxpr.invars)}
        residuals = closed.jaxpr.outvars[len(out) :]
        places = tuple(None if isinstance(v, Literal) else inputs.get(v) for v in residuals)
        results = jaxpr_as_fun(closed)(*consts, *weights, *state)
        arrays = [x for x, place in zip(results[len(out) :], places, strict=True) if place is None]
        return results[: len(out)], KeptResiduals(arrays, trees[-1], places)

    def pull(
        self,
        consts: Arrays,
        weights: Arrays,
        state: Arrays,
        kept: Arrays | KeptResiduals,
        cts: Arrays,
    ) -> Any:
        # To compute a layer again before another is done would take the memory of both. Weights
        # stay outside: the barrier waits for all of its operands, and some weights are used first.
        state, kept, cts = optimization_barrier((state, kept, cts))
        if isinstance(kept, KeptResiduals):
            return kept.pullback([*consts, *weights, *state])(cts)
        return self._differentiate(consts, weights, state)[1](cts)

    def _differentiate(self, consts: Arrays, weights: Arrays, state: Arrays) -> tuple[Arrays, Any]:
        def of_floats(c: Arrays, w: Arrays, s: Arrays) -> tuple[Arrays, Arrays]:
            out = layer(with_floats(consts, c), with_floats(weights, w), with_floats(state, s))
            return floats_of(out), out

        layer = self if self.policy is None else jax.checkpoint(self, policy=self.policy)
        floats = floats_of(consts), floats_of(weights), floats_of(state)
        _, pullback, out = jax.vjp(of_floats, *floats, has_aux=True)
        return out, pullback


@public
def fsdp_scan(
    layer_fn: Callable[[Any, Any], Any],
    stacked_params: Tree,
    x: Tree,
    axis: AxisLike,
    *,
    dim: TreeDim = 0,
    policy: Callable[..., Any] | None = None,
) -> Tree:
    """Applies layers in turn, and gathers the weights of each for its use.

    Args:
      layer_fn: `(params, x) -> x`, with full parameters. It may close over arrays, which get
        gradients too, and use collectives over any axis.
      stacked_params: pytree of local shards `[layers, ...]`. Scales of all layers are `[1, ...]`.
      x: pytree of local arrays. Layers keep its shapes and dtypes.
      axis: mesh axes that shard weights, or an `Axis` as in `fsdp_gather`.
      dim: as in `fsdp_gather`, not counting the dimension of layers.
      policy: residuals to save besides a layer's input, as in `jax.checkpoint`, such as
        `jax.checkpoint_policies.save_only_these_names("attention")`. None: no others.

    Returns:
      The last layer's result, varying over all mesh axes over which `x` or a layer's result varies.

    Raises:
      TypeError: a layer changes structure, shapes or dtypes of `x`.
      ValueError: as in `fsdp_gather`, or stacks are empty or of different lengths.

    Cost: a device sends (n-1)/n of each layer's weights in each pass, and of their gradients in the
    wire's dtype. Residuals are layers' inputs, the shards, and those that `policy` saves; the rest
    is recomputed. Gathered weights are never saved, but `policy` may save casts of them. One
    layer's weights are gathered at a time, without prefetching. With asynchronous collectives
    (`jaxpar.compiler_options`), gathers overlap with that layer's own work.

    Example:
      >>> mesh = make_mesh("fsdp=8")
      >>> def network(weights, x):  # weights [3, 8/8, 8], x [16/8, 8]
      ...     return fsdp_scan(lambda w, x: jnp.tanh(x @ w), weights, x, "fsdp")
      >>> f = jaxpar.jit(jax.shard_map(network, mesh=mesh, in_specs=(P(None, "fsdp"), P("fsdp")),
      ...     out_specs=P("fsdp")))
      >>> w, x = jnp.arange(192.0).reshape(3, 8, 8) / 999, jnp.arange(128.0).reshape(16, 8) / 128
      >>> wanted = jnp.tanh(jnp.tanh(jnp.tanh(x @ w[0]) @ w[1]) @ w[2])
      >>> np.testing.assert_allclose(f(w, x), wanted, rtol=1e-5)
    """
    check_policy(policy)
    stacked_params = with_scales_of_layers(as_arrays("stacked_params", stacked_params))
    stacked, params_tree = jax.tree.flatten(stacked_params)
    state, state_tree = jax.tree.flatten(as_arrays("x", x))
    count = _count_layers(stacked)
    first = [lax.index_in_dim(x, 0, 0, keepdims=False) for x in stacked]
    dims = broadcast_dim(dim, stacked_params)
    ring = bind(axis, takes=OF_FSDP)
    shards = bind_shards(first, dims, ring, scales_among(stacked_params))
    check_own_leaves("stacked_params", stacked_params, ring, "a shard", OR_WHOLE, dims)

    def flat_layer(weights: Arrays, state: Arrays) -> Arrays:
        params = told_blocks(params_tree.unflatten(first), params_tree.unflatten(weights))
        out = of_user(layer_fn, "layer_fn")(params, state_tree.unflatten(state))
        return _check_state(x, out)

    def trace_layer(stacked: Arrays, state: Arrays) -> Any:
        # Traced from arrays. Shapes do not say how arrays are sharded over axes that shard_map
        # leaves to the partitioner. JAX would fail if they vary over other axes.
        whole = gather_shards(shards, [x[0] for x in stacked])
        traced.append(jax.make_jaxpr(flat_layer)(whole, state))

    traced: list[ClosedJaxpr] = []
    stacked = uncast = vary_sharded(shards, stacked)
    while True:
        # Devices with the same weights sum gradients at the end, once for all layers.
        stacked = vary_over(varying_axes(state), stacked)
        # Traced again after each change of a type. These gathers are not in the program.
        jax.eval_shape(trace_layer, stacked, state)
        closed = traced.pop()
        # A layer's input must vary over all axes that its output varies over.
        types = [type_of(out).manual_axis_type for out in closed.jaxpr.outvars]
        wider = [vary_over(t.varying, s) for s, t in zip(state, types, strict=True)]
        if all(varying_axes(w) == varying_axes(s) for w, s in zip(wider, state, strict=True)):
            break
        state = wider
    check_uncast(trace_layer, uncast, stacked, state)
    consts = [jnp.asarray(const) for const in closed.consts]
    layer = Layer(closed.jaxpr, shards, count, policy)
    return state_tree.unflatten(_run(layer, consts, stacked, state))


@partial(jax.custom_vjp, nondiff_argnums=(0,))
def _run(layer: Layer, consts: Arrays, stacked: Arrays, state: Arrays) -> Arrays:
    return _forward(layer, consts, stacked, state)[0]


def _forward(layer: Layer, consts: Arrays, stacked: Arrays, state: Arrays) -> Any:
    def step(inputs: Arrays, index: Index) -> tuple[Arrays, tuple[Arrays, Any]]:
        weights, inputs = layer.gather(stacked, index, inputs)
        out, kept = layer.keep(consts, weights, inputs)
        return out, (inputs, kept)

    state, (inputs, kept) = lax.scan(step, state, jnp.arange(layer.count))
    return state, (consts, stacked, inputs, kept)


def _backward(layer: Layer, residuals: Any, cts: Arrays) -> Any:
    consts, stacked, inputs, kept = residuals

    def step(carry: Any, of_layer: Any) -> Any:
        cts, total = carry
        index, state, kept = of_layer
        weights, cts = layer.gather(stacked, index, cts)
        of_consts, gradients, cts = layer.pull(consts, weights, state, kept, cts)
        return (cts, _add(total, of_consts)), layer.scatter(gradients, weights)

    total = [jnp.zeros_like(x, addition_dtype(x.dtype)) for x in floats_of(consts)]
    layers = jnp.arange(layer.count), inputs, kept
    (cts, total), of_stacked = lax.scan(step, (floats_of(cts), total), layers, reverse=True)
    return (
        all_gradients(consts, total),
        all_gradients(stacked, of_stacked),
        all_gradients([x[0] for x in inputs], cts),
    )


_run.defvjp(_forward, _backward)


def _add(total: Arrays, more: Arrays) -> Arrays:
    return [t + m.astype(t.dtype) for t, m in zip(total, more, strict=True)]


def check_policy(policy: Any) -> None:
    if policy is not None and not callable(policy):
        raise type_error(
            f"policy must be a function, one of jax.checkpoint_policies, or None, got {policy!r}"
        )


def _count_layers(stacked: Arrays) -> int:
    lengths = {x.shape[:1] for x in stacked}
    if len(lengths) != 1 or () in lengths or (0,) in lengths:
        raise value_error(
            f"stacked_params must be arrays [layers, ...] of one number of layers, at "
            f"least 1, got local shapes {[x.shape for x in stacked]}"
        )
    return lengths.pop()[0]


def _check_state(state: Any, out: Any) -> Arrays:
    def types(tree: Any) -> Any:
        return jax.tree.map(lambda x: f"{jnp.asarray(x).dtype}{list(jnp.shape(x))}", tree)

    if types(state) != types(out):
        raise type_error(
            f"layer_fn must return what the next layer is given: x is {types(state)}, "
            f"and it returned {types(out)}; return the same structure, shapes and dtypes"
        )
    return [jnp.asarray(x) for x in jax.tree.leaves(out)]
