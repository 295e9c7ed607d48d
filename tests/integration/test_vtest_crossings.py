"""People who cross a line in a real clip: `penstock video run` with YOLOX-Nano against crossings counted by eye."""

import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from statistics import median

import pytest

from penstock_video.analytics.rules import Ground, Rules
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.sinks.schemas import read_objects_line
from tests.integration.video_runs import first_frames, lines, new_place, put_model, run
from tests.support.stack import CHECKOUT

TRUTH = tomllib.loads((CHECKOUT / "tests" / "deepstream_pipeline" / "vtest_crossings.toml").read_text())
# Four points of the pavement, in metres: those of a camera 6 m high, under which people are as tall as they are seen.
GROUND = Ground(
    ((100.0, 200.0), (700.0, 200.0), (700.0, 420.0), (100.0, 420.0)),
    ((-6.9, 21.0), (7.6, 21.0), (4.2, 10.5), (-3.8, 10.5)),
)
pytestmark = pytest.mark.xdist_group("video")


@pytest.fixture(scope="module")
def objects(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """objects.jsonl of a run with the settings that a new user has: the model, one line, and nothing else."""
    folder = tmp_path_factory.mktemp("c")
    place = new_place(folder)
    put_model(place, shared_dir, "yolox-nano")
    clip = first_frames(folder / "clip.avi", shared_dir / "media" / TRUTH["clip"], TRUTH["frames"])
    line = ",".join(f"{one}" for point in TRUTH["line"] for one in point)
    words = ("--source", clip, "--model", "yolox-nano", "--engine", "embedded", "--line", f"pavement={line}")
    ended = run(place, *words, "--sink", "jsonl", "--out", folder / "out")
    assert ended.code == 0, ended.err
    return folder / "out" / "objects.jsonl"


def test_people_who_cross_a_line_of_vtest_are_counted_within_one(objects: Path) -> None:
    """In each direction."""
    true = Counter(crossing["direction"] for crossing in TRUTH["crossing"])
    assert (true["in"], true["out"]) == (5, 9)
    *before, last = lines(objects)
    assert len(before) + 1 == TRUTH["frames"]
    counted = {way: last["counts"][f"line-crossing/pavement.{way}"] for way in ("in", "out")}
    assert all(abs(counted[way] - true[way]) <= 1 for way in ("in", "out")), counted


def test_people_of_vtest_walk_as_fast_as_people_do(objects: Path) -> None:
    """By their recorded tracks: around a metre a second, and no one runs."""
    analytics, speeds = SourceAnalytics(Rules(ground=GROUND), ("person",)), defaultdict(list)
    for line in objects.read_bytes().splitlines():
        seen = read_objects_line(line)
        said = analytics.observe(seen.frame, seen.tracks).speeds_mps
        numbers = zip(seen.tracks.track_id.tolist(), seen.tracks.detections.class_id.tolist(), said, strict=True)
        for track_id, class_id, speed in numbers:
            if class_id == 0 and speed is not None:
                speeds[track_id].append(speed)
    typical = sorted(median(of_one) for of_one in speeds.values() if len(of_one) >= 30)
    assert len(typical) >= 8
    assert 0.8 < median(typical) < 1.5
    assert typical[-1] < 2.5
