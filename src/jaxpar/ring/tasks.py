"""Work that waits for no transfer, in tasks, which can be beside any: by itself, or in steps."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from jaxpar.mesh.walk import Index
from jaxpar.ring.order import Beside, Work, traced_order
from jaxpar.ring.parts import like_finished


def _as_it_is(x: Any) -> Any:
    return x


class Task(NamedTuple):
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
        """The task by itself, as an order sees it."""

        def compute(index: Index, _: Any, taken: Any) -> Any:
            return self.next(index, taken, carry)

        if not self.adds:  # in one instruction all that was written before would be copied
            return Work(self.take, compute)
        like = None if carry is None else partial(like_finished, self.finish, carry)
        return Work(self.take, compute, _as_it_is, like)


def at_once(tasks: Sequence[Task], index: Index) -> Any:
    """Returns the last carry of tasks, beside nothing or what a compiler finds."""
    order, carry = traced_order(), None
    for task in tasks:
        index, carry, _ = order.beside(index, (), _as_it_is, task.work(carry))
    return carry


class Spare:
    """Work that waits for nothing, dealt out to the steps of a program that is unrolled.

    The first task is ahead of them all, and makes the arrays to which the others add.
    """

    def __init__(self, tasks: Sequence[Task], index: Index, steps: int, carry: Any = None):
        self.carry = carry
        if tasks:
            self.carry = tasks[0].next(index, tasks[0].take(index), None)
        self._dealt = iter(deal(tasks[1:], steps))

    def within(self, beside: Callable[[Work], Beside], work: Work) -> Beside:
        """Returns what a step comes to, the carry having gone on beside its transfers."""
        carry, tasks = self.carry, next(self._dealt, [])
        if not tasks:
            return beside(work)

        def take(index: Index) -> Any:
            return work.take(index), [task.take(index) for task in tasks]

        def compute(index: Index, leaving: Any, taken: Any) -> Any:
            folded = carry
            for task, at in zip(tasks, taken[1], strict=True):
                folded = task.next(index, at, folded)
            return work.compute(index, leaving, taken[0]), folded

        sums, like, finish = work.sums, work.like, tasks[-1].finish
        index, (made, self.carry), arrived = beside(
            Work(
                take,
                compute,
                None if sums is None else lambda made: (sums(made[0]), made[1]),
                None if like is None else lambda: (like(), like_finished(finish, carry)),
            )
        )
        return index, made, arrived


def deal(tasks: Sequence[Task], hands: int) -> list[list[Task]]:
    """Deals tasks out in their order, evenly, to so many hands."""
    ends = [len(tasks) * (hand + 1) // hands for hand in range(hands)]
    return [list(tasks[start:end]) for start, end in pairwise([0, *ends])]
