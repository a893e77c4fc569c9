"""Every public name has an example, and it runs."""

import doctest

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar.testing


@pytest.mark.parametrize("name", jaxpar.testing.__all__)
def test_example(name):
    names = {**vars(jaxpar.testing), "jax": jax, "jnp": jnp, "np": np}
    examples = doctest.DocTestFinder(recurse=False).find(
        getattr(jaxpar.testing, name), name, module=False, globs=names
    )
    assert [example for test in examples for example in test.examples]
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
    for test in examples:
        assert runner.run(test).failed == 0
