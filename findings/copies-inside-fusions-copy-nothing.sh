#!/usr/bin/env bash
# A copy of a whole buffer inside of a fusion copies nothing
#
# One slice of a donated int8 buffer [layers, 2048, 1024] is written by jax.lax.dynamic_update_index_in_dim with a value
# that is computed in the same program. libtpu makes one fusion of it. In its text the whole buffer is copied from tiles
# of T(32,128)(4,1) to T(8,128)(4,1), in a fusion within the fusion that has output_to_operand_aliasing. Nothing of the
# buffer is moved but the slice: the compiler's estimated cycles and its temporary memory are those of 4 layers with 64.
# Where a single row is written the same copy stands outside of fusions, and its cycles grow with the buffer. On tpu7x
# bfloat16 has such copies, too: fusions in the gradient of a scan read their operands through them.
# The plausible guess: `copy(` in the text of a compiled program is a pass over the array, so that a scan over layers
# copies what it saves in every trip.
# Why it matters: who counts bytes in compiled texts (rooflines, tools that look for copies) is off by the number of
# layers.
# Seen on 2026-11-29 with jax 0.12.0.1 and libtpu 0.0.50.1, compiled for chips that need not be there. Copies of the
# whole, and cycles with 4 and 64 layers, a slice: v6e 1, 19143 and 19143, tpu7x 1, 12366 and 12366.
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
from jax import lax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

print("jax", jax.__version__)
INDEX = jax.ShapeDtypeStruct((), jnp.int32)


def compiled(chip, function, *args):
    devices = topologies.get_topology_desc(platform="tpu", topology_name=chip).devices
    place = SingleDeviceSharding(devices[0])
    jitted = jax.jit(function, in_shardings=place, out_shardings=place, donate_argnums=0)
    return jitted.lower(*args).compile()


def write_slice(buffer, x, i):
    return lax.dynamic_update_index_in_dim(buffer, x + x, i, 0)


def write_row(buffer, x, i):
    return lax.dynamic_update_slice_in_dim(buffer, x[:, :1] + x[:, :1], i, 1)


def of_the_whole(program, layers):
    """Returns copies of the whole buffer, the most cycles of an instruction, and temporary bytes."""
    text = program.as_text()
    copies = re.findall(rf"s8\[{layers},2048,1024\]\S* copy\(", text)
    cycles = map(int, re.findall(r'"estimated_cycles":"(\d+)"', text))
    return len(copies), max(cycles), program.memory_analysis().temp_size_in_bytes


def differs(what, expected, seen):
    if seen != expected:
        raise SystemExit(f"differs: {what} was {expected}, and is {seen}")


for chip in ("v6e:2x2", "tpu7x:2x2x1"):
    seen = []
    for layers in (4, 64):
        buffer = jax.ShapeDtypeStruct((layers, 2048, 1024), jnp.int8)
        x = jax.ShapeDtypeStruct((2048, 1024), jnp.int8)
        seen.append(of_the_whole(compiled(chip, write_slice, buffer, x, INDEX), layers))
    print(chip, "a slice: copies, cycles and temporary bytes with 4 and 64 layers:", *seen)
    differs("whether the cycles of a slice are those of the buffer", False, seen[0] != seen[1])
    differs("copies and temporary bytes", (1, 0), (seen[0][0], seen[0][2]))

cycles = []
for layers in (4, 64):
    buffer = jax.ShapeDtypeStruct((layers, 2048, 1024), jnp.int8)
    x = jax.ShapeDtypeStruct((layers, 2048, 1024), jnp.int8)
    copies, most, _ = of_the_whole(compiled("v6e:2x2", write_row, buffer, x, INDEX), layers)
    cycles.append(most)
    print(f"v6e:2x2 a row of {layers} layers: copies {copies}, cycles {most}")
differs("whether the cycles of a row grow with the buffer", True, cycles[1] > 4 * cycles[0])


def loss(w, x):
    def layer(x, w):
        return lax.reduce_precision(jnp.tanh(x @ w), 8, 7), None

    return lax.scan(layer, x, w)[0].astype(jnp.float32).sum()


for chip, are_some in (("v6e:2x2", False), ("tpu7x:2x2x1", True)):
    w, x = (jax.ShapeDtypeStruct(s, jnp.bfloat16) for s in ((8, 1024, 1024), (2048, 1024)))
    text = compiled(chip, jax.grad(loss), w, x).as_text()
    inside = re.findall(r"output_to_operand_aliasing=\{\{\}: \(0, \{\}\)\}, calls=%copy_fusion", text)
    print(chip, "copies inside of fusions of a scan in bfloat16:", len(inside))
    differs("whether there are some", are_some, bool(inside))
END
