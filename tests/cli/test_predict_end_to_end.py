"""The command with the TPU compiler, each target in a process of its own."""

import importlib.util
import json
import sys

import pytest

from jaxpar.tools.cli import predict_command
from jaxpar.tools.cli.main import main
from jaxpar.tools.cli.predict_results import TargetResults
from jaxpar.tools.cli.predict_worker import serve
from jaxpar.tools.timeline import timeline

SMALL = ("predict", "--ops", "gather-lhs-rows", "--shapes", "1024x1024x4096")
MODEL = """
import os
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def layer(x, w):
    local = lambda x, w: jax.lax.all_gather(x, "tp", tiled=True) @ w
    return jax.shard_map(local, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))(x, w)

def make(mesh):
    print("what a user prints is not the report")
    if mesh.size == 8:
        os.abort()
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=NamedSharding(mesh, P("tp")))
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=NamedSharding(mesh, P(None, "tp")))
    return layer, (x, w)

def makes_nothing(mesh):
    return 3

def is_broken(mesh):
    raise RuntimeError("no such\\nluck")

def cannot_compile(x):
    return x @ x.reshape(3, -1)

value = 3

import jaxpar

of_jit = jaxpar.jit(layer, compiler_options={"xla_tpu_enable_async_collective_fusion": "false"})
"""


@pytest.fixture(autouse=True)
def compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    assert importlib.util.find_spec("libtpu"), (
        "these tests need the TPU compiler; pip install -e '.[tpu]'"
    )


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "model", raising=False)  # another test's


def run_all_here(requests, jobs, tick):
    """Serves in this process, where the compiler is started already."""
    reports = []
    for request in requests:
        reports.append(TargetResults(request.target))
        for record in serve(request):
            reports[-1].take(record, tick)
    return reports


def test_operations_to_all_outputs(tmp_path, capsys):
    data, trace, plot = (tmp_path / name for name in ("a.json", "trace.json", "a.png"))
    files = ["--json", str(data), "--trace", str(trace), "--plot", str(plot)]
    assert main([*SMALL, "--target", "v5e:2x2", *files]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert max(map(len, out.splitlines())) <= 100
    assert "v5e:2x2 | 4 x TPU v5 lite | mesh tp=4, ring tp | bfloat16 forward\n" in out
    assert "not measured" in " ".join(out.split())
    assert "async 3/3, over matmuls 3/3" in out
    assert plot.read_bytes().startswith(b"\x89PNG")
    assert any(e["ph"] == "X" for e in json.loads(trace.read_text())["traceEvents"])

    [entry] = json.loads(data.read_text())["targets"]
    rows = {row["mode"]: row for row in entry["predictions"]}
    assert list(rows) == ["naive", "unidirectional", "bidirectional", "auto"]
    assert rows["auto"]["same_as"] in ("naive", "unidirectional", "bidirectional")
    for row in rows.values():
        assert row["ratio"] >= 1
        assert 0 <= row["exposed_share"] < 1
        # A device sends three quarters of the gathered operand, whatever the mode.
        assert row["timeline"]["sent_bytes"] == 1024 * 1024 * 2 * 3 / 4
    assert entry["facts"]["versions"].keys() == {"jax", "libtpu"}
    assert entry["facts"]["chip"]["link"] == 4.32e10


def test_one_error_of_all_rows_is_printed_once(monkeypatch, capsys):
    monkeypatch.setattr(predict_command, "run_all", run_all_here)
    wrong = ["--compiler-options", "xla_no_such=true", "--no-cache", "--target", "v5e:2x2"]
    assert main([*SMALL, *wrong]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == err.count("No such compile option") == 1
    rows = "gather-lhs-rows 1024x1024x4096 (naive, unidirectional, bidirectional, auto)\n"
    assert err.endswith(f"; in 4 rows: v5e:2x2 {rows}")


def test_gradients_move_more_and_compute_more(tmp_path, monkeypatch):
    monkeypatch.setattr(predict_command, "run_all", run_all_here)
    data = tmp_path / "a.json"
    options = ["--grad", "--modes", "naive", "--target", "v5e:2x2", "--json", str(data)]
    assert main([*SMALL, *options, "--shapes", "512x512x2048"]) == 0
    [entry] = json.loads(data.read_text())["targets"]
    [row] = entry["predictions"]
    assert row["timeline"]["sent_bytes"] >= 2 * 512 * 512 * 2 * 3 / 4
    assert row["ratio"] >= 1


def test_a_program_that_was_compiled_before_is_not_compiled(model, monkeypatch):
    monkeypatch.setattr(predict_command, "run_all", run_all_here)
    command = ["predict", "model:layer", "--args", "bf16[512,256]@tp,-", "bf16[256,512]@-,tp"]
    command += ["--target", "v5e:2x2"]
    compilers = timeline._text_and_memory
    calls = ((compilers, [], 0), (None, [], 0), (None, ["--no-cache"], 1))
    for compiler, more, status in calls:  # from one line: a program's lines are a part of it
        monkeypatch.setattr(timeline, "_text_and_memory", compiler)
        assert main([*command, *more]) == status


def test_a_function_with_its_arguments(model, capsys):
    args = ["--args", "bf16[512,256]@tp,-", "bf16[256,512]@-,tp"]
    assert main(["predict", "model:layer", *args, "--target", "v5e:2x2"]) == 0
    out = capsys.readouterr().out
    assert "model:layer\n" in out
    assert "as written" in out


def test_a_function_of_jit_keeps_its_options_with_gradients_too(model, monkeypatch, capsys):
    monkeypatch.setattr(predict_command, "run_all", run_all_here)
    args = ["--args", "bf16[512,256]@tp,-", "bf16[256,512]@-,tp", "--target", "v5e:2x2"]
    for more in ([], ["--grad"]):
        assert main(["predict", "model:of_jit", *args, *more]) == 0
        assert "xla_tpu_enable_async_collective_fusion=false" in capsys.readouterr().out


def test_a_process_that_dies_takes_only_its_target_with_it(model, capsys):
    assert main(["predict", "model:make", "--target", "v5e:2x4,v5e:2x2"]) == 1
    out, err = capsys.readouterr()
    assert "v5e:2x2 | 4 x TPU v5 lite" in out
    assert "v5e:2x4 |" not in out
    assert "what a user prints" not in out
    assert err.startswith("jaxpar predict: error: v5e:2x4: the compiler's process ended with SIG")
    assert err.count("\n") == 1


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        ("--target v5e:9x9", 2, "v5e:9x9: libtpu does not know the slice"),
        ("--target 2xh100:8", 2, "2xh100:8: only TPUs (v4, v5e, v5p, v6e, tpu7x) have slices; for"),
        ("--target v5e", 2, "v5e: 'v5e' is not of the form chip:layout, as in 'v5p:8x8x8'"),
        ("--mesh dp=3,tp=-1", 2, "v5e:2x2: --mesh dp=3,tp=-1: dp=3 x tp=-1: the other axes take 3"),
        ("--axis dp", 2, "v5e:2x2: --axis dp must name distinct axes of the mesh, which has tp"),
        ("--shapes 6x8x8", 2, "v5e:2x2: gather-lhs-rows shards M = 6 of 6x8x8 over the ring tp"),
        ("nowhere:layer", 2, "nowhere:layer: no module 'nowhere' is to be found from the current"),
        ("model:nothing", 2, "model:nothing: module model has no function 'nothing'"),
        ("model:value", 2, "model:value: module model has no function 'value'"),
        ("model:layer", 2, "model:layer, called with the mesh alone: layer() missing 1 required"),
        ("model:makes_nothing", 2, "called with the mesh, returned int; give its arguments as in"),
        ("model:is_broken", 1, "v5e:2x2: RuntimeError: no such (model.py:22)"),
        ("model:cannot_compile --args f32[4,4]", 1, "v5e:2x2 model:cannot_compile: TypeError: "),
        ("model:layer --args f32[8,8]@mp f32[8,8]", 2, "'mp' is not an axis of the mesh"),
    ],
)
def test_what_only_a_target_can_refuse(args, status, text, model, monkeypatch, capsys):
    monkeypatch.setattr(predict_command, "run_all", run_all_here)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "model", raising=False)
    assert main(["predict", "--target", "v5e:2x2", *args.split()]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxpar predict: error: ")
    assert err.count("\n") == 1
    assert text in err
