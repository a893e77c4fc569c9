"""An instruction's computation and messages, without a chip's figures."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from typing import TYPE_CHECKING

import numpy as np

from jaxpar.tools.program.hlo import Instruction, integers
from jaxpar.tools.program.traffic import moved_by

if TYPE_CHECKING:
    from jaxpar.tools.program.kernels import Kernel

Shapes = tuple[tuple[int, ...], ...]
Kernels = Mapping[tuple[Shapes, Shapes], "Kernel"]  # by shapes of operands and results

_FREE = {
    *("add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element"),
    *("opt-barrier", "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple"),
}
_FREE_CALLS = {
    *("AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallDone", "PrepareAsyncCallStart"),
    *("Sharding", "SliceId", "SPMDFullToShardShape", "SPMDShardToFullShape"),
}
_GEMMS = {"__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__triton_gemm"}
_WINDOW = ("stride", "pad", "lhs_dilate", "rhs_dilate")
_PRODUCTS = {"dot", "convolution", "ragged-dot"}
_OUT_OF_ORDER = {
    *("custom-call", "fft", "gather", "rng", "rng-bit-generator", "scatter", "sort"),
    *("select-and-scatter", "triangular-solve", "cholesky"),
}
_NARROWED = 2.0  # bytes of a number, for FLOPs of a kernel
_SLOWER = 8  # how many times, without tensor cores
_OWN_KERNEL = re.compile(r'"KERNEL_STRATEGY_(?:TRITON_)?(?!DEFAULT|INVALID|UNSPECIFIED)(\w+)"')
_COLLECTIVES = {
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"),
    *("ragged-all-to-all", "reduce-scatter"),
}


@dataclass(frozen=True)
class Matmul:
    flops: float
    width: float  # bytes of a number: wide ones are slower
    sizes: tuple[int, ...] = ()  # [b, m, n, k]; unknown for a kernel
    dtypes: str = ""  # of operands and result, as bf16xbf16->f32
    is_aligned: bool = True  # rows of its arrays are multiples of 16 bytes
    # For a grouped matmul: its operand's rows (data decide how many are used), and the share of
    # them that is multiplied once more for a second group.
    rows: int = 0
    twice: float = 0.0


@dataclass(frozen=True)
class Demand:
    cycles: int | None = None  # estimated by the TPU compiler
    matmuls: tuple[Matmul, ...] = ()
    moved: int = 0  # bytes read and written
    in_vmem: int = 0  # the part of them that does not touch HBM
    elements: int = 0  # numbers read and written; if 0, of 32 bits each
    is_matmul: bool = False  # also if only the compiler knows the FLOPs
    is_streamed: bool = True  # elements are read in the order of memory
    is_unknown: bool = False  # a kernel of unknown cost: at least its bytes
    on_vectors: float = 0.0  # results of a kernel's vector operations


@dataclass(frozen=True)
class Message:
    kind: str  # the collective's name in HLO
    payload: float  # bytes
    rows: int = 0  # of a ragged all-to-all's payload; data decide how many are sent
    pairs: tuple[tuple[int, int], ...] = ()  # of a permute: sources and targets
    groups: Sequence[Sequence[int]] = ()  # of other collectives; none: one group of all devices
    ways: int = 2  # on a torus: links of a device in use at a time
    phases: int = 1  # on a torus: dimensions used in turn
    between_slices: bool = False  # over the network; its numbers are ids of devices
    kernel: str = ""  # of XLA's own, in place of NCCL's: such as one-shot


def work_of(i: Instruction, kernels: Kernels) -> Demand:
    if is_free(i) or i.opcode in ("while", "conditional", "call"):
        return Demand()  # their contents have schedules of their own
    everything = (i, *i.inside)
    products = [_matmul(x) for x in everything if _is_matmul(x)]
    is_matmul = bool(products)
    matmuls = [matmul for matmul in products if matmul is not None]
    if i.cycles is None and i.after("kind=") == "kLoop":
        # A GPU's loop over single numbers, of 32 bits, which is in no table.
        matmuls = [Matmul(matmul.flops, 4.0 * _SLOWER) for matmul in matmuls]
    if len(matmuls) < len(products):
        matmuls = []  # some known products say nothing of all
    kernel = kernels.get((_shapes(i.operands), _shapes([i])))
    on_vectors = kernel.numbers if kernel else 0.0
    if flops := _estimated_flops(i):
        if kernel and kernel.flops and not kernel.is_least:
            flops = kernel.flops  # no more than the estimate, which counts masked blocks
        moved = int(i.number("bytes_accessed") or 0)
        products = (_kernel(i, flops),)
        return Demand(i.cycles, products, moved, is_matmul=is_matmul, on_vectors=on_vectors)
    moved, in_vmem, numbers = moved_by(i)
    if kernel and kernel.moved < moved:  # it visits a part of its arrays
        share = kernel.moved / moved
        moved, in_vmem, numbers = (int(share * part) for part in (moved, in_vmem, numbers))
    if i.opcode == "custom-call" and i.target not in _GEMMS and i.cycles is None:
        products = (Matmul(kernel.flops, _NARROWED),) if kernel and kernel.flops else ()
        is_matmul, is_unknown = bool(products), kernel is None or kernel.is_least
        sizes = None, products, moved, in_vmem, numbers, is_matmul
        return Demand(*sizes, is_unknown=is_unknown, on_vectors=on_vectors)
    is_streamed = not any(x.opcode in _OUT_OF_ORDER for x in everything)
    return Demand(i.cycles, tuple(matmuls), moved, in_vmem, numbers, is_matmul, is_streamed)


def is_free(i: Instruction) -> bool:
    return i.opcode in _FREE or i.target in _FREE_CALLS


def _is_matmul(i: Instruction) -> bool:
    return i.opcode in _PRODUCTS or i.target in _GEMMS or _estimated_flops(i) > 0


def _matmul(i: Instruction) -> Matmul | None:
    if i.opcode == "convolution":
        return _product_as_convolution(i)
    if i.opcode == "dot":
        named = (i.after("lhs_contracting_dims={"), i.after("lhs_batch_dims={"))
    elif i.target in _GEMMS:
        known = re.findall(r'"lhs_(?:contracting|batch)_dimensions":\[[^\]]*', i.attributes)
        named = ("".join(x for x in known if part in x) for part in ("contracting", "batch"))
    else:
        return None
    contracted, batch = map(integers, named)
    lhs, rhs, out = i.operands[0].arrays[0], i.operands[1].arrays[0], i.arrays[0]
    k, b = (prod(lhs.shape[dim] for dim in dims) for dims in (contracted, batch))
    m = prod(lhs.shape) // max(b * k, 1)
    n = prod(out.shape) // max(b * m, 1)
    dtypes = f"{lhs.dtype}x{rhs.dtype}->{out.dtype}"
    is_aligned = all(
        array.shape[-1] * array.width % 16 == 0 for array in (lhs, rhs, out) if array.shape
    )
    # Highest precision is computed without tensor cores.
    width = lhs.width * (_SLOWER if "operand_precision={highest" in i.attributes else 1)
    return Matmul(2.0 * prod(out.shape) * k, width, (b, m, n, k), dtypes, is_aligned)


def _product_as_convolution(i: Instruction) -> Matmul | None:
    """Returns a convolution's product, whose places may be batches, heads or lengths.

    Without a precision, 32-bit numbers are multiplied as 16-bit ones.
    """
    lhs, rhs, out = i.operands[0].arrays[0], i.operands[1].arrays[0], i.arrays[0]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    width = min(max(lhs.width, rhs.width), _NARROWED)
    is_plain = width and "operand_precision" not in i.attributes
    if labels is None or not is_plain or not prod(out.shape):
        return None
    of_lhs, of_rhs, of_out = (
        dict(zip(names, array.shape, strict=True))
        for names, array in zip(labels.groups(), (lhs, rhs, out), strict=True)
    )
    b, m, n, k = 1, of_out["b"], of_out["f"], of_rhs["i"]
    for number, name in enumerate(sorted(of_out.keys() - {"b", "f"})):
        places, sides = of_out[name], (of_lhs[name], of_rhs[name], of_out[name])
        pairs = _pairs(sides, *(_of_window(i, key, number) for key in _WINDOW))
        if not pairs or pairs % places:
            return None
        if pairs > places:  # contracted
            m, k = m * places, k * (pairs // places)
        elif of_rhs[name] == 1:
            m *= places
        elif of_lhs[name] == 1:
            n *= places
        else:
            b *= places
    return Matmul(2.0 * b * m * n * k, width, (b, m, n, k))


def _of_window(i: Instruction, key: str, number: int) -> int:
    """Returns a window's entry; of padding, the front."""
    window = i.attributes.partition("window={")[2].partition("}")[0]
    match = re.search(rf"\b{key}=([-0-9x_]+)", window)
    return int(match.group(1).split("x")[number].split("_")[0]) if match else int(key != "pad")


@lru_cache
def _pairs(sides: tuple[int, int, int], stride: int, pad: int, lhs: int, rhs: int) -> int:
    """Counts pairs that meet an operand's place."""
    operand, window, result = sides
    if window * result > 1 << 22:
        return 0
    at = np.arange(result)[:, None] * stride + np.arange(window) * rhs - pad
    return int(((at >= 0) & (at <= (operand - 1) * lhs) & (at % lhs == 0)).sum())


# -- kernels ----------------------------------------------------------------------------------


def _estimated_flops(i: Instruction) -> float:
    if i.opcode != "custom-call" or '"cost_estimate"' not in i.attributes:
        return 0.0
    return float(i.number("flops") or 0)


def _shapes(instructions: Sequence[Instruction]) -> Shapes:
    return tuple(array.shape for i in instructions for array in i.arrays)


def _kernel(i: Instruction, flops: float) -> Matmul:
    """Returns a kernel as a product of numbers as wide as in its largest operand.

    A grouped matmul's estimate counts each row once, but a tile that two groups share is multiplied
    twice.
    """
    arrays = [array for operand in i.operands for array in operand.arrays if array.shape]
    width = max(arrays, key=lambda array: array.bytes).width if arrays else 1.0
    matrices = [array for array in arrays if len(array.shape) == 2]
    if "ragged_dot_tiling=" not in i.attributes or not matrices:
        return Matmul(flops, width)
    rows = matrices[0].shape[0]
    tile = int(i.after('ragged_dot_tiling="').partition(",")[0])
    # Lists with an entry per tile to visit: the operand's tiles, and another per shared tile.
    visits = max((array.shape[0] for array in arrays if len(array.shape) == 1), default=0)
    twice = max(0, visits - -(-rows // tile)) * tile / rows
    return Matmul(flops, width, rows=rows, twice=twice)


# -- collectives ------------------------------------------------------------------------------


def collective_in(i: Instruction) -> Instruction | None:
    if i.opcode.removesuffix("-start") in _COLLECTIVES:
        return i
    if i.opcode not in ("fusion", "fusion-start", "async-start", "call-start", "call-update"):
        return None
    return next((x for x in i.inside if x.opcode in _COLLECTIVES), None)


def message_of(i: Instruction, inner: Instruction) -> Message:
    kind = inner.opcode.removesuffix("-start")
    if kind == "ragged-all-to-all":
        # The first operand is sent. The second is the buffer that rows are written to. Starts and
        # lengths of slices are data.
        operand = inner.operands[0]
        rows = operand.arrays[0].shape[0]
        return Message(kind, float(operand.bytes), rows, groups=inner.groups)
    payload, kernel = _payload(i), _OWN_KERNEL.search(inner.attributes)
    if kind == "collective-permute":
        return Message(kind, payload, pairs=inner.pairs)
    if kind == "all-reduce" and i is not inner and i.bytes < payload:
        kind = "reduce-scatter"  # a TPU's fusion of all-reduce and slice
    ways, phases = max(map(_ways, (i, inner)))
    return Message(
        kind,
        payload,
        groups=inner.groups,
        ways=ways or 2,
        phases=phases,
        kernel=kernel[1].lower().replace("_", "-") if kernel else "",
    )


def _ways(i: Instruction) -> tuple[int, int]:
    """Returns how many links the TPU compiler uses on a device, and phases; 0 if unknown.

    Colours are simultaneous rings. Rings of a SparseCore, and of strategies that say so, use one
    direction, all others both. With three phases, only one link is in use: why is not understood,
    but of v5p's five public sums, which alone have three, four are then within 16%.
    """
    if rings := i.attributes.count('"phase_rings":'):
        return rings, 2 if '"use_n_dimension_strategy":true' in i.attributes else 1
    match = re.search(r"(\w*Strategy\w*)\{colors:(\d+) phases:(\d+)", i.attributes)
    if match is None:
        return 0, 1
    strategy, colors, phases = match.groups()
    if strategy == "StrategyND" and int(phases) > 2:
        return 1, int(phases)
    return int(colors) * (1 if "UniDirection" in strategy else 2), int(phases)


def _payload(i: Instruction) -> float:
    operands = [operand for operand in i.operands if operand.opcode != "call-start"]
    if sizes := i.after("slice_sizes={{"):
        return prod(integers(sizes)) * operands[0].arrays[0].width
    if "collective-permute" in i.opcode:  # further operands are the place in a buffer
        operands = operands[:1]
    return float(sum(operand.bytes for operand in operands))
