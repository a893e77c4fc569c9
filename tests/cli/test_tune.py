"""The search, its two clocks, and the command with its processes."""

import importlib.util
import json
import re
import shlex
import sys

import jax
import numpy as np
import pytest

import jaxpar
from jaxpar.choose import choice
from jaxpar.choose.sites import AUTO, Asked
from jaxpar.choose.tuning import Tuning
from jaxpar.schedule import target
from jaxpar.tools.accuracy.interval import SENTENCE
from jaxpar.tools.cli import tune_command, tune_worker
from jaxpar.tools.cli.main import main
from jaxpar.tools.cli.tune_search import Candidate, TriedWay, search
from jaxpar.tools.cli.tune_worker import Timed, serve

MODEL = """
import os
import jax, jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P
import jaxpar

def mlp(x, up, down):
    def local(x, up, down):
        hidden = jaxpar.all_gather_matmul(x, up, "tp")
        return jaxpar.matmul_reduce_scatter(hidden, down, jaxpar.Axis("tp", mode="naive"))
    specs = P("tp"), P(None, "tp"), P("tp")
    return jax.shard_map(local, in_specs=specs, out_specs=P("tp"))(x, up, down)

def make(mesh):
    def array(*shape, spec):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, spec))
    return mlp, (array(64, 16, spec=P("tp")), array(16, 64, spec=P(None, "tp")),
                 array(64, 16, spec=P("tp")))

def make_donating(mesh):
    function, args = make(mesh)
    return jax.jit(function, donate_argnums=0), args

def make_dying(mesh):
    function, args = make(mesh)
    def dies(*args):
        with open("traced", "a") as file:
            file.write("x")
        if os.path.getsize("traced") == 4:  # call sites, auto, the first algorithm, the next one
            os.abort()
        return function(*args)
    return dies, args

def plain(x):
    return 2 * x

def named(x):
    local = lambda x: jaxpar.all_gather_matmul(x, x.T @ x, "tp", mode="naive")
    return jax.shard_map(local, in_specs=P("tp"), out_specs=P(), check_vma=False)(x)

def broken(x):
    raise RuntimeError("no such\\nluck")
"""
ARGS = ["--args", "f32[64,16]@tp", "f32[16,64]@-,tp", "f32[64,16]@tp"]
SITE = "matmul over tp=8: gather a of ak,kn->an, float32; 8x16, 16x8"


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    (tmp_path / "model.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "model", raising=False)


@pytest.fixture
def here(monkeypatch):
    """Serves in this process, where JAX and the compiler are started already."""

    def converse_here(module, task, take, environment):
        for record in serve(json.loads(json.dumps(task))):
            take(json.loads(json.dumps(record)))

    monkeypatch.setattr(tune_command, "converse", converse_here)


@pytest.fixture
def slow_auto(monkeypatch):
    """Has auto take what nobody would."""

    def chunked(problem, mode, flows):
        return "" if mode == "chunked-8" else "nobody would"

    monkeypatch.setitem(choice.RULES, "matmul", chunked)


class Text(str):
    def as_text(self):
        return self


class Fake:
    """A clock whose programs take what a table says; a program is a text."""

    name = "fake"

    def __init__(self, seconds, asked, broken=()):
        self.seconds, self.asked, self.broken = seconds, asked, broken
        self.timed = []

    def lower(self, choices):
        found = {site: parts[key] for site, parts in choices.items() for key in parts}
        program = "".join(found.get(site, AUTO)[0] for site in "xyz")
        if program in self.broken:
            raise RuntimeError("it does not\nfit")
        return Candidate(choices, Text(program), self.asked(found))

    def time(self, candidate):
        self.timed.append(candidate.lowered)
        candidate.seconds = self.seconds.get(candidate.lowered, 9.0)
        candidate.intervals = [candidate.lowered]
        return candidate.seconds

    def wins(self, candidate, best):
        return self.time(candidate) < best.seconds

    def compare(self, first, best):
        return self.seconds.get("compared", first.seconds), best.seconds


def decisions(*sites, size=1):
    ways = ("naive", "bidirectional", "unidirectional")
    return {(site, "p"): Asked(site, "p", ways, size if site == "y" else 1) for site in sites}


MODES = ("naive", "bidirectional", "unidirectional")


def run(clock, known=(), most=99, modes=MODES):
    records = list(search(clock, {t.key: t for t in known}, most, modes))
    tried = [TriedWay(**record["tried"]) for record in records if "tried" in record]
    [found] = [record["found"] for record in records if "found" in record]
    return found, tried


def test_the_search_keeps_the_best_so_far_and_takes_the_largest_site_first():
    # The letters are the ways of x, y and z: auto, naive, bidirectional, unidirectional.
    seconds = {"aaa": 5.0, "ana": 4.0, "aba": 3.0, "bba": 2.0, "nba": 6.0, "uba": 2.5}
    clock = Fake(seconds, lambda _: decisions("x", "y", size=2))
    found, tried = run(clock)
    assert clock.timed == ["aaa", "ana", "aba", "aua", "nba", "bba", "uba"]
    assert found["sites"] == {"x": {"p": "bidirectional"}, "y": {"p": "bidirectional"}}
    assert (found["before"], found["after"], found["left"]) == (5.0, 2.0, 0)
    assert found["intervals"] == ["bba"]  # of the program that is chosen
    assert [t.way for t in tried if t.wins] == ["naive", "bidirectional", "bidirectional"]
    assert [(t.site, t.seconds) for t in tried if t.way == AUTO] == [("y", 5.0), ("x", 3.0)]


def test_a_site_that_only_a_better_program_has_is_decided_too():
    def asked(found):
        return decisions("x", "z") if found.get("x") == "naive" else decisions("x", "y")

    seconds = {"aaa": 5.0, "naa": 4.0, "nau": 3.0, "nua": 1.0}
    found, tried = run(Fake(seconds, asked))
    assert found["sites"] == {"x": {"p": "naive"}, "z": {"p": "unidirectional"}}
    assert {t.site for t in tried} == {"x", "z"}


def test_a_failure_is_told_and_the_rest_goes_on():
    seconds = {"aaa": 5.0, "uaa": 4.0}
    found, tried = run(Fake(seconds, lambda _: decisions("x"), broken=("naa",)))
    assert found["sites"] == {"x": {"p": "unidirectional"}}
    assert tried[1] == TriedWay("x", "p", "naive", None, "failed: RuntimeError: it does not")


def test_no_program_is_compiled_twice():
    class Alike(Fake):
        def lower(self, choices):
            candidate = super().lower(choices)
            candidate.lowered = Text(candidate.lowered.replace("n", "a").replace("u", "b"))
            return candidate

    clock = Alike({"aaa": 5.0}, lambda _: decisions("x"))
    _, tried = run(clock)
    assert clock.timed == ["aaa", "baa"]
    assert [t.note for t in tried] == [
        "",
        "the same program as with auto",
        "",
        "the same program as with bidirectional (p)",
    ]


def test_limits():
    seconds = {"aaa": 5.0, "naa": 4.0, "baa": 1.0}
    clock = Fake(seconds, lambda _: decisions("x"))
    found, _ = run(clock, most=2)
    assert clock.timed == ["aaa", "naa"]
    assert (found["sites"], found["left"]) == ({"x": {"p": "naive"}}, 2)
    clock = Fake(seconds, lambda _: decisions("x"))
    found, _ = run(clock, modes=["unidirectional"])
    assert clock.timed == ["aaa", "uaa"]
    assert found["sites"] == {"x": {"p": AUTO}}


def test_a_search_goes_on_where_another_one_died():
    seconds = {"aaa": 5.0, "naa": 4.0, "baa": 3.0, "uaa": 2.0}
    known = [
        TriedWay("x", "p", "naive", 4.0, "", True, "naa"),
        TriedWay("x", "p", "bidirectional", None, "failed: the process died"),
    ]
    clock = Fake(seconds, lambda _: decisions("x"))
    found, tried = run(clock, known)
    assert clock.timed == ["aaa", "uaa"]
    assert [t for t in tried if t.way in ("naive", "bidirectional")] == known
    assert found["sites"] == {"x": {"p": "unidirectional"}}


def test_auto_stays_where_the_comparison_finds_nothing():
    seconds = {"aaa": 5.0, "naa": 4.0, "compared": 3.9}
    found, _ = run(Fake(seconds, lambda _: decisions("x")))
    assert found["sites"] == {"x": {"p": AUTO}}
    assert found["before"] == found["after"] == 3.9


@pytest.mark.parametrize(
    ("runs", "won"),
    [
        ([([2.0] * 4, [1.0] * 4), ([2.0] * 4, [1.0] * 4)], True),
        ([([2.0] * 4, [1.0] * 4), ([2.0] * 4, [2.0] * 4)], False),  # not again
        ([([2.0] * 4, [1.99] * 4)], False),  # too little
        ([([2.0] * 4, [1.0, 1.0, 3.0, 3.0])], False),  # too often slower
    ],
)
def test_by_the_clock_noise_does_not_win(runs, won, monkeypatch):
    left = list(runs)
    monkeypatch.setattr(Timed, "_rounds", lambda self, *candidates: left.pop(0))
    clock = Timed(None, (), jaxpar.make_mesh("tp=8"), {}, 4)
    best, candidate = Candidate({}, None, {}, seconds=10.0), Candidate({}, None, {})
    assert clock.wins(candidate, best) == won
    assert not left
    if won:
        assert candidate.seconds == 5.0  # in terms of what the best took


def test_predicted_and_loaded(here, slow_auto, capsys):
    assert importlib.util.find_spec("libtpu"), "needs the TPU compiler: pip install -e '.[tpu]'"
    words = ["tune", "model:make", "--target", "v5e:2x2", "--modes", "naive,unidirectional"]
    assert main([*words, "--grad", "-o", "v5e.json"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    found = Tuning.read("v5e.json")
    assert found.device_kind == "TPU v5 lite"
    assert found.mesh == {"tp": 4}
    assert found.versions.keys() == {"jaxpar", "jax", "jaxlib", "libtpu"}
    assert found.clock == "predicted"
    assert found.command == (
        "jaxpar tune model:make --grad --target v5e:2x2 --mesh tp=-1 "
        "--modes naive,unidirectional -o v5e.json"
    )
    [(site, chosen)] = found.sites.items()
    assert site == "matmul over tp=4: gather a of ak,kn->an, float32; 2 of 16x16"
    assert AUTO not in chosen.values()  # both passes have found better
    tried = found.tried[site]
    assert (
        tried["forward"].keys()
        == tried["backward"].keys()
        == {AUTO, *chosen.values()}
        | {
            "naive",
            "unidirectional",
        }
    )
    assert found.milliseconds["tuned"] == min(tried["backward"].values())
    assert found.milliseconds["tuned"] < found.milliseconds["auto"] == tried["forward"][AUTO]
    assert f"\n{site}\n" in out
    assert re.search(r"forward +auto +\d\.\d{3} +1\.000", out)
    assert out.count("chosen") == 2
    # That the program's seconds may be off by so much is said as by `jaxpar predict`.
    said = f"{re.escape(SENTENCE)}: (in all|TPU v5 lite, .*): -\\d+% to \\+\\d+%"
    assert re.search(said, " ".join(out.split()))
    assert max(map(len, out.splitlines())) <= 100

    # What is loaded is what was found.
    import model

    mesh = target("v5e:2x2").mesh
    function, args = model.make(mesh)
    with jax.set_mesh(mesh):
        text = jaxpar.jit(function, tuned="v5e.json").lower(*args).as_text()
    assert ("collective_permute" in text) == (chosen["forward"] == "unidirectional")
    assert ("all_gather" in text) == (chosen["forward"] == "naive")
    with pytest.raises(ValueError, match="is for 'TPU v5 lite', this program for 'cpu'; write it"):
        run_model("v5e.json")


def run_model(tuned):
    """The model on CPU devices."""
    import model

    mesh = jaxpar.make_mesh("tp=8")
    keys = jax.random.split(jax.random.key(0), 3)
    with jax.set_mesh(mesh):
        _, args = model.make(mesh)
        found = [
            jax.device_put(jax.random.normal(key, x.shape), x.sharding)
            for key, x in zip(keys, args, strict=True)
        ]
        return jaxpar.jit(model.mlp, tuned=tuned)(*found)


def test_timed_and_loaded(here, slow_auto, capsys):
    words = ["--modes", "naive,bidirectional", "--repeats", "3", "--mesh", "tp=8"]
    assert main(["tune", "model:mlp", *ARGS, *words]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "model:mlp | cpu | mesh tp=8 | measured\n" in out
    assert SENTENCE not in out
    found = Tuning.read("tuned.json")
    assert (found.device_kind, found.mesh, found.clock) == ("cpu", {"tp": 8}, "measured")
    assert found.versions.keys() == {"jaxpar", "jax", "jaxlib"}
    assert found.sites.keys() == found.tried.keys() == {SITE}
    forward, backward = (found.tried[SITE][part] for part in ("forward", "backward"))
    assert forward.keys() == backward.keys() == {AUTO, "naive", "bidirectional"}
    assert all(milliseconds > 0 for milliseconds in forward.values())
    # A program without gradients has no backward pass.
    assert all(backward[mode].startswith("the same program") for mode in ("naive", "bidirectional"))
    assert found.sites[SITE]["forward"] in forward
    assert found.sites[SITE]["backward"] == AUTO
    assert "takes no gradients itself, --grad adds them" in " ".join(out.split())
    shown = "--modes naive,bidirectional --repeats 3 -o tuned.json"
    assert found.command == f"jaxpar tune model:mlp {shlex.join(ARGS)} --mesh tp=8 {shown}"
    assert 0 < found.milliseconds["tuned"] <= found.milliseconds["auto"]
    np.testing.assert_allclose(run_model("tuned.json"), run_model(None), rtol=1e-4, atol=1e-4)


def test_arguments_that_a_call_uses_up(here):
    words = ["--modes", "unidirectional", "--repeats", "2"]
    assert main(["tune", "model:make_donating", *words]) == 0
    assert Tuning.read("tuned.json").tried[SITE]["forward"]["unidirectional"] > 0


@pytest.mark.parametrize("function", ["plain", "named"])
@pytest.mark.parametrize("target", [[], ["--target", "v5e:2x4"]])
def test_a_program_without_a_call_site_is_refused_and_not_compiled(
    function, target, here, monkeypatch, tmp_path, capsys
):
    def compiled(*args, **more):
        raise AssertionError

    monkeypatch.setattr(tune_worker, "compile_for", compiled)
    monkeypatch.setattr(Timed, "_compile", compiled)
    assert main(["tune", f"model:{function}", "--args", "f32[64,16]@tp", *target]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith(
        f"jaxpar tune: error: model:{function} has no call site of jaxpar with mode='auto', so "
    )
    assert err.count("\n") == 1
    assert not (tmp_path / "tuned.json").exists()


def test_a_process_that_dies_loses_nothing(monkeypatch, capsys):
    """The process of the second algorithm dies; another process continues after it."""
    monkeypatch.setenv("JAX_PLATFORMS", "cpu")
    words = ["--modes", "chunked-2,unidirectional,bidirectional", "--repeats", "1"]
    assert main(["tune", "model:make_dying", *words]) == 0
    assert capsys.readouterr().err == ""
    tried = Tuning.read("tuned.json").tried[SITE]["forward"]
    assert tried["chunked-2"] > 0
    assert tried["bidirectional"] > 0
    assert tried["unidirectional"].startswith("failed: the process ended with SIGABRT")


@pytest.mark.parametrize(
    ("args", "status", "text"),
    [
        ("model", 2, "'model' is not module:function, as in model:layer for layer of model.py"),
        ("nowhere:layer", 2, "nowhere:layer: no module 'nowhere' is to be found from the current"),
        ("model:plain", 2, "model:plain, called with the mesh alone: unsupported operand"),
        ("model:broken --args f32[8]", 1, "RuntimeError: no such (model.py:"),
        ("model:plain --args f32[8]@mp", 2, "'mp' is not an axis of the mesh, which has tp"),
        ("model:plain --mesh dp=3,tp=-1", 2, "--mesh dp=3,tp=-1: dp=3 x tp=-1: the other axes"),
        ("model:plain --target v5e:9x9", 2, "libtpu does not know the slice"),
        ("model:plain --target v5e:2x2,v5e:2x4", 2, "--target v5e:2x2,v5e:2x4 names several; "),
        ("model:plain --modes fast", 2, "--modes 'fast' is not among naive, stationary, chunked-2"),
        ("model:plain --modes auto", 2, "--modes 'auto' is not among naive, stationary, chunked-2"),
        ("model:plain --repeats 0", 2, "--repeats 0 is not positive"),
        ("model:plain --tries 0", 2, "--tries 0 is not positive"),
        ("model:plain -o nowhere/a.json", 2, "--output nowhere/a.json: its directory does not"),
        ("model:plain --compiler-options a", 2, "--compiler-options 'a' is not of the form key="),
    ],
)
def test_what_is_refused_is_one_line(args, status, text, here, capsys):
    assert main(["tune", *args.split()]) == status
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("jaxpar tune: error: ")
    assert err.count("\n") == 1
    assert text in err


def test_several_processes_are_refused(here, monkeypatch, capsys):
    monkeypatch.setattr(tune_worker.jax, "process_count", lambda: 2)
    assert main(["tune", "model:mlp", *ARGS]) == 2
    assert "there are 2 processes, and each would choose by its" in capsys.readouterr().err
