"""Options of a client: URL, API key, timeouts and size limits. Sans-IO."""

import os
from dataclasses import dataclass, field
from typing import Literal
from urllib.parse import urlsplit

from penstock.network import host_and_port
from penstock.protocol.errors import InvalidRequest

URL_VARIABLE, API_KEY_VARIABLE = "PENSTOCK_GATEWAY_URL", "PENSTOCK_API_KEY"
DEFAULT_URL = "http://127.0.0.1:8000"
MAX_RESPONSE_BYTES = 256 << 20
CONCURRENCY, FRAMES_IN_FLIGHT = 8, 4  # defaults of infer_batch and stream
Protocol = Literal["http", "grpc"]


@dataclass(frozen=True, slots=True)
class ClientOptions:
    """url: http:// or https://, without a trailing slash. prefix: the path in `url`.

    timeout_s: timeout of a call in seconds. retries: attempts after the first. protocol: for tensors. grpc_address:
    HOST:PORT. max_response_bytes: larger responses raise an error. connections: size of the connection pool.
    """

    url: str
    api_key: str = field(repr=False)
    host: str
    port: int
    prefix: str
    timeout_s: float = 60.0
    retries: int = 2
    protocol: Protocol = "http"
    grpc_address: str = ""
    max_response_bytes: int = MAX_RESPONSE_BYTES
    connections: int = 16

    @property
    def is_tls(self) -> bool:
        """Whether the URL is https://."""
        return self.url.startswith("https://")


def read_options(  # noqa: PLR0913 - each is an option of the connection
    url: str | None,
    api_key: str | None,
    *,
    protocol: Protocol = "http",
    timeout_s: float = 60.0,
    retries: int = 2,
    grpc_address: str = "",
    max_response_bytes: int = MAX_RESPONSE_BYTES,
) -> ClientOptions:
    """Completes the options. None means the environment variable, then the default. Raises InvalidRequest."""
    url = os.environ.get(URL_VARIABLE) or DEFAULT_URL if url is None else url
    api_key = os.environ.get(API_KEY_VARIABLE, "") if api_key is None else api_key
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host, port = None, None
    if not host or parts.scheme not in ("http", "https"):
        raise InvalidRequest(f"{url!r} is not a gateway URL: give one such as {DEFAULT_URL}")
    if parts.username is not None or parts.query or parts.fragment:
        raise InvalidRequest("a gateway URL must not have a user, query or fragment: pass the key as api_key")
    if not api_key.isascii() or not api_key.isprintable():
        raise InvalidRequest(
            f"api_key (or {API_KEY_VARIABLE}) has characters that HTTP headers do not allow: give it as issued"
        )
    if not timeout_s > 0 or retries < 0 or max_response_bytes < 1:
        raise InvalidRequest("timeout_s and max_response_bytes must be positive, and retries at least 0")
    if protocol not in ("http", "grpc"):
        raise InvalidRequest(f"protocol is {protocol!r}; it must be http or grpc")
    port = port or (443 if parts.scheme == "https" else 80)
    return ClientOptions(
        url.rstrip("/"),
        api_key,
        host,
        port,
        parts.path.rstrip("/"),
        timeout_s,
        retries,
        protocol,
        grpc_address or host_and_port(host, port + 1),
        max_response_bytes,
    )
