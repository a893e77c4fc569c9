"""Processes that are forks of one which has imported what all of them need.

They are spared the second of imports. They also share its hash seed and its addresses: programs
that must not depend on these are started by themselves.
"""

import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from importlib import import_module
from pathlib import Path


class Forks:
    """The process that has imported modules, and waits to be told what to run."""

    def __init__(self, modules, env):
        self.link, there = socket.socketpair()
        with there:
            self.process = subprocess.Popen(
                [sys.executable, __file__, str(there.fileno()), *modules],
                env=env,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # no terminal: forks buffer what they print
                pass_fds=[there.fileno()],
            )

    def start(self, arguments, **more):
        """Runs a script with its arguments, and with these in the environment besides."""
        return Fork(self.link, json.dumps([arguments, more]).encode())

    def end(self):
        self.link.close()
        self.process.wait()


class Fork:
    """As a `subprocess.Popen` whose three streams are pipes, as far as tests need one."""

    def __init__(self, link, request):
        pipes = [os.pipe() for _ in range(4)]
        (stdin, self_in), (self_out, stdout), (self_err, stderr), (told, tells) = pipes
        given = [stdin, stdout, stderr, tells]
        socket.send_fds(link, [request], given)
        for one in given:
            os.close(one)
        self.stdin, self.told = os.fdopen(self_in, "w"), os.fdopen(told, "rb", buffering=0)
        self.stdout, self.stderr = os.fdopen(self_out), os.fdopen(self_err)
        self.returncode = None
        self.pid = int(self._line())

    def _line(self):
        """A number that the keeper tells: the process's, and later its status."""
        line = b""
        while not line.endswith(b"\n"):
            line += self.told.read(1) or b"-255\n"  # the keeper itself is gone
        return line

    def wait(self, timeout=None):
        if self.returncode is None:
            if not select.select([self.told], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("a fork", timeout)
            self.returncode = int(self._line())
            self.told.close()
        return self.returncode

    def send_signal(self, number):
        if self.returncode is None and not select.select([self.told], [], [], 0)[0]:
            with suppress(ProcessLookupError):  # it ended, and its keeper is about to tell
                os.kill(self.pid, number)

    def kill(self):
        self.send_signal(signal.SIGKILL)

    def communicate(self, timeout=None):
        self.stdin.close()
        with self.stdout, self.stderr, ThreadPoolExecutor() as threads:
            texts = threads.map(lambda stream: stream.read(), (self.stdout, self.stderr))
            self.wait(timeout)
            return tuple(texts)


def asked(link):
    """Waits for requests; returns, in a fork of its own for each, what it is to run."""
    keepers = []
    while True:
        request, given, _, _ = socket.recv_fds(link, 1 << 16, 4)
        if not request:
            for keeper in keepers:
                os.waitpid(keeper, 0)  # and so what it used is counted
            os._exit(0)
        if not (keeper := os.fork()):
            break
        keepers.append(keeper)
        for one in given:
            os.close(one)
    link.close()
    *streams, tells = given
    if pid := os.fork():  # in the keeper
        for one in streams:
            os.close(one)
        os.write(tells, b"%d\n" % pid)
        _, status = os.waitpid(pid, 0)
        os.write(tells, b"%d\n" % os.waitstatus_to_exitcode(status))
        os._exit(0)
    os.close(tells)
    for number, one in enumerate(streams):
        os.dup2(one, number)
        os.close(one)
    arguments, more = json.loads(request)
    os.environ.update(more)
    return arguments


if __name__ == "__main__":
    for name in sys.argv[2:]:
        import_module(name)
    sys.argv = asked(socket.socket(fileno=int(sys.argv[1])))
    sys.path.insert(0, str(Path(sys.argv[0]).parent))
    runpy.run_path(sys.argv[0], run_name="__main__")
