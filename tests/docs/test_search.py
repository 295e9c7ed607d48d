"""A person searches the built site in a browser, without a network."""

import functools
from http.server import SimpleHTTPRequestHandler
from pathlib import Path

import pytest

from tests.console.browser import horizontal_overflow, needs_chromium, shown_page, started_chromium
from tests.support.web_server import serving

pytestmark = [pytest.mark.xdist_group("docs"), needs_chromium]


class Files(SimpleHTTPRequestHandler):
    """Files of a folder, without a log."""

    def log_message(self, *_: object) -> None:
        """Writes nothing."""


def test_search_finds_a_page_without_other_hosts(site: Path) -> None:
    """A word that is typed finds the page of picture parameters; no page calls another host, and a phone shows it."""
    handler = functools.partial(Files, directory=str(site))
    with started_chromium() as browser, serving(handler) as url:  # type: ignore[arg-type]
        with shown_page(browser, f"{url}/index.html") as page:
            page.locator(".md-search__input").press_sequentially(
                "net-scale-factor"
            )  # the page looks at keys, not at the text
            page.locator(".md-search-result__link").first.wait_for()
            links = page.locator(".md-search-result__link").evaluate_all("all => all.map(one => one.href)")
            assert any("card-parameters.html" in link for link in links)
            page.locator(".md-search-result__link").first.click()
            page.wait_for_url("**/*.html?h=*")
        with shown_page(browser, f"{url}/troubleshooting.html", width=390) as page:
            assert horizontal_overflow(page) == 0
