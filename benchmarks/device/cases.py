"""What is timed: matrix products, passes over memory, experts, and steps of several operations."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain, zip_longest
from typing import Any

import jax
import jax.numpy as jnp

from device.programs import Case
from jaxpar import moe

MIB = 2**20
BF16 = "bfloat16"

# m, k, n. Inside: all sizes within those of XLA's own tables, on its grid and between.
INSIDE = (
    *((n, n, n) for n in (256, 512, 1024, 2048, 4096)),
    *((512, 4096, 1024), (4096, 512, 2048), (1024, 4096, 3072), (600, 1400, 2600)),
    *((3000, 4096, 4096), (1584, 720, 3088), (2320, 264, 2736)),
)
BEYOND = (
    *((8192, 8192, 8192), (1024, 4096, 14336), (2048, 14336, 4096), (8192, 4096, 4096)),
    *((8192, 8192, 28672), (5008, 7920, 1008), (16384, 16384, 16384)),
)
SMALL = (
    *((8, 4096, 4096), (64, 4096, 4096), (128, 128, 128), (16, 8192, 8192)),
    *((4096, 128, 4096), (128, 65536, 128)),
)
ODD = ((1024, 1024, 1001), (4096, 4096, 50257), (2048, 2047, 2048), (4096, 1000, 4100))
BATCHED = ((8, 1024, 1024, 1024), (4, 2048, 2048, 2048), (32, 2048, 128, 2048), (64, 512, 512, 512))


def product(*operands: Any) -> Any:
    return jnp.matmul(*operands)


def exact(*operands: Any) -> Any:
    return jnp.matmul(*operands, precision="highest")


def eight_bits(lhs: Any, rhs: Any) -> Any:
    """`lhs @ rhs.T`, the form that GPUs multiply in 8 bits."""
    dims = (((1,), (1,)), ((), ()))
    return jax.lax.dot_general(lhs, rhs, dims, preferred_element_type=jnp.bfloat16)


def matmuls() -> list[Case]:
    """Products of each kind, taking turns: what is left out is of no one kind."""
    kinds = [
        [_matmul("inside the table", BF16, *sizes) for sizes in INSIDE],
        [_matmul("beyond the table", BF16, *sizes) for sizes in BEYOND],
        [_matmul("small", BF16, *sizes) for sizes in SMALL],
        [_matmul("no multiple of 8", BF16, *sizes) for sizes in ODD],
        [_matmul("float32", "float32", n, n, n) for n in (1024, 4096, 8192)],
        [_matmul("float8", "float8_e4m3fn", n, n, n) for n in (1024, 2048, 4096, 8192)],
        [_batched(*sizes) for sizes in BATCHED],
        [_matmul("float16", "float16", n, n, n) for n in (1024, 4096)],
        [_matmul("float32, highest", "float32", n, n, n) for n in (1024, 4096)],
    ]
    return [case for turn in zip_longest(*kinds) for case in turn if case is not None]


def _matmul(kind: str, dtype: str, m: int, k: int, n: int) -> Case:
    name = f"{dtype} {m}x{k}x{n}{' highest' * kind.endswith('highest')}"
    function = exact if kind.endswith("highest") else product
    operands = ((m, k), dtype), ((k, n), dtype)
    if kind == "float8":
        function, operands = eight_bits, (((m, k), dtype), ((n, k), dtype))
    return Case(name, f"matmul, {kind}", function, operands)


def _batched(b: int, m: int, k: int, n: int) -> Case:
    operands = ((b, m, k), BF16), ((b, k, n), BF16)
    return Case(f"{BF16} {b}x{m}x{k}x{n}", "matmul, batched", product, operands)


def memory() -> list[Case]:
    """Passes over memory, of one operation after the other at each size."""
    return list(chain.from_iterable(map(_passes, (256, 1, 16, 64, 4, 512))))


def _passes(mib: int) -> Iterator[Case]:
    size = "small" if mib < 64 else "large"
    operations = {
        "copy": (jnp.copy, ("float32", BF16, "int8")),
        "negate": (jnp.negative, ("float32", "int8")),
        "add": (jnp.add, ("float32", BF16)),
        "exp": (jnp.exp, ("float32", BF16)),
        "to bfloat16": (lambda x: x.astype(jnp.bfloat16), ("float32", "float8_e4m3fn")),
    }
    for name, (function, dtypes) in operations.items():
        for dtype in dtypes:
            width = jnp.dtype(dtype).itemsize
            operand = (mib * MIB // width // 1024, 1024), dtype
            operands = (operand, operand) if name == "add" else (operand,)
            kind = f"memory, {'8 bits, ' * (width == 1)}{size}"
            yield Case(f"{name} {dtype} {mib} MiB", kind, function, operands)


# -- experts --------------------------------------------------------------------------------------


def experts() -> list[Case]:
    """Grouped products, and one whole product of as many FLOPs beside each."""
    found: list[Case] = []
    for rows, k, n, groups in ((8192, 2048, 1024, 64), (8192, 4096, 14336, 8)):
        name = f"{rows}x{k}x{n}, {groups} groups"
        operands = ((rows, k), BF16), ((groups, k, n), BF16)

        def grouped(x: Any, w: Any, rows: int = rows, groups: int = groups) -> Any:
            sizes = jnp.full((groups,), rows // groups, jnp.int32)
            return moe.grouped_matmul(x, w, jax.lax.optimization_barrier(sizes))

        def equal(x: Any, w: Any, groups: int = groups) -> Any:
            return jnp.einsum("gmk,gkn->gmn", x.reshape(groups, -1, x.shape[1]), w)

        def pulled(x: Any, w: Any, grouped: Any = grouped) -> Any:
            return jax.grad(lambda *args: jnp.sum(grouped(*args).astype(jnp.float32)), (0, 1))(x, w)

        found += [
            Case(f"grouped {name}", "experts, grouped", grouped, operands),
            Case(f"equal groups {name}", "experts, batched", equal, operands),
            Case(f"gradients {name}", "experts, grouped", pulled, operands),
        ]
    return found


# -- steps ----------------------------------------------------------------------------------------


def steps() -> list[Case]:
    """Gradients of a block and of attention, and a training step: some kernels each."""
    weights = ((2048, 2048), BF16), ((2048, 512), BF16), ((2048, 512), BF16), ((2048, 2048), BF16)
    layers = ((4, 2048, 8192), "float32"), ((4, 8192, 2048), "float32")
    shapes: Sequence[tuple[str, Any, Any]] = (
        ("matmul block", _block, _mlp(8192, 4096, 14336)),
        ("attention", _attention, (((2, 2048, 2048), BF16), *weights)),
        ("MLP training step", _training_step, (((4096, 2048), BF16), *layers, *layers)),
        ("small block", _block, _mlp(512, 1024, 4096)),
    )
    return [Case(name, "step", function, operands) for name, function, operands in shapes]


def _mlp(tokens: int, d: int, f: int) -> Any:
    """Operands of a block."""
    return ((tokens, d), BF16), ((d, f), BF16), ((f, d), BF16)


def _loss(x: Any) -> Any:
    return jnp.mean(jnp.square(x.astype(jnp.float32)))


def _normed(x: Any) -> Any:
    squares = jnp.mean(jnp.square(x.astype(jnp.float32)), -1, keepdims=True)
    return x * jax.lax.rsqrt(squares + 1e-6).astype(x.dtype)


def _block(x: Any, up: Any, down: Any) -> Any:
    def loss(weights: Any) -> Any:
        return _loss(jax.nn.silu(_normed(x) @ weights[0]) @ weights[1])

    return jax.grad(loss)((up, down))


def _attention(x: Any, *weights: Any) -> Any:
    """Causal, of 128 numbers a head; one head of keys for four of queries."""

    def loss(weights: Any) -> Any:
        b, s, _ = x.shape
        q, k, v = ((x @ w).reshape(b, s, -1, 128) for w in weights[:3])
        k, v = (jnp.repeat(each, q.shape[2] // each.shape[2], 2) for each in (k, v))
        scores = jnp.einsum("bqhe,bkhe->bhqk", q, k).astype(jnp.float32) / 128**0.5
        scores = jnp.where(jnp.tril(jnp.ones((s, s), bool)), scores, -1e30)
        out = jnp.einsum("bhqk,bkhe->bqhe", jax.nn.softmax(scores).astype(x.dtype), v)
        return _loss(out.reshape(b, s, -1) @ weights[3])

    return jax.grad(loss)(weights)


def _training_step(x: Any, up: Any, down: Any, *moments: Any) -> Any:
    """Of layers in a scan, with weights and momentum in float32."""

    def loss(weights: Any) -> Any:
        def layer(h: Any, ws: Any) -> Any:
            first, second = (w.astype(jnp.bfloat16) for w in ws)
            return h + jax.nn.silu(_normed(h) @ first) @ second, None

        return _loss(jax.lax.scan(layer, x, weights)[0])

    value, gradients = jax.value_and_grad(loss)((up, down))
    moments = tuple(0.9 * m + g for m, g in zip(moments, gradients, strict=True))
    return value, tuple(w - 1e-3 * m for w, m in zip((up, down), moments, strict=True)), moments
