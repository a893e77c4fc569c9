"""A process of its own: what it says arrives record by record, and how it dies is told."""

import os
from pathlib import Path

import pytest

import jaxpar
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
