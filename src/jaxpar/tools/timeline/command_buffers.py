"""Which instruction a kernel is of, where XLA launched many at once.

XLA records kernels of a GPU in command buffers, which CUDA launches as one graph. A profile then
names the buffer (`command_buffer_1`) and the kernel. XLA calls its own kernels after an instruction
(`fusion.18` is `fusion_18`), and instructions alike share one. Kernels of libraries have names of
their own. A buffer keeps the order of the schedule: so what stands between two kernels that are
known is of the instructions between theirs.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace

from jaxpar.tools.program.operations import Control, Done, Free, Operation, Schedule
from jaxpar.tools.timeline.planes import Ran


def with_instructions(ran: Iterable[Ran], schedules: Sequence[Schedule]) -> list[Ran]:
    """What ran, where what command buffers launched is called after its instruction."""
    ran = list(ran)
    first: dict[str, dict[int, str]] = {}  # of each buffer, kernels by their node, as they started
    for one in ran:
        if one.node is not None:
            first.setdefault(one.name, {}).setdefault(one.node, one.kind)
    names = {
        (buffer, node): name
        for buffer, kernels in first.items()
        for node, name in zip(kernels, _named(list(kernels.values()), schedules), strict=True)
    }
    return [
        one if one.node is None else replace(one, name=names[one.name, one.node]) for one in ran
    ]


def _named(kernels: Sequence[str], schedules: Sequence[Schedule]) -> list[str]:
    """The instructions of one buffer's kernels, of the schedule that knows most of them."""

    def known(schedule: Schedule) -> int:
        return len({_kernel(one) for one in schedule.operations} & set(kernels))

    schedule = max(schedules, key=known, default=None)
    if schedule is None or not known(schedule):
        return list(kernels)
    launching = (one for one in schedule.operations if not isinstance(one, (Control, Done, Free)))
    operations = list(launching)
    return [operations[place].name for place in _places(kernels, list(map(_kernel, operations)))]


def _kernel(operation: Operation) -> str:
    return re.sub(r"[.\-]", "_", operation.name)


def _places(kernels: Sequence[str], own: Sequence[str]) -> list[int]:
    """The place of each kernel's operation, of operations that call kernels of their `own` so."""
    found: list[int] = []
    waiting: list[str] = []  # kernels since the last one that is known
    for kernel in kernels:
        last = found[-1] if found else -1
        # A kernel that was there before is another instruction's, which is alike.
        if kernel not in own[last + 1 :]:
            waiting.append(kernel)
            continue
        place = own.index(kernel, last + 1)
        found += [*_between(waiting, range(last + 1, place), last), place]
        waiting = []
    last = found[-1] if found else -1
    return found + _between(waiting, range(last + 1, len(own)), last)


def _between(kernels: Sequence[str], places: range, last: int) -> list[int]:
    """The places of kernels that are called after no instruction, among those where they may be."""
    is_own = [not kernel.startswith("Memset") for kernel in kernels]  # which prepares the next one
    # In front of all that is known are the last ones, elsewhere the first ones.
    chosen = places[-sum(is_own) :] if last < 0 else places[: sum(is_own)]
    found: list[int] = []
    number = 0
    for own in is_own:
        # One instruction may launch several kernels.
        found.append(chosen[min(number, len(chosen) - 1)] if chosen else max(last, 0))
        number += own
    return found
