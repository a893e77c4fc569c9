"""Values and gradients of disjoint rings, and across cubes, against NumPy.

`disjoint_rings.py CHECK_VMA SIZE SIZE ...`: a process of its own, as these tori have more devices
than the tests.
"""

import sys
from dataclasses import replace
from itertools import product
from math import prod

import jax

SIZES = tuple(map(int, sys.argv[2:]))
CHECK_VMA, N = sys.argv[1] == "True", prod(SIZES)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", N)
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxpar  # noqa: E402
from jaxpar.choose import choice  # noqa: E402
from jaxpar.choose.choice import with_phases  # noqa: E402
from jaxpar.layers import ring_attention  # noqa: E402
from jaxpar.matmul import _arrivals  # noqa: E402
from jaxpar.matmul._arrivals import joining_is_cheaper  # noqa: E402
from jaxpar.ring.order import CpuOrder, TpuOrder, traced_order  # noqa: E402

MODE = "multi-ring"
IS_SMALL = N < 16  # round more devices, what depends on no torus's shape is not checked again
LOOPS = N > 30  # blocks go round rings of so many devices in loops
NAMES = ("x", "y", "z", "u")[: len(SIZES)]
AXES = NAMES[::-1]  # another order than the mesh's
MESH = jaxpar.make_mesh(dict(zip(NAMES, SIZES, strict=True)))
# The sides of a torus along which blocks and sums can go, one after the other; None: round rings.
TORUS = (None, SIZES[::-1]) if min(SIZES) > 2 and len(set(SIZES)) == 1 else (None,)
RNG = np.random.default_rng(0)


def normal(*shape):
    return RNG.standard_normal(shape)


def compare(name, fn, in_specs, out_specs, args, expected, *, loops=False):
    """The result, and its gradients for a cotangent."""
    mapped = jax.shard_map(
        fn, mesh=MESH, in_specs=in_specs, out_specs=out_specs, check_vma=CHECK_VMA
    )
    out, *gradients = expected
    ct = normal(*out.shape)

    @jax.jit
    def both(ct, *args):
        found, pull = jax.vjp(mapped, *args)
        return found, pull(ct)

    traced = both.trace(ct, *args)
    text = str(traced.jaxpr)
    assert "ppermute" in text
    assert ("scan[" in text or "while[" in text) == loops
    found, pulled = traced.lower().compile()(ct, *args)
    np.testing.assert_allclose(found, out, rtol=0, atol=1e-12 * np.abs(out).max() * N)
    for got, gradient in zip(pulled, gradients, strict=True):
        want = gradient(ct)
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(want).max() * N)
    print(name, flush=True)


def multiplied(x, w):
    return x @ w, lambda ct: ct @ w.T, lambda ct: x.T @ ct


def attended(q, k, v, left, right):
    """Attention of each head over a window of positions, and its gradients."""
    scores = np.einsum("bqhe,bkhe->bhqk", q, k) / np.sqrt(q.shape[-1])
    before = np.arange(q.shape[1])[:, None] - np.arange(q.shape[1])
    scores = np.where((before <= left) & (before >= -right), scores, -np.inf)
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    weights /= weights.sum(-1, keepdims=True)

    def by_score(ct):
        by_weight = np.einsum("bqhe,bkhe->bhqk", ct, v)
        inner = (weights * by_weight).sum(-1, keepdims=True)
        return weights * (by_weight - inner) / np.sqrt(q.shape[-1])

    return (
        np.einsum("bhqk,bkhe->bqhe", weights, v),
        lambda ct: np.einsum("bhqk,bkhe->bqhe", by_score(ct), k),
        lambda ct: np.einsum("bhqk,bqhe->bkhe", by_score(ct), q),
        lambda ct: np.einsum("bhqk,bqhe->bkhe", weights, ct),
    )


def low_bit(name, dim, left, right, alongs, code=lambda x: x):
    """What is gathered in 8 bits is the same values in every mode."""
    x, w = normal(N * 16, N * 16), normal(N * 16, N)

    def found(mode, along=None):
        choice.with_phases = lambda _, way, __: replace(way, blocks_along=along)
        mapped = jax.shard_map(
            lambda x, w: jaxpar.all_gather_matmul(
                code(x), w, AXES, dim=dim, mode=mode, wire_dtype="int8"
            ),
            mesh=MESH,
            in_specs=(left, right),
            out_specs=right,
        )
        return np.asarray(jax.jit(mapped)(x, w))

    naive, exact = found("naive"), x @ w
    assert 1e-3 < np.abs(naive - exact).max() / np.abs(exact).max() < 2e-2
    most = 1e-12 * np.abs(exact).max() * N
    for along in alongs:
        np.testing.assert_allclose(found(MODE, along), naive, rtol=0, atol=most)
    print("gather of", name, "in 8 bits", flush=True)


def main():
    rows, columns, whole = P(AXES), P(None, AXES), P(None, AXES, None, None)
    kept = jaxpar.Axis(AXES, MODE, keep_gathered=True)
    # Sums in two pieces and in one, which go by one of the two where blocks and sums may.
    orders = (TpuOrder(delays_transfers=True), *([CpuOrder()] if IS_SMALL else []))
    cases = [*product(orders[:1], TORUS), *product(orders[1:], TORUS[-1:])]
    # No share, shares that differ, halves of shares.
    for length in (1, 5, 8) if N < 12 else (5, 8):
        x, w = normal(N * length, 3), normal(3, N)
        y, v = normal(N * length, 2 * N), normal(2 * N, 3)
        for order, along in cases if length > 1 else [(orders[0], None)]:
            choice.traced_order = lambda order=order: order
            choice.with_phases = lambda _, way, __, along=along: replace(
                way, blocks_along=along, sums_along=along
            )
            if length < 8 and order is orders[0]:
                compare(
                    f"gather of {length} rows",
                    lambda x, w: jaxpar.all_gather_matmul(x, w, AXES, mode=MODE),
                    (rows, columns),
                    columns,
                    (x, w),
                    multiplied(x, w),
                    loops=LOOPS and along is None,
                )
            if length == 5 and order is orders[-1] and (IS_SMALL or along):
                compare(
                    "gather of rows that are kept",
                    lambda x, w: jaxpar.all_gather_matmul(x, w, kept),
                    (rows, columns),
                    columns,
                    (x, w),
                    multiplied(x, w),
                )
            if length != 5:
                compare(
                    f"scatter of {length} rows",
                    lambda x, w: jaxpar.matmul_reduce_scatter(x, w, AXES, mode=MODE),
                    (columns, rows),
                    rows,
                    (y, v),
                    multiplied(y, v),
                    loops=LOOPS and along is None,
                )
        choice.traced_order = traced_order
    x, w = normal(4 * N, 2 * N), normal(2 * N, 3)
    # Of rings through 16 or 27 devices unrolled programs are long, and blocks of rows go by them.
    alongs = TORUS if IS_SMALL or LOOPS else TORUS[-1:]
    for along in alongs:
        choice.with_phases = lambda _, way, __, along=along: replace(way, blocks_along=along)
        compare(
            "gather of a weight",
            lambda x, w: jaxpar.all_gather_matmul(x, w, AXES, gather="rhs", mode=MODE),
            (rows, rows),
            rows,
            (x, w),
            multiplied(x, w),
            loops=LOOPS,  # of sums, backward
        )
    if CHECK_VMA:
        low_bit("rows", 0, rows, columns, alongs)
    if CHECK_VMA and (IS_SMALL or len(TORUS) > 1):
        low_bit("columns", 1, columns, columns, alongs)
        _arrivals.joining_is_cheaper = lambda length: True
        low_bit("joined columns", 1, columns, columns, alongs)
        coded = jaxpar.quantize
        low_bit("columns with a scale for each block", 1, columns, columns, alongs, coded)
        _arrivals.joining_is_cheaper = joining_is_cheaper
    choice.with_phases = with_phases
    q, k, v = (normal(1, 8 * N, 1, 2) for _ in range(3))
    axis, how = jaxpar.Axis(AXES, mode=MODE), {"causal": False, "order": "contiguous"}
    window = 3 * N, 11
    # Round sides that differ and in loops, and over cubes of two and three dimensions.
    if len(set(SIZES)) > 1 or N < 9 or LOOPS:
        compare(
            "attention",
            lambda q, k, v: ring_attention(q, k, v, axis, window=window, **how),
            (whole,) * 3,
            whole,
            (q, k, v),
            attended(q, k, v, *window),
            loops=N > 8,
        )
    collectives()


def collectives():
    """Those of arrays by themselves, to the bit of lax's: sums of small integers are exact."""
    x = RNG.integers(-4, 5, (N, N, 5)).astype(float)

    def ours(x):
        return (
            jaxpar.all_gather(x[0], AXES, mode=MODE, tiled=True),
            jaxpar.reduce_scatter(x, AXES, mode=MODE, tiled=True),
            jaxpar.all_reduce(x, AXES, mode=MODE),
        )

    def laxs(x):
        return (
            lax.all_gather(x[0], AXES, tiled=True),
            lax.psum_scatter(x, AXES, tiled=True),
            lax.psum(x, AXES),
        )

    def run(x):
        return [jax.tree.map(lambda y: y[None], f(x[0])) for f in (ours, laxs)]

    mapped = jax.shard_map(run, mesh=MESH, in_specs=P(AXES), out_specs=P(AXES), check_vma=CHECK_VMA)
    found, wanted = jax.jit(mapped)(x)
    jax.tree.map(np.testing.assert_array_equal, found, wanted)
    print("all", flush=True)


if __name__ == "__main__":
    main()
