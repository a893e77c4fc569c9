"""Weights that several arrays hold: each device's blocks stand for its block of the weight."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxpar import Quantized
from jaxpar.layout import LayoutError, tensor_parallel

OUT, IN, DEVICES = 256, 128, 2
MESH = AbstractMesh((DEVICES,), ("tp",))
FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6])


def nibbles(x, dim, per):
    """Integers of several numbers of 4 bits along a dimension."""
    shifts = 4 * np.arange(per)
    split = (np.expand_dims(x, dim + 1) >> shifts.reshape(-1, *[1] * (x.ndim - dim - 1))) & 15
    return split.reshape(*x.shape[:dim], -1, *x.shape[dim + 1 :])


def spread(scales, shape):
    for dim, size in enumerate(shape):
        scales = scales.repeat(size // scales.shape[dim], dim)
    return scales


def gptq(p):  # words along the inputs, zeros in words along the outputs
    w = nibbles(p["qweight"], 0, 8)
    zeros = spread(nibbles(p["qzeros"], 1, 8), w.shape)
    return ((w - zeros) * spread(p["scales"], w.shape)).T


def awq(p):  # words along the outputs
    w = nibbles(p["qweight"], 1, 8)
    zeros = spread(nibbles(p["qzeros"], 1, 8), w.shape)
    return ((w - zeros) * spread(p["scales"], w.shape)).T


def compressed(p):
    w = nibbles(p["weight_packed"], 1, 8)
    zeros = spread(nibbles(p["weight_zero_point"], 0, 8), w.shape)
    return (w - zeros) * spread(p["weight_scale"], w.shape)


def nvfp4(p):
    w = FP4[nibbles(p["weight"], 1, 2)]
    return w * spread(p["weight_scale"], w.shape) * p["weight_scale_2"]


def int4_by_outputs(p):
    w = nibbles(p["weight"], 0, 2)
    return w * spread(p["weight_scale"], w.shape) * p["pre_quant_scale"]


def mxfp4(p):  # 32 numbers in the 16 bytes of a block
    w = FP4[nibbles(p["blocks"], 2, 2)].reshape(len(p["blocks"]), -1)
    return w * 2.0 ** (spread(p["scales"], w.shape) - 127)


def affine(p):
    w = nibbles(p["weight"], 1, 8)
    return w * spread(p["scales"], w.shape) + spread(p["biases"], w.shape)


def blocks(p):
    return p["weight"] * spread(p["weight_scale_inv"], p["weight"].shape)


def gptq_by_index(p):  # g_idx numbers the groups of the whole weight
    order = p["g_idx"] % 4
    w = nibbles(p["qweight"], 0, 8)
    return ((w - nibbles(p["qzeros"], 1, 8)[order]) * p["scales"][order]).T


def by_channel(p):
    return p["weight"] * p["SCB"][:, None]


def quantized(p):
    return (p["values"] * spread(p["scales"], p["values"].shape)).T


WORDS, BYTES, F = "int32", "uint8", "float32"
FORMATS = {  # its parts' shapes and dtypes, for weights of `OUT` outputs and `IN` inputs
    gptq: lambda o, i: {
        "qweight": (i // 8, o, WORDS), "qzeros": (i // 32, o // 8, WORDS), "scales": (i // 32, o, F)
    },
    gptq_by_index: lambda o, i: {
        "qweight": (i // 8, o, WORDS), "qzeros": (i // 32, o // 8, WORDS),
        "scales": (i // 32, o, F), "g_idx": (i, WORDS),
    },
    awq: lambda o, i: {
        "qweight": (i, o // 8, WORDS), "qzeros": (i // 32, o // 8, WORDS), "scales": (i // 32, o, F)
    },
    compressed: lambda o, i: {
        "weight_packed": (o, i // 8, WORDS), "weight_scale": (o, i // 32, F),
        "weight_zero_point": (o // 8, i // 32, WORDS), "weight_shape": (2, WORDS),
    },
    nvfp4: lambda o, i: {
        "weight": (o, i // 2, BYTES), "weight_scale": (o, i // 16, F), "weight_scale_2": (F,),
        "input_scale": (F,),
    },
    int4_by_outputs: lambda o, i: {
        "weight": (o // 2, i, BYTES), "weight_scale": (o, i // 32, F), "pre_quant_scale": (i, F)
    },
    mxfp4: lambda o, i: {"blocks": (o, i // 32, 16, BYTES), "scales": (o, i // 32, BYTES)},
    affine: lambda o, i: {
        "weight": (o, i // 8, "uint32"), "scales": (o, i // 64, F), "biases": (o, i // 64, F)
    },
    blocks: lambda o, i: {"weight": (o, i, "int8"), "weight_scale_inv": (o // 64, i // 64, F)},
    by_channel: lambda o, i: {"weight": (o, i, "int8"), "SCB": (o, F), "weight_format": (F,)},
    quantized: lambda o, i: {"values": (i, o, "int8"), "scales": (i // 32, 1, F)},
}  # fmt: skip


def parts(names, seed=0):
    rng = np.random.default_rng(seed)
    return {
        name: rng.normal(size=shape).astype(dtype)
        if dtype == F
        else rng.integers(0, 120 if "8" in dtype else 2**31, shape).astype(dtype)
        for name, (*shape, dtype) in names.items()
    }


def block(x, spec, device):
    for dim, axis in enumerate(spec):
        if axis is not None:
            x = np.split(x, DEVICES, dim)[device]
    return x


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize("role", ["columns", "rows"])
@pytest.mark.parametrize("kind", FORMATS, ids=lambda kind: kind.__name__)
def test_blocks_of_the_parts_are_a_block_of_the_weight(kind, role, square):
    """By its name, and by the user's role, given for all parts."""
    out, into = (IN, IN) if square else (OUT, IN) if role == "columns" else (IN, OUT)
    whole = parts(FORMATS[kind](out, into))
    for name, given in (("q_proj" if role == "columns" else "o_proj", {}), ("x", {role: "x/.*"})):
        params = {f"{name}/{part}": x for part, x in whole.items()}
        params["input_layernorm/weight"] = np.zeros(IN, F)
        rules = tensor_parallel(params, MESH, **given)
        for device in range(DEVICES):
            local = {
                part: block(x, rules.match(f"{name}/{part}"), device) for part, x in whole.items()
            }
            expected = block(kind(whole), P("tp") if role == "columns" else P(None, "tp"), device)
            np.testing.assert_array_equal(kind(local), expected)


F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def refused(params, devices=DEVICES, **given):
    with pytest.raises(LayoutError) as found:
        tensor_parallel(params, AbstractMesh((devices,), ("tp",)), **given)
    return {problem.path: problem for problem in found.value.problems}


def applied(params, problems, devices=DEVICES):
    """The map after the edits of refusals: `whole`, and rules of their own."""
    edits = [re.search(r"whole='(\S+)'", problem.remedy) for problem in problems.values()]
    whole = "|".join(edit[1].encode().decode("unicode_escape") for edit in edits if edit)
    return tensor_parallel(params, AbstractMesh((devices,), ("tp",)), whole=whole)


@pytest.mark.parametrize(
    ("shape", "scales", "devices"),
    [
        ((384, 128), (3, 1), 2),  # 1.5 blocks a device
        ((576, 128), (5, 1), 2),  # the last block is shorter
        ((192, 128), (2, 1), 2),  # 96 or 128 numbers in a block
        ((448, 128), (4, 1), 4),
        ((960, 128), (8, 1), 8),
        ((512, 128), (4, 1), 8),
        ((512, 128), (5, 1), 5),
    ],
)
def test_no_block_of_a_scale_is_cut(shape, scales, devices):
    """The edit replicates all parts of the weight."""
    for names in (("up_proj.weight", "up_proj.weight_scale_inv"), ("up/values", "up/scales")):
        of_values = names[0].endswith("values")
        sizes = [x[::-1] if of_values else x for x in (shape, scales)]
        params = dict(zip(names, map(F32, sizes), strict=True)) | {"norm.weight": F32((128,))}
        problems = refused(params, devices)
        assert set(problems) == set(names)
        text = f"has {scales[0]} blocks for {shape[0]} entries along dimension {int(of_values)}, of"
        assert f"{text} which {devices} devices would cut one" in problems[names[0]].text
        assert f"belongs to {names[0]!r}, which is refused" in problems[names[1]].text
        rules = applied(params, {names[0]: problems[names[0]]}, devices)
        assert {rules.match(name) for name in names} == {P()}
    whole = F32((shape[0], 1))  # a scale for each output
    params = {"up_proj.weight": F32(shape), "up_proj.weight_scale": whole}
    rules = tensor_parallel(params, AbstractMesh((devices,), ("tp",)))
    assert rules.match("up_proj.weight_scale") == P("tp")


def test_words_of_three_bits():
    """32 numbers lie in 3 words of GPTQ."""
    for inputs, fits in ((128, True), (96, False)):
        params = {
            "down_proj.qweight": jax.ShapeDtypeStruct((inputs * 3 // 32, 64), jnp.int32),
            "down_proj.qzeros": jax.ShapeDtypeStruct((1, 6), jnp.int32),
            "down_proj.scales": F32((1, 64)),
        }
        if fits:
            assert tensor_parallel(params, MESH).match("down_proj.qweight") == P("tp")
        else:
            assert "of which 2 devices would cut one" in refused(params)["down_proj.qweight"].text


@pytest.mark.parametrize(
    ("arrays", "text"),
    [
        ({"W_q": (512, 64), "scale": (1024, 1), "zero": (1024, 1)}, "is in the format of HQQ"),
        ({"q_weight": (64, 128), "q_groups": (32,)}, "is in the format of ExLlamaV2"),
        ({"weight": (8192, 1), "weight.absmax": (256,)}, "is a flat list of packed numbers"),
        ({"weight": (32, 128), "weight_scale": (1,)}, "may be packed, and no scales beside it"),
        ({"B": (8, 256), "s": (1, 128)}, "may be packed, and no scales beside it show how"),
        ({"qweight": (512, 64), "smooth": (512,)}, "may be packed, and no scales beside it show"),
        ({"trellis": (8, 8, 64)}, "has a name without a known role"),
        ({"weight._new": (4, 64, 64)}, "has a name without a known role"),
    ],
)
@pytest.mark.parametrize("module", ["q_proj", "down_proj"])
def test_formats_whose_blocks_are_no_blocks_of_a_weight(arrays, text, module):
    params = {
        f"{module}.{name}": jax.ShapeDtypeStruct(shape, "uint8") for name, shape in arrays.items()
    }
    problems = refused(params)
    largest = next(iter(params))
    assert text in problems[largest].text
    rules = tensor_parallel(params, MESH, whole="|".join(map(re.escape, problems)))
    assert {rules.match(path) for path in params} == {P()}


VECTORS = {  # of outputs, of inputs, or of neither
    "outputs": "SCB weight_scale scales lora_magnitude_vector.default.weight vera_lambda_b.default",
    "inputs": "g_idx weight_g_idx pre_quant_scale input_scale q_perm",
    "neither": "weight_shape weight.quant_map weight.quant_state.nf4 vera_lambda_d weight_scale_2",
}


@pytest.mark.parametrize("side", VECTORS)
def test_vectors_beside_a_weight(side):
    """By their names, also beside a square weight; of any other name by their length."""
    for module, role in (("q_proj", "outputs"), ("o_proj", "inputs")):
        for name in VECTORS[side].split():
            path = f"{module}.{name}"
            for size in (128,) if side != "neither" else (1, 2, 16, 128):
                params = {f"{module}.weight": F32((128, 128)), path: F32((size,))}
                rules = tensor_parallel(params, MESH)
                assert rules.match(path) == (P("tp") if side == role else P())
        for size in {"outputs": (256,), "inputs": (64,), "neither": (1,)}[side]:
            params = {
                "norm.weight": F32((64 if module == "q_proj" else 256,)),
                f"{module}.weight": F32((256, 64)), f"{module}.new": F32((size,)),
            }  # fmt: skip
            rules = tensor_parallel(params, MESH)
            assert rules.match(f"{module}.new") == (P("tp") if side == role else P())


def test_vectors_that_may_be_of_inputs_or_outputs_are_refused():
    square = {"q_proj.weight": F32((128, 128)), "q_proj.new": F32((128,))}
    odd = {"q_proj.weight": F32((256, 128)), "q_proj.new": F32((77,))}
    alone = {"q_proj.new": F32((128,))}
    for params in (square, odd, alone):
        problems = refused(params)
        assert list(problems) == ["q_proj.new"]
        text = "a weight that is not there" if params is alone else "of 'q_proj.weight' float32"
        assert text in problems["q_proj.new"].text
        rules = applied(params, problems)
        assert rules.match("q_proj.new") == P()
        key = re.search(r"rules \| {'(\S+)': \.\.\.}", problems["q_proj.new"].remedy)[1]
        assert (rules | {key: P("tp")}).match("q_proj.new") == P("tp")
        if "q_proj.weight" in params:
            assert rules.match("q_proj.weight") == P("tp")
    rules = tensor_parallel(square, MESH, columns=".*new")
    assert rules.match("q_proj.new") == P("tp")


def test_scales_of_fewer_dimensions_are_refused():
    for dims in ({"query": (128, 8, 64)}, {"out": (8, 64, 128)}):
        ((name, shape),) = dims.items()
        params = {f"{name}/kernel": F32(shape), f"{name}/kernel_scale": F32((8, 64))}
        problems = refused(params)
        assert list(problems) == [f"{name}/kernel_scale"]
        assert "has fewer dimensions than" in problems[f"{name}/kernel_scale"].text
        assert applied(params, problems).match(f"{name}/kernel_scale") == P()


def test_scalars_are_replicated():
    names = ("weight_scale_2", "input_scale", "k_scale", "weight_format", "alpha", "new")
    for module in ("q_proj", "qkv_proj", "gate_proj", "o_proj", "norm", "lm_head"):
        params = {f"l.{module}.{name}": F32(()) for name in names}
        rules = tensor_parallel(params, MESH)
        assert {rules.match(path) for path in params} == {P()}
        params |= {"l.q_proj.weight": F32((128, 128)), "l.k_norm.weight": F32((16,))}
        assert tensor_parallel(params, MESH).match("l.q_proj.weight") == P("tp")


def test_parts_of_fused_projections_are_refused_with_them():
    params = {
        "qkv_proj.weight": F32((384, 128)), "qkv_proj.weight_scale": F32((384, 1)),
        "qkv_proj.input_scale": F32((1,)), "qkv_proj.pre_quant_scale": F32((128,)),
    }  # fmt: skip
    problems = refused(params)
    assert set(problems) == {name for name in params if "input" not in name}
    rules = tensor_parallel(params, MESH, columns=re.escape("qkv_proj.weight"))
    assert [rules.match(path) for path in params] == [P("tp"), P("tp"), P(), P()]
    rules = applied(params, {"": problems["qkv_proj.weight"]})
    assert {rules.match(path) for path in params} == {P()}


def test_weights_of_experts_and_their_biases():
    """Scales of each expert have no other dimension; biases have the weight's experts."""

    def by(dtype, *shape):
        return jax.ShapeDtypeStruct((8, *shape), dtype)

    params = {
        "experts.gate_up_proj_blocks": by("uint8", 256, 4, 16),
        "experts.gate_up_proj_scales": by("uint8", 256, 4),
        "experts.gate_up_proj_bias": by("bfloat16", 256),
        "experts.down_proj_blocks": by("uint8", 128, 4, 16),
        "experts.down_proj_scales": by("uint8", 128, 4),
        "experts.down_proj_input_scale": by("float32"),
        "experts.down_proj_bias": by("bfloat16", 128),
    }
    edges = {"columns": ".*gate_up_proj.*"}
    wanted = [P(None, "tp")] * 3 + [P(None, None, "tp")] * 2 + [P()] * 2
    for old, new in (("", ""), ("experts.", "mlp."), ("_blocks", "_weight.blocks")):
        renamed = {path.replace(old, new): x for path, x in params.items()}
        if old == "_blocks":
            renamed = {path.replace("_scales", "_weight.scales"): x for path, x in renamed.items()}
        rules = tensor_parallel(renamed, MESH, rows=".*down_proj.*", **edges)
        assert [rules.match(path) for path in renamed] == wanted
    assert set(refused(params)) == {path for path in params if "gate_up" in path}


def test_quantized_weights():
    """As the weights that they are, under any name that a weight has."""

    def of(*shape, block=32):
        scales = [size // block if size > 8 else size for size in shape]
        values, exact = jax.ShapeDtypeStruct(shape, "int8"), F32(shape)
        return Quantized(values, F32(tuple(scales)), exact)

    params = {
        "embed": {"embedding": of(1024, 128)},
        "norm": {"scale": F32((128,))},
        "query": {"kernel": of(128, 8, 64), "bias": F32((8, 64))},
        "out": {"kernel": of(8, 64, 128)},
        "mlp": {
            "up": {"weight": of(512, 128), "bias": F32((512,))},
            "gate": {"weight": of(512, 128)},
            "down": {"weight": of(128, 512)},
        },
        "experts": {"up": of(4, 128, 512), "down": of(4, 512, 128)},
        "router": {"kernel": F32((128, 4))},
        "lm_head": of(128, 1024),
    }
    rules = tensor_parallel(params, MESH)
    exact = jax.tree.map(
        lambda x: x.exact if isinstance(x, Quantized) else x,
        params,
        is_leaf=lambda x: isinstance(x, Quantized),
    )
    as_arrays = tensor_parallel(exact, MESH).layout(exact, MESH)
    layout = rules.layout(params, MESH)
    for path, array in layout.items():
        weight = re.sub("/(values|scales|exact)$", "", path)
        assert array.spec == as_arrays[weight].spec, path
    assert len(layout) > 2 * len(as_arrays)
