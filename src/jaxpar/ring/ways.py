"""Ways over a ring: what every one of them does.

Three flows of data are all that the package needs of a ring: blocks that arrive, sums that leave,
and both a step apart. Who uses them does not know which way they go.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, Any, Concatenate, Generic, NamedTuple, ParamSpec, TypeVar

import jax
from jax import Array
from jax.typing import DTypeLike

from jaxpar.axis.axis import Ring
from jaxpar.axis.quantized import Quantized
from jaxpar.mesh.walk import Index
from jaxpar.ring.seconds import Flow

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem

# Of blocks that make a whole; of blocks that are used one by one, the logical index of the owner.
Positions = Any  # Span | Comb | Slab | Array
Arrivals = list[tuple[Any, Positions, Any]]  # (block, its positions, what `take` gave for them)
Visits = list[tuple[Any, Index]]  # (part of a block, the logical index of its owner)
Take = Callable[[Positions], Any]
Pick = Callable[[Any], Any]
Split = Callable[[Any, int], list[Any]]
Place = Callable[[Index], Positions]  # of this device's logical index
Tasks = Callable[[int], "Sequence[Step]"]  # of the number of parts into which it is cut

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


def forward_first(ways: Sequence[Way], out: Any, residuals: Any) -> tuple[Any, Any]:
    """Returns both, in an order that keeps a backward pass behind its forward pass."""
    if not any(way.relays for way in ways):
        return out, residuals
    from jaxpar.ring.order import traced_order

    return traced_order().forward_first(out, residuals)


def in_scope(
    method: Callable[Concatenate[Self, Given], Result],
) -> Callable[Concatenate[Self, Given], Result]:
    """Has profiles show the mode of the way that a method of one takes."""

    @wraps(method)
    def call(self: Self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with jax.named_scope(self.mode):
            return method(self, *args, **kwargs)

    return call


class Use(NamedTuple):
    """What is made of blocks that come.

    Attributes:
      consume: `(carry, arrivals)` to the next carry; the first one is None. Several blocks may come
        at once.
      take: positions of the whole to what stays at home and is used there.
      sums: picks, of the carry, that which is added to, not only written into; None: nothing.
      finish: what is done with the carry in the end.
      like: makes arrays of the types of the first carry, where it is made of sums.
    """

    consume: Callable[[Any, Arrivals], Any]
    take: Take = take_nothing
    sums: Pick | None = None
    finish: Pick = as_it_is
    like: Callable[[], Any] | None = None


class Round(NamedTuple):
    """What is done with blocks that go past all devices, and with their sums.

    Attributes:
      begin: `(carry, own)` to both: a share of the work on the own block, for the first step.
      visit: `(carry, visits)` to the carry and, for each visiting part, what this device adds to
        the sums of its owner, in the dtypes of `own`.
      end: like `begin`: the other share, for the last step.
      split: deals a block out to at most so many parts, which may go different ways.
      join: the inverse of `split`, for sums.
      summed: picks of a block what has sums.
    """

    begin: Callable[[Any, Any], tuple[Any, Any]]
    visit: Callable[[Any, Visits], tuple[Any, list[Any]]]
    end: Callable[[Any, Any], tuple[Any, Any]]
    split: Split
    join: Callable[[list[Any]], Any]
    summed: Pick = as_it_is


class Forms(NamedTuple, Generic[Result]):
    """How a matmul can be done, of whose operands or sums one travels.

    Attributes:
      in_blocks: by a gather or a scatter of blocks.
      across: in so many chunks, which may be parts of another dimension.
      staying: another operand travels.
    """

    in_blocks: Callable[[], Result]
    across: Callable[[int], Result]
    staying: Callable[[], Result]


class Kept(NamedTuple):
    """The blocks that a gather hands out, in the order in which it does.

    Attributes:
      places: where each of them lies in the whole; of one place it is the whole.
      own_first: whether the first is this device's own, as it is.
    """

    places: list[Place]
    own_first: bool = False


@dataclass(frozen=True)
class Way:
    """How blocks and sums get round a ring, of one pass; static.

    Attributes:
      derived_by_jax: whether JAX's own derivatives of what it does are as good as any.
      relays: whether devices pass on what others sent, and add to sums on their way, as no
        collective has them do. Arrays that travel at once had better be joined into one then.
    """

    ring: Ring
    derived_by_jax = False
    relays = True

    @property
    def mode(self) -> str:
        """The mode that it is, also where the ring's is `auto`."""
        raise NotImplementedError

    def seconds(self, problem: Problem, flows: Sequence[Flow], kept: int = 0) -> float:
        """Predicts the seconds of flows, one after the other.

        Args:
          problem: whose chip, mesh and compiler are reckoned with.
          flows: a gather, a scatter, or a scatter and then a gather that does not wait for it.
          kept: in how many blocks what the last one gathers is there already; 0: it is not.
        """
        raise NotImplementedError

    def gather(
        self,
        block: Any,
        use: Use,
        *,
        dim: int | None = None,
        split: Split = in_one_part,
        kept: list[Any] | None = None,
    ) -> Any:
        """Brings all devices' blocks here, and folds `use.consume` over them.

        Args:
          block: pytree of arrays, this device's block.
          use: what is made of all blocks.
          dim: along which the blocks of all devices make a whole, of which positions are a `Span`,
            a `Comb` or a `Slab`. None: blocks are used one by one, and in place of positions there
            is the logical index of their owner, int32[].
          split: without `dim`, deals a block out to at most so many parts, which may go different
            ways and are consumed one by one.
          kept: a list to which, with `dim`, all blocks are added as `Way.kept` has them.

        Returns:
          The last carry, finished.
        """
        raise NotImplementedError

    def kept(self, length: int) -> Kept | None:
        """Returns what a gather of blocks of a length can hand out; None: it only uses them."""
        return None

    def scatter(
        self,
        produce: Callable[[Any], Array],
        take: Take,
        *,
        dim: int,
        length: int,
        dtype: DTypeLike,
        tasks: Tasks | None = None,
        flops: float = 0.0,
    ) -> tuple[Array, Any]:
        """Sums for each device what all devices produce for it, and takes tasks of other work.

        Args:
          produce: what `take` gave, to this device's partial sums for its positions.
          take: positions along `dim`, a `Span`, a `Comb` or a `Slab`, to what `produce` needs for
            them.
          dim: the dimension of what is produced that is dealt out to the devices.
          length: how many positions each device owns.
          dtype: of the result.
          tasks: of work that waits for nothing, beside the transfers, in as many parts as fit.
          flops: of `produce` for all positions; 0: it multiplies nothing.

        Returns:
          The sum of all devices' partial sums for this device's positions, and the tasks' last
          carry.
        """
        raise NotImplementedError

    def perform(self, forms: Forms[Result]) -> Result:
        """Returns what a matmul makes, in the form that goes this way."""
        return forms.in_blocks()

    def circulate(self, block: Any, carry: Any, own: Any, steps: Round) -> tuple[Any, Any]:
        """Takes every device's block past all others, and sums for its owner what each makes of it.

        Args:
          block: pytree of arrays, this device's block.
          carry: what stays here and is folded over all blocks.
          own: zeros like what is `summed` of the block: this device's share of its own sums.
          steps: what is done in them.

        Returns:
          The carry, and the sums of all devices for this device's block.
        """
        raise NotImplementedError

    def _wire(self, x: Array, dtype: DTypeLike) -> Array:
        """Returns sums in the dtype in which they travel, that of their result if none is asked."""
        return x.astype(self.ring.wire(dtype))

    def _quantized(self, x: Any, dim: int, dtype: DTypeLike) -> Any:
        """Returns sums that are scattered along `dim` as they travel, quantized where asked."""
        how = self.ring.low_bit_sums(dtype)
        if how is not None:
            from jaxpar.axis.rounding import encoded

            x = encoded(how, x, dim)  # values and scales: a block of two arrays
        return x if isinstance(x, Quantized) else self._wire(x, dtype)
