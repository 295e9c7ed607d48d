"""What a caller shows, as both transports carry it: `authorization: Bearer …` or `x-api-key: …`."""

from collections.abc import Iterable, Iterator

from server.core.errors import Unauthenticated

API_KEY, AUTHORIZATION = "x-api-key", "authorization"
CREDENTIAL_NAMES = frozenset((API_KEY, AUTHORIZATION))
_BEARER = "bearer"


def credentials_of(headers: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Every key or token among the headers, names in lower case. Raises Unauthenticated for another scheme."""
    for name, value in headers:
        if name == API_KEY:
            yield value.strip()
        elif name == AUTHORIZATION:
            scheme, _, credential = value.strip().partition(" ")
            if scheme.lower() != _BEARER or not credential.strip():
                raise Unauthenticated("`authorization` is not `Bearer …`; send the API key or token that way")
            yield credential.strip()
