"""The table of `mode="auto"`: what it shows of each call site, and that what it shows is taken."""

import json
from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import Axis, Tuning, all_gather_matmul, ways
from jaxpar.axis.axis import Ring
from jaxpar.choose.choice import RULES, Predictions, way_of
from jaxpar.choose.problem import Problem
from jaxpar.choose.record import noting
from jaxpar.choose.sites import NAMED
from jaxpar.layers import fsdp_gather, gated_mlp
from jaxpar.moe import Experts, moe_layer, route
from jaxpar.ring.seconds import Flow
from jaxpar.schedule import target
from jaxpar.tools.accuracy.interval import KindOfWork, interval_of
from jaxpar.tools.cli.main import main

GATHER = {
    "in_specs": (P("tp"), P(None, "tp")),
    "out_specs": P(None, "tp"),
}


def matmul(mode="auto", *, lines=1, **options):
    def local(x, w):
        first = all_gather_matmul(x, w, "tp", mode=mode, **options)
        return first if lines == 1 else first + all_gather_matmul(x, w, "tp", mode=mode)

    return jax.shard_map(local, **GATHER)


def operands(rows=8192, depth=8192, columns=8192):
    return [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((rows, depth), (depth, columns))]


def part(found, name):
    return next(site for site in found.sites if site.part == name)


@pytest.fixture(scope="module")
def v5p():
    return target("v5p:2x2x2", "tp=8")


def test_each_algorithm_has_its_seconds_or_why_it_is_out(v5p):
    found = ways(matmul(), *operands(), target=v5p)
    assert [site.part for site in found.sites] == ["forward", "backward"]
    for site in found.sites:
        assert [a.name for a in site.algorithms] == list(NAMED)
        assert site.by == "auto"
        assert site.line.startswith("test_ways.py:")
        assert site.line.endswith(" in local")
        assert all(a.seconds for a in site.algorithms)
    cube = {a.name: a for a in part(found, "backward").algorithms}["multi-ring"]
    assert cube.out == "across a cube, thirds of anything but rows cost more than they save"


def test_the_one_that_is_taken_is_the_least_of_those_that_may_be(v5p):
    for rows in (256, 2048, 16384):
        for site in ways(matmul(), *operands(rows), target=v5p).sites[:1]:
            seconds = {a.name: a.seconds for a in site.algorithms if not a.out}
            others = [s / 0.9 for name, s in seconds.items() if name != "naive"]
            assert seconds[site.taken] <= min(seconds["naive"], *others)


@pytest.mark.parametrize("columns", [1024, 8192, 28672])
def test_the_pair_that_is_taken_is_the_least_of_all_pairs(columns, v5p):
    """A forward pass that looks faster is not taken if its backward pass gathers again."""
    forward, backward = ways(matmul(), *operands(8192, 8192, columns), target=v5p).sites[:2]
    both = {a.name: a.both for a in forward.algorithms if a.both is not None and not a.out}
    seconds = {a.name: a.seconds for a in forward.algorithms}
    assert len(both) > 3
    assert all(both[name] > seconds[name] for name in both)
    others = [time / 0.9 for name, time in both.items() if name != "naive"]
    assert both[forward.taken] <= min(both["naive"], *others)
    after = {a.name: a.seconds for a in backward.algorithms}[backward.taken]
    assert both[forward.taken] == pytest.approx(seconds[forward.taken] + after)
    assert {a.both for a in backward.algorithms} == {None}


def test_a_ring_that_row_chunks_make_naive_is_not_called_named():
    """Nobody named it; it is, where the program does."""
    v5e = target("v5e:2x4", "tp=8")
    gate = jax.ShapeDtypeStruct((8192, 28672), jnp.bfloat16)
    down = jax.ShapeDtypeStruct((28672, 8192), jnp.bfloat16)
    x = jax.ShapeDtypeStruct((65536, 8192), jnp.bfloat16)
    specs = {"in_specs": (P("tp"), P(None, "tp"), P(None, "tp"), P("tp")), "out_specs": P("tp")}
    for axis, by in (("tp", {"auto"}), (Axis("tp", mode="naive"), {"named"})):
        local = jax.shard_map(lambda x, *w, axis=axis: gated_mlp(x, *w, axis), **specs)
        sites = ways(local, x, gate, gate, down, target=v5e).sites
        chunks = next(site.taken for site in sites if site.part == "row chunks")
        said = {site.by for site in sites if site.part != "row chunks"}
        assert said == (by if chunks == "1" else {"in row chunks"})


def test_a_site_without_times_says_why():
    mesh = jaxpar.make_mesh("tp=8")
    local = jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"), mesh=mesh, **GATHER)
    text = str(ways(local, *operands(64, 64, 64)))
    assert "no times: nobody has published figures of these devices; target=" in text
    assert "time: predicted" not in text

    def experts(x, logits, w):
        return moe_layer(x, route(logits, 2), Experts(w, w.swapaxes(1, 2)), "tp")[0]

    local = jax.shard_map(experts, in_specs=P("tp"), out_specs=P("tp"))
    shapes = (512, 64), (512, 16), (16, 64, 128)
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    said = str(ways(local, *arrays, target=target("v5e:2x4", "tp=8")))
    assert "a dispatch of experts has no times: it is chosen by bytes" in said
    assert "nobody has published" not in said


def test_a_table_to_read():
    found = ways(matmul(), *operands(), target=target("v6e:2x4", "tp=8"))
    text = str(found).splitlines()
    assert text[0] == "matmul over tp=8: gather a of ak,kn->an, bfloat16; 1024x8192, 8192x1024"
    assert text[1].startswith("  test_ways.py:")
    assert text[2] == f"  forward: {part(found, 'forward').taken} (auto)"
    taken = [line.split()[1] for line in text if line.startswith("  > ")]
    assert taken == [site.taken for site in found.sites]
    assert any("(predicted / measured - 1): TPU v6 lite, large matmuls: " in line for line in text)
    page = found._repr_html_()
    assert page.count("<table>") == len(found.sites)
    assert "ak,kn-&gt;an" in page
    record = json.loads(found.json())
    assert record["sites"][0]["algorithms"][0]["name"] == "naive"


def test_errors_are_those_of_the_transfers(v5p):
    errors = {a.name: a.error for a in ways(matmul(), *operands(), target=v5p).sites[1].algorithms}
    sums = interval_of(KindOfWork("TPU v5", "sum", True))
    assert errors["naive"] == f"{sums} ({sums.rows})"
    assert errors["bidirectional"] != errors["naive"]  # permutes


def test_a_mode_that_is_named_is_said_to_be(v5p):
    both = Axis("tp", mode="naive", backward="bidirectional")
    specs = GATHER
    local = jax.shard_map(lambda x, w: all_gather_matmul(x, w, both), **specs)
    found = ways(local, *operands(), target=v5p)
    assert [(s.part, s.taken, s.by) for s in found.sites] == [
        ("forward", "naive", "named"),
        ("backward", "bidirectional", "named"),
    ]
    half = Axis("tp", mode="naive", backward="auto")
    found = ways(
        jax.shard_map(lambda x, w: all_gather_matmul(x, w, half), **specs), *operands(), target=v5p
    )
    assert [s.by for s in found.sites] == ["named", "auto"]


def test_a_tuned_way_goes_before_the_model(v5p):
    name = "matmul over tp=8: gather a of ak,kn->an, bfloat16; 1024x8192, 8192x1024"
    sites = {name: {"forward": "chunked-2", "backward": "naive"}}
    options = jaxpar.compiler_options(v5p)
    kind = v5p.mesh.devices.flat[0].device_kind
    file = Tuning("by hand", "-", {}, kind, {"tp": 8}, options, sites)
    with jaxpar.tuned(file):
        found = ways(matmul(), *operands(), target=v5p)
    taken = [(s.part, s.taken, s.by) for s in found.sites if "," not in s.part]
    assert taken == [("forward", "chunked-2", "tuned"), ("backward", "naive", "tuned")]


def test_equal_sites_are_one_with_all_their_lines(v5p):
    found = ways(matmul(lines=2), *operands(), target=v5p)
    assert len(found.sites) == 2
    # On one line of this file there are two calls; the other is on the next line.
    assert found.sites[0].line.count("test_ways.py:") == 2


def test_what_is_made_of_no_gradients_is_a_part_of_its_own():
    """A forward pass that keeps what it gathers for a derivative may go another way."""
    v6e = target("v6e:2x4", "tp=8")
    parts = [
        [(s.part, s.taken) for s in ways(matmul(), *operands(rows), target=v6e).sites]
        for rows in (512, 1024, 4096, 16384)
    ]
    for found in parts:
        assert [name for name, _ in found][:2] == ["forward", "backward"]
        alone = dict(found).get("forward, no gradients")
        assert alone != dict(found)["forward"]


def test_a_layer_has_chunks_of_rows():
    v6e = target("v6e:2x4", "tp=8")
    specs = {
        "in_specs": (P("tp"), P(None, "tp"), P(None, "tp"), P("tp")),
        "out_specs": P("tp"),
    }

    def layer(*args):  # JAX keeps the mesh of a mapped function
        return jax.shard_map(partial(gated_mlp, axis="tp"), **specs)(*args)

    sizes = ((8192, 4096), (4096, 14336), (4096, 14336), (14336, 4096))
    args = [jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in sizes]
    found = ways(layer, *args, target=v6e)
    chunks = part(found, "row chunks")
    assert [a.name for a in chunks.algorithms] == ["1", "2", "4"]
    best = min(chunks.algorithms, key=lambda a: a.seconds)
    assert chunks.taken == best.name
    # Without the options the compiler waits for each collective.
    alone = part(ways(layer, *args, target=v6e, compiler_options={}), "row chunks")
    assert alone.taken == "1"
    assert alone.algorithms[1].out == "the compiler overlaps no collective with other work"
    on_gpus = part(ways(lambda *a: layer(*a), *args, target=target("h100:8", "tp=8")), "row chunks")
    assert on_gpus.algorithms[1].out == "the compiler joins the collectives of chunks again"


def test_weights_and_experts():
    v5p = target("v5p:2x2x2", "tp=8")
    gathers = jax.shard_map(
        lambda w: fsdp_gather(w, "tp", dim=0), in_specs=P("tp"), out_specs=P(), check_vma=False
    )
    (site,) = ways(gathers, jax.ShapeDtypeStruct((4096, 64), jnp.bfloat16), target=v5p).sites
    assert (site.taken, site.algorithms[0].seconds) == ("naive", None)
    assert site.algorithms[2].out == "it has no work of its own to overlap with"


def test_on_the_devices_at_hand():
    """Nothing is predicted of them, and auto is naive; a program of jaxpar.jit is told itself."""
    mesh = jaxpar.make_mesh("tp=8")
    local = jax.shard_map(lambda x, w: all_gather_matmul(x, w, "tp"), mesh=mesh, **GATHER)
    args = [jnp.ones((16, 4)), jnp.ones((4, 32))]
    for f in (local, jax.jit(local), jaxpar.jit(local)):
        found = ways(f, *args)
        assert [site.taken for site in found.sites] == ["naive", "naive"]
        rows = {a.name: a for a in found.sites[0].algorithms}
        assert rows["bidirectional"].out == "the chip is not in the table"
        assert rows["bidirectional"].seconds is None
    with jax.set_mesh(mesh):
        assert ways(local, *args).sites == found.sites


def test_no_call_site():
    found = ways(jnp.sin, jnp.ones(3))
    assert found.sites == ()
    assert str(found) == found._repr_html_() == "no call site has an algorithm to choose"


def test_what_is_no_target_is_refused():
    with pytest.raises(TypeError, match=r"ways: target must be a jaxpar.schedule.Target, got 'v5p"):
        ways(jnp.sin, jnp.ones(3), target="v5p:2x2x2")
    with pytest.raises(TypeError, match="ways: compiler options must be a mapping"):
        ways(jnp.sin, jnp.ones(3), compiler_options=3)


ALL = frozenset({"all-gather", "reduce-scatter"})
NONE = frozenset()
FLOW = Flow("gather", 1e11, 2**24, whole=2**24, partners=2**24, exchanged=2**24)
SUMS = Flow("scatter", 1e11, 2**20)


@pytest.mark.parametrize(
    ("slice_", "mesh", "kind", "mode", "beside", "flow", "out"),
    [
        ("v5p:2x2x2", "x=8", "matmul", "naive", NONE, FLOW, ""),
        ("v5p:2x2x2", "x=8", "matmul", "chunked-4", ALL, FLOW, ""),
        ("v5p:2x2x2", "x=8", "matmul", "chunked-4", NONE, FLOW, "no collective with other work"),
        ("v5p:2x2x2", "x=8", "attention", "chunked-4", ALL, FLOW, "blocks are used one by one"),
        ("v5p:2x2x2", "x=8", "matmul", "stationary", ALL, SUMS, "no other operand can travel"),
        ("v5p:2x2x2", "x=2,y=4", "matmul", "bidirectional", ALL, FLOW, "two devices have one"),
        ("v5p:2x2x2", "x=1,y=8", "matmul", "bidirectional", ALL, FLOW, "one device"),
        ("v5e:2x4", "x=8", "matmul", "multi-ring", ALL, FLOW, "the links of more than one ring"),
        ("v5p:4x4x4", "x=16,y=4", "attention", "multi-ring", ALL, FLOW, "one ring hides"),
        ("v5e:16x16", "x=16,y=16", "matmul", "bidirectional", ALL, FLOW, "synchronous on dim"),
        ("h100:8", "x=8", "matmul", "bidirectional", ALL, FLOW, "leave by one port"),
        ("h100:16", "x=16", "matmul", "unidirectional", ALL, FLOW, "beyond one switch, of 8"),
        ("h100:8", "x=8", "matmul", "chunked-4", ALL, FLOW, "joins more than two chunks again"),
        ("h100:8", "x=8", "matmul", "chunked-2", ALL, SUMS, "sums of less than 256 MiB again"),
        ("v5p:2x2x2", "x=8", "projection", "bidirectional", ALL, SUMS, "a layer's other matmuls"),
        ("v5p:2x2x2", "x=8", "projection", "chunked-4", NONE, SUMS, "no collective with"),
        ("v5p:2x2x2", "x=8", "collective", "naive", ALL, FLOW, "uses the links best"),
        ("v5p:2x2x2", "x=8", "weights", "bidirectional", ALL, FLOW, "no work of its own"),
    ],
)
def test_why_each_is_out(slice_, mesh, kind, mode, beside, flow, out):
    place = target(slice_, mesh)
    size = dict(place.mesh.shape)["x"]
    found = []

    def local():
        ring = Ring(("x",), "auto", size=size)
        asked = Problem(kind, ring, (), (flow,), told=beside)
        found.append(RULES[kind](asked, mode, (flow,)))
        return jnp.zeros(())

    with jax.set_mesh(place.mesh):
        jax.eval_shape(jax.shard_map(local, in_specs=(), out_specs=P()))
    assert out in found[-1]
    assert bool(out) == bool(found[-1])


def test_each_way_of_a_pair_is_predicted_once(v5p):
    """Tracing evaluates the model for each way of a pass, not for each pair."""
    with noting() as notes:
        ways_of = jax.jit(matmul())
        with jax.set_mesh(v5p.mesh), jaxpar.compiled_with({}):
            ways_of.trace(*operands())
    problem, found = notes.decisions[0].problem, []

    def local():
        predicted = Predictions(problem)
        some = [way_of(problem, mode, problem.forward) for mode in ("chunked-2", "chunked-4")]
        rows = [predicted.of_both(pair) for pair in product(some, some)]
        found.extend([len(predicted._known), *rows])
        return jnp.zeros(())

    with jax.set_mesh(v5p.mesh), jaxpar.compiled_with({}):
        jax.eval_shape(jax.shard_map(local, in_specs=(), out_specs=P()))
    assert found[0] == 4
    assert min(found[1:]) > 0


MODEL = """
import jax, jax.numpy as jnp
from jax.sharding import PartitionSpec as P
from jaxpar import all_gather_matmul

def local(x, w):
    return all_gather_matmul(x, w, "tp")

def step(mesh):
    specs = {"in_specs": (P("tp"), P(None, "tp")), "out_specs": P(None, "tp")}
    args = [jax.ShapeDtypeStruct((8192, 8192), jnp.bfloat16)] * 2
    return jax.shard_map(local, **specs), args

def broken(mesh):
    raise RuntimeError("no weights")
"""


@pytest.fixture
def model(tmp_path, monkeypatch):
    (tmp_path / "chosen.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)


@pytest.mark.usefixtures("model")
def test_the_command(tmp_path, capsys):
    data = tmp_path / "ways.json"
    call = ["ways", "chosen:step", "--target", "v5p:2x2x2", "--json", str(data)]
    assert main(call) == 0
    out = capsys.readouterr().out
    assert "  chosen.py:7 in local\n" in out
    sites = json.loads(data.read_text())["sites"]
    assert [site["part"] for site in sites[:2]] == ["forward", "backward"]
    arguments = ["--args", "bf16[8192,8192]@tp,-", "bf16[8192,8192]@-,tp"]
    assert main(["ways", "chosen:local", *arguments, "--target", "v5p:2x2x2"]) == 1
    assert "axis 'tp' is not bound" in capsys.readouterr().err


@pytest.mark.usefixtures("model")
@pytest.mark.parametrize(
    ("call", "status", "text"),
    [
        (["chosen:broken"], 1, "RuntimeError: no weights"),
        (["chosen:nothing"], 2, "no function 'nothing'"),
        (["chosen:step", "--mesh", "tp=3"], 2, "--mesh tp=3 takes 3 devices, but there are 8"),
        (["chosen:step", "--target", "v5e:2x4,v6e:2x4"], 2, "names several; ways takes one"),
        (["chosen:step", "--json", "no/where.json"], 2, "no/where.json"),
    ],
)
def test_what_the_command_refuses(call, status, text, capsys):
    assert main(["ways", *call]) == status
    said = capsys.readouterr().err
    assert said.startswith("jaxpar ways: error: ")
    assert text in said
