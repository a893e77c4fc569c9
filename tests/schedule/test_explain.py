"""Seeded mistakes are found, with their line, their cause, an edit and what it gains."""

import json
import re
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import equinox
import jax
import jax.numpy as jnp
import mistakes
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from traces import NS, Core, Plane, write

import jaxpar
from jaxpar.arguments.unit_text import us
from jaxpar.mesh import ring_hops
from jaxpar.schedule import (
    Chip,
    CompiledProgram,
    Event,
    Memory,
    compile_for,
    explain,
    read_trace,
    target,
    timeline,
)
from jaxpar.tools.explain.causes import Rules
from jaxpar.tools.explain.edits import Edits
from jaxpar.tools.explain.explanation_text import compared, gain, text_of
from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.explain.overheads import overheads
from jaxpar.tools.explain.program_arguments import as_namesakes
from jaxpar.tools.explain.verdict import CAUSES
from jaxpar.tools.explain.windowed import WindowedEinsums
from jaxpar.tools.program.costs import Demand, Matmul

# Of each mistake: the target, its mesh, the cause, a part of the edit, whether it can be tried.
SEEDED = {
    "heads_on_the_wrong_axis": (
        *("v5e:2x4", "dp=2,tp=4", "resharding", "shard params['k'], params['q'] by P(None, 'tp'"),
        True,
    ),
    "constraint_that_gathers": (
        *(
            "v5e:2x4",
            "dp=2,tp=4",
            "resharding",
            "remove with_sharding_constraint at mistakes.py",
        ),
        True,
    ),
    "gather_in_a_loop": ("v5p:2x2x2", "fsdp=8", "sent twice", "gather before the scan", True),
    "gather_as_a_sum": ("v5e:2x2", "fsdp=4", "in disguise", "jax.lax.all_gather in place", False),
    "gather_behind_a_barrier": (
        *("v5p:2x2x1", "tp=4", "sent twice", "remove optimization_barrier"),
        True,
    ),
    "checkpoint_that_gathers_again": (
        *("v5p:2x2x2", "tp=8", "sent twice", "save_only_these_names"),
        True,
    ),
    "float32_gradients": ("v5e:2x2", "dp=4", "wide dtype", "in bfloat16", True),
    "mesh_in_the_wrong_order": (
        "v5e:4x8",
        "dp=4,tp=8",
        "links apart",
        "make_mesh('dp=4,tp=8')",
        True,
    ),
    "naive_tensor_parallelism": ("v5p:2x2x1", "tp=4", "synchronous", "collective_einsum", True),
    "small_sums": ("v5p:2x2x2", "tp=8", "latency", "several small arrays as one", False),
    "barrier_before_work": ("v5p:2x2x1", "tp=4", "ordered elsewhere", "optimization_barrier", True),
    "two_on_the_same_links": ("v5p:2x2x1", "tp=4", "links busy", "the other direction", False),
    "coarse_chunks": ("v5p:2x2x2", "tp=8", "ends of a pipeline", "mode='bidirectional'", True),
    "loop_that_copies": ("v5p:2x2x1", "tp=4", "copies", "", False),
}
MARK = "# the mistake"
# A half of the tries is for what waits the longest: one edit. Some need others, of more arguments.
TRIES = {"heads_on_the_wrong_axis": 6, "naive_tensor_parallelism": 3}


def line_of_the_mistake(name):
    """The numbers of the lines that are marked in the function of this name."""
    lines = Path(mistakes.__file__).read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.startswith(f"def {name}("))
    later = (n for n, line in enumerate(lines[first + 1 :], first + 1) if line.startswith("def "))
    last = next(later, len(lines))
    return {n + 1 for n in range(first, last) if MARK in lines[n]}


@pytest.mark.parametrize("name", SEEDED)
def test_a_mistake_is_found(name):
    where, mesh, cause, edit, is_tried = SEEDED[name]
    chosen, make = target(where, mesh), getattr(mistakes, name)
    # Without the options of the chip, gathers on v5p are synchronous.
    options = {} if name == "naive_tensor_parallelism" else None
    step, args = make(chosen.mesh, False)
    found_on = chosen
    if name == "mesh_in_the_wrong_order":
        found_on = replace(chosen, mesh=mistakes.disordered(chosen.mesh))
    program = compile_for(step, found_on, *args, compiler_options=options)
    found = explain(program, tries=TRIES.get(name, 2))
    (finding, *_) = [one for one in found.findings if one.cause == cause]
    assert finding.of.line is not None
    assert finding.of.line.file == mistakes.__file__
    (line,) = line_of_the_mistake(name)
    assert finding.of.line.number == line or f"mistakes.py:{line}" in finding.edit
    assert edit in finding.edit
    assert bool(finding.gain) == is_tried
    if is_tried:
        step, args = make(chosen.mesh, True)
        mended = timeline(compile_for(step, chosen, *args, compiler_options=options)).total
        now = found.timeline.total
        assert now - mended > 0.03 * now
        assert finding.gain == pytest.approx(now - mended, rel=0.08)
        assert finding.tried[0].seconds == pytest.approx(mended, rel=0.05)


def test_what_there_is_no_memory_to_keep_is_not_sent_twice():
    chosen = target("v5p:2x2x1", "tp=4")
    step, args = mistakes.gather_behind_a_barrier(chosen.mesh, False)
    program = compile_for(step, chosen, *args)
    assert chosen.chip is not None
    small = replace(chosen.chip, capacity=float(program.memory.peak))
    found = explain(replace(program, target=replace(chosen, chip=small)), tries=0)
    assert "sent twice" not in {finding.cause for finding in found.findings}


def test_a_mesh_for_the_axis_that_waits_is_named_with_its_order():
    """Also where the mesh has a dozen axes of one device, as trainers' have."""
    ones = [f"one{n}" for n in range(12)]
    chosen = target("v5e:4x4", ",".join(("dp=2", *(f"{name}=1" for name in ones), "tp=8")))
    plain = mistakes.disordered(chosen.mesh)
    x = jax.ShapeDtypeStruct((512,), jnp.float32, sharding=P("dp"))
    program = compile_for(jnp.sin, replace(chosen, mesh=plain), x)
    for axis in ("dp", "tp"):
        (edit,) = Edits(program).order([axis])
        (shape,) = re.findall(r"make_mesh\('(.*)'\)", edit.text)
        made = jaxpar.make_mesh(shape, devices=list(plain.devices.flat))
        assert ring_hops(plain, axis).max() > 1
        assert ring_hops(made, axis).max() == 1
        on = edit.compiled().target.mesh
        assert on.axis_names == plain.axis_names
        assert ring_hops(on, axis).max() == 1


def update(params, moments, gradients):
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda w, m: w - 0.01 * m, params, moments), moments


def weights(*spec):
    shapes = {"down": (2048, 1024), "up": (1024, 2048)}
    return {
        name: jax.ShapeDtypeStruct(shape, jnp.float32, sharding=P(*spec))
        for name, shape in shapes.items()
    }


@pytest.mark.parametrize("with_shardings", [False, True])
def test_moments_that_lie_otherwise_than_their_weights(with_shardings):
    """Also of a function that is jitted with the shardings of its arguments, as trainers' are."""
    chosen, lies, other = target("v5e:2x2", "tp=4"), (None, "tp"), ("tp", None)
    args = weights(*lies), (weights(*other),), weights(*lies)

    def step(w, m, g):
        return update(w, m[0], g)

    if with_shardings:

        def on(spec):
            return NamedSharding(chosen.mesh, P(*spec))

        step = jax.jit(step, in_shardings=(on(lies), on(other), on(lies)), donate_argnums=(0, 1))
    found = explain(compile_for(step, chosen, *args), tries=2)
    mended = compile_for(update, chosen, *[weights(*lies)] * 3)
    finding = found.findings[0]
    assert finding.cause == "resharding"
    assert finding.edit == "shard m[0]['down'], m[0]['up'] like w['down'], w['up']"
    saved = found.timeline.total - timeline(mended).total
    assert saved > 0.3 * found.timeline.total
    assert finding.gain == pytest.approx(saved, rel=0.01)


def test_arguments_of_the_same_names():
    def leaf(*spec, shape=(8, 8)):
        return jax.ShapeDtypeStruct(shape, jnp.float32, sharding=NamedSharding(mesh, P(*spec)))

    mesh = target("v5e:2x2", "tp=4").mesh
    leaves = {
        "state.params['up']": leaf("tp"),
        "state.opt[0].mu['up']": leaf("tp", None),  # as it is
        "state.opt[0].nu['up']": leaf(None, "tp"),
        "model.layers[0].w": leaf(None, "tp"),
        "model.layers[1].w": leaf("tp"),  # another layer
        "moments[0].layers[0].w": leaf("tp"),
        "moments[0].layers[1].w": leaf(None, "tp", shape=(8, 16)),  # of another shape
        "x": leaf("tp"),
        "y": leaf(None, "tp"),
    }
    assert as_namesakes(leaves) == {
        "state.opt[0].nu['up']": "state.params['up']",
        "moments[0].layers[0].w": "model.layers[0].w",
    }


def test_arguments_that_change_together_are_tried_once():
    x = jax.ShapeDtypeStruct((256, 256), jnp.float32, sharding=P("tp"))
    program = compile_for(lambda v, w: v + w, target("v5e:2x2", "tp=4"), x, x)
    edits = {edit.text for edit in Edits(program).shardings(["w", "v"], ["tp"])}
    assert edits == {
        f"shard {names} by P(None, 'tp') in place of P('tp')" for names in ("v, w", "v", "w")
    }


def test_an_edit_of_two_arguments_counts_once():
    x = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
    w = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P(None, "tp"))
    program = compile_for(lambda x, v, w: x @ (v + w), target("v5e:2x2", "tp=4"), x, w, w)
    (finding, *_) = explain(program, tries=6).findings
    both = [one.edit for one in finding.tried if re.match("shard (v, w|w, v) by", one.edit)]
    assert len(both) == 1


def test_each_cause_has_a_mistake_but_the_last_one_and_what_only_new_jax_has():
    causes = {seeded[2] for seeded in SEEDED.values()}
    assert set(CAUSES) - causes == {
        *("nothing to hide behind", "start alone", "windowed einsums"),
        "recomputed by the compiler",
    }


def started(program, name="all_gather"):
    """The same program as if it had written a start and a done of its own."""
    return replace(program, text=program.text.replace(f'/{name}"', f'/{name}_done"'))


@pytest.mark.parametrize("name", ["all_gather", "all_gather_reduced"])
def test_a_start_that_the_compiler_makes_synchronous(name):
    program = gather_matmul(2048, chip="v5e:2x2")
    (plain,) = explain(program, tries=0).findings
    assert plain.cause == "synchronous"
    text = program.text.replace('/all_gather"', f'/{name}"')
    (finding,) = explain(started(replace(program, text=text), name), tries=0).findings
    assert not finding.of.inserted
    assert finding.cause == "start alone"
    assert "a start that does not overlap" in finding.why
    assert "the compiler makes it synchronous" in finding.why
    assert "ppermutes" in finding.edit


def test_a_start_that_overlaps_and_one_with_its_done_at_once():
    program = gather_matmul(2048)
    (finding,) = explain(started(program), tries=0).findings
    assert finding.cause == "start alone"
    assert "computes almost nothing before its done" in finding.why
    assert "between the start and the done" in finding.edit
    assert "start alone" not in {one.cause for one in explain(program, tries=0).findings}

    def local(x, y, v, w):
        whole = lax.all_gather(x, "tp", tiled=True)
        return whole @ w, y @ v

    specs = (P("tp"), P("tp"), P(), P(None, "tp"))
    step = jax.shard_map(local, in_specs=specs, out_specs=(P(None, "tp"), P("tp")))
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=P("tp"))
    v = jax.ShapeDtypeStruct((2048, 4096), jnp.bfloat16, sharding=P())
    w = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=P(None, "tp"))
    program = started(compile_for(step, target("tpu7x:2x2x1", "tp=-1"), x, x, v, w))
    (finding, *_) = explain(program, tries=0).findings
    assert finding.of.covered > 0.1 * finding.of.transfer
    assert finding.cause != "start alone"


def layer(x, w):
    return lax.all_gather(x, "tp", tiled=True) @ w


@cache
def gather_matmul(rows, compiler_options=None, chip="tpu7x:2x2x1"):
    chosen = target(chip, "tp=-1")
    step = jax.shard_map(layer, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
    x = jax.ShapeDtypeStruct((rows, 2048), jnp.bfloat16, sharding=P("tp"))
    w = jax.ShapeDtypeStruct((2048, 16384), jnp.bfloat16, sharding=P(None, "tp"))
    return compile_for(step, chosen, x, w, compiler_options=compiler_options)


@cache
def explained():
    return explain(gather_matmul(2048), tries=1)


def test_an_asynchronous_gather_with_nothing_to_hide_behind():
    found = explained()
    (finding,) = found.findings
    assert finding.cause == "nothing to hide behind"
    assert finding.of.collective == "all-gather"
    assert finding.of.axes == ("tp",)
    assert not finding.of.inserted
    assert "dot_general" in finding.of.after
    assert finding.of.bytes == 2048 * 2048 * 2 * 7 / 8
    assert "collective_einsum" in finding.edit
    assert finding.gain > 0


def test_an_edit_is_shown_once():
    record = explained().record()
    (finding,) = record["findings"]
    untried = {**finding, "gain": None, "tried": []}
    text = text_of({**record, "findings": [untried, finding, untried, finding]})
    assert text.count("collective_einsum") == 3
    (told,) = re.findall(r"4\. .*?edit:  (.*?)\n\n", text, re.DOTALL)
    assert told == "the edit of finding 2 mends this, too"


def test_a_permute_is_not_told_to_become_a_gather():
    def local(x, w):
        return lax.ppermute(x, "tp", [(0, 1), (1, 0), (2, 3), (3, 2)]) @ w

    step = jax.shard_map(local, in_specs=(P("tp"), P()), out_specs=P("tp"))
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=P("tp"))
    w = jax.ShapeDtypeStruct((4096, 128), jnp.bfloat16, sharding=P())
    (finding,) = explain(compile_for(step, target("v5e:2x2", "tp=4"), x, w)).findings
    assert (finding.of.collective, finding.cause) == (
        "collective-permute",
        "nothing to hide behind",
    )
    assert "all_gather_matmul" not in finding.edit
    assert "needs it at once" in finding.why


@pytest.mark.parametrize(
    ("what", "told"),
    [("lookup", False), ("product", True), ("gather", False), ("gathered product", True)],
)
def test_only_what_is_beside_a_matmul_is_told_to_split_it(what, told):
    """Rows looked up in a table that lies in parts are summed, as parts of a product are."""

    def local(ids, table, x):
        if what == "lookup":
            mine = ids - 1024 * lax.axis_index("tp")
            is_here = (mine[:, None] >= 0) & (mine[:, None] < 1024)
            return lax.psum(jnp.where(is_here, table[mine % 1024], 0), "tp")
        if what == "product":
            return lax.psum(x @ table, "tp")
        whole = lax.all_gather(table, "tp", tiled=True)
        return jnp.sin(whole) if what == "gather" else jnp.sin(whole) @ x.T

    step = jax.shard_map(
        local, in_specs=(P(), P("tp"), P(None, "tp")), out_specs=P(), check_vma=False
    )
    ids = jax.ShapeDtypeStruct((8192,), jnp.int32, sharding=P())
    table = jax.ShapeDtypeStruct((4096, 1024), jnp.bfloat16, sharding=P("tp"))
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=P(None, "tp"))
    program = compile_for(step, target("v5e:2x2", "tp=4"), ids, table, x)
    exposures = Exposures(program, timeline(program))
    (exposed,) = exposures.found()
    *_, last = Rules(exposures, Edits(program)).of(exposed)
    assert exposures.is_beside_a_matmul(exposed.name) == told
    assert ("matmul_reduce_scatter" in last.edit) == told


def test_nothing_to_mend_only_near_the_floor():
    chosen = target("v5e:2x2", "tp=4")
    x = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=P("tp"))
    w = jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16, sharding=P())
    found = explain(compile_for(lambda x, w: x @ w, chosen, x, w))
    assert found.findings == ()
    floor = f"{found.floor.total * 1e6:.4g} us"
    assert floor in found.text()
    assert found.timeline.exposed == 0
    assert 0.8 < found.utilisation <= 1
    record = found.record()

    def of(times):
        text = text_of({**record, "seconds": times * found.floor.total})
        return " ".join(text.split())

    assert "nothing to mend here" in of(1.04)
    above, far = of(1.16), of(3)
    matmul = us(found.timeline.compute)  # all of this program's compute
    assert found.timeline.total > 1.05 * found.floor.total
    for text in (above, far, " ".join(found.text().split())):
        assert "nothing to mend" not in text
        assert f"Matmuls take {matmul} ({us(found.floor.compute)} at the chip's peak)" in text
        assert ", waits for transfers" not in text  # there are none
    assert f"waits for copies {us(found.timeline.total - found.timeline.compute)}" in found.text()
    assert "no transfer to mend: the step takes" in above
    assert f"16% above its floor of {floor}." in above
    assert "3.0 times its floor" in far
    assert "unsharded on a mesh axis" in far
    none = " ".join(text_of({**record, "floor": {"compute": 0.0, "transfer": 0.0}}).split())
    assert "it has no matmuls and sends nothing: it has no floor" in none
    assert "less than 0 us" not in none
    assert "nothing to mend" not in none
    assert "no transfer to mend" in none


def test_why_no_edit_was_tried():
    record = explain(gather_matmul(2048), tries=0).record()
    (finding,) = record["findings"]
    assert gain(record, finding) == "not tried: 2 more edits can be tried: raise tries"
    assert "1 more edit can" in gain(record, {**finding, "left": 1})
    assert gain(record, {**finding, "left": 0}) == "not tried: jaxpar cannot make this edit itself"
    short = {**finding, "of": {**finding["of"], "seconds": 0.006 * record["seconds"]}}
    assert "less than 1% of the step" in gain(record, short)


def test_an_overlapped_matmul_raises_no_alarm():
    from jaxpar import all_gather_matmul

    chosen = target("v5e:2x2", "tp=4")
    x = jax.ShapeDtypeStruct((16384, 8192), jnp.bfloat16, sharding=P("tp"))
    w = jax.ShapeDtypeStruct((8192, 28672), jnp.bfloat16, sharding=P(None, "tp"))
    step = jax.shard_map(
        lambda x, w: all_gather_matmul(x, w, "tp", mode="bidirectional"),
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )
    found = explain(compile_for(step, chosen, x, w))
    assert found.timeline.total < 1.2 * found.floor.total
    assert all(not finding.gain for finding in found.findings)


def test_memory_is_made_up_of_named_arrays():
    program = gather_matmul(2048, chip="v5e:2x2")
    found = explain(program, tries=0)
    names = {live.what for live in found.at_peak}
    assert {"x", "w"} <= names
    total = sum(live.bytes for live in found.at_peak)
    assert total == pytest.approx(program.memory.peak, rel=0.25)
    assert [live.bytes for live in found.at_peak] == sorted(
        (live.bytes for live in found.at_peak), reverse=True
    )


def test_its_record_is_json_and_compares_with_another():
    slow, fast = explain(gather_matmul(2048), tries=0), explain(gather_matmul(1024), tries=0)
    record = json.loads(slow.json())
    assert record["seconds"] == slow.timeline.total
    assert record["findings"][0]["of"]["line"]["number"] == layer.__code__.co_firstlineno + 1
    assert len(record["events"]) == len(slow.timeline.events)
    text = compared(record, json.loads(fast.json()))
    assert "better:" in text
    assert "all-gather over tp, test_explain.py, layer, forward" in text
    assert "worse:" in compared(json.loads(fast.json()), record)
    assert "on other devices" not in text
    moved = compared({**record, "mesh": {"dp": 4}}, record)
    assert "on other devices: tpu7x:2x2x1 (tp=8), before tpu7x:2x2x1 (dp=4)" in moved


def test_of_gpus():
    found = explain(gather_matmul(2048, chip="h100:8"), tries=2)
    (finding, *_) = found.findings
    assert finding.of.links_there == 1
    assert finding.of.line.number == layer.__code__.co_firstlineno + 1
    assert found.timeline.estimate in " ".join(found.text().split())  # lines may be broken in it


def test_a_cached_program_is_not_compiled_again(tmp_path, monkeypatch):
    chosen = target("v5e:2x2", "tp=4")
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=P("tp"))
    first = compile_for(jnp.sin, chosen, x, cache=tmp_path)
    monkeypatch.setattr("jaxpar.tools.timeline.timeline._text_and_memory", None)  # cannot be called
    again = compile_for(jnp.sin, chosen, x, cache=tmp_path)
    assert (again.text, again.memory) == (first.text, first.memory)
    with pytest.raises(TypeError):
        compile_for(jnp.cos, chosen, x, cache=tmp_path)
    with pytest.raises(TypeError):  # of other devices
        compile_for(jnp.sin, target("v5e:2x4", "tp=8"), x, cache=tmp_path)


def test_a_broken_cache_is_written_again(tmp_path):
    chosen = target("v5e:2x2", "tp=4")
    x = jax.ShapeDtypeStruct((512, 512), jnp.float32, sharding=P("tp"))
    first = compile_for(jnp.sin, chosen, x, cache=tmp_path)
    (path,) = tmp_path.iterdir()
    path.write_bytes(b"no archive")
    assert compile_for(jnp.sin, chosen, x, cache=tmp_path).text == first.text


def test_wrong_calls():
    with pytest.raises(TypeError, match="explain: program must be what compile_for returns"):
        explain("step")
    program = gather_matmul(2048)
    for tries in (-1, 1.5, "ten", "10 hours", "-1min", None):
        with pytest.raises(ValueError, match=f"explain: tries must be a number of .*got {tries!r}"):
            explain(program, tries=tries)
    with pytest.raises(ValueError, match="explain: findings=-1 must not be negative"):
        explain(program, findings=-1)


def test_programs_that_use_nothing_of_jaxpar():
    chosen = target("v5e:2x4", "dp=2,tp=4")
    specs = {"up": P("tp", None), "down": P(None, "tp")}  # each by the wrong dimension
    sharded = {name: NamedSharding(chosen.mesh, spec) for name, spec in specs.items()}
    over_rows = NamedSharding(chosen.mesh, P("dp"))
    x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=over_rows)

    class Mlp(nnx.Module):
        def __init__(self, rngs):
            self.up = nnx.Linear(512, 2048, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)
            self.down = nnx.Linear(2048, 512, use_bias=False, dtype=jnp.bfloat16, rngs=rngs)

        def __call__(self, x):
            return self.down(nnx.relu(self.up(x)))

    graph, state = nnx.split(nnx.eval_shape(lambda: Mlp(nnx.Rngs(0))))
    state = jax.tree.map_with_path(
        lambda path, w: jax.ShapeDtypeStruct(
            w.shape,
            jnp.bfloat16,
            sharding=sharded["up" if "up" in str(path) else "down"],
        ),
        state,
    )
    found = explain(
        compile_for(lambda state, x: nnx.merge(graph, state)(x), chosen, state, x), tries=1
    )
    finding = found.findings[0]
    assert finding.of.inserted
    assert finding.of.line.file == __file__
    assert finding.of.line.function.endswith("__call__")
    assert finding.cause == "resharding"
    assert finding.gain > 0

    class Layer(equinox.Module):
        up: jax.Array
        down: jax.Array

        def __call__(self, x):
            return jax.nn.relu(x @ self.up) @ self.down

    shapes = {"up": (512, 2048), "down": (2048, 512)}
    model = Layer(
        *(
            jax.ShapeDtypeStruct(shapes[name], jnp.bfloat16, sharding=sharded[name])
            for name in ("up", "down")
        )
    )
    found = explain(compile_for(lambda model, x: model(x), chosen, model, x), tries=0)
    assert found.findings[0].of.inserted
    assert found.findings[0].of.line.function.endswith("__call__")
    assert np.isfinite(found.utilisation)


def test_the_devices_at_hand():
    here = target("here", "dp=2,tp=4")
    assert (here.mesh.shape, here.chip) == ({"dp": 2, "tp": 4}, None)
    x = jax.ShapeDtypeStruct((512, 256), jnp.float32, sharding=P("tp"))
    w = jax.ShapeDtypeStruct((256, 512), jnp.float32, sharding=P(None, "tp"))
    step = jax.shard_map(layer, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
    program = compile_for(step, here, x, w)
    with pytest.raises(ValueError, match="cpu"):
        explain(program)
    chip = Chip("cpu", flops=1e11, hbm=1e10, capacity=1e10, link=1e9, torus=False)
    found = explain(replace(program, target=replace(here, chip=chip)), tries=1)
    assert found.findings[0].of.collective == "all-gather"
    assert found.findings[0].of.line.number == layer.__code__.co_firstlineno + 1


def test_arguments_that_are_no_arrays():
    chosen = target("v5e:2x2", "dp=2,tp=2")
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=P("dp"))
    w = jax.ShapeDtypeStruct((2048, 2048), jnp.bfloat16, sharding=P("tp"))
    found = explain(compile_for(lambda x, w, rate: x @ w * rate, chosen, x, w, 0.5), tries=2)
    assert found.findings[0].cause == "resharding"
    assert "shard w by P(None, 'tp')" in found.findings[0].edit


# -- of what was measured --------------------------------------------------------------------------


def measured(program, folder, **ns):
    """A run of a program for TPUs, with times of our own."""
    core = Core(program, Plane("/device:TPU:0"), {**NS, **ns})
    core.run(0)
    return read_trace(write(folder, core.plane), program)


def test_a_measured_step(tmp_path):
    program = gather_matmul(2048)
    found = measured(program, tmp_path, compute=100_000, done=900_000)
    predicted = timeline(program)
    told = explain(program, measured=found, tries=1)
    assert told.timeline is found
    assert told.predicted == predicted
    finding = told.findings[0]
    assert finding.of.seconds == pytest.approx((900_000 + NS["start"]) * 1e-9)
    assert (finding.of.collective, finding.of.axes) == ("all-gather", ("tp",))
    assert finding.cause == explain(program, tries=0).findings[0].cause
    # The gain is that of the model, not of what was measured.
    best = finding.tried[0]
    assert finding.gain == pytest.approx(predicted.total - best.seconds)
    text = " ".join(told.text().split())
    assert f"took {us(found.total)}; it waited {us(found.exposed)}" in text
    assert f"(measured; the prediction is {us(predicted.total)}, by the compiler's cycles)" in text
    assert f"{us(best.seconds)} in place of {us(predicted.total)}, both predicted, " in text
    record = json.loads(told.json())
    assert record["predicted"]["seconds"] == predicted.total
    assert "not measured" not in text


def test_side_by_side(tmp_path):
    program = gather_matmul(2048)
    found = measured(program, tmp_path, compute=100_000, done=900_000)
    extra = Event("copy.of.another", "", "compute", "compute", 0.0, 3e-6)
    told = explain(program, measured=replace(found, events=(*found.events, extra)), tries=0)
    predicted = timeline(program)
    assert {(one.name, one.kind) for one in told.instructions} == {
        (event.name, event.kind) for event in (*predicted.events, *found.events, extra)
    }
    for one in told.instructions:
        for timed, seconds in ((predicted, one.predicted), (found, one.measured)):
            own = [e for e in timed.events if (e.name, e.kind) == (one.name, one.kind)]
            if one.name != extra.name:
                assert seconds == (pytest.approx(sum(e.seconds for e in own)) if own else None)
    (alone,) = [one for one in told.instructions if one.name == extra.name]
    assert (alone.predicted, alone.measured, alone.ratio, alone.line) == (None, 3e-6, None, None)
    wait = told.findings[0].of
    (one,) = [one for one in told.instructions if (one.name, one.kind) == (wait.name, "wait")]
    assert one.ratio == pytest.approx(wait.seconds / one.predicted)
    assert one.line == wait.line
    text = " ".join(told.text().split())
    assert f"wait {wait.name}, {wait.line}" in text
    alone = [one for one in told.instructions if one.predicted is None and one.measured]
    entries = "1 entry" if len(alone) == 1 else f"{len(alone)} entries"
    assert f"only measured: {entries} of {us(sum(one.measured for one in alone))}" in text
    assert explain(program, tries=0).instructions == ()


def test_a_measured_step_of_a_chip_without_figures(tmp_path):
    here = target("here", "dp=2,tp=4")
    step = jax.shard_map(layer, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp"))
    sizes = ((512, 256), P("tp")), ((256, 512), P(None, "tp"))
    args = [
        jax.device_put(np.ones(shape, np.float32), NamedSharding(here.mesh, spec))
        for shape, spec in sizes
    ]
    program = compile_for(step, here, *args)
    with jax.set_mesh(here.mesh):
        jax.block_until_ready(run := jax.jit(step)(*args))
        with jax.profiler.trace(tmp_path):
            jax.block_until_ready(jax.jit(step)(*args))
    assert run.shape == (512, 512)
    told = explain(program, measured=read_trace(tmp_path, program))
    assert told.predicted is None
    finding = told.findings[0]
    assert finding.of.collective == "all-gather"
    assert finding.of.line.number == layer.__code__.co_firstlineno + 1
    assert (finding.tried, finding.gain) == ((), 0.0)
    text = " ".join(told.text().split())
    assert "gain: unknown: nothing is predicted for this chip" in text
    assert "no figures of the chip are published, so nothing is predicted" in text
    assert "no schedule of it takes less" not in text
    assert all(one.predicted is None and one.measured is not None for one in told.instructions)


def test_a_prediction_is_no_measurement():
    program = gather_matmul(2048)
    with pytest.raises(ValueError, match="explain: measured must be from read_trace, got a "):
        explain(program, measured=timeline(program))


def test_a_run_of_another_function(tmp_path):
    program = gather_matmul(2048)
    found = measured(program, tmp_path)
    assert any(event.op.startswith("jit(layer)/") for event in found.events)
    moved = [replace(e, op=e.op.replace("jit(layer)", "jit(other)")) for e in found.events]
    with pytest.raises(ValueError, match=r"measured is a run of jit\(other\), not of jit\(layer\)"):
        explain(program, measured=replace(found, events=tuple(moved)))
    unnamed = [replace(event, op="") for event in found.events]  # a trace may not say it
    assert explain(program, measured=replace(found, events=tuple(unnamed)), tries=0).findings


@pytest.mark.parametrize(
    ("dtype", "sum_dtype", "evidence"),
    [
        (jnp.float8_e4m3fn, jnp.float32, "had 1 before it was sent"),
        (jnp.int16, jnp.int32, "had 2 before it was sent"),
        (bool, jnp.int32, None),  # a count, which has no room in a flag
    ],
)
def test_numbers_of_any_width_that_travel_in_wider_ones(dtype, sum_dtype, evidence):
    chips = target("v5e:2x2")
    x = jax.ShapeDtypeStruct((4096, 1024), dtype, sharding=P("tp"))
    summed = jax.shard_map(
        lambda x: lax.psum(x.astype(sum_dtype), "tp"), in_specs=P("tp"), out_specs=P()
    )
    first = explain(compile_for(summed, chips, x), tries=0).findings[0]
    assert (first.cause == "wide dtype") == (evidence is not None)
    assert evidence is None or first.why == f"each number travels in 4 bytes, and {evidence}"


def test_what_is_in_vmem_is_not_bound_by_memory():
    """Nor are numbers of 32 bits, which take twice as long to multiply."""

    def kinds(*, in_vmem, width=2.0, flops=5e9, is_matmul=True):
        chip = target("v6e:2x2").chip
        matmuls = (Matmul(flops, width),) if is_matmul else ()
        work = Demand(None, matmuls, 32 * 2**20, in_vmem, is_matmul=is_matmul)
        home = (None, SimpleNamespace(work=work))
        i = SimpleNamespace(name="dot", results=(), inside=(), opcode="fusion")
        exposures = SimpleNamespace(
            homes={"dot": home},
            recomputed=frozenset(),
            chip=chip,
            events=[Event("dot", "", "compute", "compute", 0.0, 1e-5, is_matmul=True)],
            instruction=lambda name: i,
            origin=lambda i: ("jit(f)/dot_general", ()),
            loop_around=lambda name: None,
            sources=SimpleNamespace(chain=lambda lines: ()),
        )
        return [one.kind for one in overheads(exposures, WindowedEinsums(frozenset(), frozenset()))]

    assert kinds(in_vmem=0) == ["HBM-bound matmuls"]
    assert kinds(in_vmem=32 * 2**20) == []
    assert kinds(in_vmem=0, flops=15e9) == ["HBM-bound matmuls"]
    assert kinds(in_vmem=0, flops=15e9, width=4.0) == []
    assert kinds(in_vmem=0, is_matmul=False) == ["passes over memory"]
    assert kinds(in_vmem=32 * 2**20, is_matmul=False) == []


AGAIN = """
%product (x: bf16[2048,1024], y: bf16[1024,1024]) -> bf16[2048,1024] {
  %x = bf16[2048,1024]{1,0} parameter(0)
  %y = bf16[1024,1024]{1,0} parameter(1)
  ROOT %dot = bf16[2048,1024]{1,0} convolution(%x, %y), dim_labels=bf_io->bf
}

ENTRY %main (x: bf16[2048,1024], w: bf16[1024,1024]) -> (bf16[2048,1024], bf16[2048,1024]) {
  %param = bf16[2048,1024]{1,0} parameter(0)
  %param.1 = bf16[1024,1024]{1,0} parameter(1)
  FUSION(%fusion.1, %param, jit(f)/jvp()/dot_general)
  FUSION(%fusion.2, %fusion.1, jit(f)/jvp()/dot_general)
  FUSION(%fusion.3.remat, %fusion.2, jit(f)/transpose(jvp())/dot_general)
  FUSION(%fusion.1.remat, %param, jit(f)/jvp()/dot_general)
  FUSION(%fusion.1.remat2, %fusion.1.remat, jit(f)/jvp()/dot_general)
  ROOT %tuple = (bf16[2048,1024], bf16[2048,1024]) tuple(%fusion.3.remat, %fusion.1.remat2)
}
"""


def test_what_the_compiler_computes_again_for_want_of_room():
    """As libtpu names it; what it only moved, under such a name too, is computed once."""
    written = re.sub(
        r"FUSION\((.*), (.*), (.*)\)",
        r"\1 = bf16[2048,1024]{1,0} fusion(\2, %param.1), kind=kOutput, calls=%product, "
        r'metadata={op_name="\3"}, backend_config={"estimated_cycles":"90000"}',
        AGAIN,
    )
    text = f"HloModule test, is_scheduled=true, num_partitions=4\n{written}"
    v5e, memory = target("v5e:2x2"), Memory(0, 0, 0, 0, peak=16 * 2**30 - 2**20)
    found = explain(CompiledProgram(v5e, text, memory, 0.0, None), tries=0)
    (finding,) = found.findings
    assert finding.cause == "recomputed by the compiler"
    once = found.timeline.total / 5
    assert finding.of.seconds == pytest.approx(2 * once)
    assert "2 instructions, most of bf16[2048,1024], compute 8 MiB again" in finding.why
    assert "the peak is 16 GiB of 16 GiB, and with all of them 7 MiB would be short" in finding.why
    assert "jax.checkpoint" in finding.edit
    assert "recomputed by the compiler" in found.text()
    seen = Exposures(found.program, found.timeline)
    phases = [seen.phase(f"fusion.{n}", "jit(f)/jvp()") for n in ("1", "1.remat", "3.remat")]
    assert phases == ["forward", "recomputation", "forward"]
