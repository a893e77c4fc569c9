"""Values and gradients against NumPy on any mesh, under both settings of `check_vma`."""

import jax
import numpy as np
import pytest
from examples import examples
from hypothesis import Phase, given
from hypothesis import strategies as st
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import all_gather, all_reduce, make_mesh, reduce_scatter
from jaxpar.axis.vma import vary_over
from jaxpar.testing import (
    assert_matches_reference,
    axis_orders,
    dtypes,
    even_shapes,
    meshes,
    uneven_shapes,
)

MODES = ("unidirectional", "bidirectional", "auto", "naive")
RINGS = MODES[:2]
both_rings = pytest.mark.parametrize("mode", RINGS)
few = examples(
    6,
    derandomize=True,
    phases=[Phase.generate],  # not shrinking: each try would compile anew
)


def normal(shape, dtype="float32", seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype)


# References see the local arrays of all devices: dimension 0 counts the devices of a ring in
# logical order, and dimension 1 the rings.


def gather(x, axis, tiled):
    join = np.concatenate if tiled else np.stack
    whole = [join(x[:, ring], axis) for ring in range(x.shape[1])]
    return np.stack([np.stack(whole)] * len(x))


def scatter(x, dim, tiled):
    n = len(x)
    whole = [np.split(x[:, ring].sum(0), n, dim) for ring in range(x.shape[1])]
    blocks = np.stack([np.stack(blocks) for blocks in whole], 1)
    return blocks if tiled else blocks.squeeze(dim % (x.ndim - 2) + 2)


def reduce(x):
    return x.sum(0, keepdims=True)


def every_device(function):
    return lambda x: function(x[0, 0])[None, None]


any_mesh = meshes()


@st.composite
def rings(draw):
    """A mesh, the axes of a ring in any order, the spec of local arrays, the ring's size."""
    mesh = draw(any_mesh)
    axes = draw(axis_orders(mesh, min_axes=draw(st.integers(1, mesh.devices.ndim))))
    ring = (axes,) if isinstance(axes, str) else axes
    others = tuple(name for name in mesh.axis_names if name not in ring)
    n = int(np.prod([mesh.shape[name] for name in ring]))
    return mesh, axes, P(axes, others or None), n


@few
@given(rings(), st.data())
def test_all_gather(ring, data):
    mesh, axes, spec, n = ring
    rank, tiled = data.draw(st.integers(0, 3)), data.draw(st.booleans())
    rank = max(rank, tiled)
    axis = data.draw(st.integers(-rank - (not tiled), rank - tiled))
    shape = data.draw(st.tuples(*[st.integers(1, 5)] * rank))
    mode, dtype = data.draw(st.sampled_from(MODES)), data.draw(dtypes(["float", "int"]))
    assert_matches_reference(
        every_device(lambda x: all_gather(x, axes, dim=axis, tiled=tiled, mode=mode)),
        lambda x: gather(x, axis, tiled),
        normal((n, mesh.size // n, *shape), dtype),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )


@few
@given(rings(), st.data())
def test_reduce_scatter(ring, data):
    mesh, axes, spec, n = ring
    rank, tiled = data.draw(st.integers(1, 3)), data.draw(st.booleans())
    dim = data.draw(st.integers(-rank, rank - 1))
    shape = data.draw(even_shapes(n, rank=rank, dim=dim, max_size=5 * n if tiled else n))
    mode, dtype = data.draw(st.sampled_from(MODES)), data.draw(dtypes(["float", "int"]))
    assert_matches_reference(
        every_device(lambda x: reduce_scatter(x, axes, dim=dim, tiled=tiled, mode=mode)),
        lambda x: scatter(x, dim, tiled),
        normal((n, mesh.size // n, *shape), dtype),
        mesh=mesh,
        in_specs=spec,
        out_specs=spec,
    )


@few
@given(rings(), st.data())
def test_all_reduce(ring, data):
    mesh, axes, spec, n = ring
    rank = data.draw(st.integers(0, 3))
    shapes = [st.tuples(*[st.integers(1, 5)] * rank)]
    if rank:
        shapes += [even_shapes(n, rank=rank)] + ([uneven_shapes(n, rank=rank)] if n > 1 else [])
    shape = data.draw(st.one_of(*shapes))
    mode, dtype = data.draw(st.sampled_from(MODES)), data.draw(dtypes(["float", "int"]))
    assert_matches_reference(
        every_device(lambda x: all_reduce(x, axes, mode=mode)),
        reduce,
        normal((n, mesh.size // n, *shape), dtype),
        mesh=mesh,
        in_specs=spec,
        out_specs=P(None, spec[1]),
    )


@both_rings
def test_equal_inputs(mode):
    """Each device adds the same array, so it counts n times, and so does its gradient."""

    def all_three(x):
        x = vary_over(["x"], x)
        return (
            all_gather(x, "x", tiled=True, mode=mode),
            reduce_scatter(x, "x", tiled=True, mode=mode),
            all_reduce(x, "x", mode=mode),
        )

    assert_matches_reference(
        all_three,
        lambda x: (np.concatenate([x] * 16), 4 * x, 4 * x),
        normal((4, 3)),
        mesh=make_mesh("x=4,y=2"),
        in_specs=P(),
        out_specs=(P("x"), P("x"), P()),
    )


@both_rings
def test_under_vmap_and_scan(mode):
    def all_three(x):
        return (
            all_gather(x, "x", mode=mode),
            reduce_scatter(x, "x", dim=1, tiled=True, mode=mode),
            all_reduce(x, "x", mode=mode),
        )

    def batched(x):  # two rows of (3, 4)
        mapped = jax.vmap(all_three, in_axes=1)(x[0].transpose(1, 0, 2))
        _, scanned = lax.scan(lambda carry, row: (carry, all_three(row)), None, x[0])
        return jax.tree.map(lambda y: y[None], (mapped, scanned))

    def reference(x):
        gathered = np.stack([x] * 4).transpose(0, 2, 1, 3, 4)  # device, row, block, ...
        scattered = np.stack(np.split(x.sum(0), 4, 2))
        reduced = np.stack([x.sum(0)] * 4)
        return ((gathered, scattered, reduced),) * 2

    assert_matches_reference(
        batched,
        reference,
        normal((4, 2, 3, 4)),
        mesh=make_mesh("x=4,y=2"),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=mode == "bidirectional",
    )


@both_rings
@pytest.mark.parametrize("check_vma", [True, False])
def test_second_derivatives_in_reverse(mode, check_vma):
    """The gradient of a cubic is taken inside shard_map, and its own gradient outside."""
    n = 4
    # A sum typed as replicated is one loss; without types each device has a loss of its own.
    losses = 1 if check_vma else n

    def gradients(x):
        def gradient(function):
            out, pull = jax.vjp(lambda x: function(x) ** 3, x)
            return pull(jax.tree.map(lambda y: y * 0 + 1, out))[0]

        return (
            gradient(lambda x: all_gather(x, "x", mode=mode)),
            gradient(lambda x: reduce_scatter(x, "x", dim=1, mode=mode)),
            gradient(lambda x: all_reduce(x, "x", mode=mode)),
        )

    def reference(x):
        total = np.concatenate([x.reshape(n, 3, n).sum(0)] * n)
        return 3 * n * x**2, 3 * total**2, 3 * losses * total**2

    assert_matches_reference(
        gradients,
        reference,
        normal((n * 3, n)),
        mesh=make_mesh("x=4", devices=jax.devices()[:n]),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=check_vma,
    )
