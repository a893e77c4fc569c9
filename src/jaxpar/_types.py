"""The names that signatures share.

These are open at run time: jaxpar checks these arguments itself, and a run-time
type checker in front of it would replace an error that names the axis and the remedy by one that
does not. A static checker sees the exact types.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jax import Array

if TYPE_CHECKING:
    AxisName = str | tuple[str, ...]
    Mode = Literal["naive", "unidirectional", "bidirectional", "auto"]
    Operand = Literal["lhs", "rhs"]
    Order = Literal["zigzag", "contiguous"]
    Integer = int
    Number = float
    MeshAxes = str | Mapping[str, int]
    Subscripts = str
    Label = str | None
    Weights = TypeVar("Weights", Array, tuple[Array, ...])  # one, or several that share a gather
    Tree = TypeVar("Tree")  # a pytree of arrays
    TreeAxis = Any  # a dimension or None for each leaf: one for all, or a prefix of the pytree
else:
    AxisName = Mode = Operand = Order = Integer = Number = MeshAxes = Subscripts = Label = (
        Weights
    ) = Tree = TreeAxis = Any
