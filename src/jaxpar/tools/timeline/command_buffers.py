"""Names the instructions of kernels in CUDA's command buffers, which launch as one graph.

A profile has only the buffer's and the kernel's name. XLA names its own kernels after an
instruction (`fusion_18` for `fusion.18`); library kernels have other names. A buffer keeps the
schedule's order, so an unknown kernel lies between the instructions of its known neighbours.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import takewhile

from jaxpar.tools.program.operations import Control, Done, Free, Operation, Schedule
from jaxpar.tools.timeline.trace_events import Ran


def with_instructions(ran: Iterable[Ran], schedules: Sequence[Schedule]) -> list[Ran]:
    ran = sorted(ran, key=lambda span: span.start)
    launches: dict[tuple[str, int], list[int]] = {}  # indices into `ran`, by launch of a buffer
    for place, span in enumerate(ran):
        if span.launch is not None:
            launches.setdefault((span.name, span.launch), []).append(place)
    for places in launches.values():
        names = _named([ran[place].kind for place in places], schedules)
        for place, name in zip(places, names, strict=True):
            ran[place] = replace(ran[place], name=name)
    return ran


def _named(kernels: Sequence[str], schedules: Sequence[Schedule]) -> list[str]:
    """Returns names from the schedule that fits best."""

    def known(schedule: Schedule) -> int:
        return len({_kernel(op) for op in schedule.operations} & set(kernels))

    schedule = max(schedules, key=known, default=None)
    if schedule is None or not known(schedule):
        return list(kernels)
    launching = (op for op in schedule.operations if not isinstance(op, (Control, Done, Free)))
    operations = list(launching)
    return [operations[place].name for place in _places(kernels, list(map(_kernel, operations)))]


def _kernel(operation: Operation) -> str:
    return re.sub(r"[.\-]", "_", operation.name)


def _is_memset(kernel: str) -> bool:
    return kernel.startswith("Memset")


def _places(kernels: Sequence[str], scheduled: Sequence[str]) -> list[int]:
    places: list[int] = []
    waiting: list[str] = []  # unknown kernels since the last known kernel
    for kernel in kernels:
        last = places[-1] if places else -1
        # A kernel only further back belongs to another, equal instruction.
        if kernel not in scheduled[last + 1 :]:
            waiting.append(kernel)
            continue
        place = scheduled.index(kernel, last + 1)
        prepares = len([*takewhile(_is_memset, reversed(waiting))])  # this one, not those before
        before = waiting[: len(waiting) - prepares]
        places += _between(before, range(last + 1, place), last) + [place] * (prepares + 1)
        waiting = []
    last = places[-1] if places else -1
    return places + _between(waiting, range(last + 1, len(scheduled)), last)


def _between(kernels: Sequence[str], places: range, last: int) -> list[int]:
    is_own = [not _is_memset(kernel) for kernel in kernels]
    # Before the first known kernel, take the last places. Elsewhere take the first places.
    chosen = places[max(0, len(places) - sum(is_own)) :] if last < 0 else places[: sum(is_own)]
    taken: list[int] = []
    number = 0
    for advances in is_own:
        # One instruction may launch several kernels.
        taken.append(chosen[min(number, len(chosen) - 1)] if chosen else max(last, 0))
        number += advances
    return taken
