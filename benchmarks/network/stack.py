"""A training step of a stack of layers, one device a process: by FSDP, and by a pipeline.

FSDP gathers every layer's weights and scatters their gradients. The pipeline sends microbatches.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from jaxpar import layers, pipeline
from jaxpar.tools.cli.bench_times import error, place, tolerance
from jaxpar.tools.cli.ops import Shape

VIRTUAL_STAGES = 2  # of one layer each
Weights = dict[str, Any]  # up [layers, width, hidden], down [layers, hidden, width]


def mlp(weights: Weights, x: Any) -> Any:
    return x + jnp.tanh(x @ weights["up"]) @ weights["down"]


def layer(weights: Weights, number: int | np.ndarray) -> Weights:
    return jax.tree.map(lambda x: x[number], weights)  # several layers, for an array of numbers


def squares(x: Any) -> tuple[Any, int]:
    return jnp.sum(x**2), x.size


def fsdp(weights: Weights, x: Any) -> Any:
    """Returns the loss of all rows at once, and gradients, inside `jax.shard_map`."""

    def loss(weights: Weights, x: Any) -> Any:
        for number in range(len(weights["up"])):
            x = mlp(layers.fsdp_gather(layer(weights, number), "tp"), x)
        return squares(x)

    return layers.mean_value_and_grad(loss, "tp")(weights, x)


def pipelined(schedule: pipeline.PipelineSchedule, weights: Weights, x: Any) -> Any:
    """Returns the same, one microbatch after the other."""
    step = pipeline.value_and_grad(
        lambda weights, x, _: mlp(layer(weights, 0), x),
        lambda _, x: x,
        lambda _, x, __: squares(x),
        schedule,
        "tp",
    )
    loss, (of_layers, _) = step(weights, (), x)
    return loss, of_layers


@dataclass(frozen=True)
class Stack:
    """Layers of 1/n of K features and N hidden ones, on 1/n of M rows, for n processes.

    Attributes:
      order: for each place in the pipeline's stack, which layer is there.
    """

    mesh: Mesh
    weights: Weights
    x: np.ndarray
    order: np.ndarray

    @staticmethod
    def of(shape: Shape, mesh: Mesh) -> "Stack":
        rows, width, hidden = shape[0] // mesh.size, shape[1] // mesh.size, shape[2]
        order = np.arange(VIRTUAL_STAGES * mesh.size).reshape(VIRTUAL_STAGES, -1).T.ravel()
        rng = np.random.default_rng(0)
        up, down = (
            rng.standard_normal((len(order), *size), np.float32) / np.sqrt(np.float32(size[0]))
            for size in ((width, hidden), (hidden, width))
        )
        x = rng.standard_normal((rows, width), np.float32)
        return Stack(mesh, {"up": up, "down": down}, x, order)

    def compile(self, variant: str) -> tuple[Any, list[Any]]:
        """Returns a compiled step, and its arguments."""
        schedule = pipeline.interleaved_1f1b(self.mesh.size, 2 * self.mesh.size, VIRTUAL_STAGES)
        step, weights, of_weights, of_x = {
            "fsdp": (fsdp, self.weights, P(None, "tp"), P("tp")),
            "pipeline": (
                partial(pipelined, schedule),
                layer(self.weights, self.order),
                P("tp"),
                P(),
            ),
        }[variant]
        args = [
            jax.tree.map(lambda x: place(x, self.mesh, of_weights), weights),
            place(self.x, self.mesh, of_x),
        ]
        step = jax.shard_map(
            step, mesh=self.mesh, in_specs=(of_weights, of_x), out_specs=(P(), of_weights)
        )
        return jax.jit(step).lower(*args).compile(), args

    def compare(self, variants: dict[str, Callable[[], Any]]) -> list[str]:
        """Returns which losses and gradients differ from those of one device."""

        @jax.jit
        def alone(weights: Weights, x: Any) -> Any:
            def loss(weights: Weights) -> Any:
                out, _ = jax.lax.scan(lambda x, own: (mlp(own, x), None), x, weights)
                return jnp.mean(out**2)

            return jax.value_and_grad(loss)(weights)

        loss, wanted = jax.tree.map(np.asarray, alone(self.weights, self.x))
        depth = self.weights["down"].shape[1] * len(self.order)  # of the sums in all layers
        allowed = tolerance("float32", depth, self.mesh.size, "cpu")
        wrong: list[str] = []
        for variant, run in variants.items():
            of_loss, gradients = run()
            want = layer(wanted, self.order) if variant == "pipeline" else wanted
            off = {name: error(gradients[name], want[name]) for name in want}
            off["loss"] = error(of_loss, loss)
            wrong += [
                f"{variant}: {name} is off by {found:.3g} rms, {allowed:.3g} allowed"
                for name, found in off.items()
                if not found <= allowed
            ]
        return wrong
