"""The other ways to compute what jaxpar computes: the peers.

All are compiled with the options that the chip should have, and `naive` once more without.

`naive` is a collective and a matmul in `shard_map`; `XLA post_spmd` the same, which the TPU
compiler is told to decompose; `XLA plain jit` a matmul of global arrays, left to the partitioner.
It would use further axes of the mesh, over which the others repeat the work of one ring, to divide
that work; so there they shard rows of their own, or a batch dimension, whichever is faster. It is
compiled once with its matmuls whole and once as the partitioner cuts them, and the faster counts.
The two rings are those of a public guide: unrolled in Python, without barriers, differentiated by
autodiff, and both ways with every block cut into halves that travel apart.
"""

from collections.abc import Callable, Iterator
from math import prod
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.platforms.compilers import WHOLE_MATMULS
from jaxpar.tools.cli.ops import OPS, Ring, Shape, with_gradients

Local = Callable[[Array, Array, Ring], Array]

DEFAULT = "naive, default options"
PEERS = ("naive", DEFAULT, "XLA post_spmd", "XLA plain jit", "guide one way", "guide both ways")
POST_SPMD = {
    "xla_tpu_all_gather_collective_matmul_mode": "post_spmd",
    "xla_tpu_reduce_scatter_collective_matmul_mode": "post_spmd",
}


def operands(op: str, shape: Shape, dtype: Any, mesh: Mesh, ring: Ring) -> list[Any]:
    """Describes the global lhs, rhs and cotangent of a matmul `M x K x N` over one ring."""
    m, k, n = shape
    sizes, specs = ((m, k), (k, n), (m, n)), OPS[op].specs(ring)
    return [_described(size, dtype, mesh, spec) for size, spec in zip(sizes, specs, strict=True)]


def build(peer: str, op: str, mesh: Mesh, ring: Ring, *, grad: bool) -> Callable[..., Any]:
    """Returns the jitted function of global operands of a peer that is written in `shard_map`.

    Args:
      peer: one of `PEERS`, not the plain jit.
      op: a name in `OPS` that has a form here.
      mesh: the devices.
      ring: the axes of the mesh that form the ring.
      grad: forward and backward: of lhs, rhs and a cotangent, gives the result and both gradients.
    """
    lhs, rhs, out = OPS[op].specs(ring)
    one_way, both_ways = _rings(_GUIDE[op]) if op in _GUIDE else (None, None)
    local = {"guide one way": one_way, "guide both ways": both_ways}.get(peer, _NAIVE[op])
    function = jax.shard_map(
        lambda x, w: local(x, w, ring), mesh=mesh, in_specs=(lhs, rhs), out_specs=out
    )
    return jax.jit(with_gradients(function) if grad else function)


def plain_jit(
    op: str, shape: Shape, dtype: Any, mesh: Mesh, ring: Ring, *, grad: bool
) -> list[tuple[Callable[..., Any], list[Any]]]:
    """Returns the plain matmul, jitted, with its operands; once for each layout that is fair."""
    described = operands(op, shape, dtype, mesh, ring)
    others = tuple(name for name in mesh.axis_names if name not in ring)
    if others:
        copies = prod(mesh.shape[name] for name in others)
        batches = [_batched(x, others, copies) for x in described]
        rows = [_more_rows(x, others, copies) for x in (described[0], described[2])]
        # With rows the gradient of rhs would be summed over the other axes, which no peer does.
        layouts = [batches] if grad else [batches, [rows[0], described[1], rows[1]]]
    else:
        layouts = [described]
    return [(_matmul([x.sharding for x in layout], grad), layout) for layout in layouts]


def compiler_options(peer: str, common: dict[str, Any]) -> dict[str, Any]:
    """The options that a peer is compiled with, of those that all forms get and its own."""
    if peer == DEFAULT:
        return {}
    return {**common, **POST_SPMD} if peer == "XLA post_spmd" else common


def plain_options(common: dict[str, Any]) -> list[dict[str, Any]]:
    """Those that all forms get, and the same but that the partitioner may cut matmuls."""
    cut = {name: value for name, value in common.items() if name != WHOLE_MATMULS.name}
    return [common] if cut == common else [common, cut]


def _matmul(shardings: list[Any], grad: bool) -> Callable[..., Any]:
    lhs, rhs, out = shardings
    if grad:
        return jax.jit(with_gradients(jnp.matmul), out_shardings=(out, lhs, rhs))
    return jax.jit(jnp.matmul, out_shardings=out)


def _described(size: tuple[int, ...], dtype: Any, mesh: Mesh, spec: PartitionSpec) -> Any:
    return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))


def _batched(x: Any, axes: Ring, copies: int) -> Any:
    spec = PartitionSpec(axes, *x.sharding.spec)
    return _described((copies, *x.shape), x.dtype, x.sharding.mesh, spec)


def _more_rows(x: Any, axes: Ring, copies: int) -> Any:
    rows, cols = x.sharding.spec
    spec = PartitionSpec((*axes, *((rows,) if isinstance(rows, str) else rows or ())), cols)
    return _described((x.shape[0] * copies, x.shape[1]), x.dtype, x.sharding.mesh, spec)


# -- the guide's rings ---------------------------------------------------------------------------


def shift(x: Array, ring: Ring, by: int) -> Array:
    """Sends to the device `by` places further on the ring."""
    n = lax.axis_size(ring)
    return lax.ppermute(x, ring, [(i, (i + by) % n) for i in range(n)])


def arrivals(block: Array, ring: Ring, dim: int, *, both: bool) -> Iterator[tuple[Array, Array]]:
    """Yields what a device has of the gathered array after each step, and where it starts.

    Args:
      block: this device's own, which is sent on and on; cut in two along `dim` to go both ways.
      ring: the axes of the ring.
      dim: the dimension along which the array is gathered.
      both: both ways.
    """
    n, i, size = lax.axis_size(ring), lax.axis_index(ring), block.shape[dim]
    parts = jnp.split(block, 2, axis=dim) if both else [block]
    for s in range(n):
        for number, (part, by) in enumerate(zip(parts, (1, -1), strict=False)):
            yield (i - by * s) % n * size + number * part.shape[dim], part
        if s < n - 1:
            parts = [shift(part, ring, by) for part, by in zip(parts, (1, -1), strict=False)]


def gather_lhs_rows(lhs: Array, rhs: Array, ring: Ring, *, both: bool) -> Array:
    """Places the product of each arrival into its rows."""
    out = jnp.zeros((lhs.shape[0] * lax.axis_size(ring), rhs.shape[1]), lhs.dtype)
    for start, part in arrivals(lhs, ring, 0, both=both):
        out = lax.dynamic_update_slice_in_dim(out, part @ rhs, start, 0)
    return out


def gather_rhs_cols(lhs: Array, rhs: Array, ring: Ring, *, both: bool) -> Array:
    """Places the product of each arrival into its columns."""
    out = jnp.zeros((lhs.shape[0], rhs.shape[1] * lax.axis_size(ring)), lhs.dtype)
    for start, part in arrivals(rhs, ring, 1, both=both):
        out = lax.dynamic_update_slice_in_dim(out, lhs @ part, start, 1)
    return out


def gather_rhs_k(lhs: Array, rhs: Array, ring: Ring, *, both: bool) -> Array:
    """Adds up the products of each arrival and the columns of lhs that belong to it."""
    products = [
        lax.dynamic_slice_in_dim(lhs, start, part.shape[0], 1) @ part
        for start, part in arrivals(rhs, ring, 0, both=both)
    ]
    return sum(products[1:], start=products[0])


def scatter_rows(lhs: Array, rhs: Array, ring: Ring, *, both: bool) -> Array:
    """Sends sums on and on, each to its own device, and adds this device's rows to each."""
    n, i = lax.axis_size(ring), lax.axis_index(ring)
    rows = lhs.shape[0] // n
    directions = (-1, 1) if both else (-1,)
    size = rows // len(directions)
    sums: list[Array] = []
    for s in range(n):
        starts = [
            (i - by * (s + 1)) % n * rows + number * size for number, by in enumerate(directions)
        ]
        products = [lax.dynamic_slice_in_dim(lhs, start, size, 0) @ rhs for start in starts]
        moved = [shift(total, ring, by) for total, by in zip(sums, directions, strict=False)]
        sums = [a + b for a, b in zip(moved, products, strict=True)] if moved else products
    return jnp.concatenate(sums) if both else sums[0]


# -- every form --------------------------------------------------


def _rings(ring_form: Callable[..., Array]) -> tuple[Local, Local]:
    return (
        lambda lhs, rhs, ring: ring_form(lhs, rhs, ring, both=False),
        lambda lhs, rhs, ring: ring_form(lhs, rhs, ring, both=True),
    )


_GUIDE = {
    "gather-lhs-rows": gather_lhs_rows,
    "gather-rhs-k": gather_rhs_k,
    "gather-rhs-cols": gather_rhs_cols,
    "scatter-rows": scatter_rows,
}


def _gather(x: Array, ring: Ring, dim: int) -> Array:
    return lax.all_gather(x, ring, axis=dim, tiled=True)


def _scatter(x: Array, ring: Ring, dim: int) -> Array:
    return lax.psum_scatter(x, ring, scatter_dimension=dim, tiled=True)


_NAIVE: dict[str, Local] = {
    "gather-lhs-rows": lambda lhs, rhs, ring: _gather(lhs, ring, 0) @ rhs,
    "gather-lhs-k": lambda lhs, rhs, ring: _gather(lhs, ring, 1) @ rhs,
    "gather-rhs-k": lambda lhs, rhs, ring: lhs @ _gather(rhs, ring, 0),
    "gather-rhs-cols": lambda lhs, rhs, ring: lhs @ _gather(rhs, ring, 1),
    "scatter-rows": lambda lhs, rhs, ring: _scatter(lhs @ rhs, ring, 0),
    "scatter-cols": lambda lhs, rhs, ring: _scatter(lhs @ rhs, ring, 1),
    "all-reduce": lambda lhs, rhs, ring: lax.psum(lhs @ rhs, ring),
}
