#!/usr/bin/env bash
# A cast to float8 and back casts the gradient to float8, too
#
# x.astype(float8_e4m3fn).astype(float32), the usual simulation of quantized weights, has a gradient, and it is not the
# straight-through one: the transpose of each cast casts the cotangent back, so that the gradient itself passes
# through the 8-bit type, without a scale. Through float8_e4m3fn 1e-4 becomes 0 and 1000 NaN; float4_e2m1fn cuts
# everything to 6. Casts to int8 have the gradient 0. It is the same with jit and without.
# The plausible guess: the rounding is ignored by autodiff (gradient 1) or kills the gradient (0).
# Why it matters: in a mean over many tokens gradients of 1e-4 are usual: those weights silently stop learning, and a
# large loss scale, which would mend that, gives NaN; x + stop_gradient(q(x) - x) or a custom_vjp is needed.
# Seen on 2026-11-29 with jax 0.12.0.1 (CPU), gradients of c * q(x) for c = 1e-4, 0.3, 1000:
#   float8_e4m3fn 0, 0.3125, nan; float8_e5m2 0.00010681152, 0.3125, 1024; float4_e2m1fn 0, 0.5, 6; int8 0, 0, 0
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5
export JAX_PLATFORMS=cpu
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import jax
import jax.numpy as jnp
import numpy as np

print("jax", jax.__version__)
expected = {
    "float8_e4m3fn": [0, 0.3125, np.nan],
    "float8_e5m2": [1.0681152e-4, 0.3125, 1024],
    "float4_e2m1fn": [0, 0.5, 6],
    "int8": [0, 0, 0],
}
for name, right in expected.items():
    for transform in (lambda f: f, jax.jit):
        gradient = transform(jax.grad(lambda x, c: c * x.astype(name).astype(jnp.float32)))
        seen = [float(gradient(1.0, c)) for c in (1e-4, 0.3, 1000.0)]
        if not np.allclose(seen, right, rtol=1e-6, atol=0, equal_nan=True):
            raise SystemExit(f"differs: gradients through {name} were {right}, and are {seen}")
    print(name, *(f"{value:.7g}" for value in seen))
END
