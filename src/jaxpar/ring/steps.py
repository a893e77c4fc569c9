"""Work that waits for no transfer, in steps, which can be beside any: by itself, or in turns."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from jaxpar.mesh.walk import Index
from jaxpar.ring.order import Beside, Work, traced_order
from jaxpar.ring.parts import like_finished


def _as_it_is(x: Any) -> Any:
    return x


class Step(NamedTuple):
    """Some of the work that waits for no transfer, and so can be beside any.

    Attributes:
      take: this device's logical index to what is cut for it.
      fold: `(index, taken, carry)` to the next carry; the first one is None.
      finish: what is done with the carry after it.
      adds: whether it adds to the carry, and does not only write into it.
    """

    take: Callable[[Index], Any]
    fold: Callable[[Index, Any, Any], Any]
    finish: Callable[[Any], Any] = _as_it_is
    adds: bool = True

    def next(self, index: Index, taken: Any, carry: Any) -> Any:
        """Returns the next carry, of what was taken."""
        return self.finish(self.fold(index, taken, carry))

    def work(self, carry: Any) -> Work:
        """The step by itself, as an order sees it."""

        def compute(index: Index, _: Any, taken: Any) -> Any:
            return self.next(index, taken, carry)

        if not self.adds:  # in one instruction all that was written before would be copied
            return Work(self.take, compute)
        like = None if carry is None else partial(like_finished, self.finish, carry)
        return Work(self.take, compute, _as_it_is, like)


def at_once(steps: Sequence[Step], index: Index) -> Any:
    """Returns the last carry of steps, beside nothing or what a compiler finds."""
    order, carry = traced_order(), None
    for step in steps:
        index, carry, _ = order.beside(index, (), _as_it_is, step.work(carry))
    return carry


class Spare:
    """Work that waits for nothing, dealt out to the turns of a program that is unrolled.

    The first step is ahead of them all, and makes the arrays to which the others add.
    """

    def __init__(self, steps: Sequence[Step], index: Index, turns: int, carry: Any = None):
        self.carry = carry
        if steps:
            self.carry = steps[0].next(index, steps[0].take(index), None)
        self._dealt = iter(deal(steps[1:], turns))

    def within(self, beside: Callable[[Work], Beside], work: Work) -> Beside:
        """Returns what a turn comes to, the carry having gone on beside its transfers."""
        carry, steps = self.carry, next(self._dealt, [])
        if not steps:
            return beside(work)

        def take(index: Index) -> Any:
            return work.take(index), [step.take(index) for step in steps]

        def compute(index: Index, leaving: Any, taken: Any) -> Any:
            folded = carry
            for step, at in zip(steps, taken[1], strict=True):
                folded = step.next(index, at, folded)
            return work.compute(index, leaving, taken[0]), folded

        sums, like, finish = work.sums, work.like, steps[-1].finish
        index, (made, self.carry), arrived = beside(
            Work(
                take,
                compute,
                None if sums is None else lambda made: (sums(made[0]), made[1]),
                None if like is None else lambda: (like(), like_finished(finish, carry)),
            )
        )
        return index, made, arrived


def deal(steps: Sequence[Step], hands: int) -> list[list[Step]]:
    """Deals steps out in their order, evenly, to so many hands."""
    ends = [len(steps) * (hand + 1) // hands for hand in range(hands)]
    return [list(steps[start:end]) for start, end in pairwise([0, *ends])]
