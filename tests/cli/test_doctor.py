"""`jaxpar doctor`: what it prints, its hints, and several processes of which some are missing."""

import json

import jax
import pytest
from programs import free_port, run_together

from jaxpar.arguments import optional_packages
from jaxpar.tools.cli import doctor_command
from jaxpar.tools.cli.main import main


def test_it_says_what_is_there_and_that_collectives_are_right(capsys, tmp_path):
    assert main(["doctor", "--json", str(tmp_path / "found.json")]) == 0
    text = capsys.readouterr().out
    assert f"jax {jax.__version__}" in text
    assert "no accelerator; 8 simulated CPU devices, which share the cores of this host" in text
    assert "x cpu" not in text
    assert text.count(": installed") + text.count(": lacks") == len(doctor_command.EXTRAS)
    found = json.loads((tmp_path / "found.json").read_text())
    names = [check["name"] for check in found["checks"]]
    assert names[:3] == ["psum", "all_gather", "psum_scatter"]
    assert [check["wrong"] for check in found["checks"]] == [""] * len(names)
    for name in names:
        assert f"  {name} " in text


def test_a_wrong_result_is_named_and_is_a_failure(monkeypatch, capsys):
    monkeypatch.setattr(doctor_command.lax, "psum", lambda x, axis: x)
    assert main(["doctor"]) == 1
    [line] = [line for line in capsys.readouterr().out.splitlines() if "WRONG" in line]
    assert line.split()[0] == "psum"


def test_a_missing_extra_has_a_command_that_names_packages(monkeypatch, capsys):
    missing = ("rich", "libtpu")
    monkeypatch.setattr(
        optional_packages, "installed", lambda name: None if name in missing else "1"
    )
    assert main(["doctor"]) == 0
    text = capsys.readouterr().out
    assert "lacks rich: pip install 'matplotlib>=3.9' 'rich>=13'" in text
    assert "lacks libtpu: pip install 'jax[tpu]>=0.10'" in text  # which needs it; jax is there


GOOD = {"jax": "0.12.0", "jaxlib": "0.12.0"}


@pytest.mark.parametrize(
    ("packages", "environment", "more", "expected"),
    [
        ({"jaxlib": "0.11.0"}, {}, {}, "pip install 'jax==0.12.0' 'jaxlib==0.12.0'"),
        (
            {"jax-cuda12-plugin": "0.12.0", "jax-cuda13-plugin": "0.12.0"},
            {},
            {"platform": "gpu"},
            "pip uninstall jax-cuda12-plugin",
        ),
        (
            {"jax-cuda13-plugin": "0.11.0"},
            {},
            {"platform": "gpu"},
            "pip install 'jax[cuda13]==0.12.0'",
        ),
        (
            {"jax-cuda13-plugin": "0.12.0"},
            {},
            {"said": "Traceback\nRuntimeError: Unable to load cuDNN\n"},
            "no GPU that it can use (Unable to load cuDNN)",
        ),
        ({}, {"JAX_PLATFORMS": "tpu"}, {"platform": None}, "unset it, or add ',cpu'"),
        ({}, {}, {"devices": 1}, "JAX_NUM_CPU_DEVICES=8"),
        (
            {},
            {
                "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
                "JAX_NUM_CPU_DEVICES": "8",
            },
            {},
            "JAX refuses both",
        ),
        ({}, {"LIBTPU_INIT_ARGS": "--xla=1"}, {}, "predict compiles with it"),
        ({}, {"JAX_DISABLE_JIT": "1"}, {}, "right but slow"),
        ({"jax": "0.10.2", "jaxlib": "0.10.2"}, {}, {}, "check_vma=False"),
    ],
)
def test_each_known_bad_combination_has_one_hint(packages, environment, more, expected):
    given = {"said": "", "platform": "cpu", "devices": 8} | more
    [hint] = doctor_command.hints(GOOD | packages, environment, **given)
    assert expected in hint


@pytest.mark.parametrize(
    ("kind", "version", "expected"),
    [
        ("TPU v5 lite", "0.12.0.1", "is synchronous, and in program_order aborts the compiler"),
        ("TPU v5", "0.13.0", "if xla_tpu_enable_sparse_core_collective_offload_reduce_scatter"),
        ("TPU v6 lite", "0.12.0", "jaxpar.compiler_options(mesh)"),
        ("TPU7x", "0.12.0", None),
        ("TPU v5 lite", "0.11.2", None),  # has no starts
        ("cpu", "0.12.0", None),
        ("NVIDIA H100 80GB HBM3", "0.12.0", None),
    ],
)
def test_starts_that_do_not_overlap(kind, version, expected):
    found = list(doctor_command.starts_that_wait({"jax": version}, kind))
    if expected is None:
        assert found == []
    else:
        [hint] = found
        assert f"psum_scatter_start on {kind}" in hint
        assert expected in hint
        assert "jaxpar explain" in hint


def test_nothing_bad_has_no_hints():
    assert list(doctor_command.hints(GOOD, {}, "", "cpu", 8)) == []


def _processes(numbers, *more):
    common = ("--coordinator", f"localhost:{free_port()}", "--num-processes", "2", *more)
    commands = [["-m", "jaxpar", "doctor", "--process-id", number, *common] for number in numbers]
    return run_together(commands)


def test_no_time_to_wait(capsys):
    assert main(["doctor", "--timeout", "0"]) == 2
    assert capsys.readouterr().err == "jaxpar doctor: error: --timeout 0 is not positive\n"


def test_two_processes_run_collectives_together():
    (first, error, status), (second, its_error, its_status) = _processes("01")
    assert (status, its_status) == (0, 0), error + its_error
    assert "process 0 of 2" in first
    assert "4 simulated CPU devices, of 8 in all processes" in first
    assert "collectives over 8 devices" in first
    assert "Gloo" not in first
    assert second == ""


def test_a_process_that_does_not_come_is_named():
    [(_, error, status)] = _processes("0", "--timeout", "1")
    assert status == 1
    assert len(error.splitlines()) == 1
    assert error.startswith("jaxpar doctor: error: initialize: ")
    assert "1" in error
