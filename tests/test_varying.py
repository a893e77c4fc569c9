"""Reading and widening the set of mesh axes that a value varies over."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.axis.vma import checks_varying, vary_alike, vary_over, varying_axes


def seen(function, check_vma=True):
    """What `function` returns while traced, given x over x, y over y and one replicated array."""
    found = []
    mapped = jax.shard_map(
        lambda *args: found.append(function(*args)),
        mesh=make_mesh("x=2,y=2,z=2"),
        in_specs=(P("x"), P("y"), P()),
        out_specs=None,
        check_vma=check_vma,
    )
    jax.eval_shape(mapped, *[jnp.ones(2)] * 3)
    return found[0]


def test_varying_axes_is_the_union_over_all_leaves():
    sets = lambda x, y, r: (  # noqa: E731
        varying_axes(x),
        varying_axes(r),
        varying_axes(r, [x, {"y": y}]),
        varying_axes(),
    )
    assert seen(sets) == ({"x"}, set(), {"x", "y"}, set())
    assert seen(sets, check_vma=False) == (set(),) * 4


@pytest.mark.parametrize("check_vma", [True, False])
def test_checks_varying_is_the_setting_of_shard_map(check_vma):
    assert seen(lambda *_: checks_varying(("x", "z")), check_vma) is check_vma


def test_vary_over_adds_what_is_missing_to_each_leaf():
    def sets(x, y, r):
        widened = vary_over(["z", "x"], (x, {"y": y}, r))
        return [varying_axes(leaf) for leaf in jax.tree.leaves(widened)]

    assert seen(sets) == [{"x", "z"}, {"x", "y", "z"}, {"x", "z"}]
    assert seen(lambda x, y, r: vary_over(["x"], x) is x)


def test_vary_over_does_nothing_where_types_say_nothing():
    assert seen(lambda x, y, r: vary_over(["z"], x) is x, check_vma=False)
    x = jnp.ones(2)
    jax.vmap(lambda y: vary_over(["x"], y), axis_name="x")(x)
    assert vary_over([], x) is x


def test_vary_alike_gives_all_leaves_one_set():
    def sets(x, y, r):
        return [varying_axes(leaf) for leaf in jax.tree.leaves(vary_alike(("z",), (x, r), y))]

    assert seen(sets) == [{"x", "y", "z"}] * 3
    assert seen(sets, check_vma=False) == [set()] * 3


def test_the_derivative_of_widening_sums_over_the_added_axes():
    def gradient(x):
        (dx,) = jax.vjp(lambda x: vary_over(["y"], x), x)[1](vary_over(["y"], x))
        return dx

    mapped = jax.shard_map(gradient, mesh=make_mesh("x=2,y=4"), in_specs=P("x"), out_specs=P("x"))
    np.testing.assert_array_equal(jax.jit(mapped)(jnp.arange(4.0)), 4 * np.arange(4.0))
