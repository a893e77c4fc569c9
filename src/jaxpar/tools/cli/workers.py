"""Processes that compile alone, or run together."""

import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Callable, Generator, Iterable, Mapping
from contextlib import contextmanager, redirect_stdout, suppress
from typing import Any, TextIO

import jax

from jaxpar import initialize
from jaxpar.tools.cli import last_words
from jaxpar.tools.cli.console import UsageError
from jaxpar.tools.timeline.cuda_plugin import find_plugin

CPU_DEVICES = 8  # over all processes of a run
COMPILING = {
    "JAX_PLATFORMS": "cpu",  # does not occupy devices that are present
    "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1",  # compiling needs no driver and no cuDNN
}

_running: set[subprocess.Popen[str]] = set()  # the processes of all `converse` calls
_END = "end"  # the last line of a process that is done


def converse(
    module: str,
    task: Any,
    take: Callable[[Any], None],
    environment: Mapping[str, str] = COMPILING,
) -> str | None:
    """Serves a task in another process, `python -m module`, which calls `answer`.

    TPU and GPU compilers cannot share a process, and a crash ends only its own. Returns how the
    process died, or None.
    """
    ended = False
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        with subprocess.Popen(
            [sys.executable, "-m", module],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log,
            text=True,
            env={**os.environ, **environment},
        ) as process:
            _running.add(process)
            try:
                assert process.stdin is not None
                assert process.stdout is not None
                with suppress(BrokenPipeError):  # it died first; its status says so
                    json.dump(task, process.stdin)
                    process.stdin.close()
                for line in process.stdout:
                    record = json.loads(line)
                    ended = ended or record == _END
                    if not ended:
                        take(record)
                process.wait()
            except BaseException:
                process.kill()  # leaving the block waits for it
                raise
            finally:
                _running.discard(process)
        if ended:
            return None
        log.seek(0)
        return _last_words(process.returncode, log.read())


def kill_all() -> None:
    for process in list(_running):
        process.kill()


def answer(serve: Callable[[Any], Iterable[Any]]) -> None:
    with answering() as (task, say):
        for record in serve(task):
            say(record)


@contextmanager
def answering() -> Generator[tuple[Any, Callable[[Any], None]]]:
    # What compilers or the user's function print goes to standard error.
    with own_output() as lines:

        def say(record: Any) -> None:
            lines.write(json.dumps(record) + "\n")

        yield json.load(sys.stdin), say
        say(_END)


@contextmanager
def own_output() -> Generator[TextIO, None, None]:
    """Yields standard output; all other writes go to standard error.

    Gloo, the CPU transport, writes to file descriptor 1, perhaps within a line.
    """
    sys.stdout.flush()
    shown = os.dup(1)
    with os.fdopen(os.dup(1), "w", buffering=1, encoding=sys.stdout.encoding) as lines:
        os.dup2(2, 1)
        try:
            yield lines
        finally:
            os.dup2(shown, 1)
            os.close(shown)


def one_line(reason: BaseException) -> str:
    return f"{type(reason).__name__}: {first_line(str(reason))}"


def first_line(text: str) -> str:
    said = (line.strip() for line in text.splitlines())
    return next(filter(None, said), "no reason given")[:400]


def compilers() -> set[str]:
    places = {"tpu": importlib.util.find_spec("libtpu"), "gpu": find_plugin()}
    return {name for name, place in places.items() if place is not None}


@contextmanager
def start_jax(
    coordinator: str | None = None,
    process_id: int = 0,
    num_processes: int = 1,
    timeout_s: float = 300,
    hides: bool = True,
) -> Generator[str, None, None]:
    """Sets the number of CPU devices, joins processes, starts JAX, yields its output.

    It keeps a number that the user chose. With several processes, standard output has only what
    Python prints. With `hides=False` JAX prints its output itself, into a log.
    """
    flag = "xla_force_host_platform_device_count"
    chosen = "JAX_NUM_CPU_DEVICES" in os.environ or flag in os.environ.get("XLA_FLAGS", "")
    if not chosen:
        jax.config.update("jax_num_cpu_devices", max(1, CPU_DEVICES // num_processes))
    if coordinator is None:
        yield _start_backends(hides)
        return
    if process_id == 0:
        _require_port(coordinator)
    with own_output() as lines, redirect_stdout(lines):
        try:
            initialize(coordinator, num_processes, process_id, timeout_s=timeout_s)
        except ValueError as reason:  # a bad address; only process 0 tried the port before
            raise UsageError(f"--coordinator {coordinator}: {reason}") from None
        try:
            yield _start_backends(hides)
        finally:
            jax.distributed.shutdown()


def _start_backends(hides: bool) -> str:
    if not hides:
        jax.devices()
        return ""
    # Plugins of missing accelerators print tracebacks, which are returned, not shown.
    sys.stderr.flush()
    shown = os.dup(2)
    with tempfile.TemporaryFile("w+", errors="replace") as log:
        # JAX ends the process without an exception, for a flag that XLA does not know.
        with subprocess.Popen(
            [sys.executable, "-I", last_words.__file__, str(log.fileno())],
            stdin=subprocess.PIPE,
            pass_fds=[log.fileno()],
        ) as witness:
            os.dup2(log.fileno(), 2)
            try:
                jax.devices()
            finally:
                sys.stderr.flush()
                os.dup2(shown, 2)
                os.close(shown)
                witness.communicate(b"started")
        log.seek(0)
        return log.read()


def _require_port(coordinator: str) -> None:
    # JAX crashes, without an exception, if its coordinator cannot listen.
    _, _, port = coordinator.rpartition(":")
    dual = socket.has_dualstack_ipv6()
    family = socket.AF_INET6 if dual else socket.AF_INET
    try:
        socket.create_server(("", int(port)), family=family, dualstack_ipv6=dual).close()
    except (OSError, OverflowError, ValueError) as reason:
        raise UsageError(
            f"--coordinator {coordinator} must be HOST:PORT with a port that is free on the host "
            f"of process 0: {reason}"
        ) from None


def _last_words(status: int, log: str) -> str:
    ending = f"with {signal.Signals(-status).name}" if status < 0 else f"with status {status}"
    return f"ended {ending}: {last_words.last_words(log)}"
