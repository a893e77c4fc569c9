"""Pytrees from users: leaves as arrays, and checks of leaves that must vary."""

from typing import Any

import jax

from jaxpar.axis.axis import Ring
from jaxpar.axis.checks import as_array, check_own
from jaxpar.axis.quantized import Quantized
from jaxpar.axis.rounding import scales_among


def as_arrays(argument: str, tree: Any, use: str = "") -> Any:
    """Returns a pytree of arrays, or raises and names the wrong leaf.

    A `use` of numbers refuses random keys and quantized values.
    """
    remedy = (
        "remove leaves that are no arrays first, as equinox.partition(tree, equinox.is_array) "
        "does, and let functions close over it"
    )

    def leaf_as_array(path: Any, leaf: Any) -> Any:
        return as_array(f"{argument}{jax.tree_util.keystr(path)}", leaf, use, remedy)

    def is_whole(x: Any) -> bool:
        return bool(use) and isinstance(x, Quantized)

    return jax.tree_util.tree_map_with_path(leaf_as_array, tree, is_leaf=is_whole)


def check_own_leaves(
    argument: str,
    tree: Any,
    ring: Ring,
    what: str,
    remedy: str = "",
    dims: list[int | None] | None = None,
) -> None:
    """Raises if a leaf is typed as replicated, but each device needs its own `what`.

    Scales may be, and leaves with None in `dims`.
    """
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    for at, ((path, leaf), scales) in enumerate(zip(leaves, scales_among(tree), strict=True)):
        if not scales and (dims is None or dims[at] is not None):
            place = f"{argument}{jax.tree_util.keystr(path)}"
            check_own(place, leaf, ring, what, remedy)
