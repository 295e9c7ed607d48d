"""The video program's metrics are one table; sources come and go without leaving series."""

import re
import shutil
import subprocess
import threading

import pytest

from penstock.gateway.metrics import PROCESS_METRICS
from penstock_video.metrics import TABLE, VideoMetrics
from penstock_video.types import AnalyticsKind, CloseReason, DecoderSharing, DropReason, SourceState


def fill(metrics: VideoMetrics, source: str) -> None:
    metrics.state(source, SourceState.CONNECTING)
    metrics.state(source, SourceState.RUNNING)
    metrics.decoded(source, 3)
    metrics.inferred(source, 2)
    metrics.dropped(source, DropReason.TOO_OLD, 4)
    metrics.restarted(source)
    metrics.frozen(source, True)
    metrics.fps(source, 29.5)
    metrics.decoder(source, "cpu")
    metrics.decoder(source, "nvdec")
    for sharing in (DecoderSharing.OWN, DecoderSharing.MISMATCH, DecoderSharing.MISMATCH, DecoderSharing.SHARED):
        metrics.sharing(source, sharing)
    metrics.decode_s(source, 0.004, 3)
    metrics.prepare_s(source, 0.002)
    metrics.glass_to_event(source, 0.08)
    metrics.event(source, AnalyticsKind.LINE_CROSSING, "in")
    metrics.event(source, AnalyticsKind.DWELL)
    metrics.recording(source, "failed")


def filled() -> VideoMetrics:
    metrics = VideoMetrics()
    fill(metrics, "door")
    metrics.decode_processes("nvdec", 2)
    metrics.cards({"GPU 0": 0.75, "GPU 1": None}, 3)
    metrics.rows(5, on_device=True)
    metrics.mux_wait(0.01)
    metrics.batch(4, CloseReason.TIMEOUT)
    metrics.infer("street", 0.02)
    metrics.sink_depth("kafka", 7, 900)
    metrics.sink_dropped("kafka", 5)
    metrics.sink_errors("kafka")
    return metrics


def page(metrics: VideoMetrics) -> str:
    """What the table declares: the process's own figures differ from one look to the next."""
    return "\n".join(line for line in metrics.page().decode().splitlines() if "process_" not in line) + "\n"


def test_page_holds_every_row_of_the_table() -> None:
    """Nothing is declared that is not served, and each value stands where it was put."""
    text = page(filled())
    for row in TABLE:
        assert f"# HELP penstock_video_{row.name.removesuffix('_total')}" in text, row.name
    for line in (
        'penstock_video_frames_total{source="door"} 3.0',
        'penstock_video_inferred_total{source="door"} 2.0',
        'penstock_video_dropped_total{reason="too_old",source="door"} 4.0',
        'penstock_video_restarts_total{source="door"} 1.0',
        'penstock_video_state{source="door",state="running"} 1.0',
        'penstock_video_state{source="door",state="connecting"} 0.0',
        'penstock_video_frozen{source="door"} 1.0',
        'penstock_video_fps{source="door"} 29.5',
        'penstock_video_decoder{decoder="nvdec",source="door"} 1.0',
        'penstock_video_decoder{decoder="cpu",source="door"} 0.0',
        'penstock_video_decoder_shared{source="door"} 1.0',
        'penstock_video_decoder_mismatches_total{source="door"} 1.0',
        'penstock_video_decode_processes{decoder="nvdec"} 2.0',
        'penstock_video_decoder_utilization{card="GPU 0"} 0.75',
        "penstock_video_decoder_refusals_total 3.0",
        'penstock_video_rows_total{hand_over="device"} 5.0',
        'penstock_video_rows_total{hand_over="host"} 0.0',
        'penstock_video_decode_seconds_count{source="door"} 3.0',
        'penstock_video_decode_seconds_sum{source="door"} 0.012',
        'penstock_video_prepare_seconds_count{source="door"} 1.0',
        'penstock_video_glass_to_event_seconds_sum{source="door"} 0.08',
        'penstock_video_events_total{direction="in",kind="line-crossing",source="door"} 1.0',
        'penstock_video_events_total{direction="",kind="dwell",source="door"} 1.0',
        'penstock_video_recordings_total{result="failed",source="door"} 1.0',
        "penstock_video_mux_wait_seconds_count 1.0",
        'penstock_video_batch_frames_bucket{le="4.0"} 1.0',
        'penstock_video_batches_total{reason="timeout"} 1.0',
        'penstock_video_infer_seconds_count{model="street"} 1.0',
        'penstock_video_sink_queue_results{sink="kafka"} 7.0',
        'penstock_video_sink_queue_bytes{sink="kafka"} 900.0',
        'penstock_video_sink_dropped_total{sink="kafka"} 5.0',
        'penstock_video_sink_errors_total{sink="kafka"} 1.0',
    ):
        assert f"\n{line}\n" in text, line


def test_page_has_the_process_that_serves_it() -> None:
    """Memory, descriptors, CPU time and start of the process are there, under the names that every program has."""
    lines = dict(line.split() for line in filled().page().decode().splitlines() if line.startswith("process_"))
    assert set(lines) == set(PROCESS_METRICS)
    assert float(lines["process_resident_memory_bytes"]) > 1 << 20


def test_page_has_no_series_that_the_table_does_not_declare() -> None:
    """A person who reads the page finds our names, the process's, and nothing else of the library's."""
    declared = {f"penstock_video_{row.name}" for row in TABLE} | set(PROCESS_METRICS)
    lines = [line for line in filled().page().decode().splitlines() if not line.startswith("#")]
    assert {re.sub(r"_(bucket|sum|count)$", "", re.split(r"[ {]", line)[0]) for line in lines} <= declared


def test_source_costs_the_page_a_bounded_number_of_lines() -> None:
    """A page of 200 sources is read within 100 ms, as it is while each has no more lines than this."""
    metrics = filled()
    before = len(metrics.page().splitlines())
    for number in range(10):
        fill(metrics, f"camera-{number}")
    assert len(metrics.page().splitlines()) - before <= 10 * 42


def test_page_passes_promtool() -> None:
    """`promtool check metrics` has no word to say."""
    promtool = shutil.which("promtool")
    if promtool is None:
        pytest.skip("no promtool here: Debian's package prometheus has it")
    done = subprocess.run([promtool, "check", "metrics"], input=filled().page(), capture_output=True, check=False)
    assert (done.returncode, done.stdout.decode(), done.stderr.decode()) == (0, "", "")


@pytest.mark.parametrize("state", SourceState)
def test_state_of_a_source_is_one_of_all(state: SourceState) -> None:
    """Exactly one of a source's state series is 1."""
    metrics = VideoMetrics()
    metrics.state("a", SourceState.CONNECTING)
    metrics.state("a", state)
    ones = re.findall(r'penstock_video_state\{source="a",state="(\w+)"\} 1\.0', page(metrics))
    assert ones == [state.value]


def test_forget_of_a_source_leaves_no_series_of_it_and_all_of_the_others() -> None:
    """A source that was taken out is off the page; its neighbours are as they were."""
    metrics = filled()
    before = page(metrics)
    fill(metrics, "yard")
    assert '"yard"' in page(metrics)
    metrics.forget("yard")
    assert page(metrics) == before


def test_word_of_a_source_that_went_begins_no_series() -> None:
    """Frames that were still on their way when their source was taken out are not counted, nor does its end."""
    metrics = VideoMetrics()
    fill(metrics, "yard")
    metrics.forget("yard")
    metrics.decoded("yard")
    metrics.event("yard", AnalyticsKind.DWELL)
    metrics.state("yard", SourceState.ENDED)
    assert "yard" not in page(metrics)


def test_source_that_is_added_again_counts_from_nothing() -> None:
    """The same id, connecting again, has series again, and none of the former's counts."""
    metrics = VideoMetrics()
    fill(metrics, "yard")
    metrics.forget("yard")
    metrics.state("yard", SourceState.CONNECTING)
    metrics.decoded("yard")
    assert 'penstock_video_frames_total{source="yard"} 1.0' in page(metrics)


def test_sources_that_come_and_go_leave_the_page_as_it_was() -> None:
    """A thousand ids leave no series, and what is remembered of them has an end."""
    metrics = filled()
    before = page(metrics)
    for number in range(5000):
        metrics.state(f"camera-{number}", SourceState.CONNECTING)
        metrics.dropped(f"camera-{number}", DropReason.RING_FULL)
        metrics.forget(f"camera-{number}")
    assert page(metrics) == before
    assert len(metrics._gone) <= 4096


def test_counts_from_several_threads_are_all_there() -> None:
    """Sixteen threads that meet a source for the first time at once lose no count, while it is read."""
    metrics = VideoMetrics()
    ready = threading.Barrier(16)

    def count() -> None:
        ready.wait(10.0)
        for _ in range(200):
            metrics.decoded("a")
            metrics.dropped("a", DropReason.CORRUPT)

    threads = [threading.Thread(target=count) for _ in range(16)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        page(metrics)
    for thread in threads:
        thread.join()
    text = page(metrics)
    assert 'penstock_video_frames_total{source="a"} 3200.0' in text
    assert 'penstock_video_dropped_total{reason="corrupt",source="a"} 3200.0' in text
