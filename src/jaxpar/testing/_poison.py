"""`poisoned_rows`: unwritten rows read as NaN, so that tests notice."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager

import jax

from jaxpar.arguments.calls import readable
from jaxpar.compiler import unwritten_memory


@readable
@contextmanager
def poisoned_rows() -> Generator[None]:
    """Fills unwritten memory of jaxpar's buffers with bad values.

    Unused rows of receive buffers usually read as zero on CPU, as anything on accelerators, so a
    wrong read passes tests on CPU alone. Inside this context such rows are NaN, True, or integers
    too large for an index.

    Returns:
      A context manager for what is traced inside. It clears JAX's caches on entry and exit: keep it
      open over many tests, in a fixture with `scope="module"`.

    Cost: a write of each buffer.

    Example:
      >>> mesh = make_mesh("ep=8")
      >>> def send(x, to):
      ...     dispatcher = RaggedDispatcher.from_target_device_ids(to, axis="ep")
      ...     rows, valid = dispatcher.dispatch(x, 2)
      ...     return rows, jnp.where(valid, rows, 0)
      >>> with poisoned_rows():
      ...     seen, masked = jaxpar.jit(jax.shard_map(send, mesh=mesh, in_specs=(P("ep"), P("ep")),
      ...         out_specs=P("ep")))(jnp.arange(8.0), jnp.arange(8))
      >>> print(seen[:4], masked[:4])
      [ 0. nan  1. nan] [0. 0. 1. 0.]
    """
    before = unwritten_memory.poisoned
    unwritten_memory.poisoned = True
    jax.clear_caches()
    try:
        yield
    finally:
        unwritten_memory.poisoned = before
        jax.clear_caches()
