"""The command: what it refuses, what it writes, and what it predicts."""

import json
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

import language_model.__main__ as command
from jaxpar import LowBit
from jaxpar.tools.cli.console import UsageError, require_extra
from jaxpar.tools.cli.main import main as explain_or_predict
from language_model import curves, loads
from language_model.arguments import parse
from language_model.config import Model, Training
from language_model.predict import predict, summary
from language_model.tests.cases import SMALL, quick_experts


def main(*args):
    with jax.numpy_dtype_promotion("standard"):
        return command.main([*SMALL, *args])


@pytest.fixture
def devices_are_there(monkeypatch):
    """JAX runs already, so that nothing is left to choose."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")


@pytest.mark.usefixtures("devices_are_there")
def test_writes_and_draws_curves(tmp_path, capsys):
    log, plot = tmp_path / "a.json", tmp_path / "a.png"
    steps = ["--steps", "3", "--print-every", "2", "--dtype", "bfloat16"]
    low = ["--wire-dtype", "int8", "--wire-columns", "64", "--exact-cotangents"]
    assert main(*steps, *low, "--mesh", "dp=2,tp=2", "--log", str(log)) == 0
    out = capsys.readouterr().out
    travels = "gathers in int8 in blocks of 64, exact cotangents"
    assert f"bfloat16 | 4 x cpu, mesh dp=2,tp=2, {travels}\n" in out
    assert out.count("\nstep ") == 2
    assert "loss on held-out text" in out
    record = json.loads(log.read_text())
    assert len(record["losses"]) == 3
    assert 5 < record["validation"] < 6
    assert record["tokens_per_second"] > 0
    assert record["model"]["vocabulary"] == 257
    how = {"dtype": "int8", "columns": 64, "sums": None, "cotangents": False}
    assert record["wire_dtype"] == how

    steps[-1] = "float32"
    steps += ["--validation-batches", "0"]
    assert main(*steps, "--mesh", "dp=1", "--plot", str(plot), "--compare", str(log)) == 0
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert "mesh one device" in capsys.readouterr().out


@pytest.mark.usefixtures("devices_are_there")
def test_tells_how_evenly_experts_are_used(tmp_path, capsys, monkeypatch):
    quick_experts(monkeypatch)
    log, plot, none = (tmp_path / name for name in ("a.json", "a.png", "none.json"))
    steps = ["--steps", "2", "--print-every", "1", "--validation-batches", "0", "--experts", "6"]
    more = ["--capacity-factor", "1", "--log", str(log)]
    assert main(*steps, "--mesh", "dp=2,ep=2", "--microbatches", "2", *more) == 0
    out = capsys.readouterr().out
    assert out.count("  largest load ") == 2
    record = json.loads(log.read_text())
    assert [set(step) for step in record["experts"]] == [{"loads", "dropped", "entropy"}] * 2
    for step in record["experts"]:
        (layer,) = step["loads"]
        assert len(layer) == 6
        assert sum(layer) == 2 * 2 * 8  # choices, sequences, bytes: no padding
        assert 0 < step["dropped"] < sum(layer)
        assert 1.7 < step["entropy"] <= np.log(6)
    assert record["experts"][0]["loads"] != record["experts"][1]["loads"]

    loads.draw(str(plot), [record, record])
    assert plot.read_bytes().startswith(b"\x89PNG")
    none.write_text(json.dumps({**record, "experts": []}))
    assert main(*steps, "--plot-loads", str(plot), "--compare", str(none)) == 2
    assert "the run on mesh dp=2,ep=2 has no experts" in capsys.readouterr().err


def test_draws_one_curve(tmp_path):
    run = {"mesh": "dp=8", "model": {"dtype": "float32"}, "losses": [3.0, 2.0, 1.0]}
    curves.draw(str(tmp_path / "one.png"), [run])
    assert (tmp_path / "one.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--mesh", "sp=2"], "--mesh sp=2: 'sp=2' is not one of pp, dp, fsdp, ep, cp, tp"),
        (
            ["--mesh", "pp=2", "--layers", "5", "--virtual-stages", "2"],
            "--layers 5 does not divide among 4 stages, of pp=2 and --virtual-stages 2: "
            "5 = 1 x 4 + 1; give --layers 8, or fewer stages",
        ),
        (["--mesh", "dp=2", "--virtual-stages", "2"], "is of a pipeline; give pp in --mesh"),
        (["--virtual-stages", "0"], "--virtual-stages must be at least 1, got 0"),
        (["--mesh", "dp=16"], "--mesh dp=16 takes 16 devices, but there are 8; use --mesh dp=8"),
        (["--kv-heads", "3"], "2 heads do not divide among 3 key-value heads"),
        (["--heads", "3"], "--width 16 does not divide among --heads 3; give --head-size"),
        (["--head-size", "3"], "the head size 3 is odd"),
        (["--batch", "0"], "batch must be at least 1, got 0"),
        (["--steps", "-1"], "steps must not be negative"),
        (["--clip", "0"], "clip must be positive"),
        (["--microbatches", "0"], "--microbatches must be at least 1"),
        (["--stop", "201"], "--stop must be within --steps 200, got 201"),
        (
            ["--coordinator", "h:1"],
            "--process-id and --num-processes missing; several",
        ),
        (
            ["--target", "v5e:2x2", "--coordinator=h:1", "--process-id=0", "--num-processes=2"],
            "--target needs one process",
        ),
        (["--log", "no/such/a.json"], "its directory does not exist"),
        (["--experts", "-1"], "experts must not be negative, got -1"),
        (["--experts", "4", "--top-k", "5"], "top_k must be from 1 to the 4 experts, got 5"),
        (["--experts", "4", "--capacity-factor", "0"], "capacity_factor must be positive, got 0.0"),
        (["--balance-loss", "nan"], "balance_loss must not be negative, got nan"),
        (["--wire-columns", "64"], "--wire-columns is of gathers in 8 bits; give --wire-dtype"),
        (["--exact-cotangents"], "--exact-cotangents is of gathers in 8 bits; give --wire-dtype"),
        (["--wire-dtype=int8", "--wire-columns=0"], "--wire-columns must be at least 1, got 0"),
        (["--plot-loads", "a.png"], "give --experts as well"),
        (["--plot-loads", "no/such/a.png", "--experts", "4"], "its directory does not exist"),
        (["--compare", "a.json"], "give --plot FILE.png as well"),
        (["--plot", "a.png", "--compare", __file__], "is not what --log writes"),
        (["--target", "v5e:3x3x3", "--steps", "0"], "--target v5e:3x3x3: "),
    ],
)
@pytest.mark.usefixtures("devices_are_there")
def test_refuses(args, message, capsys):
    assert main(*args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("language_model: error: ")
    assert message in line


def test_names_the_command_that_installs_what_is_missing(monkeypatch):
    for module, package in {"optax": "optax", "orbax.checkpoint": "orbax-checkpoint"}.items():
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(UsageError, match=rf"^{package} is not .*; pip install .*'{package}"):
            require_extra(module, "train")


@pytest.mark.parametrize(
    ("mesh", "how"),
    [
        ("fsdp=2,tp=2", {"wire_dtype": LowBit("int8", columns=64)}),
        ("pp=2,dp=2", {"virtual_stages": 2, "microbatches": 2}),
    ],
)
def test_predicts_a_step(mesh, how):
    model = Model(257, 64, 4, 2, 1, 32, 128, dtype="bfloat16")
    training = Training(batch=4, sequence=128)
    found = predict("v5e:2x2", mesh.replace("=2", "=-1", 1), model, training, **how)
    assert found["mesh"] == mesh
    assert 0 < found["exposed"] < found["total"]
    assert found["peak"] > 257 * 64
    assert not found["loops_of_unknown_length"]
    assert "of it exposed communication" in summary(found)


def test_sizes_that_are_not_given():
    model = parse([]).model
    assert (model.head_size, model.kv_heads, model.hidden) == (16, 8, 352)
    assert model.tied
    assert parse(["--experts", "4"]).model.hidden == 192
    assert parse(["--experts", "4", "--top-k", "1"]).model.hidden == 352


def test_its_step_is_explained(monkeypatch, capsys):
    monkeypatch.chdir(Path(__file__).parents[2])
    mesh = "pp=2,dp=1,fsdp=1,tp=2,ep=1,cp=1"
    step = "language_model.tests.cases:make_small_step"
    options = ["--target", "v5e:2x2", "--mesh", mesh, "--tries", "0", "--no-cache"]
    assert explain_or_predict(["explain", step, *options]) == 0
    printed, _ = capsys.readouterr()
    assert "a step on v5e:2x2 (pp=2, dp=1, fsdp=1, tp=2, ep=1, cp=1) takes " in printed
    assert "where: model.py:" in printed

    options[3] = "fsdp=2,tp=2"
    assert explain_or_predict(["explain", step, *options]) == 2
    assert "must name all axes of the model; add pp=1,dp=1,ep=1,cp=1" in capsys.readouterr().err
