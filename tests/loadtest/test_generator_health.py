"""When the load generator was itself the bottleneck, and what a recording may look like."""

from pathlib import Path

import pytest

from penstock_load.driver.protocol import GeneratorLoad, SendTally, allowed_lag_s, judge, read_recording
from penstock_load.results import GeneratorHealth, Record, Side, Status

IDLE = GeneratorLoad(seconds=10, cpu_s=1)


def sent(at_s: float, *, lag_s: float = 0.0001, status: Status = Status.OK) -> Record:
    """A request that was due then and left so much later."""
    return Record(1, "p", Side.TARGET, "image m", at_s, at_s + lag_s, at_s + lag_s + 0.01, status)


def health_of(records: list[Record], *loads: GeneratorLoad, slo_p99_ms: float = 100) -> GeneratorHealth:
    """Of ten seconds from 0."""
    tally = SendTally(10, allowed_lag_s(slo_p99_ms))
    tally.add(records)
    return judge(tally, loads or (IDLE,), seconds=10)


def test_generator_that_kept_its_schedule_is_healthy() -> None:
    """All sent, half a millisecond late at most, a tenth of a core: no complaint, and the figures say so."""
    records = [sent(i / 100, lag_s=0.0005 if i % 100 == 0 else 0.0001) for i in range(1000)]
    health = health_of(records, IDLE, GeneratorLoad(10, 3))
    assert (health.intended, health.sent, health.intended_per_s, health.sent_per_s) == (1000, 1000, 100, 100)
    assert health.lag_p50_ms == pytest.approx(0.1)
    assert health.lag_p99_ms == pytest.approx(0.1)
    assert (health.cpu, health.processes, health.complaint) == (0.3, 2, "")


@pytest.mark.parametrize(("late", "is_bottleneck"), [(10, False), (11, True)])
def test_less_than_99_percent_in_time_is_a_complaint(late: int, is_bottleneck: bool) -> None:
    """Of 1000 requests ten may leave after the schedule's end, not eleven."""
    records = [sent(i / 100) for i in range(1000 - late)] + [sent(9.9, lag_s=0.2) for _ in range(late)]
    words = "it sent 98.9% of the 1000 intended requests in time"
    assert (words in health_of(records).complaint) is is_bottleneck


def test_requests_that_had_no_room_are_counted_in_the_complaint() -> None:
    """NOT_SENT is not sent: it has no lag and is missing from the rate."""
    records = [sent(i / 100, status=Status.NOT_SENT if i % 2 else Status.OK) for i in range(1000)]
    health = health_of(records)
    assert (health.sent, health.sent_per_s) == (500, 50)
    assert "it sent 50.0% of the 1000 intended requests in time, 500 not at all" in health.complaint


@pytest.mark.parametrize(
    ("slo_p99_ms", "lag_ms", "is_bottleneck"),
    [(10, 4.9, False), (10, 5.1, True), (100, 9.9, False), (100, 10.1, True), (500, 49, False), (500, 51, True)],
)
def test_lag_beyond_5_ms_and_a_tenth_of_the_slo_is_a_complaint(
    slo_p99_ms: float, lag_ms: float, is_bottleneck: bool
) -> None:
    """What counts is the 99th percentile: here 2 % are late."""
    records = [sent(i / 100, lag_s=lag_ms / 1000 if i % 50 == 0 else 0) for i in range(1000)]
    complaint = health_of(records, slo_p99_ms=slo_p99_ms).complaint
    assert (f"1 % of the requests left more than {lag_ms:.1f} ms late" in complaint) is is_bottleneck


def test_busy_loop_is_a_complaint_though_nothing_was_late() -> None:
    """A closed loop has no lag; its busiest process decides."""
    records = [sent(i / 100, lag_s=0) for i in range(1000)]
    assert health_of(records, IDLE, GeneratorLoad(10, 9.4)).complaint == ""
    assert "its loop was busy 97% of the time" in health_of(records, IDLE, GeneratorLoad(10, 9.7)).complaint


def test_phase_without_requests_is_healthy() -> None:
    """A quiet replay is no failure."""
    assert health_of([]) == GeneratorHealth(0, 0, 0, 0, 0, 0, 0.1, 1)


def test_recording_is_a_runs_records_or_times(tmp_path: Path) -> None:
    """Either way the moments are sorted and begin at 0; of a run with two sides the target's count."""
    run, times = tmp_path / "records.jsonl", tmp_path / "times.txt"
    run.write_text(
        '{"round":1,"phase":"p","side":"target","request":"a","intended_s":12.5,"sent_s":13,"done_s":14,"status":"ok"}\n'
        '{"round":1,"phase":"p","side":"beside","request":"a","intended_s":1,"sent_s":13,"done_s":14,"status":"ok"}\n'
        '{"round":1,"phase":"p","side":"target","request":"a","intended_s":12,"sent_s":13,"done_s":14,"status":"ok"}\n'
    )
    times.write_text("3\n\n2.5\n4e0\n")
    assert read_recording(run) == [0, 0.5]
    assert read_recording(times) == [0, 0.5, 1.5]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("1\nsoon\n", r"times\.txt:2: 'soon' is neither a record nor a time in seconds"),
        ('{"phase": "p"}\n', r"times\.txt:1: .* is neither"),
        ("1\n\n\xff\n", r"times\.txt:3: "),
        ("1e999\n", r"times\.txt:1: "),
        ("\n", r"times\.txt holds no time to send at"),
    ],
)
def test_bad_recording_is_refused_with_file_and_line(tmp_path: Path, text: str, words: str) -> None:
    """The sentence says where to look."""
    path = tmp_path / "times.txt"
    path.write_text(text, encoding="latin-1")
    with pytest.raises(ValueError, match=words):
        read_recording(path)


def test_recording_that_is_not_there_is_named(tmp_path: Path) -> None:
    """A path with a typing mistake is one sentence."""
    with pytest.raises(ValueError, match=r"nowhere\.jsonl cannot be read: No such file"):
        read_recording(tmp_path / "nowhere.jsonl")
