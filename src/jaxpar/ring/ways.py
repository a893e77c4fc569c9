"""Ways over a ring: what every one of them does, and the naive one, a collective of `jax.lax`.

Three flows of data are all that the package needs of a ring: blocks that arrive, sums that leave,
and both a turn apart. Who uses them does not know which way they go. A sum that all devices need
is one collective, or a scatter and a gather (`reduce`).
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar.axis.axis import Ring
from jaxpar.axis.quantized import Quantized, encoded
from jaxpar.axis.varying import vary_over, varying_axes
from jaxpar.compiler import control_flow
from jaxpar.compiler.compat import all_gather, psum_scatter
from jaxpar.ring.parts import Comb, Span, even_cuts, split_dim
from jaxpar.ring.steps import Step, at_once

# Of blocks that make a whole; of blocks that are used one by one, the logical index of the owner.
Positions = Any  # Span | Comb | Slab | Array
Arrivals = list[tuple[Any, Positions, Any]]  # (block, its positions, what `take` gave for them)
Visits = list[tuple[Any, Array]]  # (part of a block, the logical index of its owner)
Take = Callable[[Positions], Any]
Pick = Callable[[Any], Any]
Split = Callable[[Any, int], list[Any]]
Place = Callable[[Array], Positions]  # of this device's logical index

Given = ParamSpec("Given")
Result = TypeVar("Result")
Self = TypeVar("Self", bound="Way")


def take_nothing(positions: Positions) -> None:
    """Takes nothing of what stays at home."""


def in_one_part(block: Any, parts: int) -> list[Any]:
    """Does not split a block."""
    return [block]


def as_it_is(x: Any) -> Any:
    """Returns `x`."""
    return x


def in_scope(
    method: Callable[Concatenate[Self, Given], Result],
) -> Callable[Concatenate[Self, Given], Result]:
    """Has profiles show the mode of the way that a method of one takes."""

    @wraps(method)
    def call(self: Self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with jax.named_scope(self.mode):
            return method(self, *args, **kwargs)

    return call


@dataclass(frozen=True)
class Way:
    """How blocks and sums get round a ring, of one pass; static.

    Attributes:
      joins: whether arrays that travel at once had better be joined into one.
      derived_by_jax: whether JAX's own derivatives of what it does are as good as any.
      adds: whether devices add sums that travel; a collective does it otherwise.
      stays: whether of a matmul the operand stays that would be gathered.
      chunks: of how many parts of a block each has a collective of its own.
      parts: into how many other work is cut that is to be beside a scatter's transfers.
      keeps_own_first: of blocks that a gather keeps, the first is this device's own as it is.
      crosses_a_cube: whether its transfers are exchanges over one dimension after the other.
    """

    ring: Ring
    joins = True
    derived_by_jax = False
    adds = True
    stays = False
    chunks = 1
    parts = 1
    keeps_own_first = False
    crosses_a_cube = False

    @property
    def mode(self) -> str:
        """The mode that it is, also where the ring's is `auto`."""
        raise NotImplementedError

    def gather(
        self,
        block: Any,
        consume: Callable[[Any, Arrivals], Any],
        *,
        take: Take = take_nothing,
        dim: int | None = None,
        split: Split = in_one_part,
        sums: Pick | None = None,
        finish: Pick = as_it_is,
        like: Callable[[], Any] | None = None,
        kept: list[Any] | None = None,
    ) -> Any:
        """Brings all devices' blocks here, and folds `consume(carry, arrivals)` over them.

        Args:
          block: pytree of arrays, this device's block.
          consume: `(carry, arrivals)` to the next carry. The first carry is None. Each arrival is a
            block, or several side by side, with its positions in the whole and what `take` gives
            for them.
          take: positions of the whole to what stays at home and is used there.
          dim: along which the blocks of all devices make a whole, of which positions are a `Span`,
            a `Comb` or a `Slab`. None: blocks are used one by one, and in place of positions there
            is the logical index of their owner, int32[].
          split: without `dim`, deals a block out to at most so many parts, which may go different
            ways and are consumed one by one.
          sums: picks, of the carry, that which is added to, not only written into; None: nothing.
          finish: what is done with the carry in the end.
          like: makes arrays of the types of the first carry, where it is made of sums.
          kept: a list to which, with `dim`, all blocks are added in the order in which they come,
            where `keeps` says that they can be.

        Returns:
          The last carry, finished.
        """
        raise NotImplementedError

    @property
    def keeps(self) -> bool:
        """Whether a gather can hand out the blocks that come, instead of consuming them alone."""
        return not self.stays and self.chunks == 1

    def places(self, length: int) -> list[Place]:
        """Returns, for blocks in the order in which a gather keeps them, where they lie.

        `length` is that of one device's block.
        """
        raise NotImplementedError

    def scatter(
        self,
        produce: Callable[[Any], Array],
        take: Take,
        *,
        dim: int,
        length: int,
        dtype: DTypeLike,
    ) -> Array:
        """Sums for each device what all devices produce for it.

        Args:
          produce: what `take` gave, to this device's partial sums for its positions.
          take: positions along `dim`, a `Span`, a `Comb` or a `Slab`, to what `produce` needs for
            them.
          dim: the dimension of what is produced that is dealt out to the devices.
          length: how many positions each device owns.
          dtype: of the result.

        Returns:
          The sum of all devices' partial sums for this device's positions.
        """
        return self.scatter_beside((), produce, take, dim=dim, length=length, dtype=dtype)[0]

    def scatter_beside(
        self,
        steps: Sequence[Step],
        produce: Callable[[Any], Array],
        take: Take,
        *,
        dim: int,
        length: int,
        dtype: DTypeLike,
        flops: float = 0.0,
    ) -> tuple[Array, Any]:
        """As `scatter`, and takes steps of other work meanwhile; returns their last carry, too.

        `flops` are those of `produce` for all positions; 0: it multiplies nothing.
        """
        raise NotImplementedError

    def reduce(self, produce: Callable[[], Array], in_blocks: Callable[[], Array] | None) -> Array:
        """Returns the sum of all devices' partial sums, everywhere.

        `in_blocks` makes the same by a scatter and a gather; None where there is nothing to cut.
        """
        return self._psum(produce()) if in_blocks is None else in_blocks()

    def circulate(
        self,
        block: Any,
        carry: Any,
        own: Any,
        begin: Callable[[Any, Any], tuple[Any, Any]],
        visit: Callable[[Any, Visits], tuple[Any, list[Any]]],
        end: Callable[[Any, Any], tuple[Any, Any]],
        *,
        split: Split,
        join: Callable[[list[Any]], Any],
        summed: Pick = as_it_is,
    ) -> tuple[Any, Any]:
        """Takes every device's block past all others, and sums for its owner what each makes of it.

        Args:
          block: pytree of arrays, this device's block.
          carry: what stays here and is folded over all blocks.
          own: zeros like what is `summed` of the block: this device's share of its own sums.
          begin: `(carry, own)` to both: a share of the work on the own block, for the first turn.
          visit: `(carry, visits)` to the carry and, for each visiting part, what this device adds
            to the sums of its owner, in the dtypes of `own`.
          end: like `begin`: the other share, for the last turn.
          split: deals a block out to at most so many parts, which may go different ways.
          join: the inverse of `split`, for sums.
          summed: picks of a block what has sums.

        Returns:
          The carry, and the sums of all devices for this device's block.
        """
        raise NotImplementedError

    def forward_first(self, out: Any, residuals: Any) -> tuple[Any, Any]:
        """Returns both, in an order that keeps a backward pass behind its forward pass."""
        return out, residuals

    def _wire(self, x: Array, dtype: DTypeLike) -> Array:
        """Returns sums in the dtype in which they travel, that of their result if none is asked."""
        return x.astype(self.ring.wire(dtype))

    def _quantized(self, x: Any, dim: int, dtype: DTypeLike) -> Any:
        """Returns sums that are scattered along `dim` as they travel, quantized where asked."""
        how = self.ring.low_bit_sums(dtype)
        coded = x if how is None else encoded(how, x, dim)
        return coded if isinstance(coded, Quantized) else self._wire(x, dtype)

    def _psum(self, x: Array) -> Array:
        return lax.psum(x, self.ring.names)


@dataclass(frozen=True)
class Naive(Way):
    """All at once, by a collective: gather and then use, make and then sum and scatter."""

    joins = False
    derived_by_jax = True
    adds = False

    @property
    def mode(self) -> str:
        return "naive"

    @in_scope
    def gather(
        self,
        block: Any,
        consume: Callable[[Any, Arrivals], Any],
        *,
        take: Take = take_nothing,
        dim: int | None = None,
        split: Split = in_one_part,
        sums: Pick | None = None,
        finish: Pick = as_it_is,
        like: Callable[[], Any] | None = None,
        kept: list[Any] | None = None,
    ) -> Any:
        carry = None
        if dim is not None:
            for start, size, positions in self._parts(jax.tree.leaves(block)[0].shape[dim]):
                cut = partial(_cut, start=start, size=size, dim=dim)
                part = jax.tree.map(lambda x, cut=cut: self._gathered(cut(x), dim), block)
                if kept is not None:
                    kept.append(part)
                carry = consume(carry, [(part, positions, take(positions))])
            return finish(carry)
        index = self.ring.index()
        first = consume(None, [(block, index, take(index))])
        return finish(self._visit(block, consume, take, first))

    @in_scope
    def scatter_beside(
        self,
        steps: Sequence[Step],
        produce: Callable[[Any], Array],
        take: Take,
        *,
        dim: int,
        length: int,
        dtype: DTypeLike,
        flops: float = 0.0,
    ) -> tuple[Array, Any]:
        carry = at_once(steps, self.ring.index()) if steps else None
        parts = [
            self._scattered(produce(take(positions)), dim, size, dtype)
            for _, size, positions in self._parts(length)
        ]
        return (lax.concatenate(parts, dim) if len(parts) > 1 else parts[0]), carry

    def places(self, length: int) -> list[Place]:
        return [lambda _, at=positions: at for _, _, positions in self._parts(length)]

    def _parts(self, length: int) -> list[tuple[int, int, Positions]]:
        """The parts of a block of `length` that travel one after the other: start and size.

        With them, where those of all devices lie in the whole.
        """
        return [(0, length, Span(0, length * self.ring.size))]

    def _scattered(self, sums: Array, dim: int, length: int, dtype: DTypeLike) -> Array:
        if not sums.size:  # XLA does not scatter nothing
            return lax.slice_in_dim(sums, 0, length, axis=dim).astype(dtype)
        axes = self.ring.names
        sums = self._quantized(sums, dim, dtype)
        if isinstance(sums, Quantized):
            return self._summed(sums, dim).astype(dtype)
        return psum_scatter(sums, axes, dim).astype(dtype)

    def _summed(self, sums: Quantized, dim: int) -> Array:
        """Sends every device its blocks of all, which no collective adds, and adds them up."""

        def apart(x: Array) -> Array:
            return lax.all_to_all(split_dim(x, dim, self.ring.size), self.ring.names, dim, 0)

        wide = jax.tree.map(apart, sums)
        return jnp.sum(replace(wide, dtype=wide.scales.dtype).dequantized(), axis=0)

    @in_scope
    def reduce(self, produce: Callable[[], Array], in_blocks: Callable[[], Array] | None) -> Array:
        return self._psum(produce())

    @in_scope
    def circulate(
        self,
        block: Any,
        carry: Any,
        own: Any,
        begin: Callable[[Any, Any], tuple[Any, Any]],
        visit: Callable[[Any, Visits], tuple[Any, list[Any]]],
        end: Callable[[Any, Any], tuple[Any, Any]],
        *,
        split: Split,
        join: Callable[[list[Any]], Any],
        summed: Pick = as_it_is,
    ) -> tuple[Any, Any]:
        carry, own = end(*begin(carry, own))
        if self.ring.size == 1:
            return carry, own

        def put(sums: Any, made: Any, owner: Array) -> Any:
            return jax.tree.map(
                lambda x, y: lax.dynamic_update_index_in_dim(x, y, owner, 0), sums, made
            )

        def consume(state: Any, arrivals: Arrivals) -> Any:
            carry, sums = state
            [(part, owner, _)] = arrivals
            carry, [made] = visit(carry, [(part, owner)])
            return carry, put(sums, made, owner)

        # [n, ...]: a share for each owner.
        sums = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(self.ring.size, *x.shape)), own)
        sums = put(vary_over(varying_axes(own), sums), own, self.ring.index())
        carry, sums = self._visit(block, consume, take_nothing, (carry, sums))
        axes = self.ring.names
        return carry, jax.tree.map(
            lambda x, like: psum_scatter(self._wire(x, like.dtype), axes), sums, summed(block)
        )

    def _gathered(self, x: Array, dim: int) -> Array:
        if not x.size:  # nor gather it
            return lax.concatenate([x] * self.ring.size, dim)
        return all_gather(x, self.ring.names, dim)

    def _visit(self, block: Any, consume: Any, take: Take, state: Any) -> Any:
        """Gathers the blocks of all devices, then consumes those of others one by one."""
        if self.ring.size == 1:
            return state
        index, axes = self.ring.index(), self.ring.names
        blocks = jax.tree.map(lambda x: all_gather(x, axes), block)  # [n, ...]

        def step(distance: Array, state: Any) -> Any:
            owner = (index - distance.astype("int32")) % self.ring.size
            at = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, owner, keepdims=False), blocks)
            return consume(state, [(at, owner, take(owner))])

        return control_flow.fori_loop(1, self.ring.size, step, state)


@dataclass(frozen=True)
class Stationary(Naive):
    """The naive way, but that of a matmul the operand stays that would be gathered.

    Where its partners and its results are less than what its blocks make together.
    """

    stays = True

    @property
    def mode(self) -> str:
        return "stationary"


@dataclass(frozen=True)
class InChunks(Naive):
    """A collective for each of some chunks of the blocks, beside the work on the one before.

    For compilers that make collectives asynchronous. A chunk is the same part of every block, so
    that it is a collective over all devices, and its positions are a comb. A matmul may cut along
    another of its labels instead, and run a naive one for each chunk.
    """

    chunks: int = 1
    derived_by_jax = False

    @property
    def mode(self) -> str:
        return f"chunked-{self.chunks}"

    def _parts(self, length: int) -> list[tuple[int, int, Positions]]:
        cuts = even_cuts(length, self.chunks)
        return [(start, size, Comb(start, size, self.ring.size)) for start, size in cuts]

    @in_scope
    def reduce(self, produce: Callable[[], Array], in_blocks: Callable[[], Array] | None) -> Array:
        return Way.reduce(self, produce, in_blocks)


def _cut(x: Array, start: int, size: int, dim: int) -> Array:
    """Returns positions of a dimension, of which it may have no more."""
    if size == x.shape[dim]:
        return x
    return lax.slice_in_dim(x, start, start + size, axis=dim)
