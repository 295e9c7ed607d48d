"""`penstock video run` of vtest.avi held against the plain reference program: by its first frames, and by all."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from penstock_video.analytics.rules import LineCrossing, Rules
from tests.deepstream_pipeline.reference import PAVEMENT_LINE, RIGHTWARDS, SeenFrame
from tests.integration.video_runs import (
    RUN_TIMEOUT_S,
    Ended,
    Line,
    Place,
    run,
    shown_by,
    times_of,
    tracked,
    write_rules,
)

PAVEMENT = "pavement=580,180,580,420"
WIDTH, HEIGHT, FPS = 768, 576, 10
WAYS = Rules(
    WIDTH,
    HEIGHT,
    line_crossing=(
        LineCrossing("right", PAVEMENT_LINE, RIGHTWARDS),
        LineCrossing("left", PAVEMENT_LINE, RIGHTWARDS[::-1]),
    ),
)
ROUNDED = 0.0005 + 1e-4  # pixels: objects.jsonl has three digits; and a float32 of a box at 768


def run_of(place: Place, clip: Path, out: Path, *, timeout_s: float = RUN_TIMEOUT_S) -> Ended:
    """With a line of the flag and the rules of ways.yaml, which lies beside the folder out then."""
    rules = write_rules(out.with_name("ways.yaml"), WAYS)
    words = ("--source", clip, "--model", "fastestdet", "--line", PAVEMENT, "--rules", rules, "--out", out)
    return run(place, *words, timeout_s=timeout_s)


def expect_same_tracks(objects: Sequence[Line], seen: Sequence[SeenFrame]) -> float:
    """In every frame the same boxes, to the rounding, with the same identities but for their numbers.

    How many pixels a box's side is away from the reference's at most.
    """
    assert [line["frame_num"] for line in objects] == list(range(len(seen)))
    assert all(line["is_inferred"] and (line["width"], line["height"]) == (WIDTH, HEIGHT) for line in objects)
    ours_of: dict[int, int] = {}
    most_apart = 0.0
    for line, one in zip(objects, seen, strict=True):
        theirs = sorted(one.tracked, key=lambda row: row[2])
        assert len(line["objects"]) == len(one.boxes)  # with or without a track
        ours = sorted(tracked(line), key=lambda row: _nearest(row, theirs))
        assert [row["class_id"] for row in ours] == [class_id for _, class_id, _ in theirs]
        boxes = np.array([row["xyxy"] for row in ours]).reshape(-1, 4)
        apart = np.abs(boxes - np.array([box for _, _, box in theirs]).reshape(-1, 4)).max(initial=0.0)
        assert apart <= ROUNDED, f"frame {line['frame_num']}: {apart} pixels apart"
        most_apart = max(most_apart, float(apart))
        for row, (track_id, _, _) in zip(ours, theirs, strict=True):
            assert ours_of.setdefault(track_id, row["track_id"]) == row["track_id"]
    assert len(set(ours_of.values())) == len(ours_of) > 10
    return most_apart


def _nearest(row: Line, theirs: list[tuple[int, int, tuple[float, ...]]]) -> int:
    return int(np.abs(np.array([box for _, _, box in theirs]) - row["xyxy"]).sum(1).argmin())


def expect_same_counts(objects: Sequence[Line], events: Sequence[Line], seen: Sequence[SeenFrame]) -> tuple[int, int]:
    """After every frame, in both directions, and one event a crossing. To the right and to the left, in the end."""
    keys = ("line-crossing/right", "line-crossing/left")
    assert [tuple(line["counts"][key] for key in keys) for line in objects] == [one.counts for one in seen]
    right, left = seen[-1].counts
    assert min(right, left) >= 2
    assert [objects[-1]["counts"][f"line-crossing/pavement.{way}"] for way in ("in", "out")] == [left, right]
    crossings = [sum(event["rule"] == rule for event in events) for rule in ("right", "left", "pavement")]
    assert crossings == [right, left, right + left]
    return right, left


def expect_annotated(path: Path, clip: Path, frames: int) -> None:
    """As many pictures as the clip has, of its size, at its times, each the clip's with something drawn on it."""
    shapes = []
    for number, (picture, original) in enumerate(zip(shown_by(path), shown_by(clip), strict=True)):
        shapes.append(picture.shape)
        if number % 20 == 0:
            apart = np.abs(picture.astype(int) - original).max(axis=2)
            assert np.median(apart) < 12
            assert 0.001 < (apart > 80).mean() < 0.3
    assert shapes == [(HEIGHT, WIDTH, 3)] * frames
    np.testing.assert_allclose(times_of(path), np.arange(frames) / FPS, atol=1e-3)
