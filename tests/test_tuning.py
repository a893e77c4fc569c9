"""Ways that were tried out: their file, what a program takes of it, and what is refused."""

import json
import re
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import Axis, Tuning, layers, moe
from jaxpar.axis.axis import Ring
from jaxpar.choose.problem import Problem
from jaxpar.choose.sites import AUTO, site_of
from jaxpar.choose.stages import choose_stages
from jaxpar.choose.trying import Trial, trying
from jaxpar.choose.tuning import versions

MESH = jaxpar.make_mesh("tp=8")
X, UP, DOWN = jnp.ones((16, 4)), jnp.ones((4, 32)), jnp.ones((32, 8))
GATHER = "matmul over tp=8: gather a of ak,kn->an, float32; 2x4, 4x4"
SCATTER = "matmul over tp=8: scatter a of ak,kn->an, float32; 16x4, 4x8"
COMMAND = "jaxpar tune model:mlp"


def mlp(gathers="tp", scatters="tp"):
    def local(x, up, down):
        hidden = jnp.sin(jaxpar.all_gather_matmul(x, up, gathers))
        return jaxpar.matmul_reduce_scatter(hidden, down, scatters)

    specs = (P("tp"), P(None, "tp"), P("tp"))
    return jax.shard_map(local, mesh=MESH, in_specs=specs, out_specs=P("tp"))


def with_gradients(function):
    def run(*args):
        out, pull_back = jax.vjp(function, *args)
        return out, pull_back(jnp.cos(out))

    return run


def text(function, *args):
    """The lowered program; the name of what was jitted is no part of it."""
    lowered = jax.jit(function).lower(*(args or (X, UP, DOWN)))
    return re.sub(r"@jit_\w+", "", lowered.as_text())


def tuning(sites=None, **more):
    both = {"forward": AUTO, "backward": AUTO}
    sites = {GATHER: both, SCATTER: both} | (sites or {})
    here = {"jax": jax.__version__}
    made = Tuning("tuned.json", COMMAND, here, "cpu", {"tp": 8}, {}, sites)
    return replace(made, **more)


FOUND = {
    GATHER: {"forward": "bidirectional", "backward": "unidirectional"},
    SCATTER: {"forward": AUTO, "backward": "chunked-2"},
}


def test_a_file_is_read_as_it_was_written_and_a_person_can_read_it(tmp_path):
    path = tmp_path / "tuned.json"
    made = tuning(FOUND, name=str(path), clock="measured", milliseconds={"auto": 2.0})
    made.write(path)
    assert Tuning.read(path) == made
    assert hash(Tuning.read(path)) == hash(made)
    assert hash(tuning()) != hash(made)
    record = json.loads(path.read_text())
    assert record["sites"] == FOUND
    assert record["mesh"] == {"tp": 8}
    assert record["command"] == COMMAND
    assert max(map(len, path.read_text().splitlines())) < 120


def test_a_program_runs_the_ways_that_were_found(tmp_path):
    named = mlp(
        Axis("tp", mode="bidirectional", backward="unidirectional"),
        Axis("tp", mode="naive", backward="chunked-2"),
    )
    program, auto = with_gradients(mlp()), text(with_gradients(mlp()))
    wanted = text(with_gradients(named))
    assert wanted != auto
    path = tmp_path / "tuned.json"
    tuning(FOUND).write(path)
    assert text(program) == auto
    for given in (path, str(path), tuning(FOUND)):
        with jaxpar.tuned(given):
            assert text(program) == wanted  # though it was traced without it
    assert text(program) == auto
    jitted = jaxpar.jit(program, tuned=path)
    assert re.sub(r"@jit_\w+", "", jitted.lower(X, UP, DOWN).as_text()) == wanted
    untold = jaxpar.jit(program).lower(X, UP, DOWN).as_text()
    assert re.sub(r"@jit_\w+", "", untold) == auto


def test_results_and_gradients_are_those_of_auto():
    keys = jax.random.split(jax.random.key(0), 3)
    args = [jax.random.normal(k, x.shape) for k, x in zip(keys, (X, UP, DOWN), strict=True)]
    program = with_gradients(mlp())
    got = jax.tree.leaves(jaxpar.jit(program, tuned=tuning(FOUND))(*args))
    for one, other in zip(got, jax.tree.leaves(jax.jit(program)(*args)), strict=True):
        np.testing.assert_allclose(one, other, rtol=2e-5, atol=2e-5)


def test_a_mode_that_is_named_goes_before_the_file():
    named = with_gradients(mlp(Axis("tp", mode="naive"), Axis("tp", mode="unidirectional")))
    wanted = text(named)
    with jaxpar.tuned(tuning(FOUND)):
        assert text(named) == wanted
    # A pass that is not named is decided by the file still.
    half = with_gradients(mlp(Axis("tp", backward="naive"), Axis("tp", mode="naive")))
    whole = mlp(Axis("tp", mode="bidirectional", backward="naive"), Axis("tp", mode="naive"))
    with jaxpar.tuned(tuning({GATHER: {"forward": "bidirectional"}, SCATTER: {}})):
        assert text(half) == text(with_gradients(whole))


def test_a_trial_hears_what_a_program_asks_for_and_reads_no_file():
    trial = Trial({GATHER: {"forward": "bidirectional"}})
    jitted = jaxpar.jit(mlp(), tuned="nowhere.json")
    with trying(trial), jaxpar.tuned("nowhere.json"):
        found = jitted.lower(X, UP, DOWN).as_text()
    parts = [(site, part) for site in (GATHER, SCATTER) for part in ("forward", "backward")]
    assert list(trial.asked) == parts
    assert trial.asked[GATHER, "forward"].size == 2 * 4 + 4 * 4
    assert AUTO not in trial.asked[GATHER, "forward"].ways
    assert "collective_permute" in found
    one = jaxpar.make_mesh("tp=1", devices=jax.devices()[:1])
    alone = jax.shard_map(
        lambda x, w: jaxpar.all_gather_matmul(x, w, "tp"),
        mesh=one,
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    with trying(trial := Trial({})):
        jax.jit(alone).lower(X, UP)
    assert not trial.asked  # one device has nothing to choose


REMEDY = f"; write it again: {COMMAND}"
STALE = {
    "version": (
        {"versions": {"jax": "0.9.1"}},
        f"tuned: tuned.json is of jax 0.9.1, here it is {jax.__version__}{REMEDY}",
    ),
    "package": (
        {"versions": {"libnone": "1.0"}},
        f"tuned: tuned.json is of libnone 1.0, here it is not installed{REMEDY}",
    ),
    "device": (
        {"device_kind": "TPU v6 lite"},
        "all_gather_matmul: tuned.json is for 'TPU v6 lite', this program for 'cpu'" + REMEDY,
    ),
    "mesh": (
        {"mesh": {"dp": 2, "tp": 4}},
        "all_gather_matmul: tuned.json is for a mesh of dp=2, tp=4, here it is tp=8" + REMEDY,
    ),
    "options": (
        {"compiler_options": {"xla_a": "true"}},
        "all_gather_matmul: tuned.json is for the compiler options xla_a=true, here there are none"
        + REMEDY,
    ),
    "shapes": (
        {"sites": {GATHER.replace("2x4", "4x4"): {"forward": AUTO}, "loss over tp=8: ; 3": {}}},
        f"all_gather_matmul: tuned.json has nothing for the forward of '{GATHER}'; the nearest "
        f"that it has is '{GATHER.replace('2x4', '4x4')}'{REMEDY}",
    ),
    "nothing": (
        {"sites": {}},
        f"all_gather_matmul: tuned.json has nothing for the forward of '{GATHER}'; it has none at "
        f"all{REMEDY}",
    ),
    "way": (
        {"sites": {GATHER: {"forward": "fast"}}},
        f"all_gather_matmul: tuned.json has 'fast' for the forward of '{GATHER}'; write one of "
        "naive, stationary, chunked-2, chunked-4, chunked-8, unidirectional, bidirectional, auto",
    ),
}


@pytest.mark.parametrize("why", STALE)
def test_what_is_stale_is_refused_with_the_reason_and_the_remedy(why):
    other, said = STALE[why]
    stale = replace(tuning(), **other)
    for run in (
        lambda: jaxpar.jit(mlp(), tuned=stale)(X, UP, DOWN),
        lambda: jaxpar.jit(mlp(), tuned=stale).eval_shape(X, UP, DOWN),
    ):
        with pytest.raises(ValueError, match=f"^{re.escape(said)}(\n|$)"):
            run()
    with pytest.raises(ValueError, match=f"^{re.escape(said)}(\n|$)"), jaxpar.tuned(stale):
        jax.jit(mlp()).lower(X, UP, DOWN)


def test_options_are_those_that_are_told_or_else_of_the_environment(monkeypatch):
    stale = tuning(compiler_options={"xla_a": True})
    with jaxpar.tuned(stale), jaxpar.compiled_with({"xla_a": "true"}):
        jax.eval_shape(mlp(), X, UP, DOWN)
    with (
        jaxpar.tuned(tuning()),
        jaxpar.compiled_with({"xla_a": 3}),
        pytest.raises(ValueError, match="compiler options none, here there are xla_a=3;"),
    ):
        jax.eval_shape(mlp(), X, UP, DOWN)
    monkeypatch.setenv("LIBTPU_INIT_ARGS", "--xla_a --xla_b=3")
    for found in (stale, tuning()):  # of others nobody says that they matter
        with jaxpar.tuned(found):
            jax.eval_shape(mlp(), X, UP, DOWN)


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            None,
            "there is no file {0}; write it: jaxpar tune module:function -o {0}",
        ),
        ("{{", "{0} is no JSON: Expecting property name"),
        ("[]", "{0} does not have command, versions, device_kind, mesh, compiler_options, "),
        ('{{"sites": 3}}', "{0} does not have command, versions, device_kind, mesh, "),
        (
            '{{"command": "", "versions": {{}}, "device_kind": "", "mesh": {{}}, '
            '"compiler_options": {{}}, "sites": {{"a": []}}, "clock": "", "milliseconds": {{}}, '
            '"tried": {{}}}}',
            "{0} must have a way for each part of each of its sites",
        ),
    ],
)
def test_a_file_that_nobody_wrote(content, said, tmp_path):
    path = tmp_path / "tuned.json"
    if content is not None:
        path.write_text(content.format())
    for run in (jaxpar.jit(mlp(), tuned=path), lambda *_: jaxpar.tuned(path).__enter__()):
        with pytest.raises(ValueError, match=re.escape(f"tuned: {said.format(path)}")):
            run(X, UP, DOWN)
    with pytest.raises(ValueError, match="cannot be read: Is a directory; write it: jaxpar tune"):
        jaxpar.tuned(tmp_path).__enter__()
    path.write_text("[" * 100_000)
    with pytest.raises(ValueError, match=r"tuned.json is no JSON: maximum recursion depth"):
        jaxpar.tuned(path).__enter__()
    with pytest.raises(TypeError, match=r"tuned: tuning must be a path or a jaxpar.Tuning, got 3"):
        jaxpar.tuned(3).__enter__()
    with pytest.raises(TypeError, match=r"jit: tuned must be a path or a jaxpar.Tuning, got 3"):
        jaxpar.jit(mlp(), tuned=3)


def asked(local, *specs, mesh="fsdp=2,tp=4", args):
    mesh, trial = jaxpar.make_mesh(mesh), Trial({})
    mapped = jax.shard_map(local, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    with trying(trial):
        jax.eval_shape(mapped, *args)
    return list(trial.asked)


def all_gather(x):
    return jaxpar.all_gather(x, "tp")


def all_reduce(x):
    return jaxpar.all_reduce(x, "tp")


WRONG = {
    "command": [None, 3, ["jaxpar", "tune"]],
    "versions": [None, [], {"jax": None}, {"jax": 0.1}],
    "device_kind": [None, {}],
    "mesh": [None, 8, {"tp": "8"}, {"tp": None}, {"tp": 8.0}, {"tp": True}, {"tp": 0}],
    "compiler_options": [None, "-O3", {"xla_a": None}, {"xla_a": []}],
    "sites": [None, {"a": None}, {"a": {"forward": None}}, {"a": {"forward": ["naive"]}}],
    "clock": [None, 1],
    "milliseconds": [None, {"auto": "fast"}, {"auto": None}],
    "tried": [None, []],
}


@pytest.mark.parametrize("name", WRONG)
def test_a_file_with_a_field_that_is_missing_or_of_another_kind(name, tmp_path):
    path = tmp_path / "tuned.json"
    tuning().write(path)
    record = json.loads(path.read_text())
    again = "" if name == "command" else f"; write it again: {COMMAND}"
    for value in WRONG[name]:
        path.write_text(json.dumps(record | {name: value}))
        said = rf"^tuned: {re.escape(str(path))} must have .*but {name} is .*{re.escape(again)}"
        with pytest.raises(ValueError, match=said):
            jaxpar.tuned(path).__enter__()
    del record[name]
    path.write_text(json.dumps(record))
    with pytest.raises(ValueError, match=f"tuned.json does not have {name}; write it: jaxpar tune"):
        jaxpar.tuned(path).__enter__()


def test_a_file_with_a_field_that_no_tuning_has(tmp_path):
    path = tmp_path / "tuned.json"
    tuning().write(path)
    path.write_text(json.dumps(json.loads(path.read_text()) | {"more": 1}))
    with pytest.raises(ValueError, match="has 'more', which is no field of a tuning; write it"):
        jaxpar.tuned(path).__enter__()


def test_sites_have_names_that_tell_them_apart():
    x, labels = jnp.ones((32, 32)), jnp.zeros(32, jnp.int32)
    half = x.astype(jnp.bfloat16)
    heads = jnp.ones((1, 16, 2, 4))
    t, columns = P("tp"), P(None, "tp")
    found = {
        "all-gather of float32; 8x32": asked(all_gather, t, args=[x]),
        "all-reduce of float32; 8x32": asked(all_reduce, t, args=[x]),
        "all-reduce of bfloat16; 8x32": asked(all_reduce, t, args=[half]),
        "all-reduce of float32, sums in float32; 8x32": asked(
            lambda x: jaxpar.all_reduce(x, "tp", wire_dtype="float32"), t, args=[x]
        ),
        "causal float32; 3 of 1x4x2x4": asked(
            lambda q: layers.ring_attention(q, q, q, "tp"), columns, args=[heads]
        ),
        "float32; 3 of 1x4x2x4": asked(
            lambda q: layers.ring_attention(q, q, q, "tp", causal=False), columns, args=[heads]
        ),
        "all-reduce a of ak,kn->an, float32; 8x32, 32x32": asked(
            lambda x, w: jaxpar.matmul_all_reduce(x, w, "tp"), t, P(), args=[x, x]
        ),
        "float32; 8x32": asked(
            lambda x, w, ids: layers.vocab_parallel_cross_entropy(
                x, w, ids, "tp", sequence_dim=0
            ).sum(),
            *(t, columns, t),
            args=[x, x, labels],
        ),
    }
    for name, sites in found.items():
        assert [site.partition(": ")[2] for site, _ in sites] == [name]
    sites = [site for named in found.values() for site, _ in named]
    assert len({*sites}) == len(sites)
    kinds = {site.partition(": ")[0] for site in sites}
    assert kinds == {f"{k} over tp=4" for k in ("collective", "attention", "matmul", "loss")}


def test_weights_over_several_axes_are_one_site():
    found = asked(
        lambda x: layers.fsdp_gather(x, ("fsdp", "tp")), P(("fsdp", "tp")), args=[jnp.ones((8, 2))]
    )
    site = "weights over fsdp,tp=8: float32; 1x2"
    assert found == [(site, "forward")]
    mesh = jaxpar.make_mesh("fsdp=2,tp=4")
    ways = []

    def local():
        for mode in (AUTO, "unidirectional"):
            ring = Ring(("fsdp", "tp"), mode, size=8)
            ways.append(choose_stages(Problem("weights", ring, ((1, 2),), what="float32")))
        return jnp.zeros(())

    found = tuning({site: {"forward": "unidirectional"}}, mesh={"fsdp": 2, "tp": 4})
    with jaxpar.tuned(found):
        jax.eval_shape(jax.shard_map(local, mesh=mesh, in_specs=(), out_specs=P()))
    chosen, named = ways
    assert [(way.mode, way.ring.names) for way in chosen] == [
        (way.mode, way.ring.names) for way in named
    ]
    assert [way.mode for way in chosen] == ["unidirectional"] * 2


def test_rows_in_chunks_and_the_dispatch_of_tokens_are_decided_too():
    x, up, down = jnp.ones((32, 16)), jnp.ones((16, 32)), jnp.ones((32, 16))

    def gated(x, up, down):
        return layers.gated_mlp(x, up, up, down, "tp", sequence_dim=0)

    specs = (P("tp"), P(None, "tp"), P("tp"))
    mapped = jax.shard_map(gated, mesh=MESH, in_specs=specs, out_specs=P("tp"))
    trial = Trial({})
    with trying(trial):
        once = text(mapped, x, up, down)
    (site, part), *rest = trial.asked
    assert (site, part) == (
        "projection over tp=8: a block of float32; 4x16, 2 of 16x4, 4x16",
        "row chunks",
    )
    assert len(rest) == 4
    with jaxpar.tuned(tuning({site: {"row chunks": "2"}})):  # inside, modes are named
        twice = text(mapped, x, up, down)
    assert twice.count("all_gather") == 2 * once.count("all_gather") > 0

    def experts(x, up, down):
        routing = moe.route(jnp.ones((x.shape[0], 8)), 2)
        return moe.moe_layer(x, routing, {"up": up, "down": down}, "tp")[0]

    args = [jnp.ones((64, 4)), jnp.ones((8, 4, 8)), jnp.ones((8, 8, 4))]
    mapped = jax.shard_map(experts, mesh=MESH, in_specs=(P("tp"),) * 3, out_specs=P("tp"))
    site = "experts over tp=8: 2 of 8 for each token, float32; 8x4, 8x2"
    ragged = tuning({site: {"dispatch": "ragged"}})
    gathered = tuning(
        {
            site: {"dispatch": "all_gather"},
            **{
                site: {"forward": "naive"}
                for site, part in asked_of(mapped, args, {site: {"dispatch": "all_gather"}})
                if part == "forward"
            },
        }
    )
    texts = []
    for found in (ragged, gathered):
        with jaxpar.tuned(found):
            texts.append(text(mapped, *args))
    assert texts[0] != texts[1]


def asked_of(function, args, choices):
    trial = Trial(choices)
    with trying(trial):
        jax.eval_shape(function, *args)
    return list(trial.asked)


def test_equal_problems_are_one_site_and_versions_are_those_installed():
    ring = Ring(("tp",), "auto", size=4)
    one = Problem("matmul", ring, ((2, 3), (3, 4)), what="a")
    assert site_of(one) == site_of(replace(one, devices=7)) == "matmul over tp=4: a; 2x3, 3x4"
    assert site_of(replace(one, ring=replace(ring, size=8))) != site_of(one)
    assert versions("jax", "no-such-package") == {"jax": jax.__version__}
