"""Errors are those of the arithmetic, in every mode, and the tables end up in the README."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import low_bit.__main__ as command
import tables
from jaxpar import make_mesh
from jaxpar.tools.cli.console import UsageError
from language_model.config import Model, Training
from language_model.tests import reference
from low_bit import errors, scatter, trained, training
from low_bit.operands import FEATURES, drawn

SMALL = (64, 128, 64)


def test_the_error_of_an_array():
    truth = np.array([3.0, -4.0])
    assert errors.error(np.add(truth, [0.3, 0.4]), truth) == pytest.approx((0.1, 0.1))
    assert errors.error(truth, truth) == (0, 0)


def test_distributions():
    normal, places, features, small = drawn(*SMALL)
    outliers = np.abs(places.x / normal.x - 100) < 1e-9
    assert 0 < outliers.sum() < 10
    np.testing.assert_array_equal(places.x[~outliers], normal.x[~outliers])
    columns = np.abs(features.x / normal.x).mean(axis=0)
    assert sorted(columns.round())[-FEATURES - 1 :] == [1, *[100] * FEATURES]
    # Of each feature the result has as much as of any other.
    np.testing.assert_allclose(small.x @ small.w * _factors(small), normal.x @ normal.w)
    assert 2 < normal.largest < 4 < features.largest < SMALL[1] ** 0.5


def _factors(case):
    """What the cotangent's outliers divide columns of the weight by."""
    return np.abs(case.ct / drawn(*SMALL)[0].ct).mean(axis=0)


def test_the_error_is_that_of_rounding():
    """Of int8 a twelfth of the square of a step, which is a 127th of the row's largest number."""
    case = drawn(*SMALL)[0]
    steps = np.abs(case.x).max(axis=1) / 127
    expected = np.sqrt(np.mean(steps**2) / 12 / np.mean(case.x**2))
    found, _ = errors.forward(case, "float32", "int8", size=4)
    assert found == pytest.approx(expected, rel=0.1)
    blocks, _ = errors.forward(case, "float32", "int8 / 32", size=4)
    assert blocks < 0.9 * found
    exact, _ = errors.forward(case, "float32", "none", size=4)
    assert exact < 1e-6
    coarse, _ = errors.forward(case, "float32", "float8_e4m3fn", size=4)
    assert coarse > 3 * found


@pytest.mark.parametrize("dim", [0, 1])
def test_weights_are_gathered(dim):
    case = replace(drawn(*SMALL)[0], gather="rhs", dim=dim)
    found, _ = errors.forward(case, "float32", "int8", size=4)
    assert 0.003 < found < 0.01


def test_gradients_that_nothing_in_8_bits_is_part_of_are_exact():
    case = drawn(*SMALL)[0]
    rounded = {"gather, dw", "scatter, dx", "scatter, dw"}
    for wire, expected in (
        ("none", set()),
        ("int8", rounded),
        ("int8, exact cotangents", {"gather, dw"}),
    ):
        found = errors.gradients(case, "float32", wire, size=4)
        assert {name for name, (rms, _) in found.items() if rms > 1e-5} == expected


def test_all_modes_and_sizes_have_one_error(monkeypatch):
    monkeypatch.setattr(command, "EIGHT_BITS", ("int8",))
    command.check_rings(drawn(*SMALL)[0], "float32", sizes=(2, 4))
    with pytest.raises(AssertionError, match="int8: errors differ"):
        command._require_alike({"naive": (0.01, 0.0), "ring": (0.02, 0.0)}, "int8")


def test_the_rows_with_the_least_and_the_largest_errors():
    rows = [[name, "0 (0)", *errors] for name, *errors in (
        ("a", "0.2 (9)", "3 (1)"), ("b", "0.4 (1)", "3 (2)"), ("c", "0.3 (1)", "2 (1)"),
        ("d", "0.3 (1)", "2.5 (1)"),
    )]  # fmt: skip
    table = command.extremes(tables.Table(["case", "none", "int8", "float8_e4m3fn"], rows))
    assert [row[0] for row in table.rows] == ["a", "b", "c"]


def test_a_collective_rounds_partial_sums_in_8_bits_once(monkeypatch):
    monkeypatch.setattr(errors, "MODES", ("naive",))
    table = command.sums_table(drawn(*SMALL)[0], "float32", sizes=(2, 8))
    assert table.titles[1:] == ["naive", "int8, naive", "float8_e4m3fn, naive"]
    (_, *few), (_, *many) = ([float(cell.split()[0]) for cell in row] for row in table.rows)
    assert max(few[0], many[0]) < 1e-6
    assert 1e-3 < few[1] < few[2]
    assert many[1] == pytest.approx(few[1], rel=0.2)


@pytest.fixture(scope="module")
def model():
    """One that has learned for a step."""
    sizes = Model(257, width=64, layers=2, heads=2, kv_heads=2, head_size=32, hidden=96)
    once = Training(steps=1, batch=8, sequence=8, validation_batches=1)
    with jax.numpy_dtype_promotion("standard"):
        return trained.train(sizes, once)


def test_inputs_and_cotangents_make_the_gradient(model, monkeypatch):
    inputs, cts = computed = trained.inputs_and_cotangents(model)
    monkeypatch.setattr(trained, "inputs_and_cotangents", lambda _: computed)
    truth = jax.jit(jax.grad(reference.loss), static_argnums=(3, 4))(
        jax.tree.map(jnp.asarray, model.params), *model.batch, model.model, model.training
    )
    for name in ("output", "down"):
        found = np.einsum("ltk,ltd->lkd", inputs[name], cts[name])
        np.testing.assert_allclose(found, truth["layers"][name], rtol=1e-3, atol=1e-6)
    cases = trained.cases(model)
    assert [len(cases[name]) for name in ("activations", "weights", "cotangents")] == [4, 6, 4]
    down = cases["weights"][2]
    np.testing.assert_array_equal(down.w, model.params["layers"]["down"][0])


def test_a_step_with_each_wire(model, monkeypatch):
    """Of the model's first layer: more of them take longer to compile."""
    monkeypatch.setattr(command, "EIGHT_BITS", ("int8",))
    first = jax.tree.map(lambda w: w[:1], model.params["layers"])
    less = replace(model.model, layers=1), model.params | {"layers": first}
    with jax.numpy_dtype_promotion("standard"):
        table = command.step_table(replace(model, model=less[0], params=less[1]))
    assert [row[0] for row in table.rows] == ["float32, int8", "bfloat16, none", "bfloat16, int8"]
    for _, loss, gradient in table.rows:
        assert 0 < abs(float(loss)) < 1e-2
        assert 1e-3 < float(gradient) < 0.05


def logged(seed, validation, wire=None, dtype="float32"):
    losses = [9.0, *[validation + 1.0] * training.LAST]
    sizes = {"dtype": dtype}
    run = {"model": sizes, "training": {"seed": seed}, "losses": losses, "mesh": "tp=2"}
    return {**run, "validation": validation, "wire_dtype": wire}


def test_the_table_of_training():
    int8 = {"dtype": "int8", "columns": None, "sums": None, "cotangents": True}
    runs = [logged(0, 2.02, int8), logged(1, 4.0, int8), logged(0, 2.0), logged(1, 4.0)]
    table = training.table(runs)
    assert table.rows == [
        ["float32, none", "2", "4.0000 ± 1.4142", "", "3.0000 ± 1.4142", ""],
        [
            *("float32, int8", "2", "4.0100 ± 1.4001", "+0.33% (+0.00% to +0.67%)"),
            *("3.0100 ± 1.4001", "+0.50% (+0.00% to +1.00%)"),
        ],
    ]
    with pytest.raises(UsageError, match="no exact bfloat16 run of seed 0; add it"):
        training.table([logged(0, 2.0, int8, "bfloat16")])


@pytest.mark.parametrize("section", [*command.PARTS, command.TRAINING])
def test_the_readme_has_the_markers(section):
    assert tables.rewrite(command.README.read_text(), section, "new").count("new") >= 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--parts", "real"], "--parts has 'real'; choose from drawn,rings,trained"),
        (["--steps", "0"], "--steps must be at least 1, got 0"),
    ],
)
def test_unknown_arguments(arguments, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(arguments)
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("make", ["ring", "ring_in_8_bits", "rings", "rings_in_8_bits"])
def test_steps_whose_time_is_predicted(make):
    mesh = make_mesh("dp=2,tp=4")
    step, operands = getattr(scatter, make)(mesh)
    assert jax.eval_shape(step, *operands).shape == (scatter.ROWS, scatter.COLUMNS)
    assert ("i8[" in str(jax.make_jaxpr(step)(*operands))) == make.endswith("8_bits")
