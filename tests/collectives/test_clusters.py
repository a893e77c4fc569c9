"""The order for CPU devices of several processes, in the one process that the tests have."""

import jax
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import (
    all_gather_matmul,
    make_mesh,
    matmul_all_reduce,
    matmul_reduce_scatter,
)
from jaxpar.ring.order import ClusterOrder, CpuOrder, Order, traced_order
from jaxpar.testing import assert_matches_reference, count_collectives

both_rings = pytest.mark.parametrize("mode", ["unidirectional", "bidirectional"])


@pytest.fixture
def cluster(monkeypatch):
    """Has programs ordered as on a cluster of CPU hosts."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)


def on_a_mesh(function, n, in_specs, out_specs, **options):
    mesh = make_mesh({"x": n}, devices=jax.devices()[:n])
    return jax.shard_map(function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, **options)


def orders():
    found = []

    def see(x):
        found.append(traced_order())
        return x

    on_a_mesh(see, 2, P(), P())(np.zeros(1, np.float32))
    return set(found)


def test_only_cpu_devices_of_several_processes_are_a_cluster(monkeypatch):
    assert orders() == {CpuOrder()}
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert orders() == {ClusterOrder()}
    assert traced_order() == Order()  # no devices, so not known to be CPUs


def gather_lhs(mode):
    return (
        lambda x, w: all_gather_matmul(x, w, "x", mode=mode),
        (P("x"), P(None, "x")),
        P(None, "x"),
    )


def gather_rhs(mode):
    return (
        lambda x, w: all_gather_matmul(x, w, "x", gather="rhs", mode=mode),
        (P("x"), P("x")),
        P("x"),
    )


def scatter(mode):
    return lambda x, w: matmul_reduce_scatter(x, w, "x", mode=mode), (P(None, "x"), P("x")), P("x")


def all_reduce(mode):
    return lambda x, w: matmul_all_reduce(x, w, "x", mode=mode), (P(None, "x"), P("x")), P()


every_matmul = pytest.mark.parametrize(
    ("op", "mode"),
    [
        (gather_lhs, "bidirectional"),
        (gather_rhs, "unidirectional"),
        (scatter, "unidirectional"),
        (all_reduce, "bidirectional"),
    ],
)


# Each matmul on each ring, both ways on an even one, whose opposite block comes in halves.
RINGS = {
    gather_lhs: [(1, "one"), (2, "both"), (5, "one"), (6, "both")],
    gather_rhs: [(1, "both"), (2, "one"), (5, "both"), (6, "one"), (6, "both")],
    scatter: [(1, "one"), (2, "both"), (5, "one"), (6, "both")],
    all_reduce: [(1, "both"), (2, "one"), (5, "both"), (6, "one"), (6, "both")],
}
WAYS = {"one": "unidirectional", "both": "bidirectional"}


@pytest.mark.parametrize(
    ("op", "n", "mode"), [(op, n, WAYS[way]) for op, rings in RINGS.items() for n, way in rings]
)
def test_values_and_gradients(op, n, mode, cluster):
    function, in_specs, out_specs = op(mode)
    rng = np.random.default_rng(n)
    lhs, rhs = (rng.standard_normal((2 * n, 2 * n)).astype(np.float32) for _ in range(2))
    assert_matches_reference(
        function,
        lambda x, w: x @ w,
        *(lhs, rhs),
        mesh=make_mesh({"x": n}, devices=jax.devices()[:n]),
        in_specs=in_specs,
        out_specs=out_specs,
        check_vma=n in (2, 5),
    )


@every_matmul
def test_loops_give_the_same(op, mode, cluster, monkeypatch):
    function, in_specs, out_specs = op(mode)
    rng = np.random.default_rng(0)
    args = [rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2)]
    monkeypatch.setattr("jaxpar.ring.run.UNROLLED", 1)
    loop = jax.jit(on_a_mesh(function, 8, in_specs, out_specs)).trace(*args)
    assert "scan[" in str(loop.jaxpr) or "while[" in str(loop.jaxpr)
    found = loop.lower().compile()(*args)
    np.testing.assert_allclose(found, args[0] @ args[1], rtol=1e-5, atol=1e-5)


@both_rings
def test_ring_collectives_too(mode, cluster):
    run = on_a_mesh(lambda x: jaxpar.all_reduce(x, "x", mode=mode), 6, P("x"), P())
    x = np.arange(36, dtype=np.float32)
    np.testing.assert_array_equal(jax.jit(run)(x), x.reshape(6, 6).sum(0))


@every_matmul
def test_nothing_more_is_sent(op, mode, monkeypatch):
    function, in_specs, out_specs = op(mode)
    run = on_a_mesh(function, 6, in_specs, out_specs)
    args = [jax.ShapeDtypeStruct((12, 12), np.float32)] * 2
    wanted = count_collectives(run, *args, grad=True)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    jax.clear_caches()
    assert count_collectives(run, *args, grad=True) == wanted
