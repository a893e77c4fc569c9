"""The benchmark on a slow network: reports, refusals, and two processes without a limit."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import jaxpar
from network import report
from network.__main__ import main

FOLDER = Path(__file__).parent


def run(*args, **env):
    return subprocess.run(
        [sys.executable, str(FOLDER), *args],
        env=os.environ | {"PYTHONPATH": str(Path(jaxpar.__file__).parents[1])} | env,
        capture_output=True,
        text=True,
        timeout=600,
    )


ROWS = [
    report.Row("scatter", "naive", [4.0, 6.0, 9.0], [4.0, 6.0, 9.0], 100, 200, 0),
    report.Row("scatter", "unidirectional", [2.0, 4.0, 3.0], [4.0, 6.0, 9.0], 80, 200, 76),
    report.Row("scatter", "serial", [4.0, 5.0, 9.0], [4.0, 6.0, 9.0], 80, 200, 0),
]


def test_report(tmp_path, capsys):
    report.print_table(ROWS)
    title, naive, ring, serial = capsys.readouterr().out.splitlines()
    assert title.split() == [*("scatter", "ms", "x", "naive", "x", "serial"), *title.split()[-3:]]
    assert naive.split() == ["naive", "6000", "1.00", "1.00", "0%", "100", "200"]
    assert ring.split() == ["unidirectional", "3000", "2.00", "2.00", "95%", "80", "200"]
    assert serial.split() == ["serial", "5000", "1.00", "1.00", "0%", "80", "200"]

    run = report.Run("2gbit", "8x8x8", 4, 3)
    report.write_json(str(tmp_path / "rows.json"), run, ROWS)
    record = json.loads((tmp_path / "rows.json").read_text())
    assert [row["covered"] for row in record["rows"]] == [0, 0.95, 0]
    assert [row["speedup"] for row in record["rows"]] == [1, 2, 1]
    report.write_plot(str(tmp_path / "rows.png"), run, ROWS)
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_says_in_one_line_what_it_lacks(tmp_path):
    done = run(PATH=str(tmp_path))
    assert (done.returncode, done.stdout) == (2, "")
    (line,) = done.stderr.splitlines()
    assert line.startswith("network: no slow network could be made (it needs Linux with unshare")
    assert "run `sudo nox -s figures -- network`" in line


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--rate", "fast"], "--rate must be like 500mbit or 6gbit, or none, got 'fast'"),
        (["--rounds", "0"], "--rounds at least 1"),
        (["--processes", "1"], "--processes must be at least 2"),
        (["--shape", "8x8"], "--shape must be MxKxN, each a multiple of 4 processes, got '8x8'"),
        (["--shape", "8x6x8"], "each a multiple of 4 processes, got '8x6x8'"),
        (["--cases", "scatter;gather"], "--cases has 'gather'; choose from gather lhs;"),
    ],
)
def test_refuses_arguments(args, message, capsys):
    with pytest.raises(SystemExit, match="2"):
        main(args)
    assert message in capsys.readouterr().err


def test_two_processes_without_a_limit(tmp_path):
    data = tmp_path / "rows.json"
    cases = "scatter;gather lhs, forward+backward"
    shape = ["--processes", "2", "--shape", "64x128x192", "--rounds", "1"]
    env = {"JAX_NUM_CPU_DEVICES": "1", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"}
    done = run("--rate", "none", *shape, "--cases", cases, "--json", str(data), **env)
    assert done.returncode == 0, done.stderr
    rows = json.loads(data.read_text())["rows"]
    variants = ["naive", "unidirectional", "bidirectional", "serial", "memory scheduler"]
    assert [row["variant"] for row in rows] == 2 * variants
    assert all(row["seconds"][0] > 0 and row["transfer_ms"] > 0 for row in rows)
    assert all(0 <= row["covered"] <= 1 for row in rows)
