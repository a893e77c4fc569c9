"""Two processes of four CPU devices each, over Gloo."""

import json

from programs import free_port, run_together


def test_two_processes_measure_one_ring(tmp_path):
    data = tmp_path / "bench.json"
    command = [
        *("-m", "jaxpar", "bench", "--shapes", "16x16x16", "--repeats", "2"),
        *("--ops", "gather-lhs-rows,scatter-rows", "--modes", "bidirectional", "--json", str(data)),
        *("--coordinator", f"localhost:{free_port()}", "--num-processes", "2", "--process-id"),
    ]
    (out, error, status), (silent, its_error, its_status) = run_together(
        [[*command, str(rank)] for rank in range(2)]
    )
    assert (status, its_status) == (0, 0), error + its_error
    assert "8 x cpu in 2 processes | mesh tp=8" in out
    assert "scatter-rows 16x16x16, forward+backward\n" in out
    assert "Gloo" not in out
    assert silent == ""
    record = json.loads(data.read_text())
    assert (record["devices"], record["processes"]) == (8, 2)
    assert len(record["rows"]) == 2 * 2 * 2
