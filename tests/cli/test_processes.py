"""A process of its own: what it says arrives record by record, and how it dies is told."""

import os
import subprocess
import sys
from pathlib import Path

import programs
import pytest

import jaxpar
from jaxpar.tools.cli.last_words import last_words
from jaxpar.tools.cli.workers import COMPILING, converse, first_line, one_line

SERVER = """
import os
from jaxpar.tools.cli.workers import answer

def serve(task):
    print("what is printed is no record", flush=True)
    yield {"task": task}
    if task == "raise":
        raise ValueError("no such task\\n  at all")
    if task == "abort":
        os.abort()
    if task == "leave":
        os._exit(3)
    yield {"platform": os.environ["JAX_PLATFORMS"]}

if __name__ == "__main__":
    answer(serve)
"""

STEP = """
import jax, jax.numpy as jnp

def f(mesh):
    return jax.jit(lambda x: jnp.sin(x) @ x), (jax.ShapeDtypeStruct((256, 256), jnp.float32),)
"""


@pytest.fixture
def environment(tmp_path):
    (tmp_path / "a_server.py").write_text(SERVER)
    path = os.pathsep.join([str(tmp_path), str(Path(jaxpar.__file__).parents[1])])
    return {**COMPILING, "PYTHONPATH": path}


def test_records_arrive_in_order(environment):
    records = []
    assert converse("a_server", ["a", 1], records.append, environment) is None
    assert records == [{"task": ["a", 1]}, {"platform": "cpu"}]


@pytest.mark.parametrize(
    ("task", "how"),
    [
        ("raise", "ended with status 1: ValueError: no such task"),
        ("abort", "ended with SIGABRT: "),
        ("leave", "ended with status 3: what is printed is no record"),
    ],
)
def test_one_that_dies_keeps_what_it_said_before(task, how, environment):
    records = []
    died = converse("a_server", task, records.append, environment)
    assert died.startswith(how)
    assert records == [{"task": task}]


def test_who_takes_may_stop_it(environment):
    def take(record):
        raise KeyError(record["task"])

    with pytest.raises(KeyError, match="anything"):
        converse("a_server", "anything", take, environment)


def test_errors_in_one_line():
    assert one_line(ValueError("\n  a\nb")) == "ValueError: a"
    assert one_line(KeyError()) == "KeyError: no reason given"
    assert len(first_line("x" * 1000)) == 400


FATAL = "F1129 02:09:52.450559    1989 parse_flags_from_env.cc:234] "


@pytest.mark.parametrize(
    ("log", "words"),
    [
        (
            f"{FATAL}Unknown flags in XLA_FLAGS: --xla_a=3 --xla_b\n",
            "XLA_FLAGS has --xla_a=3 --xla_b, which this version does not know; remove it there",
        ),
        (
            f"RuntimeError: cuDNN not found.\n{FATAL}Unknown flag in XLA_FLAGS: --xla_a=3",
            "XLA_FLAGS has --xla_a=3, which this version does not know; remove it there",
        ),
        (
            "a\nERROR: Unknown command line flag 'xla_a'\nb",
            "LIBTPU_INIT_ARGS has flag 'xla_a', which this version does not know; remove it there",
        ),
        (
            f"TypeError: caught\n{FATAL}Could not open file\n    @ 0x7f",
            f"{FATAL}Could not open file",
        ),
        ("first\nValueError: the reason\n  trace\n", "ValueError: the reason"),
        ("first\nlast\n\n", "last"),
        ("", "it said nothing"),
    ],
)
def test_the_last_words_are_those_that_say_why(log, words):
    assert last_words(log) == words


@pytest.mark.parametrize("command", [["doctor"], ["tune", "m:f"]])
def test_a_flag_that_xla_does_not_know_is_named(command, tmp_path):
    """JAX ends the process in that case, without an exception."""
    (tmp_path / "m.py").write_text(STEP)
    run = subprocess.run(
        [sys.executable, "-m", "jaxpar", *command],
        env=programs.environment(XLA_FLAGS="--xla_nonsense=3 --xla_cpu_max_isa=AVX2 --xla_other"),
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert (run.returncode, run.stdout) == (1, "")
    text = "XLA_FLAGS has --xla_nonsense=3 --xla_other, which this version does not know; remove it"
    assert text in run.stderr
