"""`penstock console`: the web console in the foreground, for a local or remote gateway."""

import asyncio
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from penstock.cli.gateway_client import VideoUrl, gateway_url
from penstock.cli.terminal import fail, program_name
from penstock.console.main import DEFAULT_PORT, ConsoleOptions, serve_console
from penstock.logs import LogFormat, also_log_to_stack, configure_logs
from penstock.network import PortTaken, is_loopback
from penstock.process import remove_working_directory
from penstock.tls import TlsFileError, TlsFiles

Certificate = Annotated[Path | None, typer.Option(help="PEM certificate chain; turns on TLS [none]")]
ClientCa = Annotated[Path | None, typer.Option(help="PEM file of a CA that signs browsers' certificates [none]")]
UpstreamCertificate = Annotated[
    Path | None,
    typer.Option(help="PEM certificate of the gateway and the video program, if no system CA signed it [none]"),
]
ListenFds = Annotated[str, typer.Option(hidden=True)]


def console(
    gateway: Annotated[
        str | None,
        typer.Option("--gateway-url", envvar="PENSTOCK_GATEWAY_URL", help="gateway URL [the stack on this machine]"),
    ] = None,
    video_url: VideoUrl = "http://127.0.0.1:8010",
    host: Annotated[str, typer.Option(help="address to listen on")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="port; 0 picks a free one")] = DEFAULT_PORT,
    allowed_host: Annotated[
        list[str] | None, typer.Option(help="further name of this server, as for `penstock up`; may be repeated")
    ] = None,
    tls_cert: Certificate = None,
    tls_key: Annotated[Path | None, typer.Option(help="the certificate's key, PEM without a password")] = None,
    tls_client_ca: ClientCa = None,
    upstream_cert: UpstreamCertificate = None,
    log_format: Annotated[LogFormat, typer.Option(help="text or json")] = LogFormat.TEXT,
    log_level: Annotated[str, typer.Option(help="debug, info, warning, error")] = "info",
    listen_fds: ListenFds = "",
) -> None:
    """Serve the web console in the foreground. `penstock up` starts its own console.

    Browsers log in with an API key of the gateway; the console has no rights of its own.
    """
    configure_logs(log_format, log_level)
    also_log_to_stack("console")
    if (tls_cert is None) is not (tls_key is None) or (tls_client_ca is not None and tls_cert is None):
        fail("TLS needs both --tls-cert and --tls-key; --tls-client-ca also needs both")
    if tls_cert is None and not listen_fds and not is_loopback(host):
        sys.stderr.write("penstock: without --tls-cert, API keys are sent unencrypted over the network\n")
    tls = TlsFiles(tls_cert, tls_key, tls_client_ca) if tls_cert is not None and tls_key is not None else None
    options = ConsoleOptions(
        host,
        port,
        gateway_url(gateway),
        video_url,
        tuple(allowed_host or ()),
        tls,
        upstream_cert,
        tuple(map(int, filter(None, listen_fds.split(",")))),
        program_name(Path(sys.executable).with_name("penstock")),
    )
    os.environ.pop("PENSTOCK_API_KEY", None)  # the console uses the keys of its users only
    remove_working_directory()
    try:
        asyncio.run(serve_console(options, _quiet if listen_fds else _announce))
    except (PortTaken, TlsFileError, ValueError) as error:
        fail(str(error))


def _announce(url: str) -> None:
    sys.stdout.write(f"console: {url}\n")
    sys.stdout.flush()


def _quiet(_: str) -> None:
    """The stack announces its console."""
