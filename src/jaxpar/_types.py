"""The names that signatures share.

`AxisName` and `Mode` are open at run time: jaxpar checks these arguments itself, and a run-time
type checker in front of it would replace an error that names the axis and the remedy by one that
does not. A static checker sees the exact types.
"""

from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    AxisName = str | tuple[str, ...]
    Mode = Literal["naive", "unidirectional", "bidirectional", "auto"]
    Operand = Literal["lhs", "rhs"]
    Integer = int
else:
    AxisName = Mode = Operand = Integer = Any
