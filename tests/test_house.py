"""Budgets of the house: what imports what, how large it is, and what tracing costs.

Each figure is a ceiling that may only fall. Whoever makes one smaller lowers the ceiling; who needs
more takes something away first. What a budget is of stands at its test.
"""

import ast
import inspect
import subprocess
import sys
from functools import cache
from importlib import import_module
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar

SOURCE = Path(jaxpar.__file__).parent
TOOLS = "jaxpar.tools"
# Where the toolkit asks for a tool, when a user does.
DOORS = {"jaxpar.layout._layout", "jaxpar.__main__"}


def module_of(path):
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


FILES = {module_of(path): path for path in SOURCE.rglob("*.py")}


@cache
def imports():
    """The modules that each module imports: as it is loaded, in functions, and for types."""
    return {module: _imports(path) for module, path in FILES.items()}


def _imports(path):
    found = {"loaded": set(), "in functions": set(), "types": set()}

    def walk(node, kind):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for part in node.body:
                walk(part, "types")
            for part in node.orelse:
                walk(part, kind)
            return
        if isinstance(node, ast.FunctionDef) and kind == "loaded":
            kind = "in functions"
        if kind == "types" and path.stem in ("__init__", "schedule"):
            return  # names that are found on demand
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            inner = {f"{node.module}.{name.name}" for name in node.names}
            found[kind] |= {name if name in FILES else node.module for name in inner}
        if isinstance(node, ast.Import):
            found[kind] |= {name.name for name in node.names}
        for part in ast.iter_child_nodes(node):
            walk(part, kind)

    walk(ast.parse(path.read_text()), "loaded")
    return {kind: names & set(FILES) for kind, names in found.items()}


def closure(module):
    """All modules that are loaded with one, itself among them, without packages' own files."""
    found, left = set(), [module]
    while left:
        found.add(one := left.pop())
        left += imports()[one]["loaded"] - found
    return found


def lines_of(modules):
    return sum(len(FILES[module].read_text().splitlines()) for module in modules)


@pytest.mark.parametrize(
    ("name", "module", "files", "lines"),
    [
        ("all_gather_matmul", "jaxpar.matmul._matmuls", 50, 8401),
        ("LayoutMap", "jaxpar.layout._map", 34, 5593),
        ("gated_mlp", "jaxpar.layers._tensor", 55, 9014),
        ("moe_layer", "jaxpar.moe._layer", 73, 13678),
        ("ring_attention", "jaxpar.layers._ring_attention", 42, 7312),
    ],
)
def test_what_a_name_loads(name, module, files, lines):
    found = closure(module)
    assert len(found) <= files and lines_of(found) <= lines, (  # noqa: PT018
        f"{name} loads {len(found)} files of {lines_of(found)} lines, at most {files} of {lines}: "
        "have it import less, or what it imports be smaller"
    )


def circles(kinds):
    """Groups of modules that import one another."""
    reached = {
        module: _reached(module, lambda one: set().union(*(imports()[one][k] for k in kinds)))
        for module in FILES
    }
    return {
        frozenset(other for other in reached[module] if module in reached[other])
        for module in FILES
        if module in reached[module]
    }


def _reached(module, following):
    found, left = set(), list(following(module))
    while left:
        one = left.pop()
        if one not in found:
            found.add(one)
            left += following(one)
    return found


def test_no_circles():
    assert not circles(["loaded"]), "move what both need into a module that imports neither"


def test_circles_of_types():
    largest = max(map(len, circles(["loaded", "types"])), default=0)
    assert largest <= 16, "have one side know the other by a protocol, or by what it needs of it"


def test_the_wall():
    """The toolkit does not load the tools, and the tools know its private names by one file."""
    through = {
        module
        for module in FILES
        if not module.startswith(TOOLS)
        for kind in ("loaded", "in functions")
        if any(name.startswith(TOOLS) for name in imports()[module][kind])
    }
    assert through <= DOORS, "a tool is imported by whom it looks at: ask for it when a user does"
    private = {
        (module, name)
        for module in FILES
        if module.startswith(TOOLS) and module != f"{TOOLS}.private_names"
        for name in set().union(*imports()[module].values())
        if not name.startswith(TOOLS) and name not in PUBLIC
    }
    assert not private, f"import these names in {TOOLS}.private_names, and from there"


PUBLIC = {
    *("jaxpar", "jaxpar.layers", "jaxpar.layout", "jaxpar.mesh", "jaxpar.moe"),
    *("jaxpar.schedule", "jaxpar.testing", "jaxpar.collectives", "jaxpar.matmul"),
}


def test_what_importing_loads():
    """`import jaxpar` loads no part of it, and one name what that name needs."""
    program = "import sys, jaxpar; print(*[m for m in sys.modules if m.split('.')[0] == 'jaxpar'])"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    assert len(said.stdout.split()) <= 3
    program = program.replace("; print", "; jaxpar.all_gather_matmul; print")
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, check=True)
    parts = {name.split(".")[1] for name in said.stdout.decode().split() if "." in name}
    assert not parts & {"tools", "layout", "moe", "layers", "schedule", "testing"}


@pytest.mark.parametrize("package", sorted(PUBLIC))
def test_a_package_shows_its_public_names_alone(package):
    module = import_module(package)
    parts = {name.split(".")[-1] for name in FILES if name.startswith(f"{package}.")}
    shown = {name for name in dir(module) if not name.startswith("_")}
    assert shown <= {*module.__all__, *parts, "AxisLike", "Mode"}  # for annotations
    assert all(getattr(module, name) is not None for name in module.__all__)


@pytest.mark.parametrize(
    ("of", "most"),
    [
        ("jaxpar.ring.ways.Way", 18),
        ("jaxpar.ring.order.Work", 4),
        ("jaxpar.ring.in_turns.InTurns", 8),
        ("jaxpar.choose.problem.Problem", 14),
        ("jaxpar.choose.flow.Flow", 16),
        ("jaxpar.choose.fitted.Fitted", 11),
    ],
)
def test_facts_of_the_core(of, most):
    """Fields, and of a `Way` what each must know of itself."""
    module, _, name = of.rpartition(".")
    kind = getattr(import_module(module), name)
    fields = set(inspect.get_annotations(kind))
    own = {*fields, *(key for key in vars(kind) if not key.startswith("_"))}
    found = sorted(own if name == "Way" else fields)
    assert len(found) <= most, f"{of} has {found}: a new fact takes the place of another"


def functions():
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.FunctionDef):
                yield f"{module_of(path)}.{node.name}", node


def body_lines(node):
    """The lines of a function without its signature and docstring."""
    body = node.body[1:] if ast.get_docstring(node) else node.body
    return body[-1].end_lineno - body[0].lineno + 1 if body else 0


# What is over the limit today.
LONG = {
    "jaxpar.choose.choice.by_time": 69,
    "jaxpar.moe._layer.moe_layer": 64,
    "jaxpar.ring.in_turns.circulate": 62,
    "jaxpar.ring.scatter._phase": 80,
    "jaxpar.testing._reference.assert_matches_reference": 67,
    "jaxpar.tools.cli.explain_page._shown": 69,
}
NESTED = {
    "jaxpar.layers._attention_passes._bwd": 6,
    "jaxpar.layers._attention_passes._forward": 7,
    "jaxpar.ring.gather._past": 6,
    "jaxpar.ring.in_turns.circulate": 7,
    "jaxpar.ring.scatter._phase": 10,
}


def test_length_of_functions():
    long = {
        name: lines
        for name, node in functions()
        if (lines := body_lines(node)) > LONG.get(name, 60)
    }
    assert not long, "a function has at most 60 lines beside its docstring: part what it does"


def test_functions_inside_of_functions():
    nested = {
        name: count
        for name, node in functions()
        if (count := sum(isinstance(n, ast.FunctionDef) for n in ast.walk(node)) - 1)
        > NESTED.get(name, 5)
    }
    assert not nested, "give them what they close over as arguments, or make a class of it"


def calls_of(trace):
    """How many Python functions are called."""
    count = 0

    def seen(frame, event, argument):
        nonlocal count
        count += event == "call"

    sys.setprofile(seen)
    try:
        trace()
    finally:
        sys.setprofile(None)
    return count


def test_tracing_a_ring():
    """A ring of 8 with gradients against naive, in Python calls, after both were traced once."""
    mesh = jaxpar.make_mesh("tp=8")

    def traced(mode, rows):
        def loss(x, w):
            return jaxpar.all_gather_matmul(x, w, "tp", dim=0, mode=mode).sum()

        function = jax.shard_map(
            jax.grad(loss, (0, 1)),
            mesh=mesh,
            in_specs=(P("tp"), P(None, "tp")),
            out_specs=(P("tp"), P(None, "tp")),
        )
        x, w = (jax.ShapeDtypeStruct(s, jnp.float32) for s in ((rows, 16), (16, 64)))
        return lambda: jax.jit(function).trace(x, w)

    for mode in ("naive", "bidirectional"):
        traced(mode, 128)()
    naive, ring = (calls_of(traced(mode, 256)) for mode in ("naive", "bidirectional"))
    assert ring <= 9.5 * naive, f"{ring} calls, {naive} of naive: trace less in each step"
