"""Values and gradients of disjoint rings, and across cubes, against NumPy.

`disjoint_rings.py CHECK_VMA,SIZE,SIZE,... ...`: a process of its own for several tori, as they have
more devices than the tests.
"""

import sys
from dataclasses import replace
from math import prod

import jax

SAID = [text.split(",") for text in sys.argv[1:]]
TORI = [(check == "True", *map(int, sizes)) for check, *sizes in SAID]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", max(prod(sizes) for _, *sizes in TORI))
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

import numpy as np  # noqa: E402
from jax import lax  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxpar  # noqa: E402
from jaxpar.layers import ring_attention  # noqa: E402
from jaxpar.matmul import _arrivals  # noqa: E402
from jaxpar.matmul._arrivals import joining_is_cheaper  # noqa: E402
from jaxpar.ring import of_mode  # noqa: E402
from jaxpar.ring.hierarchical import along_dimensions  # noqa: E402
from jaxpar.ring.of_mode import with_phases  # noqa: E402
from jaxpar.ring.order import CpuOrder, TpuOrder, traced_order  # noqa: E402

MODE = "multi-ring"
# Sums in two pieces and in one, which go by one of the two where blocks and sums may.
TPU, CPU = TpuOrder(delays_transfers=True), CpuOrder()
RNG = np.random.default_rng(0)


def use(check_vma, sizes):
    """Has all that follows run over this torus."""
    global CHECK_VMA, N, LOOPS, AXES, MESH, ROWS, COLUMNS, WHOLE, SIDES
    CHECK_VMA, N = check_vma, prod(sizes)
    LOOPS = N > 30  # blocks go round rings of so many devices in loops
    names = ("x", "y", "z", "u")[: len(sizes)]
    AXES = names[::-1]  # another order than the mesh's
    MESH = jaxpar.make_mesh(dict(zip(names, sizes, strict=True)), devices=jax.devices()[:N])
    ROWS, COLUMNS, WHOLE = P(AXES), P(None, AXES), P(None, AXES, None, None)
    # The sides along which blocks and sums can go, one after the other; None: round rings.
    SIDES = sizes[::-1]


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


def going(blocks=None, sums=None, order=CPU):
    """Has blocks and sums go along these sides, or round rings, and steps have an order."""
    of_mode.traced_order = lambda: order

    def along(_, way, __):
        found = along_dimensions(way, blocks or sums)
        return replace(found, blocks=bool(blocks), sums=bool(sums))

    of_mode.with_phases = along


def gather(rows, order, along=None):
    going(along, along, order)
    x, w = normal(N * rows, 3), normal(3, N)
    compare(
        f"gather of {rows} rows",
        lambda x, w: jaxpar.all_gather_matmul(x, w, AXES, mode=MODE),
        (ROWS, COLUMNS),
        COLUMNS,
        (x, w),
        multiplied(x, w),
        loops=LOOPS and along is None,
    )


def gather_kept(rows, order, along=None):
    going(along, along, order)
    kept = jaxpar.Axis(AXES, MODE, keep_gathered=True)
    x, w = normal(N * rows, 3), normal(3, N)
    compare(
        "gather of rows that are kept",
        lambda x, w: jaxpar.all_gather_matmul(x, w, kept),
        (ROWS, COLUMNS),
        COLUMNS,
        (x, w),
        multiplied(x, w),
    )


def scatter(rows, order, along=None):
    going(along, along, order)
    x, w = normal(N * rows, 2 * N), normal(2 * N, 3)
    compare(
        f"scatter of {rows} rows",
        lambda x, w: jaxpar.matmul_reduce_scatter(x, w, AXES, mode=MODE),
        (COLUMNS, ROWS),
        ROWS,
        (x, w),
        multiplied(x, w),
    )


def weight(along=None):
    """Its sums go round rings, backward."""
    going(along)
    x, w = normal(4 * N, 2 * N), normal(2 * N, 3)
    compare(
        "gather of a weight",
        lambda x, w: jaxpar.all_gather_matmul(x, w, AXES, gather="rhs", mode=MODE),
        (ROWS, ROWS),
        ROWS,
        (x, w),
        multiplied(x, w),
        loops=LOOPS,
    )


def attention():
    going()
    q, k, v = (normal(1, 8 * N, 1, 2) for _ in range(3))
    axis, how = jaxpar.Axis(AXES, mode=MODE), {"causal": False, "order": "contiguous"}
    window = 3 * N, 11
    compare(
        "attention",
        lambda q, k, v: ring_attention(q, k, v, axis, window=window, **how),
        (WHOLE,) * 3,
        WHOLE,
        (q, k, v),
        attended(q, k, v, *window),
        loops=N > 8,
    )


def low_bit(dim, *alongs, joined=False, code=lambda x: x):
    """What is gathered in 8 bits is the same values in every mode."""
    x, w = normal(N * 16, N * 16), normal(N * 16, N)
    _arrivals.joining_is_cheaper = (lambda *_: True) if joined else joining_is_cheaper

    def found(mode, along=None):
        going(along)
        mapped = jax.shard_map(
            lambda x, w: jaxpar.all_gather_matmul(
                code(x), w, AXES, dim=dim, mode=mode, wire_dtype="int8"
            ),
            mesh=MESH,
            in_specs=(COLUMNS if dim else ROWS, COLUMNS),
            out_specs=COLUMNS,
        )
        return np.asarray(jax.jit(mapped)(x, w))

    naive, exact = found("naive"), x @ w
    assert 1e-3 < np.abs(naive - exact).max() / np.abs(exact).max() < 2e-2
    most = 1e-12 * np.abs(exact).max() * N
    for along in alongs:
        np.testing.assert_allclose(found(MODE, along), naive, rtol=0, atol=most)
    _arrivals.joining_is_cheaper = joining_is_cheaper
    print("gather of", "columns" if dim else "rows", "in 8 bits", flush=True)


def odd_plane():
    """No share round rings; shares that differ, and halves of shares, along the dimensions."""
    gather(1, TPU)
    gather(5, TPU, SIDES)
    gather_kept(5, CPU, SIDES)
    scatter(1, TPU)
    scatter(8, CPU, SIDES)
    weight(SIDES)
    low_bit(0, SIDES)
    low_bit(1, SIDES)
    low_bit(1, SIDES, joined=True)
    low_bit(1, SIDES, joined=True, code=jaxpar.quantize)


def rectangle():
    """Places on rings are looked up; the opposite device's blocks are halves of two shares."""
    gather_kept(5, TPU)
    scatter(8, CPU)
    weight()
    low_bit(1, None, joined=True, code=jaxpar.quantize)
    attention()


def even_plane():
    """A slab is two arrays."""
    gather_kept(5, TPU, SIDES)
    scatter(8, TPU, SIDES)


def odd_cube():
    """Slabs of slabs; rings through 27 devices are those of collectives by themselves."""
    gather_kept(5, TPU, SIDES)
    scatter(8, TPU, SIDES)
    low_bit(0, SIDES)
    low_bit(1, SIDES, joined=True, code=jaxpar.quantize)


def large_plane():
    """Blocks and sums in loops, and sums in loops where blocks are in phases."""
    gather(5, TPU)
    weight(SIDES)


def cube_of_two():
    gather(5, TPU)
    gather_kept(5, CPU)
    scatter(8, TPU)


def cube_of_three():
    gather(1, TPU)
    scatter(1, TPU)
    gather_kept(5, CPU)
    scatter(8, TPU)
    weight()
    low_bit(1, None, joined=True)
    attention()


def cube_of_four():
    gather(9, TPU)


# What depends on the kind of a torus. Collectives go round its rings besides.
OF_KIND = {
    (3, 3): odd_plane,
    (4, 3): rectangle,
    (4, 4): even_plane,
    (3, 3, 3): odd_cube,
    (6, 6): large_plane,
    (2, 2): cube_of_two,
    (2, 2, 2): cube_of_three,
    (2, 2, 2, 2): cube_of_four,
}


def collectives():
    """Those of arrays by themselves, to the bit of lax's: sums of small integers are exact."""
    of_mode.traced_order, of_mode.with_phases = traced_order, with_phases
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


if __name__ == "__main__":
    for check_vma, *sizes in TORI:
        print(*sizes, flush=True)
        use(check_vma, tuple(sizes))
        OF_KIND[tuple(sizes)]()
        collectives()
    print("all", flush=True)
