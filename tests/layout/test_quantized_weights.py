"""The parts of a `Quantized` are one array: its scales lie as its values do, everywhere."""

import ast
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import (
    Axis,
    Quantized,
    all_gather,
    all_gather_matmul,
    collective_einsum,
    layers,
    make_mesh,
    quantize,
)
from jaxpar.layout import (
    Interleaved,
    LayoutError,
    LayoutMap,
    Padded,
    Split,
    data_parallel,
    expert_parallel,
    fully_sharded,
    tensor_parallel,
)
from jaxpar.testing import count_collectives

MESHES = {
    "fsdp=8": "fsdp",
    "fsdp=4,tp=2": ("fsdp", "tp"),
    "fsdp=3": "fsdp",
}


def mesh_of(text):
    count = int(np.prod([int(size) for size in re.findall(r"\d+", text)]))
    return make_mesh(text, devices=jax.devices()[:count])


def weight(shape, scales, block=None, dtype="int8"):
    rng = np.random.default_rng(sum(shape) + len(scales))
    values = rng.integers(-100, 100, shape) if dtype == "int8" else rng.normal(size=shape)
    return Quantized(
        jnp.asarray(values.astype(jnp.dtype(dtype))),
        jnp.asarray(rng.uniform(1, 2, scales), "float32"),
        dtype="float32",
        block=block,
    )


def read(w, blocks):
    """Values times scales in NumPy, for the block along each dimension."""
    scales = np.asarray(w.scales)
    for dim, (size, block) in enumerate(zip(w.shape, blocks, strict=True)):
        entries = np.arange(size) // block if scales.shape[dim] > 1 else np.zeros(size, int)
        scales = np.take(scales, entries, axis=dim)
    return np.asarray(w.values).astype("float32") * scales


# Shapes of values and scales, the `block` that is told, and the block along each dimension.
WEIGHTS = {
    "of all": ((48, 96), (1, 1), None, (48, 96)),
    "of a row": ((48, 96), (48, 1), None, (1, 96)),
    "of a column": ((48, 96), (1, 96), None, (48, 1)),
    "of each": ((48, 96), (48, 96), None, (1, 1)),
    "fewer than devices": ((96, 72), (3, 1), None, (32, 72)),
    "blocks of 16": ((48, 192), (48, 12), None, (1, 16)),
    "squares of 64": ((256, 192), (4, 3), None, (64, 64)),
    "a part of 128": ((312, 144), (3, 2), 128, (128, 128)),
    "a part of 128, as shapes tell": ((576, 24), (5, 1), None, (128, 24)),
    "two blocks of 96": ((192, 24), (2, 1), 96, (96, 24)),
    "96, or 128 and 64": ((192, 192), (2, 2), (96, 128), (96, 128)),
}
KINDS = [(of, ("int8", "float8_e4m3fn")[number % 2]) for number, of in enumerate(WEIGHTS)]
# All over eight devices; and in turn over two axes, and over three devices.
PARTS = [
    (of, dtype, mesh)
    for number, (of, dtype) in enumerate(KINDS)
    for mesh in ("fsdp=8", ("fsdp=4,tp=2", "fsdp=3")[number // 2 % 2])
]


def as_rows_of(layout, array):
    return array[tuple(slice(0, size) for size in layout["w/values"].shape)]


@pytest.mark.parametrize(("of", "dtype", "text"), PARTS)
def test_each_device_reads_its_own_part(of, dtype, text):
    """Under jit, in shard_map, and gathered, along every dimension, with padding where needed."""
    shape, scales, block, blocks = WEIGHTS[of]
    mesh, axis = mesh_of(text), MESHES[text]
    w = weight(shape, scales, block, dtype)
    wanted = read(w, blocks)
    np.testing.assert_array_equal(w.dequantized(), wanted)
    for dim in (0, 1):
        entry = Padded(axis) if shape[dim] % mesh.size else axis
        layout = LayoutMap({"w/.*": (None,) * dim + (entry,)}).layout({"w": w}, mesh)
        placed = layout.place({"w": w})["w"]
        spec = layout["w/values"].spec

        def gathered(w, dim=dim):
            whole = layers.fsdp_gather(w, axis, dim=dim)
            return w.dequantized(), whole.dequantized()[None]

        mapped = jax.shard_map(
            gathered,
            mesh=mesh,
            in_specs=(layout.specs["w"],),
            out_specs=(spec, P(axis)),
            check_vma=bool(dim),
        )
        found = jax.jit(lambda w: (w.dequantized(), *mapped(w)))(placed)  # noqa: B023
        for x in (*found[:2], *found[2]):
            np.testing.assert_array_equal(as_rows_of(layout, np.asarray(x)), wanted)
        back = [layout.gather({"w": placed}), layout.unpad({"w": placed})]
        for tree in back:
            jax.tree.map(np.testing.assert_array_equal, tree, {"w": w})


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("axis", ["fsdp", ("fsdp", "tp")])
@pytest.mark.parametrize("scales", [(3, 1, 48), (3, 64, 1), (1, 1, 1), (3, 4, 3), (1, 64, 48)])
def test_a_frozen_base_in_a_scan(scales, axis, check_vma):
    mesh = make_mesh("fsdp=4,tp=2")
    base = weight((3, 64, 48), scales)
    down = weight((3, 48, 64), (scales[0], scales[2], scales[1]))
    params = {"up": base, "down": down}
    x = jnp.asarray(np.random.default_rng(1).normal(size=(8, 64)) / 8, "float32")
    sizes = tuple(size // count for size, count in zip((3, 64, 48), scales, strict=True))
    up, down = (read(q, of) for q, of in ((base, sizes), (down, (1, sizes[2], sizes[1]))))

    def layer(w, x):
        return jnp.tanh(x @ (w["up"].dequantized() / 1e3)) @ (w["down"].dequantized() / 1e3)

    wanted = np.asarray(x, "float64")
    for first, second in zip(up.astype("float64"), down.astype("float64"), strict=True):
        wanted = np.tanh(wanted @ (first / 1e3)) @ (second / 1e3)
    rules = fully_sharded(params, mesh, axis=axis, stacked=".*")
    layout = rules.layout(params, mesh, strict=axis != "fsdp")
    mapped = jax.shard_map(
        lambda w, x: layers.fsdp_scan(layer, w, x, axis, dim=layout.fsdp_dims(axis, stacked=1)),
        mesh=mesh,
        in_specs=(layout.specs, P(axis)),
        out_specs=P(axis),
        check_vma=check_vma,
    )
    found = jax.jit(mapped)(layout.place(params), x)
    np.testing.assert_allclose(found, wanted, rtol=2e-4, atol=2e-5)


def test_strategies_give_parts_alike():
    mesh = make_mesh("fsdp=8")
    params = {
        "rows": quantize(jnp.ones((64, 512))),
        "columns": weight((512, 128), (1, 128)),
        "few": weight((512, 128), (4, 1)),
        "squares": weight((512, 256), (4, 2)),
        "plain": jnp.ones((16, 8)),
    }
    layout = fully_sharded(params, mesh).layout(params, mesh)
    specs = {path: tuple(array.spec) for path, array in layout.items()}
    assert specs == {
        "rows/values": (None, "fsdp"),  # as one scale serves a row
        "rows/scales": (),
        "columns/values": ("fsdp",),
        "columns/scales": (),
        "few/values": (None, "fsdp"),  # 8 devices do not divide 4 blocks
        "few/scales": (),
        "squares/values": ("fsdp",),
        "squares/scales": ("fsdp",),  # each of 4 twice, so that each device has its own
        "plain": ("fsdp",),
    }
    assert layout["squares/scales"].padded_shape == (8, 2)
    experts = {"experts": {"up": weight((8, 64, 96), (8, 1, 96)), "all": weight((8, 4), (1, 1))}}
    laid = expert_parallel(experts, make_mesh("ep=8")).layout(experts, make_mesh("ep=8"))
    assert laid["experts/up/scales"].spec == laid["experts/up/values"].spec == P("ep")
    assert laid["experts/all/scales"].spec == P()
    both = make_mesh("dp=2,tp=4")
    mlp = {"up_proj": weight((256, 1024), (2, 8)), "down_proj": weight((1024, 256), (8, 2))}
    rules = tensor_parallel(mlp, both, within=data_parallel(mlp, both), columns="up.*", rows="do.*")
    for path, spec in (("up_proj", P(None, "tp")), ("down_proj", P("tp"))):
        assert {rules.match(f"{path}/{part}") for part in ("values", "scales")} == {spec}


# -- refusals, with their edits applied ---------------------------------------------------------


def test_a_rule_of_scales_that_differs():
    mesh, w = make_mesh("tp=8"), weight((512, 128), (4, 1))
    rules = LayoutMap({".*/values": ("tp",), ".*/scales": P()})
    with pytest.raises(LayoutError) as error:
        rules.layout({"down": w}, mesh)
    text = (
        f"'down/scales' float32[4,1]: rule '.*/scales' is {P()}, and the scales of a `Quantized` "
        f"are laid out as 'down/values' is, by '.*/values': here {P('tp')}; leave the rule out"
    )
    assert text in str(error.value)
    edit = re.search(r"or add (.*)$", error.value.problems[0].remedy)[1]
    edited = rules | ast.literal_eval(f"{{{edit}}}")
    placed = edited.layout({"down": w}, mesh).place({"down": w})["down"]
    np.testing.assert_array_equal(placed.dequantized(), read(w, (128, 128)))
    # Without the rule, it is the same.
    rules.pop(".*/scales")
    assert rules.layout({"down": w}, mesh)["down/scales"].spec == P("tp")


def test_scales_of_refused_values():
    """Only the values have a problem, and its edit is for them alone."""
    mesh, w = mesh_of("ep=3"), weight((8, 200, 48), (8, 2, 1), 128)
    params = {"experts": {"up": w}}
    rules = expert_parallel(params, mesh)
    with pytest.raises(LayoutError, match=r"8 = 2 x 3 \+ 2; pad it to 9") as error:
        rules.layout(params, mesh)
    assert [problem.path for problem in error.value.problems] == ["experts/up/values"]
    edit = re.search(r"pad it to 9, (Padded\('ep'\)),", error.value.problems[0].remedy)[1]
    rules |= {"experts/up/values": (eval(edit, {"Padded": Padded}),)}
    placed = rules.layout(params, mesh).place(params)["experts"]["up"]
    np.testing.assert_array_equal(placed.dequantized()[:8], read(w, (1, 128, 48)))


@pytest.mark.parametrize("entry", ["tp", Padded("tp"), ("tp",)])
def test_a_rule_of_scales_that_agrees(entry):
    """Whether it pads follows from the values."""
    mesh, w = make_mesh("tp=8"), weight((512, 128), (4, 1))
    rules = LayoutMap({"down/values": ("tp",), "down/scales": (entry, None)})
    placed = rules.layout({"down": w}, mesh).place({"down": w})["down"]
    assert placed.scales.ravel().tolist() == np.repeat(w.scales, 2).tolist()
    np.testing.assert_array_equal(placed.dequantized(), read(w, (128, 128)))


def test_a_dimension_that_devices_do_not_divide():
    """The edit pads values; scales stay with them."""
    mesh, w = make_mesh("fsdp=8"), weight((129, 65), (129, 1))
    params = {"w": w}
    with pytest.raises(LayoutError) as error:
        fully_sharded(params, mesh)
    assert [problem.path for problem in error.value.problems] == ["w/values"]
    edit = re.search(r"in `within`, (.*)$", error.value.problems[0].remedy)[1]
    names = {"data_parallel": data_parallel, "params": params, "mesh": mesh, "Padded": Padded}
    layout = fully_sharded(params, mesh, within=eval(edit, names)).layout(params, mesh)
    placed = layout.place(params)["w"]
    assert placed.shape == (136, 65)
    np.testing.assert_array_equal(placed.dequantized()[:129], read(w, (1, 65)))
    np.testing.assert_array_equal(placed.dequantized()[129:], 0)


@pytest.mark.parametrize(
    "names", ["w/values w/scales", "w.weight w.weight_scale", "w/qvalue w/scale"]
)
@pytest.mark.parametrize("scales", [(4, 1), (1, 1), (129, 1)])
def test_scales_beside_values_in_other_trees(names, scales):
    """Only scales of each entry are padded, with their values."""
    mesh, w = make_mesh("fsdp=8"), weight((129 if scales == (129, 1) else 512, 48), scales)
    params = dict(zip(names.split(), (w.values, w.scales), strict=True))
    of_each = scales == (129, 1)
    rules = LayoutMap({".*": ("fsdp",)})
    with pytest.raises(LayoutError) as error:
        rules.layout(params, mesh)
    remedies = {problem.path: problem.remedy for problem in error.value.problems}
    edit = "pad it to 136, Padded('fsdp')" if of_each else "replicate it, None"
    assert {remedy[: len(edit)] for remedy in remedies.values()} == {edit}
    assert set(remedies) == (set(params) if of_each else {names.split()[1]})
    entry = Padded("fsdp") if of_each else "fsdp"
    maps = [LayoutMap({key: (entry,) if of_each or key not in remedies else P() for key in params})]
    maps += [] if of_each else [fully_sharded(params, mesh)]
    for rules in maps:
        placed = rules.layout(params, mesh).place(params)
        found = Quantized(*map(placed.get, names.split()), dtype="float32").dequantized()
        wanted = read(w, tuple(size // n for size, n in zip(w.shape, scales, strict=True)))
        np.testing.assert_array_equal(found[: w.shape[0]], wanted)


@pytest.mark.parametrize(("size", "even"), [(192, 96), (448, 112), (960, 120)])
def test_two_kinds_of_blocks(size, even):
    """The edit of the error is one of both, and each reads as it says."""
    count = -(-size // 128)
    w = weight((size, 256), (count, 2))
    with pytest.raises(ValueError, match="say which") as error:
        w.dequantized()
    rest = f"128 \\(the last of {size % 128}\\)"
    both = f"({even}, 128)"  # a number is of all dimensions
    text = (
        rf"^Quantized.dequantized: scales have local shape \({count}, 2\) for values of "
        rf"\({size}, 256\): {count} for {size} entries along dimension 0 are blocks of {even}, or "
        rf"of {rest}; say which, Quantized\(..., block={re.escape(both)}\) or "
        r"Quantized\(..., block=128\)$"
    )
    assert re.search(text, str(error.value))
    mesh = make_mesh("tp=8")
    with pytest.raises(LayoutError, match=f"are blocks of {even}, or of {rest}; say which"):
        LayoutMap({"w/.*": ("tp",)}).layout({"w": w}, mesh)
    edits = re.findall(r"block=(\d+|\([^)]*\))\)", str(error.value))
    assert edits == [both, "128"]
    for block, edit in zip((even, 128), edits, strict=True):
        told = Quantized(w.values, w.scales, dtype="float32", block=ast.literal_eval(edit))
        layout = LayoutMap({"w/.*": ("tp",)}).layout({"w": told}, mesh)
        placed = layout.place({"w": told})["w"]
        np.testing.assert_array_equal(placed.dequantized(), read(w, (block, 128)))


@pytest.mark.parametrize("check_vma", [True, False])
def test_whole_scales_by_their_dim(check_vma):
    """`dim` needs no dtype, nor a block."""
    mesh, w = make_mesh("fsdp=8"), weight((320, 48), (3, 1), 128)
    mapped = jax.shard_map(
        lambda w: layers.fsdp_gather([w], "fsdp", dim=[Quantized(0, None)])[0].dequantized()[None],
        mesh=mesh,
        in_specs=(Quantized(P("fsdp"), P(), dtype="float32", block=128),),
        out_specs=P("fsdp"),
        check_vma=check_vma,
    )
    np.testing.assert_array_equal(jax.jit(mapped)(w)[5], read(w, (128, 48)))


def test_two_kinds_along_both_dimensions():
    w = weight((192, 192), (2, 2))
    with pytest.raises(ValueError, match=r"along dimension 0 .* along dimension 1") as error:
        w.dequantized()
    edits = re.findall(r"block=(\d+|\([^)]*\))\)", str(error.value))
    assert edits == ["96", "(96, 128)", "(128, 96)", "128"]
    for edit in map(ast.literal_eval, edits):
        told = Quantized(w.values, w.scales, dtype="float32", block=edit)
        sizes = edit if isinstance(edit, tuple) else (edit, edit)
        np.testing.assert_array_equal(told.dequantized(), read(w, sizes))


@pytest.mark.parametrize(
    ("scales", "text"),
    [
        ((), r"\(\) for values of \(256, 48\): 0 dimensions for 2; reshape it to \(1, 1\)"),
        (
            (256,),
            r"\(256,\) for values of \(256, 48\): 1 dimensions for 2; reshape them to \(256, 1\) "
            "if they are along dimension 0",
        ),
        ((7, 1), "7 for 256 entries along dimension 0 are no blocks; give one scale, one for each"),
    ],
)
def test_scales_of_another_shape(scales, text):
    w = weight((256, 48), scales)
    with pytest.raises(ValueError, match=text):
        w.dequantized()
    with pytest.raises(LayoutError, match=text):
        LayoutMap({"w/.*": ("tp",)}).layout({"w": w}, make_mesh("tp=8"))
    edit = re.search(r"reshape (it|them) to (\([^)]*\))", text.replace("\\", ""))
    if edit:
        shape = ast.literal_eval(edit[2])
        told = Quantized(w.values, w.scales.reshape(shape), dtype="float32")
        np.testing.assert_array_equal(
            told.dequantized(), np.asarray(w.values) * np.asarray(w.scales).reshape(shape)
        )


# -- where trees are made, stored and looked at -------------------------------------------------


def test_stacked_layers_that_are_padded_split_or_interleaved():
    mesh = make_mesh("pp=2,tp=4")
    w = weight((8, 96, 70), (8, 3, 1))
    wanted = read(w, (1, 32, 70))
    for rule in ((Interleaved("pp", 2), "tp"), ("pp", None, Padded("tp")), Split("tp", 1)):
        layout = LayoutMap({"w/.*": rule}, batch=P("pp")).layout({"w": w}, mesh)
        placed = layout.place({"w": w})
        jax.tree.map(np.testing.assert_array_equal, layout.gather(placed), {"w": w})
        read_there = jax.jit(lambda w: Quantized(w.dequantized(), jnp.ones((1, 1, 1))))(placed["w"])
        values = layout["w/values"].unpad(np.asarray(read_there.values))
        np.testing.assert_array_equal(values, wanted)


def test_a_checkpoint_of_another_mesh(tmp_path):
    params = {
        "w": weight((256, 72), (2, 1)),
        "part": weight((576, 48), (5, 48), 128, "float8_e4m3fn"),
    }
    rules = LayoutMap({".*": ("fsdp",)})
    first = rules.layout(params, make_mesh("fsdp=8"))
    first.save(tmp_path / "state", first.place(params))
    other = fully_sharded(params, mesh_of("fsdp=3")).layout(params, mesh_of("fsdp=3"))
    restored = other.restore(tmp_path / "state")
    jax.tree.map(np.testing.assert_array_equal, other.gather(restored), params)
    np.testing.assert_array_equal(restored["w"].dequantized(), read(params["w"], (128, 72)))
    assert jax.tree.structure(restored) == jax.tree.structure(params)


def test_made_on_the_mesh():
    mesh, w = make_mesh("tp=8"), weight((256, 72), (2, 1))
    layout = LayoutMap({"w/.*": ("tp",)}).layout({"w": w}, mesh)
    made = layout.init(
        lambda values, scales: {"w": Quantized(values, scales, dtype="float32")}, w.values, w.scales
    )
    np.testing.assert_array_equal(made["w"].dequantized(), read(w, (128, 72)))
    assert layout.table().rows[0]["path"].startswith("w/")


def test_states_like_the_parameters():
    """A state's scales lie as its values do, also beside a parameter that is not quantized."""
    mesh = make_mesh("fsdp=8")
    w = weight((256, 72), (2, 1))
    params = {"w": w, "plain": jnp.ones((20, 16))}
    layout = LayoutMap({"w/.*": ("fsdp",), "plain": (Padded("fsdp"),)}).layout(params, mesh)
    state = {"mu": {"w": w, "plain": weight((20, 16), (20, 1))}}
    laid = layout.like(state)
    assert laid["mu/w/scales"].local_shape == layout["w/scales"].local_shape == (1, 1)
    assert laid["mu/plain/values"].padded_shape == (24, 16)
    assert laid["mu/plain/scales"].padded_shape == (24, 1)
    placed = laid.place(state)
    np.testing.assert_array_equal(placed["mu"]["w"].dequantized(), read(w, (128, 72)))
    shapes = {"mu": {"w": layout.shapes["w"]}}
    assert layout.like(shapes)["mu/w/scales"].shape == (2, 1)
    moved = layout.like({"mu": {"w": w}}, LayoutMap({"mu/w/values": (None, "fsdp")}))
    assert moved["mu/w/scales"].spec == P()


@pytest.mark.parametrize("check_vma", [True, False])
def test_one_scale_for_each_devices_block(check_vma):
    """Gathered scales keep their blocks, of any size."""
    mesh, w = mesh_of("tp=2"), weight((192, 24), (2, 1), 96)
    local = Quantized(w.values, w.scales, dtype="float32")  # each device has one: no question
    spec = Quantized(P("tp"), P("tp"), dtype="float32")

    def whole(w):
        by = [layers.fsdp_gather(w, "tp"), all_gather(w, "tp", tiled=True)]
        return [x.dequantized()[None] for x in by]

    mapped = jax.shard_map(
        whole, mesh=mesh, in_specs=(spec,), out_specs=P("tp"), check_vma=check_vma
    )
    for found in jax.jit(mapped)(local):
        np.testing.assert_array_equal(found, np.stack([read(w, (96, 24))] * 2))


@pytest.mark.parametrize("check_vma", [True, False])
def test_a_matmul_of_blocks_that_are_not_full(check_vma):
    """With gradients of the other operand."""
    mesh, w = make_mesh("fsdp=8"), weight((64, 200), (1, 2), 128)
    rng = np.random.default_rng(2)
    x, ct = (jnp.asarray(rng.normal(size=(16, size)), "float32") for size in (64, 200))
    mapped = jax.shard_map(
        lambda x, w: layers.fsdp_linear(x, w, "fsdp"),
        mesh=mesh,
        in_specs=(P("fsdp"), Quantized(P("fsdp"), P(), dtype="float32", block=128)),
        out_specs=P("fsdp"),
        check_vma=check_vma,
    )
    out, pullback = jax.vjp(jax.jit(lambda x: mapped(x, w)), x)
    there = read(w, (64, 128)).astype("float64")
    np.testing.assert_allclose(out, np.asarray(x) @ there, rtol=1e-4, atol=2e-3)
    np.testing.assert_allclose(pullback(ct)[0], np.asarray(ct) @ there.T, rtol=1e-4, atol=2e-3)


@pytest.mark.parametrize("mode", ["naive", "stationary", "chunked-2", "bidirectional"])
@pytest.mark.parametrize("dim", [0, 1])
def test_a_matmul_of_several_blocks_a_device(dim, mode):
    """Along the gathered dimension, over two axes; with gradients of the other operand."""
    shape, scales = [(256, 48), (48, 256)][dim], [(16, 3), (3, 16)][dim]
    mesh, w = mesh_of("fsdp=2,tp=2"), weight(shape, scales)
    axis, rng = ("tp", "fsdp"), np.random.default_rng(2)
    x, ct = (jnp.asarray(rng.normal(size=(8, size)), "float32") for size in shape)
    spec = P(*[None] * dim, axis)

    def product(check_vma):
        return jax.shard_map(
            lambda x, w: layers.fsdp_linear(x, w, Axis(axis, mode=mode), dim=dim),
            mesh=mesh,
            in_specs=(P(axis), Quantized(spec, spec, dtype="float32")),
            out_specs=P(axis),
            check_vma=check_vma,
        )

    if mode != "stationary":  # whose weights stay where they are
        count, local = np.array(scales), np.array(shape)
        count[dim], local[dim] = count[dim] // 4, local[dim] // 4
        text = (
            f"fsdp_linear: scales have local shape {(*count.tolist(),)} for values of "
            f"{(*local.tolist(),)}, gathered along dimension {dim}: only types tell 4 scales of "
            "this device from those of all devices; use check_vma=True"
        )
        with pytest.raises(ValueError, match=re.escape(text)):
            jax.eval_shape(product(False), x, w)
    out, pullback = jax.vjp(jax.jit(lambda x: product(True)(x, w)), x)
    there = read(w, (16, 16)).astype("float64")
    np.testing.assert_allclose(out, np.asarray(x) @ there, rtol=1e-4, atol=5e-3)
    np.testing.assert_allclose(pullback(ct)[0], np.asarray(ct) @ there.T, rtol=1e-4, atol=5e-3)


def whole_in(function, mesh, scales):
    return jax.shard_map(
        lambda x, w: function(x, w, ("tp", "fsdp")),
        mesh=mesh,
        in_specs=(P(("tp", "fsdp")), Quantized(P(("tp", "fsdp")), scales, dtype="float32")),
        out_specs=P(("tp", "fsdp")),
    )


GATHERS = {
    "fsdp_gather": lambda x, w, axis: x @ layers.fsdp_gather(w, axis).dequantized(),
    "all_gather": lambda x, w, axis: x @ all_gather(w, axis, tiled=True).dequantized(),
}
MATMULS = {
    "fsdp_linear": lambda x, w, axis: layers.fsdp_linear(x, w, axis),
    "all_gather_matmul": lambda x, w, axis: all_gather_matmul(x, w, axis, gather="rhs", dim=0),
    "collective_einsum": lambda x, w, axis: collective_einsum("bk,km->bm", x, w, axis, gather="k"),
}


@pytest.mark.parametrize("name", [*GATHERS, *MATMULS])
def test_scales_that_a_type_calls_whole(name):
    """Each device has all scales, as many as it has rows; refused scales are sharded instead."""
    mesh, w = make_mesh("fsdp=2,tp=4"), weight((64, 16), (8, 1))
    x = jnp.asarray(np.random.default_rng(3).normal(size=(8, 64)), "float32")
    wanted = np.asarray(x, "float64") @ read(w, (8, 16))
    function, specs = (GATHERS | MATMULS)[name], [P(), P("tp"), P(("tp", "fsdp"))]
    for whole, shared in ((specs[0], "['tp', 'fsdp']"), (specs[1], "['fsdp']")):
        mapped = whole_in(function, mesh, whole)
        if name in GATHERS and whole == P():
            found = jax.jit(mapped)(x, w)
            np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-3)
            continue
        local = (8 if whole == P() else 2, 1)
        text = (
            rf"^{name}: scales have local shape {re.escape(str(local))} and are replicated over "
            rf"{re.escape(shared)}, so that {local[0]} along dimension 0 are of several devices' "
            r"values, which axis .* gathers; shard them in in_specs as the values, or place both "
            "by Layout.place"
        )
        with pytest.raises(ValueError, match=text):
            jax.eval_shape(mapped, x, w)
    mapped = whole_in(function, mesh, specs[2])
    placed = LayoutMap({"w/values": (("tp", "fsdp"),)}).layout({"w": w}, mesh).place({"w": w})["w"]
    for there in (w, placed):
        np.testing.assert_allclose(jax.jit(mapped)(x, there), wanted, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("check_vma", [True, False])
@pytest.mark.parametrize("names", ["az", "za"])
def test_scales_beside_small_weights(names, check_vma):
    """Small leaves travel together; a `gather_dtype` is for weights, and not for scales."""
    mesh, w = make_mesh("fsdp=8"), weight((64, 16), (64, 1))
    small = jnp.asarray(np.random.default_rng(4).normal(size=(16, 5)), "float32")
    tree = dict(zip(names, (small, w), strict=True))
    axis = Axis("fsdp", gather_dtype="bfloat16")
    mapped = jax.shard_map(
        lambda tree: jax.tree.map(lambda x: x[None], layers.fsdp_gather(tree, axis)),
        mesh=mesh,
        in_specs=(jax.tree.map(lambda _: P("fsdp"), tree),),
        out_specs=P("fsdp"),
        check_vma=check_vma,
    )
    found = jax.jit(mapped)(tree)
    np.testing.assert_array_equal(found[names[0]][5], small.astype("bfloat16"))
    np.testing.assert_array_equal(found[names[1]].scales[5], w.scales)
    np.testing.assert_array_equal(found[names[1]].values[5], w.values)


def test_a_block_that_ends_within_a_device():
    mesh, w = mesh_of("fsdp=2"), weight((384, 48), (4, 1), 128)
    mapped = jax.shard_map(
        lambda w: layers.fsdp_gather(w, "fsdp").dequantized(),
        mesh=mesh,
        in_specs=(Quantized(P("fsdp"), P("fsdp"), dtype="float32", block=128),),
        out_specs=P(),
        check_vma=False,
    )
    text = (
        r"^fsdp_gather: scales have local shape \(2, 1\) for values of \(192, 48\): a device's 192 "
        "entries along dimension 0, which is gathered, are no whole blocks of 128; shard the array "
        "by Layout.place"
    )
    with pytest.raises(ValueError, match=text):
        jax.eval_shape(mapped, w)


@pytest.mark.parametrize("dtype", ["int4", "uint4", "int2", "uint2", "float4_e2m1fn", "int8"])
def test_numbers_that_share_bytes(dtype):
    """A layout counts what the compiler counts."""
    mesh, shape = make_mesh("fsdp=8"), jax.ShapeDtypeStruct((64, 33), dtype)
    layout = LayoutMap({"w": ("fsdp",)}).layout({"w": shape}, mesh)
    compiled = jax.jit(lambda w: w).lower(layout.shapes["w"]).compile()
    bits = {"int8": 8, "int2": 2, "uint2": 2}.get(dtype, 4)
    assert layout["w"].bytes_per_device == 8 * 33 * bits // 8
    assert layout["w"].bytes_per_device == compiled.memory_analysis().argument_size_in_bytes
    assert layout.table().bytes_per_device == 33 * bits
    gather = jax.shard_map(
        lambda x: jax.lax.all_gather(x, "fsdp", tiled=True),
        mesh=mesh,
        in_specs=P("fsdp"),
        out_specs=P("fsdp"),
    )
    assert count_collectives(gather, shape, grad=False).forward_bytes == 7 * 33 * bits


@pytest.mark.parametrize(
    ("shape", "scales", "entries"),
    [
        ((0,), (1,), ("fsdp",)),
        ((0, 8), (1, 1), ("fsdp",)),
        ((8, 0), (8, 1), (None, "fsdp")),
        ((0, 8), (0, 1), ("fsdp", None)),
        ((0, 8), (1, 8), (Padded("fsdp"), None)),
    ],
)
@pytest.mark.parametrize("check", ["map", "like", "gather"])
def test_values_of_no_numbers(shape, scales, entries, check):
    """One scale of none stays whole. Drawn by `nox -s properties`."""
    mesh, w = make_mesh("fsdp=8"), weight(shape, scales)
    layout = LayoutMap({"w/values": entries}).layout({"w": w}, mesh)
    placed = layout.place({"w": w})["w"]
    if check == "map":
        assert placed.scales.sharding.is_equivalent_to(layout["w/scales"].sharding, len(scales))
    elif check == "like":
        moments = layout.like({"mu": {"w": w}}).place({"mu": {"w": w}})["mu"]["w"]
        assert moments.scales.sharding == placed.scales.sharding
    else:
        back = layout.gather({"w": placed})["w"]
        assert back.dequantized().shape == shape
        np.testing.assert_array_equal(back.scales, w.scales)
