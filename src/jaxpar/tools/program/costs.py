"""What an instruction computes and what it sends, as far as no chip has to be known for that."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from jaxpar.tools.program.hlo import Instruction, integers
from jaxpar.tools.program.kernels import Kernel
from jaxpar.tools.program.traffic import moved_by

Shapes = tuple[tuple[int, ...], ...]
Kernels = Mapping[tuple[Shapes, Shapes], Kernel]  # by the shapes of operands and results

_FREE = {
    *("add-dependency", "after-all", "bitcast", "constant", "domain", "get-tuple-element"),
    *("opt-barrier", "optimization-barrier", "parameter", "partition-id", "replica-id", "tuple"),
}
_FREE_CALLS = {
    *("AllocateBuffer", "ConcatBitcast", "PrepareAsyncCallDone", "PrepareAsyncCallStart"),
    *("Sharding", "SPMDFullToShardShape", "SPMDShardToFullShape"),
}
_GEMMS = {"__cublas$gemm", "__cublas$lt$matmul", "__cublas$lt$matmul$f8", "__triton_gemm"}
_WINDOW = ("stride", "pad", "lhs_dilate", "rhs_dilate")
_PRODUCTS = {"dot", "convolution", "ragged-dot"}
_OUT_OF_ORDER = {
    *("custom-call", "fft", "gather", "rng", "rng-bit-generator", "scatter", "sort"),
    *("select-and-scatter", "triangular-solve", "cholesky"),
}
_NARROWED = 2.0  # bytes of a number whose products a kernel's FLOPs are counted in
_COLLECTIVES = {
    *("all-gather", "all-reduce", "all-to-all", "collective-broadcast", "collective-permute"),
    *("ragged-all-to-all", "reduce-scatter"),
}


@dataclass(frozen=True)
class Matmul:
    """A matrix product whose FLOPs are known."""

    flops: float
    width: float  # bytes of a number: wide ones are multiplied more slowly
    sizes: tuple[int, ...] = ()  # [b, m, n, k]; of a kernel they are not known
    dtypes: str = ""  # of operands and result, as in bf16xbf16->f32
    is_aligned: bool = True  # rows of its arrays are whole 16 bytes
    # Of a grouped matmul: the rows of its operand, of which data say how many are in use, and what
    # is multiplied once more for a second group, as a share of the rows.
    rows: int = 0
    twice: float = 0.0


@dataclass(frozen=True)
class Demand:
    """What an instruction asks of the compute units and of the memory; by default nothing."""

    cycles: int | None = None  # as the TPU compiler estimates them
    matmuls: tuple[Matmul, ...] = ()
    moved: int = 0  # bytes read and written
    in_vmem: int = 0  # those of them that HBM has nothing to do with
    elements: int = 0  # numbers read and written; of none known, of 32 bits each
    is_matmul: bool = False  # also where the FLOPs are known to the compiler alone
    is_streamed: bool = True  # elements are taken in the order in which they lie
    is_unknown: bool = False  # of a kernel that nobody says anything of: its bytes at least
    on_vectors: float = 0.0  # numbers that a kernel's vector operations result in


@dataclass(frozen=True)
class Message:
    """What one device gives to a collective, and whom it exchanges it with."""

    kind: str  # as HLO calls the collective
    payload: float  # bytes
    rows: int = 0  # of a ragged all-to-all: in the payload, of which data say how many travel
    pairs: tuple[tuple[int, int], ...] = ()  # of a permute: sources and targets
    groups: Sequence[Sequence[int]] = ()  # of anything else; none: all devices are one group
    ways: int = 2  # of a torus: links of a device that are in use at a time
    phases: int = 1  # of a torus: dimensions that are gone along one after the other


def work_of(i: Instruction, kernels: Kernels) -> Demand:
    """What an instruction computes: its matrix products, and the bytes of operands and result.

    A kernel multiplies what its own estimate says, or else what its traced program does.
    """
    if is_free(i) or i.opcode in ("while", "conditional", "call"):
        return Demand()  # what these run is of schedules of their own
    everything = (i, *i.inside)
    products = [_matmul(x) for x in everything if _is_matmul(x)]
    is_matmul = bool(products)
    matmuls = [matmul for matmul in products if matmul is not None]
    if len(matmuls) < len(products):
        matmuls = []  # what is known of some says nothing of all
    kernel = kernels.get((_shapes(i.operands), _shapes([i])))
    on_vectors = kernel.numbers if kernel else 0.0
    if flops := _estimated_flops(i):
        if kernel and kernel.flops and not kernel.is_least:
            flops = kernel.flops  # the estimate or less: it counts blocks that a mask leaves out
        moved = int(i.number("bytes_accessed") or 0)
        products = (_kernel(i, flops),)
        return Demand(i.cycles, products, moved, is_matmul=is_matmul, on_vectors=on_vectors)
    moved = moved_by(i)
    if i.opcode == "custom-call" and i.target not in _GEMMS and i.cycles is None:
        products = (Matmul(kernel.flops, _NARROWED),) if kernel and kernel.flops else ()
        is_matmul, is_unknown = bool(products), kernel is None or kernel.is_least
        return Demand(
            None, products, *moved, is_matmul, is_unknown=is_unknown, on_vectors=on_vectors
        )
    is_streamed = not any(x.opcode in _OUT_OF_ORDER for x in everything)
    return Demand(i.cycles, tuple(matmuls), *moved, is_matmul, is_streamed)


def is_free(i: Instruction) -> bool:
    """Whether an instruction takes no time on the device."""
    return i.opcode in _FREE or i.target in _FREE_CALLS


def _is_matmul(i: Instruction) -> bool:
    return i.opcode in _PRODUCTS or i.target in _GEMMS or _estimated_flops(i) > 0


def _matmul(i: Instruction) -> Matmul | None:
    """The product that an instruction is, without those inside it.

    Of convolutions, which TPUs make of products, those of two matrices are.
    """
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
    # Without tensor cores, which are eight times as fast.
    width = lhs.width * (8 if "operand_precision={highest" in i.attributes else 1)
    return Matmul(2.0 * prod(out.shape) * k, width, (b, m, n, k), dtypes, is_aligned)


def _product_as_convolution(i: Instruction) -> Matmul | None:
    """A product, whose batches, heads or lengths a convolution may have as places.

    Numbers of 32 bits are multiplied as such of 16, where no precision is asked for. How those of
    8 bits are is the compiler's secret.
    """
    lhs, rhs, out = i.operands[0].arrays[0], i.operands[1].arrays[0], i.arrays[0]
    labels = re.search(r"dim_labels=(\w+)_(\w+)->(\w+)", i.attributes)
    is_plain = {lhs.width, rhs.width} <= {2.0, 4.0} and "operand_precision" not in i.attributes
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
    return Matmul(2.0 * b * m * n * k, _NARROWED, (b, m, n, k))


def _of_window(i: Instruction, key: str, number: int) -> int:
    """What a convolution's window says of a dimension; of padding that before the first place."""
    window = i.attributes.partition("window={")[2].partition("}")[0]
    found = re.search(rf"\b{key}=([-0-9x_]+)", window)
    return int(found.group(1).split("x")[number].split("_")[0]) if found else int(key != "pad")


@lru_cache
def _pairs(sides: tuple[int, int, int], stride: int, pad: int, lhs: int, rhs: int) -> int:
    """How many pairs of a place of the result and one of the window meet a place of the operand."""
    operand, window, result = sides
    if window * result > 1 << 22:
        return 0
    at = np.arange(result)[:, None] * stride + np.arange(window) * rhs - pad
    return int(((at >= 0) & (at <= (operand - 1) * lhs) & (at % lhs == 0)).sum())


# -- kernels ----------------------------------------------------------------------------------


def _estimated_flops(i: Instruction) -> float:
    """FLOPs that a kernel of the TPU compiler says it has, 0 for anything else."""
    if i.opcode != "custom-call" or '"cost_estimate"' not in i.attributes:
        return 0.0
    return float(i.number("flops") or 0)


def _shapes(instructions: Sequence[Instruction]) -> Shapes:
    return tuple(array.shape for i in instructions for array in i.arrays)


def _kernel(i: Instruction, flops: float) -> Matmul:
    """A kernel, as a product of numbers as wide as those of its largest operand.

    The grouped matmul's estimate counts every row once. But a tile of rows that two groups share
    is multiplied for both of them.
    """
    arrays = [array for operand in i.operands for array in operand.arrays if array.shape]
    width = max(arrays, key=lambda array: array.bytes).width if arrays else 1.0
    matrices = [array for array in arrays if len(array.shape) == 2]
    if "ragged_dot_tiling=" not in i.attributes or not matrices:
        return Matmul(flops, width)
    rows = matrices[0].shape[0]
    tile = int(i.after('ragged_dot_tiling="').partition(",")[0])
    # Lists of one entry a tile that it may visit: those of the operand, and one a shared tile.
    visits = max((array.shape[0] for array in arrays if len(array.shape) == 1), default=0)
    twice = max(0, visits - -(-rows // tile)) * tile / rows
    return Matmul(flops, width, rows=rows, twice=twice)


# -- collectives ------------------------------------------------------------------------------


def collective_in(i: Instruction) -> Instruction | None:
    """The collective that an instruction is, or has inside it; None without one."""
    if i.opcode.removesuffix("-start") in _COLLECTIVES:
        return i
    if i.opcode not in ("fusion", "fusion-start", "async-start", "call-start"):
        return None
    return next((x for x in i.inside if x.opcode in _COLLECTIVES), None)


def message_of(i: Instruction, inner: Instruction) -> Message:
    """What instruction `i` sends, whose collective is `inner`."""
    kind = inner.opcode.removesuffix("-start")
    if kind == "ragged-all-to-all":
        # Of its first operand; the second one is only what the rows are written over. Where a slice
        # begins and how long it is are data.
        operand = inner.operands[0]
        rows = operand.arrays[0].shape[0]
        return Message(kind, float(operand.bytes), rows, groups=inner.groups)
    payload = _payload(i)
    if kind == "collective-permute":
        return Message(kind, payload, pairs=inner.pairs)
    if kind == "all-reduce" and i is not inner and i.bytes < payload:
        kind = "reduce-scatter"  # what TPU makes of it: a fusion of all-reduce and slice
    ways, phases = max(map(_ways, (i, inner)))
    return Message(kind, payload, groups=inner.groups, ways=ways or 2, phases=phases)


def _ways(i: Instruction) -> tuple[int, int]:
    """How many links of a device the TPU compiler says that it uses, and phases; 0: it does not.

    It calls rings that are used at a time colours. Those of a SparseCore go one way each, as do
    those of strategies that say so; all others go both ways.
    """
    if rings := i.attributes.count('"phase_rings":'):
        return rings, 2 if '"use_n_dimension_strategy":true' in i.attributes else 1
    found = re.search(r"(\w*Strategy\w*)\{colors:(\d+) phases:(\d+)", i.attributes)
    if found is None:
        return 0, 1
    strategy, colors, phases = found.groups()
    return int(colors) * (1 if "UniDirection" in strategy else 2), int(phases)


def _payload(i: Instruction) -> float:
    """Bytes of what a collective takes from one device."""
    operands = [operand for operand in i.operands if operand.opcode != "call-start"]
    if sizes := i.after("slice_sizes={{"):
        return prod(integers(sizes)) * operands[0].arrays[0].width
    if "collective-permute" in i.opcode:  # further operands say where in a buffer it lands
        operands = operands[:1]
    return float(sum(operand.bytes for operand in operands))
