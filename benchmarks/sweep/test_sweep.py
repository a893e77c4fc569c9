"""The points of the sweep, its tables, and a sample of it, compiled."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from sweep import __main__ as command
from sweep import fit, times
from sweep.points import LAYERS, Point, grid, point_from, points
from sweep.special import SPECIAL
from tables import rewrite

SOME = Point("v5e:2x4", "tp=8", "gather-lhs-rows", (256, 4096, 14336), grad=False, options=True)


NARROW = [narrow for narrow, _ in LAYERS]


def forms(**times):
    return {name.replace("_", " "): {"total": time} for name, time in times.items()}


def test_there_are_hundreds_of_points_of_every_kind():
    assert len(set(points())) == len(points()) >= 580
    found = [p for p in points() if p in set(grid())]
    for part in (found, found[:120]):
        assert len({(p.slice, p.mesh) for p in part}) == 13
        assert len({p.op for p in part}) == 7
        assert {p.shape[0] for p in part} == {256, 1024, 4096, 16384, 65536}
        assert {(p.grad, p.options) for p in part} == {
            (grad, options) for grad in (False, True) for options in (False, True)
        }
    assert all(point_from(p.record()) == p for p in found[:20])


def test_no_two_properties_of_points_go_together():
    """Every mesh and form has both passes with both sizes of a layer, and is without options."""
    found = list(grid())
    forms = {(p.slice, p.mesh, p.op) for p in found}
    every = {(*form, grad, narrow) for form in forms for grad in (False, True) for narrow in NARROW}
    sizes = {p: min(p.shape[1:]) for p in found}
    assert {(p.slice, p.mesh, p.op, p.grad, sizes[p]) for p in found if p.options} == every
    without = [p for p in found if not p.options]
    assert {(p.slice, p.mesh, p.op) for p in without} == {
        form for form in forms if form[0].startswith(("v5p", "v6e"))
    }
    assert {(p.op, p.grad, sizes[p]) for p in without} == {form[2:] for form in every}


def test_what_is_on_no_grid():
    """Rings over several axes, open planes, odd widths, few rows, vocabularies, float32, GPUs."""
    found = [p for p in points() if p not in set(grid())]
    assert {p.ring for p in found} >= {"tp", "x,y", "y,x", "x,y,z"}
    assert {p.dtype for p in found} == {"bfloat16", "float32"}
    assert {p.slice.partition(":")[0] for p in found} == {"v5e", "v5p", "v6e", "tpu7x", "h100"}
    assert min(p.shape[0] for p in found) == 8
    assert any(p.shape[2] // 8 % 128 for p in found)
    assert {p.grad for p in found} == {False, True}
    assert {p.op for p in found} > SPECIAL.keys()
    labels = {p.label for p in found}
    assert "v6e:4x4 x=4,y=4 over x,y scatter-rows 8192x13824x5120 forward" in labels
    assert "v6e:2x4 tp=8 gather-rhs-k 4096x4096x4096 float32 forward" in labels
    assert all(point_from(p.record()) == p for p in found)


def test_losers_are_the_points_where_a_peer_is_ahead_the_worst_first():
    other = Point("v6e:2x4", "tp=8", "all-reduce", (256, 4096, 14336), grad=True, options=False)
    found = {
        SOME: forms(auto=1.1, naive=1.0, XLA_plain_jit=2.0),
        other: forms(auto=3.0, naive=2.0, XLA_plain_jit=1.5),
        points()[5]: forms(auto=1.01, naive=1.0),
        points()[6]: {"auto": {"failure": "Error: too large"}, **forms(naive=1.0)},
    }
    rows = command.losers(found).rows
    assert [row[0] for row in rows[1:]] == [other.label, SOME.label]
    assert [row[-1] for row in rows] == ["inf", "2.00", "1.10"]
    assert rows[0][1] == "Error: too large"
    assert other.label == "v6e:2x4 tp=8 all-reduce 256x4096x14336 gradients, no options"


def test_the_summary_has_a_row_for_each_slice():
    times = forms(auto=2.0, naive=3.0, bidirectional=0.9) | {"XLA post_spmd": {"total": 1.0}}
    bare = replace(SOME, grad=True, options=False)
    found = {SOME: times, replace(SOME, mesh="tp=4"): forms(auto=1.0, naive=2.0), bare: times}
    assert command.summary(found).rows == [["v5e:2x4", "1.00 (2)", "", "", "2.00 (1)"]]


@pytest.fixture(scope="module")
def cases():
    # Meshes that other tests have made look like these, whose links would be noted for both.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("jaxpar.axis.ring_order._known", {})
        known = times.read(times.newest())
        yield fit.cases_of({p: s for p, s in known.items() if fit.judges(p)})


def judged(case):
    """What is looked at of a case, reckoned once."""
    regret = case.regret()
    return SimpleNamespace(problem=case.problem, regret=lambda: regret)


def test_what_choices_cost(cases):
    """Regret over the best compiled algorithm of each point, of those that fit no number."""
    assert len(cases) > 150
    cases = [judged(case) for case in cases]
    for kind in ("TPU v5 lite", "TPU v5", "TPU v6 lite", "TPU7x"):
        found = fit.judge([case for case in cases if case.problem.chip.kind == kind])
        assert found.regret <= 1.02, kind
    found = fit.judge(cases)
    assert found.regret <= 1.01
    assert found.worst <= 1.3
    assert found.error <= 0.12


def test_a_number_that_is_wrong_costs_more_and_is_fitted_again(cases):
    some = [case for case in cases if case.point.slice == "v5e:4x4"]
    least = fit.judge(some).score
    with fit.with_number("piece", "TPU v5 lite", 5e-5):
        assert fit.judge(some).score > least
        assert fit.best_value("piece", "TPU v5 lite", some) < 5e-5
    assert fit.judge(some).score == least


def test_auto_is_decided_anew(monkeypatch):
    """What it took when its time was kept does not count, and what was never compiled has none."""
    kept = times.read(times.newest())
    label = "v6e:2x4 tp=8 gather-lhs-rows 4096x8192x28672 forward"
    point = next(p for p in kept if p.label == label)
    monkeypatch.setattr("sweep.fit.grid", lambda: [point])
    found = fit.standing({point: kept[point] | {"auto": 1.0}})[point]
    assert found["auto"]["total"] == kept[point]["chunked-8"] < found["naive"]["total"]
    assert found["naive"]["total"] == kept[point]["naive"]
    found = fit.standing({point: {"naive": 1.0, "auto": 1.0}})[point]
    assert set(found) == {"naive"}


def test_times_are_kept_by_point(tmp_path):
    path = tmp_path / "times" / "some.jsonl"
    assert times.read(path) == {}
    times.write(path, {SOME: {"naive": 1.23456e-5, "chunked-2 | naive": 2e-5}})
    other = points()[5]
    times.write(path, {other: {"naive": 1.0}})
    assert times.read(path) == {
        SOME: {"naive": 1.235e-5, "chunked-2 | naive": 2e-5},
        other: {"naive": 1.0},
    }
    assert "libtpu" in path.read_text().splitlines()[0]


def test_the_readme_has_the_markers():
    assert rewrite(command.README.read_text(), command.SECTION, "new").count("new") >= 1


@pytest.mark.parametrize("jobs", ["0", "-1"])
def test_refuses_arguments(jobs, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--jobs", jobs])
    assert "--jobs must be at least 1" in capsys.readouterr().err


def test_a_sample_compiled_and_kept(tmp_path, monkeypatch):
    """Auto is not behind, and what was compiled once is not compiled again."""
    monkeypatch.setattr(command, "CACHE", tmp_path / "found.jsonl")
    large = Point("v5p:2x2x1", "tp=4", "gather-lhs-rows", (8192, 4096, 14336), False, True)
    found = command.compile_all([SOME, large], ways=False, jobs=1)
    for point in (SOME, large):
        assert set(found[point]) == {"auto", "naive", "XLA post_spmd", "XLA plain jit"}
        over, _ = command.ratio(found[point], ("naive", "XLA post_spmd", "XLA plain jit"))
        assert over <= command.MOST
    lines = command.CACHE.read_text().splitlines()
    again = command.compile_all([SOME], ways=False, jobs=1)
    assert again[SOME]["auto"]["total"] > 0
    assert len(set(command.CACHE.read_text().splitlines())) == len(set(lines))
