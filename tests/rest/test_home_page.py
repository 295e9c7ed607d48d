"""GET / of the gateway's REST port."""

import pytest

from penstock.gateway.rest.home_page import HomePage
from tests.auth.listeners import door
from tests.rest.harness import Front


def _ask(page: HomePage, host: bytes = b"127.0.0.1:8000") -> tuple[int, dict[str, str], str]:
    answer = page.answer("http", [(b"host", host)])
    return answer.status_code, dict(answer.headers), bytes(answer.body).decode()


@pytest.mark.parametrize(
    ("host", "url"),
    [
        (b"127.0.0.1:8000", "http://127.0.0.1:8003/"),
        (b"gateway.example", "http://gateway.example:8003/"),
        (b"[::1]:8000", "http://[::1]:8003/"),
    ],
)
def test_root_leads_to_the_console_on_the_host_that_the_browser_used(host: bytes, url: str) -> None:
    """The port is the console's; the name stays."""
    status, headers, _ = _ask(HomePage("", 8003), host=host)
    assert (status, headers["location"]) == (307, url)


def test_root_leads_to_the_console_url_if_there_is_one() -> None:
    """--console-url, as behind a proxy."""
    status, headers, _ = _ask(HomePage("https://console.example/", 8003))
    assert (status, headers["location"]) == (307, "https://console.example/")


def test_root_without_a_console_says_how_to_start_one() -> None:
    """A plain page with the command, and no script."""
    status, headers, page = _ask(HomePage("", None))
    assert status == 200
    assert "penstock console --gateway-url http://127.0.0.1:8000" in page
    assert "default-src 'none'" in headers["content-security-policy"]


async def test_path_is_served_without_a_key_and_no_other_path_is_meant() -> None:
    """/ itself, also where everything else needs a key."""
    front = Front(door=door())
    assert (await front.ask("GET", "/")).status == 200
    assert (await front.ask("GET", "//")).status == 404


def test_host_that_is_malformed_is_not_repeated() -> None:
    """Neither in an address nor in the page."""
    status, headers, page = _ask(HomePage("", 8003), host=b"evil/<script>")
    assert status == 200
    assert "location" not in headers
    assert "<script>" not in page
