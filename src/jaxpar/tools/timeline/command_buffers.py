"""Which instruction a kernel is of, where XLA launched many at once.

XLA records kernels of a GPU in command buffers, which CUDA launches as one graph. A profile then
names the buffer (`command_buffer_1`) and the kernel. XLA calls its own kernels after an instruction
(`fusion.18` is `fusion_18`), and equal instructions share one. Kernels of libraries have names of
their own. A buffer keeps the order of the schedule. So a kernel between two that are known belongs
to an instruction between theirs.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from jaxpar.tools.program.operations import Control, Done, Free, Operation, Schedule
from jaxpar.tools.timeline.planes import Ran


def with_instructions(ran: Iterable[Ran], schedules: Sequence[Schedule]) -> list[Ran]:
    """Returns what ran, by its start, with what buffers launched called after its instruction."""
    ran = sorted(ran, key=lambda one: one.start)
    launches: dict[tuple[str, int], list[int]] = {}  # places of what one launch of a buffer ran
    for place, one in enumerate(ran):
        if one.launch is not None:
            launches.setdefault((one.name, one.launch), []).append(place)
    for places in launches.values():
        names = _named([ran[place].kind for place in places], schedules)
        for place, name in zip(places, names, strict=True):
            ran[place] = replace(ran[place], name=name)
    return ran


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


def _is_memset(kernel: str) -> bool:
    """Whether it only prepares memory, for the kernel that follows."""
    return kernel.startswith("Memset")


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
        prepares = len([*takewhile(_is_memset, reversed(waiting))])  # this kernel, not those before
        before = waiting[: len(waiting) - prepares]
        found += _between(before, range(last + 1, place), last) + [place] * (prepares + 1)
        waiting = []
    last = found[-1] if found else -1
    return found + _between(waiting, range(last + 1, len(own)), last)


def _between(kernels: Sequence[str], places: range, last: int) -> list[int]:
    """The places of kernels that are called after no instruction, among those where they may be."""
    is_own = [not _is_memset(kernel) for kernel in kernels]
    # In front of all that is known are the last ones, elsewhere the first ones.
    chosen = places[max(0, len(places) - sum(is_own)) :] if last < 0 else places[: sum(is_own)]
    found: list[int] = []
    number = 0
    for own in is_own:
        # One instruction may launch several kernels.
        found.append(chosen[min(number, len(chosen) - 1)] if chosen else max(last, 0))
        number += own
    return found
