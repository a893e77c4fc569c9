"""Varying mesh axes: the axes over which a value differs between devices.

`jax.shard_map` tracks them under `check_vma=True`.
"""

from collections.abc import Iterable
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import DTypeLike

from jaxpar.arguments.dtypes import addition_dtype, check_wire, common_dtype, summed_as


def varying_axes(*trees: Any) -> frozenset[str]:
    """Returns axes over which leaves vary; none under `check_vma=False`."""
    leaves = jax.tree.leaves(trees)
    return frozenset[str]().union(*(jax.typeof(x).manual_axis_type.varying for x in leaves))


def checks_varying(axis: tuple[str, ...]) -> bool:
    # A type is enough. An index would add an equation to the program at each cast.
    kind = _index_over(axis).eval_shape().manual_axis_type
    return kind is not None and bool(kind.varying)


_index_over = cache(lambda axis: jax.jit(lambda: lax.axis_index(axis)))  # JAX caches its types


def vary_over(axes: Iterable[str], tree: Any) -> Any:
    """Types leaves as varying over `axes`, too; the derivative is a psum."""
    wanted = frozenset(axes)
    if not any(wanted - varying_axes(x) for x in jax.tree.leaves(tree)):
        return tree
    if not checks_varying(tuple(sorted(wanted))):  # under check_vma=False
        return tree

    def vary(x: jax.Array) -> jax.Array:
        missing = tuple(sorted(wanted - varying_axes(x)))  # sorted: one program on all hosts
        return lax.pcast(x, missing, to="varying") if missing else x

    return jax.tree.map(vary, tree)


def spec_of(x: jax.Array) -> tuple[Any, ...]:
    """Returns the explicit axes that shard each dimension."""
    spec = tuple(jax.typeof(x).sharding.spec)
    return spec + (None,) * (x.ndim - len(spec))


def vary_wide(axes: Iterable[str], x: jax.Array) -> jax.Array:
    """Types x as varying, in the dtype of sums, also its derivative's."""
    return vary_over(axes, x.astype(addition_dtype(x.dtype)))


def vary_on_wire(axes: Iterable[str], x: jax.Array, wire_dtype: Any) -> jax.Array:
    """Types x as varying, in the dtype of sums.

    The derivative sums in the dtype of x, or in a wider `wire_dtype`.
    """
    check_wire(wire_dtype, x.dtype)
    asked, wide = summed_as(wire_dtype, x.dtype), addition_dtype(x.dtype)
    wire = x.dtype if asked is None else common_dtype(x.dtype, asked)  # the wider
    return vary_over(axes, x.astype(wire)).astype(wide)  # backward: the psum is in `wire`


def vary_alike(axis: tuple[str, ...], *trees: Any) -> Any:
    """Types leaves as varying over `axis` and each other's axes."""
    return vary_over(varying_axes(*trees) | set(axis), trees)


def zeros_alike(shape: tuple[int, ...], dtype: DTypeLike, *like: Any) -> jax.Array:
    """Returns zeros that vary like `like`, as a loop's carry must."""
    return vary_over(varying_axes(*like), jnp.zeros(shape, dtype))
