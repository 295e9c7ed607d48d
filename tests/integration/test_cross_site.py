"""Requests to the HTTP ports of a real stack, as a browser sends them for a page of another site."""

from collections.abc import Iterator

import pytest

from tests.integration.embedded_stack import look_up, start_embedded, write_models
from tests.support.http import call
from tests.support.stack import RunningStack, stop_stack

PAGE = "https://page.example"
CONSOLE = "https://console.example:8443"
UNLOAD = "/v2/repository/models/lookup/unload"
KINDS = ("text/plain", "application/x-www-form-urlencoded", "application/json")


@pytest.fixture(scope="module")
def open_stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """Two fronts, without keys, that allow one page and one additional name (one process: test_browser)."""
    folder = tmp_path_factory.mktemp("open")
    write_models(folder / "models")
    flags = ("--workers", "2", "--allowed-host", "gateway.example", "--cors-origin", CONSOLE)
    running = start_embedded(folder, *flags)
    yield running
    assert stop_stack(running) == 0


@pytest.mark.parametrize("mark", [{"origin": PAGE}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}])
def test_page_of_another_site_unloads_nothing(open_stack: RunningStack, mark: dict[str, str]) -> None:
    """It gets 403 with the flag that would allow it, for every content type; the model stays loaded."""
    for kind in KINDS:
        answer = call("POST", open_stack.http_url + UNLOAD, b"{}", {"content-type": kind, **mark})
        assert (answer.status, "--cors-origin" in answer.json["error"]) == (403, True)
    assert look_up(open_stack).status == 200


@pytest.mark.parametrize(("host", "status"), [("page.example", 421), ("localhost", 200), ("gateway.example", 200)])
def test_name_that_is_not_the_servers_reads_nothing(open_stack: RunningStack, host: str, status: int) -> None:
    """DNS rebinding gets 421 with the flag that would allow the name, on both HTTP ports; health is exempt."""
    for url in (f"{open_stack.http_url}/v2/models/lookup/config", open_stack.metrics_url):
        answer = call("GET", url, headers={"host": host})
        assert answer.status == status
        if status == 421:
            assert "--allowed-host" in answer.json["error"]
    assert call("GET", f"{open_stack.http_url}/v2/health/ready", headers={"host": host}).status == 200


def test_answers_are_readable_by_allowed_pages_only(open_stack: RunningStack) -> None:
    """CORS headers are sent only to pages of --cors-origin, on both HTTP ports."""
    for url in (f"{open_stack.http_url}/v2", open_stack.metrics_url):
        for origin in (CONSOLE, PAGE):
            answer = call("GET", url, headers={"origin": origin})
            allowed = answer.headers.get("access-control-allow-origin", "")
            assert allowed == (CONSOLE if origin == CONSOLE else "")
