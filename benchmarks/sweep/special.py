"""Matmuls of the sweep that are no `Op`: of a transposed operand, and of two weights."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.tools.cli.ops import Ring, Shape, with_gradients


@dataclass(frozen=True)
class Special:
    """A matmul whose first operand is gathered along its rows.

    Attributes:
      own: of local operands and an axis.
      naive: of local operands and the names of the ring.
      plain: of global operands.
      shapes: of a global `M x K x N`, those of the operands.
      lhs: the dimension of the first operand that is sharded over the ring; of the second it is the
        last one, and of each result.
      results: how many.
    """

    own: Callable[..., Any]
    naive: Callable[..., Any]
    plain: Callable[..., Any]
    shapes: Callable[[int, int, int], tuple[tuple[int, ...], tuple[int, ...]]]
    lhs: int
    results: int = 1

    def specs(self, ring: Ring, shape: Shape) -> tuple[P, P, Any]:
        """The specs of both operands and of the results."""
        lhs, rhs = self.shapes(*shape)
        of_lhs = P(*(ring if dim == self.lhs else None for dim in range(len(lhs))))
        out = P(None, ring)
        of_rhs = P(*[None] * (len(rhs) - 1), ring)
        return of_lhs, of_rhs, out if self.results == 1 else (out,) * self.results

    def operands(self, shape: Shape, dtype: Any, mesh: Mesh, ring: Ring) -> list[Any]:
        """The global operands and cotangents, described."""
        (of_lhs, of_rhs, out), (lhs, rhs) = self.specs(ring, shape), self.shapes(*shape)
        m, _, n = shape

        def described(size: tuple[int, ...], spec: P) -> Any:
            return jax.ShapeDtypeStruct(size, dtype, sharding=NamedSharding(mesh, spec))

        ct = jax.tree.map(lambda spec: described((m, n), spec), out, is_leaf=_is_spec)
        return [described(lhs, of_lhs), described(rhs, of_rhs), ct]

    def mapped(self, local: Any, mesh: Mesh, ring: Ring, shape: Shape, grad: bool) -> Any:
        """Jits a function of local operands."""
        lhs, rhs, out = self.specs(ring, shape)
        function = jax.shard_map(local, mesh=mesh, in_specs=(lhs, rhs), out_specs=out)
        return jax.jit(with_gradients(function) if grad else function)

    def plain_jit(self, mesh: Mesh, ring: Ring, shape: Shape, grad: bool) -> Any:
        """Jits the matmul of global operands."""
        shardings = jax.tree.map(
            lambda spec: NamedSharding(mesh, spec), self.specs(ring, shape), is_leaf=_is_spec
        )
        lhs, rhs, out = shardings
        if grad:
            return jax.jit(with_gradients(self.plain), out_shardings=(out, lhs, rhs))
        return jax.jit(self.plain, out_shardings=out)


def _is_spec(x: Any) -> bool:
    return isinstance(x, P)


SPECIAL = {
    "gather-transposed": Special(
        own=lambda x, w, axis: jaxpar.collective_einsum("km,kn->mn", x, w, axis, gather="m"),
        naive=lambda x, w, ring: lax.all_gather(x, ring, axis=1, tiled=True).T @ w,
        plain=lambda x, w: x.T @ w,
        shapes=lambda m, k, n: ((k, m), (k, n)),
        lhs=1,
    ),
    "gather-for-two": Special(
        own=lambda x, w, axis: jaxpar.all_gather_matmul(x, (w[0], w[1]), axis),
        naive=lambda x, w, ring: tuple(
            jnp.matmul(y, w[n]) for y in [lax.all_gather(x, ring, tiled=True)] for n in (0, 1)
        ),
        plain=lambda x, w: (x @ w[0], x @ w[1]),
        shapes=lambda m, k, n: ((m, k), (2, k, n)),
        lhs=0,
        results=2,
    ),
}
