"""Connects processes over sockets before any collective."""

from __future__ import annotations

import hashlib
import json
import secrets
import socket
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

from jaxpar.arguments.calls import called, value_error
from jaxpar.processes.heartbeat import telling
from jaxpar.processes.messages import read_message, write_message


@dataclass
class _Meeting:
    """The place where `agree` and `guard` find process 0."""

    host: str = ""  # of process 0; empty until processes have met
    ports: dict[str, int] = field(default_factory=dict[str, int])
    token: str = ""
    listeners: dict[str, socket.socket] = field(default_factory=dict[str, socket.socket])

    def open(self, host: str) -> None:
        self.host, self.token = host, secrets.token_hex(16)
        self.listeners = {name: _listening(("", 0)) for name in ("agree", "guard")}
        self.ports = {name: listener.getsockname()[1] for name, listener in self.listeners.items()}

    def told(self) -> dict[str, Any]:
        return {"host": self.host, "ports": self.ports, "token": self.token}

    def hear(self, told: dict[str, Any]) -> None:
        self.host, self.ports, self.token = told["host"], told["ports"], told["token"]


_meeting = _Meeting()


def met() -> bool:
    return bool(_meeting.host)


def arrange() -> None:
    # Without an address, a first collective shares the place to meet.
    told = np.zeros(256, np.uint8)
    if jax.process_index() == 0:
        _meeting.open(socket.getfqdn())
        text = json.dumps(_meeting.told()).encode()
        told[: len(text)] = np.frombuffer(text, np.uint8)
    payload = np.asarray(multihost_utils.broadcast_one_to_all(told)).tobytes().rstrip(b"\0")
    _meeting.hear(json.loads(payload))


def board_listener() -> socket.socket:
    """Returns process 0's socket for guards' reports."""
    return _meeting.listeners["guard"]


def board_address() -> tuple[str, int]:
    """Returns the address for guards' reports."""
    return _meeting.host, _meeting.ports["guard"]


def token() -> str:
    return _meeting.token


def call_roll(
    address: tuple[str, int], bound: tuple[str, int], count: int, rank: int, seconds: float
) -> None:
    """Waits for all processes at the coordinator's address, before JAX takes it over.

    `bound` is where process 0 listens for it.

    Process 0 tells the others where `agree` and `guard` will find it.
    """
    if rank:
        _say_here(address, rank, seconds)
        return
    present: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    with _listening(bound) as roll:
        _accept(present, roll, set(range(1, count)), seconds, lambda said: "rank" in said)
    _meeting.open(address[0])
    for peer, _ in present.values():
        write_message(peer, _meeting.told())
        peer.close()


def _listening(address: tuple[str, int]) -> socket.socket:
    host, port = address
    if host in ("", "::") and socket.has_dualstack_ipv6():
        return socket.create_server((host, port), family=socket.AF_INET6, dualstack_ipv6=True)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family)


def _say_here(address: tuple[str, int], rank: int, seconds: float) -> None:
    peer = connect(address, seconds)
    write_message(peer, {"rank": rank})
    answer = read_message(peer)
    peer.close()
    if "failure" in answer:
        raise TimeoutError(answer["failure"])
    _meeting.hear(answer)


def compare(texts: dict[str, list[str]], seconds: float) -> None:
    """Raises in all processes if a process's text differs."""
    if not met():
        arrange()
    if jax.process_index() == 0:
        _gather_and_compare(texts, seconds)
        return
    with telling(seconds, lambda: "process 0 has not answered"):
        _send_and_hear(texts, seconds)


def _gather_and_compare(texts: dict[str, list[str]], seconds: float) -> None:
    # Process 0 compares digests, and asks only for a text that differs.
    ours = {name: _digest(lines) for name, lines in texts.items()}
    others = set(range(1, jax.process_count()))
    present: dict[int, tuple[socket.socket, dict[str, Any]]] = {}

    def late() -> str:
        missing = sorted(others - set(present))
        return f"{processes_text(missing)} {'has' if len(missing) == 1 else 'have'} not come"

    with telling(seconds, late):
        _accept(
            present,
            _meeting.listeners["agree"],
            others,
            seconds,
            lambda said: said.get("token") == _meeting.token,
        )
    verdict = ""
    for rank, (peer, said) in sorted(present.items()):
        theirs = said["digests"]
        different = [name for name in {**ours, **theirs} if ours.get(name) != theirs.get(name)]
        if different and not verdict:
            name = different[0]
            write_message(peer, {"want": name})
            verdict = _difference(name, rank, texts.get(name), read_message(peer)["lines"])
    for peer, _ in present.values():
        write_message(peer, {"verdict": verdict})
        peer.close()
    if verdict:
        raise value_error(verdict)


def _send_and_hear(texts: dict[str, list[str]], seconds: float) -> None:
    peer = connect((_meeting.host, _meeting.ports["agree"]), seconds)
    digests = {name: _digest(lines) for name, lines in texts.items()}
    write_message(peer, {"rank": jax.process_index(), "token": _meeting.token, "digests": digests})
    try:
        answer = read_message(peer)
        if "want" in answer:
            write_message(peer, {"lines": texts.get(answer["want"])})
            answer = read_message(peer)
    except (TimeoutError, ConnectionError) as reason:
        raise TimeoutError(
            f"{called()}: process 0 did not answer within {seconds:g} s; is it alive, and does it "
            "call agree?"
        ) from reason
    finally:
        peer.close()
    if "failure" in answer:
        raise TimeoutError(answer["failure"])
    if answer["verdict"]:
        raise value_error(answer["verdict"])


def _accept(
    present: dict[int, tuple[socket.socket, dict[str, Any]]],
    listener: socket.socket,
    wanted: set[int],
    seconds: float,
    known: Callable[[dict[str, Any]], bool],
) -> None:
    """Fills `present` with those that come, until all that are wanted are there."""
    end = time.monotonic() + seconds
    while wanted - set(present):
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            peer, _ = listener.accept()
            peer.settimeout(max(1.0, end - time.monotonic()))
            said = read_message(peer)
        except TimeoutError:
            missing = sorted(wanted - set(present))
            text = (
                f"{called()}: after {seconds:g} s {processes_text(missing)} of {len(wanted) + 1} "
                f"{'is' if len(missing) == 1 else 'are'} missing: look at the output of "
                f"{'its host' if len(missing) == 1 else 'their hosts'}, or give a longer timeout_s"
            )
            for other, _ in present.values():
                write_message(other, {"failure": text})
                other.close()
            raise TimeoutError(text) from None
        except (ConnectionError, ValueError):
            continue  # no message of ours
        if known(said) and said.get("rank") in wanted:
            present[said["rank"]] = (peer, said)
        else:
            peer.close()


def connect(address: tuple[str, int], seconds: float) -> socket.socket:
    # Process 0 may not listen yet.
    end = time.monotonic() + seconds
    while True:
        try:
            peer = socket.create_connection(address, timeout=max(0.1, end - time.monotonic()))
        except OSError as reason:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{called()}: after {seconds:g} s process 0 is missing: nothing answers at "
                    f"{address[0]}:{address[1]} ({reason}); start it, or look at its output"
                ) from None
            time.sleep(0.1)
            continue
        # Process 0 waits as long for others before it says who is missing, so wait longer for it.
        peer.settimeout(seconds + 5)
        return peer


def _difference(name: str, rank: int, ours: list[str] | None, theirs: list[str] | None) -> str:
    if ours is None or theirs is None:
        has, lacks = (rank, 0) if ours is None else (0, rank)
        return f"process {has} compares {name!r}, and process {lacks} does not"
    number = next(
        (i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b),
        min(len(ours), len(theirs)),
    )
    here, there = (
        repr(lines[number].strip()[:300]) if number < len(lines) else "nothing more"
        for lines in (ours, theirs)
    )
    return (
        f"processes 0 and {rank} differ in {name!r}, line {number + 1}: process 0 has {here}, "
        f"process {rank} has {there}; make them equal before a collective waits for ever, or "
        "returns garbage"
    )


def _digest(lines: list[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def processes_text(ranks: Sequence[int]) -> str:
    """Returns text such as `processes 1, 2, 5-63`."""
    runs: list[list[int]] = []
    for rank in ranks:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    texts = [f"{run[0]}-{run[-1]}" if len(run) > 3 else ", ".join(map(str, run)) for run in runs]
    return f"process{'' if len(ranks) == 1 else 'es'} {', '.join(texts)}"
