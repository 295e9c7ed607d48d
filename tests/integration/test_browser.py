"""Chromium displays pages that try to use the gateway. Each page makes the same attempts."""

import json
import queue
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler
from urllib.parse import urlsplit

import pytest

from tests.integration.embedded_stack import look_up, own_metrics, start_embedded, write_models
from tests.support.http import call
from tests.support.stack import RunningStack, stop_stack
from tests.support.web_server import serving

CHROMIUM = shutil.which("chromium")
WAIT_S = 90
NAMES = ("page.test", "console.test")  # Chromium resolves both to 127.0.0.1
FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update"),
    "--host-resolver-rules=" + ",".join(f"MAP {name} 127.0.0.1" for name in NAMES),
)
# `read` is the status that a page's script can read, and "blocked" if the browser hides the answer.
PAGE = """<!doctype html><title>page</title><iframe name="answer"></iframe><script>
const gateway = "GATEWAY", unload = gateway + "/v2/repository/models/lookup/unload";
const infer = gateway + "/v2/models/lookup/infer";
const body = JSON.stringify({inputs: [{name: "index", shape: [1, 1], datatype: "INT64", data: [3]}]});
const load = JSON.stringify({parameters: {config: JSON.stringify({backend: "python"})}});
const seenOf = answer => answer.text().then(() => answer.status);
const read = (url, options) => fetch(url, options).then(seenOf, () => "blocked");
const post = (kind, body, mode) => ({method: "POST", mode, body, headers: {"content-type": kind}});
const json = "application/json", text = "text/plain";
async function attempts() {
  const seen = {};
  seen.infer_json = await read(infer, post(json, body, "cors"));
  seen.infer_text = await read(infer, post(text, body, "cors"));
  seen.metadata = await read(gateway + "/v2/models/lookup");
  seen.index = await read(gateway + "/v2/repository/index", post(text, "{}", "cors"));
  seen.metrics = await read("METRICS");
  seen.health = await read(gateway + "/v2/health/ready");
  await read(infer, post(text, body, "no-cors"));
  await read(gateway + "/v2/repository/models/lookup/load", post(text, load, "no-cors"));
  await read(unload, post(text, "{}", "no-cors"));
  await read(unload, post("application/x-www-form-urlencoded", "{}", "no-cors"));
  await read(unload, {method: "POST", mode: "no-cors"});
  navigator.sendBeacon(unload, "{}");
  const form = document.createElement("form");
  Object.assign(form, {action: unload, method: "post", enctype: "text/plain", target: "answer"});
  document.body.append(form);
  await new Promise(done => { document.querySelector("iframe").onload = done; form.submit(); });
  seen.websocket = await new Promise(done => {
    const socket = new WebSocket(gateway.replace("http", "ws") + "/v2/models/lookup");
    socket.onopen = () => done("open"); socket.onerror = () => done("blocked");
  });
  if (new URLSearchParams(location.search).has("unload")) seen.unload = await read(unload, post(json, "{}", "cors"));
  return seen;
}
attempts().catch(error => ({error: String(error)})).then(
  seen => fetch("/seen", {method: "POST", body: JSON.stringify(seen)}));
</script>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@dataclass(frozen=True)
class Site:
    """A stack, and a web server with a page that attacks it. port: the web server's. seen: each page's report."""

    stack: RunningStack
    port: str
    seen: "queue.SimpleQueue[dict[str, object]]"

    def visit(self, host: str, query: str = "") -> dict[str, object]:
        """Displays the page in Chromium under this host name, and returns its report."""
        with browsing(f"http://{host}:{self.port}/{query}"):
            return self.seen.get(timeout=WAIT_S)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The stack has no keys. It allows only the page console.test."""
    folder = tmp_path_factory.mktemp("browser")
    write_models(folder / "models")
    reports: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    pages: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(pages[0] if self.path.split("?")[0] == "/" else b"")

        def do_POST(self) -> None:
            reports.put(json.loads(self.rfile.read(int(self.headers["content-length"]))))
            self._answer(b"")

        def _answer(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("content-type", "text/html")
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *_: object) -> None:
            """Nothing is logged."""

    with serving(Handler) as url:
        port = url.rpartition(":")[2]
        stack = start_embedded(folder, "--cors-origin", f"http://console.test:{port}")
        page = PAGE.replace("GATEWAY", stack.http_url).replace("METRICS", stack.metrics_url)
        pages.append(page.encode())
        yield Site(stack, port, reports)
        assert stop_stack(stack) == 0


class browsing:
    """Chromium displays the URL until the block ends."""

    def __init__(self, url: str, *flags: str) -> None:
        self._profile = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
        command = [str(CHROMIUM), *FLAGS, f"--user-data-dir={self._profile.name}", *flags, url]
        self._process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)

    def __enter__(self) -> "browsing":
        return self

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        self._process.communicate(timeout=WAIT_S)
        self._profile.cleanup()

    def text(self) -> str:
        """The document after it has loaded. Needs the flag --dump-dom."""
        return self._process.communicate(timeout=WAIT_S)[0]


def answered(stack: RunningStack) -> str:
    """The number of inference requests that succeeded."""
    start = 'penstock_requests_total{code="200",model="lookup"'
    return "\n".join(line for line in own_metrics(stack).splitlines() if line.startswith(start))


@pytest.mark.parametrize("host", ["page.test", "127.0.0.1"], ids=["another site", "another port of the same host"])
def test_page_of_another_origin_changes_and_reads_nothing(site: Site, host: str) -> None:
    """Fetch, form, beacon and WebSocket: no model is loaded or unloaded, nothing is inferred, no answer is readable."""
    look_up(site.stack)
    before = answered(site.stack)
    seen = site.visit(host, "?unload")
    assert set(seen.values()) == {"blocked"}, seen
    assert len(seen) == 8
    assert answered(site.stack) == before
    assert look_up(site.stack).status == 200


def test_page_that_the_operator_allows_infers_reads_and_unloads(site: Site) -> None:
    """The same attempts succeed from a page of --cors-origin, so the test above can fail."""
    look_up(site.stack)
    before = answered(site.stack)
    seen = site.visit("console.test")
    assert {name: status for name, status in seen.items() if status == 200} == dict.fromkeys(
        ("infer_json", "metadata", "metrics", "health"), 200
    ), seen
    assert answered(site.stack) != before
    assert look_up(site.stack).status != 200
    assert call("POST", f"{site.stack.http_url}/v2/repository/models/lookup/load").status == 200


@pytest.mark.parametrize("is_metrics", [False, True], ids=["http", "metrics"])
def test_name_that_resolves_here_shows_nothing(site: Site, is_metrics: bool) -> None:
    """With DNS rebinding, Chromium uses a foreign name for this host, and gets a refusal that names the flag."""
    url = urlsplit(site.stack.metrics_url if is_metrics else f"{site.stack.http_url}/v2/models/lookup/config")
    shown = []
    for host in ("page.test", "localhost"):
        with browsing(f"http://{host}:{url.port}{url.path}", "--dump-dom") as chromium:
            shown.append(chromium.text())
    refusal, page = shown
    assert "--allowed-host" in refusal
    assert ("penstock_" if is_metrics else "max_batch_size") in page
    assert not any(word in refusal for word in ("penstock_requests", "max_batch_size"))
    assert call("GET", f"{site.stack.http_url}/v2/health/ready").status == 200


def test_page_of_the_description_shows_every_operation(site: Site) -> None:
    """Chromium displays /docs under its own policy: the script reads /openapi.json and lists what it describes."""
    with browsing(f"{site.stack.http_url}/docs", "--dump-dom", "--virtual-time-budget=20000") as chromium:
        shown = chromium.text()
    paths = json.loads(call("GET", f"{site.stack.http_url}/openapi.json").body)["paths"]
    operations = [operation["operationId"] for path in paths.values() for operation in path.values()]
    assert operations
    assert [name for name in operations if f'<details id="{name}">' not in shown] == []
