"""Transfers between TPU slices, which a program's text has as sends and receives of the host.

A program for several slices is the program of each: other collectives number a slice's devices.
"""

import re

from jaxpar.tools.program.costs import Message
from jaxpar.tools.program.hlo import Hlo, Instruction, integers

_RUNTIME = '_xla_host_transfer_handler_name="xla_megascale_runtime"'
_TARGETS = re.compile(r"_xla_megascale_target=\{(\{[0-9,{}\->]*\})\}")
_PERMUTE = "ONE_TO_ONE"


def is_between_slices(i: Instruction) -> bool:
    return _RUNTIME in i.attributes


def sends_of(hlo: Hlo) -> dict[str, Instruction]:
    """Returns the send of each transfer, by the channel of its receive."""
    instructions = [i for body in hlo.computations.values() for i in body.instructions]
    sends = {name_of(i): i for i in instructions if i.opcode == "send" and is_between_slices(i)}
    receives = [i for i in instructions if i.opcode == "recv" and is_between_slices(i)]
    return {channel_of(i): sends[name_of(i)] for i in receives if name_of(i) in sends}


def name_of(i: Instruction) -> str:
    """Returns the name that a send and its receive share."""
    return i.after('_xla_host_transfer_rendezvous="')


def channel_of(i: Instruction) -> str:
    return i.after("channel_id=")


def message_of_send(send: Instruction) -> Message:
    kind = send.after('_xla_megascale_transfer_type="')
    payload = float(send.operands[0].bytes)
    match = _TARGETS.search(send.attributes)
    listed = re.findall(r"\{([0-9,\->]+)\}", match.group(1)) if match else []
    numbers = [integers(text) for text in listed]
    if kind == _PERMUTE:
        pairs = tuple((source, target) for source, target in numbers)
        return Message("collective-permute", payload, pairs=pairs, between_slices=True)
    # Without a list: each device and those of its number in all slices.
    return Message(kind.lower().replace("_", "-"), payload, groups=numbers, between_slices=True)
