"""Compiles a function for a target, and keeps what the compiler says about the program."""

import time
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import jax

from jaxpar.schedule._operations import Module, read
from jaxpar.schedule._target import Target


@dataclass(frozen=True)
class Memory:
    """Bytes of HBM of one device, as the compiler planned them."""

    arguments: int
    outputs: int
    temporaries: int
    aliased: int  # outputs that take the place of donated arguments
    peak: int


@dataclass(frozen=True)
class CompiledProgram:
    """A program compiled for a target: the scheduled module, its memory, and how long it took."""

    target: Target
    text: str  # scheduled HLO
    memory: Memory
    seconds: float  # tracing and compiling
    jaxpr: Any  # the traced program, a ClosedJaxpr

    @cached_property
    def module(self) -> Module:
        """What the operations of the program are, read from its text."""
        return read(self.text)


def compile_for(
    fn: Any, target: Target, *args: Any, compiler_options: dict[str, Any] | None = None
) -> CompiledProgram:
    """Compiles `fn` for devices that need not be there.

    Args:
      fn: a function of global arrays; jitted already, or jitted here. It is traced with the
        target's mesh as the context mesh (`jax.set_mesh`), so that a `jax.shard_map` inside it may
        leave out its mesh.
      target: from `jaxpar.schedule.target`.
      *args: `jax.ShapeDtypeStruct`s of global arrays with a `sharding` (a `PartitionSpec`
        will do). One without a sharding is laid out as the compiler likes.
      compiler_options: as for `jax.stages.Lowered.compile`.

    Returns:
      A `CompiledProgram`.

    Raises:
      Exception: what tracing or the compiler raises.

    Example:
      >>> from jaxpar.schedule import compile_for, target
      >>> v5e = target("v5e:2x2")
      >>> x = jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16, sharding=P("tp"))
      >>> compile_for(jax.shard_map(lambda x: ring_shift(x, "tp"), in_specs=P("tp"),
      ...     out_specs=P("tp")), v5e, x).text.count("collective-permute-done(")
      1
    """
    start = time.perf_counter()
    with jax.set_mesh(target.mesh):
        jitted = fn if hasattr(fn, "trace") else jax.jit(fn)
        traced = jitted.trace(*args)
        compiled = traced.lower().compile(compiler_options=compiler_options)
    seconds = time.perf_counter() - start
    stats: Any = compiled.memory_analysis()
    sizes = {
        "arguments": stats.argument_size_in_bytes,
        "outputs": stats.output_size_in_bytes,
        "temporaries": stats.temp_size_in_bytes,
        "aliased": stats.alias_size_in_bytes,
    }
    held = sizes["arguments"] + sizes["outputs"] + sizes["temporaries"] - sizes["aliased"]
    peak = getattr(stats, "peak_memory_in_bytes", 0) or held
    return CompiledProgram(
        target=target,
        text=compiled.as_text() or "",
        memory=Memory(**sizes, peak=peak),
        seconds=seconds,
        jaxpr=traced.jaxpr,
    )
