"""Chromium displays a page that tries to use the video program's control API."""

import json
import queue
from http.server import BaseHTTPRequestHandler

import pytest

from penstock_video.api.options import ApiOptions
from tests.deepstream_pipeline.api.pipeline import FakePipeline
from tests.deepstream_pipeline.api.pipeline import serving as serving_api
from tests.integration.test_browser import CHROMIUM, WAIT_S, browsing
from tests.support.web_server import serving

PAGE = """<!doctype html><title>page</title><iframe name="answer"></iframe><script>
const add = "API/v1/streams", deepstream = "API/api/v1/stream/add";
const camera = id => JSON.stringify({uri: "rtsp://camera/1", source_id: id});
const read = (url, options) => fetch(url, options).then(answer => answer.status, () => "blocked");
const post = (kind, body, mode) => ({method: "POST", mode, body, headers: {"content-type": kind}});
async function attempts() {
  const seen = {};
  seen.list = await read(add);
  seen.add = await read(add, post("application/json", camera("by-json"), "cors"));
  for (const url of [add, deepstream]) {
    await read(url, post("text/plain", camera("by-text"), "no-cors"));
    navigator.sendBeacon(url, camera("by-beacon"));
  }
  const form = document.createElement("form");
  Object.assign(form, {action: add, method: "post", enctype: "text/plain", target: "answer"});
  document.body.append(form);
  await new Promise(done => { document.querySelector("iframe").onload = done; form.submit(); });
  return seen;
}
attempts().catch(error => ({error: String(error)})).then(
  seen => fetch("/seen", {method: "POST", body: JSON.stringify(seen)}));
</script>"""

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")


@pytest.mark.parametrize("host", ["page.test", "127.0.0.1", "console.test"])
def test_page_adds_cameras_only_from_an_origin_that_is_allowed(host: str) -> None:
    """FAULTS 87: pages of another site, or of another port of the same host, cannot read or add anything.

    The same attempts succeed from the page of --cors-origin, so this test can fail.
    """
    reports: queue.SimpleQueue[dict[str, object]] = queue.SimpleQueue()
    pages: list[bytes] = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self._answer(pages[0] if self.path == "/" else b"")

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

    pipeline = FakePipeline()
    with serving(Handler) as url:
        port = url.rpartition(":")[2]
        options = ApiOptions(port=0, cors_origins=(f"http://console.test:{port}",))
        with serving_api(pipeline, options) as api:
            pages.append(PAGE.replace("API", api.url).encode())
            with browsing(f"http://{host}:{port}/"):
                seen = reports.get(timeout=WAIT_S)
    is_allowed = host == "console.test"
    assert seen == ({"list": 200, "add": 201} if is_allowed else {"list": "blocked", "add": "blocked"})
    assert list(pipeline.sources) == (["by-json"] if is_allowed else [])
