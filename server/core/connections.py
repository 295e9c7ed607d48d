"""Limits on the connections to one port: in total, and from one address. Sans-IO."""

import heapq
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from ipaddress import IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple

Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class PortLimits:
    """max_connections: to the port of this process. max_per_address: of these, from one client address.

    trusted_proxies: networks whose addresses forward many clients; only max_connections applies to them.
    """

    max_connections: int = 16_384
    max_per_address: int = 4_096
    trusted_proxies: tuple[Network, ...] = ()

    def allowed_from(self, address: str) -> int:
        """How many connections the address may have open. An empty address (a Unix socket) has no limit of its own."""
        if not address or self.is_proxy(address):
            return self.max_connections
        return min(self.max_per_address, self.max_connections)

    def is_proxy(self, address: str) -> bool:
        """Whether the address forwards many clients."""
        if not self.trusted_proxies:
            return False
        parsed = ip_address(address.partition("%")[0])
        if isinstance(parsed, IPv6Address) and parsed.ipv4_mapped is not None:
            parsed = parsed.ipv4_mapped
        return any(parsed in network for network in self.trusted_proxies)


class Client(NamedTuple):
    """The other end of a connection."""

    address: str
    port: int


@dataclass(frozen=True, slots=True)
class OpenConnection:
    """descriptor, inode: of its socket in this process. address, port: of its client."""

    descriptor: int
    inode: int
    address: str
    port: int


def excess_connections(
    connections: Iterable[OpenConnection], limits: PortLimits, idle_s: Callable[[OpenConnection], float]
) -> list[OpenConnection]:
    """The connections to close so that the limits hold. idle_s: seconds since a connection last had data.

    Each address loses its longest idle connections first. While the port is nearly full, the address with the most
    connections loses the next one: an eighth of max_connections stays free for new clients.
    """
    by_address: dict[str, list[OpenConnection]] = {}
    for one in connections:
        by_address.setdefault(one.address, []).append(one)
    surplus = {address: max(0, len(group) - limits.allowed_from(address)) for address, group in by_address.items()}
    left = [(surplus[address] - len(group), address) for address, group in by_address.items()]
    heapq.heapify(left)
    room = limits.max_connections - limits.max_connections // 8
    for _ in range(-sum(count for count, _ in left) - room):
        count, address = left[0]
        surplus[address] += 1
        heapq.heapreplace(left, (count + 1, address))
    return [
        one
        for address, count in surplus.items()
        if count
        for one in sorted(by_address[address], key=idle_s, reverse=True)[:count]
    ]
