"""Assertions on compiled programs: what they let pass, and what they say of what they do not."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.schedule import Target, target
from jaxpar.testing import (
    assert_collectives,
    assert_no_resharding,
    assert_overlapped,
    assert_peak_memory,
)

X = jax.ShapeDtypeStruct((4096, 2048), jnp.bfloat16, sharding=P("tp"))
W = jax.ShapeDtypeStruct((2048, 16384), jnp.bfloat16, sharding=P(None, "tp"))


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
    first, second, transfer, line, why, edit, remedy = str(caught.value).splitlines()
    assert re.fullmatch(
        r"assert_overlapped: for v5e:2x2 \(4 x TPU v5 lite, mesh tp=4\) [0-9.]+% of [0-9.]+ ms is "
        r"exposed communication, more than exposed_at_most=5\.0%\. This is the compiler's schedule "
        r"on a model of the chip \(the compiler's cycles\), not a measurement\.",
        first,
    )
    assert second == "Waited for the longest:"
    assert re.fullmatch(
        r"  [0-9.]+ ms: all-gather over tp, 1 run, 12 MiB sent by a device over 2 of its 2 links",
        transfer,
    )
    assert re.fullmatch(
        r"    test_compiled\.py:\d+ in <lambda>, in all_gather_matmul\[tp\]/naive, forward", line
    )
    assert why.startswith("    synchronous: the compiler of TPU v5 lite makes this all-gather")
    assert edit.startswith("    edit: write it as permutes that overlap with a matmul")
    assert remedy.startswith("Remedy: ")
    assert "jaxpar explain" in remedy
    assert_overlapped(layer("naive"), "v5e:2x2", X, W, exposed_at_most=0.5)


def resharded(x, w):
    h = lax.with_sharding_constraint(x @ w, P(None, "tp"))
    return jnp.sum(h)


ROWS = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P("tp"))
COLUMNS = jax.ShapeDtypeStruct((1024, 2048), jnp.bfloat16, sharding=P(None, "tp"))


@pytest.mark.usefixtures("compiler")
def test_a_resharding_is_told_with_its_line_and_how_the_array_lies():
    with pytest.raises(AssertionError) as caught:
        assert_no_resharding(resharded, "v5e:2x2", ROWS, COLUMNS)
    first, what, line, moved, remedy = str(caught.value).splitlines()
    assert first == (
        "assert_no_resharding: for v5e:2x2 (4 x TPU v5 lite, mesh tp=4) the partitioner moves "
        "arrays that lie otherwise than they are wanted, in 1 place:"
    )
    assert "all-gather over tp" in what
    assert "put in by the partitioner" in what
    number = resharded.__code__.co_firstlineno + 1
    assert line == f"    test_compiled.py:{number} in resharded, forward"
    assert moved == (
        "    bf16[256,1024] of each device, x; dimension 0 is sharded over 'tp' and is needed "
        "unsharded"
    )
    assert remedy.startswith("Remedy: give each array where it is made the sharding")


@pytest.mark.usefixtures("compiler")
def test_sums_and_written_collectives_are_no_resharding():
    summed = jax.ShapeDtypeStruct((1024, 1024), jnp.bfloat16, sharding=P(None, "tp"))
    assert_no_resharding(lambda x, w: x @ w, "v5e:2x2", summed, ROWS)
    assert_no_resharding(layer("naive"), "v5e:2x2", ROWS, COLUMNS)


@pytest.mark.usefixtures("compiler")
def test_collectives_of_both_passes_are_counted_exactly():
    def loss(x, w):
        return jnp.sum(lax.psum(jnp.tanh(lax.all_gather(x, "tp", tiled=True) @ w), "tp") ** 2)

    step = jax.shard_map(
        jax.grad(loss, (0, 1)),
        in_specs=(P("tp"), P("tp")),
        out_specs=(P("tp"), P("tp")),
        check_vma=False,
    )
    x = jax.ShapeDtypeStruct((1024, 256), jnp.bfloat16, sharding=P("tp"))
    w = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=P("tp"))
    gathered, summed = 1024 * 256 * 2, 1024 * 512 * 2
    expected = {
        "forward all-gather over tp": (1, gathered * 3 // 4),
        "forward all-reduce over tp": (1, 2 * summed * 3 // 4),
        "backward all-reduce over tp": (1, 2 * summed * 3 // 4),
        "backward reduce-scatter over tp": (1, gathered * 3 // 4),
    }
    runs = {key: times for key, (times, _) in expected.items()}
    two = {"forward all-gather over tp": 1, "backward all-reduce over tp": 1}
    assert_collectives(step, "v5e:2x2", x, w, expected={**expected, **two})
    wrong = {**runs, "forward all-gather over tp": (2, 7), "forward all-to-all over tp": 1}
    del wrong["backward all-reduce over tp"]
    with pytest.raises(AssertionError) as caught:
        assert_collectives(step, "v5e:2x2", x, w, expected=wrong)
    text = str(caught.value)
    sends = gathered * 3 // 4
    assert (
        f"  forward all-gather over tp: expected 2 sending 7 bytes, found 1 sending {sends:_} bytes"
        in text
    )
    assert "  forward all-to-all over tp: expected 1, found 0 sending 0 bytes" in text
    assert "  backward all-reduce over tp: expected 0, found 1 sending" in text
    assert f"    test_compiled.py:{loss.__code__.co_firstlineno + 1} in loss, backward: 1" in text
    assert "reduce-scatter" not in text


@pytest.mark.usefixtures("compiler")
def test_memory_is_told_with_the_largest_arrays():
    x = jax.ShapeDtypeStruct((2048, 2048), jnp.float32, sharding=P("tp"))
    whole = 2048 * 2048 * 4
    assert_peak_memory(jnp.sin, "v5e:2x2", x, at_most=whole // 2)
    with pytest.raises(AssertionError) as caught:
        assert_peak_memory(lambda x: jnp.sin(x) @ jnp.cos(x).T, "v5e:2x2", x, at_most=whole)
    first, largest, *_, remedy = str(caught.value).splitlines()
    assert first.startswith("assert_peak_memory: for v5e:2x2 (4 x TPU v5 lite, mesh tp=4) a device")
    assert "more than at_most=16_777_216 (16 MiB). The largest arrays at the peak:" in first
    assert re.match(r"  \d+ MiB \w+\[\d+,2048\] \w+ at test_compiled\.py:\d+ in <lambda>", largest)
    assert remedy.startswith("Remedy: shard what is large over more axes")


def test_a_limit_that_is_no_share_is_refused():
    with pytest.raises(ValueError, match=r"exposed_at_most=5 is a share of the time and must be b"):
        assert_overlapped(layer("naive"), "v5e:2x2", X, W, exposed_at_most=5)


def test_a_mesh_beside_a_target_that_has_one_is_refused():
    cpu = Target("cpu", jaxpar.make_mesh("tp=8"), None)
    with pytest.raises(TypeError, match="mesh='tp=8' is for a target given as text; cpu has a"):
        assert_overlapped(layer("naive"), cpu, X, W, mesh="tp=8")
