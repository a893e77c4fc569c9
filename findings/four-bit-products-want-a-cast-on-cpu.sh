#!/usr/bin/env bash
# A product of 4-bit numbers with wider sums is compiled for TPUs, and for CPUs only after a cast that changes nothing
#
# jax.lax.dot of two int4 arrays with preferred_element_type=int32 (or int8, int16, float32) is refused by XLA's CPU
# compiler: its verifier says that the backend supports no custom element sizes on types that are no sub-byte ones, of
# an instruction `convert` that is not in the program. The compiler makes it itself, and gives its s32 result the layout
# E(4) of the operand. uint4 with uint32 and float4_e2m1fn with float32 end alike. With operands cast to int8, uint8 and
# bfloat16 before the product the same numbers are multiplied, and it compiles. For TPUs nothing is lost by that: libtpu
# undoes the cast, its product reads s4, and the estimated cycles are the same.
# The plausible guess: a cast before the product gives up the fast 4-bit product and doubles the operand, so that
# preferred_element_type alone is the portable way.
# Why it matters: int4 weights are tested on CPUs before they run on TPUs; the form that both compile is the cast. (Seen
# too, compiled for H100 with the CUDA plugin and not run here: as it is the product is a loop over s32 copies of the
# operands, with the cast to int8 a Triton kernel that reads s4.)
# Seen on 2026-11-29 with jax 0.12.0.1 and libtpu 0.0.50.1 (the CPU's part also with jax 0.10.2): refused with
# preferred_element_type alone for int4, uint4 and float4_e2m1fn; right with the cast; v5e 19346 and 19346 cycles.
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5 libtpu==0.0.50.1
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import re

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

print("jax", jax.__version__)
SUMS = {"int4": "int32", "uint4": "uint32", "float4_e2m1fn": "float32"}
BYTES = {"int4": "int8", "uint4": "uint8", "float4_e2m1fn": "bfloat16"}


def differs(what, expected, seen):
    if seen != expected:
        raise SystemExit(f"{what}: {seen}, not {expected}")


def product(dtype, cast):
    def function(x, w):
        x, w = (x.astype(BYTES[dtype]), w.astype(BYTES[dtype])) if cast else (x, w)
        return lax.dot(x, w, preferred_element_type=SUMS[dtype])

    return jax.jit(function)


for dtype, sums in SUMS.items():
    x, w = (np.arange(12).reshape(shape) % 4 for shape in ((3, 4), (4, 3)))
    operands = x.astype(dtype), w.astype(dtype)
    try:
        product(dtype, cast=False)(*operands)
        refused = "compiled"
    except jax.errors.JaxRuntimeError as error:
        refused = "custom element sizes" if "custom element sizes" in str(error) else str(error)
    right = np.array_equal(product(dtype, cast=True)(*operands), (x @ w).astype(sums))
    print(f"CPU, {dtype} with sums of {sums}: {refused}; after a cast right: {right}")
    differs(dtype, ("custom element sizes", True), (refused, right))

devices = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices
place = SingleDeviceSharding(devices[0])
x = jax.ShapeDtypeStruct((1024, 1024), jnp.int4, sharding=place)
cycles = []
for cast in (False, True):
    text = product("int4", cast).lower(x, x).compile().as_text()
    cycles += [re.findall(r'"estimated_cycles":"(\d+)"', text)]
    reads = re.findall(r"= (\w+)\[1024,1024\]\S* fusion\(%param_[01]\)", text)
    print(f"v5e, {'cast' if cast else 'as is'}: {cycles[-1]} cycles, the product reads {reads}")
    differs("what the product reads", ["s4", "s4"], reads)
differs("cycles with and without the cast", cycles[0], cycles[1])
END
