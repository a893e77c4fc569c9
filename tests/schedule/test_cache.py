"""Compiled programs are kept on disk, the ones that were used last, whoever else keeps some."""

import gzip
import json
import os
import subprocess
import sys
import time

import pytest

from jaxpar.schedule import Memory, target
from jaxpar.tools.timeline import cache
from jaxpar.tools.timeline.cache import keep, kept

MEMORY = Memory(arguments=1, outputs=2, temporaries=3, aliased=4, peak=5)


def text(key):
    """A program's text that does not compress, and is another one for each key."""
    return os.urandom(5000).hex() + key


def age(folder, key, seconds):
    """As if it had not been used for some time."""
    then = time.time() - seconds
    os.utime(folder / f"{key}.json.gz", (then, then))


def keys(folder):
    return {path.name.partition(".")[0] for path in folder.glob("*.json.gz")}


@pytest.fixture
def room_for_three(monkeypatch):
    monkeypatch.setattr(cache, "MOST_BYTES", 20_000)  # each takes between 5000 and 6500


def test_what_was_not_used_for_the_longest_time_goes(tmp_path, room_for_three):
    for key in "abc":
        keep(tmp_path, key, text(key), MEMORY)
    for seconds, key in enumerate("abc"):
        age(tmp_path, key, 10 * (seconds + 1))
    found = kept(tmp_path, "c")  # the oldest one, which is in use again
    assert found["text"].endswith("c")
    assert found["memory"]["peak"] == 5
    keep(tmp_path, "d", text("d"), MEMORY)
    assert keys(tmp_path) == {"a", "c", "d"}
    assert kept(tmp_path, "b") is None


def test_one_that_is_larger_than_all_may_be_stays_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MOST_BYTES", 10)
    keep(tmp_path, "a", text("a"), MEMORY)
    keep(tmp_path, "b", text("b"), MEMORY)
    assert keys(tmp_path) == {"b"}


def test_only_its_own_files_are_counted_and_deleted(tmp_path, monkeypatch):
    monkeypatch.setattr(cache, "MOST_BYTES", 10)
    other, half, abandoned = (
        tmp_path / name for name in ("other.txt", ".a.json.1.gz", ".b.json.2.gz")
    )
    for path in (other, half, abandoned):
        path.write_bytes(b"0" * 100)
    os.utime(abandoned, (0, 0))
    keep(tmp_path, "c", text("c"), MEMORY)
    assert sorted(tmp_path.iterdir()) == sorted([other, half, tmp_path / "c.json.gz"])


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("")
    keep(tmp_path / "file", "a", text("a"), MEMORY)
    assert kept(tmp_path / "file", "a") is None


def flipped(written):
    middle = len(written) // 2
    return (
        written[:middle]
        + bytes(255 - b for b in written[middle : middle + 60])
        + written[middle + 60 :]
    )


def of(what):
    return lambda written: gzip.compress(json.dumps(what).encode())


SIZES = {"arguments": 1, "outputs": 2, "temporaries": 3, "aliased": 4, "peak": 5}
DAMAGES = {
    "flipped": flipped,
    "a header that is flipped": lambda written: bytes([written[0], 255]) + written[2:],
    "truncated": lambda written: written[: len(written) // 2],
    "truncated by its sum": lambda written: written[:-8],
    "empty": lambda written: b"",
    "no gzip": lambda written: b"{}",
    "no text": lambda written: gzip.compress(b"\xff\xfe"),
    "no JSON": lambda written: gzip.compress(b"{"),
    "deep": lambda written: gzip.compress(b"[" * 100_000),
    "nothing": of({}),
    "a list": of([1]),
    "null": of(None),
    "no memory": of({"text": "t"}),
    "null for text": of({"text": None, "memory": SIZES}),
    "null for memory": of({"text": "t", "memory": None}),
    "a size less": of({"text": "t", "memory": {"arguments": 1}}),
    "a size more": of({"text": "t", "memory": SIZES | {"more": 1}}),
    "text for a size": of({"text": "t", "memory": SIZES | {"peak": "5"}}),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_file_is_as_none(damage, tmp_path):
    keep(tmp_path, "a", text("a"), MEMORY)
    assert kept(tmp_path, "a") is not None
    path = tmp_path / "a.json.gz"
    path.write_bytes(DAMAGES[damage](path.read_bytes()))
    assert kept(tmp_path, "a") is None
    keep(tmp_path, "a", "again", MEMORY)
    assert kept(tmp_path, "a") == {"text": "again", "memory": SIZES}


WORKER = """
import os, sys
from pathlib import Path
from jaxpar.schedule import Memory, target
from jaxpar.tools.timeline import cache
cache.MOST_BYTES, folder, name = 20_000, Path(sys.argv[1]), sys.argv[2]
memory, found = Memory(1, 2, 3, 4, 5), 0
for n in range(60):
    cache.keep(folder, f"{name}{n}", os.urandom(5000).hex(), memory)
    cache.keep(folder, f"both{n}", "f" * 10_000, memory)
    for key in (f"{name}{n}", f"both{n}", f"both{n - 1}"):
        read = cache.kept(folder, key)
        assert read is None or len(read["text"]) == 10_000
        found += read is not None
assert found
"""


def test_processes_that_keep_and_delete_at_once(tmp_path):
    begun = [
        subprocess.Popen(
            [sys.executable, "-c", WORKER, str(tmp_path), name], stderr=subprocess.PIPE, text=True
        )
        for name in "xyz"
    ]
    for process in begun:
        _, said = process.communicate(timeout=600)
        assert process.returncode == 0, said
    keep(tmp_path, "last", "", MEMORY)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 20_000
    assert not list(tmp_path.glob(".*"))


class Lowered:
    """A program, and where its lines come from."""

    def __init__(self, *places):
        self.places = places

    def as_text(self, debug_info):
        assert debug_info
        return "".join(f"#loc{n} = loc({place})\n" for n, place in enumerate(self.places))


def test_a_line_of_these_tools_that_moves_makes_no_other_program():
    own = '"/x/site-packages/jaxpar/tools/timeline/timeline.py":{}:8 to :30'
    users = '"/home/me/step.py":{}:8 to :30'
    described = target("v5e:2x2")

    def key(*lines):
        places = (place.format(line) for place, line in zip((own, users), lines, strict=True))
        return cache.key_of(Lowered(*places), described, {})

    assert key(7, 7) == key(9, 7)
    assert key(7, 7) != key(7, 9)
