"""The page for people, and the description for programs."""

import base64
import hashlib
import os
import re
import subprocess
import sys
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

from penstock_video.api.page import shown_counts
from penstock_video.api.server import ApiServer
from penstock_video.types import SourceConfig, SourceState
from tests.deepstream_pipeline.api.asking import ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline
from tests.support.stack import CHECKOUT


class Outline(HTMLParser):
    """What a page is made of: its tags, their attributes, the text of each kind."""

    def __init__(self, page: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.text: dict[str, str] = {}
        self._open = ""
        self.feed(page)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self._open = tag

    def handle_data(self, data: str) -> None:
        self.text[self._open] = self.text.get(self._open, "") + data


def outline_of(api: ApiServer) -> Outline:
    answer = ask(api.url, "GET", "/")
    assert (answer.status, answer.headers["content-type"]) == (200, "text/html; charset=utf-8")
    return Outline(answer.body.decode())


def test_page_without_a_stream_says_how_to_add_one(api: ApiServer) -> None:
    """It is not blank."""
    assert outline_of(api).text["code"].startswith("POST /v1/streams")


def test_page_shows_each_stream_with_its_figures(api: ApiServer, pipeline: FakePipeline) -> None:
    """State, reason, rates, drops, counts and a picture, without JavaScript."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door", "Front door"))
    pipeline.sources["door"] = replace(
        pipeline.sources["door"],
        state=SourceState.AUTH_FAILED,
        reason="another password is wanted",
        fps=24.96,
        drops={"too_old": 3, "ring_full": 4},
        counts={"line-crossing/Entry": 17},
        latency_s=0.0839,
        width=1280,
        height=720,
        codec="hevc",
        decoder="nvdec",
    )
    page = ask(api.url, "GET", "/").body.decode()
    for text in ("Front door", "auth failed", "another password is wanted", ">25.0<", ">7<", ">17<", ">84 ms<"):
        assert text in page, text
    assert 'door 1280×720 hevc <span data-f="decoder">nvdec</span>' in page
    assert 'title="too_old 3, ring_full 4"' in page
    assert 'src="/v1/streams/door/preview.jpg"' in page


def test_page_says_of_a_paused_stream_that_it_is(api: ApiServer, pipeline: FakePipeline) -> None:
    """In the place of the picture, which is not asked for; the address of one is there for when it is resumed."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    assert "<span>no picture</span>" in ask(api.url, "GET", "/").body.decode()
    pipeline.pause("door")
    page = ask(api.url, "GET", "/").body.decode()
    assert "<span>paused</span>" in page
    assert ' src="/v1/streams/door/preview.jpg"' not in page
    assert ' data-src="/v1/streams/door/preview.jpg"' in page


def test_page_shows_a_rules_classes_where_there_are_several() -> None:
    """The row of an only class would say the rule's number twice."""
    one = {"line-crossing/In": 2, "line-crossing/In/person": 2, "line-crossing/Inner": 2, "roi-filtering/In": 2}
    assert shown_counts(one) == ["line-crossing/In", "line-crossing/Inner", "roi-filtering/In"]
    two = {**one, "line-crossing/In": 3, "line-crossing/In/car": 1}
    assert shown_counts(two) == list(two)
    assert shown_counts({"line-crossing/In": 3, "line-crossing/In/person": 2}) == [*two][:2]  # something says otherwise


def test_page_has_buttons_that_only_its_script_shows(api: ApiServer, pipeline: FakePipeline) -> None:
    """Without JavaScript they could do nothing."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    buttons = [attributes for tag, attributes in outline_of(api).tags if tag == "button"]
    assert [attributes["data-verb"] for attributes in buttons] == ["pause", "resume", "remove"]
    assert all("hidden" in attributes and attributes["type"] == "button" for attributes in buttons)


def test_page_asks_by_its_origin(api: ApiServer) -> None:
    """Opened as http://user:KEY@host/ it may ask for no relative address: browsers refuse credentials in one."""
    script = outline_of(api).text["script"]
    assert re.findall(r"fetch\(([^,)]*)", script) == ["location.origin+path"]


def test_page_takes_a_streams_words_for_text(api: ApiServer, pipeline: FakePipeline) -> None:
    """A camera's name, reason, address, codec and rules cannot put anything into the page."""
    bad = "\"><script>alert(1)</script>'&"
    pipeline.add(SourceConfig(f"rtsp://camera/{bad}", "door", bad))
    pipeline.sources["door"] = replace(
        pipeline.sources["door"], reason=bad, codec=bad, width=1, counts={bad: 1}, drops={bad: 1}
    )
    outline = outline_of(api)
    assert [tag for tag, _ in outline.tags].count("script") == 1
    assert "alert" not in outline.text["script"]
    assert outline.text["th"] == bad


def test_page_takes_nothing_from_elsewhere_and_says_so(api: ApiServer, pipeline: FakePipeline) -> None:
    """Its policy allows its own style and script by their hashes, its own pictures and figures, and nothing else."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    answer = ask(api.url, "GET", "/")
    policy, page = answer.headers["content-security-policy"], answer.body.decode()
    assert policy.startswith("default-src 'none'; ")
    assert "unsafe" not in policy
    outline = Outline(page)
    for tag in ("style", "script"):
        digest = base64.b64encode(hashlib.sha256(outline.text[tag].encode()).digest()).decode()
        assert f"{tag}-src 'sha256-{digest}'" in policy
    for _, attributes in outline.tags:
        assert "style" not in attributes
        assert not any(name.startswith("on") for name in attributes)
        for name in ("src", "href"):
            assert (attributes.get(name) or "/").startswith(("/", "data:,"))
    assert not re.search(r"https?://", outline.text["script"] + outline.text["style"])


def test_description_names_no_default_of_the_framework(api: ApiServer) -> None:
    """Every operation answers errors in our form; nothing says 422 or HTTPValidationError."""
    answer = ask(api.url, "GET", "/openapi.json")
    assert answer.status == 200
    assert b"HTTPValidationError" not in answer.body
    assert b'"422"' not in answer.body
    assert b"/v1/streams/{source_id}/rules" in answer.body
    assert b"/api/v1/stream/get-stream-info" in answer.body


def test_description_names_the_answers_of_each_operation(api: ApiServer, pipeline: FakePipeline) -> None:
    """Each described operation answers with a described status; every other method gets 405."""
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    paths = ask(api.url, "GET", "/openapi.json").json["paths"]
    assert isinstance(paths, dict)
    for path, operations in paths.items():
        if path == "/v1/streams/probe":  # other methods reach a source of this ID
            continue
        for method in {"get", "post", "put", "delete", "patch"} - ({"get"} if "mjpeg" in path else set()):
            status = ask(api.url, method.upper(), path.replace("{source_id}", "door"), headers={}).status
            known = operations[method]["responses"] if method in operations else ["405"]
            assert str(status) in known or f"{status // 100}XX" in known, (method, path, status)


@pytest.mark.long
def test_description_is_what_the_api_does(api: ApiServer, pipeline: FakePipeline, tmp_path: Path) -> None:
    """schemathesis asks everything that the description holds and much that it forbids, and finds no surprise."""
    pytest.importorskip("schemathesis")
    pipeline.add(SourceConfig("rtsp://camera/1", "door"))
    checks = (
        "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,"
        "unsupported_method"
    )
    arguments = ["run", f"{api.url}/openapi.json", "--phases", "examples,coverage,fuzzing", "--checks", checks]
    arguments += ["--max-examples", "8", "--seed", "7", "--no-color", "--continue-on-failure", "--warnings", "off"]
    arguments += ["--request-timeout", "20", "--exclude-path-regex", r"preview\.mjpeg$"]
    done = subprocess.run(
        [sys.executable, "-m", "schemathesis.cli", *arguments],
        cwd=tmp_path,
        env=dict(os.environ, PYTHONPATH=str(CHECKOUT), PYTHONWARNINGS="ignore"),
        capture_output=True,
        text=True,
        timeout=110,
    )
    assert done.returncode == 0, done.stdout[-4000:]
