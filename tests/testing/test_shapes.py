import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from examples import examples
from hypothesis import find, given, settings
from hypothesis import strategies as st

from jaxpar.testing import dtypes, even_shapes, ragged_sizes, uneven_shapes

quick = examples(50)
many = settings(max_examples=2000)  # for find, which stops early


@quick
@given(st.integers(1, 8), st.integers(1, 3), st.data())
def test_even_shapes(shards, rank, data):
    dim = data.draw(st.integers(-rank, rank - 1))
    shape = data.draw(even_shapes(shards, rank=rank, dim=dim, max_size=12))
    assert len(shape) == rank
    assert shape[dim] % shards == 0
    assert all(1 <= size <= 12 for size in shape)


def test_even_shapes_of_a_ring_larger_than_max_size():
    assert find(even_shapes(32, rank=1), lambda _: True, settings=many) == (32,)


@quick
@given(st.integers(2, 8), st.integers(1, 3), st.data())
def test_uneven_shapes(shards, rank, data):
    dim = data.draw(st.integers(-rank, rank - 1))
    shape = data.draw(uneven_shapes(shards, rank=rank, dim=dim, max_size=12))
    assert len(shape) == rank
    assert shape[dim] % shards
    assert all(1 <= size <= 12 for size in shape)


def test_uneven_shapes_on_both_sides_of_the_ring_size():
    find(uneven_shapes(4), lambda shape: shape[0] < 4, settings=many)
    find(uneven_shapes(4), lambda shape: shape[0] > 4, settings=many)


@pytest.mark.parametrize("strategy", [even_shapes, uneven_shapes])
def test_shape_errors(strategy):
    with pytest.raises(ValueError, match=f"{strategy.__name__}: shards=0 must be at least 1"):
        strategy(0)
    with pytest.raises(ValueError, match="dim=2 is not a dimension of a shape of rank 2"):
        strategy(2, dim=2)


def test_uneven_shapes_of_a_ring_of_one():
    with pytest.raises(ValueError, match="shards=1 divides every size"):
        uneven_shapes(1)


@quick
@given(dtypes(["float", "int", "uint", "bool"]))
def test_dtypes_are_what_arrays_keep(dtype):
    assert dtype.itemsize <= 4
    assert jnp.zeros(1, dtype).dtype == dtype


@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16"])
def test_floats_by_default(name):
    assert find(dtypes(), lambda dtype: dtype == jnp.dtype(name), settings=many) == name


def test_float64_only_with_x64():
    strategy = dtypes()
    with jax.enable_x64(True):
        assert find(strategy, lambda dtype: dtype == np.float64, settings=many) == np.float64


@pytest.mark.parametrize("kinds", [["complex"], []])
def test_dtypes_errors(kinds):
    with pytest.raises(ValueError, match=r"dtypes: kinds=.* must be some of"):
        dtypes(kinds)


@quick
@given(st.integers(1, 6), st.integers(0, 20), st.booleans(), st.data())
def test_ragged_sizes_share_the_total(count, total, exact, data):
    sizes = data.draw(ragged_sizes(count, total, exact=exact))
    assert len(sizes) == count
    assert min(sizes) >= 0
    assert sum(sizes) == total if exact else sum(sizes) <= total


@pytest.mark.parametrize(
    "holds",
    [
        lambda sizes: sizes.count(0) == 3,
        lambda sizes: 0 not in sizes,
        lambda sizes: sizes[0] == 0 and sizes[3] > 0,
    ],
)
def test_ragged_sizes_reach_the_corners(holds):
    find(ragged_sizes(4, 12, exact=True), holds, settings=many)


def test_no_groups_share_no_rows():
    assert find(ragged_sizes(0, 5), lambda _: True, settings=many) == ()


@pytest.mark.parametrize(("count", "total"), [(-1, 2), (2, -1), (0, 3)])
def test_ragged_sizes_errors(count, total):
    with pytest.raises(ValueError, match=f"no {count} sizes can share {total} rows"):
        ragged_sizes(count, total, exact=True)


def test_missing_hypothesis_names_the_remedy(monkeypatch):
    monkeypatch.setitem(sys.modules, "hypothesis.strategies", None)
    for make in (
        lambda: even_shapes(2),
        lambda: uneven_shapes(2),
        dtypes,
        lambda: ragged_sizes(2, 2),
    ):
        with pytest.raises(ImportError, match=r"needs hypothesis.*pip install 'hypothesis"):
            make()
