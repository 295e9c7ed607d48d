"""A sink whose other side takes nothing: what a user reads at the end."""

import json
from http.server import BaseHTTPRequestHandler
from pathlib import Path

import pytest

from tests.deepstream_pipeline.clips import write_clip
from tests.integration.video_runs import Place, run
from tests.support.web_server import serving

pytestmark = pytest.mark.xdist_group("video")


class Refusing(BaseHTTPRequestHandler):
    """Wants another key."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(401)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        pass


def test_webhook_that_refuses_every_message_is_no_success(video_place: Place, tmp_path: Path) -> None:
    """FAULTS 61: the run goes to its end, and says how many messages were lost: one number, and exit code 1."""
    clip = write_clip(tmp_path / "clip.mp4", frames=20)
    with serving(Refusing) as url:
        (tmp_path / "video.yaml").write_text(f"sink: [{{type: webhook, url: '{url}', what: objects}}]\n")
        words = ("--source", clip, "--model", "street", "--json")
        ended = run(video_place, tmp_path / "video.yaml", *words)
    assert ended.code == 1, ended.err
    summary = json.loads(ended.out.splitlines()[-1])
    sentence = f"webhook failed: 20 messages for webhook {url} were not delivered: answered 401"
    assert (summary["exit_code"], summary["sink_failures"]) == (1, [sentence])
    assert "sink connected" not in ended.err
