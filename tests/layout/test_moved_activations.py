"""No map that is shipped, taught or inferred has activations move between rows and features.

Where a table's features lie over an axis of the batch, so does what is looked up in it, and the
partitioner moves activations back and forth, of which newer ones warn. Here each map is compiled.
"""

from functools import partial

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P
from notebooks import layouts
from partitioner import compiled, whole_batches

from jaxpar import make_mesh
from jaxpar.layout import (
    LayoutMap,
    data_parallel,
    fully_sharded,
    infer_layout,
    tensor_parallel,
)

# All differ, and differ in their parts on the meshes: shapes tell what an array is.
ROWS, LENGTH, WIDTH, HIDDEN, WORDS, EXPERTS = 56, 13, 64, 160, 96, 8
HEADS, KV_HEADS, SIZE = 8, 8, 4
FEATURES = {WIDTH, HIDDEN, WORDS, WIDTH // 2, WIDTH // 4, WIDTH // 8}
BOTH_AXES = "fsdp=2,tp=4"
F32 = partial(jax.ShapeDtypeStruct, dtype=jnp.float32)


@pytest.fixture(autouse=True)
def promotion():
    with jax.numpy_dtype_promotion("standard"):
        yield


# -- models ---------------------------------------------------------------------------------------


def norm(x, scale):
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6) * scale


def rotated(x):
    angles = jnp.arange(x.shape[1])[:, None, None] * 0.1 ** jnp.arange(SIZE // 2)
    a, b = jnp.split(x, 2, axis=-1)
    sin, cos = jnp.sin(angles), jnp.cos(angles)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1)


def attention(x, w):
    if "qkv" in w:
        q, k, v = jnp.split(x @ w["qkv"], [HEADS * SIZE, (HEADS + KV_HEADS) * SIZE], axis=-1)
    else:
        q, k, v = (x @ w[name] for name in ("query", "key", "value"))
    q, k, v = (y.reshape(*x.shape[:2], -1, SIZE) for y in (q, k, v))
    q, k = rotated(q), rotated(k)
    q = q.reshape(*x.shape[:2], k.shape[2], -1, SIZE)
    scores = jnp.einsum("bqhge,bkhe->bhgqk", q, k)
    scores = jnp.where(jnp.tri(x.shape[1], dtype=bool), scores, -1e9)
    made = jnp.einsum("bhgqk,bkhe->bqhge", jax.nn.softmax(scores), v)
    return made.reshape(*x.shape[:2], -1) @ w["output"]


def experts(x, w):
    rows = x.reshape(-1, x.shape[-1])
    weights, chosen = lax.top_k(jax.nn.softmax(rows @ w["router"]), 2)
    order = jnp.argsort(chosen.reshape(-1))
    sizes = jnp.bincount(chosen.reshape(-1), length=EXPERTS)
    made = jax.nn.silu(lax.ragged_dot(rows[order // 2], w["experts"]["up"], sizes))
    made = lax.ragged_dot(made, w["experts"]["down"], sizes)
    made *= weights.reshape(-1)[order][:, None]
    return jnp.zeros_like(rows).at[order // 2].add(made).reshape(x.shape)


def layer(x, w):
    x = x + attention(norm(x, w["norm"]), w)
    y = norm(x, w["other_norm"])
    if "experts" in w:
        return x + experts(y, w)
    if "gate_up" in w:
        gate, up = jnp.split(y @ w["gate_up"], 2, axis=-1)
    else:
        gate, up = y @ w["gate"], y @ w["up"]
    return x + (jax.nn.silu(gate) * up) @ w["down"]


def loss(params, batch, constrained=lambda x: x):
    x = params["embedding"][batch["tokens"]]
    if "positions" in params:
        x = x + params["positions"][: x.shape[1]]
    if isinstance(params["layers"], list):
        for w in params["layers"]:
            x = layer(x, w)
    else:
        x = lax.scan(lambda x, w: (layer(constrained(x), w), None), x, params["layers"])[0]
    head = params["embedding"].T if "head" not in params else params["head"]
    logits = norm(x, params["last_norm"]) @ head
    chosen = jnp.take_along_axis(logits, batch["labels"][..., None], axis=-1)[..., 0]
    return jnp.mean(jax.nn.logsumexp(logits, axis=-1) - chosen)


BATCH = {name: jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32) for name in ("tokens", "labels")}


def decoder(*, tied=True, kv_heads=4, fused=False, scanned=False, positions=False, mixture=False):
    """Shapes of a decoder's parameters."""
    w = {"norm": F32((WIDTH,)), "other_norm": F32((WIDTH,)), "output": F32((HEADS * SIZE, WIDTH))}
    if fused:
        w["qkv"] = F32((WIDTH, (HEADS + 2 * KV_HEADS) * SIZE))
        w |= {"gate_up": F32((WIDTH, 2 * HIDDEN)), "down": F32((HIDDEN, WIDTH))}
    else:
        w["query"] = F32((WIDTH, HEADS * SIZE))
        w |= {name: F32((WIDTH, kv_heads * SIZE)) for name in ("key", "value")}
        w |= {name: F32((WIDTH, HIDDEN)) for name in ("gate", "up")}
        w["down"] = F32((HIDDEN, WIDTH))
    if mixture:
        w = {name: x for name, x in w.items() if name not in ("gate", "up", "down")}
        w["router"] = F32((WIDTH, EXPERTS))
        w["experts"] = {"up": F32((EXPERTS, WIDTH, HIDDEN)), "down": F32((EXPERTS, HIDDEN, WIDTH))}
    params = {"embedding": F32((WORDS, WIDTH)), "last_norm": F32((WIDTH,)), "layers": [w]}
    if scanned:
        params["layers"] = jax.tree.map(lambda x: F32((2, *x.shape)), w)
    if positions:
        params["positions"] = F32((2 * LENGTH, WIDTH))
    if not tied:
        params["head"] = F32((WIDTH, WORDS))
    return params


MODELS = {
    "tied": decoder(),
    "untied, scanned": decoder(tied=False, scanned=True),
    "fused": decoder(fused=True, tied=False),
    "positions": decoder(positions=True, kv_heads=8),
}


# -- maps -----------------------------------------------------------------------------------------


def moved(rules, function, params, batch, mesh):
    """What the partitioner warns of in a step with gradients, and batches that it gathers."""
    layout = rules.layout(params, mesh, strict=False)
    if rules.results is not None:  # as the map asks for
        function = partial(function, constrained=lambda x: layout.constrain(x, "residual"))
    over = NamedSharding(mesh, rules.batch.layout if rules.batch else P())
    data = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=over), batch)
    step = jax.jit(jax.value_and_grad(function), out_shardings=(None, layout.shardings))
    program, warned = compiled(step, layout.shapes, data)
    return warned, whole_batches(program, ROWS, FEATURES) if over.spec else []


# All models over both axes; of one axis alone, which is a part of that, each with one.
OF_ONE_AXIS = {
    "fsdp=8": ("tied",),
    "tp=8": ("positions",),
    "dp=2,tp=4": ("fused",),
}


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, BOTH_AXES) for name in MODELS),
        *((name, mesh) for mesh, names in OF_ONE_AXIS.items() for name in names),
    ],
)
def test_inferred_maps(name, mesh):
    mesh, params = make_mesh(mesh), MODELS[name]
    rules = infer_layout(loss, params, BATCH, mesh)
    assert (rules.results is not None) == ("fsdp" in mesh.shape)
    assert rules["embedding"] in (P(tuple(n for n in ("tp", "fsdp") if n in mesh.shape)), P("tp"))
    assert moved(rules, loss, params, BATCH, mesh) == ([], [])


def classes(params, batch, constrained=lambda x: x):
    """A table that is multiplied with ones and zeros, and few features of each row at the end."""
    x = constrained(jax.nn.one_hot(batch["tokens"], WORDS) @ params["embedding"])
    x = constrained(layer(x, params["layers"][0]))
    return jnp.mean(jax.nn.logsumexp(constrained(x.mean(1)) @ params["classes"], axis=-1))


def test_what_a_map_says_of_activations_keeps_them_in_place():
    params, mesh = MODELS["tied"] | {"classes": F32((WIDTH, 16))}, make_mesh(BOTH_AXES)
    del params["last_norm"]
    rules = infer_layout(classes, params, BATCH, mesh)
    assert rules["embedding"] == P(("tp", "fsdp"))
    assert moved(rules, classes, params, BATCH, mesh) == ([], [])
    without = LayoutMap(dict(rules), batch=rules.batch.layout)
    assert moved(without, classes, params, BATCH, mesh)[1]


def test_an_inferred_map_of_experts():
    params, mesh = decoder(mixture=True), make_mesh("ep=4,tp=2")
    rules = infer_layout(loss, params, BATCH, mesh)
    assert rules["layers/0/experts/up"] == P("ep", None, "tp")
    assert rules["layers/0/experts/down"] == P("ep", "tp")
    assert moved(rules, loss, params, BATCH, mesh)[0] == []


def strategies(params, mesh):
    """What the functions make that name tells the roles of arrays."""
    how = {"stacked": "layers/.*" if not isinstance(params["layers"], list) else ""}
    rules = None
    if "tp" in mesh.shape:
        rules = tensor_parallel(params, mesh, **how)
    if "fsdp" in mesh.shape:
        rules = fully_sharded(params, mesh, within=rules, **how)
    if "dp" in mesh.shape:
        rules = data_parallel(params, mesh, within=rules)
    if how["stacked"] and rules.batch:
        rules |= LayoutMap(results={"residual": rules.batch.layout})
    return rules


@pytest.mark.parametrize(
    ("name", "mesh"),
    [
        *((name, BOTH_AXES) for name in ("tied", "untied, scanned", "positions")),
        *((name, mesh) for mesh, names in OF_ONE_AXIS.items() for name in names if name != "fused"),
    ],
)
def test_maps_of_strategies(name, mesh):
    mesh, params = make_mesh(mesh), MODELS[name]
    assert moved(strategies(params, mesh), loss, params, BATCH, mesh) == ([], [])


def test_a_map_of_strategies_for_few_words():
    """More features than words: the table is sharded by its words all the same."""
    params, mesh = MODELS["tied"] | {"embedding": F32((WIDTH // 2, WIDTH))}, make_mesh("fsdp=8")
    rules = fully_sharded(params, mesh)
    assert rules["embedding"] == P("fsdp")
    assert moved(rules, loss, params, BATCH, mesh) == ([], [])


NOTEBOOK = layouts()


@pytest.mark.parametrize("mesh", NOTEBOOK["MESHES"])
def test_maps_of_the_notebook(mesh):
    axes, mesh = NOTEBOOK["MESHES"][mesh], make_mesh(mesh)
    over = tuple(name for name in ("dp", "fsdp") if name in mesh.shape)
    rules = LayoutMap(NOTEBOOK["RULES"], axes=axes, batch=P(over or None))
    tokens = jax.ShapeDtypeStruct((ROWS, LENGTH), jnp.int32)
    shapes = jax.eval_shape(NOTEBOOK["init"], jax.random.key(0))
    assert moved(rules, NOTEBOOK["loss"], shapes, tokens, mesh)[0] == []


def test_a_wrong_map_is_seen():
    """The features of a table over the batch's axis: what all tests of this file are about."""
    params, mesh = MODELS["tied"], make_mesh(BOTH_AXES)
    rules = infer_layout(loss, params, BATCH, mesh)
    for spec in (P("tp", "fsdp"), P(None, "fsdp")):
        wrong = LayoutMap(dict(rules) | {"embedding": spec}, batch=rules.batch.layout)
        warned, gathered = moved(wrong, loss, params, BATCH, mesh)
        assert gathered
        if jax.__version_info__ >= (0, 11):  # older ones move as much, and say nothing
            assert warned
