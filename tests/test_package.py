"""What the package promises as a whole."""

import inspect
import re
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jaxtyping import Float, TypeCheckError, jaxtyped
from signatures import checked

import jaxpar
from jaxpar.moe._copies import take_rows


def test_eight_devices():
    assert jax.device_count() == 8
    assert jax.devices()[0].platform == "cpu"


def test_shapes_are_checked_here():
    with pytest.raises(TypeCheckError, match="places"):
        take_rows(jnp.ones((3, 2)), jnp.ones(2, bool))


@pytest.mark.parametrize("attempt", ["first", "second"])
def test_shapes_inside_of_a_function_are_checked_each_time(attempt):
    @jaxtyped(typechecker=checked)
    def first_of(rows: Float[np.ndarray, "n"], others: Float[np.ndarray, "n"]) -> float:
        return rows[0] + others[0]

    assert first_of(np.ones(2), np.ones(2)) == 2
    with pytest.raises(TypeCheckError, match="others"):
        first_of(np.ones(2), np.ones(3))


def test_needs_only_its_runtime_dependencies():
    """Importing everything pulls in neither the extras' libraries nor a backend."""
    program = (
        "import sys, jaxpar, jaxpar.__main__\n"
        "from jaxpar import collectives, layers, layout, matmul, mesh, moe, pipeline, schedule\n"
        "from jaxpar import testing\n"
        "parts = collectives, layers, layout, matmul, mesh, moe, pipeline, schedule, testing\n"
        "for part in jaxpar, *parts:\n"
        "    assert [getattr(part, name) for name in part.__all__]\n"
        "extras = {'hypothesis', 'rich', 'matplotlib', 'beartype', 'optax', 'orbax'}\n"
        "assert not extras & set(sys.modules), extras & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def public_names():
    parts = jaxpar.layers, jaxpar.layout, jaxpar.mesh, jaxpar.moe, jaxpar.schedule, jaxpar.testing
    parts = (*parts, jaxpar.pipeline)
    for module in (jaxpar, *parts):
        yield from (x for name in module.__all__ if callable(x := getattr(module, name)))


def test_everything_comes_with_the_package():
    program = "import jaxpar; jaxpar.testing.tolerance, jaxpar.schedule.timeline, jaxpar.moe.route"
    subprocess.run([sys.executable, "-c", program], check=True)


@pytest.mark.parametrize("named", list(public_names()), ids=lambda named: named.__qualname__)
def test_help_shows_readable_signatures(named):
    shown = str(inspect.signature(named))
    assert not re.search(
        r"_src|AxisLike|Role\b|What\b|Cause\b|Options\b|RoutingLike|ExpertsLike|Union\[|typing\.|jaxlib|SupportsDType|ForwardRef"
        r"|: '",  # quoted annotations
        shown,
    ), shown


def test_help_shows_what_may_be_given():
    mode = "mode: Literal['naive', 'stationary', 'chunked-2', 'chunked-4', 'chunked-8', "
    mode += "'unidirectional', 'bidirectional', 'multi-ring', 'auto']"
    gather = str(inspect.signature(jaxpar.all_gather_matmul))
    assert "axis: str | tuple[str, ...] | list[str] | Axis," in gather
    assert f"{mode} | None = None" in gather
    assert "preferred_element_type: DTypeLike | None = None" in gather
    assert f"{mode} = 'auto'" in str(inspect.signature(jaxpar.Axis))


@pytest.mark.parametrize(
    ("package", "old", "new"),
    [
        (jaxpar, "ring_all_gather", "all_gather"),
        (jaxpar, "ring_einsum", "collective_einsum"),
        (jaxpar.collectives, "ring_all_reduce", "all_reduce"),
        (jaxpar.matmul, "ring_einsum", "collective_einsum"),
        (jaxpar.layers, "value_and_grad", "mean_value_and_grad"),
        (jaxpar.schedule, "Assumed", "Assumptions"),
    ],
)
def test_an_old_name_says_the_new_one(package, old, new):
    text = f"{package.__name__}.{old} is {package.__name__}.{new} since 0.6"
    with pytest.warns(DeprecationWarning, match=f"^{text}$"):
        assert getattr(package, old) is getattr(package, new)
    assert old not in dir(package)


def test_an_old_name_has_its_old_defaults():
    text = "vocab_parallel_embedding since 0.6; the old name goes on with {'sequence_dim': None}"
    with pytest.warns(DeprecationWarning, match=text):
        embedding = jaxpar.layers.vocabulary_parallel_embedding
    assert embedding.func is jaxpar.layers.vocab_parallel_embedding
    assert embedding.keywords == {"sequence_dim": None}


def test_is_typed():
    assert (Path(jaxpar.__file__).parent / "py.typed").exists()
