"""The command as a user meets it: reports, files, refusals and the text of every error."""

import json
import socket
import subprocess
import sys

import jax
import pytest
from programs import environment

import jaxpar
from jaxpar.tools.cli.main import main

SMALL = ("bench", "--shapes", "16x16x16", "--repeats", "2", "--ops", "gather-lhs-rows")


def test_reports_on_terminal_json_and_plot(tmp_path, capsys):
    data, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    ops = "gather-rhs-k,scatter-rows"
    args = [*SMALL[:-1], ops, "--json", str(data), "--plot", str(plot)]
    assert main(args) == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= 100
    assert "8 x cpu | mesh tp=8, ring tp | float32 | jax" in text
    assert "simulated CPU devices that share the cores" in text
    for op in ops.split(","):
        for phase in ("forward", "forward+backward"):
            assert f"{op} 16x16x16, {phase}\n" in text
    assert plot.read_bytes().startswith(b"\x89PNG")

    record = json.loads(data.read_text())
    assert record.keys() == {
        *("jaxpar", "jax", "python", "device_kind", "platform", "devices", "processes", "mesh"),
        *("ring", "dtype", "modes", "repeats", "notes", "host", "rows", "refused"),
    }
    assert record["jax"] == jax.__version__
    assert record["mesh"] == {"tp": 8}
    assert record["repeats"] == {"forward": 2, "forward+backward": 1}
    assert record["refused"] == []
    modes = ["naive", "unidirectional", "bidirectional"]
    assert [row["mode"] for row in record["rows"]] == modes * 4
    for row in record["rows"]:
        results = {"out"} if row["phase"] == "forward" else {"out", "dlhs", "drhs"}
        assert row["errors"].keys() == row["tolerances"].keys() == results
        assert all(row["errors"][name] <= row["tolerances"][name] for name in results)
        assert len(row["seconds"]) == len(row["ratios"]) == record["repeats"][row["phase"]]
        assert row["temp_bytes"] >= 0
        assert row["sent_bytes"] > 0
        assert row["collectives"]
        if row["mode"] == "naive":
            assert set(row["ratios"]) == {1.0}
            assert "ppermute" not in row["collectives"]
        else:
            assert row["collectives"].keys() == {"ppermute"}


def test_any_modes_against_naive(tmp_path):
    data, plot = tmp_path / "bench.json", tmp_path / "bench.png"
    modes = ["chunked-2", "stationary", "auto"]
    files = ["--json", str(data), "--plot", str(plot)]
    assert main([*SMALL, "--modes", ",".join(modes), *files]) == 0
    record = json.loads(data.read_text())
    assert [row["mode"] for row in record["rows"]] == ["naive", *modes] * 2
    assert plot.read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("mesh", "axis", "ring"),
    [("dp=2,tp=4", None, "tp"), ("dp=2,tp=-1", "dp", "dp"), ("x=2,y=4", "y,x", "y,x")],
)
def test_other_meshes_and_dtypes(mesh, axis, ring, capsys):
    extra = ["--axis", axis] if axis else []
    assert main([*SMALL, "--modes", "auto", "--mesh", mesh, "--dtype", "bfloat16", *extra]) == 0
    shown = mesh.replace("-1", "4")
    assert f"mesh {shown}, ring {ring} | bfloat16" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--ops scatter", "--ops 'scatter' is not among gather-lhs-rows, gather-lhs-k, "),
        ("--shapes 16x16", "--shapes '16x16' is not MxKxN, three positive integers such as"),
        ("--shapes 16x16x0", "--shapes '16x16x0' is not MxKxN"),
        (
            "--shapes 1001x16x16",
            "gather-lhs-rows shards M = 1001 of 1001x16x16 over the ring tp of 8 devices, which "
            "does not divide it (1001 = 125 x 8 + 1); use M = 1000 or 1008, or another --mesh",
        ),
        ("--shapes 16x16x4", "(4 = 0 x 8 + 4); use N = 8, or another --mesh"),
        ("--mesh tp=3", "--mesh tp=3 takes 3 devices, but there are 8; use --mesh tp=8\n"),
        ("--mesh dp=3,tp=4", "dp=3,tp=4 takes 12 devices, but there are 8; use --mesh dp=2,tp=4\n"),
        ("--mesh dp=3,tp=3", "dp=3,tp=3 takes 9 devices, but there are 8; use --mesh dp=1,tp=8\n"),
        ("--mesh dp=3,tp=-1", "(8 = 2 x 3 + 2); the other sizes must divide 8\n"),
        ("--mesh dp=-1,tp=-1", "are -1; give the sizes of all of them but one"),
        ("--mesh 8", "--mesh 8: axes '8': '8' is not of the form name=size"),
        ("--axis dp", "--axis dp must name distinct axes of the mesh, which has tp"),
        ("--axis tp,tp", "--axis tp,tp must name distinct axes"),
        ("--dtype f32", "--dtype 'f32' is not among float32, bfloat16, float16"),
        ("--modes naive,fast", "--modes 'fast' is not among naive, stationary, chunked-2"),
        ("--repeats 0", "--repeats 0 is not positive"),
        ("--repeats two", "argument --repeats: invalid int value: 'two'"),
        ("--json /missing/a.json", "--json /missing/a.json: its directory does not exist"),
        ("--plot a.xyz", "--plot a.xyz must end in one of ."),
        ("--process-id 0", "--coordinator and --num-processes missing; several processes need all"),
        (
            "--coordinator localhost:1 --process-id 2 --num-processes 2",
            "--process-id 2 is not in 0 to 1, one for each of --num-processes 2",
        ),
        (
            "--coordinator localhost --process-id 0 --num-processes 1",
            "--coordinator localhost must be HOST:PORT with a port that is free",
        ),
        ("--nonsense", "unrecognized arguments: --nonsense"),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(args, text, capsys):
    try:
        status = main([*SMALL, *args.split()])
    except SystemExit as left:  # what argparse itself refuses
        status = left.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("jaxpar bench: error: ")
    assert error.count("\n") == 1
    assert text in error


def test_a_port_in_use_is_an_error_and_no_crash(capsys):
    with socket.create_server(("", 0)) as taken:
        address = f"localhost:{taken.getsockname()[1]}"
        processes = ["--process-id", "0", "--num-processes", "1"]
        assert main([*SMALL, "--coordinator", address, *processes]) == 2
    error = capsys.readouterr().err
    assert f"--coordinator {address} must be HOST:PORT" in error
    assert "in use" in error


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_extra_names_the_install_command(package, monkeypatch, tmp_path, capsys):
    for module in [*sys.modules, package]:
        if module.split(".")[0] == package:
            monkeypatch.setitem(sys.modules, module, None)
    assert main([*SMALL, "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == (
        f"jaxpar bench: error: {package} is not installed; "
        "pip install 'matplotlib>=3.9' 'rich>=13'\n"
    )


def test_wrong_result_is_refused_and_never_timed(monkeypatch, tmp_path, capsys):
    right, data = jaxpar.all_gather_matmul, tmp_path / "bench.json"

    def wrong(lhs, rhs, axis, *, mode, **options):
        out = right(lhs, rhs, axis, mode=mode, **options)
        return out * 1.001 if mode == "bidirectional" else out

    monkeypatch.setattr(jaxpar, "all_gather_matmul", wrong)
    assert main([*SMALL[:-1], "gather-lhs-rows,scatter-rows", "--json", str(data)]) == 1
    out, err = capsys.readouterr()
    assert "gather-lhs-rows" not in out
    assert "scatter-rows 16x16x16, forward\n" in out  # the others are still worth having
    errors = [line for line in err.splitlines() if " done, " not in line]  # beside progress
    first, second = errors
    start = "jaxpar bench: error: gather-lhs-rows 16x16x16 forward"
    assert first.startswith(f"{start}, bidirectional: wrong result: out is off by 0.00")
    assert second.startswith(f"{start}+backward, bidirectional: wrong result: out is off by")
    assert "drhs is off by" in second
    record = json.loads(data.read_text())
    assert {row["op"] for row in record["rows"]} == {"scatter-rows"}
    assert [(r["phase"], r["mode"]) for r in record["refused"]] == [
        ("forward", "bidirectional"),
        ("forward+backward", "bidirectional"),
    ]


def test_wrong_gradient_is_refused(monkeypatch, capsys):
    right = jaxpar.all_gather_matmul

    def wrong(lhs, rhs, axis, **options):
        return right(lhs, jax.lax.stop_gradient(rhs), axis, **options)

    monkeypatch.setattr(jaxpar, "all_gather_matmul", wrong)
    assert main(list(SMALL)) == 1
    out, err = capsys.readouterr()
    assert "gather-lhs-rows 16x16x16, forward\n" in out
    assert "forward+backward" not in out
    assert err.count("wrong result: drhs is off by") == 3
    assert "out is off" not in err


def test_without_a_command_it_prints_help(capsys):
    assert main([]) == 0
    assert "bench" in capsys.readouterr().out


def test_help_has_units_and_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["bench", "--help"])
    text = capsys.readouterr().out
    for expected in ("milliseconds", "temp MiB", "examples:", "--num-processes"):
        assert expected in text


def test_runs_as_a_module():
    """In a process of its own it makes its eight CPU devices itself."""
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", *SMALL],
        env=environment(),
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "8 x cpu | mesh tp=8" in done.stdout
    assert "gather-lhs-rows 16x16x16, forward+backward\n" in done.stdout
