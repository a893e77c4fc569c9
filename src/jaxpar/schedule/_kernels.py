"""What a kernel of the TPU compiler says that it costs."""

from math import prod

from jaxpar._chips import Chip
from jaxpar.schedule._assumed import Assumed, share
from jaxpar.schedule._groups import integers
from jaxpar.schedule._hlo import Array, Computation, Instruction


def kernel_flops(instruction: Instruction) -> float:
    """FLOPs of a kernel's own estimate, 0 for anything else."""
    if instruction.opcode != "custom-call" or '"cost_estimate"' not in instruction.attributes:
        return 0.0
    return float(instruction.number("flops") or 0)


def kernel_seconds(
    computation: Computation, instruction: Instruction, chip: Chip, assumed: Assumed
) -> float | None:
    """How long a kernel takes with its FLOPs at peak or its bytes at the memory's speed.

    None for an instruction that is no kernel with an estimate. The grouped matmul's estimate counts
    every row once. But a tile of rows that two groups share is multiplied for both of them.
    """
    flops = kernel_flops(instruction)
    if not flops:
        return None
    operands = [computation.by_name[name] for name in instruction.operands]
    arrays = [array for operand in operands for array in operand.arrays if array.shape]
    if "ragged_dot_tiling=" in instruction.attributes:
        flops *= _visited(instruction, arrays, assumed)
    largest = max(arrays, key=lambda array: array.bytes)
    width = largest.bytes / max(prod(largest.shape), 1)
    moved = float(instruction.number("bytes_accessed") or 0)
    return max(flops / (chip.flops * 2 / max(width, 1.0)), moved / chip.hbm)


def _visited(instruction: Instruction, arrays: list[Array], assumed: Assumed) -> float:
    """Rows that a grouped matmul multiplies over the rows of its operand."""
    lhs = next(array for array in arrays if len(array.shape) == 2)
    rows, used = lhs.shape[0], share(lhs.shape[0], assumed.grouped_rows)
    tiling = instruction.attributes.partition('ragged_dot_tiling="')[2].partition('"')[0]
    tile = integers(tiling)[0]
    # Lists of one entry a tile that it may visit: those of the operand, and one a shared tile.
    visits = max((array.shape[0] for array in arrays if len(array.shape) == 1), default=0)
    return used + max(0, visits - -(-rows // tile)) * tile / rows
