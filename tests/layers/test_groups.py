"""Groups of devices with models of their own, in nested shard_maps and in flat ones."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import make_mesh
from jaxpar.layers import copy_region, global_norm, mean_value_and_grad, reduce_region

GROUPS, ROWS, D, H = 2, 4, 3, 4
SPECS = {"into": P(None, "tp"), "out": P("tp"), "scale": P()}


def normal(*shape):
    return np.random.default_rng([*shape]).standard_normal(shape).astype("float32")


def params():
    """Of all groups, one after the other."""
    return {"into": normal(GROUPS, D, H), "out": normal(GROUPS, H, D), "scale": normal(GROUPS, D)}


@jax.jit
def group(x):  # has the name of an axis
    return checkpoint_name(x * x, "group")


def loss_fn(p, x):
    hidden = jnp.tanh(copy_region(x * p["scale"], "tp") @ p["into"])
    return jnp.sum(group(reduce_region(hidden @ p["out"], "tp"))), len(x)


def of_one_device(p, x):
    return jnp.sum((jnp.tanh((x * p["scale"]) @ p["into"]) @ p["out"]) ** 2) / len(x)


def expected(x):
    """Loss, gradients and their norm, of each group on one device."""

    def of_group(p, x):
        loss, grads = jax.value_and_grad(of_one_device)(p, x)
        return loss, grads, jnp.sqrt(sum(jnp.sum(g * g) for g in jax.tree.leaves(grads)))

    return jax.vmap(of_group)(params(), x)


def stepped(axis, said, microbatches=1):
    """Loss, gradients and their norm, of the group of the device that runs it."""
    grad = mean_value_and_grad(loss_fn, axis, specs=SPECS, groups=said, microbatches=microbatches)

    def step(p, x):
        loss, grads = grad(p, x)
        return loss, grads, global_norm(grads, specs=SPECS, groups=said)

    return step


def in_groups(step):
    """Has the first dimension be that of groups, of which a device has one."""

    def of_groups(p, x):
        found = step(jax.tree.map(lambda w: w[0], p), x[0])
        return jax.tree.map(lambda leaf: leaf[None], found)

    return of_groups


def nested(step, batch, check_vma):
    mesh = make_mesh("group=2,dp=2,tp=2", axis_types=AxisType.Auto)
    specs, out_specs = (SPECS, batch), (P(), SPECS, P())
    options = {"check_vma": check_vma, "axis_names": {"dp", "tp"}}
    inner = jax.shard_map(step, in_specs=specs, out_specs=out_specs, **options)
    options = {"check_vma": check_vma, "axis_names": {"group"}}
    outer = jax.shard_map(in_groups(inner), in_specs=P("group"), out_specs=P("group"), **options)
    with jax.set_mesh(mesh):
        return jax.jit(outer)(params(), normal(GROUPS, ROWS, D))


def flat(step, batch, check_vma):
    specs = {name: P("group", *spec) for name, spec in SPECS.items()}
    mapped = jax.shard_map(
        in_groups(step),
        mesh=make_mesh("dp=2,group=2,tp=2"),
        in_specs=(specs, P("group", *batch)),
        out_specs=(P("group"), specs, P("group")),
        check_vma=check_vma,
    )
    return jax.jit(mapped)(params(), normal(GROUPS, ROWS, D))


def close(found, wanted):
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("run", "axis", "said", "microbatches", "check_vma"),
    [
        (nested, "dp", "group", 1, True),
        (nested, "dp", "group", 2, False),
        (nested, "dp", (), 1, False),  # an axis that loss_fn never names
        (nested, (), (), 2, False),
        (flat, ["dp"], ["group"], 2, True),
        (flat, "dp", ("group",), 1, False),
        (flat, (), (), 1, False),
    ],
)
def test_each_group_has_gradients_and_a_norm_of_its_own(run, axis, said, microbatches, check_vma):
    batch = P("dp") if axis else P()
    close(
        run(stepped(axis, said, microbatches), batch, check_vma), expected(normal(GROUPS, ROWS, D))
    )


def test_groups_that_are_not_said_are_refused_where_types_show_them():
    refused = "mean_value_and_grad: loss_sum varies over ['group'], which axis ('dp',) lacks;"
    step = mean_value_and_grad(loss_fn, "dp")
    with pytest.raises(ValueError, match=re.escape(refused)) as caught:
        nested(lambda p, x: (*step(p, x), 0.0), P("dp"), True)
    assert "name them in groups= if devices along them have models of their own" in str(
        caught.value
    )


def test_an_axis_that_loss_fn_does_not_name_needs_no_sum(float64):
    """What all devices along it compute is the same, and whole."""
    w, x = wide((normal(D), normal(ROWS, D)))
    step = jax.shard_map(
        mean_value_and_grad(lambda w, x: (jnp.sum(jnp.sin(x @ w)), len(x)), "dp", specs=P()),
        mesh=make_mesh("dp=2,idle=2", devices=jax.devices()[:4]),
        in_specs=(P(), P("dp")),
        out_specs=P(),
        check_vma=False,
    )
    text = jax.jit(step).lower(w, x).as_text()
    assert text.count("stablehlo.all_reduce") == 3  # of the loss, its weight, and the gradient
    assert_alike(jax.jit(step)(w, x), (np.mean(np.sin(x @ w)), x.T @ np.cos(x @ w) / ROWS))


def refusal(check_vma=True, axis="dp", groups="group", loss=loss_fn):
    mapped = jax.shard_map(
        mean_value_and_grad(loss, axis, specs=P(), groups=groups),
        mesh=make_mesh("dp=2,group=2,tp=2"),
        in_specs=(P(), P("dp")),
        out_specs=P(),
        check_vma=check_vma,
    )
    with pytest.raises(ValueError, match=r"^mean_value_and_grad: ") as caught:
        jax.eval_shape(mapped, {"w": normal(D)}, normal(ROWS, D))
    return str(caught.value).removeprefix("mean_value_and_grad: ")


def test_groups_that_cannot_be():
    assert refusal(groups=("dp", "group")) == (
        "axis and groups both have ['dp']; name axes that share a loss in axis, and those with a "
        "loss of their own in groups"
    )
    assert refusal(groups="no").startswith("groups 'no' is not bound: ")
    assert refusal().startswith(
        "params['w'] of local shape (3,) is replicated over ['group'], but each device of axis "
        "'group' (2) needs parameters of its own; leave that axis out of groups"
    )


def test_a_loss_that_was_summed_before():
    def summed(p, x):
        return lax.psum(jnp.sum(x @ p["w"]), "dp"), len(x)

    assert refusal(groups=(), loss=summed).startswith(
        "loss_sum of local shape () is replicated over ['dp'], but each device of axis 'dp' (2) "
        "needs a share of its own; leave out an earlier sum over axis, or leave out of axis "
        "the axes that share one loss"
    )
