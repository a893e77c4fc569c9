#!/usr/bin/env bash
# Adam's second moment in bfloat16 never decays
#
# optax.adam keeps its moments in the parameters' dtype unless mu_dtype says otherwise, and mu_dtype is for the first
# moment alone. With bfloat16 parameters the second moment is bfloat16, and 0.999 times a bfloat16 number rounds to the
# number itself. One step with a large gradient sets it, and no number of steps with small gradients lowers it again:
# the step size of that parameter stays small for good. The first moment (0.9) decays to zero as it should. optax.ema
# with a decay of 0.999 has the same fault on the way up: an average of ones that begins at 0 stops at 0.5.
# The plausible guess: rounding costs some accuracy, and the moving average follows, later than in float32.
# Why it matters: moments of sharded bfloat16 parameters halve the memory, train, and are silently another optimizer.
# Seen on 2026-11-29 with optax 0.2.8, jax 0.12.0.1 (CPU), a gradient of 10 and then 5000 of 0:
#   float32: second moment 0.1 -> 0.000672; bfloat16: 0.10009766 -> 0.10009766; average of ones 0.5
set -euo pipefail
PYTHON=${PYTHON:-python3.13}
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"$PYTHON" -m venv "$folder/env"
"$folder/env/bin/pip" install -qq --no-compile --disable-pip-version-check jax==0.12.0.1 jaxlib==0.12.0.1 ml_dtypes==0.6.0 numpy==2.5.5 optax==0.2.8
export JAX_PLATFORMS=cpu
"$folder/env/bin/python" - 2>"$folder/log" <<'END' || { tail -n 1 "$folder/log" && exit 1; }
import jax
import jax.numpy as jnp
import optax

print("jax", jax.__version__, "optax", optax.__version__)


def second_moment(dtype):
    optimizer = optax.adam(1e-3)
    state = optimizer.init(jnp.ones((), dtype))
    update = jax.jit(lambda gradient, state: optimizer.update(gradient, state)[1])
    state = update(jnp.asarray(10, dtype), state)
    first = float(state[0].nu)
    for _ in range(5000):
        state = update(jnp.zeros((), dtype), state)
    print(dtype.__name__, state[0].nu.dtype, "second moment", first, "->", float(state[0].nu), "first", float(state[0].mu))
    return first, float(state[0].nu)


average = optax.ema(0.999, debias=False)
state = average.init(jnp.zeros((), jnp.bfloat16))
step = jax.jit(lambda state: average.update(jnp.ones((), jnp.bfloat16), state)[1])
for _ in range(5000):
    state = step(state)
print("average of ones", state.ema)
before, after = second_moment(jnp.float32)
if not after < 0.01 * before:
    raise SystemExit("differs: in float32 the second moment decayed")
before, after = second_moment(jnp.bfloat16)
if after != before or float(state.ema) != 0.5:
    raise SystemExit("differs: in bfloat16 the second moment stayed, and the average stopped at 0.5")
END
