"""Writes down what errors tests raise: `pytest -p recorded --errors FILE`."""

import contextlib
import json
import os
import re
import subprocess
import sys
import traceback
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[2] / "src" / "jaxpar"


def pytest_addoption(parser):
    parser.addoption("--errors", help="a file, to which each process adds lines of JSON")


def pytest_configure(config):
    if path := config.getoption("--errors"):
        path = Path(path).absolute()
        pytest.raises = recording(pytest.raises, path)
        communicate = subprocess.Popen.communicate

        def noting(process, *args, **kwargs):
            found = communicate(process, *args, **kwargs)
            for said in map(str, filter(None, found)):  # of a program that a test has started
                for kind, text in re.findall(r"^(?:\w+\.)*(\w+Error): (.*)$", said, re.M):
                    note(path, kind, [text], "")
            return found

        subprocess.Popen.communicate = noting


def pytest_collection_finish(session):
    """Notes what commands refuse, which print it, and each problem of a layout by itself."""
    if path := session.config.getoption("--errors"):
        # Not before conftest.py has hooked the imports.
        from jaxpar.cli._console import UsageError
        from jaxpar.layout._problem import Problem

        absolute, made = Path(path).absolute(), Problem.__init__

        def init(error, *args):
            Exception.__init__(error, *args)
            note(absolute, "UsageError", args, _caller())

        def init_problem(problem, *args):
            made(problem, *args)
            note(absolute, "LayoutError", [problem], _caller())

        UsageError.__init__, Problem.__init__ = init, init_problem


def _caller():
    return _within(sys._getframe(2).f_code.co_filename)


def _within(filename):
    """Its path within the package, or none."""
    path = Path(filename)
    return path.relative_to(PACKAGE).as_posix() if path.is_relative_to(PACKAGE) else ""


def note(path, kind, texts, file):
    if "PYTEST_CURRENT_TEST" not in os.environ:
        return
    test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0].split("[")[0]
    with path.open("a") as lines:
        for text in map(str, texts):
            text = re.sub(r"/[^\s']*/pytest-[^\s/']*/[^\s/']*/[^\s/']*/", "folder/", text)
            entry = {"kind": kind, "file": file, "test": test, "text": text}
            lines.write(json.dumps(entry) + "\n")


def recording(raises, path):
    """`pytest.raises`, which notes what the package raised inside it."""

    @contextlib.contextmanager
    def noting(*args, **kwargs):
        with raises(*args, **kwargs) as info:
            yield info
        frames = traceback.extract_tb(info.value.__traceback__)
        files = [file for frame in frames if (file := _within(frame.filename))]
        if files and not hasattr(info.value, "problems"):  # which are noted where they are made
            note(path, type(info.value).__name__, [info.value], files[-1])

    return lambda *args, **kwargs: (
        raises(*args, **kwargs) if len(args) > 1 else noting(*args, **kwargs)
    )
