"""Rules for requests that a browser may have sent: Host, Origin, Sec-Fetch-Site and content type."""

import contextlib

import pytest

from penstock.port_policy import BrowserPolicy, checked_host, checked_origin, host_fault
from penstock.protocol.errors import HostNotAllowed, InferenceError, OriginNotAllowed, UnsupportedMedia

HERE = "127.0.0.1"
PAGE = b"https://page.example"
JSON = (b"content-type", b"application/json")


def refused_with(
    policy: BrowserPolicy,
    headers: list[tuple[bytes, bytes]],
    *,
    method: str = "POST",
    local_address: str = HERE,
    is_trusted: bool = False,
    takes_any_type: bool = False,
) -> type[InferenceError] | None:
    """The refusal's type; None if the request is served. The message says how to allow it."""
    raised: InferenceError | None = None
    try:
        policy.check(method, headers, local_address=local_address, is_trusted=is_trusted, takes_any_type=takes_any_type)
    except InferenceError as error:
        raised = error
    assert raised is None or raised.message.endswith(("--allowed-host", "--cors-origin", "application/json"))
    return type(raised) if raised is not None else None


@pytest.mark.parametrize(
    ("host", "is_allowed"),
    [
        ("localhost", True),
        ("localhost:8000", True),
        ("LocalHost.:8000", True),
        ("127.0.0.1", True),
        ("127.8.9.10:1", True),
        ("[::1]:8000", True),
        ("[0:0:0:0:0:0:0:1]", True),
        ("[::ffff:127.0.0.1]:8000", True),
        ("10.0.0.5:8000", True),  # the address that the client connected to
        ("[::ffff:10.0.0.5]", True),
        ("10.0.0.6", False),
        ("[fe80::1]", False),
        ("0.0.0.0:8000", False),
        ("page.example", False),
        ("127.0.0.1.page.example:8000", False),
        ("localhost.page.example", False),
        ("notlocalhost", False),
        ("2130706433", False),
        ("127.1", False),
    ],
)
@pytest.mark.parametrize("method", ["GET", "POST"])
def test_host_rule_allows_loopback_and_own_addresses_only(host: str, is_allowed: bool, method: str) -> None:
    """A foreign name that resolves to this machine (DNS rebinding) is refused, also for reads."""
    refusal = refused_with(BrowserPolicy(), [(b"host", host.encode())], method=method, local_address="10.0.0.5")
    assert refusal is (None if is_allowed else HostNotAllowed)


@pytest.mark.parametrize(
    ("allowed", "host", "is_allowed"),
    [
        ("gateway", "gateway:8000", True),
        ("Gateway.Example.", "gateway.example", True),
        ("gateway", "gateway.example", False),
        ("*.example", "a.b.example", True),
        ("*.example", "example", False),
        ("*.example", "badexample", False),
        ("192.0.2.7", "192.0.2.7:8000", True),
        ("2001:db8::7", "[2001:db8:0::7]:80", True),
        ("*", "anything.example", True),
    ],
)
def test_host_rule_allows_what_the_operator_named(allowed: str, host: str, is_allowed: bool) -> None:
    """--allowed-host takes names, addresses, all names below a domain, and any."""
    refusal = refused_with(BrowserPolicy(allowed_hosts=[allowed]), [(b"host", host.encode())])
    assert refusal is (None if is_allowed else HostNotAllowed)


@pytest.mark.parametrize("bound", ["gateway.example", "0.0.0.0", "::"])
def test_host_rule_allows_the_bound_address_as_it_was_written(bound: str) -> None:
    """The address given with --host is allowed."""
    host = f"[{bound}]:8000" if ":" in bound else f"{bound}:8000"
    assert refused_with(BrowserPolicy(bound), [(b"host", host.encode())]) is None


def test_host_rule_is_for_clients_without_a_key() -> None:
    """A valid key, a health path, and HTTP/1.0 without a Host are served under any name."""
    assert refused_with(BrowserPolicy(), [(b"host", b"gateway.example")], is_trusted=True) is None
    assert refused_with(BrowserPolicy(), []) is None


@pytest.mark.parametrize(
    ("headers", "is_allowed"),
    [
        ([], True),
        ([(b"origin", b"http://localhost:8000")], True),
        ([(b"origin", b"HTTP://LOCALHOST:8000")], True),
        ([(b"origin", b"http://localhost:8000"), (b"sec-fetch-site", b"same-origin")], True),
        ([(b"sec-fetch-site", b"none")], True),
        ([(b"referer", b"http://localhost:8000/")], True),
        ([(b"origin", b"http://localhost:8000"), (b"sec-fetch-site", b"cross-site")], False),
        ([(b"origin", b"http://localhost:3000")], False),
        ([(b"origin", b"http://localhost")], False),
        ([(b"origin", b"http://127.0.0.1:8000")], False),
        ([(b"origin", PAGE)], False),
        ([(b"origin", b"null")], False),
        ([(b"origin", b"")], False),
        ([(b"origin", b"http://localhost:8000@page.example")], False),
        ([(b"sec-fetch-site", b"cross-site")], False),
        ([(b"sec-fetch-site", b"same-site")], False),
    ],
)
@pytest.mark.parametrize("is_trusted", [False, True])
def test_page_of_another_origin_changes_nothing(
    headers: list[tuple[bytes, bytes]], is_allowed: bool, is_trusted: bool
) -> None:
    """Programs and the server's own pages may; a valid key does not allow it for other pages."""
    sent = [(b"host", b"localhost:8000"), JSON, *headers]
    refusal = refused_with(BrowserPolicy(), sent, is_trusted=is_trusted)
    assert refusal is (None if is_allowed else OriginNotAllowed)
    assert refused_with(BrowserPolicy(), sent, method="GET") is None


@pytest.mark.parametrize(
    ("origin", "host", "is_allowed"),
    [
        (b"https://gateway.example", b"gateway.example", True),  # a proxy terminates TLS
        (b"https://gateway.example", b"gateway.example:443", True),
        (b"http://gateway.example", b"gateway.example:80", True),
        (b"http://[::1]:8000", b"[::1]:8000", True),
        (b"https://gateway.example:444", b"gateway.example", False),
    ],
)
def test_own_page_is_known_by_host_and_port(origin: bytes, host: bytes, is_allowed: bool) -> None:
    """The scheme's default port may be omitted in Host and Origin."""
    policy = BrowserPolicy(allowed_hosts=["gateway.example"])
    refusal = refused_with(policy, [(b"host", host), (b"origin", origin)])
    assert refusal is (None if is_allowed else OriginNotAllowed)


def test_page_that_the_operator_named_may_call_from_another_site() -> None:
    """--cors-origin allows only that origin, with or without its default port."""
    policy = BrowserPolicy(cors_origins=["https://Page.example:443"])
    site = (b"sec-fetch-site", b"cross-site")
    assert refused_with(policy, [(b"host", b"localhost"), (b"origin", PAGE), site, JSON]) is None
    assert refused_with(policy, [(b"host", b"localhost"), (b"origin", PAGE + b":8443"), site]) is OriginNotAllowed
    assert policy.cors_origins == ("https://page.example",)


@pytest.mark.parametrize("mark", [(b"origin", b"http://localhost"), (b"referer", b"x"), (b"sec-fetch-site", b"none")])
@pytest.mark.parametrize(
    "kind", [b"text/plain;charset=UTF-8", b"Multipart/Form-Data; boundary=x", b"application/x-www-form-urlencoded"]
)
def test_body_types_that_need_no_preflight_are_refused_from_pages_only(mark: tuple[bytes, bytes], kind: bytes) -> None:
    """curl -d sends a form type and is served; an endpoint for pictures accepts any type from an allowed page."""
    head = [(b"host", b"localhost"), (b"content-type", kind)]
    assert refused_with(BrowserPolicy(), head) is None
    assert refused_with(BrowserPolicy(), [*head, mark]) is UnsupportedMedia
    assert refused_with(BrowserPolicy(), [*head, mark], takes_any_type=True) is None
    assert refused_with(BrowserPolicy(), [(b"host", b"localhost"), mark]) is None  # no content type: read as JSON


@pytest.mark.parametrize("text", ["http://gateway", "gateway:8000", "", "a b", "user@gateway", "*.10.0.0.1", "**"])
def test_allowed_host_that_no_client_sends_is_refused_at_start(text: str) -> None:
    """The message has the value and the expected form."""
    with pytest.raises(ValueError, match=r"allowed_host is .*give a name or IP address"):
        checked_host(text)


@pytest.mark.parametrize("text", ["*", "null", "page.example", "https://", "https://page.example/path", "https://a b"])
def test_cors_origin_that_no_browser_sends_is_refused_at_start(text: str) -> None:
    """There is also no value that allows every page."""
    with pytest.raises(ValueError, match=r"cors_origin is .*https://console\.example:8443"):
        checked_origin(text)


@pytest.mark.parametrize(
    ("target", "version", "hosts", "fault"),
    [
        (b"/", "1.1", [b"a"], ""),
        (b"/", "1.0", [], ""),
        (b"/", "1.0", [b"a"], ""),
        (b"*", "1.1", [b"a:1"], ""),
        (b"http://A.:1/x", "1.1", [b"a:1"], ""),
        (b"/", "0.9", [], "HTTP/0.9 is not served"),
        (b"/", "1.1", [], "no Host header"),
        (b"/", "1.1", [b"a", b"a"], "2 times"),
        (b"/", "1.1", [b""], "Host header is ''"),
        (b"/", "1.1", [b"u@a"], "Host header is 'u@a'"),
        (b"/", "1.1", [b"a/b"], "HOST:PORT"),
        (b"/", "1.1", [b"a, b"], "HOST:PORT"),
        (b"/", "1.1", [b"a:99999"], "HOST:PORT"),
        (b"/", "1.1", [b"a:x"], "HOST:PORT"),
        (b"/", "1.1", [b"[::1"], "HOST:PORT"),
        (b"/", "1.1", [b"[1.2.3.4]x"], "HOST:PORT"),
        (b"/", "1.1", [b"."], "HOST:PORT"),
        (b"/", "1.1", [b"\xc3\xa4"], "HOST:PORT"),
        (b"http://b/x", "1.1", [b"a"], "names another host"),
        (b"http://u@a/x", "1.1", [b"a"], "names another host"),
        (b"HTTP://b:1/x", "1.0", [b"b"], "names another host"),
    ],
)
def test_host_header_is_one_and_well_formed(target: bytes, version: str, hosts: list[bytes], fault: str) -> None:
    """By RFC 9112 a missing, repeated, malformed or contradictory Host is an error that the message names."""
    found = host_fault(target, version, [(b"x", b"y"), *((b"host", host) for host in hosts)])
    assert bool(found) == bool(fault)
    assert fault in found


@pytest.mark.parametrize(
    ("bound", "client", "is_served"),
    [
        ("127.0.0.1", None, True),
        ("127.0.0.1", "127.0.0.1", True),
        ("127.0.0.1", "::1", True),
        ("127.0.0.1", "203.0.113.9", False),
        ("::1", "fe80::1%eth0", False),
        ("localhost", "not-an-address", False),
        ("0.0.0.0", "203.0.113.9", True),  # other machines can call it themselves
    ],
)
def test_console_opens_no_server_of_this_machine_to_others(bound: str, client: str | None, is_served: bool) -> None:
    """What a console forwards for another machine is refused by a server without keys that listens on loopback."""
    headers = [] if client is None else [(b"x-penstock-client-address", client.encode())]
    with contextlib.nullcontext() if is_served else pytest.raises(OriginNotAllowed, match=r"--access-file"):
        BrowserPolicy(bound).check_without_keys(headers)
