"""What the package promises as a whole."""

import re
import subprocess
import sys
from pathlib import Path

import jax
import pytest

import jaxpar

SOURCES = sorted(Path(jaxpar.__file__).parent.rglob("*.py"))


def test_eight_devices():
    assert jax.device_count() == 8
    assert jax.devices()[0].platform == "cpu"


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_uses_only_public_jax(path):
    assert not re.search(r"jax\._src|jaxlib", path.read_text())


def test_needs_only_its_runtime_dependencies():
    """Importing everything pulls in neither the extras' libraries nor a backend."""
    program = (
        "import sys, jaxpar, jaxpar.testing, jaxpar.__main__\n"
        "extras = {'hypothesis', 'rich', 'matplotlib', 'beartype', 'optax', 'orbax'}\n"
        "assert not extras & set(sys.modules), extras & set(sys.modules)\n"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_is_typed():
    assert (Path(jaxpar.__file__).parent / "py.typed").exists()
