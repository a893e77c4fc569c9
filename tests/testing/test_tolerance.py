import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.testing import tolerance


def test_result_and_accumulation_both_round():
    assert tolerance(np.float32, 64) == pytest.approx(6 * (1 + 8) * 2**-24)
    assert tolerance(jnp.bfloat16, 64) == pytest.approx(6 * (2**-8 + 8 * 2**-24))
    assert tolerance(jnp.float16) == pytest.approx(6 * (2**-11 + 2**-24))
    assert tolerance(np.float64, 100) == pytest.approx(6 * 11 * 2**-53)


@pytest.mark.parametrize("dtype", [np.int8, np.uint32, np.bool_])
def test_integers_are_exact(dtype):
    assert tolerance(dtype, 100) == 0.0


def test_depth_error():
    with pytest.raises(ValueError, match="tolerance: reduction_depth=0 must be at least 1"):
        tolerance(np.float32, 0)


@pytest.mark.parametrize("depth", [16, 1024])
def test_holds_for_float32_sums_in_the_worst_order(depth):
    terms = np.random.default_rng(0).standard_normal((2000, depth)).astype(np.float32)
    total = np.zeros(2000, np.float32)
    for term in terms.T:  # one after another: the order that rounds most
        total = total + term
    error = np.abs(total - terms.astype(np.float64).sum(1))
    size = np.sqrt((terms.astype(np.float64) ** 2).sum(1) + total.astype(np.float64) ** 2)
    assert np.max(error / size) < tolerance(np.float32, depth)
