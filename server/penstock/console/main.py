"""Runs the console: composes options, sockets, TLS and the ASGI application."""

import asyncio
import contextlib
import os
import signal
import socket
import ssl
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

from penstock.console.app import ConsoleApp, ConsoleParts
from penstock.console.pages import read_static_files
from penstock.console.proxy import Upstream
from penstock.gateway.rest.limits import ConnectionLimits
from penstock.gateway.rest.listener import HttpListener
from penstock.logs import get_logger
from penstock.network import CERTIFICATE_VARIABLE, Sockets, bind_all, client_context, connectable_host
from penstock.port_policy import BrowserPolicy
from penstock.tls import Certificates, TlsFiles

MAX_CONNECTIONS = 1024
GRACE_S = 2.0
DEFAULT_PORT = 8003
log = get_logger("console")


@dataclass(frozen=True, slots=True)
class ConsoleOptions:
    """Options of the console.

    listen_fds: file descriptors of inherited listening sockets; host and port are then not bound. allowed_hosts: see
    BrowserPolicy. upstream_cert: PEM file with the certificate of the gateway and the video program, for a certificate
    that no trusted CA has signed. program: how a shell calls penstock, for commands that pages show.
    """

    host: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    gateway_url: str = "http://127.0.0.1:8000"
    video_url: str = "http://127.0.0.1:8010"
    allowed_hosts: tuple[str, ...] = ()
    tls: TlsFiles | None = None
    upstream_cert: Path | None = None
    listen_fds: tuple[int, ...] = ()
    program: str = "penstock"


async def serve_console(options: ConsoleOptions, announce: Callable[[str], None]) -> None:
    """Serves until SIGTERM or SIGINT. announce: called with the console's URL once it listens.

    Raises PortTaken, TlsFileError, and ValueError for a malformed allowed host.
    """
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    certificates = Certificates(options.tls) if options.tls is not None else None
    upstream_tls = _upstream_tls(options.upstream_cert)
    gateway_url = checked_api_url("--gateway-url", options.gateway_url)
    video_url = checked_api_url("--video-url", options.video_url)
    parts = ConsoleParts(
        gateway=Upstream("gateway", gateway_url, f"start it with `{options.program} up`", upstream_tls),
        video=Upstream("video program", video_url, f"start it with `{options.program} up --video`", upstream_tls),
        files=read_static_files(),
        program=options.program,
        policy=BrowserPolicy(options.host, options.allowed_hosts),
        has_tls=certificates is not None,
        needs_key=bool(os.environ.get(CERTIFICATE_VARIABLE)),
    )
    sockets = _sockets(options)
    listener = HttpListener(
        ConsoleApp(parts),
        sockets,
        limits=ConnectionLimits(MAX_CONNECTIONS, MAX_CONNECTIONS // 2),
        tls=certificates.context if certificates is not None else None,
    )
    listener.start()
    scheme = "https" if certificates is not None else "http"
    announce(f"{scheme}://{_url_host(options.host)}:{listener.port}/")
    await stop.wait()
    await listener.stop(GRACE_S)
    await parts.proxy.aclose()


def checked_api_url(flag: str, url: str) -> str:
    """An API's URL without a slash at its end. Raises ValueError, without the URL, as browsers are shown it."""
    try:
        parts = urlsplit(url)
        is_valid = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        is_valid = False
    if not is_valid or "@" in url or "?" in url or "#" in url or not url.isprintable():
        raise ValueError(f"{flag} must be http://HOST:PORT or https://HOST:PORT, without user, password and query")
    return url.rstrip("/")


def _sockets(options: ConsoleOptions) -> Sockets:
    if not options.listen_fds:
        return bind_all(options.host, options.port, flag="--port")
    inherited = tuple(socket.socket(fileno=descriptor) for descriptor in options.listen_fds)
    for listening in inherited:
        listening.set_inheritable(False)
    return inherited


def _upstream_tls(certificate: Path | None) -> Callable[[], ssl.SSLContext]:
    """Returns TLS contexts for calls of the APIs.

    certificate: PEM file. The certificate is trusted for any host name, and read again when the file changes.
    """
    contexts: dict[int, ssl.SSLContext] = {}

    def context() -> ssl.SSLContext:
        modified_ns = 0
        if certificate is not None:
            with contextlib.suppress(OSError):
                modified_ns = certificate.stat().st_mtime_ns
        if modified_ns not in contexts:
            made = client_context()
            if certificate is not None:
                made.check_hostname = False
                made.load_verify_locations(certificate)
                made.verify_flags |= ssl.VERIFY_X509_PARTIAL_CHAIN
            contexts.clear()
            contexts[modified_ns] = made
        return contexts[modified_ns]

    return context


def _url_host(host: str) -> str:
    connectable = connectable_host(host)
    return f"[{connectable}]" if ":" in connectable else connectable
