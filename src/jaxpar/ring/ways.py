"""Ways over a ring: what every one of them does.

Three flows of data are all that the package needs of a ring: blocks that arrive, sums that leave,
and both a turn apart. Who uses them does not know which way they go. A sum that all devices need
is one collective, or a scatter and a gather (`reduce`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

import jax
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar.axis.axis import Ring
from jaxpar.axis.quantized import Quantized
from jaxpar.mesh.walk import Index
from jaxpar.ring.seconds import Flow

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem
    from jaxpar.ring.steps import Step

# Of blocks that make a whole; of blocks that are used one by one, the logical index of the owner.
Positions = Any  # Span | Comb | Slab | Array
Arrivals = list[tuple[Any, Positions, Any]]  # (block, its positions, what `take` gave for them)
Visits = list[tuple[Any, Index]]  # (part of a block, the logical index of its owner)
Take = Callable[[Positions], Any]
Pick = Callable[[Any], Any]
Split = Callable[[Any, int], list[Any]]
Place = Callable[[Index], Positions]  # of this device's logical index

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
      derived_by_jax: whether JAX's own derivatives of what it does are as good as any.
      relays: whether devices pass on what others sent, and add to sums on their way, as no
        collective has them do. Arrays that travel at once had better be joined into one then.
      stays: whether of a matmul the operand stays that would be gathered.
      chunks: of how many parts of a block each has a collective of its own.
      parts: into how many other work is cut that is to be beside a scatter's transfers.
      keeps_own_first: of blocks that a gather keeps, the first is this device's own as it is.
    """

    ring: Ring
    derived_by_jax = False
    relays = True
    stays = False
    chunks = 1
    parts = 1
    keeps_own_first = False

    @property
    def mode(self) -> str:
        """The mode that it is, also where the ring's is `auto`."""
        raise NotImplementedError

    def seconds(self, problem: Problem, flows: Sequence[Flow], kept: int = 0) -> float:
        """Predicts the seconds of flows, one after the other.

        Args:
          problem: whose chip, mesh and compiler are reckoned with.
          flows: a gather, a scatter, or a scatter and then a gather that does not wait for it.
          kept: in how many pieces what the last one gathers is there already; 0: it is not.
        """
        raise NotImplementedError

    def kept_pieces(self, flow: Flow, backward: Way) -> int:
        """In how many pieces a derivative's flow uses what a gather by this way has kept."""
        return backward.parts

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
        steps: Sequence[Step] = (),
        flops: float = 0.0,
    ) -> tuple[Array, Any]:
        """Sums for each device what all devices produce for it, and takes steps of other work.

        Args:
          produce: what `take` gave, to this device's partial sums for its positions.
          take: positions along `dim`, a `Span`, a `Comb` or a `Slab`, to what `produce` needs for
            them.
          dim: the dimension of what is produced that is dealt out to the devices.
          length: how many positions each device owns.
          dtype: of the result.
          steps: of work that waits for nothing, beside the transfers.
          flops: of `produce` for all positions; 0: it multiplies nothing.

        Returns:
          The sum of all devices' partial sums for this device's positions, and the steps' last
          carry.
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
        if how is not None:
            from jaxpar.axis.rounding import encoded

            x = encoded(how, x, dim)
        return x if isinstance(x, Quantized) else self._wire(x, dtype)

    def _psum(self, x: Array) -> Array:
        return lax.psum(x, self.ring.names)
