"""The types in signatures, open at run time; `help` shows their texts."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

from jaxpar.arguments.lazy_names import open_types

if TYPE_CHECKING:
    Mode = Literal[
        "naive",
        "stationary",
        "chunked-2",
        "chunked-4",
        "chunked-8",
        "unidirectional",
        "bidirectional",
        "multi-ring",
        "auto",
    ]
    Operand = Literal["lhs", "rhs"]
    SequenceOrder = Literal["zigzag", "contiguous"]
    Policy = Literal["probability", "choice", "position"]
    Dispatch = Literal["ragged", "all_gather", "auto"]
    Scoring = Literal["softmax", "selected_softmax", "sigmoid"]
    Implementation = Literal["auto", "ragged_dot", "blocks"]
    Integer = int
    Flag = bool
    Number = float
    Values = ArrayLike | Sequence[Any]  # anything that jnp.asarray accepts
    MeshAxes = str | Mapping[str, int]
    RulesLike = Mapping[str, Any]
    AnyMesh = Mesh | AbstractMesh
    Subscripts = str
    Label = str | None
    PathLike = str | Path
    Weights = TypeVar("Weights", Array, tuple[Array, ...])  # several weights share a gather
    Tree = TypeVar("Tree")  # a pytree of arrays
    Leaf = Array  # or JAX's placeholder, when JAX flattens pytrees
    TreeDim = Any  # a dimension or None for each leaf; one value, or a prefix of the pytree
else:
    globals().update(open_types(__name__))
