"""The benchmark of compile time runs, in a process of its own, with rings of 8."""

import json
import subprocess
import sys
from pathlib import Path

from jaxpar.ring.run import UNROLLED

FOLDER = Path(__file__).parent


def test_reports_every_program_unrolled_and_as_a_loop(tmp_path):
    data, plot = tmp_path / "rows.json", tmp_path / "plot.png"
    args = ["--sizes", "8", "--repeats", "1", "--json", str(data), "--plot", str(plot)]
    done = subprocess.run(
        [sys.executable, str(FOLDER), *args], capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    assert "matmul_reduce_scatter, bidirectional, forward+backward" in done.stdout
    assert plot.read_bytes().startswith(b"\x89PNG")

    record = json.loads(data.read_text())
    assert record["unrolled"] == UNROLLED
    rows = record["rows"]
    programs = {(r["op"], r["mode"], r["phase"], r["form"]) for r in rows}
    assert len(rows) == len(programs) == 16
    assert {r["size"] for r in rows} == {8}
    assert all(r["compile_seconds"] > 0 and r["hlo_instructions"] > 0 for r in rows)
    for unrolled, loop in zip(rows[::2], rows[1::2], strict=True):
        assert (unrolled["form"], loop["form"]) == ("unrolled", "loop")
        assert loop["stablehlo_bytes"] != unrolled["stablehlo_bytes"]
