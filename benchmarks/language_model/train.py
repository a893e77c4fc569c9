"""One step of training: the gradient under `shard_map`, the optimizer on global arrays."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar import LowBit, layers, pipeline
from jaxpar.layout import Layout
from jaxpar.tools.cli.console import require_extra
from language_model.config import Model, Training
from language_model.model import Decoder
from language_model.parallel import AXES, LABELS, TOKENS
from language_model.weights import check_stages, initialise, lay_out

State = dict[str, Any]  # params, optimizer (its state), and step: int32[]

# (params, tokens, labels) -> ((loss, statistics), gradients)
Gradient = Callable[[Any, Array, Array], tuple[tuple[Array, Any], Any]]


@dataclass(frozen=True)
class Trainer:
    """A model, how it is trained, and the mesh: everything but the data and the state.

    Attributes:
      microbatches: pieces of a device's batch whose gradients are summed before they are reduced.
        Those of a pipeline, too.
      mode: how the matmuls and gathers run.
      dispatch: how tokens reach their experts.
      wire_dtype: how what is gathered travels; None: as it is.
      virtual_stages: of each device of pp.

    Raises:
      UsageError: the stages of a pipeline do not divide the layers.
    """

    model: Model
    training: Training
    mesh: Mesh
    microbatches: int = 1
    mode: str = "auto"
    dispatch: str = "auto"
    wire_dtype: LowBit | None = None
    virtual_stages: int = 1

    def __post_init__(self) -> None:
        check_stages(self.model.layers, self.mesh.shape["pp"], self.virtual_stages)

    @cached_property
    def layout(self) -> Layout:
        """How the weights lie on the mesh."""
        return lay_out(self.model, self.mesh, self.virtual_stages)

    @cached_property
    def of_state(self) -> Layout:
        """How the state lies there: moments where their weights do."""
        return self.layout.like(jax.eval_shape(self._start, self.layout.shapes))

    @cached_property
    def optimizer(self) -> Any:
        """AdamW after clipping, with a cosine schedule after a linear warmup.

        It sees global arrays, sharded as they are, under jit and outside of `shard_map`: the norm
        by which optax clips is so that of the whole gradient, on any mesh, and the same one
        everywhere. Inside, it would be that of one device's blocks.
        """
        optax, run = require_extra("optax", "train"), self.training
        schedule = optax.warmup_cosine_decay_schedule(
            init_value=run.learning_rate / (run.warmup + 1),
            peak_value=run.learning_rate,
            warmup_steps=run.warmup,
            decay_steps=max(run.steps, run.warmup + 1),
            end_value=0.1 * run.learning_rate,
        )
        return optax.chain(
            optax.clip_by_global_norm(run.clip),
            optax.adamw(schedule, b2=0.95, weight_decay=run.weight_decay, mask=self._decayed),
        )

    def _decayed(self, params: Any) -> Any:
        return self.layout.tree_of(lambda array: not array.path.endswith("norm"))

    def init(self) -> State:
        """Returns the state before the first step, each device having its shards only."""
        params = initialise(self.model, self.layout, self.training.seed)
        return jax.jit(self._start, out_shardings=self.of_state.shardings)(params)

    def _start(self, params: Any) -> State:
        return {
            "params": params,
            "optimizer": self.optimizer.init(params),
            "step": jnp.zeros((), jnp.int32),
        }

    @cached_property
    def _schedule(self) -> pipeline.PipelineSchedule:
        sizes = self.mesh.shape["pp"], self.microbatches, self.virtual_stages
        return pipeline.interleaved_1f1b(*sizes)

    @cached_property
    def _places(self) -> Any:
        """Returns where each layer of the model is in the stack."""
        return np.argsort(self._schedule.order(self.model.layers))

    def _decoder(self, training: Training | None) -> Decoder:
        how = self.mode, self.dispatch, training, self.wire_dtype
        return Decoder(self.model, self.layout, *how)

    def _pipelined(self, function: Any, model: Decoder, schedule: Any) -> Any:
        """Returns a function of `jaxpar.pipeline`, of params and a batch."""
        others = tuple(name for name in AXES if name != "pp")
        of_parts = function(
            *(model.apply, model.first, model.last, schedule, "pp"),
            batch_axes=others,
            last_dim=1,
            has_aux=True,
        )

        def of_params(params: Any, *batch: Array) -> Any:
            shared = {name: leaf for name, leaf in params.items() if name != "layers"}
            return of_parts(params["layers"], shared, batch)

        return of_params

    @cached_property
    def _local(self) -> Gradient:
        """The gradient on a device's blocks: of its own layers, if there is a pipeline."""
        model = self._decoder(self.training)
        if self.mesh.shape["pp"] == 1:
            return layers.mean_value_and_grad(
                model.loss_sum, AXES, microbatches=self.microbatches, has_aux=True
            )
        gradient = self._pipelined(pipeline.value_and_grad, model, self._schedule)

        def local(params: Any, tokens: Array, labels: Array) -> tuple[tuple[Array, Any], Any]:
            (loss, (experts, _)), (of_layers, of_shared) = gradient(params, tokens, labels)
            return (loss, experts), {**of_shared, "layers": of_layers}

        return local

    @cached_property
    def gradient(self) -> Gradient:
        """Of global arrays: `(params, tokens, labels) -> ((loss, statistics), gradients)`.

        Statistics of experts are `[microbatches, layers, ...]`, in the order of the layout.
        """
        return jax.shard_map(
            self._local,
            mesh=self.mesh,
            in_specs=(self.layout.specs, TOKENS, LABELS),
            out_specs=((P(), P(None, "pp")), self.layout.specs),
        )

    @cached_property
    def step(self) -> Callable[[State, Array, Array], tuple[State, dict[str, Any]]]:
        """The compiled step: `(state, tokens, labels) -> (state, what it found)`.

        That is the loss, the norm of the gradient, and the statistics of experts.
        """

        def step(state: State, tokens: Array, labels: Array) -> tuple[State, dict[str, Any]]:
            optax = require_extra("optax", "train")
            (loss, experts), grads = self.gradient(state["params"], tokens, labels)
            updates, moments = self.optimizer.update(grads, state["optimizer"], state["params"])
            params = optax.apply_updates(state["params"], updates)
            # `[microbatches, layers, ...]`, in the model's order.
            experts = jax.tree.map(lambda x: x[:, self._places], experts)
            found = {"loss": loss, "gradient_norm": optax.tree.norm(grads), "experts": experts}
            return {"params": params, "optimizer": moments, "step": state["step"] + 1}, found

        out = (self.of_state.shardings, NamedSharding(self.mesh, P()))
        return jaxpar.jit(step, mesh=self.mesh, donate_argnums=0, out_shardings=out)

    @cached_property
    def evaluate(self) -> Callable[[Any, Array, Array], Array]:
        """The compiled mean loss, of `(params, tokens, labels)`.

        It is that of the text alone, without the losses of routers.
        """
        model = self._decoder(None)
        whole = pipeline.interleaved_1f1b(self.mesh.shape["pp"], 1, self.virtual_stages)

        def loss(params: Any, *batch: Array) -> Array:
            if self.mesh.shape["pp"] > 1:
                return self._pipelined(pipeline.value, model, whole)(params, *batch)[0]
            (loss, weight), _ = model.loss_sum(params, *batch)
            return layers.mean_loss(loss, weight, AXES)

        mapped = jax.shard_map(
            loss, mesh=self.mesh, in_specs=(self.layout.specs, TOKENS, LABELS), out_specs=P()
        )
        return jaxpar.jit(mapped, mesh=self.mesh)
