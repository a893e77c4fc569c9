#!/usr/bin/env bash
# Today's libtpu compiles for TPU v2 and v3, in float8 and int4, too, which these chips cannot multiply
#
# libtpu 0.0.50.1 describes slices v2:2x2 and v3:2x2 that need not be there, with two devices a chip, and compiles for
# them: a gather over all devices and a matmul, with estimated cycles in its text, and products of float8_e4m3fn and
# int4. Names that clouds use for newer chips are refused: v5litepod:2x2, v6p:2x2x1.
# The plausible guess: a compiler of 2026 begins with v4, as the pages on supported chips do, and refuses dtypes that
# the chip's matrix units lack.
# Why it matters: a list of chips "that libtpu knows" is longer than any page; a dtype that compiles says nothing of
# its speed.
# Seen on 2026-11-29 with jax 0.12.0.1, libtpu 0.0.50.1:
#   v2:2x2: 8 x TPU v2, 4 chips, all-gather, cycles, float8_e4m3fn, int4; v3:2x2: the same of TPU v3
#   v5litepod:2x2, v6p:2x2x1: refused
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5 libtpu==0.0.50.1
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 ALLOW_MULTIPLE_LIBTPU_LOAD=1
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.topologies import get_topology_desc
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

print("jax", jax.__version__)


def devices_of(name):
    return get_topology_desc(platform="tpu", topology_name=name).devices


def compiled(mesh, function, *shapes, spec=P()):
    args = [jax.ShapeDtypeStruct(s, d, sharding=NamedSharding(mesh, spec)) for s, d in shapes]
    return jax.jit(function).lower(*args).compile().as_text()


for chip in ("v2", "v3"):
    devices = devices_of(f"{chip}:2x2")
    mesh = Mesh(np.array(devices), ("x",))
    gathered = jax.shard_map(
        lambda x: (y := jax.lax.all_gather(x, "x", tiled=True)) @ y.T,
        mesh=mesh, in_specs=P("x"), out_specs=P(), check_vma=False,
    )
    text = compiled(mesh, gathered, ((1024, 512), jnp.bfloat16), spec=P("x"))
    for dtype in (jnp.float8_e4m3fn, jnp.int4):
        compiled(mesh, lambda x: jnp.dot(x, x, preferred_element_type=jnp.float32), ((512, 512), dtype))
    kind, chips = devices[0].device_kind, len({tuple(device.coords) for device in devices})
    seen = f"{len(devices)} x {kind}, {chips} chips", " all-gather(" in text, '"estimated_cycles":' in text
    print(f"{chip}:2x2:", *seen, "float8_e4m3fn int4")
    if seen != (f"8 x TPU {chip}, 4 chips", True, True):
        raise SystemExit("differs: it was 8 devices of 4 chips, with a gather and cycles")
for name in ("v5litepod:2x2", "v6p:2x2x1"):
    try:
        devices_of(name)
    except Exception as error:
        print(f"{name}: refused, {type(error).__name__}")
    else:
        raise SystemExit(f"differs: {name} was refused")
END
