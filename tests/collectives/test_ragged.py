"""Ragged all-to-alls against NumPy: values, derivatives, batches, and what is refused."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh, ragged_all_to_all
from jaxpar.testing import assert_matches_reference

FEATURES = 2


def plan(n, others, pairs, sizes, seed, overlapping=False):
    """Slices of all devices, int32[n, others, n * pairs] each, and rows that hold them.

    `sizes` is one function of (source, destination) or a largest size to draw from.
    """
    rng = np.random.default_rng(seed)
    count = n * pairs
    send = np.zeros((n, others, n, pairs), np.int32)
    for s, o, d, j in np.ndindex(send.shape):
        send[s, o, d, j] = sizes(s, d) if callable(sizes) else rng.integers(0, sizes + 1)
    recv = send.transpose(2, 1, 0, 3)
    rows, out_rows = (int(x.sum((2, 3)).max()) + 2 for x in (send, recv))

    def placed(sizes, rows):
        """Slices one after another in a random order, with the rows to spare before them."""
        starts = np.zeros((n, others, count), np.int32)
        for s, o in np.ndindex(n, others):
            order, flat = rng.permutation(count), sizes[s, o].reshape(-1)
            starts[s, o, order] = 2 + np.cumsum(flat[order]) - flat[order]
        return starts

    starts = placed(send, rows)
    if overlapping:
        starts = rng.integers(0, rows - send.reshape(starts.shape) + 1, dtype=np.int32)
    arrive = placed(recv, out_rows).reshape(n, others, n, pairs)  # here, by source
    slices = (starts, send, arrive.transpose(2, 1, 0, 3), recv)
    return tuple(x.reshape(n, others, count).copy() for x in slices), rows, out_rows


def exchanged(operand, output, starts, send, places, recv):
    n, others, count = starts.shape
    result = output.copy()
    for s, o, i in np.ndindex(n, others, count):
        start, place, size = starts[s, o, i], places[s, o, i], send[s, o, i]
        result[i // (count // n), o, place : place + size] = operand[s, o, start : start + size]
    return result


def buffers(n, others, rows, out_rows, dtype="float32", seed=0):
    rng = np.random.default_rng(seed)
    shapes = [(n, others, size, FEATURES) for size in (rows, out_rows)]
    return [rng.standard_normal(shape).astype(dtype) for shape in shapes]


def every_device(function):
    return lambda *xs: jax.tree.map(lambda y: y[None, None], function(*(x[0, 0] for x in xs)))


def to_last(s, d):
    """Everything to the last device, which sends nothing itself."""
    return 3 * (d == 3 and s != 3)


CASES = [  # mesh, axes, slices a pair, sizes, overlapping, dtype, check_vma
    ("x=1", "x", 2, 3, False, "float32", True),
    ("x=3", "x", 1, 4, False, "bfloat16", False),
    ("x=4,y=2", "x", 1, to_last, False, "float32", True),
    ("x=2,y=4", ("y", "x"), 2, 2, False, "float32", True),
    ("x=2,y=4", ("x", "y"), 1, 5, True, "float32", False),
    ("x=2,y=2,z=2", ("z", "x"), 3, 2, True, "float32", True),
    ("x=4", "x", 1, 0, False, "float32", True),
]


@pytest.mark.parametrize(("axes", "ring", "pairs", "sizes", "overlapping", "dtype", "vma"), CASES)
def test_values_and_gradients(axes, ring, pairs, sizes, overlapping, dtype, vma):
    size = int(np.prod([int(part[-1]) for part in axes.split(",")]))
    mesh = make_mesh(axes, devices=jax.devices()[:size])
    names = (ring,) if isinstance(ring, str) else ring
    n = int(np.prod([mesh.shape[name] for name in names]))
    others = tuple(name for name in mesh.axis_names if name not in names)
    slices, rows, out_rows = plan(n, size // n, pairs, sizes, len(axes), overlapping)
    assert_matches_reference(
        every_device(lambda *xs: ragged_all_to_all(*xs, ring)),
        exchanged,
        *buffers(n, size // n, rows, out_rows, dtype),
        *slices,
        mesh=mesh,
        in_specs=P(names, others or None),
        out_specs=P(names, others or None),
        check_vma=vma,
    )


@pytest.mark.parametrize("dtype", ["int8", "bool"])
def test_what_has_no_derivative(dtype):
    slices, rows, out_rows = plan(2, 1, 1, 3, seed=0)
    args = [10 * x for x in buffers(2, 1, rows, out_rows)]
    assert_matches_reference(
        every_device(lambda *xs: ragged_all_to_all(*xs, "x")),
        exchanged,
        *((x > 0 if dtype == "bool" else np.abs(x)).astype(dtype) for x in args),
        *(x.astype("int8") for x in slices),
        mesh=make_mesh("x=2", devices=jax.devices()[:2]),
        in_specs=P("x"),
        out_specs=P("x"),
    )


@pytest.mark.parametrize("batched", [(0, 0, None), (None, 0, 0)])
def test_batches(batched):
    """Rows with a batch and slices without, the reverse, and the gradients of both."""
    n, batch = 4, 3
    plans = [plan(n, 1, 2, 2, seed) for seed in range(batch)]
    rows, out_rows = (max(p[i] for p in plans) for i in (1, 2))
    data = [buffers(n, 1, rows, out_rows, seed=seed) for seed in range(batch)]
    members = [np.stack([d[i] for d in data], 2) for i in (0, 1)]
    slices = [np.stack([p[0][i] for p in plans], 2) for i in range(4)]
    axes = (*batched[:2], *[batched[2]] * 4)
    args = [
        x if axis == 0 else x[:, :, 0] for x, axis in zip((*members, *slices), axes, strict=True)
    ]

    def reference(*args):
        one = [
            exchanged(*(x[:, :, i] if a == 0 else x for x, a in zip(args, axes, strict=True)))
            for i in range(batch)
        ]
        return np.stack(one, 2)

    assert_matches_reference(
        every_device(jax.vmap(lambda *xs: ragged_all_to_all(*xs, "x"), in_axes=axes)),
        reference,
        *args,
        mesh=make_mesh("x=4", devices=jax.devices()[:4]),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=batched[0] == 0,
    )


def test_replicated_arguments():
    """One operand and one plan for all devices: each receives the same from every other."""
    sizes = np.array([2, 2], "int32")
    starts = np.array([0, 1], "int32")  # which overlap

    def exchange(x, w):
        places = 2 * jnp.broadcast_to(lax.axis_index("x"), 2)
        return ragged_all_to_all(x * w, jnp.zeros((4, 2)), starts, sizes, places, sizes, "x")

    assert_matches_reference(
        exchange,
        lambda x, w: np.concatenate([(x * w)[[0, 1, 0, 1]], (x * w)[[1, 2, 1, 2]]]),
        *(x[0, 0] for x in buffers(1, 1, 3, 3)),
        mesh=make_mesh("x=2", devices=jax.devices()[:2]),
        in_specs=P(),
        out_specs=P("x"),
    )


@pytest.mark.parametrize("check_vma", [True, False])
def test_second_derivatives(check_vma):
    """The gradient of a cubic is taken inside shard_map, and its own gradient outside."""
    slices, rows, out_rows = plan(4, 1, 1, 2, seed=3, overlapping=True)
    operand, output = buffers(4, 1, rows, out_rows)

    def exchange(operand, output):
        return ragged_all_to_all(operand, output, *slices_here(), "x")

    def slices_here():
        return [jnp.asarray(x)[lax.axis_index("x"), 0] for x in slices]

    def gradients(operand, output):
        out, pull = jax.vjp(lambda *xs: exchange(*xs) ** 3, operand, output)
        return pull(out * 0 + 1)

    def reference(operand, output):
        out = exchanged(operand, output, *slices)
        return transposed(3 * out**2, operand, *slices)

    assert_matches_reference(
        every_device(gradients),
        reference,
        operand,
        output,
        mesh=make_mesh("x=4", devices=jax.devices()[:4]),
        in_specs=P("x"),
        out_specs=P("x"),
        check_vma=check_vma,
    )


def transposed(ct, operand, starts, send, places, recv):
    n, others, count = starts.shape
    d_operand, d_output = np.zeros_like(operand), ct.copy()
    for s, o, i in np.ndindex(n, others, count):
        start, place, size = starts[s, o, i], places[s, o, i], send[s, o, i]
        arrived = ct[i // (count // n), o, place : place + size]
        d_operand[s, o, start : start + size] += arrived
        d_output[i // (count // n), o, place : place + size] = 0
    return d_operand, d_output


def test_rows_between_slices_are_not_read():
    """NaN in rows that no slice holds, and in cotangents of rows that nothing arrived in."""
    slices, rows, out_rows = plan(4, 1, 1, 3, seed=5)
    operand, output = buffers(4, 1, rows, out_rows)
    operand[:, :, :2] = np.nan  # before the first slice

    def run(operand, output, *slices):
        out, pull = jax.vjp(lambda *xs: ragged_all_to_all(*xs, *slices, "x"), operand, output)
        return out, *pull(out.at[:2].set(jnp.nan))

    out, d_operand, d_output = jax.jit(
        jax.shard_map(
            every_device(run),
            mesh=make_mesh("x=4", devices=jax.devices()[:4]),
            in_specs=P("x"),
            out_specs=P("x"),
        )
    )(operand, output, *slices)
    assert np.isfinite(out).all()
    assert np.isfinite(d_operand).all()
    assert np.isfinite(d_output[:, :, 2:]).all()


def test_one_export_for_all_platforms():
    """The native collective for TPU and GPU, none of it for CPU, out of one traced program."""
    x, sizes = jnp.ones((8, 2)), jnp.ones(8, "int32")

    def program(x, sizes):
        return ragged_all_to_all(x, x, sizes, sizes, sizes, sizes, "x")

    mapped = jax.jit(
        jax.shard_map(program, mesh=make_mesh("x=4,y=2"), in_specs=P("x"), out_specs=P("x"))
    )
    unchecked = [jax.export.DisabledSafetyCheck.custom_call("ragged_all_to_all")]
    for platforms, native in ((["tpu"], 1), (["cuda"], 1), (["cpu"], 0), (["cpu", "tpu"], 1)):
        export = jax.export.export(mapped, platforms=platforms, disabled_checks=unchecked)
        text = export(x, sizes.repeat(2)).mlir_module()
        assert text.count("@ragged_all_to_all") == native
        assert ('"stablehlo.all_to_all"' in text) == ("cpu" in platforms)


X, I4 = np.ones((6, 2), "float32"), np.zeros(4, "int32")
ERRORS = [
    (
        (X, X, np.zeros(4, "float32"), I4, I4, I4),
        TypeError,
        "ragged_all_to_all: input_offsets must be integers, got float32[4]; cast them to int32",
    ),
    (
        (X, X, I4, I4[:3], I4, I4),
        ValueError,
        "ragged_all_to_all: send_sizes has local shape (3,), but needs one dimension, whose size "
        "is that of axis 'x' (4) or a multiple of it: 3 = 0 x 4 + 3; give every device the "
        "same number of entries, with size 0 for slices that are not sent",
    ),
    (
        (X, X, I4, I4, I4[None], I4),
        ValueError,
        "ragged_all_to_all: output_offsets has local shape (1, 4), but needs one dimension, whose "
        "size is that of axis 'x' (4) or a multiple of it; give every device the same number "
        "of entries, with size 0 for slices that are not sent",
    ),
    (
        (X, X, I4, I4, I4, I4.repeat(2)),
        ValueError,
        "ragged_all_to_all: recv_sizes has local shape (8,), and input_offsets (4,); all four "
        "describe the same slices, and need one entry for each",
    ),
    (
        (X, X[:, :1], I4, I4, I4, I4),
        ValueError,
        "ragged_all_to_all: operand has local shape (6, 2) and output (6, 1); rows are of shape "
        "(2,) and (1,), but must be alike: reshape one, or make output for the operand's rows",
    ),
    (
        (X, X[0, 0], I4, I4, I4, I4),
        ValueError,
        "ragged_all_to_all: output has local shape (), but needs a dimension 0 of rows; reshape it",
    ),
    (
        (X, X.astype(jnp.bfloat16), I4, I4, I4, I4),
        TypeError,
        "ragged_all_to_all: operand is float32 and output bfloat16; cast one of them",
    ),
]


@pytest.mark.parametrize(("args", "error", "text"), ERRORS)
def test_errors(args, error, text):
    mesh = make_mesh("x=4,y=2")
    with pytest.raises(error) as raised:
        jax.eval_shape(
            jax.shard_map(
                lambda *xs: ragged_all_to_all(*xs, "x"), mesh=mesh, in_specs=P(), out_specs=P("x")
            ),
            *args,
        )
    assert str(raised.value) == text
