"""Every public function that computes, under modes of JAX that a user may set.

A new function is a line of `computing.CASES`, a new flag one of `STRICT` or `WIDE`.
"""

import gc
import re
from contextlib import contextmanager
from functools import cache

import jax
import jax.monitoring
import jax.numpy as jnp
import numpy as np
import pytest
from computing import CASES
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import layers, moe
from jaxpar.ring.run import run as run_steps
from jaxpar.ring.steps import Step

LINE = jaxpar.make_mesh("x=4", devices=jax.devices()[:4])
BESIDE = {kind: jaxpar.make_mesh("x=4,left=2", axis_types=kind) for kind in AxisType}

# Flags that are set at once, as they may be: those that change no program, and those that do.
STRICT = {
    "jax_numpy_rank_promotion": "raise",
    "jax_numpy_dtype_promotion": "strict",
    "jax_debug_nans": True,
    "jax_debug_infs": True,
    "jax_debug_key_reuse": True,
    "jax_enable_checks": True,
    "jax_default_prng_impl": "rbg",
    "jax_threefry_partitionable": False,
    "jax_enable_custom_prng": True,
    "jax_legacy_prng_key": "error",
    "jax_check_static_indices": True,
    "jax_compiler_enable_remat_pass": False,
    "jax_disable_bwd_checks": True,
    "jax_disable_vmap_shmap_error": True,
    "jax_use_direct_linearize": False,  # `WIDE` has the default
    "jax_disallow_mesh_context_manager": True,
    "jax_high_dynamic_range_gumbel": True,
    "jax_mutable_array_checks": False,
    "jax_ragged_dot_use_ragged_dot_instruction": False,
    "jax_thread_guard": True,
    "jax_allow_f16_reductions": False,
}
NEWER = {  # than the oldest jax
    "jax_accurate_erf_inv": True,
    "jax_custom_jvp3": True,
    "jax_raise_on_ppermute_sort_diff": False,
    "jax_remat_barrier_no_cotangents": True,
    "jax_use_hlo_logistic_lowering": True,
    "jax_use_rgv3": False,
}
STRICT |= {name: value for name, value in NEWER.items() if hasattr(jax.config, name)}
WIDE = {
    "jax_disable_jit": True,
    "jax_numpy_rank_promotion": "raise",
    "jax_enable_x64": True,
    "jax_use_simplified_jaxpr_constants": True,
    "jax_default_matmul_precision": "highest",
    "jax_softmax_custom_jvp": True,
    "jax_remove_size_one_mesh_axis_from_type": True,
}


@contextmanager
def flags(settings):
    before = {name: getattr(jax.config, name) for name in settings}
    try:
        for name, value in settings.items():
            jax.config.update(name, value)
        yield
    finally:
        for name, value in before.items():
            jax.config.update(name, value)


def shard_mapped(name, mesh=LINE, check_vma=True):
    case = CASES[name]
    specs = {"in_specs": case.specs, "out_specs": case.out}
    return jax.shard_map(case.call, mesh=mesh, axis_names={"x"}, check_vma=check_vma, **specs)


def with_gradients(name, **options):
    """A function of the arrays of a case: what it returns, and the gradients of its floats."""
    mapped = shard_mapped(name, **options)

    def is_float(x):
        return jnp.issubdtype(x.dtype, jnp.floating)

    def loss(floats, arrays):
        leaves, tree = jax.tree.flatten(arrays)
        given = iter(floats)
        out = mapped(*tree.unflatten([next(given) if is_float(x) else x for x in leaves]))
        parts = [jnp.sum(jnp.sin(y)) for y in jax.tree.leaves(out) if is_float(y)]
        return sum(parts, jnp.zeros((), "float32")), out

    def values(arrays):
        if not CASES[name].differentiable:
            return mapped(*arrays)
        floats = [x for x in jax.tree.leaves(arrays) if is_float(x)]
        (_, out), gradients = jax.value_and_grad(loss, has_aux=True)(floats, arrays)
        return out, gradients

    return values


# Of groups, `lax.ragged_dot` has no product beside explicit axes.
NEVER_EXPLICIT = {"apply_experts", "grouped_matmul"}


@cache
def values_of(name):
    """The values of a case with which all others are compared: strict, beside an explicit axis."""
    mesh = BESIDE[AxisType.Auto if name in NEVER_EXPLICIT else AxisType.Explicit]
    places = jax.tree.map(lambda spec: NamedSharding(mesh, spec), CASES[name].specs)
    with jax.set_mesh(mesh), flags(STRICT):
        arrays = jax.device_put(CASES[name].arrays, places)
        step = jax.jit(with_gradients(name, mesh=mesh))
        # A constant, which would stop `jax_debug_nans`.
        assert not re.search(r"\bnan\b", str(step.trace(arrays).jaxpr))
        return jax.device_get(step(arrays))


def assert_alike(found, wanted):
    found, wanted = (jax.tree.leaves(jax.device_get(tree)) for tree in (found, wanted))
    for x, y in zip(found, wanted, strict=True):
        assert x.dtype == y.dtype
        if x.dtype.name != "int8":  # of ties, rounding
            np.testing.assert_allclose(x.astype("float64"), y.astype("float64"), 1e-4, 2e-5)


@pytest.mark.parametrize("name", CASES)
def test_flags(name):
    """An explicit axis beside, and one that is left to JAX: values are the same.

    Flags that are strict are set for the one, under `check_vma=True`, the others for the other.
    """
    arrays, mesh = CASES[name].arrays, BESIDE[AxisType.Auto]
    wanted = values_of(name)
    with flags(WIDE):
        traced = jax.make_jaxpr(with_gradients(name, mesh=mesh, check_vma=False))(arrays)
        run = jax.extend.core.jaxpr_as_fun(traced)
        with jax.disable_jit(False):
            assert_alike(jax.jit(run)(*jax.tree.leaves(arrays)), wanted)


def test_the_partitioner_before_shardy():
    """It has ended the process where a loop over groups read what was sorted."""
    arrays = CASES["grouped_matmul"].arrays
    with flags({"jax_use_shardy_partitioner": False}):
        found = jax.jit(with_gradients("grouped_matmul"))(arrays)
    assert_alike(found, values_of("grouped_matmul"))


def test_rounding_by_chance_with_other_random_numbers():
    x = np.arange(32, dtype="float32").reshape(4, 8) / 7
    with flags(STRICT):
        rounded = jaxpar.quantize(x, key=jax.random.key(0))
    assert np.all(np.abs(rounded.dequantized() - x) <= rounded.scales)


@pytest.fixture(scope="module")
def few_objects():
    """Leaves the collector little to look at: JAX asks it to at each possible leak."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()
    gc.collect()
    gc.freeze()  # as after the collection of the tests


@pytest.mark.usefixtures("few_objects")
@pytest.mark.parametrize("name", CASES)
def test_arrays_do_not_leak_while_tracing(name):
    """With 64 bits, too. Gradients are left out: those of `lax.psum` leak in JAX itself."""
    with flags({"jax_enable_x64": True}), jax.checking_leaks():
        jax.eval_shape(shard_mapped(name), *CASES[name].arrays)


@pytest.mark.parametrize("name", CASES)
def test_without_jit(name):
    """JAX would compile each operation by itself."""
    compiled = []
    jax.monitoring.register_event_duration_secs_listener(
        lambda event, _, **__: compiled.append(event)
    )
    out = shard_mapped(name)(*CASES[name].arrays)
    jax.monitoring.clear_event_listeners()
    wanted = values_of(name)
    assert_alike(out, wanted[0] if CASES[name].differentiable else wanted)
    assert sum(event.endswith("backend_compile_duration") for event in compiled) < 40


# What has no devices to go between.
LOCAL = {
    *("quantize", "head_layout", "layer_norm", "zigzag_order", "Experts", "apply_experts"),
    *("as_experts", "grouped_matmul", "limit_capacity", "pad_experts", "route"),
    *("update_router_bias", "global_norm"),
}


@pytest.mark.parametrize("name", sorted(CASES.keys() - LOCAL))
def test_an_axis_of_vmap_is_refused(name):
    given = jax.tree.map(lambda x: np.stack([x] * 4), CASES[name].arrays)
    with pytest.raises(ValueError, match="has no devices for data to travel"):
        jax.eval_shape(jax.vmap(CASES[name].call, axis_name="x"), *given)


NO_ARRAYS = {
    *(
        "Axis",
        "Description",
        "GatedActivation",
        "LowBit",
        "Tuning",
        "agree",
        "compiled_with",
        "compiler_options",
    ),
    *("describe", "edge_disjoint_rings", "guard", "initialize", "jit", "make_mesh", "ring_hops"),
    *("ring_order", "tuned", "ways", "expert_capacity"),
}
# By other names: what `quantize`, `head_layout`, `route`, `routing_statistics` return.
RETURNED = {"Quantized", "HeadLayout", "Routing", "Statistics"}


def test_all_that_computes_is_tried():
    public = {*jaxpar.__all__, *layers.__all__, *moe.__all__}
    assert public == CASES.keys() | NO_ARRAYS | RETURNED


@pytest.mark.parametrize("check_vma", [True, False])
def test_long_rings_without_jit(check_vma):
    """Turns that are a loop, whose number is no array where it is taken in Python."""
    steps = [Step(distance) for distance in range(40)]

    def total(x):
        return run_steps(steps, x, lambda state, step: state + step.distance)

    mapped = jax.shard_map(total, mesh=LINE, in_specs=P("x"), out_specs=P("x"), check_vma=check_vma)
    with jax.disable_jit():
        assert mapped(jnp.zeros(4, "int32")).tolist() == [780] * 4
