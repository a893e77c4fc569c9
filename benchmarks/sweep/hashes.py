"""Whether a change of the code changes a program: hashes of the lowered text of the sweep's points.

    python benchmarks/sweep/hashes.py [COMMIT]

Lowers every point of the sweep by `auto`, and every third by a named mode, each in turn. Does so
here and in a checkout of COMMIT (HEAD by default), and names the programs that differ. Nothing is
compiled. It takes about a minute on two cores.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[2]


def hashes() -> dict[str, str]:
    """Returns a hash of each program of the checkout whose modules are on the path."""
    import jax

    from jaxpar import Axis, compiled_with, compiler_options
    from jaxpar.choose.sites import NAMED
    from jaxpar.schedule import target
    from overlap import peers
    from sweep.points import points
    from sweep.worker import OPS, with_gradients

    found = {}
    for number, point in enumerate(p for p in points() if p.op in OPS):
        place = target(point.slice, point.mesh)
        op, ring = OPS[point.op], tuple(getattr(point, "ring", "tp").split(","))
        dtype = jax.numpy.dtype(getattr(point, "dtype", "bfloat16"))
        operands = peers.operands(point.op, point.shape, dtype, place.mesh, ring)
        lhs, rhs, out = op.specs(ring)
        modes = {"auto": "auto"}
        if number % 3 == 0:  # by its place in the list: its name may be another in another commit
            named = number // 3 % len(NAMED)
            modes[f"named mode {named}"] = NAMED[named]
        for name, mode in modes.items():
            function = jax.shard_map(
                lambda lhs, rhs, op=op, ring=ring, mode=mode: op.local(
                    lhs, rhs, Axis(ring, mode), None
                ),
                mesh=place.mesh,
                in_specs=(lhs, rhs),
                out_specs=out,
            )
            program = jax.jit(with_gradients(function) if point.grad else function)
            options = compiler_options(place) if point.options else {}
            with jax.set_mesh(place.mesh), compiled_with(options):
                try:
                    text = program.trace(*operands[: 3 if point.grad else 2]).lower().as_text()
                except ValueError as refused:  # a mode that this ring does not have
                    text = type(refused).__name__
            found[f"{point.label}, {name}"] = hashlib.sha256(text.encode()).hexdigest()[:16]
    return found


def start(checkout: Path) -> subprocess.Popen[str]:
    """Starts this file in a process that imports from a checkout."""
    path = os.pathsep.join(str(checkout / part) for part in ("src", "benchmarks"))
    env = os.environ | {"PYTHONPATH": path, "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, __file__, "--print"]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, text=True)


def main() -> int:
    """Compares the working tree with a commit."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("commit", nargs="?", default="HEAD")
    parser.add_argument("--print", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.print:
        sys.path.pop(0)  # of this file's folder: its modules have a package
        json.dump(hashes(), sys.stdout)
        return 0
    with tempfile.TemporaryDirectory() as folder:
        base = Path(folder, "base")
        git = ("git", "-C", str(ROOT))
        subprocess.run([*git, "worktree", "add", "-q", "--detach", base, args.commit], check=True)
        try:
            started = [start(ROOT), start(base)]
            said = [process.communicate()[0] for process in started]
        finally:
            subprocess.run([*git, "worktree", "remove", "--force", base], check=True)
    if any(process.returncode for process in started):
        return 1
    now, before = map(json.loads, said)
    differ = [name for name in sorted(now | before) if now.get(name) != before.get(name)]
    print(*differ, sep="\n")
    print(f"{len(differ)} of {len(now)} programs differ from those of {args.commit}")
    return bool(differ)


if __name__ == "__main__":
    sys.exit(main())
