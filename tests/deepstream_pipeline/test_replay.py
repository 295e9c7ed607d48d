"""Recorded tracks under rules: the same as live, in flat memory, and with the line's number if a line is bad."""

import json
import tracemalloc
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock_video.analytics.config import rules_from
from penstock_video.analytics.rules import (
    NO_RULES,
    DirectionDetection,
    Dwell,
    LineCrossing,
    Overcrowding,
    RoiFiltering,
    Rules,
)
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.cli.replay import Replay, labels_in, labels_with
from penstock_video.errors import RecordingUnreadable
from penstock_video.sinks.schemas import objects_line
from penstock_video.types import AnalyticsEvent, Detections, Frame, FrameResult, Tracks

LABELS = ("person", "car", "dog")
SQUARE = ((400.0, 200.0), (900.0, 200.0), (900.0, 600.0), (400.0, 600.0))
LINE = ((640.0, 0.0), (600.0, 720.0))
RULES = Rules(
    1280,
    720,
    (RoiFiltering("Yard", SQUARE),),
    (Overcrowding("Crowd", SQUARE, 2, 0.5),),
    (LineCrossing("Gate", LINE), LineCrossing("Out", LINE, ((700.0, 300.0), (600.0, 300.0)))),
    (DirectionDetection("East", ((0.0, 0.0), (100.0, 0.0))),),
    (Dwell("Bench", SQUARE, 1.0),),
)
UPPER_LEFT, LOWER_RIGHT = np.array([17.3, 71.1]), np.array([17.3, 0.0])  # from the foot
START_S = 1_800_000_000.0


def results(*, frames: int, objects: int, seed: int, sources: tuple[str, ...] = ("a",)) -> Iterator[FrameResult]:
    """People who wander through the picture, with places and times of full precision, and frames that are missing."""
    generator = np.random.default_rng(seed)
    place = generator.uniform((100, 200), (1200, 700), (len(sources), objects, 2))
    speed = generator.normal(0, 10, place.shape)
    for number in range(frames):
        speed += generator.normal(0, 3, place.shape)
        place = np.clip(place + speed, (40, 100), (1240, 719))
        for at, source_id in enumerate(sources):
            if generator.random() > 0.1:
                frame = Frame(
                    source_id, number, number / 12 + 1e-7 * generator.random(), 5.0, 1280, 720,
                    captured_unix_s=START_S + number / 12, segment=number // 60,
                )  # fmt: skip
                tracks, is_inferred = tracks_of(place[at], generator.random(objects) > 0.1), generator.random() > 0.2
                yield FrameResult(
                    frame, replace(tracks, is_estimate=not is_inferred), labels=LABELS, is_inferred=is_inferred
                )


def tracks_of(feet: np.ndarray, is_seen: np.ndarray) -> Tracks:
    boxes = np.hstack((feet - UPPER_LEFT, feet + LOWER_RIGHT)).astype(np.float32)[is_seen]
    rows = np.flatnonzero(is_seen)
    detections = Detections(boxes, np.full(len(rows), 0.7, np.float32), (rows % 3).astype(np.int64))
    return Tracks(detections, rows.astype(np.int64), np.ones(len(rows), np.int64))


def live(shown: list[FrameResult], rules: Rules) -> tuple[list[AnalyticsEvent], dict[str, dict[str, int]]]:
    analytics = {result.frame.source_id: SourceAnalytics(rules, LABELS) for result in shown}
    said = [(one.frame.source_id, analytics[one.frame.source_id].observe(one.frame, one.tracks)) for one in shown]
    counts = {source_id: dict(one.counts) for source_id, one in said}
    return [event for _, one in said for event in one.events], counts


@settings(max_examples=5, deadline=None)
@given(seed=st.integers(0, 10**6))
def test_replay_of_the_same_rules_gives_the_events_of_the_run(seed: int) -> None:
    """To the last digit, for every kind of rule, several sources and cuts; and the same counts."""
    shown = list(results(frames=130, objects=5, seed=seed, sources=("a", "b")))
    events, counts = live(shown, RULES)
    replayed = Replay(lambda source_id: RULES)
    assert list(replayed.events(objects_line(result) + b"\n" for result in shown)) == events
    assert replayed.counts == counts
    assert replayed.frames == len(shown)


def test_replay_of_a_busy_run_has_events_of_every_kind() -> None:
    """So that the property above is about something."""
    events, _ = live(list(results(frames=130, objects=8, seed=1)), RULES)
    assert {event.kind.value for event in events} == {
        "roi-filtering", "overcrowding", "line-crossing", "direction-detection", "dwell",
    }  # fmt: skip


def test_replay_asks_for_the_rules_of_each_source_once() -> None:
    """rules_of may give every source its own."""
    asked: list[str] = []

    def rules_of(source_id: str) -> Rules:
        asked.append(source_id)
        return RULES if source_id == "b" else NO_RULES

    shown = list(results(frames=60, objects=4, seed=4, sources=("a", "b")))
    events = list(replay_lines((objects_line(result).decode() for result in shown), rules_of))
    assert sorted(asked) == ["a", "b"]
    assert {event.source_id for event in events} == {"b"}


def test_replay_takes_text_and_empty_lines() -> None:
    """A file opened either way, with an empty line at its end."""
    lines = [objects_line(result) for result in results(frames=50, objects=3, seed=5)]
    as_bytes = list(replay_lines([*lines, b"\n"], lambda _: RULES))
    assert as_bytes == list(replay_lines([line.decode() + "\n" for line in lines], lambda _: RULES))


def test_replay_of_a_long_recording_stays_flat() -> None:
    """Nothing of a frame is kept: 600 frames, which would fill 3 MB, take less than 0.5 MB more than 50."""

    def most_bytes(frames: int) -> int:
        tracemalloc.start()
        for _ in replay_lines(
            (objects_line(one) for one in results(frames=frames, objects=3, seed=6)), lambda _: RULES
        ):
            pass
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return peak

    most_bytes(20)
    assert most_bytes(600) < most_bytes(50) + 500_000


def replay_lines(lines: Iterable[bytes | str], rules_of: Callable[[str], Rules]) -> Iterator[AnalyticsEvent]:
    return Replay(rules_of).events(lines)


def good(number: int) -> bytes:
    return objects_line(next(iter(results(frames=30, objects=2, seed=7)))).replace(
        b'"frame_num":0', b'"frame_num":%d' % number
    )


def with_xyxy(line: bytes, xyxy: object) -> bytes:
    document = json.loads(line)
    document["objects"][0]["xyxy"] = xyxy
    return json.dumps(document).encode()


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda line: line[:-20], "line 3 is no line of objects.jsonl"),
        (lambda line: b"\xff" + line, "line 3 is no line"),
        (lambda line: b"[1, 2]", "line 3 is no line"),
        (lambda line: b'{"version":"4.0","id":3,"objects":["1|3|60|38|160|person"]}', "line 3 is no line"),
        (lambda line: with_xyxy(line, [1, 2, 3]), "line 3 is no line.*xyxy"),
        (lambda line: with_xyxy(line, ["a"] * 4), "line 3 is no line"),
        (lambda line: line.replace(b'"frame_num":2', b'"frame_num":1'), "line 3: frame 1 of source .a. after its"),
        (lambda line: line.replace(b"2027-01-15T", b"yesterday"), "line 3 is no line"),
        (lambda line: line.replace(b'"track_id":0', b'"track_id":9999999999999999999999'), "line 3 is no line"),
        (lambda line: line * 200, "line 3 is no line"),
    ],
)  # fmt: skip
def test_replay_of_a_bad_line_names_its_number(spoil: Callable[[bytes], bytes], words: str) -> None:
    """Earlier results come first; then the error, with the line's number, the fault and an excerpt."""
    with pytest.raises(RecordingUnreadable, match=words) as caught:
        list(replay_lines([good(0), good(1), spoil(good(2)), good(3)], lambda _: RULES))
    assert len(caught.value.message) < 500


def test_labels_of_a_recording_are_found_wherever_they_stand() -> None:
    """A class that only one frame shows has its name; a number that none names is called by it."""
    lines = [objects_line(result) for result in results(frames=3, objects=2, seed=8)]
    assert labels_in(lines) == ("person", "car")
    only = json.loads(lines[0])
    only["objects"] = [only["objects"][0] | {"class_id": 4, "label": "cat"}]
    assert labels_in([*lines, json.dumps(only)]) == ("person", "car", "class 2", "class 3", "cat")


def test_replay_leaves_out_a_last_line_that_is_half() -> None:
    """As a run that was killed leaves it; a whole line without its end is one."""
    lines = [good(number) + b"\n" for number in range(3)]
    replayed = Replay(lambda _: RULES)
    list(replayed.events([*lines, good(3)[:-20]]))
    assert (replayed.frames, replayed.cut_line) == (3, 4)
    assert labels_in([*lines, good(3)[:-20]]) == labels_in(lines)
    whole = Replay(lambda _: RULES)
    list(whole.events([*lines, good(3)]))
    assert (whole.frames, whole.cut_line) == (4, None)
    with pytest.raises(RecordingUnreadable, match="line 4 is no line"):
        list(replay_lines([*lines, good(3)[:-20] + b"\n"], lambda _: RULES))


@pytest.mark.parametrize(
    ("class_id", "labels", "missing"),
    [
        ("car", ("person", "car"), ()),
        (["car", "dog", "dog"], ("person", "car", "dog"), ("dog",)),
        (["dog", 3], ("person", "car", "class 2", "class 3", "dog"), ("dog",)),
        ("0;3", ("person", "car", "class 2", "class 3"), ()),
        (-1, ("person", "car"), ()),
    ],
)
def test_rules_may_name_classes_that_a_recording_does_not_show(
    class_id: object, labels: tuple[str, ...], missing: tuple[str, ...]
) -> None:
    """They stand behind every number that is shown or named, so that no object is one of them."""
    section = {"line-crossing": [{"name": "A", "line": [[0, 0], [9, 9]], "class-id": class_id}]}
    assert labels_with(section, ("person", "car")) == (labels, missing)
    rules_from(section, labels)
