"""The bench of video on a GPU, as far as it is arithmetic: what is held, what is tried next, pages, gaps, pieces."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from loadtest.bench.gpu.video.fleet import FleetSetup, with_named_threads
from loadtest.bench.gpu.video.plan import MODEL, PARTS, BenchPiece, Folder, left_of, parse_arguments, pieces_of
from loadtest.bench.gpu.video.results import cores_of, stream_limit_text
from loadtest.bench.gpu.video.usage import (
    EngineCounts,
    FleetUsage,
    ask_engine,
    busiest,
    busy_between,
    cores_by_kind,
    counts_of,
)
from loadtest.bench.gpu.video.verdict import (
    MetricsPage,
    SustainedSearch,
    Window,
    complaint,
    dropped_between,
    joined,
    latency_between,
    read_page,
    shares,
)
from loadtest.bench.gpu.video.windows import Seen, gap_of, judged, read_results, search
from loadtest.bench.wire import BadAnswer
from penstock_load.measure.buckets import Buckets
from penstock_video.metrics import VideoMetrics
from penstock_video.types import DropReason
from tests.loadtest.gpu_video_pieces import window

BOUND_MS = 100.0


def of(answered: tuple[int, ...], *, dropped: int = 0, late: int = 0, seconds: float = 10.0) -> Window:
    """Cameras of 30 frames a second, so many answers of them later than 100 ms."""
    count = sum(answered)
    latency = Buckets(((0.05, (count - late) // 2), (0.1, count - late), (0.25, count), (float("inf"), count)))
    return Window(seconds, 30.0, answered, {"too_old": dropped}, latency)


@pytest.mark.parametrize(
    ("seen", "why"),
    [
        (of((300,) * 20), ""),
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
def test_window_is_held_or_says_why_not(seen: Window, why: str) -> None:
    """Drops, latency, all frames together, and each stream by itself."""
    said = complaint(seen, BOUND_MS)
    assert why in said
    assert bool(said) == bool(why)


@pytest.mark.parametrize(
    ("firsts", "most", "limit"), [([316, 332], 342, 320), ([316], 342, 342), ([316], 342, 100), ([10], 10, 0)]
)
def test_search_finds_the_highest_number_within_a_fiftieth(firsts: list[int], most: int, limit: int) -> None:
    """What is named comes first; every number lies between what was held and what was missed."""
    finding, tried = SustainedSearch(firsts, most, tries=30), []
    while (count := finding.next_count()) is not None:
        assert finding.held < count < finding.missed
        tried.append(count)
        finding.record(count, is_held=count <= limit)
    assert tried[0] == firsts[0]
    assert limit - max(1, round(0.02 * limit)) <= finding.held <= limit


def test_search_ends_after_its_tries() -> None:
    """Whatever it found by then."""
    finding = SustainedSearch([300], 1000, tries=2)
    for _ in range(2):
        count = finding.next_count()
        assert count is not None
        finding.record(count, is_held=True)
    assert finding.next_count() is None


def test_search_keeps_what_it_found_before_it_broke_off() -> None:
    """A card is rented for minutes: measured figures stay; a missing figure has its reason."""

    def attempt(count: int) -> dict[str, object]:
        if count > 8:
            raise BadAnswer("penstock video run does not answer")
        return {"streams": count, "complaint": ""}

    found = search(SustainedSearch([4, 8], 100, 6), attempt)
    assert (found["held"], len(found["tries"]), found["cut"]) == (
        8,
        2,
        "54 streams: penstock video run does not answer",
    )
    with pytest.raises(BadAnswer):
        search(SustainedSearch([9], 100, 6), attempt)


def test_miniature_needs_no_card_and_no_pytorch() -> None:
    """`--no-gpu` alone is a whole command; what is said beside it wins."""
    mini = parse_arguments("", ["--no-gpu"])
    assert (mini.decoder, mini.model, mini.only) == ("cpu", "street", ("streams", "hand-over", "cpu", "faults"))
    whole = parse_arguments("", [])
    assert (whole.decoder, whole.model, whole.only) == ("nvdec", MODEL, PARTS)
    assert parse_arguments("", ["--no-gpu", "--model", "people", "--only", "cpu"]).model == "people"


def test_streams_are_spread_evenly() -> None:
    """No program is without one, none has two more than another."""
    assert shares(315, 4) == (79, 79, 79, 78)
    assert shares(2, 4) == (1, 1)


def test_page_of_the_video_program_is_understood() -> None:
    """Its own registry's page: counters by source, drops by reason, the histogram of all sources, rows by memory."""
    metrics = VideoMetrics()
    for source, seconds in (("a", 0.02), ("b", 0.3)):
        metrics.decoded(source, 5)
        metrics.inferred(source, 4)
        metrics.glass_to_event(source, seconds)
    metrics.dropped("a", DropReason.CORRUPT, 2)
    metrics.dropped("b", DropReason.CORRUPT, 1)
    metrics.restarted("b")
    metrics.rows(7, on_device=True)
    metrics.decode_processes("nvdec", 3)
    page = read_page(metrics.page().decode())
    assert (page.answered, page.decoded) == ({"a": 4, "b": 4}, {"a": 5, "b": 5})
    assert dropped_between(MetricsPage(), page) == {"corrupt": 3}
    assert (page.restarts["b"], page.hand_over["device"], page.processes["nvdec"]) == (1, 7, 3)
    assert joined([page, page]).processes["nvdec"] == 6


def test_window_is_of_the_sources_that_are_still_there() -> None:
    """One that is taken out takes its counts along; what the others did meanwhile is neither less nor more for it."""
    metrics = VideoMetrics()
    for source in ("stays", "goes"):
        for _ in range(50):
            metrics.glass_to_event(source, 0.02)
        metrics.dropped(source, DropReason.TOO_OLD, 5)
    before = read_page(metrics.page().decode())
    metrics.glass_to_event("stays", 0.3)
    metrics.glass_to_event("stays", 0.02)
    metrics.dropped("stays", DropReason.TOO_OLD, 2)
    metrics.forget("goes")
    after = read_page(metrics.page().decode())
    latency = latency_between(before, after)
    assert (latency.count, latency.within(0.1)) == (2, 1)
    assert dropped_between(before, after) == {"too_old": 2}


def test_empty_page_is_one_of_a_program_that_does_not_answer_yet() -> None:
    """It adds nothing to the others."""
    assert joined([MetricsPage(), read_page("")]).answered == {}


def test_gap_is_the_longest_between_two_frames_in_the_span() -> None:
    """A gap belongs to the span in which its middle lies; frame numbers that are missing are counted."""
    frames = [Seen(0, 9.9), Seen(1, 10.0), Seen(2, 11.2), Seen(5, 11.3), Seen(6, 12.9), Seen(7, 14.0)]
    assert list(gap_of(frames, 10.0, 11.5)) == pytest.approx([1.2, 2])
    assert list(gap_of(frames, 10.0, 20.0)) == pytest.approx([6.0, 2])
    assert gap_of([], 10.0, 12.0) == (2.0, 0)


def test_killed_process_tells_its_own_cameras_from_the_others() -> None:
    """Each side has its largest gap."""
    span = {"what": "killed", "own": ["a"], "ids": ["a", "b"], "begin_s": 0.0, "end_s": 3.0, "slowest_within_s": 0.1}
    steady = [Seen(number, number / 10) for number in range(40)]
    judgement = judged(span, {"a": steady[:5] + steady[25:], "b": steady})
    assert judgement["own"]["largest_gap_s"] == pytest.approx(2.1)
    assert judgement["others"] == {
        "cameras": 1, "largest_gap_s": pytest.approx(0.1), "median_gap_s": pytest.approx(0.1), "missing_frames": 0,
    }  # fmt: skip


def test_results_are_read_without_a_half_line(tmp_path: Path) -> None:
    """The program may have been ended in the middle of one."""
    (tmp_path / "0").mkdir()
    line = '{"source_id":"a","frame_num":3,"time":"2026-11-23T12:00:00.500Z"}'
    (tmp_path / "0" / "objects.jsonl").write_text(f'{line}\n{{"source_id":"a","fra')
    assert [one.number for one in read_results(tmp_path)["a"]] == [3]


def test_pieces_come_with_nvdec_alone_before_what_is_held_against_it() -> None:
    """Each camera's streams right after it, of the same run. Every round has every part; faults only the first."""
    names = [piece.name for piece in pieces_of(("streams", "nvdec", "faults"), ("h264-720p", "hevc-1080p"), (1, 2))]
    assert [name.partition("-")[0] for name in names[:4]] == ["nvdec", "streams"] * 2
    assert names[0].removeprefix("nvdec") == names[1].removeprefix("streams")
    assert len(names) == 2 * 4 + 1
    assert sum(name.startswith("faults") for name in names) == 1


def test_nvdec_alone_is_measured_again_where_its_streams_are_left(tmp_path: Path) -> None:
    """Another machine, lent later, is not to be held against the first."""
    folder, pieces = Folder(tmp_path), list(pieces_of(("nvdec", "streams", "cpu"), ("h264-720p",), (1,)))
    folder.write(pieces[0], {}, {})
    assert left_of(pieces, folder) == pieces
    folder.write(pieces[1], {}, {})
    assert [one.part for one in left_of(pieces, folder)] == ["cpu"]


def test_piece_that_was_measured_is_there_and_another_round_stands_in(tmp_path: Path) -> None:
    """A run that was cut goes on; what a round does not have is taken from another."""
    folder, piece = Folder(tmp_path), BenchPiece("nvdec", "h264-720p", 1)
    assert not folder.has(piece)
    folder.write(piece, {"rate": 1.0}, {})
    (tmp_path / "other.json").write_text("[]")
    assert folder.has(piece)
    assert folder.found("nvdec", "h264-720p", 2) == {"rate": 1.0}
    assert folder.found("nvdec", "hevc-1080p", 1) is None
    assert len(folder.all()) == 1


def test_cores_are_counted_by_kind_and_by_thread() -> None:
    """A process that came meanwhile counts from its first reading on."""
    before = FleetUsage(5.0, {("video program", 1): 1.0}, {("video program", 1, 1, "python"): 1.0}, 10.0)
    after = FleetUsage(
        7.0, {("video program", 1): 3.0, ("decode process", 2): 9.0}, {("video program", 1, 1, "python"): 2.0}, 16.0
    )
    assert cores_by_kind(before, after) == {"machine": 3.0, "video program": 1.0, "decode process": 0.0}
    (thread,) = busiest(before, after)["threads"]
    assert thread[:2] == ["video program, pid 1, main thread", 0.5]
    assert thread[2] in range(-1, 4096), "process 1 is there, or it is not for us"
    assert busiest(before, after)["threads_by_name"] == [["video program: main thread", 0.5]]


def test_program_of_the_bench_tells_the_kernel_its_threads_names() -> None:
    """So that a profile says which thread was busy; Python does so by itself from 3.14 on only."""
    program = (
        "import threading; from pathlib import Path; "
        "read = lambda: print(Path(f'/proc/self/task/{threading.get_native_id()}/comm').read_text().strip()); "
        "thread = threading.Thread(target=read, name='results'); thread.start(); thread.join()"
    )
    done = subprocess.run(
        [sys.executable, "-P", "-c", program], env=with_named_threads(os.environ), capture_output=True, text=True
    )
    assert done.stdout.strip() == "results", done.stderr


def test_limit_is_named_with_what_is_full() -> None:
    """NVDEC where it is; the cores where they are; else that nothing is."""
    cores = cores_of("1 × NVIDIA H200, Intel Xeon, 16 cores")
    assert cores == 16
    assert stream_limit_text(window(325, "p99 150 ms"), cores).startswith("NVDEC is the limit (NVDEC 97 %")
    busy = window(300) | {"cores": {"machine": 15.5}}
    assert stream_limit_text(busy, cores).startswith("the CPU's cores are the limit")
    assert stream_limit_text(window(300), cores).startswith("nothing that was read is full (")
    assert stream_limit_text(busy, cores, is_most=False).startswith(
        "the CPU's cores are full, and more was not tried ("
    )
    card = stream_limit_text(window(325, "p99 150 ms"), cores, is_most=False)
    assert card.startswith("NVDEC is full, and more was not tried (NVDEC 97 %")
    python = window(300, "p99 150 ms") | {"card": {}, "processes": [["video program, pid 7", 0.99]]}
    assert stream_limit_text(python, cores).startswith("one Python process is full (video program, pid 7)")
    of_cpu = {"processes": [["decode process, pid 9", 0.99]], "card": {}, "decode_processes": {"cpu": 9, "nvdec": 0}}
    assert stream_limit_text(window(300) | of_cpu, cores).startswith("nothing"), "FFmpeg's threads, not Python's"
    shared = of_cpu | {"decode_processes": {"cpu": 0, "nvdec": 9}}
    assert stream_limit_text(window(300) | shared, cores).startswith(
        "one Python process is full (decode process, pid 9)"
    )


def test_engine_is_the_limit_where_its_instances_work_all_the_time() -> None:
    """By Triton's counters, which count a batch's time once a request of it: here two requests an execution."""
    page = (
        'nv_inference_request_success{{model="m",version="1"}} {0}\n'
        'nv_inference_request_failure{{model="m",reason="OTHER",version="1"}} 0\n'
        'nv_inference_count{{model="m",version="1"}} {1}\nnv_inference_exec_count{{model="m",version="1"}} {2}\n'
        'nv_inference_queue_duration_us{{model="m",version="1"}} {3}\n'
        'nv_inference_compute_infer_duration_us{{model="m",version="1"}} {4}\n'
    )
    before, after = counts_of(page.format(10, 10, 5, 0, 7)), counts_of(page.format(410, 3210, 205, 800_000, 16_000_007))
    busy = busy_between(before, after, 2.0, 4)
    assert busy == {"busy": 1.0, "instances": 4, "rows_an_execution": 16, "ms_an_execution": 40.0, "queue_ms": 2.0}
    assert stream_limit_text(window(300) | {"card": {}, "engine": busy}, 16).startswith(
        "the model's 4 instances are the lim"
    )
    assert busy_between(before, before, 2.0, 4) == {}, "nothing was asked of it"
    assert ask_engine("http://127.0.0.1:9/metrics") == EngineCounts(), "a page that does not answer costs no window"


def test_settings_of_a_program_say_decoder_and_hand_over(tmp_path: Path) -> None:
    """A camera each; no sink unless results are wanted."""
    said = {"streammux": {"batch-size": 32}}
    setup = FleetSetup("m", tmp_path / "c.mp4", "nvdec", 2, hand_over="host", has_pinned_processes=False, sections=said)
    settings = setup.settings(["cam1"], 0)
    assert settings["source"][0] | {"uri": ""} == {
        "uri": "", "camera_id": "cam1", "loop": True, "realtime": True, "decoder": "nvdec",
    }  # fmt: skip
    assert (settings["gpu"]["hand-over"], settings["streammux"]["batch-size"]) == ("host", 32)
    assert "sink" not in settings
    assert settings["gpu"]["pin-processes"] is parse_arguments("", ["--no-pin-processes"]).pin_processes is False
    assert parse_arguments("", []).pin_processes
