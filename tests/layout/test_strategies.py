"""Maps made from parameters: their rules, and the same training on every mesh."""

from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import make_mesh
from jaxpar.layout import (
    REPLICATED,
    LayoutError,
    LayoutMap,
    Padded,
    Split,
    data_parallel,
    expert_parallel,
    fully_sharded,
    tensor_parallel,
)

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


def a_transformer(layers=2, width=16, hidden=32, vocabulary=24):
    layer = {
        "norm": {"scale": F32((width,))},
        "query": {"kernel": F32((width, 8, 2)), "bias": F32((8, 2))},
        "out": {"kernel": F32((8, 2, width)), "bias": F32((width,))},
        "up": {"kernel": F32((width, hidden)), "bias": F32((hidden,))},
        "down": {"kernel": F32((hidden, width)), "bias": F32((width,))},
    }
    return {
        "embed": {"embedding": F32((vocabulary, width))},
        "layers": [layer for _ in range(layers)],
        "lm_head": {"kernel": F32((width, vocabulary))},
    }


def test_tensor_parallel():
    rules = tensor_parallel(a_transformer(), make_mesh("tp=8"))
    assert dict(rules) == {
        "embed/embedding": P("tp"),
        r"layers/\d+/norm/scale": P(),
        r"layers/\d+/query/kernel": P(None, "tp"),
        r"layers/\d+/query/bias": P("tp"),
        r"layers/\d+/out/kernel": P("tp"),
        r"layers/\d+/out/bias": P(),
        r"layers/\d+/up/kernel": P(None, "tp"),
        r"layers/\d+/up/bias": P("tp"),
        r"layers/\d+/down/kernel": P("tp"),
        r"layers/\d+/down/bias": P(),
        "lm_head/kernel": P(None, "tp"),
    }
    rules.layout(a_transformer(), make_mesh("tp=8"))


def test_weights_of_pytorch_and_equinox_are_transposed():
    class Block(eqx.Module):
        up: eqx.nn.Linear
        down: eqx.nn.Linear
        embedding: eqx.nn.Embedding
        norm: eqx.nn.LayerNorm

    key = jax.random.key(0)
    block = Block(
        eqx.nn.Linear(4, 16, key=key),
        eqx.nn.Linear(16, 4, key=key),
        eqx.nn.Embedding(24, 4, key=key),
        eqx.nn.LayerNorm(4),
    )
    rules = tensor_parallel(block, make_mesh("tp=8"))
    assert {key: spec for key, spec in rules.items() if spec != P()} == {
        "up/weight": P("tp"),
        "up/bias": P("tp"),
        "down/weight": P(None, "tp"),
        "embedding/weight": P("tp"),
    }


def test_stacked_layers():
    params = {"layers": {"up": F32((3, 16, 32)), "down": F32((3, 32, 16)), "norm": F32((3, 16))}}
    mesh = make_mesh("fsdp=2,tp=4")
    tensor = tensor_parallel(params, mesh, stacked="layers/.*")
    assert dict(tensor) == {
        "layers/up": P(None, None, "tp"),
        "layers/down": P(None, "tp"),
        "layers/norm": P(),
    }
    both = fully_sharded(params, mesh, within=tensor, stacked="layers/.*")
    assert dict(both) == {
        "layers/up": P(None, "fsdp", "tp"),
        "layers/down": P(None, "tp", "fsdp"),
        "layers/norm": P(None, "fsdp"),
    }
    assert both.batch.layout == P("fsdp")
    layout = both.layout(params, mesh)
    assert layout.under("layers").fsdp_dims(stacked=1) == {"up": 0, "down": 1, "norm": 0}


def test_weights_without_a_role_are_refused():
    params = {"mystery": {"kernel": F32((8, 8))}, "odd": F32((8, 8)), "bias": F32((8,))}
    with pytest.raises(LayoutError, match="tensor_parallel: 2 problems") as found:
        tensor_parallel(params, make_mesh("tp=8"))
    assert "'mystery/kernel' float32[8,8] has a name without a known role; give its role: " in str(
        found.value
    )
    rules = tensor_parallel(params, make_mesh("tp=8"), columns="mystery/kernel", whole="odd")
    assert rules.match("mystery/kernel") == P(None, "tp")
    assert rules.match("odd") == P()


def test_fully_sharded_shards_tables_by_words_alone():
    """Features that lie over the batch's axis would have what is looked up move back and forth."""
    mesh = make_mesh("fsdp=2,tp=4")
    params = {"embed": {"embedding": F32((24, 64))}, "up": {"kernel": F32((64, 256))}}
    assert fully_sharded(params, mesh).match("embed/embedding") == P("fsdp")
    odd = {**params, "embed": {"embedding": F32((21, 64))}}
    with pytest.raises(
        LayoutError,
        match=r"'embed/embedding' float32\[21,64\]: \('fsdp',\) \(2\) does not divide its 21 rows; "
        "if its features were sharded, .*; give it 22 rows, choose a smaller axis, or a rule",
    ):
        fully_sharded(odd, mesh)
    # Of words that another strategy has sharded already, the features stay whole.
    few = {**params, "embed": {"embedding": F32((20, 64))}}
    within = tensor_parallel(few, mesh)
    assert fully_sharded(few, mesh, within=within).match("embed/embedding") == P("tp")


def test_a_rule_of_its_own_within_is_left_as_it_is():
    """The edit that a refusal names, with and without a map within."""
    mesh = make_mesh("fsdp=4,tp=2")
    params = {"embed.weight": F32((22, 8)), "w": F32((3, 7)), "empty": F32((0, 3))}
    params["down"] = F32((6, 7))
    tensor = LayoutMap({"embed.weight|down": ("tp",), "w|empty": REPLICATED})
    for within, paths in ((None, {"embed.weight", "w", "down"}), (tensor, {"w", "down"})):
        with pytest.raises(LayoutError) as found:
            fully_sharded(params, mesh, within=within)
        assert "(None, Padded('fsdp'))}" in str(found.value)
        edits = {p.path: p.remedy.split("`within`, ")[1] for p in found.value.problems}
        assert set(edits) == paths
        known = {"data_parallel": data_parallel, "params": params, "mesh": mesh, "Padded": Padded}
        for edit in edits.values():
            text = edit if within is None else "within | {" + edit.split(" | {")[1]
            within = eval(text, known | {"within": within})
        rules = fully_sharded(params, mesh, within=within)
        layout = rules.layout(params, mesh, strict=False)
        assert layout["embed.weight"].padded_shape == (22 + 2 * (len(paths) == 3), 8)
        assert layout["w"].padded_shape == (3, 8)
        assert layout["down"].spec == P(("tp" if len(paths) == 2 else None), "fsdp")
        assert layout["empty"].spec == P()
    both = tensor_parallel(
        {"embed": F32((21, 8))}, mesh, within=LayoutMap({"embed": (Padded("fsdp", multiple=3),)})
    )
    assert both.match("embed") == P(Padded(("fsdp", "tp"), multiple=3))


def test_batch_and_results_of_a_map_within_are_kept():
    params, mesh = {"w": F32((8, 8))}, make_mesh("dp=2,cp=2,fsdp=2")
    within = LayoutMap(
        {"w": REPLICATED},
        axes={"rows": "dp", "sequence": "cp"},
        batch="rows sequence",
        results={"block": "rows sequence"},
    )
    rules = fully_sharded(params, mesh, within=within)
    assert rules.batch.layout == P(("dp", "fsdp"), "cp")
    assert rules.results.match("block") == P("dp", "cp")


def test_fully_sharded_takes_the_largest_dimension_that_divides():
    params = {
        "wide": F32((8, 16)),
        "odd": F32((8, 9)),
        "vector": F32((24,)),
        "short": F32((3,)),
        "scalar": F32(()),
        "small": F32((8, 8)),
    }
    rules = fully_sharded(params, make_mesh("fsdp=8"), min_size=65)
    assert dict(rules) == {
        "wide": P(None, "fsdp"),
        "odd": P("fsdp"),
        "vector": P(),
        "short": P(),
        "scalar": P(),
        "small": P(),
    }
    assert fully_sharded(params, make_mesh("fsdp=8")).match("vector") == P("fsdp")
    with pytest.raises(
        LayoutError, match=r"\('fsdp',\) \(8\) divides none of its dimensions; choose"
    ):
        fully_sharded({"w": F32((9, 7))}, make_mesh("fsdp=8"))


def test_a_dimension_is_shared_where_no_other_divides():
    mesh = make_mesh("fsdp=2,tp=4")
    params = {"up": F32((3, 16))}
    rules = fully_sharded(params, mesh, within=tensor_parallel(params, mesh))
    assert rules.match("up") == P(None, ("tp", "fsdp"))
    padded = LayoutMap({"up": (None, Padded("tp"))})
    with pytest.raises(LayoutError, match="divides none of its dimensions"):
        fully_sharded(params, mesh, within=padded)


def test_actions_take_no_further_axis():
    params, mesh = {"w": F32((16, 8))}, make_mesh("fsdp=2,tp=4")
    split = LayoutMap({"w": Split("tp", -1)})
    with pytest.raises(LayoutError, match=r"is Split\(.*\), to which no axis can be added; write"):
        fully_sharded(params, mesh, within=split)


def test_experts():
    params = {"layers": {"experts": {"up": F32((2, 8, 4, 16))}, "router": F32((2, 4, 8))}}
    mesh = make_mesh("dp=2,ep=4")
    rules = expert_parallel(params, mesh, stacked="layers/.*", within=data_parallel(params, mesh))
    assert dict(rules) == {"layers/experts/up": P(None, "ep"), "layers/router": P()}
    assert rules.batch.layout == P(("dp", "ep"))
    with pytest.raises(ValueError, match="expert_parallel: experts='none' matches no path"):
        expert_parallel(params, mesh, experts="none")


def test_layers_that_differ_have_rules_of_their_own():
    params = [{"up": F32((4, 16))}, {"up": F32((16, 4))}]
    rules = fully_sharded(params, make_mesh("fsdp=8"))
    assert dict(rules) == {"0/up": P(None, "fsdp"), "1/up": P("fsdp")}
    paths = {"a(b": F32((8,)), "c.d": F32((8,))}  # signs of regular expressions
    fully_sharded(paths, make_mesh("fsdp=8")).layout(paths, make_mesh("fsdp=8"))


@pytest.mark.parametrize(
    "strategy", [data_parallel, fully_sharded, tensor_parallel, expert_parallel]
)
def test_refused(strategy):
    params = a_transformer()
    with pytest.raises(
        ValueError, match=r"axis 'x' is not an axis of the mesh, which has {'y': 8}"
    ):
        strategy(params, make_mesh("y=8"), axis="x")
    with pytest.raises(TypeError, match=r"mesh must be a jax.sharding.Mesh, got 8"):
        strategy(params, 8)
    if strategy is not data_parallel:
        argument = "experts" if strategy is expert_parallel else "stacked"
        with pytest.raises(ValueError, match=rf"{argument}='\(' is no regular expression"):
            strategy(params, make_mesh("y=8"), axis="y", **{argument: "("})
    with pytest.raises(LayoutError, match="is matched by 0 rules of `within`; make both maps"):
        strategy(params, make_mesh("y=8"), axis="y", within=LayoutMap({}))


def refused(params, mesh="tp=8", **options):
    """The problems of a map that is refused, by path."""
    with pytest.raises(LayoutError) as found:
        tensor_parallel(params, make_mesh(mesh), **options)
    return {problem.path: str(problem) for problem in found.value.problems}


def test_a_gate_is_columns_where_an_mlp_is_beside_it():
    kernel, down = {"kernel": F32((16, 32))}, {"kernel": F32((32, 16))}
    params = {
        "mlp": {"gate": {**kernel, "bias": F32((32,))}, "up": kernel, "down": down},
        "plain": {"gate": kernel, "down": down},
        "moe": {"gate": kernel, "experts": {"up": F32((32, 16, 8)), "down": F32((32, 8, 16))}},
        "wide": {"gate": {"kernel": F32((16, 8)), "bias": F32((8,))}, "up": kernel, "down": down},
    }
    rules = tensor_parallel(params, make_mesh("tp=8"))
    gates = {path: spec for path, spec in rules.items() if "gate" in path}
    assert gates == {
        "mlp/gate/kernel": P(None, "tp"),
        "mlp/gate/bias": P("tp"),
        "plain/gate/kernel": P(None, "tp"),
        "moe/gate/kernel": P(),
        "wide/gate/kernel": P(),
        "wide/gate/bias": P(),
    }


def test_experts_under_tensor_parallelism():
    """What `moe_layer(tp_axis=...)` takes, stacked by layers or not, whichever map is within."""
    own = {"up": F32((8, 16, 32)), "gate": F32((8, 16, 32)), "down": F32((8, 32, 16))}
    stacked = {name: F32((2, *x.shape)) for name, x in own.items()}
    router, mesh = F32((16, 8)), make_mesh("ep=2,tp=4")
    params = {"experts": own, "router": router, "layers": {"experts": stacked}}
    layers = {"stacked": "layers/.*"}
    for rules in (
        expert_parallel(params, mesh, within=tensor_parallel(params, mesh, **layers), **layers),
        tensor_parallel(params, mesh, within=expert_parallel(params, mesh, **layers), **layers),
    ):
        assert dict(rules) == {
            "experts/up": P("ep", None, "tp"),
            "experts/gate": P("ep", None, "tp"),
            "experts/down": P("ep", "tp"),
            "router": P(),
            "layers/experts/up": P(None, "ep", None, "tp"),
            "layers/experts/gate": P(None, "ep", None, "tp"),
            "layers/experts/down": P(None, "ep", "tp"),
        }
        rules.layout(params, mesh)


def test_experts_that_cannot_be_counted_are_refused():
    mesh = make_mesh("ep=8")
    published = {f"moe.experts.{e}.w1.weight": F32((16, 8)) for e in range(8)}
    with pytest.raises(LayoutError, match="is of one expert, and has no dimension") as found:
        expert_parallel(published, mesh)
    text = str(found.value)
    assert r"stack the arrays of all experts, 'moe\\.experts\\.\\d+\\.w1\\.weight', along a" in text
    assert "dimension, as 'moe.experts.w1.weight' (and 7 more like it)" in text
    expert_parallel({"moe.experts.w1.weight": F32((8, 16, 8))}, mesh)
    layers = {"experts": {"up": F32((8, 8, 16, 8)), "bias": F32((8, 8, 16))}}
    with pytest.raises(
        LayoutError, match=r"have one dimension more than \[experts, in, out\]; give "
    ):
        expert_parallel(layers, mesh)
    assert expert_parallel(layers, mesh, stacked="experts/.*").match("experts/up") == P(None, "ep")
    odd = {"experts": {"up": F32((8, 16, 8)), "width": F32((16,))}}
    with pytest.raises(LayoutError, match=r"'experts/width' .* has 16 entries along dimension 0, "):
        expert_parallel(odd, mesh)
    expert_parallel(odd, mesh, experts="experts/up")


def test_several_projections_in_one_array_are_refused_until_one_says_how_they_lie():
    params = {"qkv_proj": {"weight": F32((24, 16))}, "o_proj": {"weight": F32((16, 8))}}
    text = refused(params)["qkv_proj/weight"]
    assert "split it into an array for each; or give columns='qkv_proj/weight' if the" in text
    rules = tensor_parallel(params, make_mesh("tp=8"), columns="qkv_proj/weight")
    assert dict(rules) == {"qkv_proj/weight": P("tp"), "o_proj/weight": P(None, "tp")}
    adapter = {"qkv": {"lora_a": F32((16, 4)), "lora_b": F32((4, 24))}}
    assert list(refused(adapter)) == ["qkv/lora_b"]


def test_the_edits_of_a_refusal_are_right():
    """Layers in an index have other roles; a bias goes with its matrix, and tells its way round."""
    layers = [
        {"mlp": {"0": {"weight": F32((48, 16)), "bias": F32((48,))}, "1": {}, "2": {}}}
        for _ in range(2)
    ]
    for layer in layers:
        layer["mlp"]["2"] = {"weight": F32((16, 48)), "bias": F32((16,))}
    columns, rows = r"layers/\d+/mlp/0/weight", r"layers/\d+/mlp/2/weight"
    found = refused({"layers": layers})
    assert f"give its role: columns={columns!r}" in found["layers/1/mlp/0/weight"]
    assert f"give its role: columns={rows!r}" in found["layers/0/mlp/2/weight"]
    rules = tensor_parallel({"layers": layers}, make_mesh("tp=8"), columns=columns, rows=rows)
    assert dict(rules) == {
        columns: P("tp"),
        columns.replace("weight", "bias"): P("tp"),
        rows: P(None, "tp"),
        rows.replace("weight", "bias"): P(),
    }
    alone = {"mystery": {"weight": F32((16, 16))}}  # [out, in], as Equinox and PyTorch have it
    rules = tensor_parallel(alone, make_mesh("tp=8"), columns="mystery/weight")
    assert rules.match("mystery/weight") == P("tp")
    up = {"up": {"kernel": F32((16, 32)), "bias": F32((32,))}}
    rules = tensor_parallel(up, make_mesh("tp=8"), whole="up/kernel")
    assert rules.match("up/bias") == P()
    one = F32((16, 16))
    assert "give its role: columns='.*', or" in refused(one)[""]
    assert dict(tensor_parallel(one, make_mesh("tp=8"), columns=".*")) == {"": P(None, "tp")}


def test_rows_of_the_shape_of_columns_are_refused():
    """As where `w2` goes in beside `w1`, and another weight comes out."""
    params = {"w1": F32((16, 32)), "w2": F32((16, 32)), "c_proj": F32((32, 16))}
    assert "has a name of rows, but the shape of 'w1', which is sharded" in refused(params)["w2"]
    rules = tensor_parallel(params, make_mesh("tp=8"), columns="w2")
    assert dict(rules) == {r"w\d+": P(None, "tp"), "c_proj": P("tp")}


def test_a_weight_that_may_be_either_way_round_is_refused():
    """Square, under GPT-2's name; and where what is around it tells two things."""
    params = {"attn": {"c_proj": {"weight": F32((16, 16))}}}
    text = refused(params)["attn/c_proj/weight"]
    assert "may be [in, out] or [out, in]: neither biases nor widths around it decide" in text
    assert "rules | {'attn/c_proj/weight': ...}" in text
    whole = tensor_parallel(params, make_mesh("tp=8"), whole="attn/c_proj/weight")
    assert (whole | {"attn/c_proj/weight": ("tp", None)}).match("attn/c_proj/weight") == P(
        "tp", None
    )
    # A key from elsewhere, as wide as the block on its other side.
    cross = {
        "norm": {"weight": F32((16,))},
        "query": {"weight": F32((32, 16))},
        "key": {"weight": F32((16, 24))},
    }
    assert list(refused(cross)) == ["key/weight"]
    cross["key"]["bias"] = F32((16,))
    assert tensor_parallel(cross, make_mesh("tp=8")).match("key/weight") == P("tp")


def test_dimensions_that_count_layers_are_no_heads():
    """Stacked, and nobody has said so: [layers, d, f] is neither [in, heads, size] nor its like."""
    table = {"embed": {"embedding": F32((64, 16))}}
    attention = {"query": {"kernel": F32((8, 16, 16))}, "out": {"kernel": F32((8, 16, 16))}}
    mlp = {"up": F32((8, 16, 32)), "down": F32((8, 32, 16))}
    found = refused({**table, "attention": attention, "mlp": mlp})
    assert list(found) == ["attention/out/kernel", "attention/query/kernel", "mlp/down", "mlp/up"]
    assert "has 3 dimensions, which are not [in, heads, size] or" in found["mlp/up"]
    assert "give stacked='mlp/up' if the first counts layers or experts" in found["mlp/up"]
    right = {"query": {"kernel": F32((16, 8, 4))}, "out": {"kernel": F32((8, 4, 16))}}
    rules = tensor_parallel({**table, "attention": right}, make_mesh("tp=8"))
    assert rules.match("attention/query/kernel") == P(None, "tp")
    assert rules.match("attention/out/kernel") == P("tp")


def test_fewer_heads_than_devices_are_refused_where_their_number_is_known():
    def attention(**more):
        sizes = {"q_proj": (64, 16), "k_proj": (16, 16), "o_proj": (16, 64)}
        return {name: {"weight": F32(size)} for name, size in sizes.items()} | more

    assert list(refused(attention(), head_size=8)) == ["k_proj/weight"]
    normed = attention(k_norm={"weight": F32((8,))})
    text = refused(normed)["k_proj/weight"]
    assert "has 2 heads of 8, which 8 devices do not divide; replicate them, whole=" in text
    rules = tensor_parallel(normed, make_mesh("tp=8"), whole="k_proj/weight")
    assert (rules.match("k_proj/weight"), rules.match("q_proj/weight")) == (P(), P("tp"))
    tensor_parallel(attention(), make_mesh("tp=8"))  # nothing says how many there are
    tensor_parallel(attention(k_norm={"weight": F32((64,))}), make_mesh("tp=8"))
    assert list(refused(attention(norm_k={"weight": F32((8,))}))) == ["k_proj/weight"]
    own = {"weight": F32((3 * 32, 32)), "bias": F32((3 * 32,))}  # 4 heads
    fused = {"gpt_neox": {"query_key_value": own}}
    text = refused(fused, "tp=8", head_size=8)["gpt_neox/query_key_value/weight"]
    assert "has 4 heads of 24, which 8 devices do not divide" in text
    tensor_parallel(fused, make_mesh("tp=4,dp=2"), head_size=8)
    one = {"key": {"kernel": F32((16, 1, 8))}}
    assert tensor_parallel(one, make_mesh("tp=8")).match("key/kernel") == P()


def test_tables_that_are_no_vocabulary():
    params = {
        "decoder": {"embedding": F32((64, 16))},
        "patches": {"embedding": {"kernel": F32((4, 4, 3, 16))}},
        "embed_in": {"kernel": F32((16, 16))},
    }
    params["speaker"] = {"embedding": F32((8, 16))}
    named = ["embed_in/kernel", "patches/embedding/kernel", "speaker/embedding"]
    assert list(refused(params)) == named
    rules = tensor_parallel(params, make_mesh("tp=8"), whole="|".join(named))
    assert rules.match("decoder/embedding") == P("tp")


def test_two_roles_for_one_array_are_refused():
    found = refused({"mystery": F32((8, 8))}, columns="m.*", rows="mystery")
    assert "'mystery' float32[8,8] is matched by columns= and rows=" in found["mystery"]


@pytest.mark.parametrize(
    ("strategy", "arguments"),
    [
        (fully_sharded, ["stacked"]),
        (tensor_parallel, ["columns", "rows", "vocabulary", "whole", "stacked"]),
        (expert_parallel, ["experts", "stacked"]),
    ],
)
def test_a_pattern_that_matches_nothing_is_refused(strategy, arguments):
    params = {"experts": {"up": F32((8, 8, 16))}, "layers": [{"up": F32((8, 16))}]}
    for argument in arguments:
        with pytest.raises(
            ValueError,
            match=rf"{strategy.__name__}: {argument}='layer/0/up' matches no path; it must match a "
            r"full one, and `\.\*` matches anything: there are 'layers/0/up'",
        ):
            strategy(params, make_mesh("x=8"), axis="x", **{argument: "layer/0/up"})


class Net(nn.Module):
    """Flax's own modules, as their users have them."""

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(24, 16, name="embed")(tokens)
        y = nn.LayerNorm(name="norm_0")(x)
        x = x + nn.MultiHeadDotProductAttention(num_heads=8, name="attention")(y)
        y = nn.LayerNorm(name="norm_1")(x)
        x = x + nn.Dense(16, name="down")(nn.gelu(nn.Dense(32, name="up")(y)))
        return nn.Dense(24, name="lm_head")(x)


NET, ADAM = Net(), optax.adam(1e-2)
TOKENS = np.random.default_rng(0).integers(0, 24, (8, 12))


def step(params, state, tokens):
    def loss(params):
        logits = NET.apply(params, tokens[:, :-1])
        return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

    value, gradients = jax.value_and_grad(loss)(params)
    updates, state = ADAM.update(gradients, state, params)
    return optax.apply_updates(params, updates), state, value


def two_losses(params, state, tokens, **options):
    run = jax.jit(step, **options)
    params, state, first = run(params, state, tokens)
    return [first, run(params, state, tokens)[2]]


@pytest.fixture(scope="module")
def on_one_device():
    """Parameters, and the losses of two steps."""
    with jax.numpy_dtype_promotion("standard"), jax.enable_x64(True):
        start = wide(jax.jit(NET.init)(jax.random.key(0), TOKENS))
        return start, two_losses(start, jax.jit(ADAM.init)(start), TOKENS)


@pytest.mark.parametrize("sizes", [(8, 1, 1), (2, 2, 2), (1, 1, 8), (1, 8, 1)])
def test_one_model_on_every_mesh(sizes, on_one_device, float64):
    """Data, fully sharded and tensor parallel: two steps of Adam are those of one device."""
    mesh = make_mesh(dict(zip(("dp", "fsdp", "tp"), sizes, strict=True)))
    start, expected = on_one_device
    rules = tensor_parallel(start, mesh)
    rules = fully_sharded(start, mesh, within=rules)
    rules = data_parallel(start, mesh, within=rules)
    layout = rules.layout(start, mesh)
    sharded = [array.spec for array in layout.values() if array.shards > 1]
    assert (len(sharded) > 8) == (sizes[1] > 1 or sizes[2] > 1)
    with jax.numpy_dtype_promotion("standard"):
        states = layout.like(jax.eval_shape(ADAM.init, start))
        params = layout.place(start)
        state = jax.jit(ADAM.init, out_shardings=states.shardings)(params)
        out = (layout.shardings, states.shardings, None)
        losses = two_losses(params, state, layout.place_batch(TOKENS), out_shardings=out)
    assert_alike(losses, expected)
