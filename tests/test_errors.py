"""Every message of an error names its remedy."""

import ast
import re
from pathlib import Path

import pytest

import jaxpar

SOURCE = Path(jaxpar.__file__).parent
RAISES = {"value_error", "type_error", "ValueError", "TypeError", "ImportError"}
RAISES |= {"LayoutError", "RuntimeError", "TimeoutError", "UsageError"}
LEAST = 12  # letters that a message has of its own; shorter ones wrap another error's text
# What is wrong, and then what to do; what must be; which one it is not; another error's own text.
FORMS = r".+; .+|.+[.:] [A-Z].+|.+\bmust\b.+|.+\bis not\b.+|.+\{(\w*remedy|how|edit|reason)\b.*\}.*"


def messages(source):
    """Yields the line and the text of each message, with the code of what it is filled with."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and _name(node.func) in RAISES:
            for text in node.args:
                if isinstance(text, ast.JoinedStr | ast.Constant):
                    said = ast.unparse(text) if isinstance(text, ast.JoinedStr) else text.value
                    own = re.sub(r"\{[^{}]*\}", "", str(said))
                    if len(re.findall(r"\w", own)) >= LEAST:
                        yield node.lineno, str(said)


def _name(function):
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def without_remedy(source):
    return [(line, text) for line, text in messages(source) if not re.search(FORMS, text, re.S)]


def test_every_message_names_its_remedy():
    found = {
        f"{path.relative_to(SOURCE)}:{line}": text
        for path in sorted(SOURCE.rglob("*.py"))
        for line, text in without_remedy(path.read_text())
    }
    assert not found, "say what to do: 'x is this; do that', or 'x must be that, got this'"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("'x is a float here'", 1),
        ("f'{x} has {n} rows of its own'", 1),
        ("'x is a float here; pass an int'", 0),
        ("f'x must be an int, got {x}'", 0),
    ],
)
def test_a_message_without_a_remedy_is_found(text, found):
    assert len(without_remedy(f"raise value_error({text})")) == found


def test_there_are_messages_to_look_at():
    every = [found for path in SOURCE.rglob("*.py") for found in messages(path.read_text())]
    assert len(every) > 300
