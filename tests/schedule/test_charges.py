"""Waits are charged to the transfers that hold the links, not to what stands behind them."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar.platforms.chips import NO_FIGURES
from jaxpar.schedule import Event, compile_for, explain, target, timeline
from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.timeline.links import Links
from jaxpar.tools.timeline.queueing import Charges

UP, DOWN = [(i, (i + 1) % 4) for i in range(4)], [(i, (i - 1) % 4) for i in range(4)]


def local(x, w, other, s, v):
    big, back = lax.ppermute(w, "tp", UP), lax.ppermute(other, "tp", DOWN)
    small = lax.ppermute(s, "tp", UP)
    return (((x * small[0]) @ v) @ big) @ back


def compiled(where):
    mesh = "tp=4" if where.startswith("v") else "dp=2,tp=4"
    shapes = ((2048, 512), (2048, 8192), (4 * 8192, 512), (8,), (512, 512))
    specs = (P("tp"), P("tp"), P("tp"), P("tp"), P())
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec)
        for shape, spec in zip(shapes, specs, strict=True)
    ]
    step = jax.shard_map(local, in_specs=specs, out_specs=P("tp"), check_vma=False)
    return compile_for(step, target(where, mesh), *args)


@pytest.fixture(scope="module")
def tpu():
    return compiled("v5p:2x2x1")


def sent(program):
    """The transfers of a program by what they are: up, down and small."""
    by_bytes = sorted(timeline(program).transfers, key=lambda e: e.bytes)
    small, *big = by_bytes
    up, down = sorted(big, key=lambda e: e.row != small.row)
    return {"small": small, "up": up, "down": down}


@pytest.fixture(scope="module")
def charges(tpu):
    return Charges(tpu, Links(tpu.target.mesh, tpu.target.chip))


def told(charges, *events):
    """The waits as they are charged, in nanoseconds."""
    found = list(charges.of(sorted(events, key=lambda e: (e.start, e.end))))
    waits = [e for e in found if e.kind == "wait"]
    whole = sum(e.seconds for e in events if e.kind == "wait")
    assert sum(e.seconds for e in waits) == pytest.approx(whole)
    return [(e.name, round(e.start * 1e9), round(e.end * 1e9)) for e in waits]


def wait(of, start, end):
    return Event(of.name, of.op, "wait", "compute", start, end)


def test_what_is_small_and_stands_behind(tpu):
    names = {what: event.name for what, event in sent(tpu).items()}
    found = {e.name: e for e in Exposures(tpu, timeline(tpu)).all()}
    small, up = found[names["small"]], found[names["up"]]
    played = timeline(tpu)
    (behind,) = [e for e in played.events if e.kind == "wait" and e.name == small.name]
    assert behind.seconds > 10 * small.latency
    # It has what it costs without the others: its latency.
    assert small.seconds == pytest.approx(small.latency, rel=1e-3)
    assert up.held == pytest.approx(behind.seconds - small.seconds)
    assert sum(e.seconds for e in found.values()) == pytest.approx(played.exposed)
    causes = {finding.of.name: finding for finding in explain(tpu, tries=0).findings}
    assert causes[small.name].cause == "latency"
    assert causes[up.name].cause == "links busy"
    assert "other transfers queue behind it" in causes[up.name].why
    assert up.after.startswith("the wait for ppermute (test_charges.py:")


def test_a_wait_in_parts(tpu, charges):
    one = sent(tpu)
    up, small, down, ms = one["up"], one["small"], one["down"], 1e-3
    long = replace(up, start=0.0, end=4 * ms, latency=0.0)
    behind = replace(small, start=4 * ms, end=4.005 * ms, queued=3.9 * ms, latency=0.005 * ms)
    # Of 3.8 ms what it would take by itself is over before it is needed.
    of_it = wait(small, 0.205 * ms, 4.005 * ms)
    assert told(charges, long, behind, of_it) == [(up.name, 205_000, 4_005_000)]
    # As it is where others compute until the links are free.
    late = wait(small, 4.002 * ms, 4.005 * ms)
    quick = replace(long, end=4.003 * ms, latency=0.003 * ms)
    assert told(charges, quick, behind, late) == [(up.name, 4_002_000, 4_005_000)]
    # It is needed when it is started: its latency is its own.
    at_once = replace(behind, queued=3.795 * ms)
    assert told(charges, long, at_once, of_it) == [
        (up.name, 205_000, 4_000_000),
        (small.name, 4_000_000, 4_005_000),
    ]
    # The links of the other way are others.
    back = replace(down, start=0.0, end=4 * ms, latency=0.0)
    its_own = [(small.name, 205_000, 4_005_000)]
    assert told(charges, back, at_once, of_it) == its_own
    # What is started later holds nothing up, and nobody else one's own bytes.
    later = replace(up, start=4.1 * ms, end=5 * ms)
    assert told(charges, later, at_once, of_it) == its_own
    own = wait(up, 1 * ms, 4 * ms)
    assert told(charges, long, behind, own) == [(up.name, 1_000_000, 4_000_000)]


def test_waits_of_what_nothing_is_known_of(tpu, charges):
    one = sent(tpu)
    long = replace(one["up"], start=0.0, end=4e-3)
    behind = replace(one["small"], start=4e-3, end=4.1e-3, queued=4e-3)
    of_it = wait(one["small"], 0.0, 4.1e-3)
    blind = Charges(tpu, Links(tpu.target.mesh, NO_FIGURES))
    its_own = [(of_it.name, 0, 4_100_000)]
    assert told(charges, long, behind, of_it) != its_own
    assert told(blind, long, behind, of_it) == its_own
    copied = replace(of_it, row="memory")
    assert told(charges, long, behind, copied) == its_own


def test_a_gpu_s_transfers_take_turns():
    program = compiled("h100:8")
    played = timeline(program)
    found = Exposures(program, played).all()
    assert sum(e.seconds for e in found) == pytest.approx(played.exposed)
    (small,) = [e for e in found if e.bytes < 100]
    assert small.seconds <= small.latency * 1.001
