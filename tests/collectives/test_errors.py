"""Every mistake that can be seen while tracing is named, with what would be right."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import all_gather, all_reduce, make_mesh, reduce_scatter, ring_shift

ALL = (ring_shift, all_gather, reduce_scatter, all_reduce)
ALL_MODES = (
    *("naive", "stationary", "chunked-2", "chunked-4", "chunked-8"),
    *("unidirectional", "bidirectional", "multi-ring", "auto"),
)
MODES = ("naive", "chunked-2", "unidirectional", "bidirectional", "auto")
every_function = pytest.mark.parametrize("function", ALL)
every_mode = pytest.mark.parametrize("mode", MODES)


def trace(function, *shape, **options):
    """Traces `function` of a local array of `shape` on a mesh x=2, y=4."""
    mapped = jax.shard_map(
        function, mesh=make_mesh("x=2,y=4"), in_specs=P(), out_specs=None, **options
    )
    jax.eval_shape(mapped, jax.ShapeDtypeStruct(shape, np.float32))


@every_function
def test_an_unknown_axis_is_told_the_bound_ones(function):
    bound = r"the axes bound here are {'x': 2, 'y': 4}\. Call it inside jax\.shard_map over a mesh"
    with pytest.raises(ValueError, match=f"{function.__name__}: axis 'tp' is not .*{bound}"):
        trace(lambda x: function(x, "tp"), 8)
    with pytest.raises(ValueError, match="axis 'tp' is not bound"):
        trace(lambda x: function(x, ("y", "tp")), 8)


@every_function
def test_only_the_manual_axes_of_a_mesh_are_bound(function):
    wrong = r"'y' is not bound: the axes bound here are {'x': 2}\. Add 'y' to axis_names= of jax"
    with pytest.raises(ValueError, match=wrong):
        trace(lambda x: function(x, ("x", "y")), 8, axis_names={"x"})


@every_function
@pytest.mark.parametrize("around", [lambda f: f, jax.jit])
def test_outside_shard_map(function, around):
    message = f"{function.__name__}: axis 'x' is not bound: no mesh axis is bound here"
    with pytest.raises(ValueError, match=message):
        around(lambda x: function(x, "x"))(jnp.ones(8))


@every_function
@pytest.mark.parametrize(
    ("axes", "error", "message"),
    [
        (
            ("x", "x"),
            ValueError,
            r"axis \('x', 'x'\) must name at least one mesh axis, and each on",
        ),
        ((), ValueError, r"axis \(\) must name at least one mesh axis"),
        (["x", 1], TypeError, r"axis must be a mesh axis name, .*, or an Axis, got \['x', 1\]"),
        ({"x"}, TypeError, r"axis must be a mesh axis name, .*, or an Axis, got {'x'}"),
        (
            None,
            TypeError,
            "axis must be a mesh axis name, a tuple or list of them, or an Axis, got N",
        ),
    ],
)
def test_malformed_axis_names(function, axes, error, message):
    with pytest.raises(error, match=f"{function.__name__}: .*{message}"):
        trace(lambda x: function(x, axes), 8)


@pytest.mark.parametrize("offset", [1.0, np.float32(2), True, np.True_, "1", None])
def test_an_offset_must_be_an_integer(offset):
    kind = type(offset).__name__
    message = f"ring_shift: offset must be an integer known while tracing, got .* of type {kind};"
    with pytest.raises(TypeError, match=message):
        trace(lambda x: ring_shift(x, "x", offset), 8)


def test_a_traced_offset_is_told_what_to_do():
    with pytest.raises(TypeError, match="depends on data, gather and index instead"):
        trace(lambda x: ring_shift(x, "x", x.astype("int32")))
    with pytest.raises(TypeError, match="ring_shift: offset must be an integer known while"):
        jax.jit(lambda n: trace(lambda x: ring_shift(x, "x", n), 8))(1)


@every_function
def test_an_unknown_mode(function):
    if function is ring_shift:
        return
    choices = f"must be one of {', '.join(ALL_MODES)}, got 'both'"
    with pytest.raises(ValueError, match=f"{function.__name__}: mode {choices}"):
        trace(lambda x: function(x, "x", mode="both"), 8)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("shape", "dim", "tiled", "message"),
    [
        ((4, 3), 3, False, r"dim=3 is out of range for a local shape \(4, 3\).*from -3 to 2"),
        ((4, 3), -4, False, r"dim=-4 is out of range .* which has a result of 3 dimensions"),
        ((4, 3), 2, True, r"dim=2 is out of range .* which has 2 dimensions; choose from -2 to 1"),
        ((4, 3), -3, True, "dim=-3 is out of range .* choose from -2 to 1"),
        ((), 1, False, r"dim=1 is out of range for a local shape \(\).* choose from -1 to 0"),
        ((), 0, True, r"dim=0 is out of range for a local shape \(\)"),
    ],
)
def test_gathering_along_a_dimension_that_is_not_there(mode, shape, dim, tiled, message):
    with pytest.raises(ValueError, match=f"all_gather: {message}"):
        trace(lambda x: all_gather(x, "y", dim=dim, tiled=tiled, mode=mode), *shape)


@every_mode
@pytest.mark.parametrize(
    ("shape", "axes", "options", "message"),
    [
        ((4, 3), "y", {"dim": 2}, "dim=2 .* choose from -2 to 1"),
        ((4, 3), "y", {"dim": -3}, "dim=-3 .* choose from -2 to 1"),
        ((), "y", {"tiled": True}, r"dim=0 is out of range for a local shape \(\)"),
        (
            (4, 6),
            "y",
            {"dim": 1, "tiled": True},
            r"x has local shape \(4, 6\), whose dimension 1 axis 'y' \(4\) does not divide: "
            r"6 = 1 x 4 \+ 2; pad it to 8",
        ),
        (
            (20, 1),
            ("y", "x"),
            {"tiled": True},
            r"x has local shape \(20, 1\), whose dimension 0 axis \('y', 'x'\) \(8\) does not "
            r"divide: "
            r"20 = 2 x 8 \+ 4; pad it to 24",
        ),
        (
            (3, 8),
            "y",
            {"dim": -1},
            r"x has local shape \(3, 8\), whose dimension 1 must have the size of axis 'y' \(4\) "
            "with tiled=False, but has 8; pass tiled=True to cut it into blocks",
        ),
        ((3,), "y", {}, r".* must have the size of axis 'y' \(4\) with tiled=False, but has 3"),
    ],
)
def test_scattering_what_cannot_be_cut(mode, shape, axes, options, message):
    with pytest.raises(ValueError, match=f"reduce_scatter: {message}"):
        trace(lambda x: reduce_scatter(x, axes, mode=mode, **options), *shape)
