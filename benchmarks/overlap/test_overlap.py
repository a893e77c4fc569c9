"""The peers compute what they should, and the tables end up in a text."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import overlap.__main__ as command
import tables
from jaxpar import compiled_with, compiler_options, make_mesh
from jaxpar.schedule import target
from jaxpar.testing import count_collectives
from jaxpar.tools.cli.ops import OPS
from jaxpar.tools.timeline.floor import rings_over
from jaxpar.tools.timeline.links import Links
from overlap import layers, peers, phases, plot, report, weights, worker

SHAPE = (32, 48, 16)


def check(function, described):
    rng = np.random.default_rng(0)
    x, w, ct = (rng.integers(-3, 4, arg.shape).astype(np.float32) for arg in described)
    placed = [jax.device_put(a, d.sharding) for a, d in zip((x, w, ct), described, strict=True)]
    out, dx, dw = function(*placed)
    for got, arg in zip((dx, dw, out), described, strict=True):
        assert got.sharding.is_equivalent_to(arg.sharding, got.ndim)
    # Small integers have exact products and sums.
    np.testing.assert_array_equal(out, x @ w)
    np.testing.assert_array_equal(dx, ct @ np.swapaxes(w, -1, -2))
    np.testing.assert_array_equal(dw, np.swapaxes(x, -1, -2) @ ct)


@pytest.mark.parametrize("op", worker.FORMS.values())
@pytest.mark.parametrize("peer", ["naive", "guide one way", "guide both ways"])
def test_peers_and_their_gradients(op, peer):
    mesh = make_mesh("tp=8")
    function = peers.build(peer, op, mesh, ("tp",), grad=True)
    check(function, peers.operands(op, SHAPE, jnp.float32, mesh, ("tp",)))


@pytest.mark.parametrize("op", worker.FORMS.values())
@pytest.mark.parametrize("axes", ["tp=8", "dp=2,tp=4"])
def test_plain_jit(op, axes):
    mesh = make_mesh(axes)
    ((function, described),) = peers.plain_jit(op, SHAPE, jnp.float32, mesh, ("tp",), grad=True)
    check(function, described)


@pytest.mark.parametrize("op", worker.FORMS.values())
def test_plain_jit_has_two_layouts_beside_another_axis(op):
    mesh = make_mesh("dp=2,tp=4")
    layouts = peers.plain_jit(op, SHAPE, jnp.float32, mesh, ("tp",), grad=False)
    assert [layout[0].shape for _, layout in layouts] == [(2, 32, 48), (64, 48)]
    assert layouts[0][1][0].sharding.spec[0] == "dp"
    rows = layouts[1][1][0].sharding.spec[0]
    assert rows == (("dp", "tp") if OPS[op].lhs == "M" else "dp")


def test_forward_has_the_result_alone():
    mesh = make_mesh("tp=8")
    x, w, _ = peers.operands("scatter-rows", SHAPE, jnp.float32, mesh, ("tp",))
    for peer in ("naive", "guide both ways"):
        function = peers.build(peer, "scatter-rows", mesh, ("tp",), grad=False)
        assert jax.eval_shape(function, x, w).shape == (32, 16)


def test_cases_are_what_they_say():
    cases = worker.load_cases()
    assert len(cases) == 21
    assert sum(case.fallback for case in cases) == 1
    assert {case.op for case in cases} == set(worker.FORMS)
    assert all(size % case.size == 0 for case in cases for size in (case.m, case.k, case.n))
    assert sum(case.few_rows for case in cases) == 8
    assert len({case.name for case in cases}) == 21


def found(number, total, failed=()):
    """What the worker would say of a case whose floor is 1 s; `total` by the peer or mode."""
    case = vars(worker.load_cases()[number])
    kinds = [("peer", name) for name in peers.PEERS] + [("mode", name) for name in worker.MODES]
    records = []
    for kind, variant in kinds:
        record = {"kind": kind, "variant": variant, "same_as": "bidirectional"}
        if variant in failed:
            record["failure"] = "Error: too large"
        else:
            record["total"] = total.get(variant, 2.0)
        records.append(record)
    return {"label": case["name"], "case": case, "floor": 1.0, "records": records}


def test_tables():
    some = [
        found(1, {"auto": 1.1, "bidirectional": 1.1}, failed=["XLA post_spmd"]),
        found(8, {"auto": 9.0}),  # the fallback, which the mean leaves out
        found(9, {"auto": 1.2, "bidirectional": 1.2}),
    ]
    rows = report.main_table(report.results(some)).rows
    first, fallback, _, mean, worst = rows
    assert first[4] == "-"
    assert first[-4:] == ["1.10", "**1.10** (both ways)", "0.55", "1.00"]
    assert "(fallback)" in fallback[0]
    assert mean[-3] == "1.15"
    assert worst[-3:] == ["1.20", "0.60", "1.00"]
    text = report.tables(some)
    assert text.startswith("`python benchmarks/overlap`, 20")
    assert "llama3-70b down, tp 8: peer XLA post_spmd: Error: too large" in text


def test_gpu_table():
    record = {"op": "all-reduce", "grad": False, "total": 1.0, "same_as": "unidirectional"}
    record |= {"asynchronous": 7, "bracketing": 6, "synchronous": 1}
    hosts = [{"gpu": chip, "records": [record]} for chip in ("h100:8", "b200:8")]
    table = report.gpu_table(hosts)
    assert table.rows[-1] == ["all-reduce", "7 / 6 / 1 (one way)", "-"]
    hosts[1]["records"] = [record | {"synchronous": 0}]
    differing = report.gpu_table(hosts).rows[-1][1]
    assert differing == "7 / 6 / 1 (one way), 7 / 6 / 0 (one way)"
    assert report.gpu_table([]).rows == []


def test_picture(tmp_path):
    plot.write_plot(str(tmp_path / "overlap.png"), [found(1, {}, failed=["naive"])])
    assert (tmp_path / "overlap.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--cases", "0,99"], "--cases has '99'; choose from 0,1,2,3,4,5,6,7,8,9,10,11,12,13,14"),
        (["--cases", ""], "--cases has ''"),
        (["--jobs", "0"], "--jobs must be at least 1, got 0"),
    ],
)
def test_refuses_arguments(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.parse(args)
    assert message in capsys.readouterr().err


def test_names_the_command_that_installs_what_is_missing(monkeypatch, capsys):
    monkeypatch.setattr(command, "_missing", lambda: ["libtpu"])
    with pytest.raises(SystemExit, match="2"):
        command.parse([])
    assert capsys.readouterr().err.splitlines()[-1] == (
        "overlap: error: needs libtpu; pip install -e '.[bench,tpu,gpu]'"
    )


def test_chooses_cases_and_gpus():
    assert len(command.parse([]).tasks) == 23
    some = command.parse(["--cases", "gpu,3"]).tasks
    assert list(some) == ["llama3-8b gate/up, tp 4", "h100:8", "b200:8"]


def test_a_process_that_dies_is_a_failure():
    died = command.compile_one("some", {"gpu": "no:0"})
    assert died["records"] == []
    assert died["versions"]["jax"] == jax.__version__
    assert died["failure"].startswith("its process ended with status 1: ValueError: ")


def test_the_readme_has_the_markers():
    readme = (command.FOLDER / "README.md").read_text()
    assert tables.rewrite(readme, command.SECTION, "new").count("new") >= 1


@pytest.mark.parametrize("case", worker.load_cases(), ids=lambda case: case.name)
def test_the_floor_is_that_of_one_ring(case):
    """No other ring over these devices would have links of its own."""
    described = target(case.chip, ",".join(f"{axis}={n}" for axis, n in case.mesh.items()))
    links = Links(described.mesh, described.chip)
    assert links.within(rings_over(described.mesh, case.axis)) == 2


@pytest.mark.parametrize("make_step", [weights.naive, weights.disjoint_rings_with_few_rows])
def test_layers_whose_weights_are_gathered(make_step):
    mesh = target("v5p:4x4x4", "dp=4,x=4,y=4").mesh
    step, (given, rows) = make_step(mesh)
    with jax.set_mesh(mesh):
        found = jax.eval_shape(step, given, rows)
    assert [w.shape for w in found] == [w.shape for w in given]


@pytest.mark.parametrize("make_step", [layers.auto, layers.disjoint_rings_with_few_rows])
def test_layers_whose_rows_are_gathered(make_step):
    described = target("v5p:4x4x4", "dp=4,x=4,y=4")
    step, given = make_step(described.mesh)
    with jax.set_mesh(described.mesh), compiled_with(compiler_options(described)):
        found = jax.eval_shape(step, *given)
    assert [x.shape for x in jax.tree.leaves(found)] == [x.shape for x in jax.tree.leaves(given)]


@pytest.mark.parametrize(
    ("make_matmul", "permutes"),
    [
        (phases.scatter_by_rings, 60),
        (phases.scatter_by_dimensions, 24),
        (phases.gather_by_dimensions, 18),
    ],
)
def test_both_forms_of_a_matmul_over_a_plane(make_matmul, permutes):
    described = target("v5p:4x4x4", "dp=4,x=4,y=4")
    step, given = make_matmul(described.mesh)
    with jax.set_mesh(described.mesh):
        found = jax.eval_shape(step, *given)
        sent = count_collectives(step, *given, grad=False).forward
    assert found.shape == (given[0].shape[0], given[1].shape[1])
    assert sent == {"ppermute": permutes}
