"""The interface of the algorithms over a ring.

A `Way` makes a pass. It moves blocks (`gather`), sums (`scatter`), or both (`circulate`).
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
from jaxpar.axis.ring_order import Index
from jaxpar.ring.seconds import Flow

if TYPE_CHECKING:
    from jaxpar.choose.problem import Problem
    from jaxpar.ring.tasks import Task

# Where a block lies in the full array. For blocks that are used singly: the owner's index.
Positions = Any  # Span | Comb | Slab | Array
Arrivals = list[tuple[Any, Positions, Any]]  # (block, its positions, what `take` gave for them)
Visits = list[tuple[Any, Index]]  # (part of a block, the logical index of its owner)
Take = Callable[[Positions], Any]
Pick = Callable[[Any], Any]
Split = Callable[[Any, int], list[Any]]
Place = Callable[[Index], Positions]  # from this device's logical index
Tasks = Callable[[int], "Sequence[Task]"]  # from the number of parts to so many tasks

Given = ParamSpec("Given")
Result = TypeVar("Result")
Self = TypeVar("Self", bound="Way")


def take_nothing(positions: Positions) -> None:
    """Returns None."""


def in_one_part(block: Any, parts: int) -> list[Any]:
    return [block]


def as_it_is(x: Any) -> Any:
    return x


def forward_first(ways: Sequence[Way], out: Any, residuals: Any) -> tuple[Any, Any]:
    if not any(way.relays for way in ways):
        return out, residuals
    from jaxpar.ring.order import traced_order

    return traced_order().forward_first(out, residuals)


def in_scope(
    method: Callable[Concatenate[Self, Given], Result],
) -> Callable[Concatenate[Self, Given], Result]:
    """Shows a method's mode in profiles."""

    @wraps(method)
    def call(self: Self, *args: Given.args, **kwargs: Given.kwargs) -> Result:
        with jax.named_scope(self.mode):
            return method(self, *args, **kwargs)

    return call


class Use(NamedTuple):
    """How arriving blocks are used."""

    # maps `(carry, arrivals)` to the next carry; the first is None
    consume: Callable[[Any, Arrivals], Any]
    take: Take = take_nothing  # maps positions to the operands there
    sums: Pick | None = None  # picks the part of the carry that is added to
    finish: Pick = as_it_is
    like: Callable[[], Any] | None = None  # makes arrays of the first carry's types, if it is a sum


class Round(NamedTuple):
    """How a device uses visiting blocks, and adds to their sums."""

    # maps `(carry, local)` to both: the first step's work on the local block
    begin: Callable[[Any, Any], tuple[Any, Any]]
    # maps `(carry, visits)` to the carry, and this device's share of the visitors' sums in the
    # dtypes of `local`
    visit: Callable[[Any, Visits], tuple[Any, list[Any]]]
    end: Callable[[Any, Any], tuple[Any, Any]]  # like `begin`, in the last step
    split: Split  # splits a block into at most so many parts
    join: Callable[[list[Any]], Any]  # its inverse, for sums
    summed: Pick = as_it_is  # picks the parts of a block that have sums


class Forms(NamedTuple, Generic[Result]):
    """A matmul's forms: by blocks, by chunks, or with another operand that travels."""

    in_blocks: Callable[[], Result]
    across: Callable[[int], Result]
    staying: Callable[[], Result]


class Kept(NamedTuple):
    """The blocks that a gather saves, in order. One place is the full array."""

    places: list[Place]
    own_first: bool = False


@dataclass(frozen=True)
class Way:
    """An algorithm for a pass over a ring; static."""

    ring: Ring
    derived_by_jax = False  # whether JAX's own derivatives are as good as special ones
    # whether devices pass on others' blocks. If so, join arrays that travel together.
    relays = True

    @property
    def mode(self) -> str:
        """Returns the mode's name, never `auto`."""
        raise NotImplementedError

    def seconds(self, problem: Problem, flows: Sequence[Flow], kept: int = 0) -> float:
        """Predicts the seconds of a gather, a scatter, or a scatter and an independent gather.

        `kept` blocks are saved for the last flow.
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
        """Brings all blocks here, and folds `use.consume` over them.

        Args:
          dim: along which blocks form the full array. Positions are a `Span`, `Comb` or `Slab`.
            None: blocks are used singly, and positions are the owner's logical index, int32[].
          split: without `dim`, splits a block into at most so many parts.
          kept: with `dim`, a list for the blocks of `Way.kept`.

        Returns:
          The last carry, finished.
        """
        raise NotImplementedError

    def kept(self, length: int) -> Kept | None:
        """Returns the blocks that a gather can save; None: none."""
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
        """Sums for each device what all devices produce for it, and runs tasks meanwhile.

        Args:
          produce: maps operands to partial sums.
          take: maps positions, a `Span`, `Comb` or `Slab`, to operands.
          length: of a block along `dim`.
          tasks: returns tasks, for a number of parts.
          flops: of `produce` for all positions; 0: no matmul.

        Returns:
          This device's block of the sums, and the tasks' last carry.
        """
        raise NotImplementedError

    def perform(self, forms: Forms[Result]) -> Result:
        """Returns a matmul's result in this algorithm's form."""
        return forms.in_blocks()

    def circulate(self, block: Any, carry: Any, local: Any, steps: Round) -> tuple[Any, Any]:
        """Takes every block to all devices, and sums what they add for its owner.

        `carry` stays here. `local` is zeros like `summed(block)`. Returns the carry, and the
        sums for the local block.
        """
        raise NotImplementedError

    def _wire(self, x: Array, dtype: DTypeLike) -> Array:
        return x.astype(self.ring.wire(dtype))

    def _quantized(self, x: Any, dim: int, dtype: DTypeLike) -> Any:
        low_bit = self.ring.low_bit_sums(dtype)
        if low_bit is not None:
            from jaxpar.axis.rounding import encoded

            x = encoded(low_bit, x, dim)  # the block is now two arrays: values and scales
        return x if isinstance(x, Quantized) else self._wire(x, dtype)
