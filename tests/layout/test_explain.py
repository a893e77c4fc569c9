"""What a layout costs on a described chip, and the square weight that is given the wrong way round.

Only a compiler's eye can see that one: all its sizes divide, and the step computes the same.
"""

import json

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.layout import REPLICATED, LayoutError, LayoutMap, Padded
from jaxpar.schedule import target
from jaxpar.tools.layouts.dimensions import Dimensions
from jaxpar.tools.layouts.rule_candidates import candidates, shapes_of

MESH = AbstractMesh((2, 2), ("fsdp", "tp"))


def of_shape(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)


# -- a transformer of square weights -----------------------------------------------------------

WIDTH = 256
SQUARE = {
    "embedding": ("tp", None),
    "layers/.*/(query|key|value)": ("fsdp", "tp"),
    "layers/.*/output": ("tp", "fsdp"),
    "layers/.*/up": ("fsdp", "tp"),
    "layers/.*/down": ("tp", "fsdp"),
    ".*norm": REPLICATED,
    "logits": ("fsdp", "tp"),
}


def transformer():
    layer = {
        name: of_shape(WIDTH, WIDTH) for name in ("query", "key", "value", "output", "up", "down")
    }
    layer["norm"] = of_shape(WIDTH)
    table = of_shape(WIDTH, WIDTH)
    return {"embedding": table, "layers": [layer] * 2, "logits": table}


def attention(x, weights):
    query, key, value = ((x @ weights[n]).reshape(*x.shape[:2], 4, -1) for n in WAYS)
    scores = jax.nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", query, key), axis=-1)
    return jnp.einsum("bhqk,bkhd->bqhd", scores, value).reshape(x.shape) @ weights["output"]


WAYS = ("query", "key", "value")


def loss(params, tokens):
    x = params["embedding"][tokens]
    for weights in params["layers"]:
        x = x + attention(x * weights["norm"], weights)
        x = x + jax.nn.gelu(x @ weights["up"]) @ weights["down"]
    logits = jax.nn.log_softmax(x @ params["logits"], axis=-1)
    return -jnp.mean(jnp.take_along_axis(logits, tokens[..., None], axis=-1))


def at_odds(rules, step, params, *args, batch=None, mesh=MESH):
    """The edits that rules at odds with others would get, without compiling them."""
    layout = LayoutMap(rules, batch=batch).layout(params, mesh)
    seen = Dimensions.of(lambda params, args: step(params, *args), layout.shapes, args)
    found = []
    for candidate in candidates(layout, seen, shapes_of(args, args), dict):
        layout = candidate.of(layout)
        changed = next(array for array in layout.values() if array.rule == candidate.rule)
        found.append((candidate.rule, tuple(changed.spec), candidate.disagrees))
    return found


@pytest.mark.parametrize("wrong", [key for key in SQUARE if SQUARE[key] != REPLICATED])
@pytest.mark.parametrize("differentiated", [False, True])
def test_each_exchanged_square_weight_is_at_odds(wrong, differentiated):
    step = jax.grad(loss) if differentiated else loss
    rules = SQUARE | {wrong: SQUARE[wrong][::-1]}
    tokens = of_shape(4, 64, dtype=jnp.int32)
    ((rule, spec, text),) = at_odds(rules, step, transformer(), tokens, batch=P("fsdp"))
    assert (rule, spec) == (wrong, SQUARE[wrong])
    assert text.startswith("its dimension")
    assert " is multiplied with " in text


def test_right_maps_are_not():
    tokens = of_shape(4, 64, dtype=jnp.int32)
    assert not at_odds(SQUARE, jax.grad(loss), transformer(), tokens, batch=P("fsdp"))
    over_tp = {key: tuple(n if n == "tp" else None for n in spec) for key, spec in SQUARE.items()}
    assert not at_odds(over_tp, loss, transformer(), tokens, mesh=AbstractMesh((4,), ("tp",)))


def test_two_exchanged_weights_are_two_edits():
    wrong = {"layers/.*/up": ("tp", "fsdp"), "layers/.*/output": ("fsdp", "tp")}
    tokens = of_shape(4, 64, dtype=jnp.int32)
    found = at_odds(SQUARE | wrong, loss, transformer(), tokens, batch=P("fsdp"))
    assert {rule: spec for rule, spec, _ in found} == {key: SQUARE[key] for key in wrong}


# -- compiled -----------------------------------------------------------------------------------


def scanned_loss(params, x):
    def layer(x, weights):
        return x + jnp.tanh(x @ weights["up"]) @ weights["down"], None

    return jnp.mean(jax.lax.scan(layer, x, params["layers"])[0].astype(jnp.float32) ** 2)


def training_step(params, moments, x):
    grads = jax.grad(scanned_loss)(params, x)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, grads)
    return jax.tree.map(lambda p, m: p - 0.1 * m, params, moments), moments


STACKED = {"layers": {"up": of_shape(3, 1024, 1024), "down": of_shape(3, 1024, 1024)}}
X = of_shape(256, 1024)
AXES = {"layers": None, "embed": "fsdp", "hidden": "tp"}


def stacked(up):
    rules = {"layers/up": up, "layers/down": "layers hidden embed"}
    return LayoutMap(rules, axes=AXES, batch=P("fsdp")).layout(STACKED, MESH)


def test_collectives_of_a_training_step_by_weight():
    layout = stacked("layers embed hidden")
    found = layout.explain(training_step, "v5e:2x2", layout.like(STACKED), X, tries=0)
    assert not found.tried
    assert not found.flagged
    kinds = {(cost.path, cost.what, cost.collective): cost for cost in found.costs}
    for path in ("layers/up", "layers/down"):
        # Three layers: the weights forward and backward, as far as they are not kept.
        assert kinds[path, "the weight", "fsdp all-gather"].times in (3, 6)
        # One for each, or one for both.
        assert kinds[path, "its gradient", "fsdp reduce-scatter"].times in (1.5, 3)
        assert kinds[path, "its gradient", "fsdp reduce-scatter"].bytes == 3 * 1024 * 512
    # Megatron's two sums: of the layer's output forward, of its input's gradient backward.
    assert kinds["layers/down", "its product", "tp all-reduce"].times == 3
    assert kinds["layers/up", "its product", "tp all-reduce"].times == 3
    assert set(found.of("layers/up")) == {c for k, c in kinds.items() if k[0] == "layers/up"}
    with pytest.raises(KeyError, match=r"no array of path 'layers/upp'; did you mean 'layers/up'"):
        found.of("layers/upp")
    # Nothing is lost: the costs are the timeline's.
    assert sum(cost.bytes for cost in found.costs) == pytest.approx(found.timeline.sent_bytes)
    assert sum(cost.exposed for cost in found.costs) == pytest.approx(found.timeline.exposed)
    table = str(found).splitlines()
    assert table[0].split()[:4] == ["weight", "spec", "moves", "collective"]
    assert table[-1].startswith("a step on v5e:2x2 (fsdp=2, tp=2), by the compiler's cycles: ")
    assert len(found.text(2).splitlines()) == 5
    assert "rows more" in found.text(2)
    written = json.loads(found.json())
    assert written["seconds"] == found.timeline.total
    assert len(written["costs"]) == len(kinds)


def test_an_exchanged_weight_is_flagged_with_its_edit_and_what_it_gains():
    def forward(params, x):
        return jnp.tanh(x @ params["up"]) @ params["down"]

    params = {"up": of_shape(1024, 1024), "down": of_shape(1024, 1024)}
    rules = LayoutMap({"up": ("tp", None), "down": ("tp", None)}, batch=P())
    layout = rules.layout(params, AbstractMesh((4,), ("tp",)))
    found = layout.explain(forward, "v5e:2x2", of_shape(512, 1024), tries=1)
    (exchange,) = found.flagged
    assert (exchange.rule, exchange.after) == ("up", P(None, "tp"))
    assert exchange.is_faster
    assert exchange.seconds_after < 0.99 * exchange.seconds
    assert exchange.seconds == found.timeline.total
    assert (
        "its dimension 0, over 'tp', is multiplied with a dimension of the data"
        in exchange.disagrees
    )
    assert "'up': tp, - -> -, tp: the step takes" in str(found)
    assert "faster with two dimensions swapped:" in str(found)
    right = (rules | {"up": (None, "tp")}).layout(params, AbstractMesh((4,), ("tp",)))
    after = right.explain(forward, "v5e:2x2", of_shape(512, 1024), tries=0)
    assert after.timeline.total == exchange.seconds_after


def test_a_weight_that_is_gathered_where_another_layout_would_not():
    """The table's rows are looked up: columns over tp are gathered for the logits."""

    def forward(params, tokens):
        return params["table"][tokens] @ params["table"].T

    params = {"table": of_shape(4096, 1024)}
    layout = LayoutMap({"table": (None, "tp")}).layout(params, AbstractMesh((4,), ("tp",)))
    found = layout.explain(forward, "h100:4", of_shape(8, dtype=jnp.int32))
    (exchange,) = found.tried
    assert exchange.after == P("tp", None)
    assert found.target.platform == "gpu"
    assert exchange.seconds != exchange.seconds_after


def test_a_table_whose_features_lie_over_the_batchs_axis():
    """Activations move back and forth: the edit is the table's, and no pair is parted for it."""

    def loss(params, tokens):
        x = params["table"][tokens]
        x = x + jnp.tanh(x @ params["up"]) @ params["down"]
        logits = (x @ params["table"].T).astype(jnp.float32)
        return jnp.mean(jax.nn.logsumexp(logits, axis=-1))

    shapes = {"table": (512, 128), "up": (128, 256), "down": (256, 128)}
    params = {name: of_shape(*shape) for name, shape in shapes.items()}
    pair = {"up": ("fsdp", "tp"), "down": ("tp", "fsdp")}
    tokens = of_shape(8, 128, dtype=jnp.int32)
    wrong = LayoutMap({"table": ("tp", "fsdp"), **pair}, batch=P("fsdp")).layout(params, MESH)
    found = wrong.explain(jax.value_and_grad(loss), "v5e:2x2", tokens, tries=2)
    table, *others = found.tried
    assert (table.rule, table.cause) == ("table", "features of what is looked up")
    assert table.after == P(("tp", "fsdp"), None)
    assert table.is_faster
    assert not [e for e in others if e.is_faster or e.disagrees]
    assert set(found.plain) == {"fully sharded over all axes", "replicated"}
    text = str(found)
    assert "activations travel to and from tables with features over the batch's axis:" in text
    best = min(table.seconds_after, *(e.seconds_after for e in found.tried))
    for name, seconds in found.plain.items():
        assert (f"plainer and faster: {name}, the step takes" in text) == (seconds < 0.99 * best)
    assert json.loads(found.json())["tried"][0]["cause"] == table.cause


def test_a_table_whose_rows_the_axis_does_not_divide_is_whole_over_it():
    params, tokens = {"table": of_shape(51, 64)}, of_shape(8, dtype=jnp.int32)
    layout = LayoutMap({"table": (None, ("tp", "fsdp"))}, batch=P("fsdp")).layout(params, MESH)
    seen = Dimensions.of(lambda p, t: p["table"][t[0]], layout.shapes, (tokens,))
    (candidate,) = candidates(layout, seen, shapes_of((tokens,), (tokens,)), dict)
    assert candidate.axes == ((), ("tp",))
    assert "its dimension 1 is sharded over 'fsdp', as the batch is" in candidate.disagrees


def test_loops_whose_length_depends_on_data_are_named():
    def forward(params, x):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 8, lambda x: x @ params["w"], x)

    layout = LayoutMap({"w": (None, "tp")}).layout(
        {"w": of_shape(128, 128)}, AbstractMesh((4,), ("tp",))
    )
    found = layout.explain(forward, "v5e:2x2", of_shape(8, 128), tries=0)
    assert "loops of an unknown number of iterations count once: while" in str(found)


def test_padded_weights_and_weights_of_several_kinds():
    params = {"up": of_shape(64, 250), "down": of_shape(250, 64), "scale": of_shape(64), "n": 3}
    rules = LayoutMap(
        {"up": (None, Padded("tp")), "down": (Padded("tp"), None), "scale|n": REPLICATED}
    )

    def forward(params, x):
        return (jnp.tanh(x @ params["up"]) @ params["down"]) * params["scale"]

    layout = rules.layout(params, make_mesh("tp=4", devices=jax.devices()[:4]))
    found = layout.explain(forward, target("v5e:2x2", "tp=4"), of_shape(32, 64))
    assert {cost.path for cost in found.costs} == {"down"}
    assert not found.tried  # what is padded has its place


def test_a_step_made_from_the_layout():
    """Specs of shard_map, and constraints, are of the layout on the target's mesh."""

    def make(layout):
        def local(params, x):  # rows of down on each device
            return jax.lax.psum(jnp.tanh(x @ params["up"]) @ params["down"], "tp")

        return jax.shard_map(local, in_specs=(layout.specs, P()), out_specs=P())

    params = {"up": of_shape(256, 1024), "down": of_shape(1024, 256)}
    rules = LayoutMap({"up": (None, "tp"), "down": ("tp", None)})
    layout = rules.layout(params, AbstractMesh((4,), ("tp",)))
    found = layout.explain(
        make,
        "v5e:2x2",
        jax.ShapeDtypeStruct((64, 256), jnp.bfloat16, sharding=P()),
        from_layout=True,
    )
    assert {(cost.path, cost.what, cost.collective) for cost in found.costs} == {
        ("down", "its product", "tp all-reduce")
    }
    # Specs that the step has of its own, and that are not the layout's, move the weight.
    other = (rules | {"up": ("tp", None)}).layout(params, AbstractMesh((4,), ("tp",)))
    moved = other.explain(make(layout), "v5e:2x2", of_shape(64, 256), tries=0)
    assert "the weight" in {cost.what for cost in moved.of("up")}


def test_states_that_are_like_no_parameter_keep_rules_of_their_own():
    params = {"w": of_shape(64, 256)}
    layout = LayoutMap({"w": (None, "tp")}, batch=P()).layout(params, AbstractMesh((4,), ("tp",)))
    moments = {"w": of_shape(64, 256), "rows": of_shape(64, 1)}
    state = layout.like(moments, rules=LayoutMap({"rows": ("tp", None)}))

    def step(params, state, x):
        return {"w": state["w"] + params["w"]}, (x @ params["w"]) * state["rows"].sum()

    found = layout.explain(step, "v5e:2x2", state, X.update(shape=(8, 64)), tries=0)
    # A scalar's sum is for no weight: one of 64 rows' sums.
    assert {(cost.path, cost.collective) for cost in found.costs} == {(None, "tp all-reduce")}


def test_states_that_are_like_a_parameter_keep_rules_of_their_own():
    """ZeRO-1: moments in parts are added up in parts, and the weight is gathered after that."""
    layout = LayoutMap({"w": REPLICATED}, batch=P("dp")).layout(
        {"w": of_shape(256, 256)}, AbstractMesh((4,), ("dp",))
    )
    moments = {"mu": {"w": of_shape(256, 256)}}

    def step(params, state, x):
        gradient = jax.grad(lambda w: jnp.sum(jnp.tanh(x @ w)))(params["w"])
        moment = state["mu"]["w"] + gradient
        return {"w": params["w"] - moment}, {"mu": {"w": moment}}

    def collectives(rules):
        found = layout.explain(
            step, "v5e:2x2", layout.like(moments, rules), of_shape(64, 256), tries=0
        )
        return {cost.collective.split()[-1] for cost in found.costs}

    assert collectives(None) == {"all-reduce"}
    assert "all-gather" in collectives(LayoutMap({"mu/w": ("dp", None)}))


def test_constraints_of_the_layout_hold_on_the_target():
    params = {"up": of_shape(64, 256), "down": of_shape(256, 64)}
    mesh = make_mesh("tp=4", devices=jax.devices()[:4])
    results = {"hidden": (None, None)}
    rules = LayoutMap({"up": (None, "tp"), "down": ("tp", None)}, results=results, batch=P())
    layout = rules.layout(params, mesh)

    def step(params, x):
        return layout.constrain(x @ params["up"], "hidden") @ params["down"]

    found = layout.explain(step, "v5e:2x2", of_shape(8, 64), tries=0)
    assert "all-gather" in {cost.collective.split()[-1] for cost in found.costs}


def test_wrong_calls():
    params = {"w": of_shape(64, 64)}
    layout = LayoutMap({"w": ("tp", None)}, batch=P("tp")).layout(
        params, make_mesh("tp=4", devices=jax.devices()[:4])
    )

    def step(params, x):
        return x @ params["w"]

    with pytest.raises(TypeError, match=r"Layout.explain: step must be a function, got 3"):
        layout.explain(3, "v5e:2x2")
    with pytest.raises(
        TypeError, match=r"Layout.explain: target must be a name such as 'v5p:4x4x4'"
    ):
        layout.explain(step, 4)
    with pytest.raises(ValueError, match=r"Layout.explain: the target's mesh has \{'dp': 4\}, and"):
        layout.explain(step, target("v5e:2x2", "dp=4"))
    with pytest.raises(
        ValueError, match=r"Layout.explain: argument 1 of the step: .* partitioned 4 times"
    ):
        layout.explain(step, "v5e:2x2", of_shape(6, 64))
    with pytest.raises(ValueError, match="tries=-1 must be at least 0"):
        layout.explain(step, "v5e:2x2", tries=-1)
    with pytest.raises(ValueError, match="'v5e:4x4' has 16 devices, and the layout's mesh 4"):
        layout.explain(step, "v5e:4x4")
    with pytest.raises(LayoutError, match=r"'odd' bfloat16.3. is like no parameter"):
        layout.explain(step, "v5e:2x2", layout.like({"odd": of_shape(3)}))
