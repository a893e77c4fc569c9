"""Eight CPU devices, strict types, and jaxtyping's run-time checks over the whole package."""

import gc
import os
import re
from importlib import import_module
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

# Tests compile thousands of small programs. XLA's fusion emitters, and codegen in parallel, take
# more than half of that time, and are not what is tested. Set before JAX is imported, which reads
# it; newer ones have no other emitters.
if version("jaxlib").startswith("0.10."):
    quick = "--xla_cpu_use_fusion_emitters=false --xla_cpu_parallel_codegen_split_count=1"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {quick}".strip()

import jax
import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from jaxtyping import install_import_hook

jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_dtype_promotion", "strict")

# Of all tests, and of examples in docstrings: on a busy machine anything may take seconds.
settings.register_profile(
    "jaxpar", deadline=None, database=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("thorough", settings.get_profile("jaxpar"), max_examples=50 * 100)
settings.load_profile("jaxpar")

# All tests draw other numbers with another seed: what they check must not depend on the draw.
SEED = int(os.environ.get("JAXPAR_TEST_SEED", "0"))
if SEED:
    draws, keys = np.random.default_rng, jax.random.key
    np.random.default_rng = lambda seed=None: draws(np.random.SeedSequence(seed, spawn_key=(SEED,)))
    jax.random.key = lambda seed, **options: keys(seed + SEED, **options)

# Modules whose annotations have shapes: checks of every call take a fifth of the tests' time.
SOURCES = Path(__file__).parent / "src"
ANNOTATED = [
    ".".join(path.relative_to(SOURCES).with_suffix("").parts)
    for path in SOURCES.rglob("*.py")
    if "from jaxtyping import" in path.read_text()
]

with install_import_hook(ANNOTATED, "signatures.checked"):
    for module in ANNOTATED:
        import_module(module)


from jaxpar.tools.timeline.cuda_plugin import find_plugin  # noqa: E402 - after the hook

# Whose programs are looked at, or measured.
OPTIMISED = {
    *("schedule", "cli", "overlap", "sweep", "compile_time", "step_time"),
    *("test_options.py", "test_order.py"),
}
# Among them, of the command that measures: its figures are not held against anything.
QUICK = {"test_bench.py", "test_bench_times.py"}


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """Programs that run for milliseconds are not worth seconds of optimisation."""
    is_quick = request.path.name in QUICK or OPTIMISED.isdisjoint(request.path.parts)
    jax.config.update("jax_disable_most_optimizations", is_quick)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
    jax.clear_caches()  # a module's programs are gigabytes in the end, and of no use to the next


@pytest.fixture
def float64():
    """Numbers of 64 bits, for what `tests/support/wide.py` compares."""
    with jax.enable_x64(True):
        yield


# Some gigabytes that a contributor may do without. `nox -s tests`, and so CI, installs them.
COMPILERS = {"TPU": find_spec("libtpu"), "CUDA": find_plugin()}


def skip_without_compiler(report):
    """Skips what asked for a compiler that is not installed."""
    for name, found in COMPILERS.items():
        text = report.longreprtext if report.failed and not found else ""
        if re.search(f"needs? the {name} compiler", text):
            report.outcome = "skipped"
            report.longrepr = (report.nodeid, 0, f"Skipped: no {name} compiler is installed")
    return report


@pytest.hookimpl(wrapper=True)
def pytest_make_collect_report(collector):
    return skip_without_compiler((yield))


# A flag takes F16C away, without which XLA's CPU computes nothing in float16, nor sums of 8-bit and
# 4-bit floats: findings/small-floats-add-in-float16-on-cpus.sh.
WITHOUT_F16C = "--xla_cpu_max_isa=SSE4_2" in os.environ.get("XLA_FLAGS", "")


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item):
    report = skip_without_compiler((yield))
    text = report.longreprtext if report.failed and WITHOUT_F16C else ""
    if "Failed to materialize symbols" in text:
        report.outcome, report.wasxfail = "skipped", "no F16C"
    return report


def pytest_collection_finish(session):
    """Thousands of programs make millions of objects: the collector looks at fewer, and rarely."""
    gc.freeze()
    gc.set_threshold(50_000, 20, 20)


def pytest_configure(config):
    assert jax.device_count() == 8, f"the tests need exactly 8 devices, found {jax.devices()}"
