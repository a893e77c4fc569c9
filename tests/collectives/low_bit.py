"""What is gathered in 8 bits against NumPy, which rounds it in the same way.

`low_bit.py CHECK_VMA,DTYPE,MODE,SIZE,SIZE,... ...`: a process of its own for several meshes, some
of which have more devices than the tests. Of a mode that begins with `few:` there are few programs.
"""

import sys
from math import prod

import jax

MESHES = [
    (check == "True", dtype, mode, tuple(map(int, sizes)))
    for check, dtype, mode, *sizes in (text.split(",") for text in sys.argv[1:])
]
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", max(prod(sizes) for *_, sizes in MESHES))
jax.config.update("jax_enable_x64", True)
jax.config.update("jax_disable_most_optimizations", True)

import numpy as np  # noqa: E402
from eight_bits import gathered, travelling, without_ties  # noqa: E402
from jax.sharding import PartitionSpec as P  # noqa: E402

import jaxpar  # noqa: E402

RNG = np.random.default_rng(0)
LONG, BLOCK = 40, 20  # numbers of a row, and of those that share a scale
# Of each flow one with results that are placed, and one with results that are added. What else is
# gathered differs from these in a matmul's labels alone.
FEW = {
    "rows of lhs, for two weights",
    "the contracted dimension of rhs",
    "sums, whose cotangents are rounded",
    "blocks behind each other",
    "sums of arrays",
}


def use(check_vma, dtype, sizes, *, few):
    """Has all that follows run over this mesh, in this dtype; few programs, or all."""
    global CHECK_VMA, DTYPE, WIRE, N, ONLY_FEW, AXES, MESH, ROWS, COLUMNS
    CHECK_VMA, DTYPE, WIRE = check_vma, dtype, jaxpar.LowBit(dtype, columns=BLOCK)
    N, ONLY_FEW = prod(sizes), few
    names = ("x", "y", "z")[: len(sizes)]
    AXES = names[::-1]  # another order than the mesh's
    MESH = jaxpar.make_mesh(dict(zip(names, sizes, strict=True)), devices=jax.devices()[:N])
    ROWS, COLUMNS = P(AXES), P(None, AXES)


def normal(*shape):
    return RNG.standard_normal(shape)


def untied(*shape, along):
    """Drawn for an array that is gathered along a dimension."""
    row = -1 if along != len(shape) - 1 else -2
    return without_ties(normal(*shape), DTYPE, dim=row, columns=BLOCK)


def arriving(x, along):
    return gathered(x, along, DTYPE, BLOCK)


def compare(name, mode, fn, in_specs, out_specs, args, expected, *, along=None):
    """The result, and its gradients for a cotangent, which may be gathered along a dimension."""
    if ONLY_FEW and name not in FEW:
        return
    mapped = jax.shard_map(
        lambda *args: fn(*args, mode=mode, wire_dtype=WIRE),
        mesh=MESH,
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=CHECK_VMA,
    )
    out, gradients = expected
    cts = [normal(*x.shape) if along is None else untied(*x.shape, along=along) for x in out]

    def both(cts, *args):
        found, pull = jax.vjp(lambda *args: jax.tree.leaves(mapped(*args)), *args)
        return found, pull(cts)

    check_sent(mode, travelling(both, cts, *args))
    found, pulled = jax.jit(both)(cts, *args)
    for got, want in zip((*found, *pulled), (*out, *gradients(*cts)), strict=True):
        np.testing.assert_allclose(got, want, rtol=0, atol=1e-12 * np.abs(want).max() * N)
    print(mode, name, flush=True)


def check_sent(mode, sent):
    """Blocks travel in 8 bits, and all scales of a gather in one collective, never in a hop's."""
    gathers = sent["all_gather", "float64"]
    assert gathers in (1, 2), sent  # the backward pass of a gather is another one, or is none
    if mode in ("naive", "chunked-2"):
        most = gathers if mode == "naive" else 2 * gathers  # a block of one row is one chunk
        assert gathers <= sent["all_gather", DTYPE] <= most, sent
        assert not sent["ppermute", DTYPE], sent
    else:
        assert sent["ppermute", DTYPE], sent
        assert not sent["all_gather", DTYPE], sent


def matmuls(mode):
    x, w, v = untied(2 * N, LONG, along=0), normal(LONG, 2 * N), normal(LONG, N)
    there = arriving(x, 0)
    compare(
        "rows of lhs, for two weights",
        mode,
        lambda x, w, v, **how: jaxpar.all_gather_matmul(x, (w, v), AXES, **how),
        (ROWS, COLUMNS, COLUMNS),
        COLUMNS,
        (x, w, v),
        ((there @ w, there @ v), lambda a, b: (a @ w.T + b @ v.T, there.T @ a, there.T @ b)),
    )
    x, w = untied(LONG, 2 * N, along=1), normal(2 * N, N)
    there = arriving(x, 1)
    compare(
        "the contracted dimension of lhs",
        mode,
        lambda x, w, **how: jaxpar.all_gather_matmul(x, w, AXES, dim=1, **how),
        (COLUMNS, COLUMNS),
        COLUMNS,
        (x, w),
        ((there @ w,), lambda ct: (ct @ w.T, there.T @ ct)),
    )
    x, w = normal(N, 2 * N), untied(2 * N, LONG, along=0)
    there = arriving(w, 0)
    compare(
        "the contracted dimension of rhs",
        mode,
        lambda x, w, **how: jaxpar.all_gather_matmul(x, w, AXES, gather="rhs", **how),
        (ROWS, ROWS),
        ROWS,
        (x, w),
        ((x @ there,), lambda ct: (ct @ there.T, x.T @ ct)),
    )
    x, w = normal(N, LONG), untied(LONG, 2 * N, along=1)
    there_too = arriving(w, 1)
    compare(
        "columns of rhs",
        mode,
        lambda x, w, **how: jaxpar.all_gather_matmul(x, w, AXES, gather="rhs", dim=-1, **how),
        (ROWS, COLUMNS),
        ROWS,
        (x, w),
        ((x @ there_too,), lambda ct: (ct @ there_too.T, x.T @ ct)),
    )
    x, w = normal(2 * N, N), normal(N, LONG)
    compare(
        "sums, whose cotangents are rounded",
        mode,
        lambda x, w, **how: jaxpar.matmul_reduce_scatter(x, w, AXES, **how),
        (COLUMNS, ROWS),
        ROWS,
        (x, w),
        ((x @ w,), lambda ct: (arriving(ct, 0) @ w.T, x.T @ arriving(ct, 0))),
        along=0,
    )
    einsums(mode)


def einsums(mode):
    x, w = untied(2 * N, 3, LONG, along=0), normal(2 * N, LONG, N)
    there = arriving(x, 0)
    compare(
        "a batch",
        mode,
        lambda x, w, **how: jaxpar.collective_einsum("bmk,bkn->nbm", x, w, AXES, gather="b", **how),
        (ROWS, P(None, None, AXES)),
        ROWS,
        (x, w),
        (
            (np.einsum("bmk,bkn->nbm", there, w),),
            lambda ct: (
                np.einsum("nbm,bkn->bmk", ct, w),
                np.einsum("bmk,nbm->bkn", there, ct),
            ),
        ),
    )


def collectives(mode):
    x = untied(2 * N, 2, LONG, along=0)
    there = arriving(x, 0)
    compare(
        "blocks behind each other",
        mode,
        lambda x, **how: jaxpar.all_gather(x, AXES, tiled=True, **how)[None],
        (ROWS,),
        ROWS,
        (x,),
        ((np.stack([there] * N),), lambda ct: (ct.sum(0),)),
    )
    x = untied(3, N, LONG, along=1)
    there = arriving(x, 1)
    compare(
        "blocks on each other",
        mode,
        lambda x, **how: jaxpar.all_gather(x[:, 0], AXES, dim=1, **how)[None],
        (COLUMNS,),
        ROWS,
        (x,),
        ((np.stack([there] * N),), lambda ct: (ct.sum(0),)),
    )
    x = normal(N, 2 * N, LONG)
    compare(
        "sums of arrays",
        mode,
        lambda x, **how: jaxpar.reduce_scatter(x[0], AXES, tiled=True, **how),
        (ROWS,),
        ROWS,
        (x,),
        ((x.sum(0),), lambda ct: (np.stack([arriving(ct, 0)] * N),)),
        along=0,
    )


def main():
    for check_vma, dtype, mode, sizes in MESHES:
        print(dtype, *sizes, flush=True)
        use(check_vma, dtype, sizes, few=mode.startswith("few:"))
        mode = mode.removeprefix("few:")
        matmuls(mode)
        collectives(mode)
    print("all", flush=True)


if __name__ == "__main__":
    main()
