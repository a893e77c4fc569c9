"""Operations: shardings of a global M x K x N, and functions to time."""

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
from jax import lax
from jax.sharding import Mesh, PartitionSpec

import jaxpar
from jaxpar.tools.cli.console import UsageError

MODES = ("naive", "unidirectional", "bidirectional")

Shape = tuple[int, int, int]  # global M, K, N of lhs[M, K] @ rhs[K, N]
Ring = tuple[str, ...]  # the mesh axes that form the ring


@dataclass(frozen=True)
class Op:
    """One way to shard `lhs[M, K] @ rhs[K, N] = out[M, N]` over a ring.

    `lhs`, `rhs` and `out` name their sharded dimension, or are empty. Other mesh axes replicate, so
    each ring does the same work.
    """

    name: str
    lhs: str
    rhs: str
    out: str
    local: Callable[..., Any]  # of lhs, rhs, ring and mode

    def specs(self, ring: Ring) -> tuple[PartitionSpec, PartitionSpec, PartitionSpec]:
        def spec(dims: str, sharded: str) -> PartitionSpec:
            return PartitionSpec(*(ring if dim == sharded else None for dim in dims))

        return spec("MK", self.lhs), spec("KN", self.rhs), spec("MN", self.out)

    def bind(self, mesh: Mesh, ring: Ring, mode: str, **options: Any) -> Callable[[Any, Any], Any]:
        lhs, rhs, out = self.specs(ring)
        return jax.shard_map(
            lambda lhs, rhs: self.local(lhs, rhs, ring, mode, **options),
            mesh=mesh,
            in_specs=(lhs, rhs),
            out_specs=out,
        )

    def on_one_device(self, shape: Shape, size: int) -> tuple[Shape, int]:
        """Returns a device's M, K, N and numbers moved."""
        rows, depth, cols = shape
        if self.lhs == self.rhs:  # the contracting dimension: partial sums travel
            return (rows, depth // size, cols), rows * cols
        if self.rhs == self.out:
            return (rows, depth, cols // size), rows * depth
        return (rows // size, depth, cols), depth * cols

    def sent(self, moved: float, size: int, grad: bool) -> float:
        """Returns the least bytes that a device sends."""
        # An all-reduce sends twice. Its backward pass sends nothing: the cotangent is replicated.
        passes = 2 if grad or not self.out else 1
        return passes * moved * (size - 1) / size

    def pieces(self, shape: Shape, size: int) -> list[Shape]:
        usual, _ = self.on_one_device(shape, size)
        m, k, n = shape
        parts = [(m // size, k, n), (m, k // size, n), (m, k, n // size)]
        fitting = [part for part in parts if size * prod(part) == prod(shape)]
        return [*(part for part in fitting if part != usual), usual]

    def least_sent(self, shape: Shape, size: int, grad: bool) -> float:
        """Returns the fewest numbers that a device sends, for any split of the work.

        Each product may split M, K or N. Operands are gathered or exchanged. Results are scattered,
        summed or exchanged. An operand of two products travels once.
        """
        lengths = dict(zip("MKN", shape, strict=True))
        numbers = {dims: lengths[dims[0]] * lengths[dims[1]] for dims in ("MK", "KN", "MN")}
        held = {"MK": self.lhs, "KN": self.rhs, "MN": self.out}
        gathered, exchanged = (size - 1) / size, (size - 1) / size**2

        def taken(dims: str, dim: str) -> float:
            """Returns an array's share that travels beforehand."""
            if not held[dims] or held[dims] == dim:
                return 0.0
            return exchanged if dim in dims else gathered

        def delivered(dims: str, dim: str) -> float:
            if dim not in dims:  # each device has a partial sum of all entries
                return gathered if held[dims] else 2 * gathered
            if held[dims] == dim:
                return 0.0
            return exchanged if held[dims] else gathered

        products = [("MK", "KN", "MN")]
        if grad:
            products += [("MN", "KN", "MK"), ("MK", "MN", "KN")]
        totals: list[float] = []
        for parted in itertools.product("MKN", repeat=len(products)):
            needed: dict[str, dict[str, float]] = {dims: {} for dims in held}
            total = 0.0
            for dim, (left, right, result) in zip(parted, products, strict=True):
                total += delivered(result, dim) * numbers[result]
                for dims in (left, right):
                    needed[dims][dim if dim in dims else ""] = taken(dims, dim)
            for dims, shares in needed.items():
                whole = shares.get("")  # the full array includes every shard
                total += (sum(shares.values()) if whole is None else whole) * numbers[dims]
            totals.append(total)
        return min(totals)

    def require_fit(self, shape: Shape, mesh: Mesh, ring: Ring) -> None:
        size = ring_size(mesh, ring)
        for dim, length in zip("MKN", shape, strict=True):
            quotient, rest = divmod(length, size)
            if rest and dim in (self.lhs, self.rhs, self.out):
                fitting = [n * size for n in (quotient, quotient + 1) if n]
                raise UsageError(
                    f"{self.name} shards {dim} = {length} of {shape_text(shape)} over the ring "
                    f"{','.join(ring)} of {size} devices, which does not divide it "
                    f"({length} = {quotient} x {size} + {rest}); use {dim} = "
                    f"{' or '.join(map(str, fitting))}, or another --mesh"
                )


def _gather(operand: Any, dim: int) -> Callable[..., Any]:
    def local(lhs: Any, rhs: Any, ring: Ring, mode: Any, **options: Any) -> Any:
        return jaxpar.all_gather_matmul(
            lhs, rhs, ring, gather=operand, dim=dim, mode=mode, **options
        )

    return local


def _scatter(dim: int) -> Callable[..., Any]:
    def local(lhs: Any, rhs: Any, ring: Ring, mode: Any, **options: Any) -> Any:
        return jaxpar.matmul_reduce_scatter(lhs, rhs, ring, dim=dim, mode=mode, **options)

    return local


def _all_reduce(lhs: Any, rhs: Any, ring: Ring, mode: Any, **options: Any) -> Any:
    return jaxpar.matmul_all_reduce(lhs, rhs, ring, mode=mode, **options)


OPS = {
    op.name: op
    for op in (
        Op("gather-lhs-rows", lhs="M", rhs="N", out="N", local=_gather("lhs", 0)),
        Op("gather-lhs-k", lhs="K", rhs="N", out="N", local=_gather("lhs", 1)),
        Op("gather-rhs-k", lhs="M", rhs="K", out="M", local=_gather("rhs", 0)),
        Op("gather-rhs-cols", lhs="M", rhs="N", out="M", local=_gather("rhs", 1)),
        Op("scatter-rows", lhs="K", rhs="K", out="M", local=_scatter(0)),
        Op("scatter-cols", lhs="K", rhs="K", out="N", local=_scatter(1)),
        Op("all-reduce", lhs="K", rhs="K", out="", local=_all_reduce),
    )
}
DEFAULT_OPS = ("gather-lhs-rows", "gather-rhs-k", "scatter-rows")


def with_gradients(function: Callable[..., Any]) -> Callable[..., Any]:
    def forward_and_backward(*args: Any) -> Any:
        *operands, cotangent = args
        out, pull_back = jax.vjp(function, *operands)
        out, gradients = pull_strictly(out, pull_back, cotangent)
        return (out, *gradients)  # with out, since a model uses it

    return forward_and_backward


def pull_strictly(out: Any, pull_back: Any, cotangent: Any) -> tuple[Any, Any]:
    """Computes the result, and only then the gradients.

    Otherwise a compiler would hide forward transfers behind backward matmuls, unlike in a model.
    """
    out, pull_back, cotangent = lax.optimization_barrier((out, pull_back, cotangent))
    return out, pull_back(cotangent)


def ring_size(mesh: Mesh, ring: Sequence[str]) -> int:
    return prod(mesh.shape[name] for name in ring)


def shape_text(shape: Shape) -> str:
    return "x".join(map(str, shape))
