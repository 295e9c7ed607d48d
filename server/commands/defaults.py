"""What a command assumes where its flags say nothing: the settings of this environment."""

from pathlib import Path
from typing import Annotated

import typer

from server.commands.gateway import Gateway
from server.commands.terminal import fail
from server.settings import Settings, SettingsError, read_settings

DEFAULT_HTTP_PORT = 8000
API_KEY_VARIABLE = "PENSTOCK_API_KEY"

ApiKey = Annotated[
    str,
    typer.Option(
        "--api-key",
        envvar=API_KEY_VARIABLE,
        show_default=False,
        help="of a gateway that asks for one",
    ),
]


def settings_or_fail(home: Path | None = None) -> Settings:
    """The settings that `penstock up` would start with here; one sentence and exit code 2 where they are wrong."""
    try:
        return read_settings({"home": home})
    except SettingsError as error:
        fail(str(error))


def gateway_url(given: str | None) -> str:
    """The address that was given, else that of the gateway which `penstock up` would start here."""
    if given is not None:
        return given
    settings = settings_or_fail()
    host = "127.0.0.1" if settings.host in ("0.0.0.0", "::") else settings.host
    return f"http://{host}:{settings.http_port or DEFAULT_HTTP_PORT}"


def gateway_of(url: str | None, api_key: str) -> Gateway:
    """The gateway at that address, else the one that `penstock up` would start here."""
    if not api_key.isascii() or not api_key.isprintable():
        fail(f"--api-key (or {API_KEY_VARIABLE}) holds signs that no header carries: give the key as it was shown")
    return Gateway(gateway_url(url), api_key)
