"""Pipeline schedules in plain Python: dependencies, bubbles, memory, and how they are written."""

import csv

import pytest

from jaxpar.pipeline import (
    PipelineSchedule,
    gpipe,
    interleaved_1f1b,
    one_f_one_b,
)
from jaxpar.pipeline._trip_numbers import trip_numbers

SIZES = [
    (devices, microbatches, virtual)
    for devices in (1, 2, 3, 4, 8)
    for microbatches in (1, 2, 3, 5, 8, 16, 32)
    for virtual in (1, 2, 4)
]


@pytest.mark.parametrize(("devices", "microbatches", "virtual"), SIZES)
def test_the_bubble_is_megatrons(devices, microbatches, virtual):
    found = interleaved_1f1b(devices, microbatches, virtual).bubble(forward=1.3, backward=2.9)
    whole = -(-microbatches // devices) * devices if virtual > 1 else microbatches
    ideal = (devices - 1) / (virtual * microbatches + devices - 1)
    if whole == microbatches:
        assert found == pytest.approx(ideal)
    else:
        least = virtual * microbatches / (virtual * whole + devices - 1)
        assert ideal - 1e-9 <= found <= 1 - least + 1e-9


@pytest.mark.parametrize(("devices", "microbatches", "virtual"), SIZES)
def test_the_peak_is_two_trips_above_megatrons(devices, microbatches, virtual):
    found = interleaved_1f1b(devices, microbatches, virtual).peak_activations()
    most = (2 * devices - 1 if virtual == 1 else devices + (devices - 1) / virtual) + 2 / virtual
    assert found <= min(microbatches, most)
    if microbatches >= 2 * devices and microbatches % devices == 0:
        assert found == pytest.approx(min(microbatches, most))
    assert gpipe(devices, microbatches).peak_activations() == microbatches


def test_one_virtual_stage_is_1f1b():
    assert one_f_one_b(4, 8) == interleaved_1f1b(4, 8)
    assert gpipe(4, 8).bubble() == pytest.approx(one_f_one_b(4, 8).bubble())


@pytest.mark.parametrize(("devices", "microbatches", "virtual"), SIZES)
def test_no_two_residuals_share_a_slot(devices, microbatches, virtual):
    schedule = interleaved_1f1b(devices, microbatches, virtual)
    numbers = trip_numbers(schedule)
    kinds = [kind for *kind, trips in numbers.stretches(True) for _ in numbers.loss[trips]]
    assert len(kinds) == len(schedule.trips()[0])
    for device, trips in enumerate(schedule.trips()):
        held, real = {}, set()
        for number, trip in enumerate(trips):
            computes, returns = kinds[number]
            slot = numbers.forward.slot[number, device]
            if computes:
                assert slot not in held
                real.discard(slot)
            if trip.forward:
                held[slot] = trip.forward
                real.add(slot)
            slot = numbers.backward.slot[number, device]
            if trip.backward:
                assert held.pop(slot) == trip.backward
            elif returns:
                assert slot in real  # an idle pass multiplies zeros by a real pass' residuals
        assert not held


def test_it_prints_as_a_table():
    assert str(interleaved_1f1b(2, 2)) == (
        "device 0  0F0 0F1         0B0 0B1\ndevice 1      1F0 1F1 1B0 1B1\nbubble 33.3%"
    )


def test_it_is_written_as_torch_reads_it(tmp_path):
    interleaved_1f1b(2, 2, 2).to_csv(tmp_path / "schedule.csv")
    with (tmp_path / "schedule.csv").open(newline="") as file:
        rows = list(csv.reader(file))
    assert len(rows) == 2
    assert rows[0][:4] == ["0F0", "", "0F1", ""]
    assert sorted(cell for row in rows for cell in row if cell) == sorted(
        f"{stage}{half}{microbatch}" for stage in range(4) for half in "FB" for microbatch in (0, 1)
    )


def test_wrong_schedules_are_refused():
    PipelineSchedule(2, 2, starts=(0, 1), ends=(8, 9))
    with pytest.raises(
        ValueError, match="3B1 runs before its loss; end microbatch 1 in trip 9 or later"
    ):
        PipelineSchedule(2, 2, starts=(0, 1), ends=(8, 8))
    for starts, ends in (((-1, 0), (8, 9)), ((0,), (8, 9)), ((), ())):
        with pytest.raises(ValueError, match="starts and ends must have a trip for each"):
            PipelineSchedule(2, 2, starts=starts, ends=ends)
    with pytest.raises(ValueError, match="device 0 has 2F0 and 0F1 in trip 2"):
        PipelineSchedule(2, 2, starts=(0, 2), ends=(8, 10))
    with pytest.raises(ValueError, match="device 0 has 0B0 and 0B1 in trip 9"):
        PipelineSchedule(2, 2, starts=(0, 1), ends=(9, 9))


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ((0, 4), "devices=0 must be at least 1"),
        ((4, 0), "microbatches=0 must be at least 1"),
        ((4, 4, 0), "virtual_stages=0 must be at least 1"),
        ((4.5, 4), "devices must be an integer"),
    ],
)
def test_wrong_sizes_are_refused(given, match):
    with pytest.raises((ValueError, TypeError), match=match):
        interleaved_1f1b(*given)
