"""Tables end up between their markers, and on the terminal."""

import jax
import numpy as np
import pytest

import tables


def test_rewrites_what_is_between_the_markers():
    begin, end = tables.markers("layers")
    text = f"before\n{begin}\nold\n{end}\nafter\n"
    once = tables.rewrite(text, "layers", "new")
    assert once == f"before\n{begin}\n\nnew\n\n{end}\nafter\n"
    assert tables.rewrite(once, "layers", "new") == once
    for wrong in ("", begin, f"{end}{begin}", text + text):
        with pytest.raises(ValueError, match="must be there, once each and in order"):
            tables.rewrite(wrong, "layers", "new")


def test_updates_a_file(tmp_path):
    readme = tmp_path / "README.md"
    readme.write_text("\n".join(tables.markers("layers")))
    tables.update(readme, "layers", "new")
    assert "\n\nnew\n\n" in readme.read_text()


def test_says_with_what_tables_were_made():
    line = tables.made_by("python benchmarks/layers", "numpy", "no-such-package")
    assert line.startswith("`python benchmarks/layers`, 20")
    assert line.endswith(f"jax {jax.__version__}, numpy {np.__version__}.")


def test_on_the_terminal_and_in_markdown(capsys):
    table = tables.Table(["case", "ms"], [["a [b]", "**1.5**"]])
    assert table.markdown() == "| case | ms |\n| --- | ---: |\n| a [b] | **1.5** |"
    table.print()
    title, _, row = filter(str.strip, capsys.readouterr().out.splitlines())
    assert (title.split(), row.split()) == (["case", "ms"], ["a", "[b]", "1.5"])
    tables.Table(["x" * 70, "y" * 70], [["1", "2"]]).print(width=150)
    assert f" {'y' * 70}" in capsys.readouterr().out
    tables.Table(["case"], []).print()
    assert capsys.readouterr().out == ""
