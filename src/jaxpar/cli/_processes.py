"""One process a target: started, read line by line, and reported also where it dies."""

import json
import os
import re
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from typing import Any

from jaxpar.predict._results import Failure, Report, Request, facts_from, prediction_from

Tick = Callable[[str], None]  # called with the label of what was compiled

_ENVIRONMENT = {
    "JAX_PLATFORMS": "cpu",  # devices that are present are left to who uses them
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # compiling needs no driver and no cuDNN
}


_FATAL = re.compile(r"^F[0-9]{4} |Check failed|Fatal|\w+Error: ")


def run_all(requests: Sequence[Request], jobs: int, tick: Tick) -> list[Report]:
    """Serves each request in a process of its own, `jobs` at a time."""
    with ThreadPoolExecutor(jobs) as pool:
        return list(pool.map(lambda request: run_one(request, tick), requests))


def run_one(request: Request, tick: Tick) -> Report:
    """Serves one request; a process that dies becomes a failure of its target."""
    report, ended, label = Report(request.target), False, ""
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with subprocess.Popen(
            [sys.executable, "-m", "jaxpar.predict._worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **_ENVIRONMENT},
        ) as process:
            try:
                for kind, record in _converse(process, request):
                    ended = ended or kind == "end"
                    label = record if kind == "begin" else label
                    _absorb(report, kind, record, tick)
                process.wait()
            except BaseException:
                process.kill()  # leaving the block waits for it
                raise
        if not ended:
            log.seek(0)
            report.failures.append(Failure(label, _last_words(process.returncode, log.read())))
    return report


def _converse(process: subprocess.Popen[str], request: Request) -> Iterator[tuple[str, Any]]:
    assert process.stdin is not None
    assert process.stdout is not None
    with suppress(BrokenPipeError):  # it died first, which its status tells
        json.dump(asdict(request), process.stdin)
        process.stdin.close()
    for line in process.stdout:
        yield from json.loads(line).items()


def _absorb(report: Report, kind: str, record: Any, tick: Tick) -> None:
    match kind:
        case "facts":
            report.facts = facts_from(record)
        case "prediction":
            report.predictions.append(prediction_from(record))
            tick(f"{report.target} {report.predictions[-1].label}")
        case "failure":
            report.failures.append(Failure(**record))
            tick(f"{report.target} {report.failures[-1].label}")
        case _:
            pass


def _last_words(status: int, log: str) -> str:
    how = f"with {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    # A stack trace follows what a compiler says of its own failure.
    said = [line for line in lines if _FATAL.search(line)] or lines[-1:]
    return f"the compiler's process ended {how}: {said[0][:400] if said else 'it said nothing'}"
