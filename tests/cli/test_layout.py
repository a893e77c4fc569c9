"""The command that shows layouts, without devices."""

import json

import pytest

from jaxpar.tools.cli.main import main

MODEL = """
import jax, jax.numpy as jnp
from jaxpar.layout import LayoutMap, REPLICATED

def lay_out(mesh):
    shapes = {"layers": [{"up": jax.ShapeDtypeStruct((4096, 8192), jnp.bfloat16)}] * 2,
              "norm": jax.ShapeDtypeStruct((4096,), jnp.float32)}
    return LayoutMap({"layers/.*": ("fsdp", "tp"), "norm": REPLICATED}).layout(shapes, mesh)

def nothing(mesh):
    return 3
"""


@pytest.fixture(autouse=True)
def model(tmp_path, monkeypatch):
    (tmp_path / "laid.py").write_text(MODEL)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(__import__("sys").modules, "laid", raising=False)


def test_a_table_for_more_devices_than_there_are(tmp_path, capsys):
    data = tmp_path / "layout.json"
    assert main(["layout", "laid:lay_out", "--mesh", "fsdp=16,tp=8", "--json", str(data)]) == 0
    out = capsys.readouterr().out
    assert "3 arrays on 128 devices (fsdp=16, tp=8): 1.02 MiB a device" in out
    assert out.splitlines()[1].startswith("norm ")
    found = json.loads(data.read_text())
    assert found["mesh"] == {"fsdp": 16, "tp": 8}
    assert {tuple(row["local_shape"]) for row in found["arrays"]} == {(256, 1024), (4096,)}


def test_a_picture(capsys):
    arguments = ["--mesh", "fsdp=2,dp=1,tp=2", "--rows", "1", "--picture", "layers/1/up"]
    assert main(["layout", "laid:lay_out", *arguments]) == 0
    out = capsys.readouterr().out
    assert "... and 2 arrays more" in out
    assert out.endswith(
        "layers/1/up: blocks [2048, 4096] of [4096, 8192]; rows: dimension 0 over fsdp; "
        "columns: dimension 1 over tp\n0  1\n2  3\n"
    )


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (
            "laid:lay_out --mesh fsdp=3,tp=8",
            1,
            "'fsdp' (3) does not divide dimension 0: 4096 = 1365",
        ),
        ("laid:lay_out --mesh fsdp=16,pp=8", 1, "the mesh has no axis 'tp', but fsdp=16, pp=8"),
        ("laid:lay_out --mesh fsdp=3,tp=-1", 2, "--mesh fsdp=3,tp=-1: fsdp=3 x tp=-1: the other"),
        ("laid:lay_out --mesh fsdp", 2, "--mesh fsdp: "),
        (
            "laid:nothing",
            2,
            "laid:nothing, called with the mesh, returned int; return what LayoutM",
        ),
        ("laid:none", 2, "module laid has no function 'none'"),
        ("laid:lay_out --mesh fsdp=2,tp=2 --picture up", 2, "--picture: no array of path 'up'"),
        ("laid:lay_out --mesh fsdp=2,tp=2 --rows -1", 2, "--rows -1 must not be negative"),
        ("laid:lay_out --json no/a.json", 2, "--json no/a.json: its directory does not exist"),
    ],
)
def test_refused(arguments, status, text, capsys):
    assert main(["layout", *arguments.split()]) == status
    assert text in capsys.readouterr().err
