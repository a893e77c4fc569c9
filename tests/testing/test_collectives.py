from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.testing import CollectiveCounts, count_collectives

X = jax.ShapeDtypeStruct((16, 4), jnp.float32)  # local: f32[4, 4]
W = jax.ShapeDtypeStruct((4, 8), jnp.float32)
SPLIT = P("x")
CYCLE = [(i, (i + 1) % 4) for i in range(4)]
both = pytest.mark.parametrize("check_vma", [True, False])


def shard(fn, check_vma=True, in_specs=SPLIT, out_specs=SPLIT):
    mesh = Mesh(np.array(jax.devices()[:4]), ("x",), axis_types=(AxisType.Auto,))
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=check_vma)


def gather(x):
    return lax.all_gather(x, "x", tiled=True)


@both
@pytest.mark.parametrize(
    ("fn", "forward", "backward"),
    [
        (lambda x: lax.ppermute(x, "x", CYCLE), "ppermute", "ppermute"),
        (gather, "all_gather", "psum_scatter"),
        (lambda x: lax.psum_scatter(x, "x", tiled=True), "psum_scatter", "all_gather"),
        (lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True), "all_to_all", "all_to_all"),
        (lambda x: lax.pmax(lax.stop_gradient(x), "x") + x, "pmax", None),
        (lambda x: lax.pmin(lax.stop_gradient(x), "x") + x, "pmin", None),
    ],
)
def test_names_are_those_of_lax(fn, forward, backward, check_vma):
    counts = count_collectives(shard(fn, check_vma), X)
    assert counts.forward == {forward: 1}
    assert counts.backward == ({backward: 1} if backward else {})
    assert counts.residual_bytes == 0


@both
def test_psum_to_a_replicated_output(check_vma):
    counts = count_collectives(shard(lambda x: lax.psum(x, "x"), check_vma, out_specs=P()), X)
    assert counts.forward == {"psum": 1}
    # A replicated cotangent needs no sum: the backward only divides or broadcasts it.
    assert counts.backward["psum"] == (0 if check_vma else 1)


def test_all_gather_to_invarying():
    fn = shard(lambda x: lax.all_gather(x, "x", tiled=True, to="invarying"), out_specs=P())
    assert count_collectives(fn, X, grad=False).forward == {"all_gather": 1}


@both
def test_ragged_all_to_all(check_vma):
    def fn(x):
        at = jnp.arange(4, dtype=jnp.int32) + 0 * lax.axis_index("x")
        return lax.ragged_all_to_all(x, 0 * x, at, 0 * at + 1, at, 0 * at + 1, axis_name="x")

    counts = count_collectives(shard(fn, check_vma), X)
    assert counts.forward == {"ragged_all_to_all": 1}
    assert counts.backward["ragged_all_to_all"] == 1


def test_pbroadcast():
    fn = shard(lambda x: lax.pbroadcast(x, "x", 0), check_vma=False)
    assert count_collectives(fn, X, grad=False).forward == {"pbroadcast": 1}


@both
def test_replicated_weight_is_summed_in_the_backward(check_vma):
    fn = shard(lambda x, w: x @ w, check_vma, in_specs=(P("x"), P()))
    counts = count_collectives(fn, X, W)
    assert counts.forward == {}
    assert counts.backward == {"psum": 1}


@both
@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["plain", "jit"])
def test_residuals_are_local_blocks(check_vma, wrap):
    fn = shard(
        lambda x, w: gather(x) @ w,
        check_vma,
        in_specs=(P("x"), P(None, "x")),
        out_specs=P(None, "x"),
    )
    # The gathered lhs f32[16, 4], which autodiff saves, and the own block f32[4, 2] of w.
    assert count_collectives(wrap(fn), X, W).residual_bytes == 4 * (16 * 4 + 4 * 2)


def test_residuals_of_a_layer_scan_around_shard_map():
    step = shard(lambda x, w: jnp.sin(x @ w), in_specs=(P("x"), P()))

    def layers(x, ws):
        return lax.scan(lambda x, w: (step(x, w), None), x, ws)[0]

    counts = count_collectives(layers, X, jax.ShapeDtypeStruct((3, 4, 4), jnp.float32))
    assert counts.backward == {"psum": 3}
    # Per layer: its input f32[4, 4], the cosine f32[4, 4]; and ws f32[3, 4, 4].
    assert counts.residual_bytes == 4 * (3 * 2 * 4 * 4 + 3 * 4 * 4)


def test_residuals_outside_shard_map_are_whole():
    assert count_collectives(lambda x: jnp.sin(x), X).residual_bytes == 16 * 4 * 4


def test_checkpoint_gathers_again():
    @jax.checkpoint
    def fn(x):
        return jnp.sin(gather(x))

    counts = count_collectives(shard(fn), X)
    assert counts.forward == {"all_gather": 1}
    assert counts.backward == {"all_gather": 1, "psum_scatter": 1}
    assert counts.residual_bytes == 4 * 4 * 4


def test_custom_vjp_counts_its_own_rules():
    @jax.custom_vjp
    def fn(x):
        return lax.ppermute(x, "x", CYCLE)

    fn.defvjp(
        lambda x: (lax.ppermute(lax.ppermute(x, "x", CYCLE), "x", CYCLE), None),
        lambda _, ct: (gather(ct)[:4],),
    )
    assert count_collectives(shard(fn, False), X, grad=False).forward == {"ppermute": 1}
    assert count_collectives(shard(fn, False), X).forward == {"ppermute": 2}
    assert count_collectives(shard(fn, False), X).backward == {"all_gather": 1}


@both
def test_loops_count_every_turn(check_vma):
    def turn(_, x):
        return lax.ppermute(x, "x", CYCLE)

    def fn(x):
        return lax.fori_loop(0, 3, lambda i, x: lax.fori_loop(0, 5, turn, turn(i, x)), x)

    counts = count_collectives(shard(fn, check_vma), X)
    assert counts.forward == counts.backward == {"ppermute": 18}


def test_while_loop_with_collectives_raises():
    def fn(x):
        return lax.while_loop(lambda x: jnp.all(x < 9), lambda x: lax.ppermute(x, "x", CYCLE), x)

    with pytest.raises(
        ValueError,
        match=r"of an unknown number of iterations runs \['ppermute'\] each time; use lax.fori",
    ):
        count_collectives(shard(fn), X, grad=False)


def test_while_loop_without_collectives_counts_nothing():
    def fn(x):
        return gather(lax.while_loop(lambda x: jnp.all(x < 9), lambda x: x + 1, x))

    assert count_collectives(shard(fn), X, grad=False).forward == {"all_gather": 1}


def test_cond_counts_the_busiest_branch():
    def fn(x):
        return lax.cond(
            lax.axis_size("x") > lax.axis_index("x"),
            lambda x: gather(gather(x)[:4])[:4],
            lambda x: lax.ppermute(gather(x)[:4], "x", CYCLE),
            x,
        )

    assert count_collectives(shard(fn), X).forward == {"all_gather": 2, "ppermute": 1}


@pytest.mark.parametrize(
    ("platform", "forward"),
    [
        ("cpu", {"all_gather": 1}),
        ("tpu", {"ppermute": 1}),
        (None, {"all_gather": 1, "ppermute": 1}),
    ],
)
def test_platform_dependent(platform, forward):
    def fn(x):
        return lax.platform_dependent(
            x, cpu=lambda x: gather(x)[:4], default=lambda x: lax.ppermute(x, "x", CYCLE)
        )

    counts = count_collectives(shard(fn), X, platform=platform)
    assert counts.forward == forward


def test_branches_of_other_platforms_may_run_what_cannot_be_counted():
    def forever(x):
        return lax.while_loop(lambda x: jnp.all(x < 9), lambda x: lax.ppermute(x, "x", CYCLE), x)

    def fn(x):
        return lax.platform_dependent(x, cpu=forever, default=lambda x: gather(x)[:4])

    assert count_collectives(shard(fn), X, grad=False, platform="tpu").forward == {"all_gather": 1}
    with pytest.raises(ValueError, match="unknown number of iterations"):
        count_collectives(shard(fn), X, grad=False, platform="cpu")


def test_integers_have_no_backward():
    counts = count_collectives(shard(gather), jnp.arange(16))
    assert counts == CollectiveCounts(Counter(all_gather=1), Counter(), 4 * 4 * 3, 0, 0)


def test_integer_arguments_and_outputs_beside_floats():
    def fn(tree):
        return {"sum": gather(tree["i"]), "product": gather(tree["x"]) * 2.0}

    counts = count_collectives(shard(fn), {"i": jnp.arange(16), "x": jnp.ones(16)})
    assert counts.forward == {"all_gather": 2}
    assert counts.backward == {"psum_scatter": 1}


def test_gradient_taken_inside_shard_map():
    def fn(x, w):
        return jax.grad(lambda w: jnp.sum(x @ w))(w)

    outside = shard(fn, in_specs=(P("x"), P()), out_specs=P())
    assert count_collectives(outside, X, W, grad=False).forward == {"psum": 1}


def test_repr_is_sorted_and_short():
    counts = CollectiveCounts(Counter(psum=1, all_gather=2), Counter(), 4096, 0, 512)
    assert repr(counts) == (
        "CollectiveCounts(forward={'all_gather': 2, 'psum': 1}, backward={}, "
        "forward_bytes=4_096, backward_bytes=0, residual_bytes=512)"
    )
    assert counts.forward["ppermute"] == 0


def test_bytes_count_turns_of_loops_and_the_costliest_branch():
    mesh = jaxpar.make_mesh("dp=2,tp=4")

    def shift(x):
        return lax.ppermute(x, "tp", CYCLE)

    def local(x):  # x: f32[4]
        x = lax.fori_loop(0, 3, lambda _, x: shift(x), x)
        x = lax.cond(x[0] > 0, lambda x: shift(shift(x)), shift, x)
        return lax.all_gather(x, ("dp", "tp"))

    spec = P(("dp", "tp"))
    function = jax.shard_map(local, mesh=mesh, in_specs=spec, out_specs=P(None, spec[0]))
    counts = count_collectives(function, jnp.ones(32), grad=False)
    assert counts.forward_bytes == (3 + 2 + 7) * 4 * 4


@pytest.mark.parametrize(
    ("fn", "sent"),
    [
        (lambda x: lax.ppermute(x, "x", CYCLE), 64),
        (gather, 3 * 64),
        (lambda x: lax.psum_scatter(x, "x", tiled=True), 48),
        (lambda x: lax.all_to_all(x, "x", 0, 0, tiled=True), 48),
        (lambda x: lax.psum(x, "x"), 2 * 48),
    ],
)
def test_bytes_of_a_ring_of_least_traffic(fn, sent):
    assert count_collectives(shard(fn, check_vma=False), X, grad=False).forward_bytes == sent
