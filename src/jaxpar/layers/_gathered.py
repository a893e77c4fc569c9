"""What the folds over a ring do, with collectives at once: blocks gathered, sums scattered."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax
from jax.typing import DTypeLike

from jaxpar._varying import vary_over, varying_axes
from jaxpar.collectives._circulate import Visits
from jaxpar.collectives._fold import Arrivals
from jaxpar.collectives._ring import Ring


def visit_gathered(
    ring: Ring, block: Any, consume: Callable[[Any, Arrivals], Any], state: Any = None
) -> Any:
    """Gathers the blocks of all devices at once, then consumes them one by one."""
    index = ring.index()
    state = consume(None, [(block, index)]) if state is None else state
    if ring.size == 1:
        return state
    blocks = jax.tree.map(lambda x: lax.all_gather(x, ring.axis_name), block)

    def step(distance: Array, state: Any) -> Any:
        source = (index - distance.astype("int32")) % ring.size
        at = jax.tree.map(lambda x: lax.dynamic_index_in_dim(x, source, keepdims=False), blocks)
        return consume(state, [(at, source)])

    return lax.fori_loop(1, ring.size, step, state)


def sum_gathered(
    ring: Ring,
    block: Any,
    dq: Array,
    own: Any,
    visit: Callable[[Array, Visits], tuple[Array, list[Any]]],
    wire_dtype: DTypeLike,
) -> tuple[Array, Any]:
    """Visits gathered blocks, and scatters the sums to their owners at once."""
    if ring.size == 1:
        return dq, own

    def place(sums: Any, made: Any, source: Array) -> Any:
        return jax.tree.map(
            lambda x, y: lax.dynamic_update_index_in_dim(x, y, source, 0), sums, made
        )

    def consume(state: Any, arrivals: Arrivals) -> Any:
        dq, sums = state
        dq, [made] = visit(dq, arrivals)
        return dq, place(sums, made, arrivals[0][1])

    sums = jax.tree.map(lambda x: jnp.zeros_like(x, shape=(ring.size, *x.shape)), own)
    sums = place(vary_over(varying_axes(own), sums), own, ring.index())
    dq, sums = visit_gathered(ring, block, consume, (dq, sums))

    def scatter(x: Array) -> Array:
        return lax.psum_scatter(x.astype(wire_dtype), ring.axis_name)

    return dq, jax.tree.map(scatter, sums)
