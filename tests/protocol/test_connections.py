"""Which connections to a port are closed so that its limits hold."""

from ipaddress import ip_network

import pytest

from penstock.port_policy import OpenConnection, PortLimits, excess_connections

PROXY = ip_network("10.1.0.0/16")


def idle_s(connection: OpenConnection) -> float:
    """Connections with a low descriptor were opened first and have been idle longest."""
    return 1000.0 - connection.descriptor


def closed(counts: dict[str, int], limits: PortLimits) -> dict[str, list[int]]:
    """The connections to close by address. counts: open connections of each address."""
    connections = [
        OpenConnection(number, number, address, 1024 + number)
        for address, count in counts.items()
        for number in range(count)
    ]
    excess = excess_connections(connections, limits, idle_s)
    return {
        address: [one.descriptor for one in excess if one.address == address]
        for address in dict.fromkeys(one.address for one in excess)
    }


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        ({"192.0.2.1": 4, "192.0.2.2": 4}, {}),
        ({"192.0.2.1": 7, "192.0.2.2": 4}, {"192.0.2.1": [0, 1, 2]}),
        ({"10.1.2.3": 14}, {}),
        ({"::ffff:10.1.2.3": 14}, {}),
        ({"10.2.0.1": 6}, {"10.2.0.1": [0, 1]}),
        ({"10.1.2.3": 16}, {"10.1.2.3": [0, 1]}),
        ({"10.1.2.3": 14, "192.0.2.1": 2}, {"10.1.2.3": [0, 1]}),
    ],
    ids=[
        "within all limits",
        "one address over its limit loses its longest idle ones",
        "a proxy has no limit of its own",
        "a proxy as an IPv6 socket shows it",
        "another network is no proxy",
        "an eighth of the total stays free",
        "the address with the most loses first",
    ],
)
def test_connections_beyond_a_limit_are_closed_by_address_and_idle_time(
    counts: dict[str, int], expected: dict[str, list[int]]
) -> None:
    """An address loses connections over its limit; a nearly full port closes those of the address with the most."""
    limits = PortLimits(max_connections=16, max_per_address=4, trusted_proxies=(PROXY,))  # type: ignore[arg-type]
    assert closed(counts, limits) == expected


def test_full_port_leaves_a_small_client_its_connections() -> None:
    """If a hundred addresses fill the port, a client with one connection does not lose it."""
    limits = PortLimits(max_connections=400, max_per_address=200)
    excess = closed({f"192.0.2.{number}": 4 for number in range(100)} | {"198.51.100.1": 1}, limits)
    assert sum(map(len, excess.values())) == 401 - 350
    assert "198.51.100.1" not in excess
