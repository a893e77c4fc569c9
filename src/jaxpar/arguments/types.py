"""The names that signatures share.

These are open at run time: jaxpar checks these arguments itself, and a run-time type checker in
front of it would replace an error that names the axis and the remedy by one that does not. A static
checker sees the exact types, and a reader of `help` their text.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar

from jax import Array
from jax.sharding import AbstractMesh, Mesh
from jax.typing import ArrayLike

if TYPE_CHECKING:
    from jax.typing import DTypeLike

    from jaxpar.axis.axis import Axis
    from jaxpar.axis.quantized import Quantized
    from jaxpar.axis.wire import LowBit
    from jaxpar.compiler.tuning import Tuning
    from jaxpar.layers._activation import GatedActivation

    AxisLike = str | tuple[str, ...] | list[str] | Axis
    Names = Any  # a tuple of strings, made of any of a string, a tuple and a list
    Mode = Literal[
        "naive",
        "stationary",
        "chunked-2",
        "chunked-4",
        "chunked-8",
        "unidirectional",
        "bidirectional",
        "disjoint-rings",
        "auto",
    ]
    WireLike = DTypeLike | LowBit | None
    MaybeQuantized = Array | Quantized
    Operand = Literal["lhs", "rhs"]
    SequenceOrder = Literal["zigzag", "contiguous"]
    Policy = Literal["probability", "position"]
    Dispatch = Literal["ragged", "all_gather", "auto"]
    Scoring = Literal["softmax", "selected_softmax", "sigmoid"]
    Implementation = Literal["auto", "ragged_dot", "blocks"]
    Integer = int
    Flag = bool
    Number = float
    Values = ArrayLike | Sequence[Any]  # an array, or what jnp.asarray makes one of
    MeshAxes = str | Mapping[str, int]
    RulesLike = Mapping[str, Any]
    AnyMesh = Mesh | AbstractMesh
    Subscripts = str
    Label = str | None
    TuningLike = str | Path | Tuning
    PathLike = str | Path
    Weights = TypeVar("Weights", Array, tuple[Array, ...])  # one, or several that share a gather
    Tree = TypeVar("Tree")  # a pytree of arrays
    Leaf = Array  # or what JAX puts in the place of one when it takes pytrees apart
    Activation = Callable[[Array], Array] | GatedActivation
    TreeDim = Any  # a dimension or None for each leaf: one for all, or a prefix of the pytree
else:
    AxisLike = Mode = Operand = SequenceOrder = Integer = Flag = Number = MeshAxes = Subscripts = (
        Label
    ) = Weights = Tree = TreeDim = Policy = Dispatch = Scoring = Leaf = Implementation = Names = (
        TuningLike
    ) = Activation = WireLike = MaybeQuantized = RulesLike = AnyMesh = PathLike = Any
    Values = Any

# What `help` shows in their place: a static checker's types, which are not there at run time.
SHOWN = {
    "AxisLike": "str | tuple[str, ...] | list[str] | Axis",
    "Names": "str | tuple[str, ...] | list[str]",
    "Mode": "Literal['naive', 'stationary', 'chunked-2', 'chunked-4', 'chunked-8', "
    "'unidirectional', 'bidirectional', 'disjoint-rings', 'auto']",
    "WireLike": "DTypeLike | LowBit | None",
    "MaybeQuantized": "Array | Quantized",
    "Operand": "Literal['lhs', 'rhs']",
    "SequenceOrder": "Literal['zigzag', 'contiguous']",
    "Policy": "Literal['probability', 'position']",
    "Dispatch": "Literal['ragged', 'all_gather', 'auto']",
    "Scoring": "Literal['softmax', 'selected_softmax', 'sigmoid']",
    "Implementation": "Literal['auto', 'ragged_dot', 'blocks']",
    "Integer": "int",
    "Flag": "bool",
    "Number": "float",
    "Values": "ArrayLike | Sequence[Any]",
    "MeshAxes": "str | Mapping[str, int]",
    "PathLike": "str | Path",
    "RulesLike": "Mapping[str, Any]",
    "AnyMesh": "Mesh | AbstractMesh",
    "Subscripts": "str",
    "Label": "str | None",
    "TuningLike": "str | Path | Tuning",
    "Weights": "Array | tuple[Array, ...]",
    "Leaf": "Array",
    "Activation": "Callable[[Array], Array] | GatedActivation",
    "RoutingLike": "Routing",
    "ExpertsLike": "Experts | Mapping[str, Any]",
}
