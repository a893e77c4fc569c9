"""Tasks: work that waits for no transfer, so that it can overlap with any."""

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

from jaxpar.axis.ring_order import Index
from jaxpar.ring.cuts import like_finished
from jaxpar.ring.order import Beside, Work, traced_order


def _as_it_is(x: Any) -> Any:
    return x


class Task(NamedTuple):
    """A part of the work that waits for no transfer."""

    take: Callable[[Index], Any]  # maps the index to the task's operands
    # maps `(index, taken, carry)` to the next carry; the first is None
    fold: Callable[[Index, Any, Any], Any]
    finish: Callable[[Any], Any] = _as_it_is
    adds: bool = True  # whether `fold` adds to the carry, not only writes

    def next(self, index: Index, taken: Any, carry: Any) -> Any:
        return self.finish(self.fold(index, taken, carry))

    def work(self, carry: Any) -> Work:
        def compute(index: Index, _: Any, taken: Any) -> Any:
            return self.next(index, taken, carry)

        if not self.adds:  # as one instruction, it would copy all that was written before
            return Work(self.take, compute)
        like = None if carry is None else partial(like_finished, self.finish, carry)
        return Work(self.take, compute, _as_it_is, like)


def at_once(tasks: Sequence[Task], index: Index) -> Any:
    order, carry = traced_order(), None
    for task in tasks:
        index, carry, _ = order.beside(index, (), _as_it_is, task.work(carry))
    return carry


class Spare:
    """Tasks distributed over a program's steps. The first runs before all steps."""

    def __init__(self, tasks: Sequence[Task], index: Index, steps: int, carry: Any = None):
        self.carry = carry
        if tasks:
            self.carry = tasks[0].next(index, tasks[0].take(index), None)
        self._dealt = iter(deal(tasks[1:], steps))

    def within(self, beside: Callable[[Work], Beside], work: Work) -> Beside:
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
    ends = [len(tasks) * (hand + 1) // hands for hand in range(hands)]
    return [list(tasks[start:end]) for start, end in pairwise([0, *ends])]
