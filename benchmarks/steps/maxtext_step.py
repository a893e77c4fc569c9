"""MaxText's own training step, compiled for a slice that need not be there.

    python benchmarks/steps/maxtext_step.py 'llama3.1-8b on 8'

prints what is predicted as JSON. MaxText has to be installed: `pip install 'maxtext[tpu]'`.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).parents[1])  # whose folders are packages

from jaxpar.schedule import CompiledProgram, Target, compile_for, target, timeline
from jaxpar.tools.accuracy.interval import of_parts
from jaxpar.tools.timeline.cache import default_folder
from jaxpar.tools.timeline.target import parts_of
from steps.step import Step, steps


def arguments(step: Step) -> list[str]:
    """What MaxText's command is given."""
    slices, chip, _ = parts_of(step.target)
    given = {
        "model_name": step.model,
        **step.config,
        "compile_topology": f"{chip}-{step.devices // slices}",
        "compile_topology_num_slices": slices,
        "run_name": "published_steps",
        "base_output_directory": "/tmp/published_steps",  # nothing is written there
    }
    return [f"{key}={value}" for key, value in given.items()]


def compiled(step: Step) -> CompiledProgram:
    """Compiles the step; as MaxText's `train_compile` does, but for jaxpar's target."""
    from flax.core.spmd import logical_axis_rules

    config = _config(step)
    described = _target(step, config)
    with logical_axis_rules(config.logical_axis_rules):
        function, args = _function(config, described.mesh)
        return compile_for(
            function, described, *args, compiler_options=step.options, cache=default_folder()
        )


def _config(step: Step) -> Any:
    import maxtext
    from maxtext.configs import pyconfig

    base = Path(maxtext.__file__).with_name("configs") / "base.yml"
    return pyconfig.initialize(["train_compile", str(base), *arguments(step)])


def _target(step: Step, config: Any) -> Target:
    """The slice, with MaxText's own mesh of its devices."""
    from maxtext.utils import maxtext_utils

    described = target(step.target)
    devices = maxtext_utils.create_device_mesh(config, list(described.mesh.devices.flat))
    return replace(described, mesh=jax.sharding.Mesh(devices, config.mesh_axes))


def _function(config: Any, mesh: jax.sharding.Mesh) -> tuple[Any, tuple[Any, ...]]:
    """The jitted step, and the shapes of its state and its batch."""
    from maxtext.trainers.pre_train import train, train_compile
    from maxtext.utils import maxtext_utils, sharding

    args, _, state, _, model = train_compile.get_shaped_inputs(mesh, config)
    weights, state = sharding.maybe_update_params_sharding_with_opt(config, state)
    state = sharding.build_zero1_input_state_mesh_shardings(config, state, weights)
    batch = sharding.get_input_data_sharding(config, mesh)
    function, inputs, outputs, static, donated = maxtext_utils.get_functional_train_with_signature(
        train.train_step, batch, state, model, config, weights
    )
    jitted = jax.jit(
        function,
        in_shardings=inputs,
        out_shardings=outputs,
        static_argnums=static,
        donate_argnums=donated,
    )
    return jitted, args


def main(name: str) -> None:
    """Prints what is predicted of a step."""
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_default_prng_impl", "unsafe_rbg")  # as MaxText's command does
    (step,) = (one for one in steps() if one.name == name)
    program = compiled(step)
    played = timeline(program)
    parts, chip = of_parts(played, program.target), program.target.chip
    assert chip is not None
    kernels = [event.seconds for event in played.events if "pallas_call" in event.op]
    shares = {
        "chip": chip.kind,
        "seconds": played.total,
        "interval": parts and (parts.low, parts.high),  # from those of its operations
        "matmuls": sum(event.seconds for event in played.events if event.is_matmul),
        "kernels": sum(kernels),
        "waits": played.exposed,
        "gigabytes": played.peak_bytes / 1e9,
        "unknown": [*played.loops_of_unknown_length, *played.kernels_of_unknown_cost],
    }
    print(json.dumps(shares))


if __name__ == "__main__":
    main(*sys.argv[1:])
