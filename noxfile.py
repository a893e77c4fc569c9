"""The project's commands: `nox -l` lists them."""

import shutil

import nox

nox.options.sessions = ["tests", "lint"]
nox.options.reuse_existing_virtualenvs = True

OLDEST_JAX = "0.10.0"  # keep in step with pyproject.toml
NEWEST_PYTHON = next((v for v in ("3.13", "3.12") if shutil.which(f"python{v}")), "3.12")
PYTEST = ("pytest", "-n", "auto", "--dist", "worksteal", "--durations", "25")


@nox.session
def tests(session: nox.Session) -> None:
    """Runs the tests with the interpreter at hand and the newest jax that it can have."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, *session.posargs)


@nox.session(python=["3.11", "3.12", "3.13"])
def tests_all(session: nox.Session) -> None:
    """Runs the tests on 3.11 with the oldest supported jax, on 3.12 and 3.13 with the newest."""
    session.install("-e", ".[test]", *_jax_for(session.python))
    session.run(*PYTEST, *session.posargs)


@nox.session(python=["3.11", "3.13"])
def tests_of_versions(session: nox.Session) -> None:
    """Runs what depends on jax's version most, with the oldest on 3.11, the newest on 3.13."""
    needed = ("pytest", "pytest-xdist", "hypothesis", "beartype", "optax")  # a part of `.[test]`
    session.install("-e", ".[gpu,tpu]", *needed, *_jax_for(session.python))
    found = ("collectives/test_shift", "collectives/test_ragged", "schedule/test_recorded")
    if not _jax_for(session.python):
        found += ("test_package", "test_readme")
    session.run(*PYTEST, *(f"tests/{name}.py" for name in found), *session.posargs)


def _jax_for(python: str | bool | None) -> tuple[str, ...]:
    """The oldest that is supported on 3.11, and the newest elsewhere."""
    return (f"jax=={OLDEST_JAX}", f"jaxlib=={OLDEST_JAX}") if python == "3.11" else ()


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style with ruff and types with pyright."""
    session.install("-e", ".[test]", "ruff", "pyright[nodejs]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pyright")


@nox.session
def bench(session: nox.Session) -> None:
    """Times matmuls against their naive forms, and compiles rings of 4 to 64 devices."""
    session.install("-e", ".[bench]")
    session.run("python", "-m", "jaxpar", "bench", *session.posargs)
    session.run("python", "benchmarks/compile_time")


@nox.session
def language_model_sweep(session: nox.Session) -> None:
    """Compares the language model with one device's on every mesh over 8 devices: minutes."""
    session.install("-e", ".[test]")
    session.run(*PYTEST, "benchmarks/language_model/tests/sweep.py", *session.posargs)


@nox.session
def network(session: nox.Session) -> None:
    """Measures the overlap on a slow network: four CPU processes, by the wall clock (Linux)."""
    session.install("-e", ".[bench]")
    session.run("python", "benchmarks/network", *session.posargs)


@nox.session(python=NEWEST_PYTHON)  # those that the newest jax needs
def overlap(session: nox.Session) -> None:
    """Compares time over floor with naive, XLA and the guide's rings, by the TPU compiler."""
    session.install("-e", ".[bench,tpu,gpu]")
    session.run("python", "benchmarks/overlap", *session.posargs)


@nox.session(python=NEWEST_PYTHON)
def sweep(session: nox.Session) -> None:
    """Compares auto with its peers at hundreds of points, by the TPU compiler."""
    session.install("-e", ".[bench,tpu]")
    session.run("python", "benchmarks/sweep", *(session.posargs or ["--ways"]))


@nox.session(python=NEWEST_PYTHON)
def training_step(session: nox.Session) -> None:
    """Compares a training step with FSDP and TP with naive and plain forms, for TPU and GPU."""
    session.install("-e", ".[bench,tpu,gpu]")
    session.run("python", "benchmarks/training_step", *session.posargs)


@nox.session
def step_time(session: nox.Session) -> None:
    """Times the language model's step on CPU devices against naive collectives."""
    session.install("-e", ".[train]")
    session.run("python", "benchmarks/step_time", *session.posargs, env={"JAX_PLATFORMS": "cpu"})


@nox.session(python=NEWEST_PYTHON)
def moe(session: nox.Session) -> None:
    """Compares experts with other ways of dispatch, compiled for TPU and GPU, and with matmuls."""
    session.install("-e", ".[bench,tpu,gpu]")
    session.run("python", "benchmarks/moe", *session.posargs)
