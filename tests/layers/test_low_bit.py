"""Layers whose weights and activations travel in 8 bits."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from eight_bits import gathered, rounded, travelling, with_gradients, without_ties
from jax import lax
from jax.sharding import PartitionSpec as P

from jaxpar import (
    Axis,
    LowBit,
    Quantized,
    all_gather,
    all_reduce,
    make_mesh,
    quantize,
    reduce_scatter,
)
from jaxpar.layers import (
    column_parallel_linear,
    fsdp_gather,
    fsdp_linear,
    fsdp_scan,
    global_norm,
    row_parallel_linear,
)

RNG = np.random.default_rng(0)
LONG = 512  # [512, 256] of float32 are more than 256 KiB, which travel in 8 bits


def normal(*shape):
    return RNG.standard_normal(shape).astype("float32")


def weight(*shape, dim):
    """Of a whole, gathered along a dimension."""
    return without_ties(normal(*shape), dim=-1 if dim == 0 else -2) / np.float32(16)


def assert_close(found, wanted, digits=1e-5):
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(x, y, rtol=digits, atol=digits * np.abs(y).max())


@pytest.mark.parametrize(
    ("mesh", "axes", "mode", "check_vma"),
    [
        ("f=4", "f", "naive", True),
        ("f=4", "f", "bidirectional", False),
        ("a=2,b=2", ("b", "a"), "unidirectional", True),
    ],
)
def test_large_leaves_travel_in_8_bits_and_small_ones_as_they_are(mesh, axes, mode, check_vma):
    """And the gradients of both are those of the sums, as if nothing was rounded."""
    large = {"w": weight(LONG, 256, dim=0), "v": weight(256, LONG, dim=1)}
    small = {"u": normal(64, 64), "b": normal(64)}
    dims = {"w": 0, "v": 1, "u": 0, "b": 0}
    specs = {name: P(axes) if dim == 0 else P(None, axes) for name, dim in dims.items()}
    axis = Axis(axes, mode=mode, wire_dtype="int8")
    mapped = jax.shard_map(
        lambda tree: jax.tree.map(lambda x: x[None], fsdp_gather(tree, axis, dim=dims)),
        mesh=make_mesh(mesh, devices=jax.devices()[:4]),
        in_specs=(specs,),
        out_specs=P(axes),
        check_vma=check_vma,
    )
    tree = large | small
    there = {name: gathered(x, dims[name]) for name, x in large.items()} | small
    ct = {name: normal(4, *x.shape) for name, x in tree.items()}
    found, (gradients,) = with_gradients(mapped)(ct, tree)
    assert_close(found, {name: np.stack([x] * 4) for name, x in there.items()})
    assert_close(gradients, {name: x.sum(0) for name, x in ct.items()})
    sent = travelling(mapped, tree)
    name = "all_gather" if mode == "naive" else "ppermute"
    assert sent[name, "int8"]
    assert sent["all_gather", "float32"] >= 2  # scales, of both groups of large leaves


@pytest.mark.parametrize(
    ("mesh", "axes", "mode"),
    [("f=4", "f", "bidirectional"), ("a=2,b=2", ("b", "a"), "naive")],
)
def test_a_scan_over_layers(mesh, axes, mode):
    """Each layer's weights are rounded alike, forward and in the backward pass."""
    stack = {"w": np.stack([weight(LONG, 256, dim=0) for _ in range(2)]), "b": normal(2, 256)}
    stack["v"] = np.stack([weight(256, LONG, dim=1) for _ in range(2)])
    there = {"w": rounded(stack["w"]), "b": stack["b"], "v": rounded(stack["v"], dim=1)}
    x, dims = normal(16, LONG), {"w": 0, "b": 0, "v": 1}

    def layer(w, x):
        return jnp.sin(jnp.sin(x @ w["w"] + w["b"]) @ w["v"])

    axis = Axis(axes, mode=mode, wire_dtype="int8")
    specs = {"w": P(None, axes), "b": P(None, axes), "v": P(None, None, axes)}
    mapped = jax.shard_map(
        lambda stack, x: fsdp_scan(layer, stack, x, axis, dim=dims),
        mesh=make_mesh(mesh, devices=jax.devices()[:4]),
        in_specs=(specs, P(axes)),
        out_specs=P(axes),
    )

    def plain(stack, x):
        return lax.scan(lambda x, w: (layer(w, x), None), x, stack)[0]

    ct = normal(16, LONG)
    there = {name: x.astype("float32") for name, x in there.items()}
    found = with_gradients(mapped)(ct, stack, x)
    assert_close(found, with_gradients(plain)(ct, there, x), 1e-4)
    assert "int8" in {dtype for _, dtype in travelling(mapped, stack, x)}


@pytest.mark.parametrize("mode", ["naive", "bidirectional"])
def test_a_weight_that_arrives_while_it_multiplies(mode):
    x, w, ct = normal(8, 64), weight(64, 48, dim=0), normal(8, 48)
    there = gathered(w, 0)
    mapped = jax.shard_map(
        lambda x, w: fsdp_linear(x, w, Axis("f", mode=mode, wire_dtype="int8")),
        mesh=make_mesh("f=8"),
        in_specs=(P("f"), P("f")),
        out_specs=P("f"),
    )
    assert_close(with_gradients(mapped)(ct, x, w), (x @ there, (ct @ there.T, x.T @ ct)))


# -- weights that come quantized ----------------------------------------------------------------


@pytest.mark.parametrize("mode", ["naive", "bidirectional"])
@pytest.mark.parametrize("wire", [None, "int8"])
def test_quantized_leaves_stay_so(mode, wire):
    """Their scales are never rounded, however many there are."""
    q = quantize(jnp.asarray(normal(LONG, 256)), columns=1)
    axis = Axis("f", mode=mode, wire_dtype=wire)
    spec = Quantized(P("f"), P("f"), dtype="float32")

    def same(fn):
        mapped = jax.shard_map(
            lambda tree: jax.tree.map(lambda x: x[None], fn(tree)),
            mesh=make_mesh("f=8"),
            in_specs=({"q": spec},),
            out_specs=P("f"),
        )
        found = jax.jit(mapped)({"q": q})["q"]
        assert (found.dtype, found.values.dtype) == ("float32", "int8")
        for x, y in ((found.values, q.values), (found.scales, q.scales)):
            np.testing.assert_array_equal(x, np.stack([y] * 8))

    same(lambda tree: fsdp_gather(tree, axis))
    same(lambda tree: all_gather(tree, axis, tiled=True))


def test_a_scan_over_quantized_layers():
    stack = quantize(jnp.asarray(normal(2, 64, 64)) / 8)
    x, ct = normal(8, 64), normal(8, 64)
    spec = Quantized(P(None, "f"), P(None, "f"), dtype="float32")
    mapped = jax.shard_map(
        lambda stack, x: fsdp_scan(lambda w, x: jnp.sin(x @ w.dequantized()), stack, x, "f"),
        mesh=make_mesh("f=8"),
        in_specs=(spec, P("f")),
        out_specs=P("f"),
    )

    def plain(x):
        for w in stack.dequantized():
            x = jnp.sin(x @ w)
        return x

    wanted = with_gradients(plain)(ct, x)
    assert_close(with_gradients(lambda x: mapped(stack, x))(ct, x), wanted, 1e-4)


# -- layers over an axis ------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["naive", "bidirectional"])
def test_columns_and_rows(mode):
    x, up, down = without_ties(normal(16, 64)), normal(64, 64) / 8, normal(64, 40) / 8
    axis = Axis("tp", mode=mode, wire_dtype=LowBit("int8", cotangents=False))

    def local(x, up, down):
        hidden = jnp.sin(column_parallel_linear(x, up, axis))
        return row_parallel_linear(hidden, down, axis)

    mapped = jax.shard_map(
        local,
        mesh=make_mesh("tp=8"),
        in_specs=(P("tp"), P(None, "tp"), P("tp")),
        out_specs=P("tp"),
    )
    there = rounded(x).astype("float32")

    def plain(x, up, down):
        return jnp.sin((x + lax.stop_gradient(there - x)) @ up) @ down

    ct = normal(16, 40)
    args = x, up, down
    assert_close(with_gradients(mapped)(ct, *args), with_gradients(plain)(ct, *args), 1e-4)
    assert "int8" in {dtype for _, dtype in travelling(mapped, *args)}


# -- where nothing is gathered ------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "name", "argument"),
    [
        (
            lambda q: reduce_scatter({"g": q}, "tp", tiled=True),
            "reduce_scatter",
            r"x\['g'\]",
        ),
        (lambda q: all_reduce([q], "tp"), "all_reduce", r"x\[0\]"),
        (lambda q: global_norm({"w": q}, specs=P("tp")), "global_norm", r"tree\['w'\]"),
    ],
)
def test_no_quantized_array(function, name, argument):
    mapped = jax.shard_map(
        function,
        mesh=make_mesh("tp=8"),
        in_specs=(Quantized(P("tp"), P("tp")),),
        out_specs=P("tp"),
        check_vma=False,
    )
    q = Quantized(np.ones((64, 64), "int8"), np.ones((64, 1), "float32"))
    text = (
        rf"^{name}: {argument} is Quantized\[8, 64\], which only an operand that is gathered may be"
    )
    with pytest.raises(TypeError, match=text):
        jax.eval_shape(mapped, q)


@pytest.mark.parametrize("check_vma", [True, False])
def test_an_all_reduce_is_as_without(check_vma):
    def summing(wire):
        def local(x):
            y = all_reduce(x, "tp", mode="bidirectional", wire_dtype=wire)
            return lax.pcast(y, "tp", to="varying") if check_vma else y

        return jax.shard_map(
            local, mesh=make_mesh("tp=8"), in_specs=P("tp"), out_specs=P("tp"), check_vma=check_vma
        )

    x = normal(64, 40)
    np.testing.assert_array_equal(*(jax.jit(summing(wire))(x) for wire in (None, "int8")))
    assert travelling(summing(None), x) == travelling(summing("int8"), x)
