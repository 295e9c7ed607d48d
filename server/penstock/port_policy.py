"""What a port accepts: requests that browsers send for pages of other sites, and the number of connections. Sans-IO.

Browsers add `Origin`, `Sec-Fetch-Site`, `Referer` and `Host`, which a page cannot forge. Programs such as curl send
only `Host`, so the browser rules do not concern them.
"""

import heapq
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from ipaddress import IPv4Address, IPv4Network, IPv6Address, IPv6Network, ip_address
from typing import NamedTuple

from penstock.protocol.errors import HostNotAllowed, OriginNotAllowed, UnsupportedMedia

Headers = Sequence[tuple[bytes, bytes]]
IpAddress = IPv4Address | IPv6Address

ANY_HOST = "*"
SAFE_METHODS = frozenset(("GET", "HEAD", "OPTIONS"))
_OWN_SITE = (b"", b"same-origin", b"none")
_READ = frozenset((b"host", b"origin", b"referer", b"sec-fetch-site", b"content-type"))
# Content types that a page may send without a CORS preflight
_SIMPLE_TYPES = frozenset((b"text/plain", b"application/x-www-form-urlencoded", b"multipart/form-data"))
_PORTS = {"http": 80, "https": 443}
_HOST = re.compile(r"(?:\[([0-9A-Fa-f:.]+)\]|([A-Za-z0-9._-]+))(?::([0-9]{0,5}))?")
_ORIGIN = re.compile(r"([a-z][a-z0-9+.-]*)://([^/?#]+)", re.IGNORECASE)
_ABSOLUTE_TARGET = re.compile(rb"[A-Za-z][A-Za-z0-9+.-]*://([^/?#]*)")
_SHOWN_CHARACTERS = 100
CLIENT_ADDRESS_HEADER = "x-penstock-client-address"  # of a request that the console forwards: its browser's address
_CLIENT_ADDRESS = CLIENT_ADDRESS_HEADER.encode()


class HostAndPort(NamedTuple):
    """Host and port of a URL. name: in lower case, without a trailing dot. address: of a literal IP address."""

    name: str
    address: IpAddress | None
    port: int | None


class WebOrigin(NamedTuple):
    """A page's origin. Without a port in the URL, port is the scheme's default."""

    scheme: str
    authority: HostAndPort


@lru_cache(256)
def parse_host(value: bytes) -> HostAndPort | None:
    """The value of a Host header; None if it is malformed: empty, with a user name, with other characters."""
    match = _HOST.fullmatch(value.decode("latin-1"))
    if match is None:
        return None
    port = int(match[3]) if match[3] else None
    if port is not None and port > 65535:
        return None
    name = (match[1] or match[2]).lower().removesuffix(".")
    address = parse_address(name)
    if not name or (match[1] and address is None):
        return None
    return HostAndPort(name if address is None else str(address), address, port)


@lru_cache(256)
def parse_origin(value: bytes) -> WebOrigin | None:
    """The value of an Origin header; None for `null` and malformed values."""
    match = _ORIGIN.fullmatch(value.decode("latin-1"))
    authority = parse_host(match[2].encode("latin-1")) if match is not None else None
    if match is None or authority is None:
        return None
    scheme = match[1].lower()
    return WebOrigin(scheme, authority._replace(port=authority.port or _PORTS.get(scheme)))


@lru_cache(256)
def parse_address(text: str) -> IpAddress | None:
    """A literal IP address, an IPv4-mapped one as IPv4; None for anything else."""
    try:
        address = ip_address(text)
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, IPv6Address) else None
    return mapped or address


def host_fault(target: bytes, http_version: str, headers: Headers) -> str:
    """Why RFC 9112 requires 400 for the request; empty if it is valid."""
    if http_version not in ("1.1", "1.0"):
        return f"HTTP/{http_version} is not served; use HTTP/1.1"
    hosts = [value for name, value in headers if name == b"host"]
    if not hosts:
        return "the request has no Host header, which HTTP/1.1 requires; send it" if http_version == "1.1" else ""
    if len(hosts) > 1:
        return f"the Host header is sent {len(hosts)} times; send it once"
    authority = parse_host(hosts[0])
    if authority is None:
        return f"the Host header is {_shown(hosts[0])}, not HOST or HOST:PORT; send the server's name or address"
    if target[:1] != b"/" and (absolute := _ABSOLUTE_TARGET.match(target)) and parse_host(absolute[1]) != authority:
        return f"the request target names another host than the Host header, {_shown(hosts[0])}; send the same host"
    return ""


def remote_client(headers: Headers) -> str:
    """The address of a browser on another machine for which a console sends the request; empty for none."""
    for name, value in headers:
        if name == _CLIENT_ADDRESS:
            address = parse_address(value.decode("latin-1"))
            if address is None or not address.is_loopback:
                return value.decode("latin-1")
    return ""


class BrowserPolicy:
    """Decides which requests that a browser may have sent are served.

    bound_host: the address or name that the server listens on. allowed_hosts: its further names and addresses;
    `*.example.com` for all subdomains, `*` for any name. cors_origins: origins of web pages that may call it.
    """

    def __init__(
        self, bound_host: str = "127.0.0.1", allowed_hosts: Iterable[str] = (), cors_origins: Iterable[str] = ()
    ) -> None:
        """Raises ValueError for a host or an origin that no browser would send."""
        names = {checked_host(each) for each in allowed_hosts}
        self._allows_any = ANY_HOST in names
        self._suffixes = tuple(name[1:] for name in names if name.startswith("*."))
        bound = parse_host(f"[{bound_host}]".encode() if ":" in bound_host else bound_host.encode())
        address = bound.address if bound is not None else None
        self._is_local = bound_host == "localhost" or (address is not None and address.is_loopback)
        self._names = frozenset({"localhost", bound.name if bound is not None else bound_host, *names})
        self._origins = frozenset(map(checked_origin, cors_origins))

    @property
    def cors_origins(self) -> tuple[str, ...]:
        """Origins of the web pages that may call the server, in the form that browsers send."""
        return tuple(sorted(map(_origin_text, self._origins)))

    def check(
        self, method: str, headers: Headers, *, local_address: str, is_trusted: bool, takes_any_type: bool = False
    ) -> None:
        """Raises HostNotAllowed, OriginNotAllowed or UnsupportedMedia for a request that is not served.

        headers: names in lower case. local_address: of the connection. is_trusted: the request has a valid key, or is a
        health check. takes_any_type: the endpoint does not read its body as JSON.
        """
        found = {name: value for name, value in headers if name in _READ}
        host = found.pop(b"host", None)
        if not is_trusted and host is not None and not self._allows_host(host, local_address):
            raise HostNotAllowed(
                f"the Host header is {_shown(host)}, which is not a name of this server; use localhost or its IP "
                f"address, send an API key, or allow the name with --allowed-host"
            )
        kind = found.pop(b"content-type", b"")
        if not found or method in SAFE_METHODS:  # only a browser sends these headers
            return
        self._check_origin(found.get(b"origin"), found.get(b"sec-fetch-site", b""), host or b"")
        kind = kind.partition(b";")[0].strip().lower()
        if kind in _SIMPLE_TYPES and not takes_any_type:
            raise UnsupportedMedia(
                f"a web page sent the body as {kind.decode('latin-1')}, which is not accepted; send application/json"
            )

    def check_without_keys(self, headers: Headers) -> None:
        """For a server that checks no keys: raises OriginNotAllowed for what a console forwards from another machine
        to a server that only this machine can reach."""
        if self._is_local and (address := remote_client(headers)):
            raise OriginNotAllowed(
                f"a console sent this for {address}, and without API keys only this machine may call this server; "
                "give it keys (--access-file), or let the console listen on 127.0.0.1"
            )

    def _allows_host(self, host: bytes, local_address: str) -> bool:
        authority = parse_host(host)
        if authority is None:
            return False
        if self._allows_any or authority.name in self._names:
            return True
        if authority.address is not None:
            return authority.address.is_loopback or authority.address == parse_address(local_address)
        return authority.name.endswith(self._suffixes)

    def _check_origin(self, value: bytes | None, site: bytes, host: bytes) -> None:
        """Raises OriginNotAllowed unless the page is the server's own or its origin is allowed."""
        origin = parse_origin(value) if value is not None else None
        if origin in self._origins:
            return
        is_own = origin is not None and _is_same(origin, parse_host(host)) if value is not None else True
        if is_own and site.lower() in _OWN_SITE:
            return
        mark = f"Sec-Fetch-Site: {_shown(site)}" if value is None or is_own else f"Origin: {_shown(value)}"
        raise OriginNotAllowed(
            f"a web page of another origin sent this request ({mark}); allow its origin with --cors-origin"
        )


def checked_host(text: str) -> str:
    """A value of --allowed-host in the form that the policy compares. Raises ValueError."""
    name = text.strip()
    if name == ANY_HOST:
        return name
    below = name.startswith("*.")
    bare = name[2:] if below else name
    authority = parse_host((f"[{bare}]" if bare.count(":") > 1 and bare[0] != "[" else bare).encode())
    if authority is None or authority.port is not None or (below and authority.address is not None):
        raise ValueError(
            f"allowed_host is {text!r}; give a name or IP address without scheme and port, or *.example.com"
        )
    return f"*.{authority.name}" if below else authority.name


def checked_origin(text: str) -> WebOrigin:
    """A value of --cors-origin in the form that the policy compares. Raises ValueError."""
    origin = parse_origin(text.strip().encode())
    if origin is None:
        raise ValueError(f"cors_origin is {text!r}; give the page's origin, such as https://console.example:8443")
    return origin


def _is_same(origin: WebOrigin, host: HostAndPort | None) -> bool:
    """Whether the page came from the host that it calls. The scheme may differ, because a proxy may terminate TLS."""
    if host is None or origin.authority.name != host.name:
        return False
    return origin.authority.port == (host.port or _PORTS.get(origin.scheme))


def _origin_text(origin: WebOrigin) -> str:
    name, address, port = origin.authority
    host = f"[{name}]" if isinstance(address, IPv6Address) else name
    return f"{origin.scheme}://{host}" + ("" if port in (None, _PORTS.get(origin.scheme)) else f":{port}")


def _shown(value: bytes) -> str:
    return repr(value[:_SHOWN_CHARACTERS].decode("latin-1"))


Network = IPv4Network | IPv6Network


@dataclass(frozen=True, slots=True)
class PortLimits:
    """Limits of connections to this process's port. trusted_proxies: only max_connections applies to them."""

    max_connections: int = 16_384
    max_per_address: int = 4_096
    trusted_proxies: tuple[Network, ...] = ()

    def allowed_from(self, address: str) -> int:
        """Maximum open connections of the address. An empty one (a Unix socket) has no limit of its own."""
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


class PeerAddress(NamedTuple):
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

    Each address loses its longest idle connections first. An eighth of max_connections stays free for new clients: the
    address with the most connections loses them.
    """
    by_address: dict[str, list[OpenConnection]] = {}
    for one in connections:
        by_address.setdefault(one.address, []).append(one)
    surplus = {address: max(0, len(group) - limits.allowed_from(address)) for address, group in by_address.items()}
    left = [(surplus[address] - len(group), address) for address, group in by_address.items()]
    heapq.heapify(left)
    target = limits.max_connections - limits.max_connections // 8
    for _ in range(-sum(count for count, _ in left) - target):
        count, address = left[0]
        surplus[address] += 1
        heapq.heapreplace(left, (count + 1, address))
    return [
        one
        for address, count in surplus.items()
        if count
        for one in sorted(by_address[address], key=idle_s, reverse=True)[:count]
    ]
