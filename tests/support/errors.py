"""The catalogue of errors: every message in the source, with one that a test has raised.

python tests/support/errors.py RECORDED...    # writes docs/errors.md; nox -s errors records
"""

import ast
import json
import re
import sys
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "jaxpar"
PAGE = ROOT / "docs" / "errors.md"
RAISES = {"value_error", "type_error", "ValueError", "TypeError", "ImportError", "Problem"}
RAISES |= {"LayoutError", "RuntimeError", "TimeoutError", "UsageError"}
LEAST = 12  # letters that a message has of its own

PARTS = {
    "": "Axes, meshes, options, tuning",
    "collectives": "Ring collectives",
    "matmul": "Matmuls",
    "layers": "Layers",
    "moe": "Mixtures of experts",
    "layout": "Layouts",
    "processes": "Several processes",
    "schedule": "Schedules",
    "testing": "Testing kit",
    "cli": "Commands",
}

# How messages are written; the first form that fits tells cause and fix.
FORMS = (
    r"(?P<cause>.+); (?P<fix>.+)",
    r"(?P<cause>.+)\. (?P<fix>[A-Z].+)",
    r"(?P<fix>.+ must .+), (?P<cause>(?:got|but returned) .+)",
    r"(?P<cause>(?P<subject>.+?) (?:has|is) .+?)[,:]? (?:but |and |it |they )?must (?P<must>.+)",
    r"(?P<cause>(?P<subject>.+?)) must (?P<must>.+)",
    r"(?P<cause>.+ is not (?P<one>.+))",
)


@dataclass(frozen=True)
class Message:
    """A message in the source: its literal pieces, with anything between them."""

    file: str  # within the package
    pieces: tuple[str, ...]

    @property
    def pattern(self) -> re.Pattern[str]:
        return re.compile(".*?".join(map(re.escape, self.pieces)), re.DOTALL)

    @property
    def part(self) -> str:
        return self.file.rpartition("/")[0]

    @property
    def letters(self) -> int:
        return sum(len(re.findall(r"\w", piece)) for piece in self.pieces)


def messages() -> list[Message]:
    """All messages of the package, in the order of the source."""
    found: dict[Message, None] = {}
    for path in sorted(SOURCE.rglob("*.py")):
        file = path.relative_to(SOURCE).as_posix()
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and _name(node.func) in RAISES:
                # Of a Problem(path, rule, text, remedy) only the text, which no other one shares.
                for text in node.args[2:3] if _name(node.func) == "Problem" else node.args:
                    if isinstance(text, ast.JoinedStr | ast.Constant):
                        message = Message(file, _pieces(text))
                        if message.letters >= LEAST:
                            found[message] = None
    return list(found)


def _name(function: ast.expr) -> str:
    return function.id if isinstance(function, ast.Name) else getattr(function, "attr", "")


def _pieces(text: ast.expr) -> tuple[str, ...]:
    values = text.values if isinstance(text, ast.JoinedStr) else [text]
    literal = [v.value for v in values if isinstance(v, ast.Constant) and isinstance(v.value, str)]
    return tuple(literal)


def catalogue(recorded: list[dict[str, str]]) -> dict[Message, dict[str, str]]:
    """Each message with the shortest text that a test has raised; of alike ones the longer.

    An entry is of the messages of its file alone, or of all where its file is unknown (`""`).
    """
    known = sorted(messages(), key=lambda message: -message.letters)
    patterns = [(message, message.pattern) for message in known]
    best: dict[Message, dict[str, str]] = {}
    for entry in sorted(recorded, key=lambda entry: (len(entry["text"]), entry["test"])):
        for message, pattern in patterns:
            if entry["file"] in ("", message.file) and pattern.search(entry["text"]):
                best.setdefault(message, entry)
                break
    return best


def entries_of(page: str) -> list[dict[str, str]]:
    """What a page was made from."""
    found = re.findall(
        r"^\*\*(\w+)\*\* of `([^`]+)`, in `([^`]+)`\n\n```text\n(.*?)\n```$", page, re.M | re.S
    )
    return [dict(zip(("kind", "file", "test", "text"), entry, strict=True)) for entry in found]


def render(best: dict[Message, dict[str, str]]) -> str:
    """The page."""
    lines = [
        "# Error catalogue",
        "",
        "Messages of the package, as tests of the project raised them: each with an example, its",
        "cause and its fix. `nox -s errors` makes this page from tests. Search it for the words",
        "that your message shares with one of these; names, shapes, numbers differ.",
    ]
    parts = defaultdict(list)
    for message in messages():
        if message in best:
            parts[message.part].append({**best[message], "file": message.file})
    for part, title in PARTS.items():
        if parts[part]:
            lines += ["", f"## {title}"]
        for entry in parts[part]:
            lines += ["", *_entry(entry)]
    return "\n".join(lines) + "\n"


def _entry(entry: dict[str, str]) -> list[str]:
    text = " ".join(entry["text"].split())
    lines = [
        f"**{entry['kind']}** of `{entry['file']}`, in `{entry['test']}`",
        "",
        "```text",
        text,
        "```",
    ]
    said = re.sub(r"^[\w.]+: ", "", text)  # without the function's name
    found = filter(None, (re.fullmatch(form, said) for form in FORMS))
    parts = next(found).groupdict()
    fixes = {"fix": "{fix}", "must": "{subject} must {must}", "one": "give one that is {one}"}
    fix = next(text for name, text in fixes.items() if name in parts).format(**parts)
    return [*lines, "", f"- Cause: {_prose(parts['cause'])}", f"- Fix: {_prose(fix)}"]


def _prose(text: str) -> str:
    return re.sub(r"([\\`*_\[\]<>#|])", r"\\\1", text).rstrip(".") + "."


if __name__ == "__main__":
    entries = [
        json.loads(line) for file in sys.argv[1:] for line in Path(file).read_text().splitlines()
    ]
    found = catalogue(entries)
    missing = [message for message in messages() if message not in found]
    for message in missing:
        print("no test raises:", message.part, message.pieces)
    print(f"{len(found)} of {len(found) + len(missing)} messages")
    PAGE.write_text(render(found))
