"""`penstock video run` against the truth: a plain reference program, and streets whose crossings are known."""

import time
from pathlib import Path

import numpy as np
import pytest
import yaml

from deploy.models.street.clip import Clip
from penstock_video.analytics.rules import section_of
from tests.deepstream_pipeline.reference import PAVEMENT_LINE, SeenFrame, reference
from tests.deepstream_pipeline.test_street_counts import counts_after, street_rules
from tests.integration.video_runs import (
    Ended,
    Place,
    counted_crossings,
    first_frames,
    last_counts,
    lines,
    pictures_of,
    run,
    shown_by,
    tracked,
    true_crossings,
    video,
    write_rules,
    write_street,
)
from tests.integration.video_truth import PAVEMENT, expect_annotated, expect_same_counts, expect_same_tracks, run_of

pytestmark = pytest.mark.xdist_group("video")
FRAMES = 140
SEEDS, SECONDS, FPS = (37, 76), 6.0, 10.0


@pytest.fixture(scope="module")
def vtest(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first FRAMES of the clip."""
    folder = tmp_path_factory.mktemp("vtest")
    return first_frames(folder / "vtest.avi", shared_dir / "media" / "vtest.avi", FRAMES)


@pytest.fixture(scope="module")
def done(video_place: Place, vtest: Path) -> tuple[Ended, Path]:
    """The run of it, and its folder, beside which ways.yaml lies."""
    out = vtest.parent / "out"
    return run_of(video_place, vtest, out), out


@pytest.fixture(scope="module")
def seen(shared_dir: Path) -> list[SeenFrame]:
    """What the reference program says of the same frames."""
    media, models = shared_dir / "media", shared_dir / "models"
    return reference(media / "vtest.avi", models / "FastestDet.onnx", PAVEMENT_LINE, frames=FRAMES)


def test_run_of_a_clip_ends_well_and_says_what_it_wrote(done: tuple[Ended, Path]) -> None:
    """Exit code 0, every frame inferred, none dropped, and the files."""
    ended, out = done
    assert ended.code == 0, ended.err
    names = {"annotated.mp4", "poster.jpg", "objects.jsonl", "events.jsonl", "events"}
    assert {path.name for path in out.iterdir()} == names
    assert all(str(out / name) in ended.out for name in names)
    assert f"{FRAMES} frames in " in ended.out


def test_tracks_of_a_clip_are_the_reference_programs(done: tuple[Ended, Path], seen: list[SeenFrame]) -> None:
    """In every frame the same boxes, to the rounding, with the same identities but for their numbers."""
    expect_same_tracks(lines(done[1] / "objects.jsonl"), seen)


def test_counts_of_a_clip_are_the_reference_programs(done: tuple[Ended, Path], seen: list[SeenFrame]) -> None:
    """After every frame, in both directions, and one event a crossing."""
    expect_same_counts(lines(done[1] / "objects.jsonl"), lines(done[1] / "events.jsonl"), seen)


def test_annotated_clip_plays_frame_for_frame(done: tuple[Ended, Path], vtest: Path) -> None:
    """As many pictures as the clip has, of its size, at its times, each the clip's with something drawn on it."""
    expect_annotated(done[1] / "annotated.mp4", vtest, FRAMES)


def test_replay_of_a_run_gives_its_events(done: tuple[Ended, Path], vtest: Path, video_place: Place) -> None:
    """The same rules over the recorded tracks: the same events; other rules are distinguished, with exit code 1."""
    out, rules = done[1], vtest.parent / "ways.yaml"
    words = ("replay", out / "objects.jsonl", "--rules", rules, "--against", out / "events.jsonl")
    same = video(video_place, *words, "--line", PAVEMENT)
    assert same.code == 0, same.out + same.err
    events = len(lines(out / "events.jsonl"))
    assert f"{events} events in {FRAMES} frames\n{events} are equal, 0 missing here, 0 new\n" in same.out
    fewer = video(video_place, *words)
    assert fewer.code == 1
    assert f"{events // 2} are equal, {events // 2} missing here, 0 new\n" in fewer.out


def test_interval_infers_every_second_frame_and_says_so(video_place: Place, vtest: Path, tmp_path: Path) -> None:
    """Frames between two that are inferred say that none was detected, and have the tracks of the frame before."""
    clip = first_frames(tmp_path / "clip.avi", vtest, 40)
    words = ("--source", clip, "--model", "fastestdet", "--line", PAVEMENT, "--interval", "1", "--sink", "jsonl")
    ended = run(video_place, *words, "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    first = lines(tmp_path / "out" / "objects.jsonl")
    assert [line["is_inferred"] for line in first] == [True, False] * 20
    shown = [{row["track_id"] for row in tracked(line)} for line in first]
    assert sum(before == between for before, between in zip(shown[10::2], shown[11::2], strict=True)) >= 12
    assert max(map(len, shown)) >= 3


@pytest.fixture(scope="module")
def streets(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Clip]]:
    """By their names."""
    folder = tmp_path_factory.mktemp("streets")
    paths = {f"street-{seed}": (folder / f"street-{seed}.mp4", seed) for seed in SEEDS}
    return {name: (path, write_street(path, seed, SECONDS, FPS)) for name, (path, seed) in paths.items()}


def test_two_streets_at_once_are_counted_exactly(
    video_place: Place, streets: dict[str, tuple[Path, Clip]], tmp_path: Path
) -> None:
    """By class and direction, each as many as it has: the sources of one run do not mix."""
    sources = [{"uri": str(path), "analytics": section_of(street_rules(clip.line))} for path, clip in streets.values()]
    (tmp_path / "both.yaml").write_text(yaml.safe_dump({"source": sources, "primary-gie": {"model": "street"}}))
    ended = run(video_place, tmp_path / "both.yaml", "--out", tmp_path / "out")
    assert ended.code == 0, ended.err
    for name, (_, clip) in streets.items():
        true = true_crossings(clip)
        assert true.total() >= 4
        assert counted_crossings(last_counts(tmp_path / "out" / "objects.jsonl", name)) == true
        assert len(pictures_of(tmp_path / "out" / name / "annotated.mp4")) == clip.frame_count


def test_street_at_its_own_speed_is_counted_as_it_was_seen(
    video_place: Place, streets: dict[str, tuple[Path, Clip]], tmp_path: Path
) -> None:
    """As a camera that may lose frames, in the time that the clip has: after every frame that came the counts are those
    of the frames that were looked at, however many a slow machine has lost; of all frames they are the truth."""
    path, clip = streets["street-37"]
    words = ("--source", path, "--model", "street", "--realtime", "--sink", "jsonl", "--out", tmp_path / "out")
    began = time.monotonic()
    ended = run(video_place, *words, "--rules", write_rules(tmp_path / "rules.yaml", street_rules(clip.line)))
    assert ended.code == 0, ended.err
    assert time.monotonic() - began > SECONDS - 1
    objects = lines(tmp_path / "out" / "objects.jsonl")
    looked_at = {line["frame_num"]: line["is_inferred"] for line in objects}
    assert sum(looked_at.values()) >= clip.frame_count / 2
    pictures = [np.ascontiguousarray(picture[..., ::-1]) for picture in shown_by(path)]
    came = [(number, pictures[number] if is_seen else None) for number, is_seen in looked_at.items()]
    assert [line["counts"] for line in objects] == list(counts_after(came, clip.line, clip.fps))
    if looked_at == dict.fromkeys(range(clip.frame_count), True):
        assert counted_crossings(objects[-1]["counts"]) == true_crossings(clip)
