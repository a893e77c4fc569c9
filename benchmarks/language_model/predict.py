"""What the compiler of a chip makes of the training step, without the chip.

Run as a program, it compiles what standard input describes and writes what it found: the TPU
compiler and the devices of the run then do not share a process.
"""

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from jaxpar import LowBit
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.cli.workers import answer, first_line
from language_model import wire
from language_model.config import Model, Training
from workers import KEPT, records_of


def predict(
    target: str,
    mesh: str,
    model: Model,
    training: Training,
    microbatches: int = 1,
    mode: str = "auto",
    dispatch: str = "auto",
    wire_dtype: LowBit | None = None,
    virtual_stages: int = 1,
) -> dict[str, Any]:
    """Compiles the step for a target, and returns its times and its memory.

    Raises:
      UsageError: the target cannot be compiled for, with the reason.
    """
    request = {
        "target": target,
        "mesh": mesh,
        "model": asdict(model),
        "training": asdict(training),
        "microbatches": microbatches,
        "mode": mode,
        "dispatch": dispatch,
        "wire_dtype": wire.to_json(wire_dtype),
        "virtual_stages": virtual_stages,
    }
    (*_, found), _ = records_of("language_model.predict", request)
    if "failure" in found:
        raise UsageError(f"--target {target}: {found['failure']}")
    return found


def summary(found: dict[str, Any]) -> str:
    """Returns what was found, as a few lines."""
    share = found["exposed"] / found["total"]
    return (
        f"predicted for {found['target']}, mesh {found['mesh']}, {found['devices']} devices: the "
        f"compiler's schedule on a model of the chip\n"
        f"  step {1e3 * found['total']:.3f} ms, of it exposed communication "
        f"{1e3 * found['exposed']:.3f} ms ({share:.1%}); {found['hidden']:.0%} of transfer time "
        f"hidden\n"
        f"  HBM at most {found['peak'] / 2**30:.3f} GiB a device; compiled in "
        f"{found['seconds']:.0f} s"
    ) + "".join(f"\n  {line}" for line in found["pipeline"])


def serve(request: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Yields what was found, or why nothing was."""
    try:
        yield _compile(request)
    except (ImportError, ValueError, UsageError) as reason:
        yield {"failure": first_line(str(reason)).removeprefix("target: ")}


def _compile(request: dict[str, Any]) -> dict[str, Any]:
    from jaxpar.schedule import compile_for, timeline
    from jaxpar.schedule import target as describe
    from jaxpar.tools.explain.pipelines import pipeline_lines
    from language_model.curves import mesh_text
    from language_model.parallel import build_mesh

    devices = list(describe(request["target"], "x=-1").mesh.devices.flat)
    mesh = build_mesh(request["mesh"], devices)
    chosen = describe(request["target"], dict(mesh.shape))
    names = "microbatches", "mode", "dispatch", "virtual_stages"
    options = {name: request[name] for name in names}
    options["wire_dtype"] = wire.from_json(request["wire_dtype"])
    model, training = Model(**request["model"]), Training(**request["training"])
    step, args = step_on(chosen.mesh, model, training, **options)
    compiled = compile_for(step, chosen, *args, cache=KEPT)
    played = timeline(compiled)
    return {
        "target": request["target"],
        "mesh": mesh_text(chosen.mesh),
        "devices": chosen.mesh.size,
        "total": played.total,
        "exposed": played.exposed,
        "hidden": played.hidden_share,
        "peak": played.peak_bytes,
        "seconds": compiled.seconds,
        "loops_of_unknown_length": list(played.loops_of_unknown_length),
        "pipeline": pipeline_lines(played, chosen),
    }


def step_on(mesh: Any, model: Model, training: Training, **options: Any) -> tuple[Any, Any]:
    """Returns the training step on a mesh, and the shapes of its arguments."""
    import jax
    import jax.numpy as jnp
    from jax.sharding import NamedSharding

    from language_model.parallel import LABELS, TOKENS, padded_sizes
    from language_model.train import Trainer

    trainer = Trainer(model, training, mesh, **options)
    sizes = dict(mesh.shape)
    shape = padded_sizes(training.batch, training.sequence, trainer.microbatches, sizes)
    batch = [
        jax.ShapeDtypeStruct(shape, jnp.int32, sharding=NamedSharding(mesh, spec))
        for spec in (TOKENS, LABELS)
    ]
    return trainer.step, (trainer.of_state.shapes, *batch)


def make_step(mesh: Any) -> tuple[Any, Any]:
    """Returns the step of the default sizes on a mesh with all axes, for `jaxpar explain`.

    There are as many microbatches as devices of pp.
    """
    from language_model.arguments import parse
    from language_model.parallel import AXES

    lacking = [f"{name}=1" for name in AXES if name not in mesh.axis_names]
    if lacking:
        raise UsageError(f"the mesh must name all axes of the model; add {','.join(lacking)}")
    args = parse([])
    return step_on(mesh, args.model, args.training, microbatches=mesh.shape["pp"])


if __name__ == "__main__":
    answer(serve)
