"""Published steps are whole, and their table is right; nothing is compiled."""

from math import log1p, prod

import pytest

import steps.__main__ as command
from accuracy.calibrate import Calibration, Error
from jaxpar.tools.accuracy.interval import Interval, KindOfWork, _intervals
from jaxpar.tools.timeline.target import TPUS, parts_of
from steps.maxtext_step import arguments
from steps.step import Step, errors, predictions, steps


@pytest.mark.parametrize("step", steps(), ids=lambda step: step.name)
def test_a_step_is_whole(step):
    slices, chip, layout = parts_of(step.target)
    assert chip in TPUS
    devices = prod(map(int, layout.split("x"))) * (2 if chip == "tpu7x" else 1)
    assert slices * devices == step.devices
    path, _, commit = step.source.partition(" @")
    assert path.endswith(".md")
    assert len(commit) == 40
    assert step.seconds > 0
    assert "," not in step.name  # it parts the names of `--steps`
    assert all(name.startswith("xla_") for name in step.options)
    given = arguments(step)
    assert f"model_name={step.model}" in given
    assert f"compile_topology={chip}-{devices}" in given
    assert f"compile_topology_num_slices={slices}" in given
    assert f"per_device_batch_size={step.config['per_device_batch_size']}" in given
    assert len({one.partition("=")[0] for one in given}) == len(given)


def a_step(name, seconds):
    config = {"per_device_batch_size": 1, "max_target_length": 1000}
    return Step(name, "m", "v6e:2x4", seconds, "MaxText", "README.md @0", config, {})


def test_rows_of_the_table():
    step = a_step("m on 8", 2.0)
    found = {"seconds": 2.2, "matmuls": 1.1, "kernels": 0.55, "waits": 0.22, "gigabytes": 12.34}
    found["made"] = "2026-11-29"
    shown = ["m on 8", "2.000 s", "2.200 s", "+10.0%", "-5% to +12%"]
    shown += ["50%", "25%", "10%", "12.3 GB", "2026-11-29"]
    assert command.row(step, found, Interval(-0.05, 0.125)) == shown
    assert command.row(step, found, None)[4] == "-"
    shown = ["m on 8", "2.000 s", "not compiled", *["-"] * 7]
    assert command.row(step, {"failed": "too large"}, None) == shown


def error(name, part, chip="TPU v6 lite"):
    return Error(KindOfWork(chip, "step", True), name, log1p(part))


def test_the_interval_of_a_step_is_made_of_its_parts_and_of_other_steps():
    known = {f"m on {n}": error(f"{n}", part) for n, part in enumerate((-0.3, 0.1, 0.1, 0.1, 0.5))}
    found = {"interval": [-0.02, 0.2]}
    interval = command.interval_of("m on 4", found, known)
    assert interval.low == pytest.approx(-0.3)
    assert interval.high == 0.2  # its own 0.5 does not count
    assert command.interval_of("m on 0", found, known).low == -0.02
    few = {name: known[name] for name in ("m on 0", "m on 4")}
    assert command.interval_of("m on 0", found, few) == Interval(-0.02, 0.2)
    assert command.interval_of("m on 0", {"interval": None}, known) is None


def test_steps_within_their_interval():
    known = {"m on 1": error("a", 0.05), "m on 2": error("b", 0.15), "m on 4": error("c", -0.1)}
    interval = Interval(-0.1, 0.1)
    text = command.coverage(known, {"m on 1": interval, "m on 2": interval, "m on 4": None})
    assert text == ("- Median of the errors' sizes: 10.0%. Within their interval: 1 of 2 steps.")


def test_what_was_predicted_is_of_published_steps():
    """And the package's intervals are made of it."""
    names = {step.name for step in steps()}
    assert set(predictions()) <= names
    known = errors()
    assert len(known) >= 16
    made = Calibration([*known.values()]).table()
    rounded = {of: (round(one.low, 4), round(one.high, 4)) for of, one in made.items()}
    kept = {of: (one.low, one.high) for of, one in _intervals().items() if of[-1] == "step"}
    assert rounded == kept


def test_growth_is_that_of_tokens(monkeypatch):
    few, many = a_step("m on 8", 2.0), a_step("m on 256", 2.5)
    monkeypatch.setattr(command, "steps", lambda: (few, many))
    lines = command.growth({"m on 8": {"seconds": 1.0}, "m on 256": {"seconds": 2.0}})
    assert lines == [
        "- m, tokens a second and device on 256 over those on 8: measured 0.800, predicted 0.500 "
        "(-37.5%)."
    ]
    assert command.growth({"m on 8": {"seconds": 1.0}, "m on 256": {"failed": "too large"}}) == []
