"""What all commands share: version, help, exit statuses, interruption, whole files, clean start."""

import os
import signal
import subprocess
import sys

import jax
import pytest

import jaxpar
from jaxpar.arguments.files import write_text, written
from jaxpar.arguments.optional_packages import install_command, requirements
from jaxpar.tools.cli.console import progress, status_of
from jaxpar.tools.cli.main import COMMANDS, main


def test_version_names_what_figures_depend_on(capsys):
    with pytest.raises(SystemExit, match="0"):
        main(["--version"])
    said = capsys.readouterr().out
    assert said.startswith(f"jaxpar {jaxpar.__version__} (jax {jax.__version__}, Python 3.")


def test_help_lists_the_commands_and_the_exit_statuses(capsys):
    assert main([]) == 0
    text = capsys.readouterr().out
    for name in COMMANDS:
        assert f"\n    {name} " in text
    assert "130 interrupted" in text


@pytest.mark.parametrize("option", ["--help", "--version"])
def test_help_and_version_do_not_wait_for_jax(option):
    program = (
        "import sys; from jaxpar.tools.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\n"
        "finally:\n    print('jax' in sys.modules, 'numpy' in sys.modules)"
    )
    ran = subprocess.run([sys.executable, "-c", program, option], capture_output=True, text=True)
    assert ran.stdout.endswith("False False\n"), ran


@pytest.mark.parametrize("command", COMMANDS)
def test_wrong_usage_is_one_line_and_status_2(command, capsys):
    function = ["model:f"] * (command in ("explain", "layout", "tune", "ways"))
    with pytest.raises(SystemExit, match="2"):
        main([command, *function, "--nonsense"])
    said = capsys.readouterr()
    assert said.err == f"jaxpar {command}: error: unrecognized arguments: --nonsense\n"
    assert not said.out


def test_interruption_is_one_line_and_status_130(capsys):
    def run():
        raise KeyboardInterrupt

    assert status_of("jaxpar bench", run) == 130
    assert capsys.readouterr().err == "jaxpar bench: error: interrupted\n"


# What a shell starts in the background ignores interrupts, and so do its children.
INTERRUPTIBLE = """
import runpy, signal
signal.signal(signal.SIGINT, signal.default_int_handler)
runpy.run_module("jaxpar", run_name="__main__", alter_sys=True)
"""


def test_ctrl_c_ends_the_compilers_too_and_leaves_no_file(tmp_path):
    command = ["predict", "--target", "v5e:4x4", "--ops", "all", "--json", str(tmp_path / "a")]
    with subprocess.Popen(
        [sys.executable, "-c", INTERRUPTIBLE, *command], stderr=subprocess.PIPE, text=True
    ) as process:
        said = ""
        while not said.endswith(" ...\n"):  # it compiles
            line = process.stderr.readline()
            assert line, said
            said += line
        process.send_signal(signal.SIGINT)
        _, said = process.communicate(timeout=600)
    assert process.returncode == 130
    assert said.splitlines()[-1] == "jaxpar predict: error: interrupted"
    assert "Traceback" not in said
    assert not list(tmp_path.iterdir())


def test_a_file_is_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "a.json"
    write_text(path, "old")

    def interrupted():
        with written(path) as half:
            half.write_text("ne")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert [file.name for file in tmp_path.iterdir()] == ["a.json"]
    assert path.read_text() == "old"
    write_text(path, "new")
    assert path.read_text() == "new"


def test_a_link_stays_a_link_and_a_device_is_written_directly(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "file")
    write_text(tmp_path / "link", "text")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "file").read_text() == "text"
    write_text(os.devnull, "text")
    assert not os.path.isfile(os.devnull)


def test_progress_without_a_terminal_is_lines(monkeypatch, capsys):
    monkeypatch.setattr("jaxpar.tools.cli.console.SECONDS_A_LINE", 0)
    with progress("compiling", 2) as tick:
        tick("naive")
        tick("auto")
    said = capsys.readouterr()
    lines = said.err.splitlines()
    assert [line for line in lines if "..." not in line] == [
        "1 of 2 done, naive",
        "2 of 2 done, auto",
    ]
    assert not said.out


def test_what_is_over_soon_shows_no_progress(capsys):
    with progress("compiling", 1) as tick:
        tick("naive")
    assert capsys.readouterr().err == ""


def test_install_commands_name_packages_and_not_jaxpar():
    assert install_command("bench") == "pip install 'matplotlib>=3.9' 'rich>=13'"
    assert install_command("bench", "rich.table") == "pip install 'rich>=13'"
    assert install_command("checkpoint", "orbax.checkpoint") == (
        "pip install 'orbax-checkpoint>=0.12'"
    )
    # `test` is made of others, too
    assert {"hypothesis", "jax", "nvidia-cuda-nvcc", "rich"} <= set(requirements("test"))
    assert requirements("nonsense") == {}


def test_backends_that_are_not_there_say_nothing():
    environment = {k: v for k, v in os.environ.items() if k != "JAX_PLATFORMS"}
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", "doctor"], env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0
    assert done.stderr == ""
    assert done.stdout.startswith("jaxpar ")
