"""The report of video on a GPU: what targets speak of, and a page that says what limits."""

import json
from pathlib import Path

import pytest

from loadtest.bench.gpu.video.clips import FPS
from loadtest.bench.gpu.video.plan import BenchPiece, Folder
from loadtest.bench.gpu.video.report import JSON_FILE, PAGE, main
from penstock_load.committed import read_bench
from penstock_load.results import State
from penstock_load.targets import read_targets
from tests.loadtest.gpu_video_pieces import CONDITIONS, made_up, window


def test_report_judges_by_the_targets(tmp_path: Path) -> None:
    """The three numbers of streams and the share of NVDEC alone, on the hardware that they speak of."""
    made_up(tmp_path)
    assert main([str(tmp_path), "--into", str(tmp_path / "into")]) == 0
    judged = read_bench(tmp_path / "into" / JSON_FILE, read_targets())
    assert judged is not None
    states = {verdict.target_id: verdict.state for verdict in judged.verdicts}
    wanted = ("h200-video-720p", "h200-video-1080p", "h200-video-hevc", "h200-nvdec")
    assert {name: states[name] for name in wanted} == dict.fromkeys(wanted, State.PASS)
    page = (tmp_path / "into" / PAGE).read_text()
    assert "0.964" in page, "320 of 332 streams"
    assert "5.0 of these" in page, "320 by the card, 64 by the cores"
    assert "NVDEC is the limit" in page
    assert "16: 1.25 s" in page
    assert f"| {332 * FPS:,} ({332 * FPS:,} to {332 * FPS:,}) | 332 |" in page


def test_report_of_a_part_of_a_run_says_what_was_not_measured(tmp_path: Path) -> None:
    """A run that was cut has a page, too."""
    best = {"processes": 1, "threads": 1, "rate": 900.0, "cores": 1.0, "card": {}}
    Folder(tmp_path).write(BenchPiece("nvdec", "hevc-1080p", 1), {"best": best, "tries": [best]}, CONDITIONS)
    (tmp_path / "notes.md").write_text("## Beside it\n\nNothing.\n")
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / PAGE).read_text()
    assert "* streams: **not measured**" in page
    assert page.endswith("Nothing.\n")
    assert json.loads((tmp_path / JSON_FILE).read_text())["results"][0]["kind"] == "nvdec"


def test_held_is_of_the_last_round_and_missed_of_the_last_that_missed(tmp_path: Path) -> None:
    """With the rounds' numbers; what was full where no more was tried is not called the limit."""
    full = window(265) | {"card": {"nvdec": 0.97, "sm": 0.5}}
    cut = {"held": 265, "missed": 0, "alone_per_s": 9e3, "cut": "321 streams: its 45 s were over"}
    late = {"held": 227, "missed": 249, "alone_per_s": 9e3, "tries": [window(249, "p99 150 ms"), window(227)]}
    for number, found in enumerate((late | {"missed": 240}, late, cut | {"tries": [full], "decoders": 0}), start=1):
        at = CONDITIONS | {"at": f"2026-11-23 12:0{number} UTC"}
        Folder(tmp_path).write(BenchPiece("streams", "h264-720p", number), found, at)
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / PAGE).read_text()
    assert "### 720p30 H.264, 265 streams, held in round 3\n\nNVDEC is full, and more was not tried (" in page
    assert "The search of round 3 broke off before 321 streams: its 45 s were over." in page
    assert "### 720p30 H.264, 249 streams, not held in round 2: p99 150 ms\n\nNVDEC is the limit (" in page
    assert page.count("not held in round") == 1
    assert "More than" not in page
    assert "(240 to 249), in 2 of 3 rounds |" in page
    assert "over a window (7.0 to 7.0 s)" in page
    assert ". 2026-11-23 12:01 UTC to 2026-11-23 12:03 UTC." in page


def test_interrupted_search_is_reported(tmp_path: Path) -> None:
    """With where, and why; and which shape decoded most, as clients of MPS or not."""
    tried = {"held": 4, "missed": 0, "alone_per_s": 0.0, "tries": [window(4)], "cut": "8 streams: no answer"}
    Folder(tmp_path).write(BenchPiece("streams", "h264-720p", 1), tried, CONDITIONS)
    best = {"processes": 8, "threads": 4, "is_mps": True, "rate": 900.0, "cores": 1.0, "card": {}}
    Folder(tmp_path).write(BenchPiece("nvdec", "h264-720p", 1), {"best": best, "tries": [best]}, CONDITIONS)
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / PAGE).read_text()
    assert "The search of round 1 broke off before 8 streams: no answer." in page
    assert "| 8 × 4, MPS |" in page


def test_miniature_claims_no_card(tmp_path: Path) -> None:
    """What the CPU decoded is not how many servers a card is; where rows really lay stands beside the way asked for."""
    tried = {"held": 4, "missed": 5, "decoder": "cpu", "tries": [window(4)]}
    Folder(tmp_path).write(BenchPiece("streams", "h264-720p", 1), tried, CONDITIONS)
    Folder(tmp_path).write(BenchPiece("cpu", "h264-720p", 1), tried | {"machine_cores": 2}, CONDITIONS)
    ways = {"device": window(4) | {"rows": {"device": 0, "host": 9}}, "host": window(4)}
    Folder(tmp_path).write(BenchPiece("hand-over", "h264-720p", 1), {"streams": 4, "ways": ways}, CONDITIONS)
    half = {"streams": 4, "ways": {"host": window(4)}, "failed": {"device": "the engine is elsewhere"}}
    Folder(tmp_path).write(BenchPiece("hand-over", "h264-720p", 2), half, CONDITIONS)
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / PAGE).read_text()
    assert "How many CPU servers" not in page
    assert "| device | 0 % | 4 |" in page
    assert "Not measured: device in round 2. the engine is elsewhere" in page


def test_folder_without_pieces_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In a sentence."""
    assert main([str(tmp_path)]) == 1
    assert "no piece of a run is there" in capsys.readouterr().err
