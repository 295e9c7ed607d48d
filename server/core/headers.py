"""Which HTTP headers belong to one connection, and which go from end to end."""

from server.core.relay import HttpHeaders

HOP_BY_HOP = frozenset(
    (
        b"connection",
        b"keep-alive",
        b"proxy-authenticate",
        b"proxy-authorization",
        b"proxy-connection",
        b"te",
        b"trailer",
        b"transfer-encoding",
        b"upgrade",
    )
)
# Of a request that is sent on whole: the next connection says these for itself.
OF_THE_CONNECTION = HOP_BY_HOP | {b"host", b"content-length", b"expect"}


def end_to_end(headers: HttpHeaders, dropped: frozenset[bytes]) -> HttpHeaders:
    """The headers, names in lower case, without the dropped ones and those that `connection` names."""
    lowered = [(name.lower(), value) for name, value in headers]
    named = [token.strip().lower() for name, value in lowered if name == b"connection" for token in value.split(b",")]
    gone = dropped.union(named) if named else dropped
    return tuple([header for header in lowered if header[0] not in gone])
