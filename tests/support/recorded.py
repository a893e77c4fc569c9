"""Writes down what errors tests raise: `pytest -p recorded --errors FILE`."""

import contextlib
import json
import os
import re
import traceback
from pathlib import Path

import pytest

PACKAGE = str(Path(__file__).parents[2] / "src" / "jaxpar")


def pytest_addoption(parser):
    parser.addoption("--errors", help="a file, to which each process adds lines of JSON")


def pytest_configure(config):
    if path := config.getoption("--errors"):
        pytest.raises = recording(pytest.raises, Path(path).absolute())


def pytest_collection_finish(session):
    """Notes what commands refuse, too, which print it and return."""
    if path := session.config.getoption("--errors"):
        from jaxpar.cli._console import UsageError  # not before conftest.py has hooked the imports

        absolute = Path(path).absolute()

        def init(error, *args):
            Exception.__init__(error, *args)
            if "PYTEST_CURRENT_TEST" in os.environ:
                note(absolute, "UsageError", args)

        UsageError.__init__ = init


def note(path, kind, texts):
    test = os.environ["PYTEST_CURRENT_TEST"].split(" ")[0].split("[")[0]
    with path.open("a") as file:
        for text in map(str, texts):
            text = re.sub(r"/[^\s']*/pytest-[^\s/']*/[^\s/']*/[^\s/']*/", "folder/", text)
            file.write(json.dumps({"kind": kind, "text": text, "test": test}) + "\n")


def recording(raises, path):
    """`pytest.raises`, which notes what the package raised inside it."""

    @contextlib.contextmanager
    def noting(*args, **kwargs):
        with raises(*args, **kwargs) as info:
            yield info
        frames = traceback.extract_tb(info.value.__traceback__)
        if any(frame.filename.startswith(PACKAGE) for frame in frames):
            problems = getattr(info.value, "problems", None)  # of a layout: each by itself
            note(path, type(info.value).__name__, problems or [info.value])

    return lambda *args, **kwargs: (
        raises(*args, **kwargs) if len(args) > 1 else noting(*args, **kwargs)
    )
