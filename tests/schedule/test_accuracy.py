"""Predictions beside public measurements: rows, programs, errors, and what is printed of them."""

from collections import Counter
from dataclasses import replace
from functools import cache, partial
from importlib.resources import files
from math import hypot, prod

import jax
import numpy as np
import pytest
from jax import lax

from accuracy.calibrate import Calibration, Error, left_out
from accuracy.calibrate import text_of as written
from jaxpar.schedule import Timeline, compile_for, target, timeline
from jaxpar.tools.accuracy import interval as accuracy_interval
from jaxpar.tools.accuracy.interval import (
    Interval,
    KindOfWork,
    interval_of,
    lines_of,
    of_parts,
    text_of,
    texts_of,
    total_of,
)
from jaxpar.tools.accuracy.measurement import Measurement, measurements
from jaxpar.tools.accuracy.validate import Held, table, validate
from jaxpar.tools.timeline.event import Event
from jaxpar.tools.timeline.target import LONG

BY_NAME = {one.name: one for one in measurements()}


@cache
def validated(name):
    """Compiles once for all tests."""
    return validate(BY_NAME[name], None)


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
    assert validated(name).predicted == pytest.approx(BY_NAME[name].seconds, rel=within)


def test_each_operation_has_a_program():
    """Traced alone: what they do is that of the functions of JAX that they are called after."""
    of_tpus = [one for one in measurements() if one.target.startswith("v")]
    largest_first = sorted(of_tpus, key=lambda one: -prod(one.shape) * one.times)
    seen = {one.op: one for one in largest_first}
    assert {"matmul", "copy", "psum", "all_gather", "all_to_all", "ppermute"} <= set(seen)
    assert timeline(seen["matmul"].compile()).compute > 0
    assert timeline(seen["all_to_all"].compile()).sent_bytes > 0


def measured(name, kind="sum", seconds=1e-3):
    return Measurement(name, kind, "v6e:2x2", "x=4", "psum", ("x",), (8,), "float32", seconds, "s")


V6E = "TPU v6 lite"


def test_tables_of_errors():
    """Rows that nothing was fitted to are told apart; rows inside of the interval are counted."""
    names = [f"row {n}" for n in range(20)]
    held = next(name for name in names if measured(name).is_held_out)
    fitted = next(name for name in names if not measured(name).is_held_out)
    ends = (-0.15, 0.12)
    rows = table(
        [
            Held(measured(held), V6E, 1.1e-3, ends),
            Held(measured(fitted), V6E, 0.8e-3, ends),
            Held(measured(held, "sum", 1e-6), V6E, 2e-6),
            Held(measured(held, "matmul and sum"), V6E, 5e-3, ends),
        ]
    )
    assert rows == [
        [V6E, "matmul and sum", "large", "1", "1", "400%", "400%", "-15%", "+12%", "0 of 1"],
        [V6E, "sum", "small", "1", "1", "100%", "100%", "-", "-", "-"],
        [V6E, "sum", "large", "2", "1", "10%", "10%", "-15%", "+12%", "1 of 2"],
    ]
    only_fitted = table([Held(measured(fitted), V6E, 0.8e-3)])[0]
    assert only_fitted[4:7] == ["0", "-", "-"]


def test_what_validate_returns_has_the_interval_that_is_printed():
    held = validated("v6e-coco-mm-2048x4096x4096")
    interval = interval_of(KindOfWork(V6E, "matmul", True))
    assert held.interval == (interval.low, interval.high)
    assert held.is_inside
    assert held.work == KindOfWork(V6E, "matmul", True)
    assert replace(held, slow=True).work.kind == "matmul between hosts"
    both = validate(BY_NAME["v5e-agmm-naive"], None)  # of two kinds: as a program
    assert both.interval[0] < 0 < both.interval[1]


# -- intervals ------------------------------------------------------------------------------------


@pytest.fixture
def known(monkeypatch):
    """Two kinds on TPUs: five sums of which two are of v6e, three gathers."""
    own = Interval(-0.1, 0.2, 2)
    rows = {
        ("TPU",): Interval(-0.5, 0.5, 8),
        ("TPU", "sends"): Interval(-0.4, 0.4, 8),
        ("TPU", "sends", "sum"): Interval(-0.3, 0.3, 5),
        ("TPU", "sends", "gather"): Interval(-0.3, 0.3, 3),
        (V6E, "sum"): Interval(-0.2, 0.2, 2),
        (V6E, "sum", "large"): own,
    }
    monkeypatch.setattr(accuracy_interval, "_intervals", lambda: rows)
    return rows


def test_a_class_without_measurements_has_the_interval_above_it(known):
    assert interval_of(KindOfWork(V6E, "sum", True)) == Interval(-0.1, 0.2, 2, 3)
    assert interval_of(KindOfWork(V6E, "sum", False)) == Interval(-0.2, 0.2, 0, 5)
    assert interval_of(KindOfWork("TPU v4", "sum", True)) == Interval(-0.3, 0.3, 0, 5)
    assert interval_of(KindOfWork(V6E, "gather", True)) is None  # three measurements
    assert interval_of(KindOfWork(V6E, "matmul", True)) is None


def test_an_interval_in_words(known):
    large = "TPU v6 lite, large sums: -10% to +20%"
    assert text_of(KindOfWork(V6E, "sum", True)) == (
        f"{large} (2 measurements, 3 of other TPUs and sizes)"
    )
    assert text_of(KindOfWork("TPU v4", "sum", False)) == (
        "TPU v4, small sums: -30% to +30% (no measurements, 5 of other TPUs and sizes)"
    )
    assert text_of(KindOfWork(V6E, "gather", True)) == "TPU v6 lite, large gathers: no measurement"
    known[V6E, "sum", "large"] = Interval(-0.1, 0.2, 4)
    assert text_of(KindOfWork(V6E, "sum", True)) == f"{large} (4 measurements)"
    assert text_of(KindOfWork("NVIDIA H200", "sum between hosts", True)).startswith(
        "NVIDIA H200, large sums between hosts: "
    )


def step(*events, estimate="the compiler's cycles"):
    total = max(event.end for event in events)
    return Timeline(events, total, 0.0, 0.0, 0.0, 0.0, 0.0, 0, estimate, ())


SENT = Event("s", "", "transfer", "tp all-gather", 0.0, 60e-6)
MATMUL = Event("m", "", "compute", "compute", 0.0, 30e-6, is_matmul=True)
WAITED = Event("s", "", "wait", "compute", 30e-6, 60e-6)
HIDDEN = Event("h", "", "transfer", "tp +1", 0.0, 5e-6)
SHORT = Event("t", "", "compute", "compute", 60e-6, 61e-6)


def test_the_intervals_of_a_step_are_those_of_what_takes_its_time():
    """A total, then the parts of 5% and more; the errors of two classes are independent."""
    played, v6e = step(SENT, HIDDEN, MATMUL, WAITED, SHORT), target("v6e:2x2")
    total, *parts = texts_of(played, v6e)
    works = [KindOfWork(V6E, "matmul", True), KindOfWork(V6E, "gather", True)]
    assert parts == list(map(text_of, works))
    assert total == f"in all: {total_of(played, v6e)}"
    whole = total_of(step(SENT, MATMUL, WAITED), v6e)
    one, other = map(interval_of, works)
    halves = [(each.high - each.low) / 2 for each in (one, other)]
    assert (whole.high - whole.low) / 2 == pytest.approx(hypot(*halves) / 2)
    assert (whole.high + whole.low) == pytest.approx(
        (one.low + one.high + other.low + other.high) / 2
    )
    assert texts_of(step(MATMUL), v6e) == [text_of(works[0])]


def test_a_long_program_is_as_sure_as_published_steps(monkeypatch):
    """From 0.1 s on, the least interval that contains that of its parts, and that of steps."""
    v6e = target("v6e:2x2")
    rows = dict(accuracy_interval._intervals())
    monkeypatch.setattr(accuracy_interval, "_intervals", lambda: rows)
    several = replace(MATMUL, end=LONG)
    played = step(several)
    parts = of_parts(played, v6e)
    assert parts == of_parts(step(MATMUL), v6e) == total_of(step(MATMUL), v6e)
    rows[V6E, "step"] = Interval(parts.low - 0.1, 0.0, 4)
    assert total_of(played, v6e) == Interval(parts.low - 0.1, parts.high)
    assert texts_of(played, v6e)[0] == f"in all: {total_of(played, v6e)}"
    rows[V6E, "step"] = Interval(0.0, parts.high + 0.1, 4)
    assert total_of(played, v6e) == Interval(parts.low, parts.high + 0.1)
    del rows[V6E, "step"]
    rows["TPU", "step"] = Interval(-0.9, 0.9, 4)  # of other chips
    assert total_of(played, v6e) == Interval(-0.9, 0.9)
    del rows["TPU", "step"]
    assert total_of(played, v6e) == parts


def test_operations_of_a_slowed_program_have_no_interval(known):
    """None was measured under its clock; what it sends was."""
    long = [replace(one, end=one.start + LONG) for one in (SENT, MATMUL, WAITED)]
    parts = {
        chips: [text.partition(":")[0] for text in texts_of(step(*long), target(chips))]
        for chips in ("tpu7x:2x2x1", "v6e:2x2")
    }
    assert parts == {
        "tpu7x:2x2x1": ["TPU7x, large gathers"],
        "v6e:2x2": [f"{V6E}, large matmuls", f"{V6E}, large gathers"],
    }


def test_products_of_a_long_program_take_as_long_as_in_public_loops(monkeypatch):
    """On tpu7x, whose single runs are faster."""
    chips, x = target("tpu7x:2x2x1", "x=8"), jax.ShapeDtypeStruct((2048, 2048), "bfloat16")
    program = compile_for(partial(lax.fori_loop, 0, 20, lambda _, x: x @ x), chips, x)
    short = timeline(program).total
    assert short < LONG
    monkeypatch.setattr("jaxpar.tools.timeline.timeline.LONG", short / 2)
    assert timeline(program).total / short == pytest.approx(1.16, rel=0.02)
    assert timeline(program, replace(chips.chip, kind="TPU v6 lite")).total == short


def test_a_step_of_which_a_part_has_no_measurement_has_no_total():
    row = "tp (XLA's two-shot) all-reduce"
    summed = Event("s", "", "transfer", row, 0.0, 60e-6)
    estimate = "published and XLA's tables and rooflines"
    h100 = target("h100:8")
    alone = step(summed, replace(WAITED, start=0.0), estimate=estimate)
    assert texts_of(alone, h100) == [
        "NVIDIA H100, large sums in kernels of XLA's own: no measurement"
    ]
    beside = step(summed, MATMUL, WAITED, estimate=estimate)
    assert total_of(beside, h100) is None
    assert len(texts_of(beside, h100)) == 2


def test_transfers_between_hosts_are_a_kind_of_their_own():
    sent = replace(SENT, slow=True)
    estimate = "published and XLA's tables and rooflines"
    played = step(sent, replace(WAITED, start=0.0), estimate=estimate)
    [text] = texts_of(played, target("h100:2x8"))
    assert text.startswith("NVIDIA H100, large gathers between hosts: ")


def test_kinds_of_work_without_a_measurement_share_a_line():
    gathers = "TPU v4, large gathers: no measurement"
    memory = "TPU v4, small passes over memory: no measurement"
    matmuls = "TPU v4, large matmuls: -4% to +6% (9 measurements)"
    assert lines_of([gathers, matmuls]) == [matmuls, gathers]
    assert lines_of([gathers, matmuls, memory, gathers, matmuls]) == [
        matmuls,
        "TPU v4, large gathers, small passes over memory: no measurement",
    ]
    other = "TPU v5, large gathers: no measurement"
    assert lines_of([gathers, other, memory])[1] == other  # another chip
    assert lines_of([]) == []


def test_intervals_are_of_the_model_that_was_held_against_measurements():
    """Not of rooflines, nor of other figures of the chip, nor of what was measured itself."""
    v6e, core = target("v6e:2x2"), target("tpu7x:2x2x1")
    assert texts_of(step(MATMUL), v6e)
    assert texts_of(step(MATMUL), core)  # half of a chip
    assert texts_of(step(MATMUL, estimate="tables"), target("h100:8", nccl="2.27"))
    for estimate in ("roofline", "measured"):
        assert texts_of(step(MATMUL, estimate=estimate), v6e) == []
    assert texts_of(step(MATMUL), target("v6e:2x2", figures="book")) == []
    faster = replace(v6e, chip=replace(v6e.chip, flops=2 * v6e.chip.flops))
    assert texts_of(step(MATMUL), faster) == []
    assert texts_of(step(MATMUL), replace(v6e, chip=None)) == []


# -- how they are made ----------------------------------------------------------------------------


def errors(work, source, logarithms):
    return [Error(work, source, one) for one in logarithms]


def test_fewer_errors_make_a_wider_interval():
    """A class leans on the one above it, as if that were eight more errors."""
    sums, few, many = (
        KindOfWork(V6E, "sum", True),
        KindOfWork("TPU v5", "sum", True),
        KindOfWork("TPU7x", "sum", True),
    )
    spread = np.linspace(-1.0, 1.0, 101)
    near = np.linspace(-0.01, 0.01, 200)
    made = Calibration(
        errors(sums, "a", spread) + errors(few, "b", near[::60]) + errors(many, "c", near)
    ).table()
    wide, narrow = (made[one.classes[-1]] for one in (few, many))
    assert (wide.rows, narrow.rows) == (4, 200)
    assert wide.high - wide.low > 5 * (narrow.high - narrow.low)
    assert made[sums.classes[-1]].high == pytest.approx(np.expm1(0.8), abs=0.1)


@pytest.mark.parametrize(("count", "expected"), [(4, 3 / 5), (9, 0.8), (39, 0.8)])
def test_an_interval_holds_for_four_in_five_unseen_errors_of_few(count, expected):
    """Below nine errors even the least and the greatest of them leave more outside."""
    # Of a kind alone: the classes above it are the same errors, so nothing is lent.
    rng, work, inside = np.random.default_rng(0), KindOfWork(V6E, "sum", True), []
    for _ in range(400):
        *seen, unseen = rng.normal(size=count + 1)
        interval = Calibration(errors(work, "a", seen)).table()[work.classes[-1]]
        inside.append(interval.low <= np.expm1(unseen) <= interval.high)
    assert np.mean(inside) == pytest.approx(expected, abs=0.06)


def test_a_source_with_many_errors_does_not_outweigh_the_others():
    work = KindOfWork(V6E, "sum", True)
    many, few = errors(work, "a", [0.0] * 1000), errors(work, "b", [0.5] * 10)
    found = Calibration(many + few).table()[work.classes[-1]]
    assert found.low == pytest.approx(0.0)
    assert found.high == pytest.approx(np.expm1(0.5))


def test_most_errors_lie_in_intervals_that_others_make():
    """The published times of GPUs, each left out: no fewer than 80%, and not all."""
    made = Calibration([one for one in left_out() if one.work.kind != "matmul"])
    inside = np.mean(made.inside(range(0, len(made.errors), 7), "row"))
    assert 0.8 <= inside <= 0.92
    assert np.mean(made.inside(range(0, len(made.errors), 97), "source")) == 0  # one source


def test_the_intervals_that_are_kept_are_read_as_they_were_written():
    text = files("jaxpar.tools.accuracy").joinpath("intervals.json").read_text()
    kept = accuracy_interval._intervals()
    assert len(kept) >= 100
    assert written(kept) == text
    assert all(one.rows and one.low <= one.high for one in kept.values())
