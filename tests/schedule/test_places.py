"""Where findings are: lines of frameworks and of the user's own, and places that are alike."""

import importlib
import json
import sys
from textwrap import dedent

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from jaxpar.schedule import compile_for, explain, target
from jaxpar.tools.cli.explain_page import page_of
from jaxpar.tools.explain.explanation_text import compared
from jaxpar.tools.program.sources import Line, Sources, counted_as_own, own_line, shown

# Each function passes a wrapper of the framework's, as those of real ones do.
FRAMEWORK = {
    "wrapped.py": """
        def layer(fn):
            def wrapper(*args):
                return fn(*args)
            return wrapper
    """,
    "dense.py": """
        from jax import lax
        from toyframe.wrapped import layer

        @layer
        def dense(x, w):
            whole = lax.all_gather(w, "tp", tiled=True)
            return x @ whole
    """,
    "blocks.py": """
        import jax
        from toyframe.dense import dense
        from toyframe.wrapped import layer

        @layer
        def attention(x, p):
            with jax.named_scope("attention"):
                q = dense(x, p["q"])
                return jax.numpy.tanh(q) * dense(x, p["k"])

        @layer
        def mlp(x, p):
            h = dense(x, p["up"])
            return dense(jax.nn.relu(h), p["down"])

        @layer
        def block(x, p):
            x = x + attention(x, p)
            return x + mlp(x, p)
    """,
}
MODEL = """
from toyframe.blocks import block
from toyframe.dense import dense
import jax

def unrolled(x, layers):
    for n, p in enumerate(layers):
        with jax.named_scope(f"layers_{n}"):
            x = block(x, p)
    return x

def at_four_lines(x, ws):
    x = dense(x, ws[0])
    x = jax.nn.relu(dense(x, ws[1]))
    x = dense(x, ws[2])
    return dense(x, ws[3])
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """A model of the user's own that calls an installed framework."""
    home = tmp_path_factory.mktemp("home")
    package = home / "site-packages" / "toyframe"
    package.mkdir(parents=True)
    for name, text in FRAMEWORK.items():
        (package / name).write_text(dedent(text))
    (home / "toy_model.py").write_text(MODEL)
    before = list(sys.path)
    sys.path += [str(package.parent), str(home)]
    yield importlib.import_module("toy_model")
    sys.path[:] = before


def compiled(step, shapes):
    x = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16, sharding=P("tp"))
    args = jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=P("tp")),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )
    local = jax.shard_map(step, in_specs=(P("tp"), P("tp")), out_specs=P("tp"))
    return compile_for(local, target("v5e:2x2", "tp=4"), x, args)


@pytest.fixture(scope="module")
def unrolled(model):
    layer = {"q": (512, 512), "k": (512, 512), "up": (512, 1024), "down": (1024, 512)}
    return compiled(model.unrolled, [layer] * 3)


def names(chain):
    return [line.file.rpartition("/")[2] for line in chain]


def functions(chain):
    return [line.function.rpartition(".")[2] for line in chain]


def test_a_framework_s_lines_lead_to_the_user_s(unrolled):
    found = explain(unrolled, tries=0).findings
    for finding in found:
        assert finding.of.line.file.endswith("toy_model.py")
        assert functions(finding.of.chain[:1]) == ["dense"]
        assert finding.of.line in finding.of.chain
        assert "wrapper" not in functions(finding.of.chain)  # of one line, which tells nothing
        assert len(finding.of.chain) <= 5
    kinds = {name for finding in found for name in functions(finding.of.chain)}
    assert {"attention", "mlp"} <= kinds


def test_arrays_at_the_peak_have_the_framework_s_lines(unrolled):
    held = [one for one in explain(unrolled, tries=0).at_peak if one.line]
    made = {one.line.function.rpartition(".")[2] for one in held}
    assert made <= {"dense", "attention", "mlp", "block"}
    assert made


def test_layers_that_are_alike_are_one_finding(unrolled):
    found = explain(unrolled, tries=0, findings=30).findings
    # Query and key are calls of one line in one function, of the same shape.
    assert len(found) == 3
    assert sum(finding.of.runs for finding in found) == 3 * 4
    (attention,) = [one for one in found if "attention" in functions(one.of.chain)]
    assert len(attention.of.places) == 6
    assert {place.rpartition(" in ")[2] for place in attention.of.places} == {
        f"layers_{n}/attention" for n in range(3)
    }
    for finding in found:
        assert len(finding.of.names) == finding.of.runs
        assert len(set(finding.of.places)) == len(finding.of.places)


def test_a_package_that_counts_as_own(unrolled):
    found = explain(unrolled, tries=0, own=("toyframe",)).findings
    assert {finding.of.line.function.rpartition(".")[2] for finding in found} == {"dense"}
    # One line of a helper, but not one finding: the chain tells which layer it is in.
    assert len(found) == 3
    assert len({finding.of.chain for finding in found}) == 3
    for finding in found:
        assert functions(finding.of.chain[:1]) == ["dense"]
        assert {"attention", "mlp"} & set(functions(finding.of.chain))
    # Only while `explain` runs.
    assert not found[0].of.line.is_own


def test_calls_of_one_function_at_four_lines_are_one_finding(model):
    program = compiled(model.at_four_lines, [(512, 512)] * 4)
    (finding,) = explain(program, tries=0).findings
    lines = [MODEL[: MODEL.index(f"ws[{n}]")].count("\n") + 1 for n in range(4)]
    assert {one for place in finding.of.places for one in lines if f"toy_model.py:{one}" in place}
    assert len(finding.of.places) == 4
    text = " ".join(explain(program, tries=0).text().split())
    assert "and: alike at 4 places: also dense.py:" in text


def test_calls_that_send_other_shapes_are_findings_of_their_own(model):
    program = compiled(model.at_four_lines, [(512, 512), (512, 1024), (1024, 512), (512, 512)])
    found = explain(program, tries=0).findings
    assert sorted(len(finding.of.places) for finding in found) == [1, 1, 2]


def test_chains_in_text_record_and_page(unrolled):
    found = explain(unrolled, tries=0, own=("toyframe",))
    record = json.loads(found.json())
    text, page = " ".join(found.text().split()), page_of(record)
    for finding, kept in zip(found.findings, record["findings"], strict=True):
        chain = finding.of.chain
        assert [one["number"] for one in kept["of"]["chain"]] == [line.number for line in chain]
        assert tuple(kept["of"]["places"]) == finding.of.places
        said = [str(line) if line == finding.of.line else line.short for line in chain]
        where = " < ".join(said)
        assert f"where: {where}" in text
        assert json.dumps(where)[1:-1].replace("<", "\\u003c") in page
    # What another record is compared by is the chain, not the helper's line.
    slower = json.loads(found.json())
    for finding in slower["findings"]:
        finding["of"]["seconds"] *= 2
    told = compared(record, slower)
    assert "dense < blocks.py, attention" in told
    assert "dense < blocks.py, mlp" in told


def test_sums_that_the_compiler_made_one_are_at_the_largest():
    def loss(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(y))  # its sum and that of the gradient are one

    x = jax.ShapeDtypeStruct((2048, 512), jnp.bfloat16, sharding=P("dp"))
    w = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16, sharding=P())
    program = compile_for(jax.value_and_grad(loss), target("v5e:2x2", "dp=4"), w, x)
    (finding, *_) = explain(program, tries=0).findings
    assert finding.of.collective == "all-reduce"
    assert finding.of.line.number == loss.__code__.co_firstlineno + 1
    assert finding.of.phase == "backward"
    assert finding.of.moved.startswith("bf16[512,512] of each device, dot_general")
    assert ", and 1 more array" in finding.of.moved


def test_packages_that_are_not_there(unrolled):
    with pytest.raises(ValueError, match=r"explain: own='toyfrane' is no package .*, toyframe"):
        explain(unrolled, tries=0, own=["toyfrane"])
    with pytest.raises(TypeError, match=r"pass own=\('toyframe',\)"):
        explain(unrolled, tries=0, own="toyframe")
    # Installed, and of no line of the program: a program may be without.
    assert explain(unrolled, tries=0, own=["equinox", "toyframe.dense"]).findings


@pytest.mark.parametrize(
    ("file", "package", "is_it"),
    [
        ("/venv/lib/python3.13/site-packages/flax/linen/linear.py", "flax", True),
        ("/venv/lib/python3.13/site-packages/flax/linen/linear.py", "flax.linen", True),
        ("/venv/lib/python3.13/site-packages/flax/nnx/nn/linear.py", "flax.linen", False),
        ("/usr/lib/python3/dist-packages/keras_hub/src/layers.py", "keras-hub", True),
        ("/venv/lib/python3.13/site-packages/MaxText/layers/linears.py", "maxtext", True),
        ("/venv/lib/python3.13/site-packages/single.py", "single", True),
        ("/home/me/flax/linen/linear.py", "flax", False),
        ("/venv/lib/python3.13/site-packages/flaxen/linear.py", "flax", False),
    ],
)
def test_which_lines_are_of_a_package(file, package, is_it):
    line = Line(file, 1, "f")
    assert line.is_of(package) == is_it
    with counted_as_own([package]):
        assert line.is_own == (is_it or "packages" not in file)
    assert line.is_own == ("packages" not in file)


def test_what_stands_around_functions_is_in_no_chain(unrolled):
    checks = [Line("/v/site-packages/jaxtyping/_decorator.py", 465, "wrapped_fn")]
    checks += [Line("/v/site-packages/beartype/door.py", 12, "check"), Line("<string>", 3, "f")]
    own = Line("/home/me/model.py", 7, "step")
    assert Sources(unrolled.text).chain([*checks, own]) == (own,)


def test_the_user_s_own_line_is_always_shown():
    deep = [Line(f"/v/site-packages/deep/{n}.py", n, "f") for n in range(9)]
    own = Line("/home/me/model.py", 7, "step")
    assert own_line([*deep, own]) == own
    assert shown([*deep, own]) == (*deep[:4], own)
    assert shown([own, *deep]) == (own, *deep[:4])
    assert str(Line("m.py", 7, "make.<locals>.Mlp.__call__")) == "m.py:7 in Mlp.__call__"


def test_code_that_is_of_no_file():
    """As that of `compile(text, "", "exec")`."""
    line = Line("", 3, "f")
    assert line.is_own
    assert str(line) == ":3 in f"
