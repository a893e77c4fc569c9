"""GPU clocks during a measurement, from the driver."""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Generator
from contextlib import contextmanager
from dataclasses import dataclass
from statistics import median

_FIELDS = "clocks.sm,clocks.max.sm,power.draw,power.limit,utilization.gpu"
_EVERY_MS = "200"
_BUSY = 50  # percent of the time of a sample
_AT_LIMIT = 0.95


@dataclass(frozen=True)
class Clocks:
    """The clock in MHz, the power in watts."""

    mhz: float
    most: float
    watts: float
    limit: float

    @property
    def share(self) -> float:
        return self.mhz / self.most

    def __str__(self) -> str:
        slow = f"GPUs run at {self.mhz:.0f} of {self.most:.0f} MHz"
        if self.watts > _AT_LIMIT * self.limit:
            return f"{slow}, at their limit of {self.limit:.0f} W"
        return f"{slow} (nvidia-smi -q -d CLOCK,PERFORMANCE says why)"


@contextmanager
def clocks_of(platform: str) -> Generator[Callable[[], Clocks | None], None, None]:
    """Yields a function that returns busy GPUs' medians."""
    said = ""
    tool = shutil.which("nvidia-smi") if platform == "gpu" else None
    if tool is None:
        yield lambda: None
        return
    devices = os.environ.get("CUDA_VISIBLE_DEVICES")
    command = [tool, f"--query-gpu={_FIELDS}", "--format=csv,noheader,nounits", "-lms", _EVERY_MS]
    command += [f"--id={devices}"] if devices else []
    with tempfile.TemporaryFile("w+") as samples:  # an unread pipe would be full in a minute
        process = subprocess.Popen(command, stdout=samples, stderr=subprocess.DEVNULL)
        try:
            yield lambda: clocks_in(said)
        finally:
            process.terminate()
            process.wait()
            samples.seek(0)
            said = samples.read()


def clocks_in(said: str) -> Clocks | None:
    samples = [[*map(_number, line.split(","))] for line in said.splitlines()]
    busy = [sample for sample in samples if len(sample) == 5 and sample[4] >= _BUSY and sample[1]]
    if not busy:
        return None
    mhz, most, watts, limit, _ = (median(column) for column in zip(*busy, strict=True))
    return Clocks(mhz, most, watts, limit)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:  # this GPU lacks the figure
        return 0.0
