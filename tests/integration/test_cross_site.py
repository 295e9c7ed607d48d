"""Requests to the HTTP ports of a real stack of two fronts, as a browser sends them for a page of another site.

The stack has no keys. One process: test_browser.
"""

import pytest

from tests.integration.client_processes import CONSOLE
from tests.support.http import call
from tests.support.stack import RunningStack

pytestmark = pytest.mark.xdist_group("stack")
PAGE = "https://page.example"
UNLOAD = "/v2/repository/models/brightness/unload"
KINDS = ("text/plain", "application/x-www-form-urlencoded", "application/json")


@pytest.mark.parametrize("mark", [{"origin": PAGE}, {"origin": "null"}, {"sec-fetch-site": "cross-site"}])
def test_page_of_another_site_unloads_nothing(fronts: RunningStack, mark: dict[str, str]) -> None:
    """It gets 403 with the flag that would allow it, for every content type; the model stays loaded."""
    for kind in KINDS:
        answer = call("POST", fronts.http_url + UNLOAD, b"{}", {"content-type": kind, **mark})
        assert (answer.status, "--cors-origin" in answer.json["error"]) == (403, True)
    assert call("GET", f"{fronts.http_url}/v2/models/brightness/ready").status == 200


@pytest.mark.parametrize(("host", "status"), [("page.example", 421), ("localhost", 200), ("gateway.example", 200)])
def test_name_that_is_not_the_servers_reads_nothing(fronts: RunningStack, host: str, status: int) -> None:
    """DNS rebinding gets 421 with the flag that would allow the name, on both HTTP ports; health is exempt."""
    for url in (f"{fronts.http_url}/v2/models/brightness/config", fronts.metrics_url):
        answer = call("GET", url, headers={"host": host})
        assert answer.status == status
        if status == 421:
            assert "--allowed-host" in answer.json["error"]
    assert call("GET", f"{fronts.http_url}/v2/health/ready", headers={"host": host}).status == 200


def test_answers_are_readable_by_allowed_pages_only(fronts: RunningStack) -> None:
    """CORS headers are sent only to pages of --cors-origin, on both HTTP ports."""
    for url in (f"{fronts.http_url}/v2", fronts.metrics_url):
        for origin in (CONSOLE, PAGE):
            answer = call("GET", url, headers={"origin": origin})
            allowed = answer.headers.get("access-control-allow-origin", "")
            assert allowed == (CONSOLE if origin == CONSOLE else "")
