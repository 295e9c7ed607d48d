"""Opens pages of a running console in Chromium with Playwright. Fails for script errors and foreign requests."""

import contextlib
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, field
from urllib.parse import urlsplit

import pytest
from playwright.sync_api import Browser, Page, expect, sync_playwright

CHROMIUM = shutil.which("chromium")
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-background-networking", "--disable-component-update"),
    *("--use-fake-device-for-media-stream", "--use-fake-ui-for-media-stream"),  # a webcam for the page Try
)
WIDTHS = (1440, 1024, 390)
TIMEOUT_MS = 20_000  # for each thing that a test waits for, on a busy machine
expect.set_options(timeout=TIMEOUT_MS)
needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@contextlib.contextmanager
def started_chromium() -> Iterator[Browser]:
    """A headless Chromium."""
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=list(FLAGS))
        yield browser
        browser.close()


@dataclass
class Watched:
    """Forbidden actions of a page: script errors, violations of its policy, requests to other hosts."""

    origin: str
    faults: list[str] = field(default_factory=list)

    def watch(self, page: Page) -> None:
        """Starts recording."""
        page.on("pageerror", lambda error: self.faults.append(f"error: {error}"))
        page.on("console", lambda message: self._hear(message.type, message.text))
        page.on("request", lambda request: self._see(request.url))

    def _hear(self, kind: str, text: str) -> None:
        # An error response is shown by the page; the browser also writes it to its console.
        if kind in ("error", "warning") and "Failed to load resource" not in text:
            self.faults.append(f"{kind}: {text}")

    def _see(self, url: str) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("data", "blob") and f"{parts.scheme}://{parts.netloc}" != self.origin:
            self.faults.append(f"foreign host: {url}")


@contextlib.contextmanager
def shown_page(
    browser: Browser, url: str, *, width: int = 1440, height: int = 900, scheme: str = "light", has_touch: bool = False
) -> Iterator[Page]:
    """Opens the URL in a new session. Fails at the end for forbidden actions. scheme: light or dark."""
    parts = urlsplit(url)
    watched = Watched(f"{parts.scheme}://{parts.netloc}")
    context = browser.new_context(
        viewport={"width": width, "height": height},
        color_scheme="dark" if scheme == "dark" else "light",
        has_touch=has_touch,
        ignore_https_errors=True,
        permissions=["clipboard-read", "clipboard-write"],
    )
    context.set_default_timeout(TIMEOUT_MS)
    page = context.new_page()
    watched.watch(page)
    try:
        page.goto(url)
        yield page
    finally:
        context.close()
    assert watched.faults == []


def horizontal_overflow(page: Page) -> int:
    """CSS pixels by which the page is wider than the window; 0 if it fits."""
    return int(page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


def serious_findings(page: Page) -> list[str]:
    """Findings of axe-core that are serious or critical, with the elements."""
    from axe_playwright_python.sync_playwright import Axe

    found = Axe().run(page).response["violations"]
    return [
        f"{each['id']}: {each['help']}: {[node['html'][:120] for node in each['nodes'][:5]]}"
        for each in found
        if each["impact"] in ("serious", "critical")
    ]
