"""Several processes of CPU devices: one is killed, and another number of them goes on."""

import json
import os
import re
import signal
import subprocess
import sys
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Timer

import jax
import numpy as np
from programs import environment, free_port

from language_model.arguments import parse
from language_model.data import standard_library, training_batch
from language_model.parallel import build_mesh
from language_model.tests.cases import reference_curve
from language_model.train import Trainer

FOLDER = Path(__file__).parents[1]
SIZES = [
    *("--width", "18", "--layers", "1", "--heads", "3", "--kv-heads", "1", "--head-size", "4"),
    *("--hidden", "13", "--batch", "5", "--sequence", "13", "--dtype", "float64", "--clip", "0.5"),
    *("--steps", "2000", "--save-every", "3", "--print-every", "1", "--validation-batches", "1"),
]


@contextmanager
def processes(count, devices, errors, *args):
    """Starts the command in `count` processes; none outlives twenty minutes, or the block."""
    env = environment(JAX_NUM_CPU_DEVICES=str(devices))
    command = [sys.executable, str(FOLDER), *SIZES, *args, "--num-processes", str(count)]
    command += ["--coordinator", f"localhost:{free_port()}", "--process-id"]
    with errors.open("w") as log:
        started = [
            subprocess.Popen(
                [*command, str(i)],
                env=env,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                start_new_session=True,
            )
            for i in range(count)
        ]
    timer = Timer(1200, kill, [started])
    timer.start()
    try:
        yield started
    finally:
        timer.cancel()
        kill(started)


def kill(started):
    for process in started:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
    for process in started:
        process.wait()
        process.stdout.close()


def test_killed_and_resumed(tmp_path):
    folder, log, errors = tmp_path / "run", tmp_path / "log.json", tmp_path / "errors"
    command = ["--mesh", "fsdp=3", "--checkpoint", str(folder)]
    with processes(3, 1, errors, *command) as (first, second, _):
        reached = read_until(first, r"step (\d+) ", 7)
        assert reached, errors.read_text()
        os.kill(second.pid, signal.SIGKILL)
    saved = max(int(path.name) for path in folder.iterdir() if path.name.isdecimal())
    assert saved % 3 == 0
    assert saved > reached - 3  # nothing is lost but the steps since

    command = ["--mesh", "cp=2,tp=2", "--checkpoint", str(folder), "--stop", str(saved + 4)]
    with processes(2, 2, errors, *command, "--log", str(log)) as members:
        out, *silent = [member.communicate()[0] for member in members]
    assert [member.returncode for member in members] == [0] * 2, errors.read_text()
    assert f"resumed after step {saved} from" in out
    assert silent == [""]
    record = json.loads(log.read_text())
    assert (record["mesh"], record["processes"]) == ("cp=2,tp=2", 2)

    with jax.enable_x64(True), jax.numpy_dtype_promotion("standard"):
        want = curve_of_one_device(saved + 4)
    np.testing.assert_allclose(record["losses"], want, rtol=1e-10)


def read_until(process, pattern, number):
    """Reads lines until one has at least this number; gives it, or None if there is none."""
    for line in process.stdout:
        found = re.match(pattern, line)
        if found and int(found[1]) >= number:
            return int(found[1])
    return None


def curve_of_one_device(steps):
    args, text = parse(SIZES), standard_library()
    trainer = Trainer(args.model, args.training, build_mesh("dp=1"))
    batches = (
        training_batch(text, args.training.batch, args.training.sequence, 0, step)
        for step in range(steps)
    )
    return reference_curve(trainer, jax.device_get(trainer.init()["params"]), batches)[0]
