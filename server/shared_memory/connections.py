"""Which of gRPC's connections are gone, as the kernel tells it. Where it tells nothing, none is."""

import struct
from collections.abc import Collection
from ipaddress import IPv4Address, ip_address
from pathlib import Path
from urllib.parse import unquote

TABLES = (Path("/proc/net/tcp"), Path("/proc/net/tcp6"))
_ESTABLISHED = "01"


def gone(connections: Collection[str], tables: Collection[Path] = TABLES) -> set[str]:
    """Those of the connections, in gRPC's words ("ipv4:127.0.0.1:53210"), that are not established. Reads files."""
    try:
        text = b"\n".join(table.read_bytes() for table in tables if table.exists())
    except OSError:
        return set()
    if not text:
        return set()
    return {one for one in connections if (rows := _rows_of(one)) and not any(row in text for row in rows)}


def _rows_of(connection: str) -> tuple[bytes, ...]:
    """What a table has of it while it is established: the peer's address and the state. Empty for what is no TCP."""
    scheme, _, rest = connection.partition(":")
    host, _, port = unquote(rest).rpartition(":")
    if scheme not in ("ipv4", "ipv6") or not port.isdigit():
        return ()
    try:
        address = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return ()
    forms = [address.packed]
    if isinstance(address, IPv4Address):
        forms.append(bytes(10) + b"\xff\xff" + address.packed)  # a listener on [::] has it so
    return tuple(f" {_hexadecimal(form)}:{int(port):04X} {_ESTABLISHED} ".encode() for form in forms)


def _hexadecimal(packed: bytes) -> str:
    """Each four bytes as the machine's own number, as the kernel prints them."""
    return "".join(f"{word:08X}" for (word,) in struct.iter_unpack("=I", packed))
