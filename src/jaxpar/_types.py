"""The names that signatures share.

These are open at run time: jaxpar checks these arguments itself, and a run-time
type checker in front of it would replace an error that names the axis and the remedy by one that
does not. A static checker sees the exact types.
"""

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jax import Array
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from jaxpar._axis import Axis

    AxisLike = str | tuple[str, ...] | list[str] | Axis
    Mode = Literal["naive", "unidirectional", "bidirectional", "auto"]
    Operand = Literal["lhs", "rhs"]
    Order = Literal["zigzag", "contiguous"]
    Policy = Literal["probability", "position"]
    Dispatch = Literal["ragged", "all_gather", "auto"]
    Scoring = Literal["softmax", "selected_softmax", "sigmoid"]
    Implementation = Literal["auto", "ragged_dot", "blocks"]
    Integer = int
    Flag = bool
    Number = float
    Values = ArrayLike | Sequence[Any]  # an array, or what jnp.asarray makes one of
    MeshAxes = str | Mapping[str, int]
    Subscripts = str
    Label = str | None
    Weights = TypeVar("Weights", Array, tuple[Array, ...])  # one, or several that share a gather
    Tree = TypeVar("Tree")  # a pytree of arrays
    Leaf = Array  # or what JAX puts in the place of one when it takes pytrees apart
    TreeDim = Any  # a dimension or None for each leaf: one for all, or a prefix of the pytree
else:
    AxisLike = Mode = Operand = Order = Integer = Flag = Number = MeshAxes = Subscripts = Label = (
        Weights
    ) = Tree = TreeDim = Policy = Dispatch = Scoring = Leaf = Implementation = Any
    Values = Any
