"""Which addresses may be connected to, by who named the host and by every notation of an address."""

import pytest

from penstock.outbound import METADATA, OutboundPolicy

PUBLIC = ("93.184.216.34", "2606:4700::1111", "::ffff:93.184.216.34", "64:ff9b::5db8:d822", "2002:5db8:d822::1")
PRIVATE = (
    *("127.0.0.1", "127.9.9.9", "0.0.0.0", "10.1.2.3", "172.16.0.1", "192.168.1.1", "169.254.1.1", "100.64.0.1"),
    "fec0::1",
    *(
        "::1",
        "::",
        "fe80::1",
        "fe80::1%eth0",
        "fc00::1",
        "fd12::1",
        "fec0::1",
        "ff02::1",
        "224.0.0.1",
        "255.255.255.255",
    ),
    *("240.0.0.1", "198.18.0.1", "192.0.2.1", "2001:db8::1", "::ffff:127.0.0.1", "::ffff:10.0.0.1"),
    *("64:ff9b::7f00:1", "64:ff9b::a00:1", "2002:7f00:1::", "2002:a00:1::", "::127.0.0.1", "::10.0.0.1"),
)


@pytest.mark.parametrize("address", PUBLIC)
def test_callers_of_an_api_reach_public_hosts(address: str) -> None:
    """By IPv4, IPv6, and IPv4 addresses in IPv6 notation."""
    assert OutboundPolicy(is_from_api=True).why_refused("camera.example", address) == ""


@pytest.mark.parametrize("address", PRIVATE)
def test_callers_of_an_api_do_not_reach_other_addresses(address: str) -> None:
    """In every notation they are refused, with the address and the flag in the message."""
    why = OutboundPolicy(is_from_api=True).why_refused("camera.example", address)
    assert why.startswith(f"camera.example ({address}) is not a public address")
    assert "--allow-outbound" in why


@pytest.mark.parametrize("address", PUBLIC + PRIVATE)
def test_what_the_operator_wrote_is_used_as_given(address: str) -> None:
    """All addresses except metadata services are allowed."""
    assert OutboundPolicy().why_refused("camera", address) == ""


@pytest.mark.parametrize("is_from_api", [False, True])
@pytest.mark.parametrize("address", [*map(str, METADATA), "::ffff:169.254.169.254", "64:ff9b::a9fe:a9fe"])
def test_metadata_services_are_refused_from_settings_and_api(address: str, is_from_api: bool) -> None:
    """An allowed host name does not allow them; an allowed address or network does."""
    named = OutboundPolicy(("camera.example", "10.0.0.0/8"), is_from_api=is_from_api)
    assert "metadata service" in named.why_refused("camera.example", address)
    allowed = OutboundPolicy(tuple(map(str, METADATA)), is_from_api=is_from_api)
    assert allowed.why_refused("camera.example", address) == ""


@pytest.mark.parametrize(
    ("allowed", "host", "address"),
    [
        ("10.0.0.0/8", "camera", "10.255.0.1"),
        ("10.0.0.0/8", "camera", "::ffff:10.1.2.3"),
        ("127.0.0.1", "127.0.0.1", "127.0.0.1"),
        ("fd12::/16", "camera", "fd12::9"),
        ("[::1]", "::1", "::1"),
        ("Camera.Local.", "camera.local", "192.168.1.7"),
        ("camera.local", "CAMERA.local.", "192.168.1.7"),
    ],
)
def test_allowed_values_open_what_they_name(allowed: str, host: str, address: str) -> None:
    """An address, a network, or a name in upper or lower case, with or without a final dot."""
    assert OutboundPolicy((allowed,), is_from_api=True).why_refused(host, address) == ""


@pytest.mark.parametrize(
    ("allowed", "host", "address"),
    [
        ("10.0.0.0/16", "camera", "10.1.0.1"),
        ("camera.local", "other.local", "192.168.1.7"),
        ("camera.local", "not.camera.local", "192.168.1.7"),
        ("127.0.0.1", "localhost", "::1"),
    ],
)
def test_allowed_values_open_nothing_else(allowed: str, host: str, address: str) -> None:
    """Names with the same ending and addresses outside the network are refused."""
    assert OutboundPolicy((allowed,), is_from_api=True).why_refused(host, address)


@pytest.mark.parametrize("host", ["127.0.0.1", "[::1]", "localhost", "LOCALHOST.", "a.localhost", "169.254.169.254"])
def test_a_host_that_says_where_it_leads_is_refused_before_it_is_looked_up(host: str) -> None:
    """This holds for addresses and for names of this machine."""
    assert OutboundPolicy(is_from_api=True).why_refused_unresolved(host)


@pytest.mark.parametrize("host", ["camera.example", "localhost.example", "93.184.216.34"])
def test_other_hosts_are_looked_up_first(host: str) -> None:
    """Other names must be resolved before the check."""
    assert OutboundPolicy(is_from_api=True).why_refused_unresolved(host) == ""


@pytest.mark.parametrize("value", ["", "10.0.0.0/99", "10.0.0.1/8", "999.1.2.3", "a b", "http://camera", "camera:80"])
def test_what_is_no_address_network_or_name_is_refused_at_start(value: str) -> None:
    """The message has the value and the expected form."""
    with pytest.raises(ValueError, match=r"--allow-outbound .* is not an address, a network or a host name"):
        OutboundPolicy((value,))
