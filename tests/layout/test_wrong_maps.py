"""Maps that are wrong: each is refused, with the array, the arithmetic and the edit."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.layout import (
    REPLICATED,
    LayoutError,
    LayoutMap,
    Padded,
    Replicate,
    Split,
    data_parallel,
)

AXES = {"layers": None, "embed": None, "heads": "tp", "hidden": "tp", "vocab": "tp", "one": None}
RIGHT = {
    "embedding": "vocab embed",
    "layers/attention/(query|key|value)": "layers embed heads",
    "layers/attention/output": "layers heads embed",
    "layers/mlp/up": "layers embed hidden",
    "layers/mlp/down": "layers hidden embed",
    "layers/norm": "layers embed",
}


def of_shape(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def a_model():
    attention = {name: of_shape(2, 12, 16) for name in ("query", "key", "value")}
    return {
        "embedding": of_shape(48, 12),
        "layers": {
            "attention": {**attention, "output": of_shape(2, 16, 12)},
            "mlp": {"up": of_shape(2, 12, 32), "down": of_shape(2, 32, 12)},
            "norm": of_shape(2, 12),
        },
    }


def test_the_right_one():
    LayoutMap(RIGHT, axes=AXES, batch=P("dp")).layout(a_model(), make_mesh("dp=2,tp=4"))


QUERIES = "layers/attention/(query|key|value)"


# What is put in the place of rules, None taking one out; how many problems; texts of the error.
WRONG = {
    "attention along its wrong dimension": (
        {QUERIES: "layers heads embed"},
        3,
        ["as 'layers heads embed' its 'heads' has 12 entries, and 16 in", "write 'layers embed he"],
    ),
    "one weight's names have changed places": (
        {"layers/mlp/up": "layers hidden embed"},
        1,
        ["'layers/mlp/up' float32[2,12,32]", "its 'hidden' has 12 entries, and 32 in other arrays"],
    ),
    "one rule for two orders of dimensions": (
        {
            QUERIES: None,
            "layers/attention/output": None,
            "layers/attention/.*": "layers embed heads",
        },
        1,
        [
            "'layers/attention/output' float32[2,16,12]",
            "write 'layers heads embed', with which all",
        ],
    ),
    "a pattern that misses": (
        {"layers/norm": None, "layers/nrm": REPLICATED},
        2,
        [
            "'layers/norm' float32[2,12] is matched by no rule; the nearest rule is 'layers/nrm'",
            "add one, 'layers/norm': REPLICATED holds all 96 B on each device",
            "rule 'layers/nrm' matches no array; the nearest path is 'layers/norm'",
        ],
    ),
    "a pattern of a part of the path": (
        {"layers/norm": None, "norm": REPLICATED},
        2,
        ["rule 'norm' matches no array", "it must match a full path, and `.*` matches anything"],
    ),
    "a rule that is not there": (
        {"embedding": None},
        1,
        ["'embedding' float32[48,12] is matched by no rule"],
    ),
    "a rule that nothing needs": (
        {"decoder/.*": REPLICATED},
        1,
        ["rule 'decoder/.*' matches no array", "correct it or remove it"],
    ),
    "an axis that is not there": (
        {"embedding": ("model", None)},
        1,
        ["the mesh has no axis 'model', but dp=2, tp=4; name one of those"],
    ),
    "an axis that is misspelt": (
        {"embedding": ("tpp", None)},
        1,
        ["the mesh has no axis 'tpp', but dp=2, tp=4", "did you mean 'tp'?"],
    ),
    "a rule for another model's rank": (
        {QUERIES: "layers embed heads one"},
        3,
        [
            "'layers embed heads one' names 4 dimensions, and the array has 3",
            "name every dimension",
        ],
    ),
    "a spec that is too long": (
        {"layers/norm": (None, None, "tp")},
        1,
        ["is of 3 dimensions, and the array has 2; give at most 2"],
    ),
    "one weight matched twice": (
        {".*/query": (None, None, "tp")},
        1,
        [
            "'layers/attention/query' float32[2,12,16] is matched by 2 rules: ",
            f"'{QUERIES}', '.*/query'",
        ],
    ),
    "an axis that does not divide": (
        {"embedding": (None, ("dp", "tp"))},
        1,
        [
            "('dp', 'tp') (8) does not divide dimension 1: 12 = 1 x 8 + 4; pad it to 16, "
            "Padded(('dp', 'tp')), 384 B a device; replicate it, None, 2.25 KiB a device; or "
            "shard dimension 0 of 48, 288 B a device",
        ],
    ),
    "an axis that nothing uses": (
        {"batch": None},
        1,
        ["mesh axis 'dp' shards nothing: its 2 devices would do the same work", "batch=P('dp')"],
    ),
    "all replicated": (
        {**dict.fromkeys(RIGHT), ".*": REPLICATED, "batch": None},
        2,
        ["mesh axis 'dp' shards nothing", "mesh axis 'tp' shards nothing: its 4 devices would do"],
    ),
    "a split over a number of devices": (
        {"embedding": Split(4, 0)},
        1,
        ["Split(count=4, dim=0) says how many shards, and not over which mesh axis; name one"],
    ),
    "a split over an axis that is not there": (
        {"embedding": Split("model", -2)},
        1,
        ["the mesh has no axis 'model', but dp=2, tp=4"],
    ),
    "a split of a dimension that is not there": (
        {"embedding": Split("tp", 2)},
        1,
        ["is of a dimension that the array lacks, which has 2; choose from -2 to 1"],
    ),
    "replicated on another number of devices": (
        {"layers/norm": Replicate(4)},
        1,
        ["Replicate(count=4) is for 4 devices, and the mesh has 8; say REPLICATED"],
    ),
    "a padded size that is too small": (
        {"embedding": (Padded("tp", size=44), None)},
        1,
        ["Padded: size=44 must be at least the dimension's 48, and a multiple of 4 devices x 1"],
    ),
    "data over an axis that is not there": (
        {"batch": P(("dp", "dpp"))},
        1,
        [
            "batch: the mesh has no axis 'dpp', but dp=2, tp=4; name one of those",
            "did you mean 'dp'?",
        ],
    ),
    "everything at once": (
        {
            "embedding": ("model", None),
            "layers/norm": None,
            "layers/nrm": REPLICATED,
            QUERIES: (None, ("dp", "tp")),
        },
        6,
        [
            "'embedding'",
            "'layers/norm'",
            "rule 'layers/nrm'",
            "'layers/attention/key'",
            "6 problems",
        ],
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_map_is_refused(name):
    change, count, texts = WRONG[name]
    rules = {**RIGHT, **{key: value for key, value in change.items() if key != "batch"}}
    rules = {key: value for key, value in rules.items() if value is not None}
    batch = change.get("batch", P("dp"))
    with pytest.raises(LayoutError) as found:
        LayoutMap(rules, axes=AXES, batch=batch).layout(a_model(), make_mesh("dp=2,tp=4"))
    text = str(found.value)
    assert text.startswith("LayoutMap.layout: ")
    assert len(found.value.problems) == count, text
    assert isinstance(found.value, ValueError)
    for part in texts:
        assert part in text


def test_layers_with_one_problem_are_shown_once():
    params = {"layers": [{"w": of_shape(8, 6)} for _ in range(12)]}
    with pytest.raises(LayoutError) as found:
        LayoutMap({"layers/.*": (None, "tp")}).layout(params, make_mesh("tp=8"))
    assert len(found.value.problems) == 12
    assert str(found.value).count("does not divide") == 1
    assert "(and 11 more like it)" in str(found.value)
    assert {problem.path for problem in found.value.problems} == {
        f"layers/{n}/w" for n in range(12)
    }


def test_many_kinds_of_problems_are_all_in_the_error():
    params = {f"{chr(97 + n % 26)}{chr(97 + n // 26)}": of_shape(8) for n in range(100)}
    with pytest.raises(LayoutError, match=r"\.\.\. and 61 kinds more, in `problems`") as found:
        LayoutMap({}).layout(params, make_mesh("tp=8"))
    assert len(found.value.problems) == 101


def test_not_strict_is_replicated_where_nothing_says():
    mesh = make_mesh("dp=2,tp=4")
    rules = LayoutMap({"layers/attention/.*": (None, None, "tp"), "nothing": REPLICATED})
    layout = rules.layout(
        {**a_model(), "layers": {"attention": {"query": of_shape(2, 12, 16)}}}, mesh, strict=False
    )
    assert layout.specs["embedding"] == P()
    with pytest.raises(LayoutError, match="does not divide dimension 0"):
        LayoutMap({"w": ("tp",)}).layout({"w": of_shape(6)}, mesh, strict=False)
    with pytest.raises(LayoutError, match="is matched by 2 rules"):
        LayoutMap({"w.*": REPLICATED, ".*w": REPLICATED}).layout(
            {"ww": of_shape(6)}, mesh, strict=False
        )


def test_names_with_several_sizes_are_no_exchange():
    """Fewer heads for keys than for queries: no order of names makes that agree."""
    params = {"query": of_shape(12, 16), "key": of_shape(12, 8), "more": of_shape(12, 16)}
    rules = LayoutMap({".*": "embed heads"}, axes={"embed": None, "heads": "tp"})
    rules.layout(params, make_mesh("tp=8"))


BLOCKS = [(3, 3, 64, 128), (3, 3, 128, 256), (3, 3, 256, 128), (3, 3, 128, 64)]
GENERIC = {"in": None, "out": "tp", "h": None, "w": None, "heads": None, "size": None}


@pytest.mark.parametrize(
    ("rules", "shapes"),
    [
        ({".*": "in out"}, [(64, 256), (256, 64)]),
        ({".*": "in out"}, [(64, 256), (64, 256), (256, 64)]),
        ({"0": "in out", "1": "in out", "2": "in out"}, [(64, 256), (64, 256), (256, 64)]),
        ({".*": "h w in out"}, BLOCKS),
        ({r"[0-3]": "h w in out", "4": "in out", "5": "out"}, [*BLOCKS, (64, 8), (8,)]),
        (
            {"[01]": "in heads size", "2": "heads size out", "[34]": "in out"},
            [(64, 8, 16), (64, 8, 16), (8, 16, 64), (64, 256), (256, 64)],
        ),
        ({"[01]": "in out", "[23]": "out"}, [(64, 256), (256, 64), (256,), (64,)]),
    ],
)
def test_names_that_say_a_direction_have_many_sizes(rules, shapes):
    """Right maps: no order of such names is wrong, whatever sizes most arrays have."""
    params = {str(n): of_shape(*shape) for n, shape in enumerate(shapes)}
    LayoutMap(rules, axes=GENERIC).layout(params, make_mesh("tp=8"))


def test_an_exchange_that_is_proposed_is_accepted():
    axes = {"vocab": "tp", "embed": None, "hidden": "tp"}
    params = {"table": of_shape(48, 16), "up": of_shape(16, 32), "down": of_shape(32, 16)}
    rules = {"table": "vocab embed", "up": "hidden embed", "down": "hidden embed"}
    with pytest.raises(LayoutError, match="write 'embed hidden', with which all") as found:
        LayoutMap(rules, axes=axes).layout(params, make_mesh("tp=8"))
    assert [problem.path for problem in found.value.problems] == ["up"]
    rules["up"] = "embed hidden"
    LayoutMap(rules, axes=axes).layout(params, make_mesh("tp=8"))


def test_the_rule_that_is_proposed_can_be_added():
    """Also for a path with signs that no pattern may have."""
    params = {"a(b": of_shape(4, 4)}
    with pytest.raises(LayoutError, match="is matched by no rule; add one, ") as found:
        LayoutMap({}, batch=P("dp")).layout(params, make_mesh("dp=8"))
    key = found.value.problems[0].remedy.split("'")[1].encode().decode("unicode_escape")
    LayoutMap({key: REPLICATED}, batch=P("dp")).layout(params, make_mesh("dp=8"))


def test_rules_of_their_own_may_take_all_that_another_matches():
    """As an edit of a map that a strategy has made: such a pattern is not wrong."""
    params = {"layers": [{"w.x": of_shape(8, 6)} for _ in range(2)]}
    rules = data_parallel(params, make_mesh("tp=8"), axis="tp")
    rules |= {f"layers/{n}/w.x": (None, Padded("tp")) for n in range(2)}
    assert len(rules) == 3
    layout = rules.layout(params, make_mesh("tp=8"))
    assert {array.padded_shape for array in layout.values()} == {(8, 8)}


def test_results_name_axes_of_the_mesh():
    rules = LayoutMap({"w": ("tp",)}, results={"block/.*": (None, "pt")})
    with pytest.raises(LayoutError, match=r"results\[.block.*\]: the mesh has no axis 'pt'"):
        rules.layout({"w": of_shape(8)}, make_mesh("tp=8"))


def test_axes_of_one_device_need_no_rule():
    LayoutMap({"w": ("tp",)}).layout({"w": of_shape(8)}, make_mesh("dp=1,tp=8"))
