#!/usr/bin/env bash
# One scale a column is free beside an int4 weight; one a group of 128 writes the weight out in bfloat16
#
# x @ (w.astype(bfloat16) * s) with int4 w [4096, 4096] and s [4096] is one fusion around the product on TPU: the weight
# is widened on its way into the matrix unit. With a scale for each group of 128 rows, s [32, 4096], repeated or
# broadcast through a reshape, libtpu makes the whole bfloat16 weight by a fusion of its own, and then multiplies. For
# 64 rows of x that takes 5.5 to 6.3 times the cycles. A product for each group, scaled behind (einsum over
# [32, 128, 4096]) writes no weight and takes 2.4 to 2.6 times.
# The plausible guess: both are elementwise producers of one product's operand, and are fused alike.
# Why it matters: GPTQ, AWQ and most int4 checkpoints have groups of 128; what they save in a decoding step is lost
# by a weight that is written and read in 16 bits.
# Seen on 2026-11-29 with jax 0.12.0.1, libtpu 0.0.50.1, compiled for chips that need not be there; estimated_cycles of
# column, group, group behind: v5e 36877, 203671, 87943; v6e 21113, 128780, 51128; tpu7x 20107, 126249, 53068
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
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

print("jax", jax.__version__)
CHIPS = {"v5e": "v5e:2x2", "v6e": "v6e:2x2", "tpu7x": "tpu7x:2x2x1"}


def column(x, w, s):
    return x @ (w.astype(jnp.bfloat16) * s)


def group(x, w, s):
    return x @ (w.astype(jnp.bfloat16) * jnp.repeat(s, 128, axis=0))


def behind(x, w, s):
    blocks = w.astype(jnp.bfloat16).reshape(32, 128, 4096)
    return (jnp.einsum("bgk,gkn->gbn", x.reshape(-1, 32, 128), blocks) * s[:, None]).sum(0)


for chip, name in CHIPS.items():
    place = SingleDeviceSharding(topologies.get_topology_desc(platform="tpu", topology_name=name).devices[0])
    cycles, written = [], []
    for function, scales in ((column, (4096,)), (group, (32, 4096)), (behind, (32, 4096))):
        shapes = ((64, 4096), jnp.bfloat16), ((4096, 4096), jnp.int4), (scales, jnp.bfloat16)
        jitted = jax.jit(function, in_shardings=place, out_shardings=place)
        text = jitted.lower(*(jax.ShapeDtypeStruct(*shape) for shape in shapes)).compile().as_text()
        entry = text[text.index("ENTRY"):]
        cycles.append(sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', entry))))
        written.append(len(re.findall(r"= bf16\[4096,4096\]\S* fusion\(", entry)))
    print(chip, "column, group, behind: cycles", *cycles, "; weights written in bfloat16", *written)
    if written != [0, 1, 0] or not 4 * cycles[0] < cycles[1] or not cycles[0] < cycles[2] < cycles[1]:
        raise SystemExit("differs: only group wrote the weight, at over 4 times the cycles of column")
END
