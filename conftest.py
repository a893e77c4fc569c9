"""Eight CPU devices, strict types, and jaxtyping's run-time checks over the whole package."""

import jax
import pytest
from beartype import beartype
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

_checked = {}


def checked(signature):
    """As beartype, once for each signature: a function inside of another is made at every call.

    jaxtyping gives a function without a body in place of each that it checks.
    """
    defaults = signature.__defaults__, tuple((signature.__kwdefaults__ or {}).items())
    annotations = tuple(signature.__annotations__.items())
    key = signature.__qualname__, signature.__module__, signature.__code__, annotations, defaults
    try:
        if key not in _checked:
            _checked[key] = beartype(signature)
    except TypeError:  # a default or an annotation that has no hash
        return beartype(signature)
    return _checked[key]


with install_import_hook("jaxpar", f"{__name__}.checked"):
    import jaxpar
    import jaxpar.layers
    import jaxpar.moe
    import jaxpar.testing  # noqa: F401


QUICKLY_COMPILED = {
    *("language_model", "layers", "matmul", "moe"),
    *("test_axis.py", "test_clusters.py", "test_examples.py", "test_interop.py", "test_ragged.py"),
    *("test_reference.py", "test_ways.py"),
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
