"""Runs the console as a child process of the stack."""

import contextlib
import os
import sys
from collections.abc import Iterator

from penstock.gateway.settings import Settings
from penstock.gateway.stack.side_process import SideProcess
from penstock.gateway.stack.startup import CannotStart
from penstock.logs import get_logger
from penstock.network import CERTIFICATE_VARIABLE, PortTaken, bind_all, connectable_host, host_and_port

log = get_logger("stack")
_NOT_FOR_IT = ("PENSTOCK_API_KEY", "PENSTOCK_API_KEYS", "PENSTOCK_GATEWAY_URL", "PENSTOCK_VIDEO_URL")


@contextlib.contextmanager
def console_process(settings: Settings) -> Iterator[SideProcess | None]:
    """The console's process, not started; None without a console.

    The console inherits its listening sockets, so the port stays reserved while the process is restarted. Raises
    CannotStart.
    """
    if settings.console == "off":
        yield None
        return
    try:
        sockets = bind_all(settings.host, settings.console_port, flag="--console-port")
    except PortTaken as error:
        raise CannotStart(str(error)) from error
    if settings.tls_client_ca is not None and not os.environ.get(CERTIFICATE_VARIABLE):
        log.warning(
            f"the console has no client certificate, which this gateway requires: set {CERTIFICATE_VARIABLE}, or use "
            "--console off"
        )
    environment = {name: value for name, value in os.environ.items() if name not in _NOT_FOR_IT}
    try:
        descriptors = [each.fileno() for each in sockets]
        command = (sys.executable, "-P", "-m", "penstock.cli.main", "console", *_flags(settings, descriptors))
        yield SideProcess("console", command, environment=environment, descriptors=descriptors)
    finally:
        for each in sockets:
            each.close()


def _flags(settings: Settings, descriptors: list[int]) -> list[str]:
    scheme = "https" if settings.tls_cert is not None else "http"
    host = connectable_host(settings.host)
    video = f"{scheme}://{host_and_port(host, settings.video_port)}" if settings.video else settings.video_url
    flags = {
        "--gateway-url": f"{scheme}://{host_and_port(host, settings.http_port)}",
        "--video-url": video,
        "--host": settings.host,
        "--port": str(settings.console_port),
        "--log-format": settings.log_format.value,
        "--log-level": settings.log_level,
        "--listen-fds": ",".join(map(str, descriptors)),
    }
    for flag, file in (
        ("--tls-cert", settings.tls_cert),
        ("--tls-key", settings.tls_key),
        ("--tls-client-ca", settings.tls_client_ca),
        ("--upstream-cert", settings.tls_cert),
    ):
        if file is not None:
            flags[flag] = str(file.absolute())
    names = [each for name in settings.allowed_host for each in ("--allowed-host", name)]
    return [each for pair in flags.items() for each in pair] + names
