"""Fixtures of the browser tests: Chromium, and running stacks with a console."""

import json
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Page

from penstock.gateway.auth.api_keys import digest_of, new_secret
from penstock.network import bind
from penstock.protocol.identity import Role
from tests.console.browser import CHROMIUM, shown_page, started_chromium
from tests.support.pulled_models import SOURCE, pull_model
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack

WITH_CONSOLE = ("--engine", "embedded", "--console", "on", "--console-port", "0", "--models", "street,yolox-nano")
VIDEO = CHECKOUT.parent / "shared" / "media" / "vtest.avi"
SHORT_CLIPS = """primary-gie: {model: yolox-nano}
sink: [{type: record, folder: clips, before: 1, after: 1, cool-down: 600}]
"""
Show = Callable[..., AbstractContextManager[Page]]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    """One browser for the tests of a module; each page has its own session.

    Not of the test session: playwright runs an event loop in this thread, beside which no asynchronous test could run.
    """
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with started_chromium() as browser:
        yield browser


@pytest.fixture(scope="session")
def console_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack without keys, with a console, that serves `street` and YOLOX-Nano from a new home."""
    home = tmp_path_factory.mktemp("console")
    if not SOURCE.is_dir():
        pytest.skip(f"no real inputs: {SOURCE} is absent")
    pull_model(home, "yolox-nano")
    running = start_stack(home, *WITH_CONSOLE, "--video-url", "http://127.0.0.1:9")  # not one of this machine's user
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@pytest.fixture
def show(chromium: Browser, console_stack: RunningStack) -> Show:
    """show(path, width=…, scheme=…) opens a page of the console without keys."""

    def shown(path: str = "/", **options: Any) -> AbstractContextManager[Page]:
        return shown_page(chromium, console_stack.console_url.rstrip("/") + path, **options)

    return shown


@dataclass(frozen=True)
class KeyedConsole:
    """A stack that requires keys. secrets: a key for each role, and `all` with every role."""

    stack: RunningStack
    secrets: dict[str, str]


@pytest.fixture(scope="session")
def keyed_console(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KeyedConsole]:
    """A stack with a key for each role, without a model."""
    home = tmp_path_factory.mktemp("keyed-console")
    secrets = {name: new_secret() for name in (*Role, "all")}
    roles = {name: ([name] if name != "all" else list(Role)) for name in secrets}
    file = home / "access.toml"
    tables = (
        f'[keys.{name}]\nsha256 = "{digest_of(secret)}"\nroles = {json.dumps(roles[name])}\n'
        for name, secret in secrets.items()
    )
    file.write_text("".join(tables))
    access = ("--access-file", str(file), "--audit-log", str(home / "audit.jsonl"))
    running = start_stack(home, *WITH_CONSOLE[:6], "--models", "street", *access)
    yield KeyedConsole(running, secrets)
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@pytest.fixture
def show_keyed(chromium: Browser, keyed_console: KeyedConsole) -> Show:
    """As `show`, for the stack that requires keys."""

    def shown(path: str = "/", **options: Any) -> AbstractContextManager[Page]:
        return shown_page(chromium, keyed_console.stack.console_url.rstrip("/") + path, **options)

    return shown


@pytest.fixture(scope="session")
def video_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack with console and video program, without a camera. Events have clips of about two seconds."""
    if not (SOURCE.is_dir() and VIDEO.is_file()):
        pytest.skip(f"no real inputs: {SOURCE} or {VIDEO} is absent")
    home = tmp_path_factory.mktemp("streams")
    pull_model(home, "yolox-nano")
    (home / "video.yaml").write_text(SHORT_CLIPS)
    with bind("127.0.0.1", 0, flag="--none") as listener:
        port = str(listener.getsockname()[1])
    words = ("--video", "--video-port", port, "--allow-outbound", "127.0.0.1")
    running = start_stack(home, *WITH_CONSOLE, *words)
    running.wait_for_log("control API")
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


def click_at(page: Page, *points: tuple[float, float]) -> None:
    """Clicks at shares of the picture's width and height."""
    box = page.locator("svg.overlay").bounding_box()
    assert box is not None
    for x, y in points:
        page.mouse.click(box["x"] + x * box["width"], box["y"] + y * box["height"])


def sample_picture() -> Path:
    """A photo beside the checkout."""
    return SOURCE.parent / "media" / "coffee.jpg"
