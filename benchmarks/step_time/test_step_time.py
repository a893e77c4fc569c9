"""The table has medians of paired ratios, and ends up in the README."""

import pytest

import step_time.__main__ as command
import tables


def test_the_table_has_medians_of_paired_ratios():
    seconds = {"naive": [1.0, 2.0, 4.0], "auto": [1.0, 3.0, 4.4], "bidirectional": [3.0, 2.0, 8.0]}
    table = command.table({"fsdp=8": seconds})
    assert table.titles == ["mesh", "naive, ms", "auto, over naive", "bidirectional, over naive"]
    assert table.rows == [["fsdp=8", "2000", "1.10", "2.00"]]


def test_the_readme_has_the_markers():
    text = command.README.read_text()
    assert tables.rewrite(text, command.SECTION, "new").count("new") >= 1


def test_refuses_no_rounds(capsys):
    with pytest.raises(SystemExit, match="2"):
        command.main(["--rounds", "0"])
    assert "--rounds must be at least 1, got 0" in capsys.readouterr().err
