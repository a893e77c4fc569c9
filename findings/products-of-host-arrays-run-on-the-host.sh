#!/usr/bin/env bash
# A product of arrays in pinned_host memory is compiled to run on the host's CPU, without a word
#
# jax.jit(lambda a, b: a @ b) of two arrays in "pinned_host" memory, with the result in device memory, compiles for
# TPU. The compiled module multiplies in a HostExecute call (thread "host") and copies the result to the device; the
# TPU multiplies nothing. a + 1 goes to the host, too, though a[:8] is fetched to the device. If b is on the device,
# tracing with arrays refuses the product (memory_space), but lowering from ShapeDtypeStructs with the same shardings
# does not: that sends b to the host and multiplies there.
# The plausible guess: operands are fetched to where the result is wanted; or a missing jax.device_put is an error.
# Why it matters: with offloaded weights or moments a forgotten device_put moves arithmetic to the host's CPU;
# results, and tests on CPU, are the same, and a check of the step by ahead-of-time compiling passes.
# Seen on 2026-11-29 with jax 0.12.0.1, libtpu 0.0.50.1, compiled for a v5e that need not be there (on the host?):
#   host @ host True, host @ device True, host + 1 True, host[:8] False, device @ device False
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
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

print("jax", jax.__version__)
chip = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]
HOST, DEVICE = (SingleDeviceSharding(chip, memory_kind=kind) for kind in ("pinned_host", "device"))


def on_host(function, *places):
    """Says whether the compiled module calls the host to compute."""
    operands = [jax.ShapeDtypeStruct((1024, 1024), jnp.float32, sharding=place) for place in places]
    text = jax.jit(function, out_shardings=DEVICE).lower(*operands).compile().as_text()
    return 'custom_call_target="HostExecute"' in text


seen = {
    "host @ host": on_host(lambda a, b: a @ b, HOST, HOST),
    "host @ device": on_host(lambda a, b: a @ b, HOST, DEVICE),
    "host + 1": on_host(lambda a: a + 1, HOST),
    "host[:8]": on_host(lambda a: a[:8], HOST),
    "device @ device": on_host(lambda a, b: a @ b, DEVICE, DEVICE),
}
print(*(f"{name}: {value}" for name, value in seen.items()), sep="\n")
if list(seen.values()) != [True, True, True, False, False]:
    raise SystemExit("differs: True, True, True, False, False were expected")
END
