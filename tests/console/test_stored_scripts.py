"""Hostile texts in every field of every answer, shown by every page of the console in a real browser."""

import base64
from collections.abc import Iterator
from urllib.parse import quote, unquote

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.console.browser import shown_page
from tests.console.hostile import ATTACK, PNG, SHOWN, hostile_console, served_apart

pytestmark = pytest.mark.xdist_group("console")
# Presses every button of the page and of the dialogs that open, with hostile texts in the fields
PRESS_ALL = """async attack => {
  const press = async root => {
    for (const input of root.querySelectorAll("input[type=text], input[type=search], input:not([type])")) {
      input.value = attack;
    }
    for (const button of root.querySelectorAll("button:not(:disabled)")) {
      if (!button.isConnected || !button.checkVisibility()) continue;
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


@pytest.fixture(scope="module", name="console_url")
def console_of_hostile_apis() -> Iterator[str]:
    """The URL of a console whose APIs are hostile."""
    with served_apart(hostile_console()) as url:
        yield url


def test_every_page_shows_hostile_texts_as_they_are(chromium: Browser, console_url: str) -> None:
    """No script runs, no element is made, no other host is called, and nothing breaks, whatever a button does."""
    seen: set[str] = set()
    with shown_page(chromium, console_url) as page:
        waiting = ["/", *(f"/{page}/{quote(ATTACK, safe='')}" for page in ("load", "models", "streams"))]
        while waiting:
            path = waiting.pop()
            if unquote(path) in seen:
                continue
            seen.add(unquote(path))
            page.goto(console_url + path)
            page.wait_for_function("text => document.querySelector('main').textContent.includes(text)", arg=SHOWN)
            assert page.evaluate(MADE) == [], path
            waiting += page.evaluate(LINKS)
            drop_files(page)
            page.evaluate(PRESS_ALL, ATTACK)
            assert page.evaluate(MADE) == [], path
    assert {"/models", "/streams", "/events", "/events/objects", "/load", "/system", "/system/audit"} <= seen


def test_address_that_cannot_be_decoded_is_an_error_of_its_page(chromium: Browser, console_url: str) -> None:
    """The frame stays, with a sentence in place of the page."""
    with shown_page(chromium, f"{console_url}/streams/%ff") as page:
        expect(page.get_by_role("main").get_by_role("alert")).to_be_visible()


def drop_files(page: Page) -> None:
    """Gives a file with a hostile name to each field for files."""
    name = ATTACK.replace("/", "\u2215")
    for field in page.locator("input[type=file]").all():
        field.set_input_files({"name": name, "mimeType": "image/png", "buffer": base64.b64decode(PNG)})
