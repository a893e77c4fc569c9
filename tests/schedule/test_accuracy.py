"""Predictions beside public measurements: rows, programs, errors, and what is printed of them."""

from collections import Counter
from dataclasses import replace

import jax
import pytest

from jaxpar.schedule import Timeline, target, timeline
from jaxpar.tools.accuracy.band import Band, band_lines, bands, bands_of, text_of
from jaxpar.tools.accuracy.measurement import Measurement, measurements
from jaxpar.tools.accuracy.validate import Held, bands_from, seconds_of, table
from jaxpar.tools.timeline.event import Event

BY_NAME = {one.name: one for one in measurements()}


def test_rows_have_names_sources_and_kinds():
    assert len(BY_NAME) == len(measurements()) >= 400
    assert all(one.source and one.seconds > 0 for one in measurements())
    kinds = Counter(one.kind for one in measurements())
    assert min(kinds[kind] for kind in ("matmul", "memory", "gather", "sum", "permute")) >= 15
    assert kinds["all-to-all"] >= 15
    held_out = sum(one.is_held_out for one in measurements())
    assert 0.4 < held_out / len(measurements()) < 0.6


@pytest.mark.parametrize(
    ("name", "within"),
    [
        ("v6e-copy-33554432-a", 0.15),
        ("t7x-copy-2097152", 0.15),
        ("t7x-copy-8589934592", 0.15),
        ("v6e-coco-add-2p27", 0.15),
        ("v6e-coco-sum-2p28", 0.15),
        ("v6e-coco-mm-1x4096x4096", 0.2),  # multiplied and summed, not by the matrix unit
        ("v6e-coco-mm-8x4096x4096", 0.1),  # bound by HBM
        ("v6e-coco-mm-2048x4096x4096", 0.1),
        ("v5p-permute-16384", 0.15),
        ("v6e-permute-1024", 0.15),
        ("t7x-ag-2x2x1-1024", 0.1),
        ("t7x-ag-2x2x1-16384", 0.1),
        ("v6e16-a2a16-16MiB", 0.1),
        ("v6e256-a2a256-1MiB", 0.15),
        ("v5e-8-ladder-psum-104857600", 0.1),
    ],
)
def test_near_what_was_measured(name, within):
    one = BY_NAME[name]
    assert seconds_of(one, timeline(one.compile())) == pytest.approx(one.seconds, rel=within)


def test_each_operation_has_a_program():
    """Traced alone: what they do is that of the functions of JAX that they are called after."""
    seen = {one.op: one for one in measurements() if one.target.startswith("v")}
    assert {"matmul", "copy", "psum", "all_gather", "all_to_all", "ppermute"} <= set(seen)
    assert timeline(seen["matmul"].compile()).compute > 0
    assert timeline(seen["all_to_all"].compile()).sent_bytes > 0


def measured(name, kind="sum", seconds=1e-3):
    return Measurement(name, kind, "v6e:2x2", "x=4", "psum", ("x",), (8,), "float32", seconds, "s")


def test_bands_and_tables_of_errors():
    """Those that nothing was fitted to are told apart; the largest errors are those of all."""
    names = [f"row {n}" for n in range(20)]
    held = next(name for name in names if measured(name).is_held_out)
    fitted = next(name for name in names if not measured(name).is_held_out)
    found = [
        Held(measured(held), "TPU v6 lite", 1.1e-3),
        Held(measured(fitted), "TPU v6 lite", 0.8e-3),
        Held(measured(held, "sum", 1e-6), "TPU v6 lite", 2e-6),
        Held(measured(held, "matmul and sum"), "TPU v6 lite", 5e-3),
    ]
    assert bands_from(found) == [
        Band("TPU v6 lite", "sum", False, 1, pytest.approx(1.0), pytest.approx(1.0)),
        Band("TPU v6 lite", "sum", True, 2, pytest.approx(-0.2), pytest.approx(0.1)),
    ]
    rows = table(found)
    assert rows[2] == ["TPU v6 lite", "sum", "large", "2", "1", "10%", "10%", "-20%", "+10%"]
    only_fitted = table([found[1]])[0]
    assert only_fitted[4:7] == ["0", "-", "-"]


def test_a_band_in_words():
    assert str(Band("TPU v6 lite", "gather", True, 9, -0.04, 0.06)) == (
        "TPU v6 lite, large gathers: -4% to +6% in 9 measurements"
    )


def step(*events, estimate="the compiler's cycles"):
    total = max(event.end for event in events)
    return Timeline(events, total, 0.0, 0.0, 0.0, 0.0, 0.0, 0, estimate, ())


def test_the_bands_of_a_step_are_those_of_what_takes_its_time():
    sent = Event("s", "", "transfer", "tp all-gather", 0.0, 60e-6)
    matmul = Event("m", "", "compute", "compute", 0.0, 30e-6, is_matmul=True)
    waited = Event("s", "", "wait", "compute", 30e-6, 60e-6)
    hidden = Event("h", "", "transfer", "tp +1", 0.0, 5e-6)
    short = Event("t", "", "compute", "compute", 60e-6, 61e-6)
    played = step(sent, hidden, matmul, waited, short)
    v6e = target("v6e:2x2")
    found = [(one.chip, one.kind, one.is_large) for one in bands_of(played, v6e)]
    assert found == [("TPU v6 lite", "matmul", True), ("TPU v6 lite", "gather", True)]
    assert bands_of(played, v6e)[0].rows


def test_sums_in_kernels_of_xlas_own_have_no_measurement():
    row = "tp (XLA's two-shot) all-reduce"
    summed = Event("s", "", "transfer", row, 0.0, 60e-6)
    waited = Event("s", "", "wait", "compute", 0.0, 60e-6)
    played = step(summed, waited, estimate="XLA's measured tables and rooflines")
    (band,) = bands_of(played, target("h100:8"))
    assert str(band).endswith("large sums in kernels of XLA's own: no measurement")


def test_kinds_of_work_without_a_measurement_share_a_line():
    gathers = str(Band("TPU v4", "gather", True))
    memory = str(Band("TPU v4", "memory", False))
    matmuls = str(Band("TPU v4", "matmul", True, 9, -0.04, 0.06))
    assert gathers == "TPU v4, large gathers: no measurement"
    assert band_lines([gathers, matmuls]) == [matmuls, gathers]
    assert band_lines([gathers, matmuls, memory, gathers, matmuls]) == [
        matmuls,
        "TPU v4, large gathers, small passes over memory: no measurement",
    ]
    other = str(Band("TPU v5", "gather", True))
    assert band_lines([gathers, other, memory])[1] == other  # another chip
    assert band_lines([]) == []


def test_bands_are_of_the_model_that_was_held_against_measurements():
    """Not of rooflines, nor of other figures of the chip, nor of what was measured itself."""
    matmul = Event("m", "", "compute", "compute", 0.0, 30e-6, is_matmul=True)
    v6e, core = target("v6e:2x2"), target("tpu7x:2x2x1")
    assert bands_of(step(matmul), v6e)
    assert bands_of(step(matmul), core)  # half of a chip
    for estimate in ("roofline", "measured"):
        assert bands_of(step(matmul, estimate=estimate), v6e) == []
    assert bands_of(step(matmul), target("v6e:2x2", figures="book")) == []
    faster = replace(v6e, chip=replace(v6e.chip, flops=2 * v6e.chip.flops))
    assert bands_of(step(matmul), faster) == []
    assert bands_of(step(matmul), replace(v6e, chip=None)) == []


def test_the_bands_that_are_kept_are_read_as_they_were_written():
    assert len(bands()) >= 20
    assert all(one.rows and one.low <= one.high for one in bands())
    assert jax.tree.leaves(text_of(bands()))[0].count("\n") == len(bands()) + 2
