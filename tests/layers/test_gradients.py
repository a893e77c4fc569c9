"""Losses and gradients inside `shard_map` against those of one device, and what travels."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import Axis, make_mesh
from jaxpar.layers import (
    copy_region,
    gather_region,
    global_norm,
    mean_loss,
    mean_value_and_grad,
    reduce_gradients,
    reduce_region,
)
from jaxpar.testing import count_collectives

check = pytest.mark.parametrize("check_vma", [True, False])
ROWS, D, H = 16, 4, 8


def normal(*shape, dtype="float32"):
    return np.random.default_rng([*shape]).standard_normal(shape).astype(dtype)


def close(found, expected, rtol=2e-5):
    """Within `rtol` of the largest entry of each leaf; dtypes are those of float32 training."""
    assert jax.tree.structure(found) == jax.tree.structure(expected)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert a.dtype == b.dtype
        np.testing.assert_allclose(a, b, rtol=0, atol=rtol * np.max(np.abs(b)))


def params():
    return {
        "bias": normal(D) / 3,  # sharded over fsdp
        "out": (normal(H, D), None),  # sharded over tp and over fsdp
        "scale": 1 + normal(D) / 5,  # replicated
        "in": normal(D, H),  # sharded over tp
    }


SPECS = {"bias": P("fsdp"), "out": P("tp", "fsdp"), "scale": P(), "in": P(None, "tp")}


def batch():
    """Rows and their weights, of which devices have more and less, and some have none."""
    weights = np.arange(ROWS, dtype="int32") % 3
    weights[4:8] = 0
    return normal(ROWS, D), {"weight": weights}


def alone(params, x, more):
    hidden = jnp.sin((x * params["scale"]) @ params["in"])
    y = hidden @ params["out"][0] + params["bias"]
    weight = more["weight"].astype(x.dtype)
    return jnp.sum(weight * jnp.sum(y**2, axis=-1)), jnp.sum(weight)


def mean_alone(params, *batch):
    total, weight = alone(params, *batch)
    return total / weight


def gathered(w, axis):
    return lax.all_gather(w, "fsdp", axis=axis, tiled=True)


def features_sharded(params, x, more):
    """`alone` with rows over dp and fsdp, features of the hidden layer over tp."""
    hidden = jnp.sin(copy_region(x * params["scale"], "tp") @ params["in"])
    y = reduce_region(hidden @ gathered(params["out"][0], 1), "tp") + gathered(params["bias"], 0)
    weight = more["weight"].astype(x.dtype)
    return jnp.sum(weight * jnp.sum(y**2, axis=-1)), jnp.sum(more["weight"])


def rows_sharded(params, x, more):
    """`alone` with rows over tp, too, but for the hidden layer."""
    whole = lax.all_gather(x * params["scale"], "tp", tiled=True)
    y = jnp.sin(whole @ params["in"]) @ gathered(params["out"][0], 1)
    y = lax.psum_scatter(y, "tp", tiled=True) + gathered(params["bias"], 0)
    weight = more["weight"].astype(x.dtype)
    return jnp.sum(weight * jnp.sum(y**2, axis=-1)), jnp.sum(weight)


def step_of(loss, axes, mesh, check_vma, rows=("dp", "fsdp"), **options):
    specs = None if check_vma else SPECS
    step = mean_value_and_grad(loss, axes, specs=specs, **options)
    return jax.shard_map(
        step,
        mesh=make_mesh(mesh, devices=jax.devices()[: 6 if "3" in mesh else 8]),
        in_specs=(SPECS, P(rows), P(rows)),
        out_specs=(P(), SPECS),
        check_vma=check_vma,
    )


@cache
def expected():
    """Of one device."""
    return jax.jit(jax.value_and_grad(mean_alone))(params(), *batch())


@pytest.mark.parametrize(
    ("mesh", "axes", "options", "check_vma"),
    [
        ("dp=2,fsdp=2,tp=2", ("fsdp", "dp"), {}, True),
        ("dp=2,fsdp=2,tp=2", ("dp", "fsdp"), {"microbatches": 2, "bucket_bytes": 80}, True),
        ("dp=2,fsdp=2,tp=2", ("dp", "fsdp"), {"microbatches": 2, "bucket_bytes": 80}, False),
        ("tp=4,fsdp=1,cp=1,dp=2", ("dp", "fsdp", "cp"), {"microbatches": 4}, False),
        ("fsdp=4,tp=1,dp=2", ("fsdp", "dp"), {"bucket_bytes": 1 << 20}, True),
    ],
)
def test_gradients_are_those_of_one_device(mesh, axes, options, check_vma):
    step = step_of(features_sharded, axes, mesh, check_vma, **options)
    close(jax.jit(step)(params(), *batch()), expected())


@pytest.mark.parametrize(
    ("axes", "check_vma"), [(("tp", "dp", "fsdp"), True), (("fsdp", "tp", "dp"), False)]
)
def test_gradients_where_rows_are_sharded_over_every_axis(axes, check_vma):
    step = step_of(
        *(rows_sharded, axes, "tp=2,dp=2,fsdp=2", check_vma, ("fsdp", "dp", "tp")),
        microbatches=2,
        bucket_bytes=64,
    )
    close(jax.jit(step)(params(), *batch()), expected())


@check
def test_three_devices_of_tp(check_vma):
    """The share of each is no power of two."""
    wide = {**params(), "in": normal(D, 9), "out": (normal(9, D), None)}
    step = step_of(features_sharded, ("dp", "fsdp"), "dp=2,fsdp=1,tp=3", check_vma)
    close(jax.jit(step)(wide, *batch()), jax.jit(jax.value_and_grad(mean_alone))(wide, *batch()))


@check
def test_specs_may_be_a_prefix_and_parameters_a_single_array(check_vma):
    step = mean_value_and_grad(
        lambda w, x: (reduce_region(jnp.sum(jnp.sin(x @ w)), "tp"), len(x)), "dp", specs=P("tp")
    )
    mapped = jax.shard_map(
        step,
        mesh=make_mesh("dp=2,tp=4"),
        in_specs=(P("tp"), P("dp", "tp")),
        out_specs=(P(), P("tp")),
        check_vma=check_vma,
    )

    def one(w, x):  # each device's block of x @ w goes through the sine
        products = x.reshape(4, 4, 2) * w.reshape(4, 2)
        return jnp.sum(jnp.sin(jnp.sum(products, axis=-1))) / 4

    args = normal(8), normal(4, 8)
    close(jax.jit(mapped)(*args), jax.jit(jax.value_and_grad(one))(*args))


@check
@pytest.mark.parametrize("microbatches", [1, 2])
def test_aux_is_stacked_and_changes_nothing_else(microbatches, check_vma):
    def loss(w, x):
        total = jnp.sum(jnp.sin(x * w))
        rows = jnp.ones_like(x[:, 0], "int32")
        return (total, len(x)), {"rows": lax.psum(jnp.sum(rows), "dp"), "first": x[0]}

    options = {"specs": P(), "microbatches": microbatches}
    mesh, x, w = make_mesh("dp=4,tp=2"), normal(16, D), normal(D)

    def mapped(loss, out, **more):
        step = mean_value_and_grad(loss, "dp", **options, **more)
        return jax.jit(
            jax.shard_map(
                step,
                mesh=mesh,
                in_specs=(P(), P("dp")),
                out_specs=(out, P()),
                check_vma=check_vma,
            )
        )(w, x)

    of_aux = {"rows": P(), "first": P(None, "dp")}
    (value, aux), grads = mapped(loss, (P(), of_aux), has_aux=True)
    close((value, grads), mapped(lambda w, x: loss(w, x)[0], P()))
    assert aux["rows"].tolist() == [16 // microbatches] * microbatches
    first = x.reshape(4, microbatches, -1, D)[:, :, 0].swapaxes(0, 1)
    np.testing.assert_array_equal(aux["first"], first.reshape(microbatches, 4 * D))


# -- what travels -------------------------------------------------------------------------------


def dense(params, x):
    for w in params.values():
        x = jnp.sin(x @ w)
    return jnp.sum(x), x.shape[0]


def sent(check_vma, **options):
    specs = None if check_vma else P()
    step = jax.shard_map(
        mean_value_and_grad(dense, "dp", specs=specs, **options),
        mesh=make_mesh("dp=8"),
        in_specs=(P(), P("dp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    layers = {str(i): normal(D, D) for i in range(5)}
    return count_collectives(step, layers, normal(32, D), grad=False)


@check
def test_one_reduction_for_all_microbatches(check_vma):
    """Five gradients, a loss and a weight, however many microbatches."""
    once = sent(check_vma)
    assert once.forward == {"psum": 5 + 2}
    assert once.forward_bytes == 2 * 7 / 8 * 4 * (5 * D * D + 2)
    assert sent(check_vma, microbatches=4) == once


@pytest.mark.parametrize(
    ("size", "buckets", "check_vma"),
    [(1, 5, True), (64, 5, False), (128, 3, True), (200, 2, False), (10**6, 1, True)],
)
def test_buckets_hold_as_many_leaves_as_fit(size, buckets, check_vma):
    """Each leaf is 64 bytes."""
    found = sent(check_vma, microbatches=2, bucket_bytes=size)
    assert found.forward == {"psum": buckets + 2}
    assert found.forward_bytes == sent(check_vma).forward_bytes


@pytest.mark.parametrize("microbatches", [1, 2])
def test_other_axes_under_check_vma_false_are_summed_once_too(microbatches):
    """Two psums of the loss over tp, there and back; and six: four gradients, loss and weight."""
    step = step_of(
        features_sharded, ("dp", "fsdp"), "dp=2,fsdp=2,tp=2", False, microbatches=microbatches
    )
    found = count_collectives(step, params(), *batch(), grad=False).forward
    assert found == {
        "psum": 2 * microbatches + 4 + 2,
        "all_gather": 2 * microbatches,
        "psum_scatter": 2 * microbatches,
    }


# -- numbers ------------------------------------------------------------------------------------


@check
def test_microbatches_of_16_bit_parameters_are_added_wide(check_vma):
    """256 + 1 is 256 in bfloat16: gradients of the rows would all be lost after the first."""
    x = np.ones(64, "float32")
    x[0] = 256
    step = mean_value_and_grad(
        lambda w, x: (jnp.sum(w * x), len(x)), "dp", specs=P(), microbatches=8
    )
    mapped = jax.shard_map(
        step, mesh=make_mesh("dp=8"), in_specs=(P(), P("dp")), out_specs=P(), check_vma=check_vma
    )
    loss, gradient = jax.jit(mapped)(jnp.ones((), "bfloat16"), jnp.asarray(x, "bfloat16"))
    assert gradient.dtype == "bfloat16"
    assert loss.dtype == "float32"
    assert float(gradient) == (256 + 64) / 64  # 319 / 64, rounded once
    assert float(loss) == (256 + 63) / 64


@check
def test_nothing_to_learn_from(check_vma):
    """A total weight of 0 is no NaN, and hides none."""
    rows, more = batch()
    step = step_of(features_sharded, ("dp", "fsdp"), "dp=2,fsdp=2,tp=2", check_vma)
    step, nothing = jax.jit(step), {"weight": 0 * more["weight"]}
    for leaf in jax.tree.leaves(step(params(), rows, nothing)):
        np.testing.assert_array_equal(leaf, 0 * leaf)
    for number in (np.nan, np.inf):
        rows[3, 0] = number
        loss, grads = step(params(), rows, nothing)
        assert np.isnan(loss)
        assert all(np.any(np.isnan(leaf)) for leaf in jax.tree.leaves(grads["in"]))


@check
def test_mean_loss_and_its_gradient(check_vma):
    def mean(w, x, weight):
        return mean_loss(jnp.sum(weight * jnp.sin(w * x)), jnp.sum(weight), ("b", "a"))

    mapped = jax.shard_map(
        mean,
        mesh=make_mesh("a=2,b=4"),
        in_specs=(P(), P(("a", "b")), P(("a", "b"))),
        out_specs=P(),
        check_vma=check_vma,
    )
    x, weight = normal(16), np.abs(normal(16))

    def alone(w, x, weight):
        return jnp.sum(weight * jnp.sin(w * x)) / jnp.sum(lax.stop_gradient(weight))

    grad = partial(jax.value_and_grad, argnums=(0, 1, 2))
    close(jax.jit(grad(mapped))(2.0, x, weight), jax.jit(grad(alone))(2.0, x, weight))
    loss, gradients = jax.jit(grad(mapped))(2.0, x, 0 * weight)
    assert [float(np.max(np.abs(g))) for g in (loss, *gradients)] == [0, 0, 0, 0]
    assert np.isnan(jax.jit(grad(mapped))(2.0, x * np.float32("nan"), 0 * weight)[0])


@check
def test_global_norm(check_vma):
    tree = {"a": normal(8, 4), "b": normal(6), "c": (normal(4), None, jnp.ones(4, "bfloat16"))}
    specs = {"a": P("x", "y"), "b": P(), "c": P("y")}
    mapped = jax.shard_map(
        lambda tree: global_norm(tree, specs=specs),
        mesh=make_mesh("x=2,y=2,z=2"),
        in_specs=(specs,),
        out_specs=P(),
        check_vma=check_vma,
    )
    flat = np.concatenate([np.ravel(np.asarray(leaf, "float64")) for leaf in jax.tree.leaves(tree)])
    norm = jax.jit(mapped)(tree)
    assert norm.dtype == "float32"
    np.testing.assert_allclose(norm, np.linalg.norm(flat), rtol=1e-6)
    np.testing.assert_allclose(global_norm(tree), norm, rtol=1e-6)  # outside, of whole arrays
    assert count_collectives(mapped, tree, grad=False).forward == {"psum": 2}
    assert float(global_norm({})) == 0


def test_reduce_gradients_leaves_what_is_sharded_or_summed_already():
    def body(whole, shard, x):
        def loss(whole):
            return jnp.sum(whole * x)  # JAX sums this gradient over dp: whole is replicated

        summed = jax.grad(loss)(whole)
        grads = {"summed": summed, "shard": shard, "local": jnp.sum(x)}
        specs = {"summed": P(), "shard": P("dp"), "local": P()}
        return reduce_gradients(grads, ("dp", "tp"), specs=specs, bucket_bytes=1000)

    mapped = jax.shard_map(
        body,
        mesh=make_mesh("dp=4,tp=2"),
        in_specs=(P(), P("dp"), P(("dp", "tp"))),
        out_specs={"summed": P(), "shard": P("dp"), "local": P()},
    )
    x = np.random.default_rng(0).integers(-9, 9, 8).astype("float32")  # sums are exact
    found = jax.jit(mapped)(np.float32(2), np.arange(4.0, dtype="float32"), x)
    assert found["summed"] == found["local"] == np.sum(x)
    np.testing.assert_array_equal(found["shard"], np.arange(4.0))


@pytest.mark.parametrize(("wire", "bytes_sent"), [(None, 7), ("float32", 14)])
def test_gradients_travel_in_the_dtype_of_the_wire(wire, bytes_sent):
    def reduce(x):
        tree = {"a": x, "b": (x,)}
        return reduce_gradients(tree, Axis(("tp", "dp"), wire_dtype=wire), bucket_bytes=1000)

    def of_loss(w, x):
        axis = Axis(("tp", "dp"), wire_dtype=wire)
        step = mean_value_and_grad(lambda w, x: (jnp.sum(w * x), 8), axis, specs=P())
        return step(w, x)[1]

    mesh, spec = make_mesh("dp=4,tp=2"), P(("dp", "tp"))
    x, one = jnp.asarray([256, *[1] * 7], "bfloat16"), jnp.ones((), "bfloat16")
    for fn, args, specs, total in (
        (reduce, (x,), (spec,), 264.0),  # the neighbour of 263
        (of_loss, (one, 8 * x), (P(), spec), 8 * 263 / 64),
    ):
        mapped = jax.shard_map(fn, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
        for leaf in jax.tree.leaves(jax.jit(mapped)(*args)):
            assert leaf.dtype == "bfloat16"
            assert float(leaf.reshape(())) == pytest.approx(total, rel=0.004)
    counts = count_collectives(
        jax.shard_map(reduce, mesh=mesh, in_specs=spec, out_specs=P(), check_vma=False),
        x,
        grad=False,
    )
    assert counts.forward_bytes == bytes_sent


def test_what_does_not_travel_is_not_rounded():
    axis, third = Axis("dp", wire_dtype="bfloat16"), jnp.full(8, 1 / 3)
    reduce = jax.shard_map(
        lambda x: reduce_gradients({"shard": x}, axis, specs=P("dp")),
        mesh=make_mesh("dp=8"),
        in_specs=P("dp"),
        out_specs=P("dp"),
        check_vma=False,
    )
    np.testing.assert_array_equal(jax.jit(reduce)(third)["shard"], third)


def test_gradients_of_many_tokens_do_not_overflow_on_a_narrow_wire():
    step = mean_value_and_grad(lambda w, x: (jnp.sum(w * x), x.size), "dp", specs=P())
    mapped = jax.shard_map(step, mesh=make_mesh("dp=8"), in_specs=(P(), P("dp")), out_specs=P())
    _, gradient = jax.jit(mapped)(jnp.ones((), "float16"), jnp.full(8 * 8, 2000.0, "float16"))
    assert float(gradient) == 2000.0


# -- errors -------------------------------------------------------------------------------------


def error(step, *args, check_vma=True, kind=ValueError):
    """What is said on a mesh of 4 x 2 of parameters [8, 3] over tp and rows [6, 3] over dp."""

    def body(w, x):
        step(w, x)
        return jnp.zeros(())

    mapped = jax.shard_map(
        body,
        mesh=make_mesh("dp=4,tp=2"),
        in_specs=(P("tp"), P("dp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    with pytest.raises(kind) as caught:
        jax.eval_shape(mapped, *(args or (normal(8, 3), normal(24, 3))))
    assert type(caught.value) is kind
    name, _, text = str(caught.value).partition(": ")
    assert name in ("mean_value_and_grad", "global_norm", "reduce_gradients", "mean_loss")
    return text


def good(w, x):
    return reduce_region(jnp.sum(w) * jnp.sum(x), "tp"), len(x)


def test_no_specs_under_check_vma_false():
    remedy = (
        "under check_vma=False types do not say over which axes a leaf is sharded; pass specs=, "
        "the in_specs of the tree"
    )
    assert error(mean_value_and_grad(good, "dp"), check_vma=False) == remedy
    assert error(lambda w, x: global_norm(w), check_vma=False) == remedy


def test_specs_that_differ_from_the_types():
    step = mean_value_and_grad(lambda p, x: good(p["w"], x), "dp", specs={"w": P("dp")})
    assert error(lambda w, x: step({"w": w}, x)) == (
        "params['w'] varies over ['tp'], but its spec shards it over ['dp']; give the in_specs of "
        "the tree, or leave out specs=, which check_vma=True does not need; name axes in "
        "groups= if devices along them have models of their own"
    )


def test_specs_that_are_none():
    assert error(mean_value_and_grad(good, "dp", specs=P("cp")), check_vma=False) == (
        "specs name ['cp'], but the axes bound here are ['dp', 'tp']; give the specs that "
        "shard_map got"
    )
    assert error(mean_value_and_grad(good, "dp", specs="tp"), kind=TypeError) == (
        "specs must hold PartitionSpecs, got 'tp'"
    )
    text = error(mean_value_and_grad(good, "dp", specs={"w": P()}))
    assert text.startswith("specs are no pytree prefix of what they describe: ")


def test_a_loss_that_varies_over_another_axis():
    assert error(mean_value_and_grad(lambda w, x: (jnp.sum(w) * jnp.sum(x), 1), "dp")) == (
        "loss_sum varies over ['tp'], which axis ('dp',) lacks; add them if devices have "
        "different shares of the loss there; name them in groups= if devices along them have "
        "models of their own; otherwise sum or gather before it with reduce_region or "
        "gather_region, whose results are replicated"
    )
    text = error(mean_value_and_grad(lambda w, x: (jnp.sum(x), jnp.sum(w)), "dp"))
    assert text.startswith("weight varies over ['tp'], which axis ('dp',) lacks")


def test_results_of_the_wrong_kind():
    remedy = "; return the sum of the losses and their number"
    for result, found in (
        (lambda w, x: good(w, x)[0], "no tuple"),
        (lambda w, x: (), "a tuple of 0"),
    ):
        assert error(mean_value_and_grad(result, "dp"), kind=TypeError) == (
            f"loss_fn must return (loss_sum, weight), got {found}{remedy}"
        )
    assert error(mean_value_and_grad(lambda w, x: 0.0, "dp", has_aux=True), kind=TypeError) == (
        "with has_aux loss_fn must return ((loss_sum, weight), aux), got no tuple"
    )
    forgotten = mean_value_and_grad(lambda w, x: good(w, x), "dp", has_aux=True)
    assert error(forgotten, kind=TypeError) == (
        "with has_aux loss_fn must return ((loss_sum, weight), aux), got a tuple of 2 (no tuple, "
        "no tuple)"
    )
    unasked = mean_value_and_grad(lambda w, x: (good(w, x), x), "dp")
    assert error(unasked, kind=TypeError) == (
        "loss_fn returned ((loss_sum, weight), aux); pass has_aux=True, or return (loss_sum, "
        "weight) alone"
    )
    assert error(mean_value_and_grad(lambda w, x: (x, 1), "dp")) == (
        "loss_sum must be a scalar, got local shape (6, 3); sum it with jnp.sum"
    )
    assert error(lambda w, x: mean_loss(1.0, x, "dp")) == (
        "weight must be a scalar, got local shape (6, 3); sum it with jnp.sum"
    )
    assert error(lambda w, x: mean_loss(1, 1, "dp"), kind=TypeError) == (
        "loss_sum must be a float, got int32; cast it"
    )


def test_microbatches_that_do_not_divide():
    assert error(mean_value_and_grad(good, "dp", microbatches=4)) == (
        "batch[0] has local shape (6, 3), whose dimension 0 microbatches=4 does not divide: "
        "6 = 1 x 4 + 2; choose a divisor of 6, or pad it to 8"
    )
    step = mean_value_and_grad(lambda w, x: good(w, x["rows"]), "dp", microbatches=2)
    assert error(lambda w, x: step(w, {"rows": jnp.float32(1)})) == (
        "batch[0]['rows'] is a scalar, which microbatches=2 cannot cut; broadcast it over the "
        "batch, or let loss_fn close over it"
    )


def test_parameters_without_gradients():
    step = mean_value_and_grad(lambda p, x: good(p["w"], x), "dp")
    assert error(lambda w, x: step({"w": w, "step": jnp.int32(3)}, x), kind=TypeError) == (
        "params['step'] is int32[], which has no gradient; pass it to loss_fn apart from params"
    )


@pytest.mark.parametrize(
    ("options", "kind", "text"),
    [
        ({"microbatches": 0}, ValueError, "microbatches=0 must be at least 1"),
        (
            {"microbatches": True},
            TypeError,
            "microbatches must be an integer, got True of type bool",
        ),
        ({"bucket_bytes": 0}, ValueError, "bucket_bytes=0 must be at least 1"),
        (
            {"bucket_bytes": 1.5},
            TypeError,
            "bucket_bytes must be an integer, got 1.5 of type float",
        ),
    ],
)
def test_options(options, kind, text):
    with pytest.raises(kind) as caught:
        mean_value_and_grad(good, "dp", **options)
    assert str(caught.value) == f"mean_value_and_grad: {text}"


def test_gathered_results_may_be_returned_as_replicated():
    """`gather_region` and `reduce_region` make what a loss over other axes needs."""

    def loss(w, x):
        return jnp.sum(jnp.sin(x @ gather_region(w, "tp", dim=0).T)), len(x)

    step = jax.shard_map(
        mean_value_and_grad(loss, "dp"),
        mesh=make_mesh("dp=4,tp=2"),
        in_specs=(P("tp"), P("dp")),
        out_specs=(P(), P("tp")),
    )
    args = normal(8, 3), normal(24, 3)
    expected = jax.value_and_grad(lambda w, x: jnp.sum(jnp.sin(x @ w.T)) / len(x))
    close(jax.jit(step)(*args), jax.jit(expected)(*args))


@check
def test_a_loss_that_every_device_has_whole(check_vma, float64):
    """Nothing divides it: no axis is summed over."""
    w, x = wide((normal(3), normal(4, 3)))
    step = jax.shard_map(
        mean_value_and_grad(lambda w, x: (jnp.sum(jnp.sin(x @ w)), len(x)), (), specs=P()),
        mesh=make_mesh("dp=4,tp=2"),
        in_specs=P(),
        out_specs=P(),
        check_vma=check_vma,
    )
    assert_alike(jax.jit(step)(w, x), (np.mean(np.sin(x @ w)), x.T @ np.cos(x @ w) / 4))


def test_the_norm_of_integers_does_not_overflow():
    norm = jax.shard_map(
        lambda x: global_norm({"x": x, "yes": x > 0}),
        mesh=make_mesh("dp=4,tp=2"),
        in_specs=P("tp"),
        out_specs=P(),
    )
    x = np.array([3 * 10**5, 4 * 10**5], np.int32)
    np.testing.assert_allclose(jax.jit(norm)(x), 5e5, rtol=1e-6)


def test_a_weight_that_is_no_real_number():
    assert error(lambda w, x: mean_loss(1.0, jnp.complex64(1), "dp"), kind=TypeError) == (
        "weight must be a real number, got complex64; take its real part"
    )


@check
def test_weights_that_are_integers_do_not_wrap_around(check_vma):
    """Two devices of 2^30 tokens each have 2^31, which int32 does not hold."""

    def both(x):
        loss = jnp.sum(x), jnp.int32(2**30)
        weighed = lambda w, x: (jnp.sum(w * x), jnp.int32(2**30))  # noqa: E731
        of_weight = mean_value_and_grad(weighed, "dp", specs=P())
        return mean_loss(*loss, "dp"), of_weight(jnp.float32(3), x)

    run = jax.shard_map(
        both,
        mesh=make_mesh("dp=2", devices=jax.devices()[:2]),
        in_specs=P("dp"),
        out_specs=P(),
        check_vma=check_vma,
    )
    mean, (loss, grad) = jax.jit(run)(jnp.full(2, 2.0**30))
    assert (mean, loss, grad) == (1, 3, 1)


@jax.custom_vjp
def own_copy(x):
    return x


@jax.custom_vjp
def own_reduce(x):
    return lax.psum(x, "tp")


own_copy.defvjp(lambda x: (x, None), lambda _, ct: (lax.psum(ct, "tp"),))
own_reduce.defvjp(lambda x: (own_reduce(x), None), lambda _, ct: (ct,))


@pytest.mark.parametrize(
    ("ends", "shares"),
    [
        ((own_copy, own_reduce), (1, 1 / 4)),
        ((lambda x: copy_region(x, "tp"), lambda x: reduce_region(x, "tp")), (1, 1)),
    ],
    ids=["own", "jaxpar"],
)
def test_operators_of_one_s_own_under_check_vma_false(ends, shares):
    """Their derivatives are those of another convention: sharded parameters get 1/n."""
    begin, end = ends

    def loss(p, x):
        return jnp.sum(end(jnp.sin(begin(x * p["scale"]) @ p["in"]) @ p["out"]) ** 2), len(x)

    def whole(p, x):
        return jnp.sum((jnp.sin((x * p["scale"]) @ p["in"]) @ p["out"]) ** 2) / len(x)

    p, x = {"scale": normal(D), "in": normal(D, H), "out": normal(H, D)}, normal(ROWS, D)
    specs = {"scale": P(), "in": P(None, "tp"), "out": P("tp")}
    step = jax.shard_map(
        mean_value_and_grad(loss, "dp", specs=specs),
        mesh=make_mesh("dp=2,tp=4"),
        in_specs=(specs, P("dp")),
        out_specs=(P(), specs),
        check_vma=False,
    )
    expected = jax.grad(whole)(p, x)
    shares = {"scale": shares[0], "in": shares[1], "out": shares[1]}
    close(jax.jit(step)(p, x)[1], jax.tree.map(jnp.multiply, expected, shares))


@pytest.mark.parametrize("flag", [None, 1, "yes", np.False_])
def test_has_aux_is_a_flag(flag):
    with pytest.raises(TypeError, match=r"^mean_value_and_grad: has_aux must be True or False"):
        mean_value_and_grad(lambda w, x: (w, 1), "dp", has_aux=flag)
