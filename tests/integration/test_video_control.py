"""The control API of a `penstock video run` that runs: sources come and go, are looked at and are counted."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import pytest

from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.decode.web import web
from tests.integration.video_runs import Place, Running, begun, lines
from tests.support.http import Answer, call, post_json
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("video")
FRAMES = 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With door.mp4 and yard.mp4, four seconds each, of different sizes."""
    folder = tmp_path_factory.mktemp("control")
    write_clip(folder / "door.mp4", frames=FRAMES, fps=10, size=(320, 192))
    write_clip(folder / "yard.mp4", frames=FRAMES, fps=10, size=(256, 144))
    return folder


@pytest.fixture(scope="module")
def running(video_place: Place, folder: Path) -> Iterator[Running]:
    """A run of the door, played in a loop as a camera does."""
    words = ("--source", folder / "door.mp4", "--model", "street", "--loop", "--realtime", "--out", folder / "out")
    with begun(video_place, *words, "--sink", "jsonl", "--allow-outbound", "127.0.0.1") as running:
        wait_for(lambda: stream(running.api_url(), "door").get("frames", 0) > 5, 30, "the door is seen")
        yield running


def streams(url: str) -> list[dict[str, Any]]:
    answer = call("GET", f"{url}/v1/streams")
    assert answer.status == 200, answer.body
    found: list[dict[str, Any]] = answer.json["streams"]
    return found


def stream(url: str, source_id: str) -> dict[str, Any]:
    """Empty where there is no such source."""
    return next((one for one in streams(url) if one["source_id"] == source_id), {})


def wait_for_more(url: str, source_id: str) -> None:
    """Until a few frames more of it were inferred."""
    before = stream(url, source_id)["inferred"]
    wait_for(lambda: stream(url, source_id)["inferred"] > before + 5, 30, f"{source_id} goes on")


def series_of(url: str, source_id: str) -> list[str]:
    """The lines of the metrics that name the source."""
    answer = call("GET", f"{url}/metrics")
    assert answer.status == 200
    return [line for line in answer.body.decode().splitlines() if f'source="{source_id}"' in line]


def picture_in(answer: Answer) -> np.ndarray[Any, Any]:
    """Of a JPEG."""
    assert (answer.status, answer.headers["content-type"]) == (200, "image/jpeg")
    picture = cv2.imdecode(np.frombuffer(answer.body, np.uint8), cv2.IMREAD_COLOR)
    assert picture is not None
    return np.asarray(picture)


def test_source_that_runs_is_listed_and_shown(running: Running) -> None:
    """Its state, its rate and its size; its preview is a JPEG of a frame of it, and another one a second later."""
    url = running.api_url()
    door = stream(url, "door")  # a stream that another test removed may still be listed
    assert (door["source_id"], door["state"], door["width"], door["height"]) == ("door", "running", 320, 192)
    seen = set()
    for _ in range(3):
        picture = picture_in(call("GET", f"{url}/v1/streams/door/preview.jpg"))
        assert picture.shape == (192, 320, 3)
        seen.add(picture.tobytes())
        wait_for_more(url, "door")
    assert len(seen) > 1


def test_source_is_added_and_removed_while_another_runs(running: Running, folder: Path) -> None:
    """It is read, inferred, counted and written; removed, it and its series are gone, and the other one goes on."""
    url = running.api_url()
    added = post_json(
        f"{url}/v1/streams",
        {"uri": str(folder / "yard.mp4"), "source_id": "yard", "is_loop": True, "is_realtime": True},
    )
    assert added.status == 201, added.body
    wait_for(lambda: stream(url, "yard").get("inferred", 0) > 5, 30, "the yard is inferred")
    assert series_of(url, "yard")
    assert call("DELETE", f"{url}/v1/streams/yard").status == 204
    wait_for(lambda: not stream(url, "yard"), 20, "the yard is gone")
    wait_for(lambda: not series_of(url, "yard"), 20, "its series are gone")
    assert call("GET", f"{url}/v1/streams/yard").status == 404
    wait_for_more(url, "door")
    assert series_of(url, "door")
    seen = {line["source_id"] for line in lines_so_far(folder / "out" / "objects.jsonl")}
    assert seen >= {"door", "yard"}


def lines_so_far(path: Path) -> list[dict[str, Any]]:
    """Those that are whole, of a file that is being written."""
    whole = path.with_name("copy.jsonl")
    text = path.read_text()
    whole.write_text(text[: text.rfind("\n") + 1])
    return lines(whole)


def test_source_that_plays_in_a_loop_begins_another_segment(running: Running, folder: Path) -> None:
    """Frame numbers and times rise on."""
    wait_for(lambda: stream(running.api_url(), "door")["frames"] > FRAMES + 20, 30, "it began anew")

    def door() -> list[dict[str, Any]]:
        return [line for line in lines_so_far(folder / "out" / "objects.jsonl") if line["source_id"] == "door"]

    wait_for(lambda: len(door()) > FRAMES + 10, 20, "it is written")
    found = door()
    assert {line["segment"] for line in found} >= {0, 1}
    for key in ("frame_num", "pts_s"):
        values = [line[key] for line in found]
        assert values == sorted(set(values))


def test_source_over_the_network_reaches_what_was_allowed_and_nothing_else(running: Running, folder: Path) -> None:
    """127.0.0.1 is read, but not its redirect's target, which the reason names; other hosts are refused at once."""
    url = running.api_url()
    with web() as site:
        site.pages["/yard.mp4"] = (folder / "yard.mp4").read_bytes()
        site.redirects["/moved"] = "http://127.0.0.2:1/latest/meta-data"
        for name, path in (("read", "/yard.mp4"), ("moved", "/moved")):
            assert post_json(f"{url}/v1/streams", {"uri": site.url(path), "source_id": name}).status == 201
        wait_for(lambda: stream(url, "read")["frames"] == FRAMES, 30, "the clip is read")
        wait_for(lambda: stream(url, "moved")["state"] == "failed", 30, "the redirection is refused")
        assert "127.0.0.2 is not a public address" in stream(url, "moved")["reason"]
        refused = post_json(f"{url}/v1/streams", {"uri": "rtsp://127.0.0.2/1", "source_id": "other"})
        assert (refused.status, "--allow-outbound 127.0.0.2" in refused.json["error"]) == (403, True)
    for name in ("read", "moved"):
        assert call("DELETE", f"{url}/v1/streams/{name}").status == 204
