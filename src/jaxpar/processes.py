"""Programs of several processes: their start, what must be equal in all of them, what they are."""

from __future__ import annotations

import hashlib
import json
import os
import platform
import secrets
import socket
import struct
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AbstractMesh, Mesh

from jaxpar._calls import called, public, readable, value_error
from jaxpar._checks import check_number, check_whole
from jaxpar._types import Integer, Number
from jaxpar.layout import Layout, LayoutMap
from jaxpar.layout._paths import arrays_of

# What says that a launcher or a cloud knows the other processes, as jax.distributed reads it.
_LAUNCHERS = (
    *("SLURM_JOB_ID", "OMPI_MCA_orte_hnp_uri", "JOB_COMPLETION_INDEX", "TPU_NAME"),
    *("TPU_WORKER_HOSTNAMES", "MEGASCALE_COORDINATOR_ADDRESS", "JAX_COORDINATOR_ADDRESS"),
)
_SETTINGS = ("XLA_FLAGS", "LIBTPU_INIT_ARGS", "JAX_ENABLE_X64")


@dataclass
class _Meeting:
    """Where `agree` finds process 0."""

    address: tuple[str, int] | None = None
    token: str = ""
    listener: socket.socket | None = None  # of process 0


_meeting = _Meeting()


@readable
@dataclass(frozen=True)
class Description:
    """What a program runs on, as seen from one process.

    Attributes:
      platform: `"cpu"`, `"gpu"` or `"tpu"`.
      device_kind: of the devices.
      devices: in all processes.
      local_devices: of this one.
      process: the index of this one.
      processes: how many there are.
      host: its name.
      memory: bytes of each local device; None where the backend does not say.
      collectives: those that the backend has, of all that jaxpar uses.
      versions: of jax, jaxlib and jaxpar.

    Example:
      >>> describe().devices
      8
    """

    platform: str
    device_kind: str
    devices: int
    local_devices: int
    process: int
    processes: int
    host: str
    memory: int | None
    collectives: tuple[str, ...]
    versions: Mapping[str, str]

    def __str__(self) -> str:
        memory = "unknown" if self.memory is None else f"{self.memory / 2**30:.1f} GiB"
        versions = ", ".join(f"{name} {number}" for name, number in self.versions.items())
        return (
            f"process {self.process} of {self.processes} on {self.host}: {self.local_devices} of "
            f"{self.devices} x {self.device_kind} ({self.platform}), memory {memory} each\n"
            f"collectives: {', '.join(self.collectives)}\n{versions}"
        )


@public
def initialize(
    coordinator_address: str | None = None,
    num_processes: Integer | None = None,
    process_id: Integer | None = None,
    *,
    timeout_s: Number = 300,
    **more: Any,
) -> Description:
    """Connects the processes of a program; may be called twice, and in a process that is alone.

    Wraps `jax.distributed.initialize`, which knows Slurm, Open MPI, Kubernetes and TPU pods without
    arguments. Where nothing tells of other processes, nothing is done. With an address, the
    processes call the roll first: JAX ends a process whose companions do not come.

    Args:
      coordinator_address: `"host:port"` of process 0, the same in all processes.
      num_processes: how many there are.
      process_id: which one this is, from 0.
      timeout_s: seconds to wait for the others.
      more: as for `jax.distributed.initialize`.

    Returns:
      What there is now: `describe()`.

    Raises:
      TimeoutError: processes that did not come, by their numbers.
      ValueError: an address without the numbers, or the reverse; a number out of range.
      RuntimeError: arrays were made before, when it is too late.

    Example:
      >>> initialize().processes  # alone
      1
    """
    given = (coordinator_address, num_processes, process_id)
    seconds = check_number("timeout_s", timeout_s)
    if jax.distributed.is_initialized():
        return describe()
    if all(value is None for value in given):
        if any(name in os.environ for name in _LAUNCHERS):
            _start(dict(more), seconds)
        return describe()
    if any(value is None for value in given):
        raise value_error(
            "coordinator_address, num_processes and process_id go together, got "
            f"{coordinator_address!r}, {num_processes!r}, {process_id!r}; give all, or none "
            "where a launcher knows them"
        )
    count = check_whole("num_processes", num_processes, 1)
    rank = check_whole("process_id", process_id, 0, count - 1, "the last of num_processes")
    host, _, port = str(coordinator_address).rpartition(":")
    if not host or not port.isdecimal():
        raise value_error(f"coordinator_address must be 'host:port', got {coordinator_address!r}")
    if count > 1:
        _call_roll((host.strip("[]"), int(port)), count, rank, seconds)
    numbers = {"num_processes": count, "process_id": rank}
    _start({"coordinator_address": coordinator_address, **numbers, **more}, seconds)
    return describe()


@public
def agree(*, timeout_s: Number = 60, **values: Any) -> None:
    """Compares what must be equal in all processes, before the first collective.

    A collective among programs that differ hangs, or returns garbage with exit code 0. Versions,
    settings of compilers and the kind and number of devices are compared always.

    Args:
      timeout_s: seconds to wait for the others.
      values: meshes, layouts, pytrees of arrays or shapes, whatever prints itself; and programs, as
        `step=jax.jit(step).lower(*args)`, which compares every operation.

    Raises:
      ValueError: processes that differ: names both sides and the first difference. All processes
        raise it.
      TimeoutError: processes that did not come, by their numbers. JAX waits for dead ones at exit,
        for the `heartbeat_timeout_seconds` of `initialize`.

    Cost: a message of some hundred bytes from each process to process 0, over the network of hosts.

    Example:
      >>> agree(mesh=make_mesh("tp=8"), step=jax.jit(jnp.sin).lower(1.0))  # alone: always
    """
    seconds = check_number("timeout_s", timeout_s)
    texts = {"what it runs on": _surroundings()}
    texts |= {name: list(_lines(value)) for name, value in values.items()}
    if jax.process_count() == 1:
        return
    if _meeting.address is None:
        _arrange()
    if jax.process_index() == 0:
        _gather_and_compare(texts, seconds)
    else:
        _send_and_hear(texts, seconds)


@public
def describe() -> Description:
    """Returns what the program runs on: devices, processes, memory, collectives, versions.

    Example:
      >>> found = describe()
      >>> found.process, found.processes, "psum" in found.collectives
      (0, 1, True)
    """
    local = jax.local_devices()
    stats: dict[str, int] = {}
    with suppress(Exception):  # backends without statistics raise errors of their own
        stats = local[0].memory_stats() or {}
    kind = local[0].platform
    collectives = ("psum", "all_gather", "psum_scatter", "all_to_all", "ppermute")
    if kind in ("tpu", "gpu"):
        collectives += ("ragged_all_to_all",)
    return Description(
        kind,
        local[0].device_kind,
        jax.device_count(),
        len(local),
        jax.process_index(),
        jax.process_count(),
        platform.node(),
        stats.get("bytes_limit"),
        collectives,
        _versions(),
    )


def _start(arguments: dict[str, Any], seconds: float) -> None:
    try:
        given: Any = {"initialization_timeout": max(1, round(seconds)), **arguments}
        jax.distributed.initialize(**given)
    except RuntimeError as reason:
        if "before" not in str(reason):
            raise
        raise RuntimeError(
            f"{called()}: arrays were made or devices were listed before; call it first in the "
            "program"
        ) from reason


def _call_roll(address: tuple[str, int], count: int, rank: int, seconds: float) -> None:
    """Waits for all processes at the coordinator's address, which JAX takes over then.

    Process 0 tells the others where `agree` will find it.
    """
    if rank:
        _say_here(address, rank, seconds)
        return
    listener = socket.create_server(("", 0))
    _meeting.listener, _meeting.token = listener, secrets.token_hex(16)
    _meeting.address = (address[0], listener.getsockname()[1])
    with socket.create_server(("", address[1])) as roll:
        present = _accept(roll, set(range(1, count)), seconds, lambda said: "rank" in said)
    for peer, _ in present.values():
        _write(peer, {"address": _meeting.address, "token": _meeting.token})
        peer.close()


def _say_here(address: tuple[str, int], rank: int, seconds: float) -> None:
    peer = _connect(address, seconds)
    _write(peer, {"rank": rank})
    answer = _read(peer)
    peer.close()
    if "failure" in answer:
        raise TimeoutError(answer["failure"])
    _meeting.address, _meeting.token = tuple(answer["address"]), answer["token"]


def _arrange() -> None:
    """Agrees on a place to meet where no address was given: by the first collective of all."""
    told = np.zeros(128, np.uint8)
    if jax.process_index() == 0:
        _meeting.listener, _meeting.token = socket.create_server(("", 0)), secrets.token_hex(16)
        here = (socket.getfqdn(), _meeting.listener.getsockname()[1])
        text = json.dumps([*here, _meeting.token]).encode()
        told[: len(text)] = np.frombuffer(text, np.uint8)
    found = np.asarray(multihost_utils.broadcast_one_to_all(told)).tobytes().rstrip(b"\0")
    host, port, _meeting.token = json.loads(found)
    _meeting.address = (host, port)


def _gather_and_compare(texts: dict[str, list[str]], seconds: float) -> None:
    """Process 0: hears all others, asks those that differ for their text, and tells everyone."""
    listener = _meeting.listener
    assert listener is not None
    own = {name: _digest(lines) for name, lines in texts.items()}
    others = set(range(1, jax.process_count()))
    present = _accept(listener, others, seconds, lambda said: said.get("token") == _meeting.token)
    verdict = ""
    for rank, (peer, said) in sorted(present.items()):
        theirs = said["digests"]
        different = [name for name in {**own, **theirs} if own.get(name) != theirs.get(name)]
        if different and not verdict:
            name = different[0]
            _write(peer, {"want": name})
            verdict = _difference(name, rank, texts.get(name), _read(peer)["lines"])
    for peer, _ in present.values():
        _write(peer, {"verdict": verdict})
        peer.close()
    if verdict:
        raise value_error(verdict)


def _send_and_hear(texts: dict[str, list[str]], seconds: float) -> None:
    """The others."""
    assert _meeting.address is not None
    peer = _connect(_meeting.address, seconds)
    digests = {name: _digest(lines) for name, lines in texts.items()}
    _write(peer, {"rank": jax.process_index(), "token": _meeting.token, "digests": digests})
    try:
        answer = _read(peer)
        if "want" in answer:
            _write(peer, {"lines": texts.get(answer["want"])})
            answer = _read(peer)
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
    listener: socket.socket,
    wanted: set[int],
    seconds: float,
    known: Callable[[dict[str, Any]], bool],
) -> dict[int, tuple[socket.socket, dict[str, Any]]]:
    """Connections of all these processes, with their first messages; or says who is missing."""
    end = time.monotonic() + seconds
    present: dict[int, tuple[socket.socket, dict[str, Any]]] = {}
    while wanted - set(present):
        listener.settimeout(max(0.01, end - time.monotonic()))
        try:
            peer, _ = listener.accept()
            peer.settimeout(max(1.0, end - time.monotonic()))
            said = _read(peer)
        except TimeoutError:
            missing = sorted(wanted - set(present))
            text = (
                f"{called()}: after {seconds:g} s {_processes(missing)} of {len(wanted) + 1} "
                f"{'is' if len(missing) == 1 else 'are'} missing: look at the output of "
                f"{'its host' if len(missing) == 1 else 'their hosts'}, or give a longer timeout_s"
            )
            for other, _ in present.values():
                _write(other, {"failure": text})
                other.close()
            raise TimeoutError(text) from None
        except (ConnectionError, ValueError):
            continue  # not one of ours
        if known(said) and said.get("rank") in wanted:
            present[said["rank"]] = (peer, said)
        else:
            peer.close()
    return present


def _connect(address: tuple[str, int], seconds: float) -> socket.socket:
    """A connection to process 0, which may not be there yet."""
    end = time.monotonic() + seconds
    while True:
        try:
            peer = socket.create_connection(address, timeout=max(0.1, end - time.monotonic()))
        except OSError as reason:
            if time.monotonic() > end:
                raise TimeoutError(
                    f"{called()}: after {seconds:g} s process 0 is missing: nothing answers at "
                    f"{address[0]}:{address[1]} ({reason})"
                ) from None
            time.sleep(0.1)
            continue
        # Process 0 waits for others as long, and says who is missing: wait longer for its answer.
        peer.settimeout(seconds + 5)
        return peer


def _write(peer: socket.socket, message: Any) -> None:
    data = json.dumps(message).encode()
    with suppress(OSError):  # the other side reports its end
        peer.sendall(struct.pack("!Q", len(data)) + data)


def _read(peer: socket.socket) -> dict[str, Any]:
    (size,) = struct.unpack("!Q", _receive(peer, 8))
    if size > 1 << 30:
        raise ConnectionError("no message of ours")
    found: dict[str, Any] = json.loads(_receive(peer, size))
    return found


def _receive(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(1 << 20, size - len(data)))
        if not part:
            raise ConnectionError("the other side is gone")
        data += part
    return bytes(data)


def _difference(name: str, rank: int, ours: list[str] | None, theirs: list[str] | None) -> str:
    """Both sides of the first line that differs."""
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


def _lines(value: Any) -> Iterator[str]:
    """A value as text, of which equal values have the same."""
    match value:
        case Mesh():
            yield f"axes {dict(value.shape)}"
            for index, device in np.ndenumerate(value.devices):
                yield f"{index}: device {device.id} of process {device.process_index}"
        case AbstractMesh():
            yield f"axes {dict(value.shape)}"
        case Layout():
            yield f"mesh {dict(value.mesh.shape)}"
            for path, array in value.items():
                yield f"{path}: {array.dtype}{list(array.shape)} {array.spec}"
        case LayoutMap() | str():
            yield from str(value).splitlines()
        case _ if hasattr(value, "as_text"):  # a program
            yield from value.as_text().splitlines()
        case _:
            arrays = [found for found in arrays_of(value)[0] if found is not None]
            if len(arrays) != len(jax.tree.leaves(value)) or not arrays:
                yield from repr(value).splitlines()
                return
            for path, x in arrays:
                if hasattr(x, "shape"):
                    spec = getattr(getattr(x, "sharding", None), "spec", "")
                    yield f"{path}: {x.dtype}{list(x.shape)} {spec}"
                else:
                    yield f"{path}: {x!r}"


def _surroundings() -> list[str]:
    settings = {name: os.environ.get(name, "") for name in _SETTINGS}
    local = jax.local_devices()
    return [
        *(f"{name} {number}" for name, number in _versions().items()),
        *(f"{name}={text}" for name, text in settings.items()),
        f"{len(local)} local devices of kind {local[0].device_kind}",
    ]


def _versions() -> dict[str, str]:
    found: dict[str, str] = {}
    for name in ("jax", "jaxlib", "jaxpar", "libtpu"):
        with suppress(PackageNotFoundError):
            found[name] = version(name)
    return found


def _processes(ranks: list[int]) -> str:
    return f"process{'' if len(ranks) == 1 else 'es'} {', '.join(map(str, ranks))}"
