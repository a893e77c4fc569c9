"""What `predict` refuses before any compiler starts, and the text of every refusal."""

import importlib.util
import json
import sys
from dataclasses import replace

import pytest

from jaxpar import make_mesh
from jaxpar.platforms.chips import chip_of
from jaxpar.schedule import Target
from jaxpar.tools.accuracy.measurement import Measurement, measurements
from jaxpar.tools.accuracy.validate import validate
from jaxpar.tools.cli import predict_command, predict_validation, predict_worker
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.main import main
from jaxpar.tools.cli.predict_results import TargetResults


@pytest.fixture
def requests(monkeypatch):
    """The requests that a call would have served."""
    served = []

    def run_all(requests, jobs, tick):
        served.extend(requests)
        return [TargetResults(request.target) for request in requests]

    monkeypatch.setattr(predict_command, "run_all", run_all)
    return served


@pytest.mark.parametrize(
    ("args", "text"),
    [
        ("--ops scatter", "--ops 'scatter' is not among gather-lhs-rows, gather-lhs-k, "),
        ("--shapes 16x16", "--shapes '16x16' is not MxKxN, three positive integers such as"),
        (
            "--modes naive,fast",
            "--modes 'fast' is not among naive, stationary, chunked-2, chunked-4",
        ),
        ("--dtype bf16", "--dtype 'bf16' is not among float32, bfloat16, float16"),
        ("--figures mine", "--figures 'mine' is not among measured, book"),
        ("--wire-dtype half-float", "--wire-dtype 'half-float' is no dtype; write bfloat16"),
        ("--jobs -1", "--jobs -1 must not be negative"),
        ("--compiler-options fast", "--compiler-options 'fast' is not of the form key=value"),
        ("--json /missing/a.json", "--json /missing/a.json: its directory does not exist"),
        ("--trace /missing/a.json", "--trace /missing/a.json: its directory does not exist"),
        ("--json .", "--json . must be a file, got a directory"),
        ("--plot a.xyz", "--plot a.xyz must end in one of ."),
        ("model", "'model' is not module:function, as in model:layer for layer of model.py"),
        (":layer", "':layer' is not module:function"),
        ("--args f32[8]", "--args are of a module:function; name one"),
        (
            "model:layer --modes naive --wire-dtype bfloat16",
            "--modes and --wire-dtype is of the operations; model:layer names its own axes and "
            "modes, and gets shapes and dtypes by --args",
        ),
        ("m:f --args f32(8)", "--args 'f32(8)' is not dtype[shape]@axes, as in 'bf16[8192,8192]@"),
        ("m:f --args f33[8]", "--args 'f33[8]': no dtype is called 'f33'; write bf16, f32, ..."),
        (
            "m:f --args f32[8]@tp,-",
            "--args 'f32[8]@tp,-' names axes for 2 dimensions, but has 1; write one entry a",
        ),
        ("--nonsense", "unrecognized arguments: --nonsense"),
        ("--validate", "--validate: nothing is published of 'v5e:2x2'; --target must be chips"),
        (
            "m:f --validate --no-cache --mesh tp=2 --figures book",
            "--validate compiles what was measured, and takes --target and --json alone; leave "
            "figures, function, mesh, no-cache out",
        ),
    ],
)
def test_bad_arguments_are_one_line_and_status_2(args, text, requests, capsys):
    try:
        status = main(["predict", "--target", "v5e:2x2", *args.split()])
    except SystemExit as left:  # what argparse itself refuses
        status = left.code
    error = capsys.readouterr().err
    assert status == 2
    assert error.startswith("jaxpar predict: error: ")
    assert error.count("\n") == 1
    assert text in error
    assert not requests


def test_one_request_a_target_holds_all_that_was_asked(requests):
    args = "--target v5p:8x8x8,h100:8 --mesh dp=-1,tp=8 --axis tp --ops all-reduce --grad"
    more = "--shapes 64x64x64,8x8x8 --modes naive,chunked-4 --dtype float32 --wire-dtype bfloat16"
    options = ["--compiler-options", "xla_a=true", "xla_b=3", "xla_c=0.5", "xla_d=text"]
    assert main(["predict", *args.split(), *more.split(), *options]) == 0
    assert [request.target for request in requests] == ["v5p:8x8x8", "h100:8"]
    for request in requests:
        assert (request.mesh, request.axis, request.function) == ("dp=-1,tp=8", "tp", None)
        assert (request.ops, request.modes) == (("all-reduce",), ("naive", "chunked-4"))
        assert request.shapes == ("64x64x64", "8x8x8")
        assert (request.dtype, request.wire_dtype, request.grad) == ("float32", "bfloat16", True)
        wanted = {"xla_a": True, "xla_b": 3, "xla_c": 0.5, "xla_d": "text"}
        assert dict(request.compiler_options) == wanted
        assert (request.bare, request.figures) == (False, "measured")


def test_the_chip_s_own_options_and_figures_may_be_left_out(requests):
    words = ["--compiler-options", "none", "xla_a=3", "--figures", "book"]
    assert main(["predict", "--target", "v5e:2x4", *words]) == 0
    assert requests[0].bare
    assert dict(requests[0].compiler_options) == {"xla_a": 3}
    assert requests[0].figures == "book"


@pytest.mark.parametrize(
    ("installed", "target"),
    [
        ({"libtpu", "jax_plugins.xla_cuda13"}, "v5e:2x4"),
        ({"jax_plugins.xla_cuda13"}, "h100:8"),
        ({"jax_plugins.xla_cuda12"}, "h100:8"),
    ],
)
def test_without_targets_it_takes_the_compiler_that_is_there(
    installed, target, requests, monkeypatch
):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name in installed or None)
    assert main(["predict"]) == 0
    assert [request.target for request in requests] == [target]
    assert requests[0].ops == ("gather-lhs-rows", "gather-rhs-k", "scatter-rows")
    assert requests[0].modes == ("naive", "unidirectional", "bidirectional", "auto")


def test_without_a_compiler_it_names_the_install_command(monkeypatch, capsys):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert main(["predict"]) == 2
    assert capsys.readouterr().err == (
        "jaxpar predict: error: libtpu is not installed; pip install 'jax[tpu]>=0.10', or for the "
        "GPU compiler pip install 'jax[cuda13-local]>=0.10' 'nvidia-cuda-nvcc>=13'\n"
    )


@pytest.mark.parametrize("package", ["rich", "matplotlib"])
def test_missing_extra_names_the_install_command(package, monkeypatch, tmp_path, capsys):
    for module in [*sys.modules, package]:
        if module.split(".")[0] == package:
            monkeypatch.setitem(sys.modules, module, None)
    assert main(["predict", "--target", "v5e:2x2", "--plot", str(tmp_path / "a.png")]) == 2
    assert capsys.readouterr().err == (
        f"jaxpar predict: error: {package} is not installed; "
        "pip install 'matplotlib>=3.9' 'rich>=13'\n"
    )


def test_help_says_what_it_is_and_has_examples(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["predict", "--help"])
    text = capsys.readouterr().out
    for expected in ("not measured", "milliseconds", "examples:", "ui.perfetto.dev"):
        assert expected in text


def test_chips_without_figures(monkeypatch, request_made):
    """A compiler may know chips before anybody has published figures of them."""
    bare = Target("x:1", make_mesh("tp=8"), None)
    monkeypatch.setattr(predict_worker, "describe", lambda *_, figures: bare)
    with pytest.raises(UsageError, match="jaxpar has no published figures of 'cpu'; use a chip"):
        predict_worker.target_of(request_made)
    new = replace(bare, chip=chip_of("TPU7x"))
    monkeypatch.setattr(predict_worker, "describe", lambda *_, figures: new)
    assert predict_worker.target_of(request_made) == new


# -- predictions beside what was measured ---------------------------------------------------------


@pytest.fixture
def conversations(monkeypatch):
    """The rows that each process would have compiled, each predicted in one microsecond."""
    asked = []

    def converse(module, names, take):
        assert module == "jaxpar.tools.cli.predict_validation"
        asked.append(names)
        for name in names[:-2]:
            take({"name": name, "chip": "a chip", "predicted": 1e-6, "interval": None, "slow": 0})
        for name in names[-2:]:
            take({"name": name, "failed": "ValueError: no"})
        return "ended with SIGABRT: Fatal" if len(asked) == 2 else None

    monkeypatch.setattr(predict_validation, "converse", converse)
    return asked


@pytest.mark.parametrize("there", [{"tpu"}, {"gpu"}, {"tpu", "gpu"}])
def test_validation_has_a_process_for_each_compiler_that_is_there(
    there, conversations, monkeypatch, tmp_path, capsys
):
    monkeypatch.setattr(predict_validation, "compilers", lambda: there)
    path = tmp_path / "a.json"
    assert main(["predict", "--validate", "--json", str(path)]) == 1
    chips = {one.name: one.chip for one in measurements()}
    found = [{chips[name][0] in "vt" for name in names} for names in conversations]
    assert found == [{compiler == "tpu"} for compiler in ("tpu", "gpu") if compiler in there]
    failures = capsys.readouterr().err.splitlines()
    refused = [line for line in failures if "ValueError: no" in line]
    assert len(refused) == 1
    assert f" and {2 * len(there) - 1} more: ValueError: no" in refused[0]
    died = ["jaxpar predict: error: gpu compiler: its process ended with SIGABRT: Fatal"]
    assert [line for line in failures if "SIGABRT" in line] == died * (len(there) == 2)
    assert len(json.loads(path.read_text())) == sum(map(len, conversations)) - 2 * len(there)


def test_validation_needs_the_compiler_of_what_is_named(conversations, monkeypatch, capsys):
    monkeypatch.setattr(predict_validation, "compilers", lambda: {"tpu"})
    assert main(["predict", "--validate", "--target", "v6e,h100"]) == 2
    assert "--validate: the compiler of h100 is not installed; pip" in capsys.readouterr().err
    monkeypatch.setattr(predict_validation, "compilers", set)
    assert main(["predict", "--validate"]) == 2
    assert not conversations


def test_what_a_compiler_refuses_is_told_and_a_fault_of_the_model_is_not_hidden(monkeypatch):
    row = Measurement(
        "a", "memory", "v5e:2x2", "tp=4", "copy", (), (1024,), "float32", 1e-6, "nobody"
    )
    assert validate(row, None).predicted > 0
    refused = validate(replace(row, options={"xla_no_such_option": "1"}), None)
    assert refused.endswith("No such compile option: 'xla_no_such_option'")

    def faulty(program):
        raise RuntimeError("faster than its links")

    monkeypatch.setattr("jaxpar.tools.accuracy.validate.timeline", faulty)
    with pytest.raises(RuntimeError, match="faster than its links"):
        validate(row, None)
