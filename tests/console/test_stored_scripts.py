"""Hostile texts in every field of every answer, shown by every page of the console in a real browser."""

import asyncio
import threading
from collections.abc import Iterator
from urllib.parse import quote, unquote

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.browser import shown_page
from tests.console.harness import served_console
from tests.console.hostile import ATTACK, SHOWN, HostileApis

pytestmark = pytest.mark.xdist_group("console")
# Presses every button of the page and of the dialogs that open, with hostile texts in the fields
PRESS_ALL = """async attack => {
  const press = async root => {
    for (const input of root.querySelectorAll("input[type=text], input[type=search], input:not([type])")) {
      input.value = attack;
    }
    for (const button of root.querySelectorAll("button:not(:disabled)")) {
      if (!button.isConnected) continue;
      button.click();
      await new Promise(done => setTimeout(done, 30));
    }
  };
  await press(document.querySelector("main"));
  for (const box of document.querySelectorAll("dialog[open]")) await press(box);
  for (const box of document.querySelectorAll("dialog[open]")) box.close();
}"""
# What no text may have made
MADE = """() => {
  const address = one => one.getAttribute("href") ?? one.getAttribute("src");
  const found = [
    ...document.querySelectorAll("[onerror], [onload], [onclick], [srcdoc], [src='x'], base, style, embed, object"),
    ...[...document.querySelectorAll("script")].filter(one => one.getAttribute("src") !== "/app.js"),
    ...[...document.querySelectorAll("[href], [src]")].filter(one => /^\\s*(javascript|data:text)/i.test(address(one))),
  ];
  return [...found.map(one => one.outerHTML.slice(0, 200)), ...(window.hacked === undefined ? [] : ["a script ran"])];
}"""
LINKS = """() => [...document.querySelectorAll("nav a, main a")].filter(one => !one.download && !one.target)
  .map(one => one.pathname + one.search)"""


@pytest.fixture(scope="module")
def hostile_console() -> Iterator[str]:
    """The URL of a console whose APIs are hostile; it has a thread of its own."""
    is_up, url = threading.Event(), ""
    loop = asyncio.new_event_loop()
    stop = asyncio.Event()

    async def serve() -> None:
        nonlocal url
        async with served_console(HostileApis(), has_video=True) as console:
            url = console.url
            is_up.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    assert is_up.wait(30)
    yield url
    loop.call_soon_threadsafe(stop.set)
    thread.join(30)
    loop.close()


def test_every_page_shows_hostile_texts_as_they_are(chromium: Browser, hostile_console: str) -> None:
    """No script runs, no element is made, no other host is called, and nothing breaks, whatever a button does."""
    seen: set[str] = set()
    with shown_page(chromium, hostile_console) as page:
        waiting = ["/", *(f"/{page}/{quote(ATTACK, safe='')}" for page in ("load", "models", "streams"))]
        while waiting:
            path = waiting.pop()
            if unquote(path) in seen:
                continue
            seen.add(unquote(path))
            page.goto(hostile_console + path)
            page.wait_for_function("text => document.querySelector('main').textContent.includes(text)", arg=SHOWN)
            assert page.evaluate(MADE) == [], path
            waiting += page.evaluate(LINKS)
            drop_files(page)
            page.evaluate(PRESS_ALL, ATTACK)
            assert page.evaluate(MADE) == [], path
    assert {"/models", "/streams", "/events", "/events/objects", "/load", "/system", "/system/audit"} <= seen


def test_address_that_cannot_be_decoded_is_an_error_of_its_page(chromium: Browser, hostile_console: str) -> None:
    """The frame stays, with a sentence in place of the page."""
    with shown_page(chromium, f"{hostile_console}/streams/%ff") as page:
        expect(page.get_by_role("main").get_by_role("alert")).to_be_visible()


def drop_files(page: Page) -> None:
    """Gives a file with a hostile name to each field for files."""
    name = ATTACK.replace("/", "\u2215")
    for field in page.locator("input[type=file]").all():
        field.set_input_files({"name": name, "mimeType": "image/png", "buffer": b"not a picture"})
