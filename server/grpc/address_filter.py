"""A socket filter of Linux by which a listening socket accepts no connections from some addresses.

gRPC's core accepts connections itself, so connections are refused in the kernel, which drops the packets that open
them.
"""

import ctypes
import socket
import struct
from collections.abc import Iterable
from ipaddress import IPv4Address, IPv6Address, ip_address

MAX_ADDRESSES = 64
_ATTACH, _DETACH = 26, 27  # SO_ATTACH_FILTER and SO_DETACH_FILTER
_LOAD, _LOAD_BYTE, _AND, _JUMP, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x30, 0x54, 0x05, 0x15, 0x06
_IP_HEADER = -0x100000 & 0xFFFFFFFF  # base of offsets into the IP header
_SOURCE_V4, _SOURCE_V6 = _IP_HEADER + 12, _IP_HEADER + 8
_TAKE, _DROP = 0xFFFFFFFF, 0
_INSTRUCTION = struct.Struct("=HBBI")  # of classic BPF: code, offset if equal, offset if not, operand

Instruction = tuple[int, int, int, int]


def refuse_connections(listener: socket.socket, addresses: Iterable[str]) -> None:
    """Replaces the listener's filter; without addresses there is none. Raises OSError if filters are not supported."""
    blocked = [ip_address(address.partition("%")[0]) for address in addresses][:MAX_ADDRESSES]
    if not blocked:
        listener.setsockopt(socket.SOL_SOCKET, _DETACH, 0)
        return
    code = b"".join(_INSTRUCTION.pack(*each) for each in filter_program(blocked))
    buffer = ctypes.create_string_buffer(code, len(code))
    program = struct.pack("@HP", len(code) // _INSTRUCTION.size, ctypes.addressof(buffer))
    listener.setsockopt(socket.SOL_SOCKET, _ATTACH, program)


def filter_program(blocked: Iterable[IPv4Address | IPv6Address]) -> list[Instruction]:
    """Drops packets from these addresses. IPv4 clients of an IPv6 socket also have IPv4 headers."""
    v4: list[Instruction] = [(_LOAD, 0, 0, _SOURCE_V4)]
    v6: list[Instruction] = []
    for address in blocked:
        if isinstance(address, IPv4Address):
            v4 += [(_JUMP_IF_EQUAL, 0, 1, int(address)), (_RETURN, 0, 0, _DROP)]
            continue
        for number, word in enumerate(struct.unpack(">4I", address.packed)):
            rest = 2 * (3 - number) + 1  # instructions of this address after the comparison
            v6 += [(_LOAD, 0, 0, _SOURCE_V6 + 4 * number), (_JUMP_IF_EQUAL, 0, rest, word)]
        v6.append((_RETURN, 0, 0, _DROP))
    v4.append((_RETURN, 0, 0, _TAKE))
    version = [(_LOAD_BYTE, 0, 0, _IP_HEADER), (_AND, 0, 0, 0xF0), (_JUMP_IF_EQUAL, 1, 0, 0x40), (_JUMP, 0, 0, len(v4))]
    return [*version, *v4, *v6, (_RETURN, 0, 0, _TAKE)]
