"""assert_overlapped: what it lets pass, and what it says of what it does not."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.schedule import Event, Target, Timeline, target
from jaxpar.testing import _overlap, assert_overlapped

X = jax.ShapeDtypeStruct((8192, 4096), jnp.bfloat16, sharding=P("tp"))
W = jax.ShapeDtypeStruct((4096, 16384), jnp.bfloat16, sharding=P(None, "tp"))


@pytest.fixture
def compiler():
    assert importlib.util.find_spec("libtpu"), (
        "these tests need the TPU compiler; pip install -e '.[tpu]'"
    )


def layer(mode):
    return jax.shard_map(
        lambda x, w: jaxpar.all_gather_matmul(x, w, "tp", mode=mode),
        in_specs=(P("tp"), P(None, "tp")),
        out_specs=P(None, "tp"),
    )


@pytest.mark.usefixtures("compiler")
def test_a_ring_passes_on_a_target_or_its_text():
    assert_overlapped(layer("unidirectional"), target("v5e:2x2"), X, W)
    assert_overlapped(layer("unidirectional"), "v5e:2x4", X, W, mesh="dp=2,tp=4")


@pytest.mark.usefixtures("compiler")
def test_naive_fails_and_the_text_says_why():
    with pytest.raises(AssertionError) as caught:
        assert_overlapped(layer("naive"), "v5e:2x2", X, W)
    first, second, transfer, remedy = str(caught.value).splitlines()
    assert re.fullmatch(
        r"assert_overlapped: for v5e:2x2 \(4 x TPU v5 lite, mesh tp=4\) [0-9.]+% of [0-9.]+ ms is "
        r"exposed communication, more than exposed_at_most=5\.0%\. This is the compiler's schedule "
        r"under published figures \(the compiler's cycles\), not a measurement\.",
        first,
    )
    assert second == "Transfers waited for the longest, and all synchronous ones:"
    assert re.fullmatch(
        r"  all.gather\S* \(jit\(\S+/all_gather\), tp all-gather: waited [0-9.]+ ms of [0-9.]+ ms, "
        r"sends 50_331_648 bytes; synchronous: nothing can run beside it",
        transfer,
    )
    assert remedy.startswith("Remedy: ")
    assert "jaxpar predict" in remedy
    assert_overlapped(layer("naive"), "v5e:2x2", X, W, exposed_at_most=0.5)


def event(name, kind, start, end, **more):
    row = "tp +1" if kind == "transfer" else "compute"
    return Event(name, f"f/{name}", kind, row, float(start), float(end), **more)


@pytest.fixture
def played(monkeypatch):
    """A loop whose two transfers are waited for, and a small synchronous one."""
    events = (
        event("send", "transfer", 0, 2, bytes=1000.0, covers=("dot",)),
        event("send", "wait", 1, 2),
        event("send", "transfer", 2, 4, bytes=1000.0, covers=("dot",)),
        event("send", "wait", 3, 4),
        event("bare", "transfer", 4, 5, bytes=10.0),
        event("bare", "wait", 4, 5),
        event("hidden", "transfer", 5, 5.5, bytes=10.0, covers=("dot",)),
        *(event(f"sync.{i}", "transfer", 6 + i, 6.5 + i, synchronous=True) for i in range(4)),
    )
    found = Timeline(events, 10.0, 5.0, 3.0, 5.0, 2020.0, 0.5, 0, "roofline", ())
    monkeypatch.setattr(_overlap, "compile_for", lambda *args, **options: None)
    monkeypatch.setattr(_overlap, "timeline", lambda program: found)
    return found


def test_the_worst_and_all_synchronous_transfers_are_named(played):
    cpu = Target("h100:8", jaxpar.make_mesh("dp=2,tp=4"), None)
    with pytest.raises(AssertionError) as caught:
        assert_overlapped(layer("naive"), cpu, X, W, exposed_at_most=0.2)
    first, _, *named, _ = str(caught.value).splitlines()
    assert "for h100:8 (8 x cpu, mesh dp=2,tp=4) about 30.0% of 10000.000 ms" in first
    assert "exposed_at_most=20.0%" in first
    assert "(roofline), not a measurement" in first
    assert named[:2] == [
        "  send (f/send), tp +1: waited 2000.000 ms of 4000.000 ms in 2 runs, sends 2_000 bytes; "
        "between its start and its done: dot",
        "  bare (f/bare), tp +1: waited 1000.000 ms of 1000.000 ms, sends 10 bytes; no matmul "
        "between its start and its done",
    ]
    assert [line.split()[0] for line in named[2:]] == [f"sync.{i}" for i in range(4)]
    assert_overlapped(layer("naive"), cpu, X, W, exposed_at_most=0.3)


def test_a_limit_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"exposed_at_most=5 is a share of the time and must be b"):
        assert_overlapped(layer("naive"), "v5e:2x2", X, W, exposed_at_most=5)


def test_a_mesh_beside_a_target_that_has_one_is_refused():
    cpu = Target("cpu", jaxpar.make_mesh("tp=8"), None)
    with pytest.raises(TypeError, match="mesh='tp=8' is for a target given as text; cpu has a"):
        assert_overlapped(layer("naive"), cpu, X, W, mesh="tp=8")
