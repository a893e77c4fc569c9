"""A compile in a process of its own, which says what it found as its last line."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any


def record_of(script: str, *arguments: str) -> tuple[dict[str, Any], float]:
    """Returns the record that a script of this folder prints, or why there is none; and seconds."""
    start = time.perf_counter()
    worker = subprocess.run(
        [sys.executable, str(Path(__file__).parent / script), *arguments],
        env={**os.environ, "JAX_PLATFORMS": "cpu"},  # devices that are present are left alone
        capture_output=True,
        text=True,
        check=False,
    )
    if worker.returncode == 0:
        record = json.loads(worker.stdout.splitlines()[-1])
    else:
        said = [line for line in worker.stderr.splitlines() if "Error" in line]
        record = {"failure": said[-1][:300] if said else f"it ended with {worker.returncode}"}
    return record, time.perf_counter() - start
