"""The command with the TPU compiler: what it prints and writes, and what it refuses."""

import importlib.util
import json
import subprocess
import sys

import pytest

from jaxpar.tools.cli import explain_command as command
from jaxpar.tools.cli.explain_page import page_of
from jaxpar.tools.cli.explain_worker import serve
from jaxpar.tools.cli.main import main

MODEL = """
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

def make(mesh):
    def step(x, w):
        h = jax.lax.with_sharding_constraint(x @ w, NamedSharding(mesh, P(None, "tp")))
        return jnp.sin(h)

    def shape(*spec):
        return jax.ShapeDtypeStruct(
            (1024, 1024), jnp.bfloat16, sharding=NamedSharding(mesh, P(*spec))
        )

    return step, (shape("tp"), shape(None, "tp"))

def make_small(mesh):
    step, shapes = make(mesh)
    return step, [
        jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=x.sharding) for x in shapes
    ]

def is_broken(mesh):
    raise RuntimeError("</script> no luck")

import threading
settings = threading.local()  # as frameworks keep theirs

def make_with_settings(mesh):
    step, shapes = make_small(mesh)
    settings.mode = "training"

    def with_others(state, name, mask):
        assert (settings.mode, name, mask, state["act"]) == ("training", "step", None, jnp.sin)
        return step(*state["x"]), name

    return with_others, ({"x": shapes, "act": jnp.sin}, "step", None)
"""
LINE = 7  # of the product, in MODEL
RUN = """
import jax, jax.numpy as jnp
from slow import make_small
from jaxpar import make_mesh

mesh = make_mesh("tp=8")
step, shapes = make_small(mesh)
with jax.set_mesh(mesh):
    args = [jax.device_put(jnp.ones(x.shape, x.dtype), x.sharding) for x in shapes]
    run = jax.jit(step)
    jax.block_until_ready(run(*args))
    with jax.profiler.trace("profile"):
        for _ in range(2):
            jax.block_until_ready(run(*args))
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    assert importlib.util.find_spec("libtpu"), (
        "these tests need the TPU compiler; pip install -e '.[tpu]'"
    )
    (tmp_path / "slow.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))
    return tmp_path


@pytest.fixture
def compiled_here(monkeypatch):
    """Serves in this process, where the compiler is started already."""

    def converse(module, task, take, environment):
        serve(json.loads(json.dumps(task)), take)

    monkeypatch.setattr(command, "converse", converse)
    yield
    for name in ("slow", "toylayers", "toylayers.dense"):  # another test's
        sys.modules.pop(name, None)


def test_what_it_prints_and_writes(model, capsys):
    command = ["explain", "slow:make", "--target", "v5e:2x2"]
    files = ["--json", "a.json", "--html", "a.html", "--trace", "t.json", "--plot", "a.png"]
    assert main([*command, "--tries", "2", *files]) == 0
    printed, said = capsys.readouterr()
    assert "error" not in said
    assert "a step on v5e:2x2 (tp=4) takes " in printed
    assert "1. " in printed
    assert "all-gather over tp, 1 run, 1.5 MiB sent by a device" in printed
    assert f"where: slow.py:{LINE} in step, forward" in printed
    assert "x; dimension 0 is sharded over 'tp' and is needed unsh" in " ".join(printed.split())
    assert "edit:  " in printed
    assert "gain:  " in printed
    assert "in memory at the peak:" in printed

    record = json.loads((model / "a.json").read_text())
    assert record["findings"][0]["of"]["line"]["number"] == LINE
    assert record["mesh"] == {"tp": 4}
    page = (model / "a.html").read_text()
    assert "/* data */" not in page
    assert f"slow.py:{LINE} in step" in page
    assert "http" not in page  # nothing is fetched
    names = {event["name"] for event in json.loads((model / "t.json").read_text())["traceEvents"]}
    assert record["findings"][0]["of"]["name"] in names
    assert (model / "a.png").stat().st_size > 10_000
    assert list((model / "caches" / "jaxpar").iterdir())

    assert main([*command, "--tries", "0", "--against", "a.json"]) == 0
    printed, _ = capsys.readouterr()
    assert "against a.json:" in printed
    assert "(+0.0%)" in printed
    assert "better:" not in printed


def test_lines_of_a_framework(model, compiled_here, capsys):
    package = model / "site-packages" / "toylayers"
    package.mkdir(parents=True)
    (package / "dense.py").write_text("def dense(x, w):\n    return x @ w\n")
    installed = "import sys; sys.path.append('site-packages')\nfrom toylayers.dense import dense"
    (model / "slow.py").write_text(installed + MODEL.replace("x @ w", "dense(x, w)"))
    command = ["explain", "slow:make", "--target", "v5e:2x2", "--tries", "0"]
    assert main([*command, "--json", "a.json"]) == 0
    line = LINE + 1
    printed, _ = capsys.readouterr()
    assert f"where: dense.py:2 < slow.py:{line} in step, forward" in printed
    record = json.loads((model / "a.json").read_text())
    chain = record["findings"][0]["of"]["chain"]
    assert [(one["function"].rpartition(".")[2], one["number"]) for one in chain] == [
        ("dense", 2),
        ("step", line),
    ]
    assert record["findings"][0]["of"]["line"] == chain[1]
    assert main([*command, "--own", "toylayers", "--own", "flax", "--html", "a.html"]) == 0
    printed, _ = capsys.readouterr()
    assert f"where: dense.py:2 in dense < slow.py:{line}, forward" in printed
    assert "dense.py:2 in dense" in (model / "a.html").read_text()
    assert main([*command, "--own", "toyplayers"]) == 2
    _, said = capsys.readouterr()
    assert "--own 'toyplayers' is no package that is installed" in said
    assert "toylayers" in said


def test_a_step_with_leaves_that_are_no_arrays_and_settings_of_its_thread(model, capsys):
    for asked in (["explain", "--tries", "1"], ["predict", "--grad"], ["predict"]):
        name, *options = asked
        found = main([name, "slow:make_with_settings", "--target", "v5e:2x2", *options])
        printed, said = capsys.readouterr()
        assert (found, "error" in said) == (0, False), said
        assert "v5e:2x2" in printed


def test_of_a_measured_run(model, capsys, monkeypatch):
    """A run on the devices at hand, of which nothing is published."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", "8")
    monkeypatch.delenv("XLA_FLAGS", raising=False)  # or another process compiles another program
    program = [sys.executable, "-c", RUN]
    subprocess.run(program, check=True, timeout=600)
    command = ["explain", "slow:make_small", "--target", "here", "--mesh", "tp=8"]
    files = ["--json", "a.json", "--html", "a.html", "--trace", "t.json"]
    assert main([*command, "--measured", "profile", *files]) == 0
    printed, said = capsys.readouterr()
    assert "error" not in said
    text = " ".join(printed.split())
    assert "a step on here (tp=8) took " in text
    assert "measured, one of 2 runs, which took " in text
    assert "gain: unknown: nothing is predicted for this chip" in text
    assert "predicted and measured: predicted measured ratio - " in text
    assert f"where: slow.py:{LINE} in step, forward" in text
    record = json.loads((model / "a.json").read_text())
    assert record["estimate"] == "measured"
    assert record["predicted"] is None
    assert len(record["runs"]) == 2
    assert {one["kind"] for one in record["instructions"]} == {"compute", "transfer", "wait"}
    note = json.loads((model / "t.json").read_text())["otherData"]["note"]
    assert note.startswith("Measured by jax.profiler")
    page = (model / "a.html").read_text()
    assert f"transfer {record['findings'][0]['of']['name']}, slow.py:{LINE}" in page

    assert main(command) == 2  # without a measurement
    _, said = capsys.readouterr()
    assert "jaxpar has no published figures of 'cpu'" in said


def test_a_page_is_safe_of_what_a_program_says():
    record = {
        "target": "v5e:2x2",
        "mesh": {"tp": 4},
        "estimate": "roofline",
        "seconds": 1e-3,
        "exposed": 0.0,
        "floor": {"compute": 1e-3, "transfer": 0.0},
        "utilisation": 0.5,
        "peak_bytes": 100,
        "capacity": 1000,
        "loops_of_unknown_length": [],
        "kernels_of_unknown_cost": [],
        "intervals": [],
        "findings": [],
        "overheads": [],
        "refused": {"an edit": "</script><script>alert(1)"},
        "at_peak": [
            {"bytes": 50, "array": "f32[2]", "what": "x", "line": None, "phase": "argument"},
        ],
        "events": [],
    }
    page = page_of(record)
    assert page.count("</script>") == 1
    assert "nothing to mend here" in page


def test_a_program_that_fails_is_told_in_one_line(model, compiled_here, capsys):
    assert main(["explain", "slow:is_broken", "--target", "v5e:2x2"]) == 1
    printed, said = capsys.readouterr()
    assert printed == ""
    (line,) = [line for line in said.splitlines() if line.startswith("jaxpar explain: error: ")]
    assert "v5e:2x2: RuntimeError: </script> no luck (slow.py:" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ["--tries=-1"],
            "--tries must be a number of edits, at least 0, or minutes as in",
        ),
        (["--tries", "10h"], "or minutes as in '10min', got '10h'"),
        (["--findings", "0"], "--findings 0 must be at least 1"),
        (["--target", "v5e:2x2,v5e:2x4"], "--target v5e:2x2,v5e:2x4 names several; explain takes "),
        (["--measured", "none"], "--measured none is not there; name a folder that jax.profiler."),
        (["--measured", "empty"], "--measured empty: no *.xplane.pb under empty; pass"),
        (["--measured", "bad.xplane.pb"], "bad.xplane.pb is no trace (Failed to parse"),
        (["--against", "none.json"], "--against none.json cannot be read: No such file"),
        (["--against", "text.json"], "--against text.json is no JSON: "),
        (["--against", "list.json"], "--against list.json has no findings; name a file that"),
        (["--against", "part.json"], "--against part.json has no target; name a file that"),
        (["--against", "holes.json"], "--against holes.json is damaged (KeyError: 'of'); name a "),
        (["--html", "none/a.html"], "--html none/a.html: its directory does not exist"),
        (["--target", "v5e:3x5"], "v5e:3x5: libtpu does not know the slice"),
        (["--mesh", "dp=3,tp=-1"], "--mesh dp=3,tp=-1: "),
    ],
)
def test_wrong_usage_is_one_line(arguments, words, model, compiled_here, capsys):
    (model / "text.json").write_text("no JSON")
    (model / "list.json").write_text("[]")
    (model / "part.json").write_text('{"findings": []}')
    holes = {"findings": [{}], "target": "", "mesh": {}, "seconds": 1, "exposed": 0}
    (model / "holes.json").write_text(json.dumps(holes | {"peak_bytes": 1}))
    (model / "bad.xplane.pb").write_text("no trace")
    (model / "empty").mkdir()
    assert main(["explain", "slow:make", "--target", "v5e:2x2", *arguments]) == 2
    _, said = capsys.readouterr()
    (line,) = said.splitlines()
    assert line.startswith("jaxpar explain: error: ")
    assert words in line


def test_a_worker_that_dies_is_told(model, capsys, monkeypatch):
    monkeypatch.setattr(command, "converse", lambda *args: "ended with SIGABRT: out of luck")
    assert main(["explain", "slow:make", "--target", "v5e:2x2"]) == 1
    _, said = capsys.readouterr()
    assert "v5e:2x2: the compiler's process ended with SIGABRT: out of luck" in said


def test_the_worker_says_what_it_tries(model):
    from argparse import ArgumentParser
    from dataclasses import asdict

    parser = ArgumentParser()
    command.add_arguments(parser)
    args = parser.parse_args(["slow:make", "--target", "v5e:2x2"])
    task = {"request": asdict(command._request(args)), "tries": 1, "findings": 3, "measured": None}
    task["own"] = []
    said = []
    serve(json.loads(json.dumps(task)), said.append)
    kinds = [next(iter(record)) for record in said]
    assert kinds == ["facts", "begin", "trying", "prediction", "explained"]
