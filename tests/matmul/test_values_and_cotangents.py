"""Every overlapped matmul equals NumPy: any mesh, axis order, shape, dtype and mode, both ways."""

import math
from dataclasses import dataclass

import jax
import numpy as np
import pytest
from examples import examples
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import Axis
from jaxpar.matmul import (
    all_gather_matmul,
    collective_einsum,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from jaxpar.ring import run
from jaxpar.testing import assert_matches_reference, axis_orders, dtypes, meshes

MODES = ["unidirectional", "bidirectional", "naive", "stationary", "chunked-2", "chunked-8"]
modes = st.sampled_from(MODES)
blocks = st.integers(1, 3)  # sizes of a dimension on one device: 1, even and odd
few = examples(4)


@dataclass(frozen=True)
class RingOnMesh:
    """A mesh, an axis on it, the mode of the backward pass, and the axes that are left over."""

    mesh: Mesh
    axis: str | tuple[str, ...]
    backward: str | None = None

    @property
    def over(self):
        """The `axis` argument."""
        return Axis(self.axis, backward=self.backward)

    @property
    def names(self):
        return (self.axis,) if isinstance(self.axis, str) else self.axis

    @property
    def others(self):
        return tuple(name for name in self.mesh.axis_names if name not in self.names)

    @property
    def size(self):
        return math.prod(self.mesh.shape[name] for name in self.names)

    @property
    def replicas(self):
        return self.mesh.size // self.size


rings = meshes().flatmap(
    lambda mesh: st.builds(
        RingOnMesh, st.just(mesh), axis_orders(mesh), st.sampled_from([None, None, *MODES])
    )
)


def normal(shape, dtype="float32", seed=0):
    return np.random.default_rng([seed, *shape]).standard_normal(shape).astype(dtype)


def rows_spec(rank, sharded, others):
    """A spec with `sharded` (dimension: axes), and dimension 0 split over `others` before that."""
    entries = [sharded.get(dim, ()) for dim in range(rank)]
    entries[0] = (*others, *entries[0])
    return P(*entries)


@few
@given(st.data(), rings, modes, dtypes(), st.booleans(), st.integers(1, 4), st.integers(0, 2))
def test_all_gather_matmul_gathers_lhs(data, ring, mode, dtype, check_vma, rank, count):
    dim = data.draw(st.integers(-rank, rank - 1))
    shape = [data.draw(blocks) for _ in range(rank)]
    shape[dim] *= ring.size
    widths = [data.draw(blocks) for _ in range(max(count, 1))]
    last = ring.names
    if rank == 1:  # no rows that the other axes could split: there they split the columns
        last = (*ring.others, *ring.names)
        widths = [width * ring.replicas for width in widths]
    else:
        shape[0] *= ring.replicas
    others = ring.others if rank > 1 else ()
    lhs_spec = rows_spec(rank, {dim % rank: ring.names}, others)
    out_spec = P(*rows_spec(rank - 1, {}, others), last) if rank > 1 else P(last)
    weights = tuple(normal((shape[-1], width * ring.size), dtype, width) for width in widths)
    assert_matches_reference(
        lambda x, ws: all_gather_matmul(x, ws, ring.over, dim=dim, mode=mode),
        lambda x, ws: tuple(x @ w for w in ws) if count else x @ ws,
        normal(shape, dtype),
        weights if count else weights[0],  # an array, or a tuple of one or two
        mesh=ring.mesh,
        check_vma=check_vma,
        in_specs=(lhs_spec, P(None, last)),
        out_specs=out_spec,
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("n", [1, 2])
def test_weights_of_different_widths(n, mode):
    """Several traces: a checker of types looks at one of the results, by chance."""
    mesh = Mesh(jax.devices()[:n], ("x",), axis_types=(AxisType.Auto,))
    x, weights = normal((4 * n,)), tuple(normal((4 * n, width * n)) for width in (1, 3, 2))
    specs = {"in_specs": (P("x"), P(None, "x")), "out_specs": P("x")}

    def products(x, weights):
        return all_gather_matmul(x, weights, "x", dim=0, mode=mode)

    for _ in range(4):
        mapped = jax.shard_map(lambda *args: products(*args), mesh=mesh, **specs)
        shapes = [y.shape for y in jax.eval_shape(mapped, x, weights)]
        assert shapes == [(width * n,) for width in (1, 3, 2)]

    def reference(x, weights):
        return tuple(x @ w for w in weights)

    assert_matches_reference(products, reference, x, weights, mesh=mesh, **specs)


@few
@given(
    rings,
    modes,
    dtypes(),
    st.booleans(),
    st.tuples(*[blocks] * 5),
    st.integers(1, 4),
    st.integers(-2, 1),
)
def test_all_gather_matmul_gathers_rhs(ring, mode, dtype, check_vma, sizes, rank, dim):
    """The weight is replicated over the axes beside the ring: its gradient is summed there."""
    *rows, k, n = sizes[5 - max(rank, 2) - 1 :]
    weight = [k, n]
    weight[dim] *= ring.size
    split = (*ring.others, *ring.names)
    shape = (ring.mesh.size, *rows[1:], weight[0])

    def fn(x, w):
        if rank == 1:
            y = all_gather_matmul(x[0], w, ring.over, gather="rhs", dim=dim, mode=mode)
            return y[None]
        return all_gather_matmul(x, w, ring.over, gather="rhs", dim=dim, mode=mode)

    assert_matches_reference(
        fn,
        np.matmul,
        normal(shape, dtype),
        normal(weight, dtype),
        mesh=ring.mesh,
        check_vma=check_vma,
        in_specs=(P(split), rows_spec(2, {dim % 2: ring.names}, ())),
        out_specs=P(split),
    )


@few
@given(st.data(), rings, modes, dtypes(), st.booleans(), st.integers(1, 4), blocks)
def test_matmul_reduce_scatter(data, ring, mode, dtype, check_vma, rank, n):
    dim = data.draw(st.integers(-rank, rank - 1))
    shape = [data.draw(blocks) for _ in range(rank)]
    result = [*shape[:-1], n]
    result[dim] *= ring.size
    result[0] *= ring.replicas
    lhs = normal((*result[:-1], shape[-1] * ring.size), dtype)
    columns = ring.others if rank == 1 else ()
    lhs_spec = rows_spec(rank, {rank - 1: ring.names}, ring.others if rank > 1 else ())
    assert_matches_reference(
        lambda x, w: matmul_reduce_scatter(x, w, ring.over, dim=dim, mode=mode),
        np.matmul,
        lhs,
        normal((lhs.shape[-1], result[-1]), dtype),
        mesh=ring.mesh,
        check_vma=check_vma,
        in_specs=(lhs_spec, P(ring.names, columns)),
        out_specs=rows_spec(rank, {dim % rank: ring.names}, ring.others),
    )


@few
@given(
    rings,
    modes,
    dtypes(),
    st.booleans(),
    st.lists(st.integers(1, 5), max_size=3),
    blocks,
    st.integers(1, 9),
)
def test_matmul_all_reduce_of_sizes_that_need_not_divide(ring, mode, dtype, check_vma, rows, k, n):
    """The result is typed as replicated over the ring: out_specs does not name its axes."""
    shape = [*rows, k * ring.size]
    if rows:
        shape[0] *= ring.replicas
        lhs_spec = rows_spec(len(shape), {len(rows): ring.names}, ring.others)
        columns, out_spec = (), P(ring.others)
    else:
        n *= ring.replicas
        lhs_spec, columns, out_spec = P(ring.names), ring.others, P(ring.others)
    assert_matches_reference(
        lambda x, w: matmul_all_reduce(x, w, ring.over, mode=mode),
        np.matmul,
        normal(shape, dtype),
        normal((shape[-1], n), dtype),
        mesh=ring.mesh,
        check_vma=check_vma,
        in_specs=(lhs_spec, P(ring.names, columns)),
        out_specs=out_spec,
    )


@pytest.mark.parametrize(
    ("n", "mode"),
    [
        *((3, "naive"), (3, "bidirectional"), (4, "chunked-2")),
    ],
)
def test_matmul_all_reduce_to_a_replicated_output(n, mode):
    """Here the ring divides no dimension, the first one, and the second one of the result."""
    assert_matches_reference(
        lambda x, w, v: (
            matmul_all_reduce(x, w, "x", mode=mode),
            matmul_all_reduce(x[0], v, "x", mode=mode),
            matmul_all_reduce(x, v, "x", mode=mode),
        ),
        lambda x, w, v: (x @ w, x[0] @ v, x @ v),
        normal((2, 2 * n)),
        normal((2 * n, 5)),
        normal((2 * n, n)),
        mesh=line(n),
        in_specs=(P(None, "x"), P("x"), P("x")),
        out_specs=P(),
        check_vma=n == 4,
    )


# -- einsums ------------------------------------------------------------------------------------


@st.composite
def einsums(draw):
    """Labels b (in all three), m (lhs), k (contracted), n (rhs), in any order, b or not."""
    batch = draw(st.sampled_from(["", "b"]))
    lhs, rhs, out = (
        "".join(draw(st.permutations(letters)))
        for letters in (batch + "mk", batch + "kn", batch + "mn")
    )
    return lhs, rhs, out


def spec_of(labels, sharded, axes):
    return P(*(axes if label in sharded else None for label in labels))


@few
@given(st.data(), rings, modes, dtypes(), st.booleans(), einsums(), st.tuples(*[blocks] * 4))
def test_collective_einsum_gathers(data, ring, mode, dtype, check_vma, labels, blocks):
    """A label of both operands is gathered in the one that is sharded along it."""
    lhs, rhs, out = labels
    label = data.draw(st.sampled_from(sorted(set(lhs + rhs))))
    operands = [name for name, letters in (("lhs", lhs), ("rhs", rhs)) if label in letters]
    operand = data.draw(st.sampled_from(operands))
    free = "n" if operand == "lhs" else "m"  # of the other operand, sharded so that results differ
    sizes = {
        name: size * (ring.size if name in (label, free) else 1)
        for name, size in zip("bmkn", blocks, strict=True)
    }
    specs = {
        "lhs": spec_of(lhs, label if operand == "lhs" else free, ring.names),
        "rhs": spec_of(rhs, label if operand == "rhs" else free, ring.names),
    }
    subscripts = f"{lhs},{rhs}->{out}"
    assert_matches_reference(
        lambda x, w: collective_einsum(subscripts, x, w, ring.over, gather=label, mode=mode),
        lambda x, w: np.einsum(subscripts, x, w),
        normal([sizes[name] for name in lhs], dtype),
        normal([sizes[name] for name in rhs], dtype),
        mesh=ring.mesh,
        check_vma=check_vma,
        in_specs=(specs["lhs"], specs["rhs"]),
        out_specs=spec_of(out, free, ring.names),
    )


@few
@given(st.data(), rings, modes, dtypes(), st.booleans(), einsums(), st.tuples(*[blocks] * 4))
def test_collective_einsum_scatters(data, ring, mode, dtype, check_vma, labels, blocks):
    """The scattered label is one of lhs, of rhs, or of both."""
    lhs, rhs, out = labels
    label = data.draw(st.sampled_from(out))
    sizes = {
        name: size * (ring.size if name in (label, "k") else 1)
        for name, size in zip("bmkn", blocks, strict=True)
    }
    subscripts = f"{lhs},{rhs}->{out}"
    assert_matches_reference(
        lambda x, w: collective_einsum(subscripts, x, w, ring.over, scatter=label, mode=mode),
        lambda x, w: np.einsum(subscripts, x, w),
        normal([sizes[name] for name in lhs], dtype),
        normal([sizes[name] for name in rhs], dtype),
        mesh=ring.mesh,
        check_vma=check_vma,
        in_specs=(spec_of(lhs, "k", ring.names), spec_of(rhs, "k", ring.names)),
        out_specs=spec_of(out, label, ring.names),
    )


# -- every ring size, on purpose and not by chance ----------------------------------------------

HEADS = "bsd,dhe->bhse"


def line(n):
    return Mesh(np.array(jax.devices()[:n]), ("x",), axis_types=(AxisType.Auto,))


@pytest.mark.parametrize("n", range(1, 9))
def test_every_ring_size(n):
    """With one row a device, so that no half of a block has the size of the other."""
    # One way round, a step is like any other: not on 4 and more devices.
    modes = ["bidirectional", "unidirectional"][: 1 if n > 3 else 2]

    def fn(x, w, a, b):
        return (
            tuple(all_gather_matmul(x, w, "x", mode=mode) for mode in modes),
            tuple(matmul_reduce_scatter(a, b, "x", mode=mode) for mode in modes),
        )

    assert_matches_reference(
        fn,
        lambda x, w, a, b: ((x @ w,) * len(modes), (a @ b,) * len(modes)),
        normal((n, 3)),
        normal((3, n)),
        normal((n, n)),
        normal((n, 1)),
        mesh=line(n),
        in_specs=(P("x"), P(None, "x"), P(None, "x"), P("x")),
        out_specs=(P(None, "x"), P("x")),
        check_vma=n % 2 == 0,
        max_directions=8,
    )


@pytest.mark.parametrize(
    ("axes", "mode"),
    [
        (("y", "x"), "unidirectional"),
        (("z", "x", "y"), "bidirectional"),
    ],
)
def test_a_ring_counts_in_the_order_of_the_tuple(axes, mode):
    grid = np.array(jax.devices())[[5, 0, 3, 6, 1, 7, 4, 2]].reshape(2, 2, 2)
    mesh = Mesh(grid, ("x", "y", "z"), axis_types=(AxisType.Auto,) * 3)
    assert_matches_reference(
        lambda x, w, v: matmul_reduce_scatter(
            all_gather_matmul(x, w, axes, mode=mode), v, axes, mode=mode
        ),
        lambda x, w, v: x @ w @ v,
        normal((8, 3)),
        normal((3, 8)),
        normal((8, 2)),
        mesh=mesh,
        in_specs=(P(axes), P(None, axes), P(axes)),
        out_specs=P(axes),
        grad=False,
    )


@pytest.mark.parametrize("mode", ["bidirectional", "naive", "chunked-2"])
def test_heads_of_several_weights_share_one_gather(mode):
    """Queries, and half as many keys: one gather of the sequence; heads are local."""
    assert_matches_reference(
        lambda x, ws: collective_einsum(HEADS, x, ws, "x", gather="s", mode=mode),
        lambda x, ws: tuple(np.einsum(HEADS, x, w) for w in ws),
        normal((2, 6, 3)),
        (normal((3, 6, 2)), normal((3, 3, 2))),
        mesh=line(3),
        in_specs=(P(None, "x"), P(None, "x")),
        out_specs=P(None, "x"),
        check_vma=mode != "naive",
    )


@pytest.mark.parametrize("label", ["b", "k"])
def test_the_smaller_of_two_operands_is_the_gathered_one(label):
    """Both have the label; the sharded one is the one whose local size is a part of the other's."""
    subscripts = "bmk,bkn->bmn"
    x, w = normal((3, 2, 3)), normal((3, 3, 3))
    for operand, free in (("lhs", "n"), ("rhs", "m")):
        assert_matches_reference(
            lambda x, w: collective_einsum(
                subscripts, x, w, "x", gather=label, mode="bidirectional"
            ),
            lambda x, w: np.einsum(subscripts, x, w),
            x if operand == "lhs" else normal((3, 3, 3)),
            w,
            mesh=line(3),
            in_specs=(
                spec_of("bmk", label if operand == "lhs" else free, ("x",)),
                spec_of("bkn", label if operand == "rhs" else free, ("x",)),
            ),
            out_specs=spec_of("bmn", free, ("x",)),
            grad=False,
        )


@pytest.mark.parametrize(("mode", "n"), [("unidirectional", 4), ("bidirectional", 7)])
def test_long_rings_run_a_loop(mode, n, monkeypatch):
    monkeypatch.setattr(run, "UNROLLED", 1)
    where = {
        "mesh": line(n),
        "in_specs": (P("x"), P(None, "x"), P("x")),
        "out_specs": (P("x"), P("x"), P("x")),
    }

    def fn(x, w, v):
        y, z = all_gather_matmul(x, (w, v.T), "x", mode=mode)
        return (
            matmul_reduce_scatter(y, v, "x", mode=mode),
            collective_einsum("mk,nk->nm", z, v.T, "x", scatter="m", mode=mode).T,
            all_gather_matmul(x, v.T, "x", gather="rhs", dim=1, mode=mode),
        )

    def reference(x, w, v):
        return x @ w @ v, x @ v.T @ v, x @ v.T

    args = normal((n, 2)), normal((2, n)), normal((n, 2))
    assert "scan[" in str(jax.make_jaxpr(jax.shard_map(fn, **where))(*args))
    assert_matches_reference(fn, reference, *args, **where, check_vma=n == 4, max_directions=8)
