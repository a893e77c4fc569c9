"""Pallas kernels: what they multiply, from their own traced programs."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas import tpu_sc as plsc
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import compile_for, explain, program_floor, target, timeline
from jaxpar.tools.explain.explanation_text import at_least
from jaxpar.tools.program.flops import device_flops, kernels_in
from jaxpar.tools.timeline.player import ON_VECTORS

TILE, SIZE = 256, 4096


def multiply(x, y, out):
    product = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)
    out[...] = product.astype(out.dtype)


def add(x, y, out):
    out[...] = x[...] + y[...]


def kernel(body, x, y, **more):
    rows, columns = pl.BlockSpec((TILE, SIZE), lambda i, j: (i, 0)), (SIZE, TILE)
    return pl.pallas_call(
        body,
        grid=(x.shape[0] // TILE, y.shape[1] // TILE),
        in_specs=[rows, pl.BlockSpec(columns, lambda i, j: (0, j))],
        out_specs=pl.BlockSpec((TILE, TILE), lambda i, j: (i, j)),
        out_shape=jax.ShapeDtypeStruct((x.shape[0], y.shape[1]), x.dtype),
        **more,
    )(x, y)


def compiled(function, rows=SIZE):
    found = target("v6e:2x2", "x=4")
    mapped = jax.shard_map(function, in_specs=(P("x"), P()), out_specs=P("x"), check_vma=False)
    shapes = ((4 * rows, SIZE), P("x")), ((SIZE, SIZE), P())
    args = [jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=spec) for shape, spec in shapes]
    return compile_for(mapped, found, *args)


@pytest.mark.parametrize("times", [1, 3])
def test_a_kernel_takes_what_its_grid_multiplies(times):
    """Also in a loop."""

    def repeated(x, y):
        return jax.lax.fori_loop(0, times, lambda _, x: kernel(multiply, x, y), x)

    program = compiled(repeated)
    played, chip = timeline(program), program.target.chip
    flops = times * 2 * SIZE**3
    multiplied = sum(event.seconds for event in played.events if event.is_matmul)
    assert multiplied == pytest.approx(flops / chip.flops)
    assert program_floor(program).compute == pytest.approx(flops / chip.flops)
    assert played.kernels_of_unknown_cost == ()


@pytest.mark.parametrize(("share", "counted"), [(8, 1), (0.5, 0.5)])
def test_the_smaller_of_an_estimate_and_a_count(share, counted):
    """Estimates count blocks that a mask leaves out."""
    flops = 2 * SIZE**3
    estimate = pl.CostEstimate(flops=int(share * flops), bytes_accessed=0, transcendentals=0)
    program = compiled(partial(kernel, multiply, cost_estimate=estimate))
    found = timeline(program)
    assert found.compute == pytest.approx(counted * flops / program.target.chip.flops, rel=0.1)


def test_kernels_that_cannot_be_told_apart_are_named():
    """Of the same shapes, one that multiplies and one that does not."""

    def both(x, y):
        def sums(x, y, out):
            out[...] = x[:, :TILE] + y[:TILE, :]

        return kernel(multiply, x, y) + kernel(sums, x, y)

    program = compiled(both)
    (name,) = timeline(program).kernels_of_unknown_cost
    assert name.endswith("pallas_call")
    text = str(explain(program))
    assert " ".join(at_least(name).split()[:8]) in " ".join(text.split())


# -- steps of a grid that do nothing --------------------------------------------------------------

GRID = (4, 8)
Q = jax.ShapeDtypeStruct((4 * 128, 256), jnp.bfloat16)
K = jax.ShapeDtypeStruct((8 * 128, 256), jnp.bfloat16)
BLOCK = 2 * 128 * 128 * 256
WHICH = (np.arange(32).reshape(GRID) % 3 == 0).astype(np.int32)  # 11 of 32


def scores(q, k):
    over = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(q[...], k[...], over, preferred_element_type=jnp.float32)


def below_diagonal(q, k, out):
    """Multiplies blocks (i, j) with j <= i alone."""

    @pl.when(pl.program_id(1) <= pl.program_id(0))
    def multiplied():
        out[...] = scores(q, k)


def as_listed(runs, q, k, out):
    """Multiplies the blocks that an operand names."""

    @pl.when(runs[pl.program_id(0), pl.program_id(1)] > 0)
    def multiplied():
        out[...] = jnp.exp(scores(q, k))


def tiled(body, scalars=0):
    rows, columns = GRID
    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=scalars,
            grid=GRID,
            in_specs=[
                pl.BlockSpec((128, 256), lambda i, j, *_: (i, 0)),
                pl.BlockSpec((128, 256), lambda i, j, *_: (j, 0)),
            ],
            out_specs=pl.BlockSpec((128, 128), lambda i, j, *_: (i, j)),
        ),
        out_shape=jax.ShapeDtypeStruct((rows * 128, columns * 128), jnp.float32),
    )


def counted(function, *args):
    """What the one kernel of a function computes, and the FLOPs of the whole function."""
    jaxpr = jax.jit(function).trace(*args).jaxpr
    (kernel,) = kernels_in(jaxpr).values()
    return kernel, device_flops(jaxpr, 1)


def test_steps_are_left_out_by_their_place():
    kernel, flops = counted(tiled(below_diagonal), Q, K)
    assert kernel.flops == flops == (1 + 2 + 3 + 4) * BLOCK


def test_vmap_adds_a_dimension_to_the_grid():
    batch = [jax.ShapeDtypeStruct((3, *x.shape), x.dtype) for x in (Q, K)]
    kernel, _ = counted(jax.vmap(tiled(below_diagonal)), *batch)
    assert kernel.flops == 3 * 10 * BLOCK


def in_a_loop(q, k):
    def layer(carried, q):
        return carried, tiled(as_listed, 1)(jnp.asarray(WHICH), q, k).sum()

    return jax.lax.scan(jax.checkpoint(layer), 0, q[None])


def by_a_jit(q, k):
    return tiled(as_listed, 1)(jax.jit(lambda: WHICH)(), q, k)


def plainly(q, k):
    return tiled(as_listed, 1)(WHICH, q, k)


def even(which):
    def body(q, k, out):
        @pl.when(which())
        def _():
            out[...] = scores(q, k)

    return body


@pytest.mark.parametrize(
    "which",
    [
        lambda: pl.program_id(0) % 2 == 0,
        lambda: pl.program_id(1) // 4 == 0,
        lambda: jax.lax.rem(pl.program_id(0), 2) == 0,
        lambda: (pl.program_id(1).astype(jnp.float32) / 4.0).astype(jnp.int32) == 0,
    ],
)
def test_places_are_divided(which):
    kernel, _ = counted(tiled(even(which)), Q, K)
    assert kernel.flops == GRID[0] * GRID[1] / 2 * BLOCK


def loops_by_its_place(q, k, out):
    def add(_, total):
        return total + scores(q, k)

    out[...] = jax.lax.fori_loop(0, pl.program_id(0) + 1, add, jnp.zeros(out.shape, out.dtype))


def test_a_loop_of_unknown_length_makes_a_lower_bound():
    assert not counted(tiled(below_diagonal), Q, K)[0].is_least
    kernel, _ = counted(tiled(loops_by_its_place), Q, K)
    assert kernel.is_least
    assert kernel.flops == GRID[0] * GRID[1] * BLOCK


def test_keys_of_random_numbers_are_no_arrays():
    key = jax.random.key(0)  # a constant of the program
    noisy = jax.jit(lambda q: q @ q.T + jax.random.normal(key, (q.shape[0],) * 2, q.dtype))
    jaxpr = noisy.trace(Q).jaxpr
    assert kernels_in(jaxpr) == {}
    assert device_flops(jaxpr, 1) == 2 * Q.shape[0] ** 2 * Q.shape[1]


@pytest.mark.parametrize("function", [plainly, by_a_jit, in_a_loop])
def test_steps_are_left_out_by_a_known_operand(function):
    kernel, flops = counted(function, Q, K)
    assert kernel.flops == flops == 11 * BLOCK
    assert kernel.numbers == 11 * 128 * 128  # one exponential each


def of_an_argument(q, k, runs):
    return tiled(as_listed, 1)(runs, q, k)


def of_what_a_loop_changes(q, k, runs):
    def trip(runs, _):
        return runs + 1, tiled(as_listed, 1)(runs, q, k).sum()

    return jax.lax.scan(trip, jnp.asarray(WHICH), length=2)


@pytest.mark.parametrize("function", [of_an_argument, of_what_a_loop_changes])
def test_all_steps_count_where_data_decide(function):
    kernel, _ = counted(function, Q, K, jax.ShapeDtypeStruct(GRID, jnp.int32))
    assert kernel.flops == 32 * BLOCK


@pytest.mark.parametrize(("dtype", "share"), [("bfloat16", 1), ("int8", 1 / 2), ("float32", 1)])
def test_eight_bits_are_multiplied_twice_as_fast(dtype, share):
    args = [jax.ShapeDtypeStruct(x.shape, dtype) for x in (Q, K)]
    kernel, _ = counted(tiled(below_diagonal), *args)
    assert kernel.flops == 10 * BLOCK * share


# -- vector operations ----------------------------------------------------------------------------


def test_vector_operations_take_their_time():
    """Twenty of a number take longer than its bytes; moves and single numbers take nothing."""

    def body(x, y, out):
        moved = jnp.broadcast_to(x[:, :1], (TILE, TILE))
        for _ in range(20):
            moved = jnp.exp(moved)
        out[...] = moved.astype(out.dtype)

    program = compiled(partial(kernel, body))
    numbers = 20 * SIZE**2
    longest = max(event.seconds for event in timeline(program).events)
    assert longest == pytest.approx(numbers / (ON_VECTORS * program.target.chip.clock))


# -- kernels as others write them -----------------------------------------------------------------


def as_many_as_given(count, runs, q, k):
    """A grid whose length is an operand, in front of those that its blocks are chosen by."""

    def body(runs, q, k, out):
        @pl.when(runs[pl.program_id(0)] > 0)
        def _():
            out[...] = scores(q, k)

    return pl.pallas_call(
        body,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(count,),
            in_specs=[pl.BlockSpec((128, 256), lambda i, *_: (i, 0))] * 2,
            out_specs=pl.BlockSpec((128, 128), lambda i, *_: (i, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((4 * 128, 128), jnp.float32),
    )(runs, q, k)


def test_a_grid_whose_length_is_a_constant_of_the_program():
    def known(q, k):
        return as_many_as_given(jnp.asarray([3])[0], np.asarray([1, 0, 1, 1]), q, k)

    kernel, _ = counted(jax.jit(known), Q, K)
    assert kernel.flops == 2 * BLOCK
    assert not kernel.is_least


def test_a_grid_whose_length_is_data():
    count = jax.ShapeDtypeStruct((), jnp.int32)
    kernel, _ = counted(lambda count, q, k: as_many_as_given(count, WHICH[0], q, k), count, Q, K)
    assert kernel.is_least
    assert kernel.flops == BLOCK


@pytest.mark.parametrize(("said", "counted_as"), [(77, 77), (0, 2 * 128**3)])
def test_an_estimate_counts_where_a_loop_has_no_length(said, counted_as):
    """Of no FLOPs it says nothing: a trip is counted."""
    estimate = pl.CostEstimate(flops=said, bytes_accessed=0, transcendentals=0)

    def body(count, x, out):
        out[...] = jax.lax.fori_loop(0, count[0], lambda _, x: x @ x, x[...])

    def call(count, x):
        return pl.pallas_call(
            body,
            in_specs=[pl.BlockSpec(memory_space=pltpu.SMEM), pl.BlockSpec()],
            out_shape=x,
            cost_estimate=estimate,
        )(count, x)

    square = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    kernel, flops = counted(call, jax.ShapeDtypeStruct((1,), jnp.int32), square)
    assert kernel.flops == flops == counted_as
    assert kernel.is_least


def on_cores(**more):
    """A kernel whose first core alone multiplies."""
    x = jnp.ones((128, 256), jnp.bfloat16)
    mesh = pltpu.TensorCoreMesh(axis_name="core", num_cores=2)  # pyright: ignore

    def body(x, out):
        def local(one, product):
            @pl.when(jax.lax.axis_index("core") == 0)
            def _():
                pltpu.sync_copy(x, one)
                product[...] = scores(one, one)
                pltpu.sync_copy(product, out)

        pl.run_scoped(local, pltpu.VMEM(x.shape, x.dtype), pltpu.VMEM((128, 128), jnp.float32))

    result = jax.ShapeDtypeStruct((128, 128), jnp.float32)
    made = pl.kernel(body, result, mesh=mesh, **more)  # pyright: ignore
    return counted(made, x)


@pytest.mark.skipif(not hasattr(pltpu, "TensorCoreMesh"), reason="this jax has no such kernels")
def test_cores_that_share_a_kernel():
    kernel, flops = on_cores()
    assert kernel.flops == flops == BLOCK
    estimate = pl.CostEstimate(flops=77, bytes_accessed=0, transcendentals=0)
    assert on_cores(cost_estimate=estimate)[0].flops == 77


def test_a_constant_that_an_outer_trace_knows_alone():
    def outer(x):
        inner = jax.make_jaxpr(lambda y: y + x)(x)
        assert kernels_in(inner) == {}
        assert device_flops(inner, 1) == 0
        return x

    jax.jit(outer).trace(Q)


def looked_up(places, row, out):
    out[...] = row[...]


@pytest.mark.parametrize("rows", [8, 1024])
def test_a_kernel_moves_the_blocks_that_its_grid_visits(rows):
    """A lookup of eight rows, by their places."""
    specs = [pl.BlockSpec((1, 1, 128), lambda i, places: (places[i], 0, 0))]
    lookup = pl.pallas_call(
        looked_up,
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=1,
            grid=(8,),
            in_specs=specs,
            out_specs=pl.BlockSpec((1, 1, 128), lambda i, places: (i, 0, 0)),
        ),
        out_shape=jax.ShapeDtypeStruct((8, 1, 128), jnp.float32),
    )
    places = jax.ShapeDtypeStruct((8,), jnp.int32)
    table = jax.ShapeDtypeStruct((rows, 1, 128), jnp.float32)
    kernel, _ = counted(lookup, places, table)
    assert kernel.moved == 4 * (8 + 2 * 8 * 128)
    chips = target("v6e:2x2")
    args = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=P()) for x in (places, table)]
    mapped = jax.shard_map(lookup, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    program = compile_for(mapped, chips, *args)
    (call,) = (x for x in program.module.entry.operations if x.work.moved > 8000)
    assert call.work.moved == pytest.approx(kernel.moved, abs=1)


def copied_by_cores(table, places):
    """Every core copies the rows that its 128 places say, 32 at a time."""
    width, each, cores, subcores = table.shape[1], 128, 2, 16

    def body(table, places, out, listed, rows):
        core = jax.lax.axis_index("core") * subcores + jax.lax.axis_index("subcore")
        pltpu.sync_copy(places.at[pl.ds(core * each, each)], listed)

        @pl.loop(0, each // 32)
        def _(part):
            pltpu.sync_copy(table.at[listed.at[pl.ds(part * 32, 32)]], rows)
            pltpu.sync_copy(rows, out.at[pl.ds(core * each + part * 32, 32)])

    return pl.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((each * cores * subcores, width), table.dtype),
        mesh=plsc.VectorSubcoreMesh(
            core_axis_name="core",
            subcore_axis_name="subcore",
            num_cores=cores,
            num_subcores=subcores,
        ),
        scratch_types=[pltpu.VMEM((each,), jnp.int32), pltpu.VMEM((32, width), table.dtype)],
    )(table, places)


@pytest.mark.skipif(not hasattr(pltpu, "TensorCoreMesh"), reason="this jax has no such kernels")
@pytest.mark.parametrize("rows", [16384, 65536])
def test_a_kernel_on_cores_moves_what_it_copies(rows):
    """Looked-up rows are read and written; places are read. The table does not count."""
    step = jax.shard_map(copied_by_cores, in_specs=(P(), P()), out_specs=P(), check_vma=False)
    table = jax.ShapeDtypeStruct((rows, 512), jnp.float32)
    places = jax.ShapeDtypeStruct((4096,), jnp.int32)
    with jax.set_mesh(target("tpu7x:2x2x1").mesh):
        (found,) = kernels_in(jax.make_jaxpr(step)(table, places)).values()
    assert found.moved == 2 * 4096 * 512 * 4 + 4096 * 4
