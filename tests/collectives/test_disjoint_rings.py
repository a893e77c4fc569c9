"""Rings that share no link: values and gradients on tori of 4 to 36 devices."""

from itertools import pairwise, product
from math import prod
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from programs import run_worker

import jaxpar
from jaxpar.compiler.options import compiled_with
from jaxpar.ring.pieces import equal_pieces, shares_of
from jaxpar.schedule import compile_for, matmul_floor, target, timeline

WORKER = Path(__file__).with_name("disjoint_rings.py")


@pytest.mark.parametrize(
    "tori",
    [
        ("True,3,3", "True,4,3", "False,4,4", "False,2,2"),
        ("True,3,3,3", "False,6,6", "True,2,2,2", "True,2,2,2,2"),  # 6 x 6 in loops
    ],
)
def test_values_and_gradients(tori):
    run_worker(WORKER, *tori)


def test_shares_are_of_whole_tiles_where_there_are_many():
    assert shares_of(256, 3) == [(0, 88), (88, 88), (176, 80)]
    assert shares_of(80, 2) == [(0, 40), (40, 40)]
    assert shares_of(24, 2) == [(0, 12), (12, 12)]  # two tiles to one would be a third more
    assert shares_of(1, 2) == [(0, 1)]


def test_pieces_are_of_one_size():
    assert equal_pieces(2049, 2) == [(0, 1032), (1017, 1032)]  # tiles are 0.7% more
    assert equal_pieces(2064, 2) == [(0, 1032), (1032, 1032)]
    assert equal_pieces(256, 6) == [(0, 43), (43, 43), (86, 43), (129, 43), (172, 43), (213, 43)]
    assert equal_pieces(10, 6) == [(0, 2), (2, 2), (4, 2), (6, 2), (8, 2), (8, 2)]
    assert equal_pieces(2049, 1) == [(0, 2049)]
    assert equal_pieces(0, 1) == [(0, 0)]
    for length, pieces in product(range(1, 4000, 7), range(1, 7)):
        starts, sizes = zip(*equal_pieces(length, min(pieces, length)), strict=True)
        assert len(set(sizes)) == 1
        assert starts[0] == 0
        assert starts[-1] + sizes[-1] == length
        assert all(0 <= b - a <= sizes[0] for a, b in pairwise(starts))


def lowered(step, torus, args):
    """The program that is compiled for a torus."""
    with jax.set_mesh(torus.mesh), compiled_with(jaxpar.compiler_options(torus)):
        return jax.jit(step).lower(*args).as_text()


def gathered_rows(mesh, axes):
    """A matmul of gathered rows in a mode, its plane or cube, arguments, and its least time."""
    torus, rows, depth, columns = target("v5p:4x4x4", mesh), 8192, 4096, 4096
    n = prod(torus.mesh.shape[name] for name in axes)
    everywhere = ("dp", *axes)

    def step(mode):
        return jax.shard_map(
            lambda x, w: jaxpar.all_gather_matmul(x, w, axes, mode=mode),
            mesh=torus.mesh,
            in_specs=(P(everywhere), P(None, axes)),
            out_specs=P("dp", axes),
        )

    shapes = {(64 // n * rows, depth): P(everywhere), (depth, columns): P(None, axes)}
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(torus.mesh, spec))
        for shape, spec in shapes.items()
    ]
    sent = rows * depth * 2 * (n - 1) / n
    floor = matmul_floor(torus, "mk,kn->mn", (rows, depth), (depth, columns // n), sent, axis=axes)
    return step, torus, args, floor


@pytest.mark.parametrize(
    ("mesh", "axes", "links"),
    [
        ("dp=4,x=4,y=4", ("y", "x"), 4),
        ("dp=4,tp=16", ("tp",), 4),  # a plane by one name
        ("dp=8,x=2,y=2,z=2", ("z", "x", "y"), 3),  # of a cube, where a ring has two
        ("dp=8,tp=8", ("tp",), 3),
    ],
)
def test_auto_takes_all_links(mesh, axes, links):
    step, torus, args, floor = gathered_rows(mesh, axes)
    assert lowered(step("auto"), torus, args) == lowered(step("multi-ring"), torus, args)
    assert floor.one_ring == pytest.approx(links / 2 * floor.transfer)


@pytest.mark.parametrize(
    ("mesh", "axes", "links", "most"),
    [("dp=4,x=4,y=4", ("y", "x"), 4, 0.7), ("dp=8,tp=8", ("tp",), 3, 0.9)],
)
def test_all_links(mesh, axes, links, most):
    """Compiled for v5p: less than two links could do."""
    step, torus, args, floor = gathered_rows(mesh, axes)
    found = timeline(compile_for(step("multi-ring"), torus, *args))
    assert len({event.row for event in found.transfers}) == links
    assert not any(event.synchronous for event in found.transfers)
    assert floor.total < found.total <= most * floor.of_one_ring


def over_a_torus(torus, matmul, specs, rows, mode, depth=8192, columns=8192):
    """A matmul of so many rows, 8192 x 8192 unless told otherwise, and its arguments."""
    axes = next(name for name in specs[2] if name is not None)
    step = jax.shard_map(
        lambda x, w: matmul(x, w, axes, mode=mode),
        mesh=torus.mesh,
        in_specs=specs[:2],
        out_specs=specs[2],
    )
    args = [
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(torus.mesh, spec))
        for shape, spec in zip(((rows, depth), (depth, columns)), specs[:2], strict=True)
    ]
    return step, torus, args


def played(torus, matmul, specs, rows, mode, links=None, **sizes):
    """Its timeline, compiled for v5p."""
    axes = next(name for name in specs[2] if name is not None)
    step, torus, args = over_a_torus(torus, matmul, specs, rows, mode, **sizes)
    found = timeline(compile_for(step, torus, *args))
    assert found.kernels_of_unknown_cost == ()
    if mode != "naive":
        assert not any(event.synchronous for event in found.transfers)
        assert len({event.row for event in found.transfers}) == (links or 2 * len(axes))
    return found


SUMS, BLOCKS = jaxpar.matmul_reduce_scatter, jaxpar.all_gather_matmul


def phases(matmul, slices, mesh, axes, rows):
    """The case of a matmul, and the transfers of it that go along one dimension after the other."""
    torus, steps = target(slices, mesh), len(axes)
    side = torus.mesh.shape["x"] - 1
    if matmul is SUMS:
        specs = P(None, axes), P(axes), P(axes)
        # Both ways, sums of two pieces: 6, 9 or 14, not 60 or 252 of a ring of 16 or 64.
        return (torus, matmul, specs, rows), 2 * steps * steps * (2 * side // 2)
    # Of each share; slabs of the last dimension are two arrays.
    specs = P(axes), P(None, axes), P(None, axes)
    return (torus, matmul, specs, rows), steps * (steps - 1 + 2) * side


PLANE, LARGE = ("v5p:4x4x4", "dp=4,x=4,y=4", ("y", "x")), ("v5p:8x8x4", "dp=4,x=8,y=8", ("y", "x"))
CUBE = "v5p:4x4x4", "x=4,y=4,z=4", ("z", "x", "y")


@pytest.mark.parametrize(
    ("matmul", "torus", "rows"), [(SUMS, CUBE, 8192), (SUMS, LARGE, 16384), (BLOCKS, LARGE, 2048)]
)
def test_auto_goes_along_one_dimension_after_the_other(matmul, torus, rows):
    case, transfers = phases(matmul, *torus, rows)
    assert lowered(*over_a_torus(*case, "auto")).count("collective_permute") == transfers


@pytest.mark.parametrize(
    ("matmul", "torus", "rows", "most"), [(SUMS, PLANE, 2048, 0.8), (BLOCKS, CUBE, 2048, 0.88)]
)
def test_one_dimension_after_the_other_is_faster(matmul, torus, rows, most):
    """Compiled for v5p: where rings through all devices would have small pieces."""
    case, transfers = phases(matmul, *torus, rows)
    auto, naive = (played(*case, mode) for mode in ("auto", "naive"))
    assert len(auto.transfers) == transfers
    assert auto.total < most * naive.total


def test_sums_cross_a_cube():
    """Where a ring is bound by transfers, and sixths of a block are not too small."""
    cube, specs = target("v5p:4x4x4", "dp=8,tp=8"), (P(None, "tp"), P("tp"), P("tp"))
    rows, depth, columns = 32768, 1024, 4096
    auto = played(cube, SUMS, specs, rows, "auto", 3, depth=depth, columns=columns)
    shapes, sent = ((rows, depth // 8), (depth // 8, columns)), rows * columns * 2 * 7 / 8
    floor = matmul_floor(cube, "mk,kn->mn", *shapes, sent, axis="tp")
    assert floor.one_ring == pytest.approx(1.5 * floor.transfer)
    assert auto.total <= 0.8 * floor.of_one_ring  # which no program with one ring gets below


def test_few_sums_over_a_cube():
    """Neither one ring nor the walks across the cube are faster."""
    cube, specs = target("v5p:4x4x4", "dp=8,tp=8"), (P(None, "tp"), P("tp"), P("tp"))

    def program(mode):
        return over_a_torus(cube, SUMS, specs, 2048, mode, columns=2048)

    seconds = {}  # of programs by their text: what auto takes may be one of the others
    for mode in ("bidirectional", "multi-ring", "naive", "auto"):
        text = lowered(*program(mode))
        if text not in seconds:
            step, _, args = program(mode)
            seconds[text] = timeline(compile_for(step, cube, *args)).total
    assert seconds[text] <= 1.02 * min(seconds.values())


def test_gradients_over_a_plane_use_what_was_gathered():
    """Compiled for v5p: a gather and a scatter, no second gather."""
    plane = target("v5p:4x4x4", "dp=4,tp=16")
    rows, size = P(("dp", "tp")), 4096
    specs = {
        (4 * 16384, size): rows,
        (size, size): P(None, "tp"),
        (4 * 16384, -size): P("dp", "tp"),
    }
    args = [
        jax.ShapeDtypeStruct(
            tuple(map(abs, shape)), jnp.bfloat16, sharding=NamedSharding(plane.mesh, spec)
        )
        for shape, spec in specs.items()
    ]

    def seconds(mode):
        fn = jax.shard_map(
            lambda x, w: jaxpar.all_gather_matmul(x, w, "tp", mode=mode),
            mesh=plane.mesh,
            in_specs=(rows, P(None, "tp")),
            out_specs=P("dp", "tp"),
        )

        def step(x, w, ct):
            out, pull = jax.vjp(fn, x, w)
            out, ct = jax.lax.optimization_barrier((out, ct))  # strictly after the forward pass
            return out, pull(ct)

        found = timeline(compile_for(step, plane, *args))
        assert not any(event.synchronous for event in found.transfers)
        return found.total

    assert seconds("auto") < 0.65 * seconds("naive")
