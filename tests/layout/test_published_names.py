"""Files of published models, of small sizes: every tensor is read, or named in an error."""

import re

import jax
import ml_dtypes
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from safetensors.numpy import save_file

from jaxpar import Quantized, make_mesh
from jaxpar.layout import LayoutError, LayoutMap

# What stands for the numbers of layers, of layers with experts and of experts in names.
COUNTS = {"L": range(2), "M": range(1, 3), "E": range(3)}
SIZES = {"d": 8, "h": 12, "k": 4, "v": 10, "i": 6, "w": 3, "t": 5, "1": 1, "2": 2, "3": 3}


class Model:
    """Tensors with their dimensions by patterns of names, and how they are read."""

    def __init__(self, tensors, names, transposed=None, unused=None, dtypes=None):
        self.names = {path: nested(name) for path, name in names.items()}
        self.transposed, self.unused = transposed, unused
        rng, self.values = np.random.default_rng(0), {}
        for pattern, dims in tensors.items():
            for name in flat(nested(pattern)):
                dtype = next((d for p, d in (dtypes or {}).items() if re.fullmatch(p, name)), "f")
                x = 10 * rng.normal(size=[SIZES[dim] for dim in dims.split()])
                self.values[name] = np.asarray(x).astype(dtype)

    def tree(self, leaf):
        """Paths are keys, slashes and all."""
        return {path: leaf(self.array(path, given)) for path, given in self.names.items()}

    def array(self, path, given):
        """What is to be read, by NumPy alone."""
        if not isinstance(given, str):
            return np.stack([self.array(path, part) for part in given])
        x = self.values[given]
        if isinstance(self.transposed, str):
            return x.swapaxes(-1, -2) if re.fullmatch(self.transposed, path) else x
        orders = [o for p, o in (self.transposed or {}).items() if re.fullmatch(p, path)]
        return x.transpose(orders[0] or (1, 0)) if orders else x

    def layout(self):
        shapes = self.tree(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype))
        rules = {p: P(*[None] * (x.ndim - 1), "tp") for p, x in shapes.items() if x.ndim > 1}
        rules = {re.escape(p): s for p, s in rules.items() if shapes[p].shape[-1] % 2 == 0}
        mesh = make_mesh("tp=2", devices=jax.devices()[:2])
        return LayoutMap(rules).layout(shapes, mesh, strict=False)

    def read(self, folder, layout=None, **other):
        said = {"names": self.names, "transposed": self.transposed, "unused": self.unused}
        return (layout or self.layout()).read_safetensors(folder, **said | other)


def nested(pattern):
    """The names, in a list for each of what COUNTS counts."""
    for sign, count in COUNTS.items():
        if f".{sign}." in pattern:
            return [nested(pattern.replace(f".{sign}.", f".{i}.")) for i in count]
    return pattern


def flat(names):
    return [names] if isinstance(names, str) else [name for some in names for name in flat(some)]


LLAMA = {
    "model.embed_tokens.weight": "v d",
    "model.layers.L.self_attn.q_proj.weight": "d d",
    "model.layers.L.self_attn.k_proj.weight": "k d",
    "model.layers.L.self_attn.v_proj.weight": "k d",
    "model.layers.L.self_attn.o_proj.weight": "d d",
    "model.layers.L.input_layernorm.weight": "d",
    "model.layers.L.post_attention_layernorm.weight": "d",
    "model.norm.weight": "d",
}
MLP = {
    "model.layers.L.mlp.gate_proj.weight": "h d",
    "model.layers.L.mlp.up_proj.weight": "h d",
    "model.layers.L.mlp.down_proj.weight": "d h",
}
HEAD = {"lm_head.weight": "v d"}


def short(*tensors):
    """A path for each name: `layers/q_proj/weight`."""
    return {
        re.sub(r"^model\.|(?<=\.)[LME]\.|(?<=\.)(self_attn|mlp)\.", "", name).replace(
            ".", "/"
        ): name
        for some in tensors
        for name in some
    }


def llama():
    buffers = {"model.layers.L.self_attn.rotary_emb.inv_freq": "k"}
    tensors = LLAMA | MLP | HEAD
    return Model(
        tensors | buffers, short(tensors), ".*(proj|lm_head)/weight", r".*\.inv_freq",
        {".*": ml_dtypes.bfloat16},
    )  # fmt: skip


def qwen2():
    biases = {
        f"model.layers.L.self_attn.{n}_proj.bias": d for n, d in zip("qkv", "dkk", strict=True)
    }
    tensors = LLAMA | MLP | biases
    return Model(tensors, short(tensors), ".*proj/weight")


def mixtral():
    experts = {
        "model.layers.L.block_sparse_moe.gate.weight": "3 d",
        "model.layers.L.block_sparse_moe.experts.E.w1.weight": "h d",
        "model.layers.L.block_sparse_moe.experts.E.w2.weight": "d h",
        "model.layers.L.block_sparse_moe.experts.E.w3.weight": "h d",
    }
    tensors = LLAMA | HEAD | experts
    return Model(tensors, short(tensors), ".*(_proj|gate|w.|lm_head)/weight")


def deepseek_v3():
    """Weights in float8 with a scale for each block, and a layer behind the last that is left."""
    linear = {
        "model.layers.L.self_attn.q_a_proj": "h d",
        "model.layers.L.self_attn.kv_a_proj_with_mqa": "i d",
        "model.layers.L.self_attn.kv_b_proj": "d k",
        "model.layers.0.mlp.up_proj": "h d",
        "model.layers.1.mlp.shared_experts.up_proj": "h d",
        "model.layers.M.mlp.experts.E.up_proj": "h d",
    }
    exact = {
        "model.embed_tokens.weight": "v d",
        "model.layers.L.self_attn.q_a_layernorm.weight": "h",
        "model.layers.M.mlp.gate.weight": "3 d",
        "model.layers.M.mlp.gate.e_score_correction_bias": "3",
    }
    tensors = {f"{name}.weight": dims for name, dims in linear.items()}
    tensors |= {f"{name}.weight_scale_inv": "2 2" for name in linear}
    names = {"dense/up/values": "model.layers.0.mlp.up_proj.weight"}
    names |= short(exact, {n: "" for n in tensors if ".layers.0." not in n})
    names["dense/up/scales"] = "model.layers.0.mlp.up_proj.weight_scale_inv"
    left = {"model.layers.61.eh_proj.weight": "d d", "model.layers.61.shared_head.norm.weight": "d"}
    return Model(
        exact | tensors | left, names, ".*proj.*/weight.*|dense/.*", r"model\.layers\.61\..*",
        {".*proj.weight": ml_dtypes.float8_e4m3fn},
    )  # fmt: skip


def gpt2():
    """Weights are [in, out] there, and the masks of attention are among the tensors."""
    tensors = {
        "wte.weight": "v d",
        "wpe.weight": "t d",
        "h.L.ln_1.weight": "d",
        "h.L.attn.c_attn.weight": "d h",
        "h.L.attn.c_attn.bias": "h",
        "h.L.attn.c_proj.weight": "d d",
        "h.L.mlp.c_fc.weight": "d h",
        "ln_f.bias": "d",
    }
    masks = {"h.L.attn.bias": "1 1 t t", "h.L.attn.masked_bias": ""}
    return Model(tensors | masks, short(tensors), None, r"h\.\d+\.attn\.(masked_)?bias")


def gemma():
    more = {
        "model.layers.L.pre_feedforward_layernorm.weight": "d",
        "model.layers.L.post_feedforward_layernorm.weight": "d",
        "model.layers.L.self_attn.q_norm.weight": "k",
    }
    tensors = LLAMA | MLP | more
    return Model(tensors, short(tensors), ".*_proj/weight")


def whisper():
    """Convolutions are [out, in, window] there; the projection of results is the embedding."""
    encoder = {
        "model.encoder.conv1.weight": "d i 3",
        "model.encoder.conv1.bias": "d",
        "model.encoder.conv2.weight": "d d 3",
        "model.encoder.embed_positions.weight": "t d",
        "model.encoder.layers.L.self_attn.k_proj.weight": "d d",
        "model.encoder.layers.L.self_attn.q_proj.weight": "d d",
        "model.encoder.layers.L.self_attn.q_proj.bias": "d",
        "model.encoder.layers.L.fc1.weight": "h d",
    }
    decoder = {
        "model.decoder.embed_tokens.weight": "v d",
        "model.decoder.layers.L.encoder_attn.out_proj.weight": "d d",
        "model.decoder.layers.L.encoder_attn_layer_norm.weight": "d",
    }
    tensors = encoder | decoder
    orders = {"encoder/conv./weight": (2, 1, 0), ".*(proj|fc1)/weight": None}
    return Model(tensors | {"proj_out.weight": "v d"}, short(tensors), orders, "proj_out.weight")


MODELS = [llama, qwen2, mixtral, deepseek_v3, gpt2, gemma, whisper]


@pytest.fixture(params=MODELS, ids=lambda model: model.__name__)
def model(request, tmp_path):
    made = request.param()
    save_file(
        {name: np.ascontiguousarray(x) for name, x in made.values.items()},
        tmp_path / "a.safetensors",
    )
    return made, tmp_path


def test_every_tensor_is_read(model):
    published, folder = model
    layout = published.layout()
    found = published.read(folder, layout)
    for path, expected in published.tree(lambda x: x).items():
        assert found[path].dtype == expected.dtype
        assert found[path].sharding == layout[path].sharding
        np.testing.assert_array_equal(
            np.asarray(found[path]).astype("f"), expected.astype("f"), err_msg=path
        )


def test_or_named(model):
    """Without one of its paths, the tensors of that are in the error, layers alike once."""
    published, folder = model
    for path, given in list(published.names.items())[-3:]:
        less = Model.__new__(Model)
        vars(less).update(vars(published), names={**published.names})
        del less.names[path]
        transposed = [p for p in less.names if re.fullmatch("(?!)", p)]
        with pytest.raises(LayoutError, match="is read into no array; read it by `names`") as error:
            less.read(folder)
        assert {problem.text.split("'")[1] for problem in error.value.problems} == set(flat(given))
        assert transposed == []


@pytest.mark.parametrize("wrong", ["wider", "of another dtype", "missing"])
def test_every_layer_is_checked(tmp_path, wrong):
    published = mixtral()
    name = "model.layers.1.block_sparse_moe.experts.2.w1.weight"
    tensors = dict(published.values)
    if wrong == "missing":
        tensors.pop(name)
        text = f"no tensor '{name}', for 'layers/block_sparse_moe/experts/w1/weight'"
    else:
        tensors[name] = np.ones((13, 9), "f") if wrong == "wider" else np.ones((12, 8), np.float16)
        have = "float32[9,13]" if wrong == "wider" else "float16[8,12]"
        text = (
            f"is {have} transposed in {tmp_path} ('{name}'), and float32[8,12] here, each of 2 x 3"
        )
    save_file(tensors, tmp_path / "a.safetensors")
    with pytest.raises(LayoutError, match=re.escape(text)):
        published.read(tmp_path)


def test_float8_with_scales_is_quantized(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.normal(size=(256, 384)).astype(ml_dtypes.float8_e4m3fn)
    scales = rng.uniform(1, 2, size=(2, 3)).astype("f")
    save_file({"q.weight": values, "q.weight_scale_inv": scales}, tmp_path / "a.safetensors")
    expected = values.astype("f").T * np.kron(scales, np.ones((128, 128), "f")).T
    shapes = Quantized(
        jax.ShapeDtypeStruct((384, 256), values.dtype), jax.ShapeDtypeStruct((3, 2), "float32")
    )
    mesh = make_mesh("tp=2", devices=jax.devices()[:2])
    layout = LayoutMap({"q/.*": (None, "tp")}).layout({"q": shapes}, mesh)
    names = {"q/values": "q.weight", "q/scales": "q.weight_scale_inv"}
    q = layout.read_safetensors(tmp_path, names=names, transposed="q/.*")["q"]
    assert isinstance(q, Quantized)
    np.testing.assert_array_equal(q.dequantized("float32"), expected)
    wide = LayoutMap({"q": (None, "tp")}).layout(
        {"q": jax.ShapeDtypeStruct((384, 256), "bfloat16")}, mesh
    )
    with pytest.raises(LayoutError, match="2 problems") as error:
        wide.read_safetensors(tmp_path, names={"q": "q.weight"}, transposed="q")
    assert "make the layout of `Quantized` weights, with names" in str(error.value)
    assert "'q.weight_scale_inv' float32[2,3] of" in str(error.value)
