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
    ran = sorted(ran, key=lambda one: one.start)
    launches: dict[tuple[str, int], list[int]] = {}  # indices into `ran`, by launch of a buffer
    for place, one in enumerate(ran):
        if one.launch is not None:
            launches.setdefault((one.name, one.launch), []).append(place)
    for places in launches.values():
        names = _named([ran[place].kind for place in places], schedules)
        for place, name in zip(places, names, strict=True):
            ran[place] = replace(ran[place], name=name)
    return ran


def _named(kernels: Sequence[str], schedules: Sequence[Schedule]) -> list[str]:
    """Returns names from the schedule that fits best."""

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
    return kernel.startswith("Memset")


def _places(kernels: Sequence[str], own: Sequence[str]) -> list[int]:
    found: list[int] = []
    waiting: list[str] = []  # unknown kernels since the last known one
    for kernel in kernels:
        last = found[-1] if found else -1
        # A kernel found only further back belongs to another, equal instruction.
        if kernel not in own[last + 1 :]:
            waiting.append(kernel)
            continue
        place = own.index(kernel, last + 1)
        prepares = len([*takewhile(_is_memset, reversed(waiting))])  # this one, not those before
        before = waiting[: len(waiting) - prepares]
        found += _between(before, range(last + 1, place), last) + [place] * (prepares + 1)
        waiting = []
    last = found[-1] if found else -1
    return found + _between(waiting, range(last + 1, len(own)), last)


def _between(kernels: Sequence[str], places: range, last: int) -> list[int]:
    is_own = [not _is_memset(kernel) for kernel in kernels]
    # Before the first known kernel, take the last places. Elsewhere take the first places.
    chosen = places[max(0, len(places) - sum(is_own)) :] if last < 0 else places[: sum(is_own)]
    found: list[int] = []
    number = 0
    for own in is_own:
        # One instruction may launch several kernels.
        found.append(chosen[min(number, len(chosen) - 1)] if chosen else max(last, 0))
        number += own
    return found
