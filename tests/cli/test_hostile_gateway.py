"""What a gateway sends is shown in a terminal as it is: no escape sequence, no markup, no reordered line."""

import contextlib
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest
import typer
from aiohttp import web
from typer.testing import CliRunner

from penstock.cli import config, logs, models, status
from tests.console.hostile import HostileApis, served_apart

UNSEEN = ("\x1b", "\x07", "\u202e", "\u2066")


@contextlib.asynccontextmanager
async def _apis() -> AsyncIterator[str]:
    runner = web.ServerRunner(web.Server(HostileApis().answer))
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture(scope="module")
def hostile_url() -> Iterator[str]:
    """The URL of a gateway, and video program, whose every text is hostile."""
    with served_apart(_apis()) as url:
        yield url


@pytest.mark.parametrize(
    "words",
    [
        ("status", "--video-url", "URL"),
        ("logs",),
        ("config", "show"),
        ("models", "list"),
        ("models", "load", "x"),
        ("models", "remove", "x"),
    ],
    ids=" ".join,
)
def test_command_shows_hostile_texts_as_they_are(
    words: tuple[str, ...], hostile_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a model, a reason, a label, a process or a setting: what a terminal would obey is spelled out."""
    for name, value in (("PENSTOCK_GATEWAY_URL", hostile_url), ("PENSTOCK_HOME", str(tmp_path)), ("COLUMNS", "300")):
        monkeypatch.setenv(name, value)
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command("status")(status.status)
    app.command("logs")(logs.logs)
    app.add_typer(config.app, name="config")
    app.add_typer(models.app, name="models")
    shown = CliRunner().invoke(app, [hostile_url if word == "URL" else word for word in words])
    assert "\\u202egnp\\u2066" in shown.output
    assert "[red]" in shown.output
    assert [sign for sign in UNSEEN if sign in shown.output] == []
