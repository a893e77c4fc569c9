"""What the ring collectives send, forward and backward, and what they keep: nothing."""

from collections import Counter

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import all_gather, all_reduce, make_mesh, reduce_scatter
from jaxpar.testing import count_collectives

MODES = ("unidirectional", "bidirectional")
ring_of_any_size = pytest.mark.parametrize("n", [1, 2, 3, 4, 7, 8])
both_rings = pytest.mark.parametrize("mode", MODES)
SHARDED = P("x")
BLOCK = 15  # entries that a device has of a gather, or keeps of a scatter; both halves are uneven


def counted(function, n, shape, dtype="float32", *, out_specs=SHARDED, check_vma=True):
    """Counts for a function of local arrays of `shape`."""
    mapped = jax.shard_map(
        lambda x: jax.tree.map(lambda y: y[None], function(x[0])),
        mesh=make_mesh({"x": n}, devices=jax.devices()[:n]),
        in_specs=P("x"),
        out_specs=out_specs,
        check_vma=check_vma,
    )
    return count_collectives(mapped, jax.ShapeDtypeStruct((n, *shape), dtype))


def blocks_sent(n, mode):
    """One a step one way; two a step both ways, and two halves on an even ring."""
    count = n - 1 if mode == "unidirectional" else 2 * (n // 2)
    return {"ppermute": count} if count else {}


def sums_sent(n):
    """Whole sums only, either way: that for the opposite device goes one way."""
    return {"ppermute": n - 1} if n > 1 else {}


@both_rings
@ring_of_any_size
def test_gather_sends_blocks_and_its_backward_sums(n, mode):
    counts = counted(lambda x: all_gather(x, "x", mode=mode), n, (5, 3))
    assert (counts.forward, counts.backward) == (blocks_sent(n, mode), sums_sent(n))
    assert counts.forward_bytes == counts.backward_bytes == 4 * BLOCK * (n - 1)
    assert counts.residual_bytes == 0


@both_rings
@ring_of_any_size
def test_scatter_sends_sums_and_its_backward_blocks(n, mode):
    counts = counted(lambda x: reduce_scatter(x, "x", mode=mode), n, (n, 5, 3))
    assert (counts.forward, counts.backward) == (sums_sent(n), blocks_sent(n, mode))
    assert counts.forward_bytes == counts.backward_bytes == 4 * BLOCK * (n - 1)
    assert counts.residual_bytes == 0


@both_rings
@ring_of_any_size
def test_all_reduce_typed_replicated_sends_nothing_backward(n, mode):
    counts = counted(
        lambda x: all_reduce(x, "x", mode=mode), n, (n, 5, 3), out_specs=P(), check_vma=True
    )
    assert counts.forward == sums_sent(n) | {"all_gather": 1}
    assert counts.forward_bytes == 2 * 4 * BLOCK * (n - 1)
    assert not counts.backward
    assert counts.backward_bytes == counts.residual_bytes == 0


@both_rings
@ring_of_any_size
def test_all_reduce_without_types_is_rings_both_ways(n, mode):
    counts = counted(lambda x: all_reduce(x, "x", mode=mode), n, (n, 5, 3), check_vma=False)
    both = Counter(sums_sent(n)) + Counter(blocks_sent(n, mode))
    assert counts.forward == counts.backward == both
    assert counts.forward_bytes == counts.backward_bytes == 2 * 4 * BLOCK * (n - 1)
    assert counts.residual_bytes == 0


@pytest.mark.parametrize(("shape", "padded"), [((), 8), ((7,), 8), ((5, 3), 16), ((3, 8), 24)])
def test_all_reduce_sends_no_more_than_padding(shape, padded):
    counts = counted(lambda x: all_reduce(x, "x", mode="bidirectional"), 8, shape)
    assert counts.forward_bytes == 2 * 4 * padded // 8 * 7


@pytest.mark.parametrize("check_vma", [True, False])
def test_naive_is_laxs_own(check_vma):
    def all_three(x):
        return (
            all_gather(x, "x", mode="naive"),
            reduce_scatter(x, "x", mode="naive"),
            all_reduce(x, "x", mode="naive"),
        )

    counts = counted(all_three, 4, (4, 3), check_vma=check_vma)
    assert counts.forward == {"all_gather": 1, "psum_scatter": 1, "psum": 1}


def test_auto_goes_one_way_where_there_is_no_torus():
    def both(mode):
        return counted(lambda x: all_gather(x, "x", mode=mode), 6, (2,)).forward

    assert both("auto") == both("unidirectional") != both("bidirectional")


def test_every_leaf_is_sent():
    counts = counted(lambda x: all_gather({"a": x, "b": [x[0], x]}, "x"), 5, (2,))
    assert counts.forward == counts.backward == {"ppermute": 3 * 4}


@both_rings
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_sums_of_narrow_floats_travel_narrow_unless_asked(dtype, mode):
    def sent(**wire):
        return counted(lambda x: reduce_scatter(x, "x", mode=mode, **wire), 8, (8, 5, 3), dtype)

    wide, narrow = sent(wire_dtype="float32"), sent()
    assert wide.forward_bytes == 4 * BLOCK * 7
    assert narrow.forward_bytes == 2 * BLOCK * 7
    assert wide.backward_bytes == narrow.backward_bytes == 2 * BLOCK * 7  # blocks are not sums


@both_rings
def test_wire_dtype_of_an_all_reduce(mode):
    def sent(check_vma, **wire):
        return counted(
            lambda x: all_reduce(x, "x", mode=mode, **wire), 8, (8, 5, 3), check_vma=check_vma
        )

    for check_vma in (True, False):
        assert sent(check_vma).forward_bytes == (4 + 4) * BLOCK * 7
        assert sent(check_vma, wire_dtype="bfloat16").forward_bytes == (2 + 4) * BLOCK * 7
    # The derivative is an all-reduce, with sums in the same dtype on the wire.
    assert sent(False, wire_dtype="bfloat16").backward_bytes == (2 + 4) * BLOCK * 7


@both_rings
def test_integers_travel_as_they_are(mode):
    scatter = counted(lambda x: reduce_scatter(x, "x", mode=mode), 8, (8, 5, 3), "int8")
    gather = counted(lambda x: all_gather(x, "x", mode=mode), 8, (5, 3), "int8")
    assert scatter.forward_bytes == BLOCK * 7
    assert gather.forward_bytes == BLOCK * 7


def test_halves_are_of_equal_size_where_a_dimension_is_even():
    jaxpr = jax.make_jaxpr(
        jax.shard_map(
            lambda x: all_gather(x, "x", tiled=True, mode="bidirectional"),
            mesh=make_mesh("x=8"),
            in_specs=P("x"),
            out_specs=P("x"),
            check_vma=False,
        )
    )(np.ones((8 * 3, 4), np.float32))
    lines = [line for line in str(jaxpr).splitlines() if " = ppermute" in line]
    sent = [line.split(" = ")[0].split(":")[-1] for line in lines]
    assert sorted(sent) == ["f32[3,2]"] * 2 + ["f32[3,4]"] * 6
