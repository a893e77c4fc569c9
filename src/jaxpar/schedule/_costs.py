"""What one instruction computes: the compiler's own cycles, or a roofline where it gives none."""

from math import prod

from jaxpar._chips import Chip
from jaxpar.schedule._assumed import Assumed
from jaxpar.schedule._hlo import Array, Computation, Instruction, Module
from jaxpar.schedule._kernels import kernel_flops, kernel_seconds

_FREE = {
    *("add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element"),
    *("opt-barrier", "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple"),
}
_FREE_CALLS = (
    "AllocateBuffer",
    "ConcatBitcast",
    "Sharding",
    "SPMDFullToShardShape",
    "SPMDShardToFullShape",
)
_GEMMS = ("__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__triton_gemm")
_SLICES = ("dynamic-slice", "gather", "slice")


def is_free(instruction: Instruction) -> bool:
    """Whether an instruction takes no time on the device."""
    if instruction.opcode == "custom-call":
        return any(f'"{name}"' in instruction.attributes for name in _FREE_CALLS)
    return instruction.opcode in _FREE


def is_matmul(module: Module, instruction: Instruction) -> bool:
    """Whether an instruction is, or has inside it, a matrix product."""
    inside = [instruction, *module.reached(instruction)]
    return any(
        i.opcode in ("dot", "convolution", "ragged-dot")
        or (i.opcode == "custom-call" and any(f'"{gemm}"' in i.attributes for gemm in _GEMMS))
        or kernel_flops(i) > 0
        for i in inside
    )


def seconds(
    module: Module,
    computation: Computation,
    instruction: Instruction,
    chip: Chip,
    assumed: Assumed,
) -> float:
    """How long an instruction computes.

    The compiler's cycles over the clock, where it gives them; otherwise the longer of FLOPs at peak
    and bytes of operands and result at the memory's speed.
    """
    if instruction.cycles is not None and chip.clock:
        return instruction.cycles / chip.clock
    estimate = kernel_seconds(computation, instruction, chip, assumed)
    if estimate is not None:
        return estimate
    moved = instruction.bytes + _read(module, computation, instruction)
    if in_place := _written_in_place(module, computation, instruction):
        # The buffer is not copied: only what is written into it moves, in and out.
        moved += 2 * in_place.bytes - 2 * instruction.bytes
    work = sum(
        _dot_seconds(module, inner, chip)
        for inner in _with_computations(module, computation, instruction)
    )
    return max(work, max(moved, 0) / chip.hbm)


def _read(module: Module, computation: Computation, instruction: Instruction) -> int:
    """Bytes of the operands; of those that are only sliced or gathered from, of what is taken."""
    operands = [computation.by_name.get(name) for name in instruction.operands]
    read = [0 if operand is None else operand.bytes for operand in operands]
    if instruction.opcode in _SLICES:
        read[0] = min(read[0], instruction.bytes)
    if instruction.opcode == "fusion":
        inner = module.computations[instruction.called[0]]
        for number, parameter in inner.parameters.items():
            taken = _taken(inner, parameter.name)
            if taken is not None and number < len(read):
                read[number] = min(read[number], taken)
    return sum(read)


def _taken(computation: Computation, name: str) -> int | None:
    """Bytes of the slices that are all that a computation takes of a value; None for the whole."""
    taken = 0
    for user in computation.instructions:
        if name not in user.operands:
            continue
        if user.opcode in ("bitcast", "reshape"):
            part = None if user.is_root else _taken(computation, user.name)
        elif user.opcode in _SLICES and name not in user.operands[1:]:
            part = user.bytes
        else:
            part = None
        if part is None:
            return None
        taken += part
    return taken


def _with_computations(
    module: Module, computation: Computation, instruction: Instruction
) -> list[tuple[Computation, Instruction]]:
    found = [(computation, instruction)]
    for name in instruction.called:
        inner = module.computations[name]
        for item in inner.instructions:
            found += _with_computations(module, inner, item)
    return found


def _dot_seconds(module: Module, item: tuple[Computation, Instruction], chip: Chip) -> float:
    computation, instruction = item
    if instruction.opcode == "dot":
        contracted = instruction.names_of("lhs_contracting_dims")
    elif instruction.opcode == "custom-call" and any(g in instruction.attributes for g in _GEMMS):
        _, _, after = instruction.attributes.partition('"lhs_contracting_dimensions":[')
        contracted = [int(n) for n in after.partition("]")[0].replace('"', "").split(",") if n]
    else:
        return 0.0
    left: Array = computation.by_name[instruction.operands[0]].arrays[0]
    depth = prod(left.shape[dim] for dim in contracted)
    flops = 2.0 * prod(instruction.arrays[0].shape) * depth
    width = left.bytes / max(prod(left.shape), 1)
    return flops / (chip.flops * 2 / max(width, 1.0))


def _written_in_place(
    module: Module, computation: Computation, instruction: Instruction
) -> Array | None:
    """What a fusion writes into the buffer that is its result, if it only updates it."""
    if instruction.opcode == "dynamic-update-slice":
        return computation.by_name[instruction.operands[1]].arrays[0]
    for name in instruction.called:
        called = module.computations[name]
        root = called.root
        if root.opcode == "dynamic-update-slice":
            return called.by_name[root.operands[1]].arrays[0]
    return None
