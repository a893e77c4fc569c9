"""Starts the processes of a cluster behind a slow network, and tells them what to do."""

import json
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from workers import PATH

INSIDE = "JAXPAR_NETWORK_NAMESPACE"  # set in the environment of the run within the namespace


class RefusalError(Exception):
    """What keeps the benchmark from running, and what to do about it."""


class Cluster:
    """Processes that do the same things at the same time; the first one reports."""

    def __init__(self, processes: int, shape: str, flags: str = ""):
        address = f"127.0.0.1:{_free_port()}"
        kept = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "JAX_PLATFORMS")}
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 (outlives this call)
        self._members = [
            subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "network.member",
                    *(address, f"{process}", f"{processes}", shape),
                ],
                env=kept | {"XLA_FLAGS": flags, "PYTHONPATH": PATH},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE if process == 0 else subprocess.DEVNULL,
                stderr=self._log,
                text=True,
            )
            for process in range(processes)
        ]

    def do(self, action: str, *args: Any) -> dict[str, Any]:
        """Has every process do `action`; returns what the first one reports."""
        try:
            for member in self._members:
                assert member.stdin is not None
                member.stdin.write(json.dumps([action, args]) + "\n")
                member.stdin.flush()
        except BrokenPipeError:
            pass  # a process is gone; its log says why
        out = self._members[0].stdout
        assert out is not None
        if reply := out.readline():
            return json.loads(reply)
        self._log.seek(0)
        tail = "".join(self._log.readlines()[-20:])
        raise RefusalError(
            f"a process of the cluster stopped during {action!r}; its log ends with\n{tail}"
        )

    def close(self) -> None:
        """Ends the processes: in peace where they still listen, by force where they do not."""
        for member in self._members:
            assert member.stdin is not None
            with suppress(BrokenPipeError):
                member.stdin.close()
        for member in self._members:
            try:
                member.wait(timeout=20)
            except subprocess.TimeoutExpired:
                member.kill()
                member.wait()


def enter_namespace(argv: Sequence[str], rate: str) -> int:
    """Runs the benchmark again in a network namespace of its own, whose loopback is slow."""
    setup = (
        f"ip link set lo up && tc qdisc add dev lo root tbf rate {rate} burst 256kb latency 50ms"
    )
    unshare = _unshare(setup)
    main = str(Path(__file__).with_name("__main__.py"))
    command = [*unshare, "sh", "-c", f'{setup} && exec "$@"', "sh", sys.executable, main, *argv]
    return subprocess.run(command, env=os.environ | {INSIDE: "1"}, check=False).returncode


def _unshare(setup: str) -> list[str]:
    """Returns the command that may make a namespace and slow it down: as root, or as a user."""
    why = "it needs Linux with unshare (util-linux), ip and tc (iproute2)"
    if all(shutil.which(tool) for tool in ("unshare", "ip", "tc")):
        for command in (["unshare", "-n"], ["unshare", "-rn"]):
            tried = subprocess.run(
                [*command, "sh", "-c", setup], capture_output=True, text=True, check=False
            )
            if tried.returncode == 0:
                return command
        why = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
    raise RefusalError(
        f"no slow network could be made ({why}); run `sudo nox -s figures -- network`, or "
        "`nox -s figures -- network --rate none` for the same without a limit, which has little to "
        "hide"
    )


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return listener.getsockname()[1]
