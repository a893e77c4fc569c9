"""What became of a start is said in a word, each chip has a column, and the text has markers."""

import jax
import pytest

import starts.__main__ as command
import tables
from starts import worker

OVERLAPS = {"kinds": ["all-gather"], "found": 1, "synchronous": False, "covers": True}
CELLS = [
    (OVERLAPS, "overlaps"),
    (OVERLAPS | {"covers": False}, "nothing beside it"),
    (OVERLAPS | {"synchronous": True}, "synchronous"),
    (OVERLAPS | {"found": 0}, "becomes all-gather"),
    ({"failure": "its process ended with status -11"}, "**crashes**"),
    ({"failure": "JaxRuntimeError: INTERNAL: rank"}, "refused"),
]


@pytest.mark.parametrize(("record", "said"), CELLS)
def test_a_cell(record, said):
    assert command.cell(record) == said


def test_a_row_a_call_and_a_column_a_chip(monkeypatch):
    monkeypatch.setattr(command, "exported", lambda: {"psum_start"})
    found = {
        (chip, call, ordered): record
        for chip, (record, _) in zip(("v5e", "v6e"), (CELLS[0], CELLS[5]), strict=True)
        for call in worker.CALLS
        for ordered in (True, False)
    }
    made = command.table(found, ordered=True)
    assert made.titles == ["start", "v5e", "v6e"]
    assert ["`psum_start`", "overlaps", "refused"] in made.rows
    assert ["`all_gather_start` (not exported)", "overlaps", "refused"] in made.rows
    assert "- `psum_start`: JaxRuntimeError: INTERNAL: rank" in command.failures(found)


def test_a_permute_overlaps_where_jax_has_its_start():
    (record,) = worker.serve(["v5e:2x2", True, "ppermute_start", True])
    if worker.exported():
        assert command.cell(record) == "overlaps"
        assert record["kinds"] == ["collective-permute"]
    else:
        assert command.cell(record) == "refused"


def test_a_jax_without_them_says_so(monkeypatch, capsys):
    monkeypatch.setattr(command, "exported", set)
    assert command.main([]) == 1
    assert "no explicit starts" in capsys.readouterr().err
    monkeypatch.setattr(worker, "exported", set)
    (record,) = worker.serve(["v5e:2x2", True, "psum_start", True])
    assert record["failure"] == f"NotImplementedError: jax {jax.__version__} has no psum_start"


def test_the_readme_has_the_markers():
    text = command.README.read_text()
    assert tables.rewrite(text, command.SECTION, "new").count("new") >= 1


def test_an_unknown_chip(capsys):
    with pytest.raises(SystemExit):
        command.main(["--cases", "v3"])
    assert "choose from v4,v5e,v5p,v5p-no-options" in capsys.readouterr().err
