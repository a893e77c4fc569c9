"""Messages over sockets: JSON after its length."""

from __future__ import annotations

import json
import socket
import struct
from contextlib import suppress
from typing import Any


def write_message(peer: socket.socket, message: Any) -> None:
    """Sends a message, if the other side remains."""
    data = json.dumps(message).encode()
    with suppress(OSError):  # the other side reports its end
        peer.sendall(struct.pack("!Q", len(data)) + data)


def read_message(peer: socket.socket) -> dict[str, Any]:
    (size,) = struct.unpack("!Q", _receive(peer, 8))
    if size > 1 << 30:
        raise ConnectionError("no message of ours")
    message: dict[str, Any] = json.loads(_receive(peer, size))
    return message


def _receive(peer: socket.socket, size: int) -> bytes:
    data = bytearray()
    while len(data) < size:
        part = peer.recv(min(1 << 20, size - len(data)))
        if not part:
            raise ConnectionError("the other side is gone")
        data += part
    return bytes(data)
