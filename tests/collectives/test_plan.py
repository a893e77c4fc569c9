"""The plan, the folds over it, and the loop that long rings run instead of unrolled steps."""

from collections import Counter
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh, ring_all_gather, ring_all_reduce, ring_reduce_scatter
from jaxpar.collectives._fold import gather_fold, scatter_fold
from jaxpar.collectives._plan import make_plan
from jaxpar.collectives._ring import bind_ring
from jaxpar.testing import assert_matches_reference, count_collectives

both_rings = pytest.mark.parametrize("mode", ["unidirectional", "bidirectional"])


@both_rings
def test_a_plan_brings_every_block_once(mode):
    for n in range(1, 100):
        plan = make_plan(n, mode)
        steps = [d * s for s in range(1, plan.hops + 1) for d in plan.directions]
        opposite = [plan.hops + 1] if plan.opposite != "none" else []
        assert Counter(back % n for back in [0, *steps, *opposite]) == Counter(range(n))
        if opposite:  # as far the one way as the other
            assert mode == "bidirectional"
            assert 2 * opposite[0] == n


def test_both_ways_take_half_the_steps():
    assert [make_plan(n, "unidirectional").hops for n in (1, 2, 3, 8, 9)] == [0, 1, 2, 7, 8]
    plans = [make_plan(n, "bidirectional") for n in (1, 2, 3, 8, 9)]
    assert [plan.hops for plan in plans] == [0, 0, 1, 3, 4]
    assert [plan.opposite for plan in plans] == ["none", "halves", "none", "halves", "none"]
    assert make_plan(8, "bidirectional", whole_opposite=True).opposite == "whole"
    assert make_plan(9, "bidirectional", whole_opposite=True).opposite == "none"


@pytest.fixture(params=["unrolled", "loop"])
def loops(request, monkeypatch):
    """Whether rings of more than one step run a loop."""
    if request.param == "loop":
        monkeypatch.setattr("jaxpar.collectives._fold.UNROLLED_STEPS", 1)
    return request.param == "loop"


def on_a_ring(function, n, **options):
    mesh = make_mesh({"x": n}, devices=jax.devices()[:n])
    return jax.shard_map(function, mesh=mesh, in_specs=P("x"), out_specs=P("x"), **options)


def plans(n, mode):
    """Every plan of a ring, also those that are made for other chips than a CPU."""
    plain = [make_plan(n, mode, whole_opposite=whole) for whole in (False, True)]
    return [
        replace(plan, pieces=pieces, grouped=tpu, delayed=tpu, sliced=sliced)
        for plan in dict.fromkeys(plain)
        for pieces, tpu, sliced in ((1, False, False), (2, True, False), (2, True, True))
    ]


@both_rings
@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_gather_fold_says_whose_block_it_brings(n, mode, loops):
    def seen(plan):
        def run(x):
            def consume(carry, arrivals):
                if carry is None:
                    assert len(arrivals) == 1
                    carry = jnp.zeros((n, 2), jnp.int32) + 0 * x[0]
                for block, source in arrivals:
                    assert jax.tree.structure(block) == jax.tree.structure({"a": 0, "b": [0]})
                    # Adding would show a block that came twice.
                    row = jnp.stack([block["a"][0], block["b"][0][0, 2]])
                    carry = carry.at[source].add(row)
                return carry

            block = {"a": x, "b": [jnp.full((1, 3), -1, jnp.int32) * x]}
            return gather_fold(block, consume, bind_ring("test", "x"), plan)

        return run

    each = np.arange(1, n + 1)
    for plan in plans(n, mode):
        found = jax.jit(on_a_ring(seen(plan), n))(np.arange(1, n + 1, dtype=np.int32))
        np.testing.assert_array_equal(
            found, np.tile(np.stack([each, -each], 1), (n, 1)), err_msg=f"{plan}"
        )


@both_rings
@pytest.mark.parametrize("length", [1, 2, 5])
@pytest.mark.parametrize("n", [1, 2, 5, 6])
def test_scatter_fold_adds_what_every_device_made_for_an_owner(n, length, mode, loops):
    """Column `c` of device `i`'s addend is `100 i + c`: what it is and for whom is in its value."""

    def summed(plan):
        def run(x):
            columns = jnp.arange(n * length, dtype=jnp.int32) + 100 * x[0]

            def take(start, size):
                return lax.dynamic_slice_in_dim(columns, start, size)

            def produce(part):
                return jnp.stack([part, -part])

            ring = bind_ring("test", "x")
            return scatter_fold(produce, ring, plan, 1, length, take, "int32", "int32")

        return run

    total = 100 * n * (n - 1) // 2
    wanted = np.stack([total + n * np.arange(n * length), -total - n * np.arange(n * length)])
    for plan in plans(n, mode):
        found = jax.jit(
            jax.shard_map(
                summed(plan),
                mesh=make_mesh({"x": n}, devices=jax.devices()[:n]),
                in_specs=P("x"),
                out_specs=P(None, "x"),
            )
        )(np.arange(n, dtype=np.int32))
        np.testing.assert_array_equal(found, wanted, err_msg=f"{plan}")


def all_three(mode):
    def run(x):
        return (
            ring_all_gather(x, "x", tiled=True, mode=mode),
            ring_reduce_scatter(x, "x", scatter_dimension=1, tiled=True, mode=mode),
            ring_all_reduce(x, "x", mode=mode),
        )

    return run


@both_rings
@pytest.mark.parametrize("n", [5, 6, 7, 8])
def test_a_loop_gives_the_same_values_and_gradients(n, mode, monkeypatch):
    monkeypatch.setattr("jaxpar.collectives._fold.UNROLLED_STEPS", 1)
    mesh = make_mesh({"x": n}, devices=jax.devices()[:n])
    assert_matches_reference(
        all_three(mode),
        lambda x: (
            np.concatenate([x] * n),
            np.concatenate(np.split(x.reshape(n, 3, n).sum(0), n, 1)),
            x.reshape(n, 3, n).sum(0),
        ),
        np.random.default_rng(n).standard_normal((3 * n, n)).astype(np.float32),
        mesh=mesh,
        in_specs=P("x"),
        out_specs=(P("x"), P("x"), P()),
        check_vma=n in (5, 8),
    )


@both_rings
@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("n", [5, 8])
def test_a_loop_sends_what_unrolled_steps_send(n, check_vma, mode, monkeypatch):
    def traced():
        run = on_a_ring(all_three(mode), n, check_vma=check_vma)
        x = jax.ShapeDtypeStruct((3 * n, n), np.float32)
        return str(jax.make_jaxpr(run)(x)), count_collectives(run, x)

    unrolled, wanted = traced()
    assert "scan[" not in unrolled
    assert "while[" not in unrolled
    monkeypatch.setattr("jaxpar.collectives._fold.UNROLLED_STEPS", 1)
    loop, found = traced()
    assert "scan[" in loop or "while[" in loop
    assert found == wanted
