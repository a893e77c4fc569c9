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

from jaxpar import make_mesh
from jaxpar.layout import (
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
    assert "'mystery/kernel' float32[8,8] has no role that its name tells; say it: " in str(
        found.value
    )
    rules = tensor_parallel(params, make_mesh("tp=8"), columns="mystery/kernel", whole="odd")
    assert rules.match("mystery/kernel") == P(None, "tp")
    assert rules.match("odd") == P()


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


@pytest.mark.parametrize(
    "sizes", [(8, 1, 1), (4, 2, 1), (2, 2, 2), (1, 2, 4), (1, 1, 8), (1, 8, 1)]
)
def test_one_model_on_every_mesh(sizes):
    """Data, fully sharded and tensor parallel: two steps of Adam are those of one device."""
    mesh = make_mesh(dict(zip(("dp", "fsdp", "tp"), sizes, strict=True)))
    net, optimizer = Net(), optax.adam(1e-2)
    tokens = np.random.default_rng(0).integers(0, 24, (8, 12))
    shapes = jax.eval_shape(net.init, jax.random.key(0), tokens)
    rules = tensor_parallel(shapes, mesh)
    rules = fully_sharded(shapes, mesh, within=rules)
    rules = data_parallel(shapes, mesh, within=rules)
    layout = rules.layout(shapes, mesh)
    sharded = [array.spec for array in layout.values() if array.shards > 1]
    assert (len(sharded) > 8) == (sizes[1] > 1 or sizes[2] > 1)

    def step(params, state, tokens):
        def loss(params):
            logits = net.apply(params, tokens[:, :-1])
            return optax.softmax_cross_entropy_with_integer_labels(logits, tokens[:, 1:]).mean()

        value, gradients = jax.value_and_grad(loss)(params)
        updates, state = optimizer.update(gradients, state, params)
        return optax.apply_updates(params, updates), state, value

    def train(params, state, tokens, **more):
        losses = []
        run = jax.jit(step, **more)
        for _ in range(2):
            params, state, value = run(params, state, tokens)
            losses.append(float(value))
        return losses

    with jax.numpy_dtype_promotion("standard"):
        start = jax.jit(net.init)(jax.random.key(0), tokens)
        expected = train(start, jax.jit(optimizer.init)(start), tokens)
        states = layout.like(jax.eval_shape(optimizer.init, shapes))
        params = layout.place(start)
        state = jax.jit(optimizer.init, out_shardings=states.shardings)(params)
        out = (layout.shardings, states.shardings, None)
        losses = train(params, state, layout.place_batch(tokens), out_shardings=out)
    np.testing.assert_allclose(losses, expected, rtol=2e-5)
