"""The check of a device runs without a GPU, watches its clock, and finds what is wrong."""

import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from traces import Plane, write

from device import parts
from device.clock import Clock
from device.parts import Check
from device.programs import CALLS, WARMING, Case, spent
from device.results import Results, Row, line, measured_in
from device.values import Check as Value
from jaxpar import make_mesh
from jaxpar.schedule import Target

FOLDER = Path(__file__).parent
MATMUL = "bfloat16 1024x1024x1001"


def device(*arguments):
    done = subprocess.run(
        [sys.executable, str(FOLDER), *arguments],
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def predicted(tmp_path_factory):
    """What it prints without a GPU, and what it writes."""
    folder = tmp_path_factory.mktemp("device")
    some = f"rms_norm,latency_hiding,{MATMUL},exp float32 1 MiB,small block"
    chosen = "values,options,traces,matmuls,memory"
    text = device("--json", str(folder), "--parts", chosen, "--cases", some)
    (file,) = folder.glob("*.json")
    return text, file


def test_without_a_gpu_it_checks_values_and_says_what_it_would_measure(predicted):
    text, file = predicted
    assert "No GPU is used here. Values are checked on cpu" in text
    assert "timed at is compiled and predicted for h100:1" in text
    assert "wrong: nothing" in text
    record = json.loads(file.read_text())
    rows = {row["name"]: row for row in record["rows"]}
    options = "xla_gpu_enable_latency_hiding_scheduler"
    assert set(rows) == {"rms_norm", options, MATMUL, "exp float32 1 MiB", "small block"}
    assert rows[options]["said"] == "accepted: True"
    assert rows[MATMUL]["predicted"] > 0.99 * 2 * 1024**2 * 1001 / 9.9e14 * 1e6
    assert rows["exp float32 1 MiB"]["predicted"] > 2 * 2**20 / 3.35e12 * 1e6
    assert all(row["measured"] is None for row in rows.values())
    assert record["versions"]["jax"] == jax.__version__
    assert record["left out"] == record["errors"] == {}
    assert set(record["seconds"]) == {"values", "options", "traces", "matmuls", "memory"}


def test_what_was_measured_stands_beside_a_new_prediction(predicted, tmp_path):
    record = json.loads(predicted[1].read_text())
    record["card"] = "NVIDIA H100 80GB HBM3"
    for row in record["rows"]:
        row["measured"] = 2 * row["predicted"] if row["predicted"] else None
    file = tmp_path / "earlier.json"
    file.write_text(json.dumps(record))
    text = device("--measured", str(file), "--parts", "matmuls", "--cases", MATMUL)
    (row,) = [line for line in text.splitlines() if line.startswith(MATMUL)]
    assert "-50%" in row
    assert "predicted for h100-80gb-hbm3:1" in text
    (row,) = [line for line in text.splitlines() if line.startswith("matmul, no multiple of 8")]
    assert row.split()[-5:] == ["1", "50%", "50%", "-50%", "-50%"]


def test_the_table_of_the_page_is_that_of_the_stored_run():
    page = (FOLDER / "README.md").read_text()
    (name,) = re.findall(r"All rows are in `(.*)`", page)
    card, rows = measured_in(FOLDER / name)
    found = Results({}, None, list(rows.values()))
    assert card in page
    assert found.is_right
    for cells in found.classes():
        assert f"| {' | '.join(cells)} |" in page


# -- on CPU devices, as on a GPU ------------------------------------------------------------------


def checking(seconds=100.0, folder=None, **more):
    here = Target("here", make_mesh("tp=1", devices=jax.devices()[:1]), None)
    shares = {"values": 1.0, "traces": 1.0, "memory": 1.0}
    clock = Clock(time.monotonic(), seconds, shares)
    results = Results({"card": "a card"}, folder and folder / "found.json")
    return Check(here, True, clock, results, lambda row: None, **more)


NEGATED = Case("negate", "memory", jnp.negative, (((256, 1024), "float32"),))


def test_times_of_operations_and_the_trace_of_a_step(tmp_path, monkeypatch):
    check = checking(folder=tmp_path)
    parts.operations(check, "memory", [NEGATED])
    step = Case("step", "step", lambda x: jnp.tanh(x @ x) @ x, (((128, 128), "float32"),))
    monkeypatch.setattr(parts.cases, "steps", lambda: [step])
    parts.traces(check)
    check.results.write()
    rows = measured_in(tmp_path / "found.json")[1]
    assert set(rows) == {"negate", "step"}
    assert all(row.is_right and row.measured > 0 and row.wall > 0 for row in rows.values())
    assert (tmp_path / "found.zip").stat().st_size > 1000


def test_what_does_not_fit_into_the_time_is_left_out():
    check = checking(seconds=0.0)
    parts.operations(check, "memory", [NEGATED])
    parts.values(check)
    assert check.results.rows == []
    assert check.results.left_out["memory"] == ["negate"]
    assert "rms_norm" in check.results.left_out["values"]
    clock = Clock(0.0, 100.0, {"a": 0.5, "b": 1.5})
    assert clock.deadlines == {"a": 25.0, "b": 100.0}


def test_a_case_that_fails_is_wrong_and_the_others_go_on():
    def broken(x):
        raise ValueError(f"no {x.shape}\nof many lines")

    check = checking()
    parts.operations(check, "memory", [Case("bad", "memory", broken, NEGATED.operands), NEGATED])
    bad, good = check.results.rows
    assert (bad.is_right, bad.said) == (False, "ValueError: no (256, 1024)")
    assert good.is_right
    assert not check.results.is_right


def test_kernels_of_a_call_are_counted_without_those_that_warm_up(tmp_path):
    plane = Plane("/device:GPU:0")
    for run in range(WARMING + CALLS):
        for stream, length in ((7, 3000), (8, 2000)):
            taken = length + 900_000 * (run < WARMING)
            more = {"hlo_op": f"fusion.{stream}", "hlo_module": "jit_case_4", "program_id": 5}
            plane.add(f"Stream #{stream}(Compute)", f"k{stream}", run * 10**6, taken, **more)
    write(tmp_path, plane)
    compiled = SimpleNamespace(case=NEGATED, module="jit_case_4")
    assert spent(tmp_path, [compiled]) == {"negate": [5.0] * CALLS}


# -- values and rows ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "wrong"),
    [
        (lambda x: x**3, set()),
        (lambda x: x**3 + 0.1 * x, {"result", "gradient 0"}),
        (lambda x: x * jax.lax.stop_gradient(x) ** 2, {"gradient 0"}),
    ],
)
def test_wrong_values_and_gradients_are_found(function, wrong):
    x = np.random.default_rng(0).standard_normal((8, 16)).astype(np.float32)
    value = Value("cube", function, lambda x: x**3, (x,))
    found = value.errors(make_mesh("tp=1", devices=jax.devices()[:1]))
    assert {name for name, error in found.items() if not error <= value.allowed} == wrong
    assert set(found) == {"result", "gradient 0"}


def test_rows_and_their_classes():
    rows = [
        Row("memory", "a", "memory, large", predicted=90.0, measured=100.0, wall=1234.5),
        Row("memory", "b", "memory, large", predicted=130.0, measured=100.0),
        Row("experts", "c", "experts", predicted=50.0, measured=100.0, is_least=True),
    ]
    assert [row.error for row in rows] == [pytest.approx(-0.1), pytest.approx(0.3), None]
    assert line(rows[0]).split() == ["a", "100.0", "90.0", "-10%", "1,234.5"]
    found = Results({}, None, rows).classes()
    assert found == [["memory, large", "2", "20%", "30%", "-10%", "+30%"]]
