"""Table, picture, trace and JSON of schedules made by hand."""

import json
from dataclasses import asdict, replace
from itertools import pairwise

import numpy as np
import pytest
from rich.console import Console

from jaxpar.tools.cli.predict_command import failure_lines
from jaxpar.tools.cli.predict_results import (
    Failure,
    TargetResults,
    facts_from,
    prediction_from,
    request_from,
    write_json,
)
from jaxpar.tools.cli.predict_views import (
    print_notes,
    print_report,
    rows_of,
    shares,
    without_overlap,
    write_picture,
    write_trace,
)


def printed(report, request):
    console = Console(width=100, record=True, quiet=False)
    print_report(report, request, console)
    print_notes([report], console)
    return console.export_text()


def as_gpu(report):
    of_gpu = [
        replace(p, timeline=replace(p.timeline, estimate="roofline")) for p in report.predictions
    ]
    facts = replace(report.facts, platform="cuda")
    return replace(report, facts=facts, predictions=of_gpu)


def test_table(report, request_made):
    text = printed(report, request_made)
    lines = [" ".join(line.split()) for line in text.splitlines()]
    assert max(map(len, text.splitlines())) <= 100
    assert "v5e:2x2 | 4 x TPU v5 lite | mesh tp=4, ring tp | bfloat16 forward+backward" in text
    assert "compiled by jax 0.12, libtpu 0.0.50" in text
    assert "naive 4.000 2.000 2.00 50.0% 3.00 0.0 1 synchronous" in lines
    assert "bidirectional 2.100 2.000 1.05 3.8% 3.00 0.0 async 3/3, over matmuls 2/3" in lines
    assert "auto the same as bidirectional" in lines
    assert "not measured" in text
    assert "~" not in text


def test_table_names_the_floor_of_one_ring_where_it_is_higher(report, request_made):
    assert "over one ring" not in printed(report, request_made)
    wide = [replace(p, floor=replace(p.floor, one_ring=3e-3)) for p in report.predictions]
    text = printed(replace(report, predictions=wide), request_made)
    assert "scatter-rows 8x8x8; over one ring the floor is 3.000 ms" in text


def test_table_marks_rooflines(report, request_made):
    text = printed(as_gpu(report), request_made)
    assert "~4.000   ~2.000  2.00  ~50.0%" in text
    assert "~ Some or all of these times are rooflines" in text


@pytest.mark.parametrize("what", ["loops_of_unknown_length", "kernels_of_unknown_cost"])
def test_table_marks_lower_bounds(what, report, request_made):
    assert ">" not in printed(report, request_made)
    naive, *others = report.predictions
    least = replace(naive, timeline=replace(naive.timeline, **{what: ("while.1",)}))
    text = printed(as_gpu(replace(report, predictions=[least, *others])), request_made)
    assert ">4.000   ~2.000" in text
    assert text.count(">") == 1
    assert "~2.100   ~2.000" in text


def test_intervals_are_printed_once_and_written(report, request_made, tmp_path):
    interval = "TPU v5 lite, large gathers: -4% to +6% (9 measurements)"
    some = [replace(one, intervals=(interval,)) for one in report.predictions]
    report = replace(report, predictions=some)
    text = " ".join(printed(report, request_made).split())
    assert text.count(f"(predicted / measured - 1): {interval}") == 1
    path = tmp_path / "a.json"
    write_json(str(path), [report], [request_made])
    [entry] = json.loads(path.read_text())["targets"]
    assert [one["intervals"] for one in entry["predictions"]] == [[interval]] * 3
    assert prediction_from(json.loads(json.dumps(asdict(some[0])))) == some[0]


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"links_apart": 2}, "neighbours on the ring tp are up to 2 links apart on this mesh"),
        ({"chip": {"capacity": 2.0**31}}, "3.0 GiB do not fit the 2 GiB of HBM of a device"),
    ],
)
def test_table_warns(report, request_made, change, text):
    changed = replace(report, facts=replace(report.facts, **change))
    assert text in printed(changed, request_made)


def test_table_warns_of_links_that_rings_share(report, request_made):
    def words(facts, predictions=report.predictions):
        changed = replace(report, facts=facts, predictions=predictions)
        return " ".join(printed(changed, request_made).split())

    plane = replace(report.facts, ring=("x", "y"), links_apart=2, disjoint=True)
    assert "so transfers share links; transfers of multi-ring do not" in words(plane)
    disjoint = [replace(p, same_as="multi-ring") for p in report.predictions]
    assert "links apart" not in words(plane, disjoint)
    open_ = replace(plane, disjoint=False, not_closed=("the ends of y are 3 links apart",))
    assert "share no link: the ends of y are 3 links apart; auto does not" in words(open_)
    one_ring = [replace(p, mode="bidirectional", same_as=None) for p in report.predictions]
    assert "share no link" not in words(open_, one_ring)


def test_a_reason_of_several_failures_is_told_once():
    def failed(target, reason, *labels):
        return TargetResults(target, failures=[Failure(label, reason) for label in labels])

    reports = [
        failed("v5e:2x2", "ValueError: no", "scatter 8x8x8 naive", "scatter 8x8x8 auto"),
        failed("h100:8", "ValueError: no", "scatter 8x8x8 auto", "gather 8x8x8 auto"),
        failed("v4:2x2x1", "TypeError: other", "model:f"),
    ]
    assert failure_lines(reports) == [
        "ValueError: no; in 4 rows: v5e:2x2 scatter 8x8x8 (naive, auto), h100:8 scatter 8x8x8 "
        "(auto), h100:8 gather 8x8x8 (auto)",
        "v4:2x2x1 model:f: TypeError: other",
    ]
    assert failure_lines([failed("a:1", "no", ""), failed("b:2", "no", "")]) == [
        "no; in 2 targets: a:1, b:2"
    ]
    assert failure_lines([]) == []


def test_results_survive_json(report, request_made):
    for prediction in report.predictions:
        sent = json.loads(json.dumps(asdict(prediction)))
        assert prediction_from(sent) == prediction
    assert facts_from(json.loads(json.dumps(asdict(report.facts)))) == report.facts
    assert request_from(json.loads(json.dumps(asdict(request_made)))) == request_made


def test_json_has_all(report, request_made, tmp_path):
    path = tmp_path / "a.json"
    report.failures.append(Failure("scatter-rows 8x8x8 naive", "ValueError: no"))
    write_json(str(path), [report], [request_made])
    record = json.loads(path.read_text())
    assert "not measured" in record["note"]
    [entry] = record["targets"]
    assert entry["request"]["compiler_options"] == {"xla_a": True}
    assert entry["facts"]["chip"]["link"] == 4.5e10
    assert entry["facts"]["versions"] == {"jax": "0.12", "libtpu": "0.0.50"}
    assert [failure["reason"] for failure in entry["failures"]] == ["ValueError: no"]
    naive, ring, auto = entry["predictions"]
    assert naive["ratio"] == 2
    assert naive["exposed_share"] == 0.5
    assert naive["floor"] == {"compute": 2e-3, "transfer": 1e-3, "one_ring": 0.0}
    assert auto["same_as"] == "bidirectional"
    assert {"name", "op", "kind", "row", "start", "end", "bytes", "covers"} <= set(
        ring["timeline"]["events"][0]
    )


def test_trace_is_what_perfetto_reads(report, tmp_path):
    path = tmp_path / "trace.json"
    write_trace(str(path), [report])
    record = json.loads(path.read_text())
    assert "not measured" in record["otherData"]["note"]
    events = record["traceEvents"]
    names = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    assert names == {
        1: "v5e:2x2 scatter-rows 8x8x8 naive",
        2: "v5e:2x2 scatter-rows 8x8x8 bidirectional",
    }
    threads = {
        (e["pid"], e["tid"]): e["args"]["name"] for e in events if e["name"] == "thread_name"
    }
    assert [threads[2, tid] for tid in range(1, 6)] == [
        *("compute", "tp +1", "tp +1 (2)", "tp -1", "memory"),
    ]
    complete = [e for e in events if e["ph"] == "X"]
    assert len(complete) == 3 + 7
    for thread in threads:
        mine = sorted((e["ts"], e["dur"]) for e in complete if (e["pid"], e["tid"]) == thread)
        for (start, length), (following, _) in pairwise(mine):
            assert start + length <= following + 1e-6
    [send] = [e for e in complete if e["name"] == "send"]
    assert (send["ts"], send["dur"]) == (0, 1000)
    assert send["args"] == {
        "op": "jit(f)/send",
        "kind": "transfer",
        "bytes": 2.0,
        "synchronous": False,
        "covers": ["dot.1"],
        "is_matmul": False,
    }
    assert any(e["name"] == "wait for send" and e["cat"] == "wait" for e in complete)


def test_rows_in_reading_order(report):
    rows = rows_of(report.predictions[1].timeline)
    assert list(rows) == ["compute", "tp +1", "tp -1", "memory"]
    assert [[e.name for e in part] for part in without_overlap(rows["tp +1"])] == [
        ["send"],
        ["send.1"],
    ]
    assert len(without_overlap(rows["tp +1"], slack=1e-3)) == 1


def test_shares_of_time(report):
    edges = np.array([0, 1e-3, 2e-3, 3e-3])
    found = rows_of(report.predictions[1].timeline)["tp +1"]
    np.testing.assert_allclose(shares(found, edges), [1, 0.5, 0])  # where two overlap, no more
    np.testing.assert_array_equal(shares([], edges), [0, 0, 0])


def test_picture_of_a_long_loop(report, request_made, tmp_path):
    path = tmp_path / "a.png"
    ring = report.predictions[1]
    step = ring.timeline.events
    events = tuple(
        replace(event, start=event.start + trip * 2.1e-3, end=event.end + trip * 2.1e-3)
        for trip in range(500)
        for event in step
    )
    long = replace(ring, timeline=replace(ring.timeline, events=events, total=500 * 2.1e-3))
    write_picture(str(path), [replace(report, predictions=[long])], [request_made])
    assert path.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("suffix", ["png", "svg"])
@pytest.mark.parametrize("targets", [1, 2])
def test_picture(report, request_made, suffix, targets, tmp_path):
    path = tmp_path / f"a.{suffix}"
    reports = [report, as_gpu(report)][:targets]
    nothing = TargetResults("v5e:9x9", failures=[Failure("", "unknown")])
    requests = [request_made] * (targets + 1)
    write_picture(str(path), [*reports, nothing], requests)
    data = path.read_bytes()
    assert data.startswith(b"\x89PNG") if suffix == "png" else b"<svg" in data
