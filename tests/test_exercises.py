"""The answers to the exercises pass the checks that their readers are given."""

import re
from pathlib import Path

import jax
import pytest

PAGE = (Path(__file__).parents[1] / "notebooks" / "exercises.md").read_text()
FIRST, *EXERCISES = re.split(r"^## ", PAGE, flags=re.MULTILINE)


def blocks(text):
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


@pytest.fixture(autouse=True)
def standard_promotion():
    """As a reader has it; these tests are strict elsewhere."""
    with jax.numpy_dtype_promotion("standard"):
        yield


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda text: text.split(".")[0])
def test_the_answer_passes_its_check(exercise):
    [start] = blocks(FIRST)
    check, answer = blocks(exercise)
    names = {}
    for code in (start, answer, check):
        exec(code, names)


def test_there_are_ten_and_checks_can_fail():
    assert len(EXERCISES) == 10
    names = {}
    exec(blocks(FIRST)[0], names)
    for exercise in EXERCISES:
        with pytest.raises(NameError):  # without the answer
            exec(blocks(exercise)[0], dict(names))
