"""The map: a dict by pattern text, and lookups by path."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar import make_mesh
from jaxpar.layout import REPLICATED, LayoutError, LayoutMap, Padded, Replicate, Split

AXES = {"embed": "fsdp", "heads": "tp", "vocab": ("tp", "cp"), "layers": None}


@pytest.mark.parametrize(
    ("value", "layout"),
    [
        ((None, "tp"), P(None, "tp")),
        ([None, "tp"], P(None, "tp")),
        (P(None, "tp"), P(None, "tp")),
        ((("dp", "tp"),), P(("dp", "tp"))),
        ([["dp", "tp"], None], P(("dp", "tp"), None)),
        (("tp",), P("tp")),
        ("layers embed heads", P(None, "fsdp", "tp")),
        ("vocab embed", P(("tp", "cp"), "fsdp")),
        (REPLICATED, P()),
        ((), P()),
        (Split("tp", 1), Split("tp", 1)),
        (Replicate(8), Replicate(8)),
    ],
)
def test_values(value, layout):
    rules = LayoutMap({"a/.*": value}, axes=AXES)
    assert rules.match("a/b") == layout
    assert rules["a/.*"] == layout


@pytest.mark.parametrize(
    ("value", "error", "text"),
    [
        (None, TypeError, "use REPLICATED to replicate it"),
        (3, TypeError, "must be a PartitionSpec, a tuple or list of mesh axes, names of dim"),
        ((1,), TypeError, "a tuple of them, Padded(...) or Interleaved(...), got 1"),
        ((("tp", 1),), TypeError, "got ('tp', 1) of type tuple"),
        (("tp", "tp"), ValueError, "shards over the mesh axis 'tp' twice; an axis can shard one"),
        ((("tp", "dp"), "tp"), ValueError, "over the mesh axis 'tp' twice"),
        (("tp", Padded("tp")), ValueError, "over the mesh axis 'tp' twice"),
        ("heads heads", ValueError, "shards over the mesh axis 'tp' twice"),
        (
            "model",
            ValueError,
            "names a dimension 'model', but axes has 'embed', 'heads', 'vocab', ",
        ),
        ("model", ValueError, "one mesh axis alone is ('model',)"),
        ("embd heads", ValueError, "did you mean 'embed'?"),
    ],
)
def test_values_that_are_none(value, error, text):
    with pytest.raises(error) as found:
        LayoutMap({"a": value}, axes=AXES)
    assert str(found.value).startswith(
        ("LayoutMap: rule 'a': ", "LayoutMap: the value of rule 'a'")
    )
    assert text in str(found.value)


@pytest.mark.parametrize(
    ("keywords", "error", "text"),
    [
        (
            {"axes": ["embed"]},
            TypeError,
            "axes must be a mapping of names of dimensions to mesh axes, as in {",
        ),
        ({"axes": {"a b": "tp"}}, ValueError, "axes names a dimension 'a b'; it must be one word"),
        ({"axes": {"embed": 3}}, TypeError, "axes['embed']: a dimension must be None, a mesh axis"),
        ({"batch": 3}, TypeError, "the value of rule 'batch' must be a PartitionSpec"),
        ({"results": 3}, TypeError, "results must be a mapping of patterns to values, got 3"),
    ],
)
def test_arguments_that_are_none(keywords, error, text):
    with pytest.raises(error) as found:
        LayoutMap({}, **keywords)
    assert str(found.value).startswith("LayoutMap: ")
    assert text in str(found.value)


def test_rules_that_are_no_mapping():
    with pytest.raises(TypeError, match="LayoutMap: rules must be a mapping of patterns to values"):
        LayoutMap([("a", "b")])
    with pytest.raises(TypeError, match="LayoutMap: a pattern must be text, got 3 of type int"):
        LayoutMap({3: REPLICATED})


def test_an_exact_key_goes_before_patterns():
    rules = LayoutMap({"dense/.*": ("x",), ".*/kernel": ("y",), "dense/kernel": ("z",)})
    assert rules.match("dense/kernel") == P("z")


def test_an_exact_key_may_be_a_pattern():
    rules = LayoutMap({"a.*": ("x",), "a.*b": ("y",)})
    assert rules.match("a.*") == P("x")  # by its text, though both match it
    assert rules.match("a.*b") == P("y")


def test_patterns_match_whole_paths():
    rules = LayoutMap({"kernel": ("x",), "layers/1/.*": ("y",), "dense.*kernel": ("z",)})
    assert rules.match("kernel") == P("x")
    assert rules.match("kernel_norm") is None
    assert rules.match("a/kernel") is None
    assert rules.match("layers/1/w") == P("y")
    assert rules.match("layers/10/w") is None
    assert rules.match("my/dense_1/kernel") is None
    assert rules.match("dense_1/kernel") == P("z")


def test_alternatives_belong_to_one_pattern():
    rules = LayoutMap({"a|b": ("x",), "ab|c": ("y",)})
    assert [rules.match(path) for path in ("a", "b", "ab", "c", "bc")] == [
        *[P("x")] * 2,
        *[P("y")] * 2,
        None,
    ]


@pytest.mark.parametrize("count", [2, 3, 5])
def test_several_matches_are_an_error_with_all_of_them(count):
    keys = ["dense/.*", ".*/kernel", "(?P<a>dense)/kernel", r"(d)ense/kerne(l)", ".*"][:count]
    rules = LayoutMap(dict.fromkeys(("other", *keys), ("tp",)))
    with pytest.raises(ValueError, match=rf"'dense/kernel' is matched by {count} rules") as found:
        rules.match("dense/kernel")
    assert all(repr(key) in str(found.value) for key in keys)


@pytest.mark.parametrize(
    ("key", "path"),
    [
        (r"(a|b)/\1", "b/b"),  # a reference by number
        (r"(?P<n>a|b)/(?P=n)", "b/b"),
        (r"(?i)KERNEL", "kernel"),
        (r"(?x) kernel  # a remark", "kernel"),
        (r"(?=ker)kernel", "kernel"),
        (r"(?:ker)nel", "kernel"),
        (r"ker[(?]*nel", "ker(nel"),
        (r"a\\1", "a\\1"),
    ],
)
def test_any_expression_beside_others(key, path):
    rules = LayoutMap({"(x)(y)": ("a",), key: ("b",), "(u)|(v)": ("c",)})
    assert rules.match(path) == P("b")
    assert rules.match("xy") == P("a")
    assert rules.match("v") == P("c")
    assert rules.match("b/a") is None


def test_a_pattern_is_compiled_when_it_is_inserted():
    rules = LayoutMap({})
    with pytest.raises(
        ValueError, match=r"LayoutMap: rule 'a\(' is no regular expression: missing"
    ):
        rules["a("] = ("tp",)
    assert len(rules) == 0


def test_a_dict_by_pattern_text():
    rules = LayoutMap({"b/.*": ("x",), "a": ("y",)})
    assert list(rules) == ["b/.*", "a"]
    assert len(rules) == 2
    assert "b/.*" in rules
    assert "b/c" not in rules
    assert rules.get("b/c") is None
    assert rules.get("b/c", 1) == 1
    with pytest.raises(KeyError):
        rules["b/c"]
    with pytest.raises(KeyError):
        del rules["b/c"]
    with pytest.raises(KeyError):
        rules.pop("b/c")
    assert rules.match("b/c") == P("x")
    assert rules.pop("b/.*") == P("x")
    assert rules.match("b/c") is None  # compiled anew
    rules["b/.*"] = ("z",)
    assert rules.match("b/c") == P("z")
    assert dict(rules) == {"a": P("y"), "b/.*": P("z")}


def test_a_key_is_inserted_once():
    rules = LayoutMap({"a": ("x",)})
    with pytest.raises(ValueError, match=r"a rule 'a' already, \('x',\); remove it with pop"):
        rules["a"] = ("y",)
    assert rules["a"] == P("x")


def test_merged_maps():
    left = LayoutMap({"a": "one", "b": "two"}, axes={"one": "x", "two": "x"}, batch=("dp",))
    right = LayoutMap({"b": "two", "c": ("y",)}, axes={"two": "z"}, results={"r": ("y",)})
    both = left | right
    assert dict(both) == {"a": P("x"), "b": P("z"), "c": P("y")}
    assert both.batch.layout == P("dp")
    assert both.results.match("r") == P("y")
    assert dict(left) == {"a": P("x"), "b": P("x")}  # as before
    assert dict(left | {"a": "two"}) == {"a": P("x"), "b": P("x")}


def test_a_value_is_not_changed_by_its_map():
    value = [None, "tp"]
    first, second = LayoutMap({"a": value}), LayoutMap({"b": value})
    value.append("dp")
    assert first["a"] == second["b"] == P(None, "tp")


def test_maps_show_themselves():
    rules = LayoutMap({"a": "embed heads"}, axes={"embed": None, "heads": ("x", "y")}, batch=("d",))
    assert repr(rules) == (
        "LayoutMap({\n  'a': 'embed heads',\n}, axes={'embed': None, 'heads': ('x', 'y')}, "
        "batch=('d',))"
    )
    assert repr(LayoutMap({})) == "LayoutMap({})"


def test_a_path_is_text():
    with pytest.raises(TypeError, match="path must be text, got 3 of type int"):
        LayoutMap({}).match(3)


# Without the checks of types that these tests install. Calls are counted: seconds depend on what
# else the machine does.
COUNTED = """
import cProfile, pstats, jax, jax.numpy as jnp
from jax.sharding import AbstractMesh
from jaxpar.layout import LayoutMap

w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
params = {"layers": [{f"attention{k}": {"kernel": w} for k in range(200)} for _ in range(50)]}
for value in ((None, "tp"), "embed heads"):
    keys = [rf"layers/\\d+/(attention|mlp){k}/(kernel|weight)" for k in range(200)]
    rules = LayoutMap(dict.fromkeys(keys, value), axes={"embed": None, "heads": "tp"})
    with cProfile.Profile() as profile:
        layout = rules.layout(params, AbstractMesh((8,), ("tp",)))
        table = str(layout.table())
    assert "10000 arrays on 8 devices" in table
    print(pstats.Stats(profile).total_calls)
"""


def test_ten_thousand_arrays_and_two_hundred_rules():
    """Each array costs as many calls, whatever the number of rules: all take a second."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu"}
    ran = subprocess.run(
        [sys.executable, "-c", COUNTED], env=env, capture_output=True, text=True, check=True
    )
    assert max(map(int, ran.stdout.split())) < 200 * 10_000, ran.stdout


def test_all_that_is_wrong_is_found():
    keys = [rf"layers/\d+/(attention|mlp){k}/(kernel|weight)" for k in range(100, 300)]
    rules = LayoutMap(dict.fromkeys(keys, (None, "tp")))
    w = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    params = {"layers": [{f"attention{k}": {"kernel": w} for k in range(200)} for _ in range(5)]}
    with pytest.raises(LayoutError) as found:
        rules.layout(params, make_mesh("tp=8"))
    assert len(found.value.problems) == 500 + 100
