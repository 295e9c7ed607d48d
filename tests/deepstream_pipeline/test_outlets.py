"""The sinks that the settings name, composed: all of them, or none."""

import os
import threading
from collections.abc import Sequence
from pathlib import Path

import pytest

from penstock_video.errors import SinkFailed
from penstock_video.metrics import VideoMetrics
from penstock_video.sink_set import SinkSet, compose_sinks
from penstock_video.sinks.hls import HlsOptions
from penstock_video.sinks.jsonl import JsonlOptions
from penstock_video.sinks.osd import OsdOptions
from penstock_video.sinks.recordings import RecordOptions
from penstock_video.sinks.webhook import WebhookOptions


def composed(options: Sequence[object]) -> SinkSet:
    """Frames of one source, without a viewer."""
    return compose_sinks(options, VideoMetrics(), lambda source_id, is_watched: None, OsdOptions(), is_single=True)


def open_files(folder: Path) -> list[str]:
    """Of this process, in the folder."""
    links = [f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd")]
    return [where for link in links if os.path.lexists(link) and (where := os.readlink(link)).startswith(str(folder))]


@pytest.mark.parametrize("wrong", [HlsOptions, RecordOptions])
def test_sinks_beside_one_that_cannot_be_are_let_go(wrong: type[HlsOptions | RecordOptions], tmp_path: Path) -> None:
    """A program that does not start leaves no thread, file or socket of the sinks that it had made before."""
    (tmp_path / "file").write_text("no folder")
    threads = set(threading.enumerate())
    fine = [JsonlOptions(tmp_path / "out"), WebhookOptions("http://127.0.0.1:9")]
    with pytest.raises(SinkFailed, match="cannot be written to"):
        composed([*fine, wrong(tmp_path / "file")])
    assert set(threading.enumerate()) <= threads
    assert open_files(tmp_path) == []


def test_sinks_that_were_never_started_are_closed(tmp_path: Path) -> None:
    """Of a program that fails between its sinks and its first frame."""
    threads = set(threading.enumerate())
    made = composed([JsonlOptions(tmp_path), WebhookOptions("http://127.0.0.1:9"), RecordOptions(tmp_path)])
    assert len(open_files(tmp_path)) == 3
    assert all(outlet.close(10.0) for outlet in made.outlets)
    assert made.recorder is not None
    assert made.recorder.close(10.0)
    assert set(threading.enumerate()) <= threads
    assert open_files(tmp_path) == []
