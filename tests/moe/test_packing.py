"""Rows in carriers and back, bit by bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.moe._trip import pack, plan_packing, unpack

ROWS = 3


def leaf(shape, dtype, seed=0):
    """All bit patterns, NaNs of any payload among them."""
    dtype = jnp.dtype(dtype)
    bits = np.random.default_rng(seed).integers(0, 256, (*shape, dtype.itemsize), dtype=np.uint8)
    if dtype.name in ("bool", "int4", "float4_e2m1fn"):
        return jnp.asarray(bits[..., 0] % 8).astype(dtype)
    return jnp.asarray(bits.view(dtype)[..., 0])


def bits_of(x):
    return np.asarray(x).tobytes()


@pytest.mark.parametrize(
    ("leaves", "carriers"),
    [
        ([((64,), "bfloat16")], ["bfloat16[3,64]"]),
        ([((), "float32")], ["float32[3,1]"]),
        # Ids and weights beside activations: 64 + 2 x 2 + 2 x 2 words of 16 bits.
        ([((2,), "int32"), ((64,), "bfloat16"), ((2,), "float32")], ["uint16[3,72]"]),
        # Three bytes and seven bools in words of 32 bits, and one number of 8 bytes.
        (
            [((3,), "int8"), ((2, 32), "float32"), ((7,), "bool"), ((1,), "complex64")],
            ["uint32[3,69]"],
        ),
        # 8-bit activations with a scale, and others of half their size, that go alone.
        (
            [((64,), "float8_e4m3fn"), ((), "float32"), ((16,), "bfloat16")],
            ["uint8[3,68]", "bfloat16[3,16]"],
        ),
        ([((40,), "int4"), ((2,), "float4_e2m1fn"), ((3,), "bool")], ["uint8[3,47]"]),
        ([((0,), "float32"), ((4, 2), "int32")], ["int32[3,8]"]),
        ([((4,), "complex64"), ((9,), "bool")], ["float32[3,8]", "uint8[3,9]"]),
        ([((8,), "float8_e5m2")], ["uint8[3,8]"]),
        # Wide rows are in blocks, padded to whole ones where bits ride along.
        ([((2048,), "bfloat16")], ["bfloat16[3,16,128]"]),
        ([((2, 1280), "bfloat16")], ["bfloat16[3,2,1280]"]),
        ([((2048,), "bfloat16"), ((2,), "int32")], ["uint16[3,2,1152]"]),
        ([((1024,), "float32")], ["float32[3,8,128]"]),
        ([((0,), "float32")], []),
        ([], []),
        ([((4,), "bool"), ((8,), "complex64"), ((2,), "int16")], ["uint32[0,18]"]),
    ],
)
def test_round_trip(leaves, carriers):
    rows = 0 if carriers and "[0" in carriers[0] else ROWS
    given = [leaf((rows, *shape), dtype, i) for i, (shape, dtype) in enumerate(leaves)]
    packing = plan_packing(given, ROWS)

    def there_and_back(given):
        packed = pack(packing, given)
        return packed, unpack(packing, packed, rows)

    packed, found = jax.jit(there_and_back)(given)
    assert [f"{x.dtype}{list(x.shape)}".replace(" ", "") for x in packed] == carriers
    for x, y in zip(given, found, strict=True):
        assert (x.dtype, x.shape) == (y.dtype, y.shape)
        assert bits_of(x) == bits_of(y)


def test_carrier_of_64_bits():
    with jax.enable_x64(True):
        given = [leaf((ROWS, 24), "float64"), leaf((ROWS, 3), "int16"), leaf((ROWS, 1), "int64")]
        packing = plan_packing(given, ROWS)
        (carrier,) = pack(packing, given)
        assert (carrier.dtype, carrier.shape) == (np.dtype("uint64"), (ROWS, 24 + 1 + 1))
        for x, y in zip(given, unpack(packing, [carrier], ROWS), strict=True):
            assert bits_of(x) == bits_of(y)


@pytest.mark.parametrize(("rows", "carriers"), [(1000, ((1, 0, 2),)), (2000, ((1,), (0, 2)))])
def test_large_arrays_travel_alone(rows, carriers):
    """2000 rows of 8 KiB are too many to join ids and weights to."""
    sizes = (("int32", 2), ("bfloat16", 4096), ("float32", 2))
    leaves = [jax.ShapeDtypeStruct((1, size), dtype) for dtype, size in sizes]
    assert plan_packing(leaves, rows).carriers == carriers
