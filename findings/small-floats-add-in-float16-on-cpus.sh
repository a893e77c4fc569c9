#!/usr/bin/env bash
# XLA's CPU adds 8-bit and 4-bit floats in float16, and without the F16C instructions compiles neither
#
# With XLA_FLAGS=--xla_cpu_max_isa=SSE4_2 (a CPU without F16C: what one takes to see how results depend on the
# instruction set) any conversion to or from float16, and any sum of float16, ends in "INTERNAL: Failed to materialize
# symbols": the function of the C runtime that converts, __extendhfsf2 or __truncsfhf2, is not linked in. The same error
# comes from programs without a float16: a sum of float8_e4m3fn, float8_e5m2, float8_e4m3b11fnuz, float8_e3m4 or
# float4_e2m1fn, because XLA widens it to float16, and a concatenation of float8_e3m4, which only moves bytes.
# Conversions of all of these to and from float32 compile, as do concatenations of the others, sums of
# float8_e8m0fnu, and everything of bfloat16, int8 and int4.
# The plausible guess: float16 is emulated where the CPU lacks it, as bfloat16 is; 8-bit floats are widened to float32.
# Why it matters: a suite that is run with another instruction set fails by its 8-bit wires and caches, and the error
# names neither a dtype nor an instruction.
# Seen on 2026-11-29 with jax 0.12.0.1 on x86-64 (jax 0.10.2: as here, and a concatenation of float4_e2m1fn fails, too).
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_cpu_max_isa=SSE4_2
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
KINDS = ["float16", "float8_e4m3fn", "float8_e5m2", "float8_e4m3b11fnuz", "float8_e3m4", "float4_e2m1fn"]
WHOLE = ["bfloat16", "float8_e8m0fnu", "int8", "int4"]
EXPECTED = {kind: ["sum"] for kind in KINDS}
EXPECTED["float16"] = ["from float32", "to float32", "sum"]
EXPECTED["float8_e3m4"] = ["sum", "concatenate"]


def refused(function, x):
    try:
        jax.jit(function)(x)
    except jax.errors.JaxRuntimeError as error:
        if "Failed to materialize symbols" not in str(error):
            raise
        return True
    return False


for kind in [*KINDS, *WHOLE]:
    wide = np.ones(3, np.float32)
    narrow = wide.astype(kind)
    programs = {
        "from float32": (lambda x: x.astype(kind), wide),
        "to float32": (lambda x: x.astype(jnp.float32), narrow),
        "sum": (lambda x: x + x, narrow),
        "concatenate": (lambda x: jnp.concatenate([x, x]), narrow),
    }
    seen = [name for name, program in programs.items() if refused(*program)]
    print(f"{kind} does not compile: {', '.join(seen) or '-'}")
    if seen != EXPECTED.get(kind, []):
        raise SystemExit(f"{kind}: {seen} do not compile, not {EXPECTED.get(kind, [])}")
END
