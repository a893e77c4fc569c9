"""Edits leave what a program computes as it is: values of edited programs on eight CPU devices."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.tools.explain.forms import overlapped
from jaxpar.tools.explain.repeats import hoisted, kept
from jaxpar.tools.explain.rewrite import Change, bound, rewritten

MESH = jaxpar.make_mesh("dp=2,tp=4")


def normal(*shape, seed=0):
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def every(name):
    """Binds again each equation of a primitive, which changes nothing."""
    return Change(
        lambda jaxpr: {n: bound for n, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == name}
    )


def same_values(fn, change, *args, atol=1e-5, **settings):
    jitted = jax.jit(fn, **settings)
    with jax.set_mesh(MESH):
        other = rewritten(jitted, change, *args)
        assert other is not None
        wanted, found = jax.tree.leaves(jax.jit(fn)(*args)), other(*jax.tree.leaves(args))
    assert len(wanted) == len(found)
    for want, got in zip(wanted, found, strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=atol * np.max(np.abs(want)))


def trained(params, x):
    """A step with all that can be around an equation: scan, checkpoint, cond, jit, custom_vjp."""

    @jax.custom_vjp
    def scaled(x):
        return x * 2.0

    scaled.defvjp(lambda x: (scaled(x), None), lambda _, g: (g * 2.0,))

    def layer(h, w):
        h = lax.with_sharding_constraint(jnp.tanh(h @ w), NamedSharding(MESH, P("dp", "tp")))
        h = lax.cond(jnp.sum(h) > 0, lambda h: h * 1.5, lambda h: h, h)
        return jax.nn.silu(scaled(h)), jnp.sum(h)

    def loss(params):
        h, sums = lax.scan(jax.checkpoint(layer), x, params["w"])
        h = lax.fori_loop(0, 3, lambda _, h: h * 0.9, lax.stop_gradient(h)) + h
        return jnp.sum((h @ params["out"]) ** 2) + jnp.sum(sums)

    value, gradients = jax.value_and_grad(loss)(params)
    return value, jax.tree.map(lambda w, g: w - 0.1 * g, params, gradients)


PARAMS = {"w": normal(3, 16, 16), "out": normal(16, 8, seed=1)}


@pytest.mark.parametrize("name", ["sharding_constraint", "dot_general", "tanh", "mul", "cond"])
def test_equations_wherever_they_are(name):
    same_values(trained, every(name), PARAMS, normal(8, 16, seed=2), donate_argnums=0)


def test_without_what_is_to_change_there_is_no_program():
    with jax.set_mesh(MESH):
        assert rewritten(jax.jit(jnp.sin), every("cos"), normal(8)) is None


def test_donations_stay():
    with jax.set_mesh(MESH):
        fn = rewritten(jax.jit(trained, donate_argnums=0), every("tanh"), PARAMS, normal(8, 16))
        text = fn.lower(*jax.tree.leaves((PARAMS, normal(8, 16)))).as_text()
    assert text.count("donor") + text.count("tf.aliasing_output") >= 2


def gathered(x, w):
    return jnp.tanh(lax.all_gather(x, "tp", tiled=True) @ w)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("form", overlapped(None), ids=lambda form: form.mode)
def test_forms_of_gathers_and_scatters(form, check_vma):
    def local(x, up, gate, down):
        whole = lax.all_gather(x, "tp", axis=1, tiled=True)  # [b, s, d]
        hidden = jnp.einsum("bsd,df->bsf", whole, up) * jnp.einsum("bsd,df->bsf", whole, gate)
        return lax.psum_scatter(
            jnp.einsum("bsf,fd->bsd", hidden, down), "tp", scatter_dimension=1, tiled=True
        )

    step = jax.shard_map(
        local,
        mesh=MESH,
        in_specs=(P("dp", "tp"), P(None, "tp"), P(None, "tp"), P("tp")),
        out_specs=P("dp", "tp"),
        check_vma=check_vma,
    )
    args = normal(4, 8, 16), normal(16, 32), normal(16, 32, seed=1), normal(32, 16, seed=2)
    same_values(step, Change(form.equations), *args)


def test_a_form_of_the_right_operand():
    step = jax.shard_map(
        lambda x, w: x @ lax.all_gather(w, "tp", tiled=True),
        mesh=MESH,
        in_specs=(P("dp"), P("tp")),
        out_specs=P("dp"),
        check_vma=False,
    )
    (form, *_) = overlapped(None)
    same_values(step, Change(form.equations), normal(4, 16), normal(16, 8))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_gather_in_front_of_the_scan(check_vma):
    def local(x, w, scale):
        def block(total, rows):
            out = rows @ lax.all_gather(w, "tp", tiled=True) * scale
            return total + jnp.sum(out), out

        start = lax.pcast(jnp.float32(0), ("dp", "tp"), to="varying") if check_vma else 0.0
        total, out = lax.scan(block, start, x, reverse=True)
        return total[None], out

    step = jax.shard_map(
        local,
        mesh=MESH,
        in_specs=(P(None, ("dp", "tp")), P("tp"), P()),
        out_specs=(P(("dp", "tp")), P(None, ("dp", "tp"))),
        check_vma=check_vma,
    )
    same_values(step, Change(hoisted), normal(3, 16, 8), normal(8, 4), jnp.float32(2))


@pytest.mark.parametrize("before", ["", "norm"])
@pytest.mark.parametrize("check_vma", [True, False])
def test_what_a_checkpoint_sends_is_kept(before, check_vma):
    def layer(w, x):
        x = x / jnp.sum(x**2) if before else x
        return jnp.tanh(lax.all_gather(x, "tp", tiled=True) @ w)

    def local(w, x):
        def loss(w):
            return jnp.sum(jax.checkpoint(layer)(w, x) ** 2)

        return jax.grad(loss)(w)

    step = jax.shard_map(
        local,
        mesh=MESH,
        in_specs=(P(None, "tp"), P("tp")),
        out_specs=P(None, "tp"),
        check_vma=check_vma,
    )
    args = normal(8, 16), normal(16, 8)
    same_values(step, Change(kept), *args)
    with jax.set_mesh(MESH):
        text = str(jax.make_jaxpr(rewritten(jax.jit(step), Change(kept), *args))(*args))
        assert str(jax.make_jaxpr(step)(*args)).count("all_gather[") == 2
    assert text.count("all_gather[") == 1


@pytest.mark.parametrize("check_vma", [True, False])
def test_what_a_checkpoint_sums_is_kept(check_vma):
    def layer(w, x):  # the sum varies over dp alone, what is summed over tp, too
        return jnp.tanh(x + lax.psum(jnp.tanh(x @ w["up"]) @ w["down"], "tp"))

    def local(w, x):
        w = jax.tree.map(lambda w: lax.pcast(w, "dp", to="varying"), w) if check_vma else w
        gradients = jax.grad(lambda w: jnp.sum(jax.checkpoint(layer)(w, x) ** 2))(w)
        return jax.tree.map(lambda g: lax.psum(g, "dp"), gradients)

    specs = {"up": P(None, "tp"), "down": P("tp")}
    step = jax.shard_map(
        local, mesh=MESH, in_specs=(specs, P("dp")), out_specs=specs, check_vma=check_vma
    )
    args = {"up": normal(8, 16), "down": normal(16, 8)}, normal(4, 8)
    same_values(step, Change(kept), *args)
    with jax.set_mesh(MESH):
        plain = jax.make_jaxpr(step)(*args)
        edited = jax.make_jaxpr(rewritten(jax.jit(step), Change(kept), *args))(
            *jax.tree.leaves(args)
        )
    sums = [len(re.findall(r"psum\w*\[\s*axes=\('tp',\)", str(found))) for found in (plain, edited)]
    assert sums[0] == sums[1] + 1


def test_another_order_of_the_devices():
    other = Mesh(MESH.devices[::-1, ::-1], MESH.axis_names, axis_types=MESH.axis_types)

    def step(x, w):
        h = jax.shard_map(
            gathered, mesh=MESH, in_specs=(P("tp"), P(None, "tp")), out_specs=P(None, "tp")
        )(x, w)
        return lax.with_sharding_constraint(h * 2, NamedSharding(MESH, P("dp")))

    args = normal(8, 4), normal(4, 8)
    with jax.set_mesh(MESH):
        fn = rewritten(jax.jit(step), Change(meshes=(MESH, other)), *args)
        wanted = jax.jit(step)(*args)
    with jax.set_mesh(other):
        (found,) = fn(*args)
    np.testing.assert_allclose(found, wanted, rtol=1e-6)
    assert list(found.sharding.mesh.devices.flat) == list(other.devices.flat)
