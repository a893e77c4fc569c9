"""A rule of a layout that lays several arrays of all layers the wrong way round is one edit.

The model is a plain one of attention and MLPs with the names and the mistake of published maps:
queries, keys and values are sharded over the model's axis along the width, and not by heads.
"""

import re
from functools import cache
from math import inf

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar.tools.timeline.timeline
from jaxpar.layout import LayoutMap
from jaxpar.schedule import CompiledProgram, Memory, compile_for, explain, target, timeline
from jaxpar.tools.cli.explain_page import page_of
from jaxpar.tools.explain.causes import Rules
from jaxpar.tools.explain.edits import Edit, Edits
from jaxpar.tools.explain.explanation_text import gain
from jaxpar.tools.explain.exposed import Exposures
from jaxpar.tools.explain.trials import Budget, Trials
from jaxpar.tools.layouts.dimensions import Dimensions
from jaxpar.tools.layouts.rule_candidates import Data, candidates

LAYERS, WIDTH, HEADS, SIZE, HIDDEN, ROWS = 2, 256, 8, 32, 512, 512
KEYS = 4  # heads of keys and values
WRONG = ("model", "batch", None)
RULES = {
    "table": (("model", "batch"), None),
    r"layer_\d+/(query|key|value)/kernel": WRONG,
    r"layer_\d+/output/kernel": ("model", None, "batch"),
    r"layer_\d+/(up|gate)/kernel": ("batch", "model"),
    r"layer_\d+/down/kernel": ("model", "batch"),
    r"(layer_\d+/)?norm/scale": (),
}
MENDED = RULES | {r"layer_\d+/(query|key|value)/kernel": ("batch", "model", None)}


def shapes():
    def of(*shape):
        return {"kernel": jax.ShapeDtypeStruct(shape, jnp.bfloat16)}

    layer = {
        "query": of(WIDTH, HEADS, SIZE),
        "key": of(WIDTH, KEYS, SIZE),
        "value": of(WIDTH, KEYS, SIZE),
        "output": of(HEADS, SIZE, WIDTH),
        "up": of(WIDTH, HIDDEN),
        "gate": of(WIDTH, HIDDEN),
        "down": of(HIDDEN, WIDTH),
        "norm": {"scale": jax.ShapeDtypeStruct((WIDTH,), jnp.bfloat16)},
    }
    layers = {f"layer_{number}": layer for number in range(LAYERS)}
    table = jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.bfloat16)
    return {"table": table, **layers, "norm": layer["norm"]}


def layer(x, w):
    y = x * w["norm"]["scale"]
    query, key, value = (
        jnp.einsum("bsd,dhe->bshe", y, w[name]["kernel"]) for name in ("query", "key", "value")
    )
    key, value = (jnp.repeat(one, HEADS // KEYS, 2) for one in (key, value))
    scores = jax.nn.softmax(jnp.einsum("bshe,bthe->bhst", query, key))
    x = x + jnp.einsum("bhst,bthe,hed->bsd", scores, value, w["output"]["kernel"])
    hidden = jax.nn.silu(x @ w["gate"]["kernel"]) * (x @ w["up"]["kernel"])
    return x + hidden @ w["down"]["kernel"]


def loss(params, tokens):
    x = params["table"][tokens]
    for number in range(LAYERS):
        with jax.named_scope(f"layer_{number}"):
            x = layer(x, params[f"layer_{number}"])
    logits = (x * params["norm"]["scale"]) @ params["table"].T
    return jnp.mean(jax.nn.logsumexp(logits.astype(jnp.float32), axis=-1))


def step(params, moments, tokens):
    gradients = jax.grad(loss)(params, tokens)
    moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
    return jax.tree.map(lambda w, m: w - m, params, moments), moments


def step_of_lists(state, tokens):
    """The same, its state as lists of arrays in an order, as frameworks pass their variables."""
    tree = jax.tree.structure(shapes())
    params, moments = step(*map(tree.unflatten, state), tokens)
    return jax.tree.leaves(params), jax.tree.leaves(moments)


CHIPS = target("v5p:2x2x2", "batch=2,model=4")
TOKENS = jax.ShapeDtypeStruct((8, 128), jnp.int32, sharding=NamedSharding(CHIPS.mesh, P("batch")))


def laid(rules):
    layout = LayoutMap(rules, batch=P("batch")).layout(shapes(), CHIPS.mesh)
    return layout.shapes


@cache
def program():
    """What is compiled: the forward pass."""
    return compile_for(loss, CHIPS, laid(RULES), TOKENS)


def traced(function, *args):
    """A program that nobody compiles."""
    with jax.set_mesh(CHIPS.mesh):
        jaxpr = jax.jit(function).trace(*args).jaxpr
    return CompiledProgram(CHIPS, "", Memory(0, 0, 0, 0, 0), 0.0, jaxpr, function, args)


def mended(program, axis="model"):
    """The edits of what is known to be wrong."""
    return list(Edits(program).mended([], [axis]))


def test_the_edit_of_one_rule_is_tried_first():
    tried = []
    found = explain(program(), tries=1, progress=tried.append)
    edit = (
        "shard params['layer_#']['key']['kernel'] (2 arrays), params['layer_#']['query']['kernel'] "
        "(2 arrays), params['layer_#']['value']['kernel'] (2 arrays) by P('batch', 'model', None) "
        "in place of P('model', 'batch', None)"
    )
    assert tried == [edit]
    first = found.findings[0]
    assert (first.cause, first.edit, first.is_tried) == ("resharding", edit, True)
    assert "its dimension 0, over 'model', is multiplied with dimension" in first.why
    assert first.gain > 0.1 * found.timeline.total


def test_each_rule_speaks_once_and_what_is_at_odds_first():
    exposures = Exposures(program(), timeline(program()))
    rules = Rules(exposures, Edits(program()))
    causes = [[verdict.cause for verdict in rules.of(e)] for e in exposures.found()]
    assert ["resharding", "in disguise"] in [found[:2] for found in causes]
    for found in causes:
        assert len(found) == len(set(found))


def test_it_is_said_before_it_is_tried():
    found = explain(program(), tries=0)
    first = found.findings[0]
    assert (first.cause, first.is_tried, first.gain, first.tried) == ("resharding", False, 0.0, ())
    assert first.edit.endswith("by P('batch', 'model', None) in place of P('model', 'batch', None)")
    record = found.record()
    assert record["findings"][0]["gain"] is None
    text = " ".join(found.text().split())
    assert re.search(r"gain: not tried: \d+ more edits can be tried: raise tries", text)
    assert "gain: none" not in text


def test_an_optimizers_state_changes_with_its_weights():
    params = laid(RULES)
    (edit,) = mended(traced(step, params, params, TOKENS))
    assert "moments['layer_#']['key']['kernel'] (2 arrays)" in edit.text
    assert edit.text.count("arrays") == 4
    assert " and 2 more by P('batch', 'model', None) in place of" in edit.text


def test_arrays_in_lists_are_named_by_the_scopes_that_use_them():
    flat = jax.tree.leaves(laid(RULES))
    (edit,) = mended(traced(step_of_lists, (flat, flat), TOKENS))
    assert edit.text == (
        "shard layer_# (state[0][2] and 5 more), state[1][2] and 5 more by P('batch', 'model', "
        "None) in place of P('model', 'batch', None)"
    )


def test_arrays_in_lists_that_are_used_in_other_scopes_are_apart():
    """A table of the same shape and spec as a weight, both in one list: only it is looked up."""

    def loss(weights, tokens):
        with jax.named_scope("embedding"):
            x = weights[0][tokens]
        with jax.named_scope("down"):
            return jnp.sum((jnp.tanh(x @ weights[1].T) @ weights[1]).astype(jnp.float32))

    sharding = NamedSharding(CHIPS.mesh, P("model", "batch"))
    table = jax.ShapeDtypeStruct((512, 256), jnp.bfloat16, sharding=sharding)
    (edit,) = mended(traced(loss, [table, table], TOKENS), "batch")
    moved = "by P(('model', 'batch'), None) in place of P('model', 'batch')"
    assert edit.text == f"shard embedding (weights[0]) {moved}"


@pytest.mark.parametrize("wrong", ["query|key|value", "query|value", "output"])
def test_the_layout_knows_the_same(wrong):
    """One mechanism: what `Layout.explain` would try first is what `explain` tries first."""
    exchanged = {"query|key|value": WRONG, "query|value": WRONG, "output": ("batch", None, "model")}
    rules = {**MENDED, rf"layer_\d+/({wrong})/kernel": exchanged[wrong]}
    if wrong == "query|value":
        rules.pop(r"layer_\d+/(query|key|value)/kernel")
        rules[r"layer_\d+/key/kernel"] = ("batch", "model", None)
    if wrong == "output":
        rules.pop(r"layer_\d+/output/kernel")
    layout = LayoutMap(rules, batch=P("batch")).layout(shapes(), CHIPS.mesh)
    seen = Dimensions.of(lambda params, args: loss(params, *args), layout.shapes, (TOKENS,))
    known = [
        (candidate.rule, candidate.axes)
        for candidate in candidates(layout, seen, [Data(TOKENS, False)], dict)
        if candidate.cause == "at odds"
    ]
    (edit,) = mended(traced(loss, layout.shapes, TOKENS))
    ((rule, axes),) = known
    assert rule == rf"layer_\d+/({wrong})/kernel"
    assert f"by P({', '.join(repr(own[0]) if own else 'None' for own in axes)})" in edit.text
    assert all(f"['{name}']" in edit.text for name in wrong.split("|"))


def test_a_right_layout_is_not_at_odds():
    assert not mended(traced(loss, laid(MENDED), TOKENS))


def test_a_budget():
    assert Budget.of("2.5 min") == (inf, 150)
    assert Budget.of("3") == Budget.of(3) == (3, inf)
    said = []
    assert not explain(program(), tries="0min", progress=said.append).findings[0].is_tried
    assert not said


def test_edits_are_tried_by_what_they_can_gain():
    """One of several findings before one of the longest; what is known to be wrong before both."""
    tried = []

    def refused(name, error):
        tried.append(name)
        raise error

    def edit(name, disagrees="", error=jax.errors.JaxRuntimeError):  # the compiler's
        return Edit(name, lambda: refused(name, error), disagrees)

    of_both, wrong = edit("of both"), edit("wrong", "it is at odds")
    first = [[edit("a"), of_both, wrong], [edit("b")]]
    trials = Trials(None, None)
    trials.run([(4.0, first), (3.0, [[of_both]])], Budget.of(3))
    assert tried == ["of both", "a", "wrong"]  # 4 / 2 + 3, 4 and, known to be wrong, 4
    assert trials.gains["b"] == 2.0
    trials = Trials(None, None)
    tried.clear()
    trials.run([(4.0, first)], Budget.of("1min"))
    assert tried == ["a", "wrong", "of both", "b"]
    # What never reaches the compiler is no try.
    trials = Trials(None, None)
    tried.clear()
    early = [edit(name, error=TypeError) for name in "cd"]
    trials.run([(4.0, [[*early, edit("e"), edit("f")]])], Budget.of(1))
    assert tried == ["c", "d", "e"]


def test_an_edit_that_was_not_tried_is_not_said_to_gain_nothing():
    """An earlier rule's edit has taken the only try, and gains nothing: the edit says so."""
    record = explain(program(), tries=0).record()
    finding = {**record["findings"][0], "tried": [{"edit": "another", "seconds": 1.0, "peak": 1}]}
    assert gain(record, finding).startswith("not tried: ")
    assert gain(record, {**finding, "gain": 0.0, "left": 2}).endswith(
        "another: 1000000 us; 2 more edits can be tried: raise tries"
    )
    page = page_of({**record, "findings": [finding]})
    assert "not tried: " in page
    assert "none; the" not in page


def test_edits_are_kept_in_the_cache_of_their_program(tmp_path, monkeypatch):
    def step(params, x):
        h = jax.lax.with_sharding_constraint(x @ params["up"], NamedSharding(CHIPS.mesh, P()))
        return h @ params["down"]

    spec = NamedSharding(CHIPS.mesh, P("model"))
    w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=spec)
    counts, compiler = [], jaxpar.tools.timeline.timeline._text_and_memory
    for _ in range(2):
        compiled = []
        monkeypatch.setattr(
            "jaxpar.tools.timeline.timeline._text_and_memory",
            lambda *args, compiled=compiled: compiled.append(1) or compiler(*args),
        )
        params = {"up": w, "down": w}
        explain(compile_for(step, CHIPS, params, w, cache=tmp_path), tries=3)
        counts.append(len(compiled))
    assert counts == [4, 0]  # the program, and the edits that change it


def test_an_array_by_itself_is_not_said_to_lie_wrong():
    # It may be the batch, over whose axes weights are gathered, as in any step with FSDP.
    described = target("v5e:2x4", "fsdp=8")

    def over_rows(*shape):
        sharding = NamedSharding(described.mesh, P("fsdp"))
        return jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=sharding)

    for weight in (over_rows(512, 1024), {"w": over_rows(512, 1024)}):
        program = compile_for(
            jax.jit(lambda x, w: x @ jax.tree.leaves(w)[0]), described, over_rows(4096, 512), weight
        )
        (found,) = explain(program, tries=0).findings
        assert found.cause == "synchronous"
        assert not found.edit.startswith("shard ")
