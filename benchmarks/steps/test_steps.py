"""Published steps are whole, and their table is right; nothing is compiled."""

from math import prod

import pytest

import steps.__main__ as command
from jaxpar.tools.timeline.target import TPUS, parts_of
from steps.maxtext_step import arguments
from steps.step import Step, steps


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
    found["interval"] = [-0.05, 0.125]
    shown = ["m on 8", "2.000 s", "2.200 s", "+10.0%", "-5% to +12%"]
    shown += ["50%", "25%", "10%", "12.3 GB"]
    assert command.row(step, found) == shown
    shown = ["m on 8", "2.000 s", "not compiled", *["-"] * 6]
    assert command.row(step, {"failed": "too large"}) == shown


def test_steps_within_their_interval():
    chosen = [a_step(f"m on {devices}", 2.0) for devices in (1, 2, 4, 8)]
    found = {
        "m on 1": {"seconds": 2.1, "interval": [-0.1, 0.1]},
        "m on 2": {"seconds": 2.3, "interval": [-0.1, 0.1]},
        "m on 4": {"seconds": 2.0, "interval": None},
        "m on 8": {"failed": "too large"},
    }
    assert command.coverage(chosen, found) == "- Within their interval: 1 of 2 steps."


def test_growth_is_that_of_tokens(monkeypatch):
    few, many = a_step("m on 8", 2.0), a_step("m on 256", 2.5)
    monkeypatch.setattr(command, "steps", lambda: (few, many))
    lines = command.growth({"m on 8": {"seconds": 1.0}, "m on 256": {"seconds": 2.0}})
    assert lines == [
        "- m, tokens a second and device on 256 over those on 8: measured 0.800, predicted 0.500 "
        "(-37.5%)."
    ]
    assert command.growth({"m on 8": {"seconds": 1.0}, "m on 256": {"failed": "too large"}}) == []
