"""Workers start as forks of one process that has imported what they import."""

import pytest
from forks import Forks
from programs import environment

MODULES = ("jaxpar.layout", "jaxpar.tools.cli.workers", "optax", "pytest", "safetensors.numpy")


@pytest.fixture(scope="session")
def forks():
    made = Forks(MODULES, environment())
    yield made
    made.end()
