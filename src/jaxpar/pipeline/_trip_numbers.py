"""A pipeline schedule as integers: what each device does in each trip."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np

from jaxpar.pipeline._pipeline_schedule import Pass, PipelineSchedule, PipelineTrip


class ForwardNumbers(NamedTuple):
    """The numbers of a forward pass, each an array `[trips, devices]`."""

    virtual: Any  # the device's stage
    microbatch: Any
    slot: Any  # where its residuals wait
    enters: Any  # whether it is of the first stage


class BackwardNumbers(NamedTuple):
    """The numbers of a backward pass, each an array `[trips, devices]`."""

    virtual: Any
    microbatch: Any
    slot: Any
    runs: Any  # whether there is a pass at all
    is_last: Any  # whether it is of the last stage
    leaves: Any  # the microbatch, if it is of the first stage; otherwise the number of microbatches


class TripNumbers(NamedTuple):
    forward: ForwardNumbers
    backward: BackwardNumbers
    loss: Any  # [trips], the microbatch whose loss is computed; -1: none
    slots: int

    def stretches(self, pulls: bool) -> list[tuple[bool, bool, slice]]:
        """Returns whether there are forward and backward passes, and the trips."""
        runs = np.any(self.backward.runs, axis=1)
        first, length = int(np.argmax(runs)), len(runs)
        end = int(np.flatnonzero(self.loss >= 0)[-1])  # a loss is a trip behind its forward pass
        if not pulls:
            return [(True, False, slice(0, end)), (False, False, slice(end, end + 1))]
        bounds = 0, min(first, end), max(first, end), length
        return [
            (start < end, start >= first, slice(start, stop))
            for start, stop in pairwise(bounds)
            if start < stop
        ]


def trip_numbers(schedule: PipelineSchedule) -> TripNumbers:
    pairs = [_of_device(schedule, trips) for trips in schedule.trips()]
    forward, backward = (
        np.array([pair[half] for pair in pairs], np.int32).transpose(2, 1, 0) for half in (0, 1)
    )
    loss = np.full(forward.shape[1], -1, np.int32)
    loss[list(schedule.loss_trips)] = range(schedule.microbatches)
    slots = 1 + int(forward[2].max())
    return TripNumbers(ForwardNumbers(*forward), BackwardNumbers(*backward), loss, slots)


def _of_device(
    schedule: PipelineSchedule, trips: Sequence[PipelineTrip]
) -> tuple[list[Any], list[Any]]:
    slot_of: dict[Pass, int] = {}
    free, newest = list(range(len(trips)))[::-1], -1
    forwards: list[Any] = []
    backwards: list[Any] = []
    for forward, backward in trips:
        # An idle backward pass multiplies zeros by the residuals of the newest forward pass. So an
        # idle forward pass, whose numbers may be NaN, writes elsewhere.
        slot = min(place for place in free if forward or place != newest)
        if forward:
            free.remove(slot)
            slot_of[forward] = newest = slot
        stage, microbatch = forward or (schedule.stages, 0)
        virtual = stage // schedule.devices if forward else 0
        forwards.append((virtual, microbatch, slot, stage == 0))

        used = slot_of.pop(backward) if backward else newest
        if backward:
            free.append(used)
        stage, microbatch = backward or (0, schedule.microbatches)
        is_last = stage == schedule.stages - 1
        leaves = schedule.microbatches if stage else microbatch
        virtual = stage // schedule.devices
        runs = backward is not None
        backwards.append((virtual, microbatch if runs else 0, max(used, 0), runs, is_last, leaves))
    return forwards, backwards
