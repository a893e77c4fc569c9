"""Eight CPU devices, strict types, and jaxtyping's run-time checks over the whole package."""

import jax
import pytest
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

with install_import_hook("jaxpar", "signatures.checked"):
    import jaxpar
    import jaxpar.layers
    import jaxpar.moe
    import jaxpar.testing  # noqa: F401


QUICKLY_COMPILED = {
    *("language_model", "layers", "layout", "matmul", "moe", "training_step"),
    *("testing", "test_clusters.py", "test_examples.py", "test_values.py"),
    *("test_gradients.py", "test_interop.py", "test_ragged.py", "test_reference.py"),
    *("test_tuning.py", "test_ways.py"),
}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """Programs that run for milliseconds are not worth seconds of optimisation."""
    quick = bool(QUICKLY_COMPILED & set(request.path.parts))
    jax.config.update("jax_disable_most_optimizations", quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)


def pytest_configure(config):
    assert jax.device_count() == 8, f"the tests need exactly 8 devices, found {jax.devices()}"
