"""Batches on their devices, and the last one of an epoch."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.layout import REPLICATED, LayoutError, LayoutMap
from jaxpar.schedule import target

DP = P("dp")


def laid(batch=DP, mesh="dp=4,tp=2", **more):
    rules = LayoutMap({"w": ("tp",)}, batch=batch, **more)
    return rules.layout({"w": jnp.ones(8)}, make_mesh(mesh))


@pytest.mark.parametrize(
    ("batch", "spec"),
    [
        (P("dp"), P("dp")),
        (P(("dp", "tp")), P(("dp", "tp"))),
        (("dp", "tp"), P("dp", "tp")),
        ("rows columns", P("dp", None)),
        (REPLICATED, P()),
    ],
)
def test_placed(batch, spec):
    axes = {"rows": "dp", "columns": None}
    layout = laid(batch, axes=axes) if batch != REPLICATED else laid(batch, "dp=1,tp=8")
    data = {"x": np.arange(48.0).reshape(8, 6), "y": np.arange(8)}
    placed = layout.place_batch(data)
    assert placed["x"].sharding.is_equivalent_to(NamedSharding(layout.mesh, spec), 2)
    first = P(*spec[:1])
    assert placed["y"].sharding.is_equivalent_to(NamedSharding(layout.mesh, first), 1)
    jax.tree.map(np.testing.assert_array_equal, placed, data)


def test_a_scalar_is_on_all_devices():
    assert laid().place_batch({"step": 3})["step"].sharding.is_fully_replicated


def test_refused():
    with pytest.raises(LayoutError) as found:
        laid().place_batch({"x": np.ones((6, 3)), "y": np.ones((8, 2)), "z": np.ones(5)})
    text = str(found.value)
    assert text.startswith("Layout.place_batch: 2 problems")
    assert (
        "'x' float64[6,3]: rule 'batch': 'dp' (4) does not divide dimension 0: 6 = 1 x 4 + 2"
        in text
    )
    assert "'z' float64[5]" in text
    rules = LayoutMap({"w": ("tp",)})
    layout = rules.layout({"w": jnp.ones(8)}, make_mesh("tp=8"))
    with pytest.raises(
        ValueError, match=r"place_batch: the map has no spec for data; give LayoutMap"
    ):
        layout.place_batch(np.ones(8))


def test_the_last_batch_counts_right():
    layout = laid()
    data = np.random.default_rng(0).normal(size=(19, 3))
    found = list(layout.batches({"x": data[at : at + 8]} for at in range(0, 19, 8)))
    assert [batch["x"].shape for batch, _ in found] == [(8, 3)] * 3
    assert [weights.sum() for _, weights in found] == [8, 8, 3]
    assert all(
        w.sharding.is_equivalent_to(NamedSharding(layout.mesh, P("dp")), 1) for _, w in found
    )

    def loss(batch, weights):
        return jnp.sum(weights * jnp.sum(batch["x"] ** 2, -1)), jnp.sum(weights)

    sums = np.sum([jax.jit(loss)(*one) for one in found], axis=0)
    np.testing.assert_allclose(sums[0] / sums[1], np.mean(np.sum(data**2, -1)), rtol=1e-6)


def test_rows_that_are_given():
    ((batch, weights),) = laid().batches([np.ones((3, 2))], rows=4)
    assert batch.shape == (4, 2)
    np.testing.assert_array_equal(weights, [1, 1, 1, 0])
    assert list(laid().batches([])) == []


def test_a_mesh_whose_processes_are_not_neighbours():
    devices = sorted(target("v5e:4x4").mesh.devices.flat, key=lambda device: device.process_index)
    mesh = Mesh(np.array(devices).reshape(-1, 4).T.reshape(-1), ("dp",))  # process 0 first, fifth
    layout = LayoutMap({"w": ()}, batch=("dp",)).layout({"w": jnp.ones(8)}, mesh)
    with pytest.raises(
        ValueError, match=r"process 0 have rows .* of 16, which are no part of equal"
    ):
        layout.batch_part()


@pytest.mark.parametrize(
    ("leaf", "text"),
    [
        (
            np.array(["a", "b", "c", "d"]),
            "'x/t' is an array of dtype <U1 (ndarray), which no array",
        ),
        (np.array([b"ab"] * 4), "'x/t' is an array of dtype |S2 (ndarray), which no array of JAX"),
        (
            np.array([None] * 4),
            "'x/t' is an array of dtype object (ndarray), which no array of JAX",
        ),
        (["a", "b"], "'x/t/0' of the batch is 'a', no array; make numbers of it, or leave it out"),
        ("a" * 99, f"'x/t' of the batch is '{'a' * 39}, no array; make numbers of it, or leave"),
        (b"ab", "'x/t' of the batch is b'ab', no array; make numbers of it, or leave it out"),
    ],
)
def test_text_in_a_batch_is_named(leaf, text):
    batch, layout = {"x": {"t": leaf, "n": np.arange(4)}}, laid()
    for place in (layout.place_batch, lambda batch: next(layout.batches([batch]))):
        with pytest.raises(TypeError, match=re.escape(text)):
            place(batch)


def test_a_process_without_any_batch(monkeypatch):
    monkeypatch.setattr("jaxpar.layout._batch._any_process", lambda here: True)  # another one has
    with pytest.raises(ValueError, match="process 0 has no batch at all, and others have; give"):
        next(laid().batches([]))


@pytest.mark.parametrize(
    ("source", "rows", "text"),
    [
        ([np.ones(4), np.ones(5)], None, "a batch has 5 rows, and batches have at most 4"),
        ([np.ones(0)], None, "the first batch has no rows; say how many batches have, rows="),
        ([np.ones(4)], 0, "rows=0 must be at least 1"),
        ([{"x": np.ones(4), "y": np.ones(3)}], None, "first dimension, got 'x' (4,), 'y' (3,)"),
        ([np.ones(())], None, "must have as many rows"),
        ([np.ones(6)], None, "'dp' (4) does not divide dimension 0: 6 = 1 x 4 + 2; pad it to 8"),
    ],
)
def test_batches_refused(source, rows, text):
    with pytest.raises(ValueError, match=r"^Layout\.batches: ") as found:
        list(laid().batches(source, rows=rows))
    assert text in str(found.value)
