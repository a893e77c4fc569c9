"""The project's commands: `nox -l` lists them."""

import re
import shutil
from pathlib import Path

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


@nox.session
def quick(session: nox.Session) -> None:
    """Runs what is nearest to users, in five minutes: matmuls, layers, operands, the house."""
    session.install("-e", ".[test]")
    found = (
        "matmul",
        "layers",
        *(f"test_{name}.py" for name in ("house", "operands", "quantized")),
    )
    session.run(*PYTEST, *(f"tests/{name}" for name in found), *session.posargs)


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
        found += ("test_package", "test_readme", "schedule/test_kernels")
    session.run(*PYTEST, *(f"tests/{name}.py" for name in found), *session.posargs)


# The files that ask Hypothesis for examples, and the folders that compare floats.
PROPERTIES = (
    *("matmul/test_values_and_cotangents", "collectives/test_gradients", "collectives/test_shift"),
    *("testing/test_meshes", "testing/test_reference", "testing/test_shapes", "test_mesh"),
    *("layout/test_split", "layout/test_round_trips", "layout/test_interleaved", "test_choice"),
    *("layers/test_ring_attention", "test_cycles"),
)
NUMERIC = (
    *("matmul", "collectives", "layers", "layout", "moe", "pipeline", "testing"),
    *(f"test_{name}.py" for name in ("axis", "interop", "modes", "quantized", "tuning")),
)


@nox.session
def properties(session: nox.Session) -> None:
    """Runs the property tests with 50 times their examples, others each time: half an hour."""
    session.install("-e", ".[test]")
    found = (f"tests/{name}.py" for name in PROPERTIES)
    session.run(*PYTEST, "--hypothesis-profile", "thorough", *found, *session.posargs)


@nox.session
def rounding(session: nox.Session) -> None:
    """Runs tests of numbers with other instruction sets, threads and draws: 80 minutes.

    On x86. With SSE4_2, what XLA's CPU computes in float16 is expected to fail (conftest.py).
    """
    session.install("-e", ".[test]")
    for isa, threads, seed in (("AVX2", 1, 1), ("SSE4_2", 4, 2), ("AVX2", 4, 3), ("SSE4_2", 1, 3)):
        env = {"XLA_FLAGS": f"--xla_cpu_max_isa={isa}", "NPROC": f"{threads}"}
        named = (f"tests/{name}" for name in NUMERIC)
        session.run(*PYTEST, *named, *session.posargs, env={**env, "JAXPAR_TEST_SEED": f"{seed}"})


def _jax_for(python: str | bool | None) -> tuple[str, ...]:
    """The oldest that is supported on 3.11, and the newest elsewhere."""
    return (f"jax=={OLDEST_JAX}", f"jaxlib=={OLDEST_JAX}") if python == "3.11" else ()


@nox.session
def browser(session: nox.Session) -> None:
    """Opens the page of `jaxpar explain --html` in the system's Chromium or Chrome: seconds."""
    known = ("chromium", "chromium-browser", "google-chrome")
    if not any(map(shutil.which, known)):
        session.error(f"none of {', '.join(known)} is on the PATH: apt-get install chromium")
    needed = ("beartype", "hypothesis", "playwright>=1.49", "pytest")  # a part of `.[test]`, and it
    session.install("-e", ".", *needed)
    session.run("pytest", "tests/browser/page.py", *session.posargs)


@nox.session
def lint(session: nox.Session) -> None:
    """Checks style with ruff and types with pyright."""
    session.install("-e", ".[test]", "ruff", "pyright[nodejs]")
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("pyright")


@nox.session
def notebooks(session: nox.Session) -> None:
    """Runs the notebooks, all or those named, and stores what they show: about three minutes."""
    session.install("-e", ".[notebooks]", "nbclient>=0.10", "ipykernel>=6.29")
    session.run("python", "tests/support/notebooks.py", *session.posargs)


@nox.session
def site(session: nox.Session) -> None:
    """Builds the site, and checks links, searches and, where a browser is, widths of its pages."""
    session.install("-e", ".[docs]", "playwright>=1.49")
    session.run("mkdocs", "build", env={"NO_MKDOCS_2_WARNING": "1"})
    session.run("python", "docs/site/check.py")
    if any(map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))):
        session.run("python", "docs/site/look.py")
    else:
        session.warn("neither Chromium nor Chrome is on the PATH: widths are not checked")


@nox.session
def release_check(session: nox.Session) -> None:
    """Builds wheel and sdist, and runs README's example from each on every Python; `--tag v1.2.3`.

    Leaves in dist/ what is to be published, and the changelog's section as notes.md.
    """
    session.install("build", "twine")
    shutil.rmtree("dist", ignore_errors=True)
    session.run("python", "-m", "build", "--outdir", "dist", silent=True)
    session.run("twine", "check", "--strict", *map(str, Path("dist").iterdir()))
    [built] = Path("dist").glob("*.whl")
    version = built.name.split("-")[1]
    if session.posargs[:1] == ["--tag"] and session.posargs[1:] != [f"v{version}"]:
        session.error(f"the tag {session.posargs[1:]} is not v{version} of pyproject.toml")
    notes = re.search(
        rf"^## {re.escape(version)}\n(.*?)(?=^## |\Z)", _text("CHANGELOG.md"), re.M | re.S
    )
    if notes is None:
        session.error(f"CHANGELOG.md has no section {version}")
    Path("dist/notes.md").write_text(notes.group(1).strip() + "\n")
    example = re.findall(r"```python\n(.*?)```", _text("README.md"), re.DOTALL)[0]
    folder = session.create_tmp()  # the example must not find the clone
    tried = 0
    for python in ("3.11", "3.12", "3.13"):
        if shutil.which(f"python{python}") is None:
            session.warn(f"python{python} is not here: not checked")
            continue
        for package in (built, *Path("dist").glob("*.tar.gz")):
            place = Path(folder, f"{python}-{package.suffix[1:]}")
            session.run(f"python{python}", "-m", "venv", "--clear", str(place), external=True)
            here = str(place.absolute() / "bin" / "python")
            session.run(here, "-m", "pip", "install", "-q", str(package), external=True)
            with session.chdir(folder):
                session.run(here, "-m", "jaxpar", "--version", external=True)
                session.run(here, "-c", example, env={"JAX_PLATFORMS": "cpu"}, external=True)
            tried += 1
    session.log(f"{tried} environments had no fault")


def _text(path: str) -> str:
    return Path(path).read_text()


# What renews the tables of benchmarks/: minutes on two cores, extras, command.
PREDICT = "jaxpar predict --target v5p:4x4x8 --mesh dp=-1,tp=8 --ops gather-lhs-rows"
FIGURES = {
    "timeline": (1, "bench,tpu", f"{PREDICT} --modes naive,auto --plot docs/timeline.png"),
    "compile_time": (4, "bench", "python benchmarks/compile_time"),
    "matmuls": (8, "bench", "jaxpar bench"),
    "low_bit": (8, "train", "python benchmarks/low_bit"),
    "step_time": (10, "train", "python benchmarks/step_time"),
    "overlap": (12, "bench,tpu,gpu", "python benchmarks/overlap"),
    "starts": (12, "bench,tpu,gpu", "python benchmarks/starts"),
    "network": (15, "bench", "python benchmarks/network"),  # as root, on Linux
    "moe": (25, "bench,tpu,gpu", "python benchmarks/moe"),
    "training_step": (30, "bench,tpu,gpu", "python benchmarks/training_step"),
    "sweep": (180, "bench,tpu", "python benchmarks/sweep --ways"),
}


@nox.session(python=NEWEST_PYTHON)  # which the newest jax needs
def figures(session: nox.Session) -> None:
    """Renews the tables of a subject, `nox -s figures -- NAME [arguments]`, or all of them."""
    name, *arguments = session.posargs or ("all",)
    if name != "all" and name not in FIGURES:
        session.error(f"{name} is no subject; give all, or one of {', '.join(FIGURES)}")
    for subject in FIGURES if name == "all" else [name]:
        minutes, extras, command = FIGURES[subject]
        session.log(f"{subject}: about {minutes} minutes")
        session.install("-e", f".[{extras}]")
        session.run(*command.split(), *arguments)


@nox.session(python=NEWEST_PYTHON)
def published_steps(session: nox.Session) -> None:
    """Holds predicted steps of MaxText against published ones, `-- --steps NAMES`: an hour."""
    session.install("uv")
    # The next libtpu copies what is offloaded into another layout, through HBM, which is too small.
    needed = (".[bench]", "maxtext[tpu]==0.2.5", "libtpu==0.0.50.1")
    session.run("uv", "pip", "install", "-e", *needed)
    session.run("python", "benchmarks/steps", *session.posargs)


@nox.session(python=NEWEST_PYTHON)
def same_programs(session: nox.Session) -> None:
    """Names the points of the sweep whose programs are not those of `-- COMMIT` (HEAD)."""
    session.install("-e", ".[bench,tpu]")
    session.run("python", "benchmarks/sweep/hashes.py", *session.posargs)
