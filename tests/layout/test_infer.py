"""Maps inferred from functions: Megatron's for transformers, and something that runs for others."""

from functools import partial

import equinox as eqx
import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax import lax
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from wide import assert_alike, wide

from jaxpar import make_mesh
from jaxpar.layout import infer_layout
from language_model.config import Model, Training
from language_model.tests import reference
from language_model.weights import shapes

F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def promotion():
    """As other libraries rely on it."""
    with jax.numpy_dtype_promotion("standard"):
        yield


def a_language_model(**more):
    sizes = {"heads": 8, "kv_heads": 4, "head_size": 4, "hidden": 32} | more
    model = Model(vocabulary=64, width=16, layers=2, **sizes)
    batch = (jax.ShapeDtypeStruct((4, 12), jnp.int32),) * 2
    return lambda params, b: reference.loss(params, *b, model, Training()), shapes(model), batch


MEGATRON = {
    "layers/(query|key|value|gate|up)": P(None, None, "tp"),
    "layers/(output|down)": P(None, "tp"),
    "(layers/.*|final_)norm": P(),
}


def check(rules, wanted):
    import re

    for pattern, spec in wanted.items():
        found = [key for key in rules if re.fullmatch(pattern, key)]
        assert found, pattern
        for key in found:
            assert rules[key] == spec, key


def test_the_language_model_gets_megatrons_layout():
    loss, params, batch = a_language_model()
    mesh = make_mesh("dp=2,tp=4")
    said = []
    rules = infer_layout(loss, params, batch, mesh, show=said.append)
    check(rules, {**MEGATRON, "embedding": P("tp")})
    assert rules.batch.layout == P("dp")
    rules.layout(params, mesh)
    assert any(
        line.startswith("layers/down: ") and "shared by layers/down, layers/gate, layers/up" in line
        for line in said
    )
    assert said[-1] == "replicated: 28.3 KiB a device"


def test_with_fully_sharded_axes():
    loss, params, batch = a_language_model(tied=False)
    mesh = make_mesh("fsdp=2,tp=4")
    rules = infer_layout(loss, params, batch, mesh, show=None)
    check(
        rules,
        {
            "layers/(query|key|value|gate|up)": P(None, "fsdp", "tp"),
            "layers/(output|down)": P(None, "tp", "fsdp"),
            "embedding": P(("tp", "fsdp")),
            "logits": P("fsdp", "tp"),
        },
    )
    layout = rules.layout(params, mesh)
    assert layout.under("layers").fsdp_dims(stacked=1)["down"] == 1


def test_with_experts():
    loss, params, batch = a_language_model(experts=8, tied=False)
    rules = infer_layout(loss, params, batch, make_mesh("ep=4,tp=2"), show=None)
    check(
        rules,
        {
            "layers/(gate|up)": P(None, "ep", None, "tp"),
            "layers/down": P(None, "ep", "tp"),
            "layers/query": P(None, None, "tp"),
        },
    )
    assert rules.batch.layout == P("ep")


def test_as_many_heads_as_divide():
    """Keys have 2 heads, which 4 devices do not divide: keys and values stay whole."""
    loss, params, batch = a_language_model(kv_heads=2)
    said = []
    rules = infer_layout(loss, params, batch, make_mesh("dp=2,tp=4"), show=said.append)
    check(rules, {"layers/(key|value)": P(), "layers/(gate|up)": P(None, None, "tp")})
    assert any(
        line.startswith("unsure: 4 devices do not divide 2 (Padded can): dimensions of ")
        and "layers/key" in line
        for line in said
    )


class Net(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(24, 16, name="embed")(tokens)
        for i in range(2):
            y = nn.LayerNorm(name=f"norm_{i}")(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=8, name=f"attention_{i}")(y)
            y = nn.LayerNorm(name=f"other_norm_{i}")(x)
            x = x + nn.Dense(16, name=f"b_{i}")(nn.gelu(nn.Dense(32, name=f"a_{i}")(y)))
        return nn.Dense(24, name="head")(x)


def same_on_the_mesh(function, params, batch, rules, mesh):
    """The function's value and gradients with arrays that lie by the map, and on one device."""
    with jax.enable_x64(True):
        params, batch = wide((params, batch))
        layout = rules.layout(jax.eval_shape(lambda: params), mesh, strict=False)
        run = jax.value_and_grad(function)
        placed = jax.jit(run, out_shardings=(None, layout.shardings))
        assert_alike(placed(layout.place(params), batch), jax.jit(run)(params, batch))


def test_a_flax_model():
    net, tokens = Net(), np.zeros((4, 6), np.int32) + np.arange(6, dtype=np.int32)
    params = jax.jit(net.init)(jax.random.key(0), tokens)

    def loss(params, tokens):
        return jnp.mean(jax.nn.logsumexp(net.apply(params, tokens), axis=-1) ** 2)

    mesh = make_mesh("dp=2,tp=4")
    rules = infer_layout(loss, params, tokens, mesh, show=None)
    for i in range(2):
        assert rules.match(f"params/attention_{i}/query/kernel") == P(None, "tp")
        assert rules.match(f"params/attention_{i}/query/bias") == P("tp")
        assert rules.match(f"params/attention_{i}/out/kernel") == P("tp")
        assert rules.match(f"params/attention_{i}/out/bias") == P()
        assert rules.match(f"params/a_{i}/kernel") == P(None, "tp")
        assert rules.match(f"params/a_{i}/bias") == P("tp")
        assert rules.match(f"params/b_{i}/kernel") == P("tp")
        assert rules.match(f"params/norm_{i}/scale") == P()
    assert rules.match("params/embed/embedding") == P("tp")
    assert rules.match("params/head/kernel") == P(None, "tp")
    same_on_the_mesh(loss, params, tokens, rules, mesh)


@pytest.mark.parametrize("name", ["transformer_layer_{}", "block{}", "h/{}", "{}_mlp"])
def test_layers_of_one_kind_have_one_rule(name):
    """However their names have numbers; weights that numbers tell apart have rules of their own."""

    def loss(params, x):
        for layer in range(12):
            w = params[name.format(layer)]["mlp_1"]
            x = x + (jnp.tanh(x @ w["w1"]) * (x @ w["w3"])) @ w["w2"]
        return jnp.sum(x**2)

    weights = {"w1": F32((16, 32)), "w2": F32((32, 16)), "w3": F32((16, 32))}
    params = {name.format(layer): {"mlp_1": weights} for layer in range(12)}
    said = []
    rules = infer_layout(loss, params, F32((8, 16)), make_mesh("dp=2,tp=4"), show=said.append)
    layers = name.format(r"\d+")
    columns, rows = P(None, "tp"), P("tp")
    assert dict(rules) == {
        f"{layers}/mlp_1/w1": columns,
        f"{layers}/mlp_1/w2": rows,
        f"{layers}/mlp_1/w3": columns,
    }
    assert sum("shared by" in line for line in said) == 3
    assert len(rules.layout(params, make_mesh("dp=2,tp=4"))) == 36


def test_equinox_and_nnx_models():
    shaped, key = eqx.filter_eval_shape, jax.random.key(0)  # nothing is computed
    mlp, x = shaped(lambda: eqx.nn.MLP(8, 8, 32, 2, key=key)), F32((4, 8))

    def loss(model, x):
        return jnp.sum(jax.vmap(model)(x) ** 2)

    rules = infer_layout(loss, mlp, x, make_mesh("dp=2,tp=4"), show=None)
    found = [rules.match(f"layers/{i}/weight") for i in range(3)]
    # Columns and rows of [out, in], beginning with the first or with the second.
    assert found in ([P("tp"), P(None, "tp"), P("tp")], [P(), P("tp"), P(None, "tp")])

    attention = shaped(lambda: eqx.nn.MultiheadAttention(4, 8, key=key))  # asks for its dropout

    def attended(model, x):
        return jnp.sum(jax.vmap(lambda y: model(y, y, y))(x) ** 2)

    rules = infer_layout(attended, attention, F32((4, 6, 8)), make_mesh("dp=2,tp=4"))
    assert rules.match("query_proj/weight") == P("tp")
    assert rules.match("output_proj/weight") == P(None, "tp")

    class Two(nnx.Module):
        def __init__(self):
            self.a = nnx.Linear(8, 32, rngs=nnx.Rngs(0))
            self.b = nnx.Linear(32, 8, rngs=nnx.Rngs(1))

        def __call__(self, x):
            return self.b(nnx.relu(self.a(x)))

    graph, state = nnx.split(nnx.eval_shape(Two))
    rules = infer_layout(
        lambda s, x: jnp.sum(nnx.merge(graph, s)(x) ** 2), state, x, make_mesh("tp=8"), show=None
    )
    assert rules.match("a/kernel") == P(None, "tp")
    assert rules.match("a/bias") == P("tp")
    assert rules.match("b/kernel") == P("tp")
    assert rules.match("b/bias") == P()


def test_layers_in_a_loop():
    params = {
        "up": jnp.ones((3, 8, 32)) / 9,
        "down": jnp.ones((3, 32, 8)) / 9,
        "scale": jnp.ones((3, 8)),
    }

    def loss(params, x):
        @jax.checkpoint
        def layer(x, w):
            return x + jnp.tanh((x * w["scale"]) @ w["up"]) @ w["down"], None

        return jnp.sum(lax.scan(layer, x, params)[0] ** 2)

    mesh = make_mesh("fsdp=2,tp=4")
    rules = infer_layout(loss, params, jnp.ones((4, 8)), mesh, show=None)
    assert rules["up"] == P(None, "fsdp", "tp")
    assert rules["down"] == P(None, "tp", "fsdp")
    same_on_the_mesh(loss, params, jnp.ones((4, 8)), rules, mesh)


def test_a_convolutional_model():
    class Convolutions(nn.Module):
        @nn.compact
        def __call__(self, x):
            x = nn.relu(nn.Conv(16, (3, 3), name="one")(x))
            x = nn.relu(nn.Conv(32, (3, 3), strides=2, name="two")(x))
            x = nn.Conv(32, (3, 3), feature_group_count=32, name="groups")(x)
            return nn.Dense(10, name="head")(x.mean((1, 2)))

    net, x = Convolutions(), jnp.ones((4, 8, 8, 3))
    params = jax.jit(net.init)(jax.random.key(0), x)

    def loss(params, x):
        return jnp.mean(net.apply(params, x) ** 2)

    mesh, said = make_mesh("dp=2,tp=4"), []
    rules = infer_layout(loss, params, x, mesh, show=said.append)
    assert any("unsure: a convolution in groups: dimensions of" in line for line in said)
    assert sum("tp" in rules[key] for key in rules) >= 2
    same_on_the_mesh(loss, params, x, rules, mesh)


def test_a_recurrent_model():
    rng = np.random.default_rng(0)
    params = {
        "inputs": rng.normal(size=(6, 16)).astype("float32") / 4,
        "state": rng.normal(size=(16, 16)).astype("float32") / 4,
        "head": rng.normal(size=(16, 8)).astype("float32"),
    }

    def loss(params, x):  # x [batch, time, features]
        def step(h, x):
            return jnp.tanh(x @ params["inputs"] + h @ params["state"]), None

        h = lax.scan(step, jnp.zeros((len(x), 16)), x.swapaxes(0, 1))[0]
        return jnp.mean((h @ params["head"]) ** 2)

    mesh, said, x = make_mesh("dp=2,tp=4"), [], rng.normal(size=(4, 5, 6)).astype("float32")
    rules = infer_layout(loss, params, x, mesh, show=said.append)
    assert any("unsure: a dimension that is twice in one array" in line for line in said)
    assert rules["head"] == P(None, "tp")
    assert rules["state"] == P()
    same_on_the_mesh(loss, params, x, rules, mesh)


def test_roles_of_axes():
    def loss(params, x):
        return jnp.sum((x @ params["a"]) @ params["b"])

    params, x = {"a": F32((4, 16)), "b": F32((16, 4))}, F32((8, 4))
    with pytest.raises(ValueError, match=r"^infer_layout: the mesh has no axes; make one"):
        infer_layout(loss, params, x, Mesh(np.array(jax.devices()[0]), ()))
    mesh = make_mesh("left=2,right=4")
    with pytest.raises(
        ValueError, match=r"mesh axis 'left' has no role that its name tells; say it"
    ):
        infer_layout(loss, params, x, mesh)
    roles = {"left": "fully sharded", "right": "tensor"}
    rules = infer_layout(loss, params, x, mesh, roles=roles, show=None)
    assert dict(rules) == {"a": P("left", "right"), "b": P("right", "left")}
    with_short = make_mesh("stage=1,left=2,right=4,context=1")  # which need no role
    assert infer_layout(loss, params, x, with_short, roles=roles) == rules
    with pytest.raises(ValueError, match=r"^infer_layout: roles has 'tpp', and the mesh {"):
        infer_layout(loss, params, x, mesh, roles={**roles, "tpp": "tensor"})
    said, half = [], jax.tree.map(lambda s: jax.ShapeDtypeStruct(s.shape, jnp.bfloat16), params)
    infer_layout(loss, half, x, mesh, roles=roles, show=said.append)
    assert said[0].endswith("; left: the largest dimension that is left")
    assert said[-5:-1] == [
        "this map: 32 B a device",
        "without fully sharding: 64 B a device",
        "fully sharded over all axes: 32 B a device",
        "replicated: 256 B a device",
    ]
    with pytest.raises(TypeError, match="infer_layout: function must be a function, got 3"):
        infer_layout(3, params, x, mesh, roles=roles)
    with pytest.raises(TypeError, match="mesh must be a jax"):
        infer_layout(loss, params, x, 8)


def test_the_fastest_of_a_few_maps_on_a_described_chip():
    """With few rows their sums travel, and this map is; `test_not_behind` has one that is not."""

    def loss(params, x):
        for _ in range(params["times"]):
            x = jnp.tanh(x @ params["up"]) @ params["down"]
        return params["act"](x).astype(jnp.float32).sum()

    weights = {"up": (512, 1024), "down": (1024, 512)}
    params = {name: jax.ShapeDtypeStruct(s, jnp.bfloat16) for name, s in weights.items()}
    params |= {"act": jnp.tanh, "times": 1}  # no array, and a number
    x, said = jax.ShapeDtypeStruct((64, 512), jnp.bfloat16), []
    mesh = AbstractMesh((4,), ("tp",))
    rules = infer_layout(loss, params, x, mesh, target="v5e:2x2", show=said.append)
    own, sharded, whole = said[3:6]
    assert own.startswith("this map: 512 KiB a device, a step takes ")
    assert sharded.startswith("fully sharded over all axes: 512 KiB a device, a step takes ")
    assert whole.startswith("replicated: 2 MiB a device, a step takes ")
    assert len(said) == 6
    assert (rules["up"], rules["down"]) == (P(None, "tp"), P("tp"))


def test_a_map_that_is_not_for_the_batch_is_said_to_be_not():
    def loss(params, x):
        return jnp.sum(jnp.tanh(x @ params["a"]) @ params["b"])

    params, x, said = {"a": F32((256, 512)), "b": F32((512, 256))}, F32((3, 256)), []
    mesh = AbstractMesh((4,), ("tp",))
    rules = infer_layout(loss, params, x, mesh, target="v5e:2x2", show=said.append)
    assert dict(rules) == {"a": P(None, "tp"), "b": P("tp")}
    assert "replicated: 1 MiB a device, infer_layout: argument 1 of the step" in said[-1]


# -- what is cut ----------------------------------------------------------------------------------

ROWS = F32((4, 16, 32))


def parts_apart(y):
    return y[..., ::2], y[..., 1::2]


@pytest.mark.parametrize("halves", [lambda y: jnp.split(y, 2, -1), parts_apart])
def test_a_fused_projection_is_cut_and_said_to_be(halves):
    def loss(params, x):
        gate, up = halves(x @ params["gate_up"])
        return jnp.sum(((jax.nn.silu(gate) * up) @ params["down"]) ** 2)

    params, said = {"gate_up": F32((32, 256)), "down": F32((128, 32))}, []
    rules = infer_layout(loss, params, ROWS, make_mesh("dp=2,tp=4"), show=said.append)
    assert dict(rules) == {"gate_up": P(None, "tp"), "down": P("tp")}
    (line,) = [line for line in said if line.startswith("unsure")]
    assert line.startswith(("unsure: split of a sharded", "unsure: slice of a sharded"))
    assert line.endswith("whose parts move between devices: dimensions of gate_up")


def test_parts_of_several_sizes_and_heads():
    """A projection to queries, keys and values: fewer heads of keys, all of which 4 divides."""

    def loss(params, x):
        q, k, v = jnp.split(x @ params["qkv"], [64, 96], -1)
        q, k, v = (y.reshape(*x.shape[:2], -1, 8) for y in (q, k, v))
        scores = jax.nn.softmax(jnp.einsum("bqhge,bkhe->bhgqk", q.reshape(4, 16, 4, 2, 8), k))
        made = jnp.einsum("bhgqk,bkhe->bqhge", scores, v).reshape(4, 16, 64)
        return jnp.sum((x + made @ params["out"]) ** 2)

    params = {"qkv": F32((32, 128)), "out": F32((64, 32))}
    rules = infer_layout(loss, params, ROWS, make_mesh("dp=2,tp=4"))
    assert dict(rules) == {"qkv": P(None, "tp"), "out": P("tp")}


def test_what_is_cut_and_goes_on_whole_is_not_sharded():
    def loss(params, x):  # keys and values of one small state, and a part of it by itself
        both = x @ params["into"]
        state, part = both[..., :12], both[..., 12:]
        out = jnp.tanh(state @ params["from"]) @ params["out"]
        return jnp.sum((out + jnp.tanh(part) @ params["rest"]) ** 2)

    shapes = {"into": (32, 16), "from": (12, 64), "out": (64, 32), "rest": (4, 32)}
    params, said = {name: F32(shape) for name, shape in shapes.items()}, []
    rules = infer_layout(loss, params, ROWS, make_mesh("dp=2,tp=4"), show=said.append)
    assert (rules["into"], rules["rest"]) == (P(), P())
    assert (rules["from"], rules["out"]) == (P(None, "tp"), P("tp"))
    assert "unsure: slice of a dimension that stays unsharded: dimensions of into" in said


def test_projections_along_a_dimension_of_their_own():
    def loss(params, x):
        gate, up = jnp.einsum("btd,cdf->cbtf", x, params["both"])  # of two, one for each
        x = x + (jax.nn.gelu(gate) * up) @ params["down"]
        return jnp.sum(jnp.stack([x, x]) ** 2)

    params = {"both": F32((2, 32, 64)), "down": F32((64, 32))}
    rules = infer_layout(loss, params, ROWS, make_mesh("dp=2,tp=4"))
    assert dict(rules) == {"both": P(None, None, "tp"), "down": P("tp")}


def test_tables_by_their_rows_or_whole():
    def loss(params, tokens):
        return jnp.sum(jnp.tanh(params["table"][tokens] @ params["up"]) @ params["down"])

    weights = {"up": F32((32, 64)), "down": F32((64, 32))}
    tokens, mesh = jax.ShapeDtypeStruct((96,), jnp.int32), make_mesh("fsdp=2,tp=4")
    for words, spec in ((48, P(("tp", "fsdp"))), (12, P("tp")), (50, P("fsdp")), (51, P())):
        said = []
        rules = infer_layout(
            loss, weights | {"table": F32((words, 32))}, tokens, mesh, show=said.append
        )
        assert rules["table"] == spec
        assert (rules["up"], rules["down"]) == (P("fsdp", "tp"), P("tp", "fsdp"))
        text = "unsure: 2 devices of 'fsdp' do not divide rows that are looked up: dimensions of"
        assert any(line.startswith(text) for line in said) == ("fsdp" not in str(spec))


def test_what_a_loop_carries_is_constrained_and_nothing_is_printed_unless_asked(capsys):
    def loss(params, x):  # time first: the batch's rows are the second dimension
        return jnp.sum(lax.scan(lambda x, w: (x + x @ w, None), x.swapaxes(0, 1), params["w"])[0])

    params, x, mesh = {"w": F32((3, 32, 32))}, ROWS, make_mesh("fsdp=2,tp=4")
    rules = infer_layout(loss, params, x, mesh)
    assert not any(capsys.readouterr())
    assert dict(rules.results or {}) == {"residual": P(None, "fsdp")}
    assert "results={'residual': P" in repr(rules).replace("PartitionSpec(", "P(")
    infer_layout(loss, params, x, mesh, show=print)
    assert (
        "unsure: the compiler may shard activations as it does weights; begin each layer, and"
        in (capsys.readouterr().out)
    )
    for other in ("dp=2,tp=4", "fsdp=1,tp=8"):
        assert infer_layout(loss, params, x, make_mesh(other)).results is None


def test_sizes_that_no_plain_map_divides():
    params = {"a": F32((3, 5)), "b": F32((5, 3))}
    rules = infer_layout(
        lambda p, x: jnp.sum(x @ p["a"] @ p["b"]), params, F32((8, 3)), make_mesh("tp=8")
    )
    assert set(rules.values()) == {P()}
