"""The bench of video on a GPU, without one: windows, search, metrics, NVDEC's workers, pieces and the report."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.bench.gpu.video.__main__ import parse_arguments
from loadtest.bench.gpu.video.clips import CAMERAS, FPS
from loadtest.bench.gpu.video.fleet import (
    DECODERS_FULL,
    WAITS,
    Fleet,
    FleetSetup,
    between,
    joined,
    not_all_there,
    read_page,
    shares,
)
from loadtest.bench.gpu.video.machine import CardMeter, MachineUsage, cores_by_kind, interrupted_between
from loadtest.bench.gpu.video.nvdec import decode_alone
from loadtest.bench.gpu.video.pieces import PARTS, BenchPiece, Folder, pieces_of
from loadtest.bench.gpu.video.report import JSON_FILE, PAGE, main
from loadtest.bench.gpu.video.windows import SustainedSearch, Window, below, complaint, latency_of, search
from loadtest.bench.wire import BadAnswer
from penstock_load.committed import read_bench
from penstock_load.measure.buckets import Buckets
from penstock_load.results import State
from penstock_load.targets import read_targets
from penstock_video.metrics import VideoMetrics
from penstock_video.sources.lifecycle import WAITS_FOR_CARD
from penstock_video.types import DropReason
from tests.support.stack import CHECKOUT

CONDITIONS = {
    "machine": "1 × NVIDIA H200, made up, 16 cores",
    "at": "2026-11-23 12:00 UTC",
    "versions": "Python 3.11",
    "gpu versions": "driver 580",
    "slo_p99_ms": "100",
    "command": "python -m loadtest.bench.gpu.video --out made-up",
    "model": "googlenet-torch-uint8-random (4 instances)",
    "programs": "4, 16 cameras a decode process, MPS on",
    "clip": "240 frames, 3.0 Mbit/s, no B-frames",
}
REASON = f"the GPU {DECODERS_FULL} (CUDA's error 2)"


def of(answered: tuple[int, ...], *, dropped: int = 0, late: int = 0) -> Window:
    """Ten seconds of cameras of 30 frames a second, some answers later than 100 ms."""
    count = sum(answered)
    latency = Buckets(((0.05, (count - late) // 2), (0.1, count - late), (0.25, count), (float("inf"), count)))
    return Window(10.0, 30.0, answered, {"too_old": dropped}, latency)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (of((299, 301) * 10), ""),
        (of((300,) * 20, late=60), ""),
        (of((300,) * 20, late=61), "p99 1"),
        (of((300,) * 20, dropped=6), ""),
        (of((300,) * 20, dropped=7), "0.12% of the frames dropped"),
        (of((297,) * 20), "99.00% of the frames answered"),
        (of((303,) * 20), "late still catch up"),
        (of((300,) * 19 + (296,)), "1 streams had fewer than 297 frames, the least 296"),
        (of(()), "there is no stream"),
    ],
)
def test_window_is_sustained_or_has_a_reason(seen: Window, why: str) -> None:
    """Drops, latency, all frames together, and each stream by itself."""
    found = complaint(seen, 100.0)
    assert why in found
    assert bool(found) == bool(why)


def test_window_of_a_detector_has_its_own_share_and_rate() -> None:
    """95 of 100 answers in time are enough there, and every third frame is due."""
    seen = of((300,) * 20, late=300)
    assert complaint(seen, 100.0, 0.95) == ""
    assert complaint(of((300,) * 20, late=301), 100.0, 0.95).startswith("p95 1")
    assert complaint(Window(10.0, 10.0, (100,) * 20, {}, seen.latency), 100.0, 0.95) == ""


@pytest.mark.parametrize(
    ("firsts", "most", "limit"), [([316, 332], 342, 320), ([316], 342, 342), ([316], 342, 100), ([10], 10, 0)]
)
def test_search_finds_the_highest_number_within_a_fiftieth(firsts: list[int], most: int, limit: int) -> None:
    """The given numbers come first; every number lies between what was sustained and what was missed."""
    finding, tried = SustainedSearch(firsts, most, tries=30), []
    while (count := finding.next_count()) is not None:
        assert finding.held < count < finding.missed
        tried.append(count)
        finding.record(count, is_held=count <= limit)
    assert tried[0] == firsts[0]
    assert limit - max(1, round(0.02 * limit)) <= finding.held <= limit


def test_search_continues_below_the_decoders_of_a_full_gpu() -> None:
    """Two numbers are tried, not five: the given one, and the one just below the streams that had answers."""
    finding = SustainedSearch([348, 315, 366], 377, tries=6)
    assert finding.next_count() == 348
    finding.record(348, is_held=False, full_at=267)
    assert finding.next_count() == 265
    finding.record(265, is_held=True)
    assert finding.next_count() is None
    assert [below(full_at) for full_at in (288, 267, 265, 6, 5, 2, 1)] == [285, 265, 260, 5, 4, 1, 1]


def test_search_keeps_its_results_if_a_later_try_fails() -> None:
    """A GPU is lent for minutes: measured figures stay, with the reason for the end."""

    def attempt(count: int) -> dict[str, object]:
        if count > 8:
            raise BadAnswer("penstock video run does not answer")
        return {"streams": count, "complaint": ""}

    found = search(SustainedSearch([4, 8], 100, 6), attempt)
    assert (found["held"], found["cut"]) == (8, "54 streams: penstock video run does not answer")
    with pytest.raises(BadAnswer):
        search(SustainedSearch([9], 100, 6), attempt)


def test_reasons_of_streams_without_answers_tell_whether_the_gpu_is_full() -> None:
    """Nine found no decoder, the others wait for their turn: full. If all only wait, it is slow."""
    assert DECODERS_FULL in (CHECKOUT / "deepstream_pipeline/penstock_video/decode/nvcodec.py").read_text()
    assert WAITS in WAITS_FOR_CARD
    cold = [f"cam{number}" for number in range(86)]
    waiting = dict.fromkeys(cold, WAITS_FOR_CARD)
    full = not_all_there(cold, 348, waiting | dict.fromkeys(cold[:9], REASON), 55.0)
    assert str(full) == f'86 of 348 streams have no answers: 77 × {WAITS_FOR_CARD!r}, 9 × "{REASON}"'
    assert (full.answered, full.is_full) == (262, True)
    assert not not_all_there(cold, 348, waiting, 55.0).is_full
    assert not not_all_there(cold, 348, dict.fromkeys(cold, "it hung up") | {"cam0": REASON}, 55.0).is_full


def test_metrics_are_of_the_sources_that_are_still_there() -> None:
    """Of the program's own registry: a removed source takes its counts along; several programs add up."""
    metrics = VideoMetrics()
    for source in ("stays", "goes"):
        metrics.inferred(source, 4)
        metrics.glass_to_event(source, 0.02)
        metrics.dropped(source, DropReason.TOO_OLD, 5)
    metrics.rows(7, on_device=True)
    before = read_page(metrics.page().decode())
    metrics.inferred("stays", 2)
    metrics.glass_to_event("stays", 0.3)
    metrics.glass_to_event("stays", 0.02)
    metrics.dropped("stays", DropReason.TOO_OLD, 2)
    metrics.forget("goes")
    found = between(before, read_page(metrics.page().decode()))
    assert found.by_source("inferred_total") == {"stays": 2}
    assert (latency_of(found).count, latency_of(found).within(0.1)) == (2, 1)
    assert found.by_word("dropped_total")["too_old"] == 2
    assert joined([before, before]).by_word("rows_total")["device"] == 14


def test_cores_are_counted_by_kind_and_the_interrupted_core_is_compared() -> None:
    """A process that came meanwhile counts from its first reading; busy is all that is not idle."""
    before = MachineUsage(10.0, {("video program", 1): 1.0}, 10.0, {0: 5, 1: 1000}, {0: 100.0, 1: 50.0, 2: 7.0})
    spent = {("video program", 1): 11.0, ("decode process", 2): 9.0}
    after = MachineUsage(20.0, spent, 40.0, {0: 5, 1: 81_000}, {0: 104.0, 1: 50.1, 2: 10.0})
    assert cores_by_kind(before, after) == {"machine": 3.0, "video program": 1.0, "decode process": 0.0}
    found = interrupted_between(before, after)
    assert (found["core"], found["per_s"]) == (1, 8000.0)
    assert (round(found["busy"], 3), round(found["others_busy"], 3)) == (0.99, 0.65)


def test_streams_are_spread_evenly_over_programs_with_settings(tmp_path: Path) -> None:
    """No program is without a stream, none has two more than another, and there is a limit."""
    assert (shares(315, 4), shares(2, 4)) == ((79, 79, 79, 78), (1, 1))
    setup = FleetSetup("m", tmp_path / "c.mp4", "nvdec", 2)
    camera = {"camera_id": "a", "loop": True, "realtime": True, "decoder": "nvdec", "uri": str(tmp_path / "c.mp4")}
    assert setup.settings(["a"])["source"] == [camera]
    assert FleetSetup("m", tmp_path, "nvdec", 2, interval=2).settings([])["primary-gie"] == {
        "model": "m",
        "interval": 2,
    }
    with pytest.raises(BadAnswer, match="--programs"):
        Fleet(setup, tmp_path, 401)


WORKER = """
import json, sys
print("a line of a library")
print("ready", flush=True)
begin_s, end_s = map(float, sys.stdin.readline().split())
print(json.dumps({"frames": 50 * int(sys.argv[2]), "seconds": 0.5, "cpu_s": 0.05}), flush=True)
"""


def test_nvdec_alone_is_the_rate_of_all_processes(tmp_path: Path) -> None:
    """Other output of the library is ignored; a process that cannot begin gives its reason."""
    with CardMeter(is_gpu=False) as card:
        found = decode_alone(tmp_path / "c.mp4", (2, 3), 0.1, card, (sys.executable, "-S", "-c", WORKER))
        assert (found["rate"], found["cores"]) == (2 * 3 * 100.0, pytest.approx(0.2))
        program = (sys.executable, "-S", "-c", "raise SystemExit('no CUDA-capable device is detected')")
        with pytest.raises(BadAnswer, match="no CUDA-capable device is detected"):
            decode_alone(tmp_path / "c.mp4", (1, 1), 0.1, card, program)


def window(streams: int, complaint: str = "") -> dict[str, Any]:
    """A try's figures."""
    cores = {"machine": 12.0, "decode process": 5.0}
    return {
        "streams": streams, "complaint": complaint, "rate": streams * 30.0, "p50_ms": 12.0, "p99_ms": 40.0,
        "frames_a_batch": 20.0, "cores": cores, "cpu_ms_a_frame": cores, "card": {"nvdec": 0.97, "sm": 0.5},
        "interrupts": {"busy": 0.96, "others_busy": 0.65},
    }  # fmt: skip


def test_report_judges_by_the_targets(tmp_path: Path) -> None:
    """The three numbers of streams and the share of NVDEC alone; a part that was not measured is named."""
    folder = Folder(tmp_path)
    for number in (1, 2, 3):
        for name, camera in CAMERAS.items():
            best = {"processes": 8, "threads": 2, "rate": 332.0 * FPS, "cores": 2.0, "card": {"nvdec": 1.0}}
            folder.write(BenchPiece("nvdec", name, number), {"best": best, "tries": [best]}, CONDITIONS)
            held = 320 if name == "h264-720p" else camera.goal
            tries = [window(held), window(held + 5, "p99 150 ms")]
            found = {"held": held, "missed": held + 5, "alone_per_s": 332.0 * FPS, "tries": tries, "cut": ""}
            folder.write(BenchPiece("streams", name, number), found, CONDITIONS)
        detector = {"held": 60, "missed": 0, "alone_per_s": 5000.0, "tries": [window(60)], "cut": ""}
        of_yolox = CONDITIONS | {"model": "yolox-s-top-torch-random (4 instances)"}
        folder.write(BenchPiece("detector", "h264-1080p", number), detector, of_yolox)
    assert main([str(tmp_path), "--into", str(tmp_path / "into")]) == 0
    judged = read_bench(tmp_path / "into" / JSON_FILE, read_targets())
    assert judged is not None
    states = {verdict.target_id: verdict.state for verdict in judged.verdicts}
    wanted = ("h200-video-720p", "h200-video-1080p", "h200-video-hevc", "h200-nvdec", "h200-video-detector")
    assert {name: states[name] for name in wanted} == dict.fromkeys(wanted, State.PASS)
    page = (tmp_path / "into" / PAGE).read_text()
    assert "0.964 (0.964 to 0.964)" in page, "320 of 332 streams"
    assert "| 96 % (65 %) |" in page
    assert "| 1080p30 H.264, YOLOX-S on every frame | 50 | 60 (60 to 60) |" in page


def test_incomplete_run_has_a_page_and_an_empty_one_a_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was not measured, and where a search ended, is on it."""
    assert main([str(tmp_path)]) == 1
    assert "no piece of a run is there" in capsys.readouterr().err
    found = {"held": 4, "missed": 0, "alone_per_s": 0.0, "tries": [window(4)], "cut": "8 streams: no answer"}
    Folder(tmp_path).write(BenchPiece("streams", "h264-720p", 1), found, CONDITIONS)
    (tmp_path / "notes.md").write_text("## Beside it\n\nNothing.\n")
    assert main([str(tmp_path)]) == 0
    page = (tmp_path / PAGE).read_text()
    assert "* nvdec: **not measured**" in page
    assert "round 1 ended before 8 streams: no answer." in page
    assert page.endswith("Nothing.\n")
    assert json.loads((tmp_path / JSON_FILE).read_text())["results"][0]["measure"] == "streams_720p30_h264"


def test_short_run_tries_two_numbers_in_one_round() -> None:
    """Unless the command line has others; it ends with the first number that is sustained."""
    chosen = parse_arguments(["--short"])
    assert (chosen.rounds, chosen.tries, chosen.search_s, chosen.seconds) == ([1], 2, 1.0, 5.0)
    assert parse_arguments(["--short", "--rounds", "2", "3"]).rounds == [2, 3]


def test_streams_that_programs_refuse_limit_their_number() -> None:
    """As those for which the GPU makes no decoder: the search continues below the number that was answered."""
    why = "the video decoders are full (GPU 0: 97% busy with 29 streams of this program; this one adds 0.6%, the limit"
    cold = [f"cam{number}" for number in range(10)]
    error = not_all_there(cold, 180, dict.fromkeys(cold, why), 20.0)
    assert (error.is_full, error.answered) == (True, 170)
    assert parse_arguments([]).rounds == [1, 2, 3]


def test_detectors_take_one_kind_of_camera() -> None:
    """NVDEC alone is measured of each camera, the detector with 1080p H.264."""
    names = [piece.name for piece in pieces_of(PARTS, tuple(CAMERAS), (1,))]
    assert sorted(name for name in names if "nvdec" not in name and "streams" not in name) == [
        "detector-h264-1080p-1", "tracked-h264-1080p-1",
    ]  # fmt: skip
    assert len(names) == 3 + 3 + 2


def test_pieces_are_continued_with_nvdec_alone_of_the_same_run(tmp_path: Path) -> None:
    """Each camera's streams follow NVDEC alone, which is measured again with them; another round stands in."""
    pieces = pieces_of(("streams", "nvdec"), ("h264-720p", "hevc-1080p"), (1, 2))
    names = [piece.name for piece in pieces]
    assert [name.partition("-")[0] for name in names] == ["nvdec", "streams"] * 4
    assert names[0].removeprefix("nvdec") == names[1].removeprefix("streams")
    folder, first = Folder(tmp_path), pieces[:2]
    folder.write(first[0], {"rate": 1.0}, {})
    assert folder.left_of(first) == first
    folder.write(first[1], {"full_at": 267}, {})
    (tmp_path / "other.json").write_text("[]")
    assert (folder.left_of(first), folder.full_at()) == ([], 267)
    assert folder.found("nvdec", first[0].camera, 2) == {"rate": 1.0}
