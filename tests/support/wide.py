"""Comparisons that do not depend on a machine's rounding.

In float32 some layers, or a sum that cancels, differ more between two orders of additions than
some wrong programs do. A test of structure asks for the fixture `float64`, and compares by
`assert_alike`. A test of float32 compares by `assert_rounded`.
"""

import jax
import numpy as np

from jaxpar.testing import tolerance

# Of an array's largest entry. It is 10^7 roundings: no order of additions makes so many, and no
# wrong term is as small.
MOST = 1e-9


def wide(tree):
    """The tree with its floats in float64."""

    def cast(x):
        return x.astype("float64") if np.issubdtype(x.dtype, np.floating) else x

    return jax.tree.map(cast, tree)


def assert_alike(found, wanted):
    """Trees of the same leaves; floats are of float64, and others are equal."""
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    largest = max(np.max(np.abs(x), initial=0) for x in jax.tree.leaves(wanted))
    for one, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        one, right = np.asarray(one), np.asarray(right)
        if not np.issubdtype(right.dtype, np.floating):
            np.testing.assert_array_equal(one, right)
            continue
        assert one.dtype == right.dtype == np.float64, "compare in float64"
        # A leaf may be 0 but for rounding, as the gradient of a bias of keys is.
        atol = MOST * max(np.max(np.abs(right), initial=0), largest / 1000)
        np.testing.assert_allclose(one, right, rtol=0, atol=atol)


# Of what the reference itself loses in float32: other orders of additions lose as much or a little
# more, at other entries.
TIMES = 8


def assert_rounded(found, reference, *args):
    """Compares float32 with a reference of NumPy: what it loses in float32 is allowed 8 times."""
    exact, narrow = reference(*wide(args)), reference(*args)
    most = np.max(np.abs(exact), initial=0)
    lost = np.max(np.abs(np.asarray(narrow, np.float64) - exact), initial=0)
    atol = TIMES * lost + tolerance(np.float32) * most
    np.testing.assert_allclose(found, exact, rtol=0, atol=atol)
