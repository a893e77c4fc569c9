"""Each error names the function, what it was given here, the arithmetic, and the remedy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh
from jax.sharding import PartitionSpec as P

from jaxpar.matmul import (
    all_gather_matmul,
    collective_einsum,
    matmul_all_reduce,
    matmul_reduce_scatter,
)

FUNCTIONS = (all_gather_matmul, matmul_reduce_scatter, matmul_all_reduce)
named = pytest.mark.parametrize("fn", FUNCTIONS, ids=lambda fn: fn.__name__)


def error(kind, fn, *args, **options):
    """What `fn` says of local arrays, on a mesh of 2 x 4, after its own name."""
    grid = np.array(jax.devices()).reshape(2, 4)
    mesh = Mesh(grid, ("d", "t"), axis_types=(AxisType.Auto,) * 2)

    def body():
        fn(*args, **options)
        return jnp.zeros(8)

    with pytest.raises(kind) as caught:
        jax.eval_shape(jax.shard_map(body, mesh=mesh, in_specs=(), out_specs=P(("d", "t"))))
    name, _, text = str(caught.value).partition(": ")
    assert name == ("collective_einsum" if fn not in FUNCTIONS else fn.__name__)
    assert type(caught.value) is kind
    return text


def f32(*shape):
    return jnp.zeros(shape, jnp.float32)


def einsum(subscripts, **options):
    return lambda x, w: collective_einsum(subscripts, x, w, "t", **options)


# -- every named form ---------------------------------------------------------------------------


@named
def test_lhs_without_dimensions(fn):
    assert error(ValueError, fn, f32(), f32(2, 3), "t") == (
        "lhs must be [..., k], got a local array without dimensions"
    )


@named
@pytest.mark.parametrize("shape", [(2,), (2, 3, 1)])
def test_rank_of_rhs(fn, shape):
    assert error(ValueError, fn, f32(4, 2), f32(*shape), "t") == (
        f"rhs must be [k, n], got local shape {shape} with {len(shape)} dimensions; reshape it, "
        "or use collective_einsum"
    )


@named
def test_contracted_sizes_that_differ(fn):
    assert error(ValueError, fn, f32(4, 2), f32(3, 5), "t") == (
        "lhs has local shape (4, 2) and rhs (3, 5), but label 'k' of 'ak,kn->an' is dimension 1 "
        "of lhs, 2, and dimension 0 of rhs, 3; they must be equal; if one is a shard "
        "over axis 't' (4), gather that operand along it"
    )


@named
def test_dtypes_that_differ(fn):
    assert error(TypeError, fn, f32(4, 2), jnp.zeros((2, 5), "bfloat16"), "t") == (
        "lhs is float32[4, 2] and rhs is bfloat16[2, 5]; cast one of them with .astype, and "
        "choose the dtype of the result with preferred_element_type"
    )


@named
def test_unknown_mode(fn):
    assert error(ValueError, fn, f32(4, 2), f32(2, 8), "t", mode="ring") == (
        "mode must be one of naive, stationary, chunked-2, chunked-4, chunked-8, "
        "unidirectional, bidirectional, multi-ring, auto, got 'ring'"
    )


@named
def test_unknown_axis(fn):
    assert error(ValueError, fn, f32(4, 2), f32(2, 8), "tp") == (
        "axis 'tp' is not bound: the axes bound here are {'d': 2, 't': 4}. Call it inside "
        "jax.shard_map over a mesh with an axis 'tp'"
    )


@named
@pytest.mark.parametrize("axes", [(), ("t", "t")])
def test_axes_named_never_or_twice(fn, axes):
    assert error(ValueError, fn, f32(4, 2), f32(2, 8), axes) == (
        f"axis {axes!r} must name at least one mesh axis, and each once"
    )


@named
def test_axis_of_another_type(fn):
    assert error(TypeError, fn, f32(4, 2), f32(2, 8), {"t"}) == (
        "axis must be a mesh axis name, a tuple or list of them, or an Axis, got {'t'}"
    )


@pytest.mark.parametrize("wrap", [lambda fn: fn, jax.jit], ids=["eager", "jit"])
@pytest.mark.parametrize("fn", [*FUNCTIONS, einsum("mk,kn->mn", gather="m")])
def test_outside_shard_map(fn, wrap):
    name, args = (fn.__name__, ("t",)) if fn in FUNCTIONS else ("collective_einsum", ())
    with pytest.raises(ValueError, match="is not bound") as caught:
        wrap(lambda x, w: fn(x, w, *args))(f32(4, 2), f32(2, 8))
    assert str(caught.value) == (
        f"{name}: axis 't' is not bound: no mesh axis is bound here. Call it inside "
        "jax.shard_map over a mesh with an axis 't'"
    )


# -- gathers ------------------------------------------------------------------------------------


def test_gather_of_neither_operand():
    assert error(ValueError, all_gather_matmul, f32(4, 2), f32(2, 5), "t", gather="out") == (
        "gather must be 'lhs' or 'rhs', got 'out'"
    )


@pytest.mark.parametrize(
    ("options", "shape", "allowed"),
    [
        ({"dim": 2}, (4, 2), "-2 to 1"),
        ({"dim": -3}, (4, 2), "-2 to 1"),
        ({"dim": 2, "gather": "rhs"}, (2, 5), "-2 to 1"),
    ],
)
def test_gather_along_a_dimension_that_is_not_there(options, shape, allowed):
    assert error(ValueError, all_gather_matmul, f32(4, 2), f32(2, 5), "t", **options) == (
        f"dim={options['dim']} is out of range for a local shape {shape}, which has 2 "
        f"dimensions; choose from {allowed}"
    )


def test_tuple_of_gathered_weights():
    weights = f32(2, 5), f32(2, 5)
    assert error(ValueError, all_gather_matmul, f32(4, 8), weights, "t", gather="rhs") == (
        "a tuple of weights as rhs shares one gather of lhs, but gather='rhs' gathers each "
        "weight; call once for each weight"
    )


def test_no_weights_at_all():
    text = "rhs is an empty tuple; give at least one weight"
    assert error(ValueError, all_gather_matmul, f32(4, 8), (), "t") == text
    assert error(ValueError, einsum("mk,kn->mn", gather="m"), f32(4, 8), ()) == text


@pytest.mark.parametrize(
    ("axes", "options", "lhs", "rhs"),
    [
        ("t", {"dim": 1}, "2 x 4 = 8 when gathered over axis 't' (4)", "2"),
        ("t", {"gather": "rhs"}, "2", "2 x 4 = 8 when gathered over axis 't' (4)"),
        (("t", "d"), {"gather": "rhs"}, "2", "2 x 8 = 16 when gathered over axis ('t', 'd') (8)"),
    ],
)
def test_gathered_size_that_differs(axes, options, lhs, rhs):
    operand = options.get("gather", "lhs")
    size = 4 if axes == "t" else 8
    assert error(ValueError, all_gather_matmul, f32(4, 2), f32(2, 5), axes, **options) == (
        f"lhs has local shape (4, 2) and rhs (2, 5), but label 'k' of 'ak,kn->an' is dimension 1 "
        f"of lhs, {lhs}, and dimension 0 of rhs, {rhs}; {operand} must be 1/{size} of the other "
        "along it"
    )


# -- scatters -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("axes", "dim", "counted", "size", "sum_", "padded"),
    [
        ("t", 1, 1, 4, "5 = 1 x 4 + 1", 8),
        ("t", -1, 1, 4, "5 = 1 x 4 + 1", 8),
        (("t", "d"), 0, 0, 8, "4 = 0 x 8 + 4", 8),
    ],
)
@pytest.mark.parametrize("mode", ["naive", "bidirectional"])
def test_scattered_size_that_does_not_divide(axes, dim, counted, size, sum_, padded, mode):
    found = error(ValueError, matmul_reduce_scatter, f32(4, 2), f32(2, 5), axes, dim=dim, mode=mode)
    assert found == (
        f"the result has local shape (4, 5), whose dimension {counted} axis {axes!r} ({size}) does "
        f"not divide: {sum_}; pad it to {padded}, or choose another dimension"
    )


@pytest.mark.parametrize("dim", [2, -3])
def test_scatter_along_a_dimension_that_is_not_there(dim):
    assert error(ValueError, matmul_reduce_scatter, f32(4, 2), f32(2, 5), "t", dim=dim) == (
        f"dim={dim} is out of range for a local shape (4, 5), which has 2 dimensions; choose "
        "from -2 to 1"
    )


# -- collective_einsum ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    "subscripts",
    ["", "mk,kn", "mk->mk", "mk,kn,nj->mj", "...k,kn->...n", "m1,1n->mn"],
)
def test_subscripts_that_spell_no_product_of_two(subscripts):
    assert error(ValueError, einsum(subscripts, gather="m"), f32(4, 2), f32(2, 5)) == (
        f"subscripts {subscripts!r} must spell two operands and the result with one letter a "
        "dimension, as in 'bmk,kn->bmn'; write out an ellipsis"
    )


@pytest.mark.parametrize(
    ("subscripts", "letter", "where"),
    [("mmk,kn->mn", "m", "lhs"), ("mk,kkn->mn", "k", "rhs"), ("mk,kn->mnn", "n", "the result")],
)
def test_subscripts_that_repeat(subscripts, letter, where):
    assert error(ValueError, einsum(subscripts, gather="m"), f32(4, 2), f32(2, 5)) == (
        f"subscripts {subscripts!r} repeat {letter!r} in {where}; take the diagonal before the call"
    )


@pytest.mark.parametrize(
    ("subscripts", "letter"), [("mk,kn->m", "n"), ("mka,kn->mn", "a"), ("mk,kn->mnz", "z")]
)
def test_subscripts_with_a_label_alone(subscripts, letter):
    assert error(ValueError, einsum(subscripts, gather="m"), f32(4, 2), f32(2, 5)) == (
        f"subscripts {subscripts!r} have {letter!r} only once, but each label must be in two of "
        "lhs, rhs and the result; sum over it before the call, or broadcast after it"
    )


@pytest.mark.parametrize(("gather", "scatter"), [(None, None), ("m", "n")])
def test_both_or_neither_of_gather_and_scatter(gather, scatter):
    call = einsum("mk,kn->mn", gather=gather, scatter=scatter)
    assert error(ValueError, call, f32(4, 2), f32(2, 5)) == (
        "give exactly one of gather= and scatter=, a label of 'mk,kn->mn'; got "
        f"gather={gather!r} and scatter={scatter!r}"
    )


@pytest.mark.parametrize("label", ["z", "mk", ""])
def test_gathered_label_that_is_not_there(label):
    assert error(ValueError, einsum("mk,kn->mn", gather=label), f32(4, 2), f32(2, 5)) == (
        f"gather={label!r} is not a label of an operand of 'mk,kn->mn'; choose one of "
        "['k', 'm', 'n']"
    )


@pytest.mark.parametrize("label", ["k", "mn", ""])
def test_scattered_label_that_is_not_there(label):
    assert error(ValueError, einsum("mk,kn->mn", scatter=label), f32(4, 2), f32(2, 5)) == (
        f"scatter={label!r} is not a label of the result of 'mk,kn->mn'; choose one of ['m', 'n']"
    )


def test_scattered_label_that_does_not_divide():
    assert error(ValueError, einsum("mk,kn->nm", scatter="n"), f32(4, 2), f32(2, 5)) == (
        "the result has local shape (5, 4), whose dimension 0 axis 't' (4) does not divide: "
        "5 = 1 x 4 + 1; pad it to 8, or choose another dimension"
    )


@pytest.mark.parametrize("options", [{"gather": "b"}, {"gather": "m"}, {"scatter": "b"}])
def test_ranks_that_are_not_those_of_the_labels(options):
    assert error(ValueError, einsum("bmk,bkn->bmn", **options), f32(4, 2), f32(2, 5, 5)) == (
        "lhs has local shape (4, 2), 2 dimensions, but must have a "
        "dimension for each of 3 labels of 'bmk,bkn->bmn'"
    )


def test_gathered_label_whose_sizes_do_not_fit():
    assert error(ValueError, einsum("mk,kn->mn", gather="k"), f32(4, 3), f32(2, 5)) == (
        "lhs has local shape (4, 3) and rhs (2, 5), but label 'k' of 'mk,kn->mn' is dimension 1 "
        "of lhs, 3, and dimension 0 of rhs, 2 x 4 = 8 when gathered over axis 't' (4); rhs must be "
        "1/4 of the other along it"
    )


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"scatter": "m"}, "scatter='m' gathers nothing"),
        ({"gather": "n"}, "gather='n' gathers rhs"),
    ],
)
def test_tuple_without_a_gather_of_lhs(options, why):
    weights = f32(2, 5), f32(2, 5)
    assert error(ValueError, einsum("mk,kn->mn", **options), f32(4, 2), weights) == (
        f"a tuple of weights as rhs shares one gather of lhs, but {why}; call once for each weight"
    )


@named
@pytest.mark.parametrize("mode", ["naive", "unidirectional", "bidirectional", "auto"])
def test_bools_have_no_sums_in_any_mode(fn, mode):
    x, w = jnp.zeros((4, 2), bool), jnp.zeros((2, 8), bool)
    assert error(TypeError, fn, x, w, "t", mode=mode) == (
        "lhs and rhs are bool[4, 2] and bool[2, 8], which have no sums; cast them to int8 to "
        "count, with .astype"
    )


@named
def test_complex_sums_need_a_complex_wire_and_result(fn):
    x, w = jnp.zeros((4, 2), jnp.complex64), jnp.zeros((2, 8), jnp.complex64)
    assert error(TypeError, fn, x, w, "t", wire_dtype="float32") == (
        "wire_dtype=float32 cannot carry sums of complex64; choose a complex dtype, or None"
    )
    assert error(TypeError, fn, x, w, "t", preferred_element_type="float32") == (
        "preferred_element_type=float32 cannot hold products of complex64 operands; choose a "
        "complex dtype, or None"
    )


@named
def test_bools_and_unsigned_integers_hold_no_signed_sums(fn):
    x, w = jnp.zeros((4, 2), jnp.int8), jnp.zeros((2, 8), jnp.int8)
    assert error(TypeError, fn, x, w, "t", wire_dtype=bool) == (
        "wire_dtype=bool cannot carry sums of int32; choose an integer dtype, or None"
    )
    for dtype in ("uint8", "bool"):
        assert error(TypeError, fn, x, w, "t", preferred_element_type=dtype) == (
            f"preferred_element_type={dtype} cannot hold products of int8 operands; choose a "
            "signed dtype, or None"
        )


@named
def test_sums_need_the_width_of_their_operands(fn):
    x, w = jnp.zeros((4, 2), jnp.int32), jnp.zeros((2, 8), jnp.int32)
    assert error(TypeError, fn, x, w, "t", preferred_element_type="int16") == (
        "preferred_element_type=int16 cannot hold products of int32 operands; choose a wider "
        "dtype, or None"
    )
