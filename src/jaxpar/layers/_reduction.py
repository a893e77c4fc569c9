"""Sums over the axes that replicate leaves, and norms over the axes that shard them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import PartitionSpec
from jax.tree_util import keystr
from jaxtyping import Float, Num

from jaxpar.arguments.calls import called, public, type_error, value_error
from jaxpar.arguments.dtypes import addition_dtype, bits_of, check_wire, common_dtype
from jaxpar.arguments.types import Tree
from jaxpar.axis.axis import AxisLike, Ring, bind, bind_any
from jaxpar.axis.checks import check_whole
from jaxpar.axis.rounding import scales_among
from jaxpar.axis.trees import as_arrays, check_own_leaves
from jaxpar.axis.vma import checks_varying, vary_over, varying_axes

OF_GROUPS = "in groups= if devices along them have models of their own"


@public
def reduce_gradients(
    grads: Tree, axis: AxisLike, *, specs: Any = None, bucket_bytes: Any = None
) -> Tree:
    """Sums gradients over devices, one by one or joined into buckets.

    Not needed with `mean_value_and_grad`, which includes it.

    Args:
      grads: pytree of partial sums.
      axis: as in `reduce_region`.
      specs: pytree prefix of `PartitionSpec`s, as in `in_specs`. A leaf is not summed over axes
        that shard it. None: sums over all of `axis`.
      bucket_bytes: the most bytes in a bucket of leaves with one dtype and the same axes. None: one
        psum a leaf.

    Returns:
      A pytree like `grads`, summed. A leaf typed as replicated over an axis stays as it is, as JAX
      has summed it already.

    Raises:
      ValueError: `bucket_bytes` is below 1, or `specs` is no prefix of `grads`.

    Cost: psums of all leaves, 2 (n-1)/n of their bytes. Buckets copy leaves twice.

    Example:
      >>> mesh = make_mesh("dp=8")
      >>> total = jaxpar.jit(jax.shard_map(
      ...     lambda g: reduce_gradients({"w": g, "b": 2 * g}, "dp", bucket_bytes=1024),
      ...     mesh=mesh, in_specs=P("dp"), out_specs=P()))
      >>> total(jnp.arange(8.0))
      {'b': Array([56.], dtype=float32), 'w': Array([28.], dtype=float32)}

    Source: Li et al., "PyTorch distributed" (VLDB 2020).
    """
    ring = bind(axis, takes=("wire_dtype",))
    limit = check_bucket(bucket_bytes)
    leaves, treedef = jax.tree.flatten(as_arrays("grads", grads, "sum"))
    sharded = spec_axes(grads, PartitionSpec() if specs is None else specs)
    summed = [set(ring.names) - axes for axes in sharded]
    if checks_varying(ring.names):
        summed = [axes & varying_axes(leaf) for axes, leaf in zip(summed, leaves, strict=True)]
    wires = [ring.wire(leaf.dtype) for leaf in leaves]
    return treedef.unflatten(sum_leaves(leaves, summed, limit, wires))


@public
def global_norm(tree: Any, *, specs: Any = None, groups: AxisLike = ()) -> Array:
    """Computes the Euclidean norm of the global arrays of a pytree of shards.

    Args:
      tree: pytree of local arrays, each replicated over axes that do not shard it.
      specs: as in `mean_value_and_grad`, a prefix of `tree`.
      groups: mesh axes along which each index has its own norm.

    Returns:
      A scalar, replicated over all axes but `groups`: float32, or float64 if a leaf is.

    Raises:
      ValueError: specs are missing under `check_vma=False`, are no prefix of `tree`, disagree with
        the axes over which leaves vary, or name an unknown axis.

    Cost: a scalar psum for each distinct set of sharding axes.

    Example:
      >>> mesh = make_mesh("dp=2,tp=4")
      >>> norm = jaxpar.jit(jax.shard_map(lambda w, b: global_norm((w, b)),
      ...     mesh=mesh, in_specs=(P("tp"), P()), out_specs=P()))
      >>> norm(jnp.arange(8.0), jnp.array([2.0]))
      Array(12., dtype=float32)
    """
    tree = as_arrays("tree", tree, "norm")
    squares: dict[tuple[str, ...], Array] = {}
    axes_of_leaves = sharded_axes("tree", tree, specs, bind_any(groups, "groups", takes=()).names)
    for leaf, axes in zip(jax.tree.leaves(tree), axes_of_leaves, strict=True):
        exact = not jnp.issubdtype(leaf.dtype, jnp.inexact)  # squares of integers would overflow
        wide = jnp.abs(leaf.astype("float32" if exact else addition_dtype(leaf.dtype)))
        key, square = tuple(sorted(axes)), jnp.sum(wide * wide)
        squares[key] = _add(squares[key], square) if key in squares else square
    total = jnp.zeros((), "float32")
    for axes, square in squares.items():
        total = _add(total, lax.psum(square, axes) if axes else square)
    return jnp.sqrt(total)


def sum_leaves(
    leaves: list[Array], axes: Iterable[set[str]], bucket_bytes: int | None, wires: list[Any]
) -> Any:
    """Sums leaves in wire dtypes; keeps their dtypes."""
    dtypes, sums = [leaf.dtype for leaf in leaves], list(leaves)
    alike: dict[Any, list[int]] = {}
    for at, (leaf, names, wire) in enumerate(zip(leaves, axes, wires, strict=True)):
        check_wire(wire, leaf.dtype)
        if names:  # leaves that vary over different axes would lose their types if joined
            sums[at] = leaf.astype(wire)
            key = sums[at].dtype, tuple(sorted(names)), varying_axes(leaf) | names
            alike.setdefault(key, []).append(at)
    for (_, names, varying), places in alike.items():
        for bucket in _buckets(sums, places, bucket_bytes):
            parts = [vary_over(varying, sums[at]) for at in bucket]
            for at, total in zip(bucket, _psum_joined(parts, names), strict=True):
                sums[at] = total
    return [leaf.astype(dtype) for leaf, dtype in zip(sums, dtypes, strict=True)]


def _buckets(leaves: list[Array], places: list[int], limit: int | None) -> list[list[int]]:
    buckets: list[list[int]] = []
    room = 0
    for at in places:
        size = leaves[at].size * bits_of(leaves[at].dtype) // 8
        if limit is None or not buckets or size > room:
            buckets.append([])
            room = limit or 0
        buckets[-1].append(at)
        room -= size
    return buckets


def _psum_joined(
    parts: list[Num[Array, " ..."]], names: tuple[str, ...]
) -> list[Num[Array, " ..."]]:
    if len(parts) == 1:
        return [lax.psum(parts[0], names)]
    total = lax.psum(jnp.concatenate([part.reshape(-1) for part in parts]), names)
    ends = [0]
    for part in parts:
        ends.append(ends[-1] + part.size)
    return [
        total[start:end].reshape(part.shape)
        for part, start, end in zip(parts, ends[:-1], ends[1:], strict=True)
    ]


def check_bucket(bucket_bytes: Any) -> int | None:
    return None if bucket_bytes is None else check_whole("bucket_bytes", bucket_bytes, 1)


def manual_axes() -> tuple[str, ...]:
    """Returns `jax.shard_map`'s axes, in mesh order."""
    mesh = jax.sharding.get_abstract_mesh()
    return tuple(name for name in mesh.axis_names if name in mesh.manual_axes)


def sharded_axes(
    argument: str, tree: Any, specs: Any, groups: tuple[str, ...] | None = None
) -> list[set[str]]:
    """Returns axes that shard leaves, by type or spec, but `groups`, if the function takes them."""
    axes, apart = manual_axes(), set(groups or ())
    if not axes or not checks_varying(axes):
        if axes and specs is None:
            raise value_error(
                "under check_vma=False types do not say over which axes a leaf is "
                "sharded; pass specs=, the in_specs of the tree"
            )
        named = spec_axes(tree, specs if axes else PartitionSpec())
        return [names - apart for names in named]
    typed = [set(varying_axes(leaf)) - apart for leaf in jax.tree.leaves(tree)]
    if specs is not None:
        paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
        for path, by_type, said in zip(paths, typed, spec_axes(tree, specs), strict=True):
            if by_type != said - apart:
                others = "" if groups is None else f"; name axes {OF_GROUPS}"
                raise value_error(
                    f"{argument}{keystr(path)} varies over {sorted(by_type)}, but its spec "
                    f"shards it over {sorted(said)}; give the in_specs of the tree, or leave out "
                    f"specs=, which check_vma=True does not need{others}"
                )
    return typed


def check_own_shards(
    argument: str, tree: Any, specs: Any, ring: Ring, what: str, remedy: str
) -> None:
    """As `check_own_leaves`, by spec where types do not tell."""
    if checks_varying(ring.names):
        check_own_leaves(argument, tree, ring, what, remedy)
        return
    paths = [path for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
    axes_of_leaves = sharded_axes(argument, tree, specs)
    for path, axes, scales in zip(paths, axes_of_leaves, scales_among(tree), strict=True):
        copied = [name for name in ring.names if name not in axes and lax.axis_size(name) > 1]
        if copied and not scales:
            raise value_error(
                f"the spec of {argument}{keystr(path)} lacks {copied}, but each device of {ring} "
                f"needs {what} of its own; {remedy}. specs= are the in_specs that shard_map got"
            )


def spec_axes(tree: Any, specs: Any) -> list[set[str]]:
    """Returns each leaf's axes in `specs`, a prefix."""

    def is_spec(x: Any) -> bool:
        return x is None or isinstance(x, PartitionSpec)

    of_leaves: list[set[str]] = []
    bound = manual_axes()

    def add(spec: Any, part: Any) -> None:
        leaves = jax.tree.leaves(part)
        if leaves and not isinstance(spec, PartitionSpec):
            raise type_error(f"specs must hold PartitionSpecs, got {spec!r}")
        axes = _named(spec) if leaves else set[str]()
        if not axes <= set(bound):
            raise value_error(
                f"specs name {sorted(axes - set(bound))}, but the axes bound "
                f"here are {list(bound)}; give the specs that shard_map got"
            )
        of_leaves.extend(axes for _ in leaves)

    try:
        jax.tree.map(add, specs, tree, is_leaf=is_spec)
    except ValueError as error:
        if str(error).startswith(called()):
            raise
        raise value_error(
            f"specs are no pytree prefix of what they describe: {error}; give the specs that "
            "shard_map got"
        ) from None
    return of_leaves


def _named(spec: PartitionSpec) -> set[str]:
    entries: list[Any] = [e if isinstance(e, tuple) else (e,) for e in tuple(spec)]
    return {name for entry in entries for name in entry if isinstance(name, str)}


def _add(x: Float[Array, ""], y: Float[Array, ""]) -> Float[Array, ""]:
    dtype = common_dtype(x.dtype, y.dtype)
    return x.astype(dtype) + y.astype(dtype)
