"""grouped_matmul against NumPy: any sizes of groups, gradients twice, dtypes, meshes, errors."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import make_mesh
from jaxpar.moe import grouped_matmul
from jaxpar.moe._group_blocks import CPU_LENGTHS, blocks_rows_product
from jaxpar.moe._grouped import fitting_sizes
from jaxpar.testing import assert_matches_reference, tolerance

IMPLEMENTATIONS = ["blocks", "ragged_dot"]


def bounds(sizes, rows):
    ends = np.minimum(np.cumsum(sizes), rows)
    return list(zip(np.concatenate([[0], ends[:-1]]), ends, strict=True))


def reference(*args):
    lhs, rhs, sizes = map(np.asarray, args)
    out = np.zeros((len(lhs), rhs.shape[2]))
    for weight, (start, end) in zip(rhs, bounds(sizes, len(lhs)), strict=True):
        out[start:end] = lhs[start:end] @ weight
    return out


def reference_vjp(args, ct):
    lhs, rhs, sizes = map(np.asarray, args)
    d_lhs, d_rhs = np.zeros(lhs.shape), np.zeros(rhs.shape)
    for group, (start, end) in enumerate(bounds(sizes, len(lhs))):
        d_lhs[start:end] = ct[start:end] @ rhs[group].T
        d_rhs[group] = lhs[start:end].T @ ct[start:end]
    return d_lhs, d_rhs, None


def operands(sizes, rows, k=4, n=3, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    lhs = rng.standard_normal((rows, k)).astype(dtype)
    lhs[sum(sizes) :] = np.nan
    rhs = rng.standard_normal((len(sizes), k, n)).astype(dtype)
    return jnp.asarray(lhs), jnp.asarray(rhs), jnp.asarray(sizes, jnp.int32)


SIZES = [
    ([2, 0, 5, 1], 12),  # fewer rows than the smallest block, and an empty group
    ([300, 0, 17, 16, 64, 3], 420),  # blocks of all sizes, which overrun the next groups
    ([0, 0, 0, 0, 0, 420], 420),  # the last block ends with the buffer
    ([100, 250, 200, 9, 0, 1], 420),  # more than there are rows
    ([0, 0, 0, 0, 0, 0], 420),
    ([0, 0], 0),
]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_values_and_gradients_for_any_sizes(implementation):
    """One program for each buffer; rows past the groups hold NaN, in the cotangent too."""

    @jax.jit
    def both(lhs, rhs, sizes, ct):
        def product(lhs, rhs):
            return grouped_matmul(lhs, rhs, sizes, implementation=implementation)

        out, pull = jax.vjp(product, lhs, rhs)
        return out, *pull(ct)

    for sizes, rows in SIZES:
        args = operands(sizes, rows)
        ct = np.random.default_rng(1).standard_normal((rows, 3)).astype(np.float32)
        ct[sum(sizes) :] = np.nan
        expected = reference(*args), *reference_vjp(args, ct)[:2]
        results = both(*args, ct)
        for found, wanted in zip(results, expected, strict=True):
            atol = tolerance("float32", rows + 4) * np.max(np.abs(wanted), initial=1)
            np.testing.assert_allclose(found, wanted, rtol=0, atol=atol, err_msg=str(sizes))
        assert not np.any(results[0][sum(sizes) :])


@pytest.mark.parametrize(
    ("axes", "name", "check_vma"),
    [("dp=2,ep=4", "ep", False), ("a=3,b=2", ("b", "a"), True)],
)
def test_in_shard_map_with_groups_of_each_device(axes, name, check_vma):
    count = np.prod([int(size) for size in re.findall(r"\d+", axes)])
    mesh = make_mesh(axes, devices=jax.devices()[:count])
    names = (name,) if isinstance(name, str) else name
    devices = int(np.prod([mesh.shape[axis] for axis in names]))
    rng = np.random.default_rng(2)
    sizes = rng.multinomial(20, [0.1, 0.6, 0.0, 0.3], size=devices)
    sizes[0] = 0
    parts = [operands(own, 24, seed=seed) for seed, own in enumerate(sizes)]
    args = [jnp.concatenate(part) for part in zip(*parts, strict=True)]

    def local(function):
        def whole(*args):
            cut = [np.split(arg, devices) for arg in args]
            return np.concatenate([function(*own) for own in zip(*cut, strict=True)])

        return whole

    assert_matches_reference(
        grouped_matmul,
        local(reference),
        *args,
        mesh=mesh,
        in_specs=P(name),
        out_specs=P(name),
        check_vma=check_vma,
        max_directions=8,
    )


def test_weights_replicated_over_an_axis_that_rows_vary_over():
    """Their gradient is summed over it."""
    lhs, rhs, sizes = operands([3, 0, 4], 8)
    lhs = jnp.concatenate([lhs, 2 * lhs])

    def both(lhs, rhs, sizes):
        return np.concatenate([reference(half, rhs, sizes) for half in np.split(lhs, 2)])

    assert_matches_reference(
        grouped_matmul,
        both,
        *(lhs, rhs, sizes),
        mesh=make_mesh("dp=2", devices=jax.devices()[:2]),
        in_specs=(P("dp"), P(), P()),
        out_specs=P("dp"),
    )


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_second_derivatives(implementation, float64):
    lhs, rhs, sizes = wide(operands([3, 0, 2, 1], 9))

    def loss(product, lhs, rhs):
        return jnp.sum(jnp.sin(product(lhs, rhs)))

    def grouped(lhs, rhs):
        return grouped_matmul(lhs, rhs, sizes, implementation=implementation)

    group = np.repeat(np.arange(4), np.asarray(sizes))

    def plain(lhs, rhs):
        return jnp.einsum("mk,mkn->mn", lhs[: len(group)], rhs[group])

    def twice(product, lhs, rhs):
        def norm(*args):
            return sum(jnp.sum(g**2) for g in jax.grad(loss, (1, 2))(product, *args))

        return jax.jit(jax.grad(norm, (0, 1)))(lhs, rhs)

    assert_alike(twice(grouped, lhs, rhs), twice(plain, lhs, rhs))


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_vmap_over_rows_sizes_and_weights(implementation):
    def f(*args):
        return grouped_matmul(*args, implementation=implementation)

    def losses(f):
        return jax.jit(jax.grad(lambda *a: jnp.sum(jnp.cos(f(*a))), (0, 1), allow_int=True))

    parts = [operands([3, 1, 2], 8, seed=1), operands([0, 5, 0], 8, seed=2)]
    lhs, rhs, sizes = (jnp.stack(part) for part in zip(*parts, strict=True))
    for axes in ((0, None, None), (None, 0, None)):
        stacked = zip((lhs, rhs, sizes), axes, strict=True)
        args = [arg if axis == 0 else arg[0] for arg, axis in stacked]
        found = jax.jit(jax.vmap(f, axes))(*args)
        ones = [
            [arg[i] if axis == 0 else arg for arg, axis in zip(args, axes, strict=True)]
            for i in range(2)
        ]
        for i, one in enumerate(ones):
            np.testing.assert_allclose(found[i], reference(*one), rtol=1e-5, atol=1e-5)
    gradients = losses(jax.vmap(f))(lhs, rhs, sizes)
    for i in range(2):
        own = losses(f)(lhs[i], rhs[i], sizes[i])
        for found, wanted in zip(gradients, own, strict=True):
            np.testing.assert_allclose(found[i], wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
def test_narrow_floats_are_summed_wide(implementation, dtype):
    """One large term and many small ones that a narrow sum would lose."""
    lhs = np.concatenate([np.full((300, 1), 256), np.ones((300, 64))], axis=1).astype(dtype)
    rhs = np.ones((1, 65, 2), dtype)

    def f(lhs, rhs):
        return grouped_matmul(lhs, rhs, jnp.array([300]), implementation=implementation)

    out, (d_lhs, d_rhs) = jax.jit(
        lambda *a: (f(*a), jax.grad(lambda *a: jnp.sum(f(*a)), (0, 1))(*a))
    )(lhs, rhs)
    assert out.dtype == dtype
    np.testing.assert_array_equal(np.asarray(out, np.float32), 320)
    assert d_lhs.dtype == d_rhs.dtype == dtype
    np.testing.assert_array_equal(np.asarray(d_rhs[0, 1:], np.float32), 300)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_preferred_element_type_and_integers(implementation):
    lhs, rhs, sizes = operands([3, 4], 8)
    narrow = jnp.asarray(lhs, jnp.bfloat16), jnp.asarray(rhs, jnp.bfloat16)

    def f(*args):
        return grouped_matmul(
            *args, sizes, preferred_element_type="float32", implementation=implementation
        )

    out = jax.jit(f)(*narrow)
    assert out.dtype == jnp.float32
    exact = [np.asarray(x, np.float64) for x in narrow]
    np.testing.assert_allclose(out, reference(*exact, sizes), rtol=1e-6, atol=1e-6)
    gradients = jax.eval_shape(jax.grad(lambda *a: jnp.sum(f(*a)), (0, 1)), *narrow)
    assert [d.dtype for d in gradients] == [jnp.bfloat16] * 2
    whole = grouped_matmul(
        jnp.full((3, 4), 100, jnp.int8),
        jnp.full((1, 4, 2), 100, jnp.int8),
        jnp.array([2], jnp.uint8),
        implementation=implementation,
    )
    np.testing.assert_array_equal(whole, [[40000] * 2, [40000] * 2, [0, 0]])
    assert whole.dtype == jnp.int32


def test_sizes_whose_sum_passes_what_integers_hold():
    """Whatever their dtype, each is cut to the rows before they are summed."""
    most = 2**31 - 1
    lhs, rhs, _ = operands([8, 0, 0], 8)
    wanted = reference(lhs, rhs, [2, 8, 8])
    for dtype in ("int32", "uint32", "int64", "uint64"):
        with jax.enable_x64(dtype.endswith("64")):
            largest = np.iinfo(dtype).max if dtype.startswith("u") else most
            sizes = jnp.asarray(np.array([2, most, largest], dtype))
            assert sizes.dtype == dtype
            found = grouped_matmul(lhs, rhs, sizes, implementation="blocks")
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(fitting_sizes(jnp.array([200, 200], "uint8"), 300), [200, 100])
    rows = 2**30 + 5  # whose triple is more than an int32 holds
    sizes = jnp.array([rows - 7, 3, most, most, 1], "int32")
    np.testing.assert_array_equal(fitting_sizes(sizes, rows), [rows - 7, 3, 4, 0, 0])


def test_sizes_may_be_a_list():
    lhs, rhs, sizes = operands([3, 0, 4], 8)
    found = grouped_matmul(lhs, rhs, [3, 0, 4], implementation="blocks")
    np.testing.assert_allclose(found, reference(lhs, rhs, sizes), rtol=1e-5, atol=1e-5)


def test_work_follows_the_rows_and_not_the_buffer():
    """The loops run as often as the groups have blocks."""
    calls = []

    def product(x, w):
        jax.debug.callback(lambda: calls.append(1))
        return x @ w

    for sizes, blocks in (([0, 0, 0], 0), ([16, 0, 17], 3), ([700, 1, 0], 3 + 1)):
        calls.clear()
        lhs, rhs, sizes = operands(sizes, 1000)
        out = blocks_rows_product(CPU_LENGTHS, product, lhs, rhs, sizes, 3, np.float32)
        jax.block_until_ready(out)
        jax.effects_barrier()
        assert len(calls) == blocks


def test_one_program_lowers_for_every_platform():
    lhs, rhs, sizes = operands([3, 4], 8)

    def step(lhs, rhs):
        return jax.grad(lambda *a: jnp.sum(grouped_matmul(*a, sizes)), (0, 1))(lhs, rhs)

    exported = jax.export.export(jax.jit(step), platforms=("cpu", "tpu", "cuda"))(lhs, rhs)
    found = exported.call(lhs, rhs)
    np.testing.assert_allclose(found[0], step(lhs, rhs)[0], rtol=1e-6)
    for platform, count in (("tpu", 2), ("cuda", 0), ("cpu", 0)):
        text = jax.jit(step).trace(lhs, rhs).lower(lowering_platforms=(platform,)).as_text()
        assert text.count('chlo.ragged_dot"') == count, platform


ERRORS = [
    (
        {"lhs": jnp.zeros((8, 4, 1), jnp.float32)},
        ValueError,
        "grouped_matmul: lhs must be [m, k] and rhs [g, k, n], got local shapes (8, 4, 1) and "
        "(2, 4, 3); reshape them",
    ),
    (
        {"lhs": jnp.zeros((8, 5), jnp.float32)},
        ValueError,
        "grouped_matmul: lhs of local shape (8, 5) has 5 columns, but each weight of rhs, local "
        "shape (2, 4, 3), has 4 rows; they are multiplied and must be as many",
    ),
    (
        {"group_sizes": jnp.zeros(3, jnp.int32)},
        ValueError,
        "grouped_matmul: group_sizes has local shape (3,), but rhs of local shape (2, 4, 3) has 2 "
        "groups; give one size for each",
    ),
    (
        {"group_sizes": jnp.zeros(2, jnp.float32)},
        TypeError,
        "grouped_matmul: group_sizes must be integers, got float32; cast them",
    ),
    (
        {"lhs": jnp.zeros((8, 4), jnp.bfloat16)},
        TypeError,
        "grouped_matmul: lhs is bfloat16 and rhs float32; cast one to the other's dtype",
    ),
    (
        {"implementation": "fast"},
        ValueError,
        "grouped_matmul: implementation must be one of auto, ragged_dot, blocks, got 'fast'",
    ),
    (
        {"precision": ("high", "high")},
        TypeError,
        "grouped_matmul: precision must be one value for both operands, got ('high', 'high'); "
        "operands change places in the derivatives",
    ),
    (
        {"preferred_element_type": "float31"},
        TypeError,
        "grouped_matmul: preferred_element_type='float31' is not a dtype; pass one such as "
        "jnp.float32 or 'bfloat16'",
    ),
    (
        {"preferred_element_type": "int32"},
        TypeError,
        "grouped_matmul: preferred_element_type=int32 cannot hold products of float32 operands; "
        "choose a float dtype, or None",
    ),
    (
        {
            "lhs": jnp.zeros((8, 4), jnp.complex64),
            "rhs": jnp.zeros((2, 4, 3), jnp.complex64),
            "preferred_element_type": "float32",
        },
        TypeError,
        "grouped_matmul: preferred_element_type=float32 cannot hold products of complex64 "
        "operands; choose a complex dtype, or None",
    ),
    (
        {"lhs": jnp.zeros((8, 4), bool), "rhs": jnp.zeros((2, 4, 3), bool)},
        TypeError,
        "grouped_matmul: lhs and rhs are bool, which has no products; cast them to int8",
    ),
]


@pytest.mark.parametrize(("changed", "error", "message"), ERRORS)
def test_errors(changed, error, message):
    lhs, rhs, sizes = operands([3, 4], 8)
    with pytest.raises(error, match=f"^{re.escape(message)}$"):
        grouped_matmul(**{"lhs": lhs, "rhs": rhs, "group_sizes": sizes, **changed})
