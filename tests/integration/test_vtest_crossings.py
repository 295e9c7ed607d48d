"""People who cross a line in a real clip: `penstock video run` with YOLOX-Nano against crossings counted by eye."""

import tomllib
from collections import Counter
from pathlib import Path

import pytest

from tests.integration.video_runs import first_frames, lines, new_place, put_model, run
from tests.support.stack import CHECKOUT

TRUTH = tomllib.loads((CHECKOUT / "tests" / "deepstream_pipeline" / "vtest_crossings.toml").read_text())
pytestmark = pytest.mark.xdist_group("video")


def test_people_who_cross_a_line_of_vtest_are_counted_within_one(
    shared_dir: Path, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """In each direction, by the settings that a new user has: the model, one line, and nothing else."""
    place = new_place(tmp_path_factory.mktemp("c"))  # a short path: it has sockets
    put_model(place, shared_dir, "yolox-nano")
    clip = first_frames(tmp_path / "clip.avi", shared_dir / "media" / TRUTH["clip"], TRUTH["frames"])
    line = ",".join(f"{one}" for point in TRUTH["line"] for one in point)
    words = ("--source", clip, "--model", "yolox-nano", "--engine", "embedded", "--line", f"pavement={line}")
    ended = run(place, *words, "--sink", "jsonl", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    true = Counter(crossing["direction"] for crossing in TRUTH["crossing"])
    assert (true["in"], true["out"]) == (5, 9)
    objects = lines(tmp_path / "out" / "objects.jsonl")
    assert len(objects) == TRUTH["frames"]
    counted = {way: objects[-1]["counts"][f"line-crossing/pavement.{way}"] for way in ("in", "out")}
    assert all(abs(counted[way] - true[way]) <= 1 for way in ("in", "out")), counted
