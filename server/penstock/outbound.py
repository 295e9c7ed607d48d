"""Which addresses the programs may connect to. Pure: no DNS lookups or connections.

The operator's addresses are used as given. An API client's addresses must be public, or allowed by the operator;
redirects and DNS answers are checked, too. A cloud's metadata service, which returns the machine's credentials, must be
allowed in both cases.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address, ip_network

Address = IPv4Address | IPv6Address
METADATA = frozenset(
    map(ip_address, ("169.254.169.254", "169.254.170.2", "169.254.170.23", "100.100.100.200", "192.0.0.192"))
) | frozenset(map(ip_address, ("fd00:ec2::254", "fd00:ec2::23", "fd20:ce::254")))
FLAG = "--allow-outbound"
_NAT64 = ip_network("64:ff9b::/96")
_NAMES_OF_THIS_MACHINE = re.compile(r"(?:.+\.)?localhost(?:\.localdomain)?", re.IGNORECASE)
_NAME = re.compile(r"(?!-)[A-Za-z0-9_-]{1,63}(?:\.[A-Za-z0-9_-]{1,63})*")


@dataclass(frozen=True, slots=True)
class OutboundPolicy:
    """Decides which addresses may be connected to. Raises ValueError for an invalid value.

    allowed: values of --allow-outbound: addresses, networks (10.1.0.0/16) and host names. is_from_api: whether a client
    of an API named the host, not the operator.
    """

    allowed: tuple[str, ...] = ()
    is_from_api: bool = False
    _networks: tuple[IPv4Network | IPv6Network, ...] = field(init=False, repr=False, compare=False)
    _names: frozenset[str] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        networks, names = _parsed(self.allowed)
        object.__setattr__(self, "_networks", networks)
        object.__setattr__(self, "_names", names)

    def why_refused(self, host: str, address: str) -> str:
        """Why this address of the host may not be connected to; "" if it may.

        host: a name or an address. address: what it resolves to. An allowed name may resolve to any address except a
        metadata service's. Raises ValueError for an invalid address.
        """
        found = _plain(address)
        if any(found in network for network in self._networks):
            return ""
        shown = host if _is_address(host) else f"{host} ({address})"
        if found in METADATA:
            return f"{shown} is a cloud's metadata service; to allow connections to it: {FLAG} {found}"
        if not self.is_from_api or is_public(found) or _name(host) in self._names:
            return ""
        return f"{shown} is not a public address; to allow clients of the API to use it: {FLAG} {found}"

    def why_refused_unresolved(self, host: str) -> str:
        """The same before a DNS lookup: only for hosts that are refused whatever they resolve to."""
        if _is_address(host):
            return self.why_refused(host, host)
        if self.is_from_api and _NAMES_OF_THIS_MACHINE.fullmatch(_name(host)):
            return self.why_refused(host, "127.0.0.1")
        return ""


def is_public(address: Address) -> bool:
    """Whether it is a public unicast address: not loopback, private, link-local, reserved or multicast."""
    is_site_local = isinstance(address, IPv6Address) and address.is_site_local  # deprecated, not covered by is_global
    return address.is_global and not (address.is_multicast or address.is_reserved or is_site_local)


def _plain(address: str) -> Address:
    """The address without a scope. IPv6 forms of an IPv4 address become that IPv4 address."""
    found = ip_address(address.partition("%")[0].strip("[]"))
    if isinstance(found, IPv4Address):
        return found
    if found.ipv4_mapped is not None:
        return found.ipv4_mapped
    if found.sixtofour is not None:
        return found.sixtofour
    if found.teredo is not None:
        return found.teredo[1]
    if found in _NAT64 or (int(found) >> 32 == 0 and int(found) > 1):  # the second case: IPv4-compatible addresses
        return IPv4Address(int(found) & 0xFFFFFFFF)
    return found


def _name(host: str) -> str:
    return host.rstrip(".").lower()


def _is_address(host: str) -> bool:
    try:
        _plain(host)
    except ValueError:
        return False
    return True


def _parsed(values: Iterable[str]) -> tuple[tuple[IPv4Network | IPv6Network, ...], frozenset[str]]:
    networks, names = [], set()
    for value in values:
        try:
            networks.append(ip_network(value.strip("[]")))
        except ValueError as error:
            if "/" in value or not _NAME.fullmatch(_name(value)) or _name(value).replace(".", "").isdecimal():
                raise ValueError(f"{FLAG} {value!r} is not an address, a network or a host name ({error})") from None
            names.add(_name(value))
    return tuple(networks), frozenset(names)
