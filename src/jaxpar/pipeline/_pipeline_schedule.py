"""Pipeline schedules as data: what each device computes in each trip.

A model is cut into `devices * virtual_stages` stages. Stage `s` is on device `s % devices`.

In each trip, a device computes at most one forward pass and then one backward pass, of different
microbatches. The result of a pass is sent during the other, and is used in the next trip. So a
microbatch takes a trip for each stage. Its loss is computed in the trip after the last stage, by
all devices. Three devices with two stages each, and three microbatches:

    trip        0   1   2   3   4   5   6   7 ...
    device 0   0F0 0F1 0F2 3F0 3F1 3F2                3F0: stage 3 forward, microbatch 0
    device 1       1F0 1F1 1F2 4F0 4F1 4F2
    device 2           2F0 2F1 2F2 5F0 5F1 5F2        then 5B0: stage 5 backward, from trip 7 on
"""

import csv
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from os import PathLike
from typing import NamedTuple

from jaxpar.arguments.calls import public
from jaxpar.arguments.types import Integer
from jaxpar.axis.checks import check_whole


class Pass(NamedTuple):
    """A forward or a backward pass of a microbatch through a stage.

    Example:
      >>> Pass(stage=3, microbatch=0)
      Pass(stage=3, microbatch=0)
    """

    stage: int
    microbatch: int


class PipelineTrip(NamedTuple):
    """What a device computes in a trip: two passes, each of which may be None.

    Example:
      >>> PipelineTrip(Pass(0, 1), None).forward.microbatch
      1
    """

    forward: Pass | None
    backward: Pass | None


@dataclass(frozen=True)
class PipelineSchedule:
    """A pipeline schedule: when each microbatch enters the pipeline, and when it leaves.

    Attributes:
      devices: the size of the pipeline's axis.
      virtual_stages: stages of each device.
      starts: for each microbatch, the trip of its forward pass in stage 0. Stage `s` follows `s`
        trips later.
      ends: for each microbatch, the trip of its backward pass in stage 0. Stage `s` comes `s` trips
        before.

    Raises:
      ValueError: a device has two forward or two backward passes in a trip; a backward pass comes
        before its loss; starts and ends do not fit.

    Example:
      >>> PipelineSchedule(2, 1, starts=(0, 1), ends=(4, 5)) == interleaved_1f1b(2, 2)
      True
    """

    devices: int
    virtual_stages: int
    starts: tuple[int, ...]
    ends: tuple[int, ...]

    def __post_init__(self) -> None:
        self.trips()

    @property
    def stages(self) -> int:
        """The stages of all devices."""
        return self.devices * self.virtual_stages

    @property
    def microbatches(self) -> int:
        """The number of microbatches."""
        return len(self.starts)

    @property
    def loss_trips(self) -> tuple[int, ...]:
        """The trip in which each microbatch's loss is computed."""
        return tuple(start + self.stages for start in self.starts)

    def order(self, layers: int) -> list[int]:
        """Returns the model's number of each layer of a stack, which is in the order of devices."""
        each = layers // self.stages
        return [
            (virtual * self.devices + device) * each + number
            for device in range(self.devices)
            for virtual in range(self.virtual_stages)
            for number in range(each)
        ]

    def trips(self) -> list[list[PipelineTrip]]:
        """Returns the trips of each device."""
        if len(self.starts) != len(self.ends) or min(self.starts, default=-1) < 0:
            raise ValueError(
                "PipelineSchedule: starts and ends must have a trip for each microbatch, counted "
                f"from 0, got {self.starts} and {self.ends}"
            )
        passes: dict[tuple[int, int, int], Pass] = {}  # by device, trip, and half
        for number, (start, end) in enumerate(zip(self.starts, self.ends, strict=True)):
            if end <= start + 2 * self.stages - 1:
                text = _text("B", Pass(self.stages - 1, number))
                raise ValueError(
                    f"PipelineSchedule: {text} runs before its loss; end microbatch {number} in "
                    f"trip {start + 2 * self.stages} or later"
                )
            for stage in range(self.stages):
                device, unit = stage % self.devices, Pass(stage, number)
                for half, trip in enumerate((start + stage, end - stage)):
                    other = passes.setdefault((device, trip, half), unit)
                    if other != unit:
                        both = " and ".join(_text("FB"[half], each) for each in (other, unit))
                        raise ValueError(
                            f"PipelineSchedule: device {device} has {both} in trip {trip}; start "
                            "or end one of their microbatches in another trip"
                        )

        def of(device: int, trip: int) -> PipelineTrip:
            return PipelineTrip(passes.get((device, trip, 0)), passes.get((device, trip, 1)))

        trips = range(max(self.ends) + 1)
        return [[of(device, trip) for trip in trips] for device in range(self.devices)]

    def bubble(self, forward: float = 1.0, backward: float = 2.0) -> float:
        """Returns the share of its time that a device is idle, given the times of a stage."""
        together = list(zip(*self.trips(), strict=True))
        forwards = sum(any(trip.forward for trip in trips) for trips in together)
        backwards = sum(any(trip.backward for trip in trips) for trips in together)
        busy = self.microbatches * self.virtual_stages * (forward + backward)
        return 1 - busy / (forward * forwards + backward * backwards)

    def peak_activations(self) -> float:
        """Returns the most passes whose residuals a device holds, divided by its stages."""
        return max(map(_most_alive, self.trips())) / self.virtual_stages

    def to_csv(self, path: str | PathLike[str]) -> None:
        """Writes a row for each device, as `torch.distributed.pipelining` reads it.

        A cell is a stage, F or B, and a microbatch. Each trip has two cells.
        """
        with open(path, "w", newline="") as file:
            csv.writer(file).writerows(
                [text for trip in trips for text in _cells(trip)] for trips in self.trips()
            )

    def __str__(self) -> str:
        cells = [[" ".join(filter(None, _cells(trip))) for trip in trips] for trips in self.trips()]
        width = max(len(cell) for row in cells for cell in row)
        lines = [
            f"device {device}  " + " ".join(cell.ljust(width) for cell in row).rstrip()
            for device, row in enumerate(cells)
        ]
        return "\n".join([*lines, f"bubble {self.bubble():.1%}"])


@public
def interleaved_1f1b(
    devices: Integer, microbatches: Integer, virtual_stages: Integer = 1
) -> PipelineSchedule:
    """Returns the schedule of forward passes, then a forward and a backward pass in turn.

    Args:
      devices: the size of the pipeline's axis.
      microbatches: their number. They enter in groups of `devices`.
      virtual_stages: stages of each device. With more of them the bubble is smaller.

    Returns:
      A schedule of bubble `(devices - 1) / (virtual_stages * microbatches + devices - 1)`. With
      several virtual stages and a smaller last group it is larger.

    Raises:
      ValueError: an argument is below 1.

    Example:
      >>> print(interleaved_1f1b(2, 2))
      device 0  0F0 0F1         0B0 0B1
      device 1      1F0 1F1 1B0 1B1
      bubble 33.3%

    Source: Narayanan et al., "Efficient large-scale language model training on GPU clusters using
    Megatron-LM" (2021).
    """
    devices = check_whole("devices", devices, 1)
    microbatches = check_whole("microbatches", microbatches, 1)
    virtual = check_whole("virtual_stages", virtual_stages, 1)
    # A microbatch comes back after `devices` trips. So groups of `devices` microbatches enter.
    groups = (divmod(number, devices) for number in range(microbatches))
    starts = tuple(group * devices * virtual + number for group, number in groups)
    ends = tuple(2 * devices * virtual + start for start in starts)
    return PipelineSchedule(devices, virtual, starts, ends)


@public
def one_f_one_b(devices: Integer, microbatches: Integer) -> PipelineSchedule:
    """Returns `interleaved_1f1b` with a stage on each device.

    Example:
      >>> one_f_one_b(4, 16).peak_activations()
      9.0

    Source: Narayanan et al., "PipeDream" (2019).
    """
    return interleaved_1f1b(devices, microbatches)


@public
def gpipe(devices: Integer, microbatches: Integer) -> PipelineSchedule:
    """Returns the schedule in which all forward passes come before the first backward pass.

    For comparison only: `value_and_grad` refuses it. Devices would hold all residuals.

    Example:
      >>> gpipe(4, 16).peak_activations()
      16.0

    Source: Huang et al., "GPipe" (2019).
    """
    schedule = interleaved_1f1b(devices, microbatches)
    ends = tuple(end + schedule.starts[-1] for end in schedule.ends)
    return replace(schedule, ends=ends)


def _most_alive(trips: Sequence[PipelineTrip]) -> int:
    """Returns the most passes at a time whose backward passes have not run yet."""
    made = accumulate(trip.forward is not None for trip in trips)
    used = accumulate(trip.backward is not None for trip in trips)
    return max(ran - done for ran, done in zip(made, (0, *used), strict=False))


def _cells(trip: PipelineTrip) -> list[str]:
    return [_text(half, unit) if unit else "" for half, unit in zip("FB", trip, strict=True)]


def _text(half: str, unit: Pass) -> str:
    return f"{unit.stage}{half}{unit.microbatch}"
