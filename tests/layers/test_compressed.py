"""Sums of gradients in 8 bits: nothing is lost for good."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import Axis, LowBit, make_mesh
from jaxpar.layers import reduce_compressed_gradients
from jaxpar.testing import count_collectives, tolerance

STEPS = 5


def gradients(step):
    """Of 8 devices: large leaves, one whose size nothing divides, small ones, and integers."""
    rng = np.random.default_rng(step)
    return {
        "large": rng.standard_normal((8 * 160, 128)).astype("float32"),
        "odd": rng.standard_normal((8 * 131, 127)).astype("float32"),
        "small": rng.standard_normal((8, 16)).astype("float32"),
        "count": np.arange(8, dtype="int32"),
        "half": rng.standard_normal((8 * 131, 127)).astype(jnp.bfloat16),
        # Sums that float16 has no room for but as multiples of 2^-24.
        "tiny": (1e-5 * rng.standard_normal((8 * 131, 127))).astype("float16"),
        "small_half": rng.standard_normal((8, 16)).astype(jnp.bfloat16),
    }


def compiled(axis="dp", check_vma=True, **options):
    def local(grads, error, key):
        key = jax.random.wrap_key_data(key)
        given = {"key": key} if options.get("by_chance") else {}
        return reduce_compressed_gradients(grads, axis, error, **given)

    return jax.jit(
        jax.shard_map(
            local,
            mesh=make_mesh("dp=8"),
            in_specs=(P("dp"), P("dp"), P()),
            out_specs=(P(), P("dp")),
            check_vma=check_vma,
        )
    )


def before():
    """The error before the first step."""
    return {
        name: np.zeros(0 if name in ("small", "count") else x.shape, "float32")
        for name, x in gradients(0).items()
    }


def over_devices(x):
    return x.reshape(8, -1, *x.shape[1:]).sum(0, dtype="float64")


@pytest.mark.parametrize(
    ("wire", "names", "by_chance", "check_vma"),
    [
        (None, ("large", "odd", "half", "tiny", "small_half"), False, True),
        ("int8", ("odd", "half"), False, False),
        ("float8_e4m3fn", ("odd", "half"), False, True),
        (LowBit("int8", columns=64), ("odd", "half"), True, False),
    ],
)
def test_sums_and_errors_are_the_exact_sums(wire, names, by_chance, check_vma):
    """Of some leaves, and of those that lose nothing."""

    def some(tree):
        return {name: tree[name] for name in (*names, "small", "count")}

    step = compiled(Axis("dp", wire_dtype=wire), check_vma, by_chance=by_chance)
    error, sums, exact = some(before()), [], []
    for number in range(STEPS):
        grads = some(gradients(number))
        found, error = step(grads, error, jax.random.key_data(jax.random.key(number)))
        sums.append(jax.tree.map(np.float64, found))
        exact.append(jax.tree.map(over_devices, grads))
    for name in names:
        total = sum(each[name] for each in exact)
        lost = over_devices(np.asarray(error[name]))
        found = sum(each[name] for each in sums)
        allowed = tolerance("float32", 8 * STEPS) * np.abs(total).max()
        assert np.abs(found + lost - total).max() < allowed
        if name in ("tiny", "small_half"):
            continue
        # One step rounds each partial sum and the sum; five lose no more than one.
        rough = np.abs(sums[0][name] - exact[0][name]).max()
        assert 1e-3 < rough < 2.0
        assert np.abs(found - total).max() < 1.5 * rough
        if not by_chance and wire != "float8_e4m3fn":
            assert rough < 8 * 4.5 / 254 + 13 / 254 + (13 / 256 if name == "half" else 0)
    for name in ("small", "count"):
        atol = tolerance("float32", 8) * np.abs(exact[0][name]).max()
        np.testing.assert_allclose(sums[0][name], exact[0][name], rtol=0, atol=atol)
        assert not error[name].size


def test_only_small_leaves_are_summed_in_their_own_dtype():
    given = gradients(0), before(), np.zeros(2, "uint32")
    calls = count_collectives(compiled(), *given, grad=False).forward
    assert calls["all_to_all"] == calls["all_gather"] == 8  # values and scales of four leaves
    assert calls["psum"] == 3


@cache
def step_of_some_that_are_sharded(check_vma):
    specs = {"w": P(None, "tp"), "h": P(), "b": P()}
    parts = {"w": P("dp", "tp"), "h": P("dp"), "b": P("dp")}
    return jax.jit(
        jax.shard_map(
            lambda grads, error: reduce_compressed_gradients(grads, "dp", error, specs=specs),
            mesh=make_mesh("dp=4,tp=2"),
            in_specs=(parts, parts),
            out_specs=(specs, parts),
            check_vma=check_vma,
        )
    )


@pytest.mark.parametrize(
    ("leaf", "number", "check_vma"),
    [("w", np.inf, True), ("h", 6e4, False), ("b", np.nan, True)],
)
def test_a_step_with_a_gradient_that_is_not_finite_leaves_no_trace(leaf, number, check_vma):
    """Of sharded, large and small leaves; float16 overflows in the sum alone."""
    step = step_of_some_that_are_sharded(check_vma)

    def grads(seed):
        rng = np.random.default_rng(seed)
        shapes = {"w": (4 * 131, 260), "h": (4 * 130, 130), "b": (4 * 3,)}
        dtypes = {"w": "float32", "h": "float16", "b": "bfloat16"}
        return {
            name: rng.standard_normal(shape).astype(jnp.dtype(dtypes[name]))
            for name, shape in shapes.items()
        }

    def of_devices(x):
        return np.float64(x).reshape(4, -1, *x.shape[1:]).sum(0)

    error = {name: np.zeros(x.shape, "float32") for name, x in grads(0).items()}
    found, exact = [], []
    for seed in range(4):
        given = grads(seed)
        if seed == 1:
            given[leaf].reshape(4, -1)[:, 1] = number
            before = error
        sums, error = step(given, error)
        if seed == 1:
            finite = {name: np.isfinite(np.float64(x)).all() for name, x in sums.items()}
            assert finite == {name: name != leaf for name in finite}
            jax.tree.map(np.testing.assert_array_equal, error, before)
        else:
            found.append(jax.tree.map(np.float64, sums))
            exact.append(jax.tree.map(of_devices, given))
    for name, x in error.items():
        total = sum(each[name] for each in exact)
        off = sum(each[name] for each in found) + of_devices(x) - total
        assert np.abs(off).max() < 1e-6 * np.abs(total).max()


def test_rounding_by_chance_has_no_bias():
    """Without feedback: the mean over many keys is the exact sum."""
    grads, nothing = {"large": gradients(0)["large"]}, {"large": before()["large"]}
    step, sums = compiled(by_chance=True), []
    for number in range(60):
        key = jax.random.key_data(jax.random.key(number))
        sums.append(np.float64(step(grads, nothing, key)[0]["large"]))
    exact = over_devices(grads["large"])
    nearest = np.float64(compiled()(grads, nothing, np.zeros(2, "uint32"))[0]["large"])
    assert np.abs(np.mean(sums, axis=0) - exact).mean() < 0.3 * np.abs(nearest - exact).mean()


def test_leaves_that_are_sharded_are_summed_over_the_other_axes():
    mesh, grads = make_mesh("dp=4,tp=2"), gradients(0)["large"]  # [4 * 160, 2 * 128] would do, too

    def local(grads):
        return reduce_compressed_gradients(grads, ("dp", "tp"), specs=P(None, "tp"))

    step = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=P("dp", "tp"),
        out_specs=(P(None, "tp"), P("dp", "tp")),
        check_vma=False,
    )
    wide = np.concatenate([grads, 2 * grads], axis=1)
    sums, error = jax.jit(step)(wide)
    exact = wide.reshape(4, -1, 256).sum(0)
    assert error.shape == wide.shape
    lost = np.asarray(error).reshape(4, -1, 256).sum(0)
    np.testing.assert_allclose(sums + lost, exact, atol=1e-4)


@pytest.mark.parametrize(
    ("kind", "message", "options"),
    [
        (TypeError, "wire_dtype=bfloat16 is none of 8 bits; choose 'int8'", {"wire": "bfloat16"}),
        (ValueError, r"error\['large'\] has local shape \(3, 128\), but the gradient", {"rows": 3}),
        (
            TypeError,
            "a key rounds int8 by chance, and not float8_e4m3fn",
            {"wire": "float8_e4m3fn"},
        ),
    ],
)
def test_errors(kind, message, options):
    axis = Axis("dp", wire_dtype=options.get("wire"))

    def local(grads):
        error = {"large": jnp.zeros((options["rows"], 128))} if "rows" in options else None
        return reduce_compressed_gradients(grads, axis, error, key=jax.random.key(0))

    mapped = jax.shard_map(
        local, mesh=make_mesh("dp=8"), in_specs=P("dp"), out_specs=(P(), P("dp"))
    )
    with pytest.raises(kind, match=f"^reduce_compressed_gradients: {message}"):
        jax.eval_shape(mapped, {"large": gradients(0)["large"]})


def test_a_leaf_that_jax_has_summed_is_left_as_it_is():
    """As by `reduce_gradients`, over the axes over which it is typed as replicated."""
    whole, part = gradients(0)["large"], gradients(1)["large"]
    mapped = jax.shard_map(
        lambda whole, part: reduce_compressed_gradients((whole, part), ("dp", "tp"))[0],
        mesh=make_mesh("dp=4,tp=2"),
        in_specs=(P(), P("dp")),
        out_specs=P(),
    )
    found, total = jax.jit(mapped)(whole, part)
    np.testing.assert_array_equal(found, whole)
    exact = part.reshape(4, -1, 128).sum(0, dtype="float64")
    np.testing.assert_allclose(total, exact, rtol=0, atol=np.abs(exact).max() / 50)
