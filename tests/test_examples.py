"""Every public name has a docstring with an example that runs."""

import doctest
import inspect

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec as P

import jaxpar
import jaxpar.layers
import jaxpar.layout
import jaxpar.moe
import jaxpar.pipeline
import jaxpar.schedule
import jaxpar.testing

MODULES = (
    jaxpar,
    jaxpar.layers,
    jaxpar.layout,
    jaxpar.moe,
    jaxpar.pipeline,
    jaxpar.schedule,
    jaxpar.testing,
)
PUBLIC = [
    (module, name)
    for module in MODULES
    for name in module.__all__
    if callable(getattr(module, name))
]
NAMES = {name: getattr(module, name) for module, name in PUBLIC}
NAMES["REPLICATED"] = jaxpar.layout.REPLICATED


@pytest.mark.parametrize(
    ("module", "name"), PUBLIC, ids=lambda value: getattr(value, "__name__", value)
)
def test_example(module, name, tmp_path):
    names = {**NAMES, "jaxpar": jaxpar, "jax": jax, "jnp": jnp, "lax": lax, "np": np, "P": P}
    named, names["folder"] = getattr(module, name), tmp_path / "folder"
    # Of a class, its methods' too.
    examples = doctest.DocTestFinder(recurse=inspect.isclass(named)).find(
        named, name, module=False, globs=names
    )
    assert [example for test in examples for example in test.examples]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    for test in examples:
        assert runner.run(test).failed == 0
