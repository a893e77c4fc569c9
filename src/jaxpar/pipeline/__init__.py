"""Pipeline parallelism: schedules as data, and their gradients in one `jax.shard_map`."""

from typing import TYPE_CHECKING

from jaxpar.arguments.lazy_names import names_on_demand

if TYPE_CHECKING:
    from jaxpar.pipeline._pipeline_gradients import value, value_and_grad
    from jaxpar.pipeline._pipeline_schedule import (
        Pass,
        PipelineSchedule,
        PipelineTrip,
        gpipe,
        interleaved_1f1b,
        one_f_one_b,
    )
else:
    __getattr__, __dir__ = names_on_demand(__name__)

__all__ = [
    "Pass",
    "PipelineSchedule",
    "PipelineTrip",
    "gpipe",
    "interleaved_1f1b",
    "one_f_one_b",
    "value",
    "value_and_grad",
]
