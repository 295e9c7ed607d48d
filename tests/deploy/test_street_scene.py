"""The renderer of streets: the same seed gives the same pixels, and its truth is what the pixels show."""

import json
import math
from pathlib import Path

import cv2
import numpy as np
import pytest

from deploy.models.street.camera import sample_camera, sample_layout
from deploy.models.street.clip import Clip, make_clip, write_clip
from deploy.models.street.picture import Lens
from deploy.models.street.render import write_scenes
from deploy.models.street.scene import SCENARIOS, make_scene, sample_actors, sample_stage
from deploy.models.street.stage import LEAST_HEIGHT, LEAST_VISIBLE, Item, Stage, draw, shoot
from penstock.vision.accuracy import read_annotations

SIZE = (320, 180)


def staged(seed: int, scenario: str) -> tuple[Stage, list[Item]]:
    """A stage and who is on it."""
    generator = np.random.default_rng(seed)
    layout = sample_layout(generator)
    stage = sample_stage(generator, layout, sample_camera(generator, layout, SIZE), scenario)
    return stage, sample_actors(generator, stage, scenario)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_scene_of_a_seed_is_always_the_same(scenario: str) -> None:
    """Pixels and truth; another number or seed is another scene."""
    picture, truth = make_scene(7, 1, size=SIZE, scenario=scenario)
    again, same = make_scene(7, 1, size=SIZE, scenario=scenario)
    assert picture.shape == (180, 320, 3)
    assert np.array_equal(picture, again)
    assert np.array_equal(truth.xyxy, same.xyxy)
    assert not np.array_equal(picture, make_scene(7, 2, size=SIZE, scenario=scenario)[0])
    assert not np.array_equal(picture, make_scene(8, 1, size=SIZE, scenario=scenario)[0])


@pytest.mark.parametrize(("seed", "scenario"), [(1, "crowd"), (2, "occlusion"), (3, "plain")])
def test_box_is_the_extent_of_the_pixels_that_change_without_the_thing(seed: int, scenario: str) -> None:
    """Take a thing away, and its own pixels change, up to the box's edges, and no other thing's owner does."""
    stage, actors = staged(seed, scenario)
    _, truth = shoot(stage, actors, Lens(), np.random.default_rng(0))
    full, drawn = draw(stage, actors)
    masks = [(thing, full.owners == thing.owner) for thing in drawn if thing.item.class_id is not None]
    seen = [(thing, mask) for thing, mask in masks if mask.any()]
    assert len(seen) == len(truth.xyxy) > 0
    for (thing, mask), box in zip(seen, truth.xyxy, strict=True):
        columns, rows = np.flatnonzero(mask.any(axis=0)), np.flatnonzero(mask.any(axis=1))
        assert box.tolist() == [columns[0], rows[0], columns[-1] + 1, rows[-1] + 1]
        without, _ = draw(stage, [actor for actor in actors if actor is not thing.item])
        assert ((full.owners == 0) == (without.owners == 0))[~mask].all()
        assert (full.canvas != without.canvas).any(axis=2)[mask].mean() > 0.75  # the rest has the street's own colour


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_truth_is_within_the_picture_and_ignores_what_is_hidden_or_tiny(scenario: str) -> None:
    """Boxes are not empty, lie within their thing's whole box, and what does not count is as stated."""
    for number in range(4):
        _, truth = make_scene(5, number, size=SIZE, scenario=scenario)
        assert (truth.xyxy[:, :2] >= 0).all()
        assert (truth.xyxy[:, 2:] <= SIZE).all()
        assert (truth.xyxy[:, 2:] > truth.xyxy[:, :2]).all()
        assert (truth.xyxy[:, :2] >= truth.whole_xyxy[:, :2] - 2).all()
        assert (truth.xyxy[:, 2:] <= truth.whole_xyxy[:, 2:] + 2).all()
        is_low = truth.xyxy[:, 3] - truth.xyxy[:, 1] < LEAST_HEIGHT * SIZE[1]
        assert np.array_equal(truth.is_ignored, is_low | (truth.visible < LEAST_VISIBLE))


def test_scenarios_show_what_their_names_say() -> None:
    """Crowds are crowds, what is occluded is occluded, nights are dark."""
    shown = {name: [make_scene(6, number, size=SIZE, scenario=name) for number in range(6)] for name in SCENARIOS}
    people = {name: np.mean([(truth.class_id == 0).sum() for _, truth in scenes]) for name, scenes in shown.items()}
    hidden = {name: np.concatenate([t.visible for _, t in scenes]) for name, scenes in shown.items()}
    light = {name: np.mean([picture.mean() for picture, _ in scenes]) for name, scenes in shown.items()}
    assert people["crowd"] > 2 * people["plain"]
    assert (hidden["occlusion"] < 0.8).mean() > (hidden["plain"] < 0.8).mean()
    assert light["night"] < 0.8 * light["plain"]


def test_written_scenes_are_read_back_with_their_truth(tmp_path: Path) -> None:
    """JPEGs beside annotations.json in COCO's format."""
    write_scenes(tmp_path, 3, 9, size=SIZE, scenarios=("plain", "crowd"))
    truth = read_annotations(tmp_path)
    assert sorted(path.name for path in tmp_path.glob("*.jpg")) == list(truth)
    picture = cv2.imread(str(tmp_path / "000001.jpg"))
    drawn, seen = make_scene(9, 1, size=SIZE, scenario="crowd")
    assert picture is not None
    assert float(np.abs(picture.astype(int) - drawn).mean()) < 4
    assert np.allclose(truth["000001.jpg"].xyxy, seen.xyxy, atol=0.01)
    assert truth["000001.jpg"].ignored.tolist() == seen.is_ignored.tolist()


@pytest.fixture(scope="module")
def clip() -> Clip:
    """Half a minute."""
    return make_clip(4, 30.0, 5.0, size=SIZE)


def test_crossings_are_what_the_tracks_do(clip: Clip) -> None:
    """Objects that cross are on different sides of the line in the frame and the one before; no other changes sides."""
    crossings = {crossing.track_id: crossing for crossing in clip.crossings()}
    assert {crossing.label for crossing in crossings.values()} == {"person", "bicycle", "car"}
    assert {crossing.direction for crossing in crossings.values()} == {"left", "right"}
    for mover in clip.movers:
        side_at_start, side_at_end = (mover.x_at(frame / clip.fps) > clip.line_x for frame in (0, clip.frame_count - 1))
        assert (side_at_start != side_at_end) == (mover.track_id in crossings)
        if mover.track_id in crossings:
            frame = crossings[mover.track_id].frame
            before, after = mover.x_at((frame - 1) / clip.fps), mover.x_at(frame / clip.fps)
            assert min(before, after) <= clip.line_x <= max(before, after)
            assert crossings[mover.track_id].direction == ("right" if after > before else "left")


def test_line_is_in_the_picture_and_divides_it_as_the_crossings_do(clip: Clip) -> None:
    """Seen from the line's near end, what is at greater x is at its right."""
    (start_x, start_y), (end_x, end_y) = clip.line.start, clip.line.end
    for x, y in (clip.line.start, clip.line.end):
        assert 0 <= x <= SIZE[0]
        assert 0 <= y <= SIZE[1]
    right = clip.stage.camera.pixel_of(clip.line_x + 3.0, clip.stage.layout.lanes[0][0])
    assert right is not None
    across = (end_x - start_x) * (right[1] - start_y) - (end_y - start_y) * (right[0] - start_x)
    assert across > 0


def test_clip_is_written_with_its_truth_beside_it(tmp_path: Path) -> None:
    """A video that OpenCV opens, with as many frames as the truth has, and the same tracks as the clip."""
    clip = write_clip(tmp_path / "street.mp4", 4, 2.0, 5.0, size=SIZE)
    video = cv2.VideoCapture(str(tmp_path / "street.mp4"))
    shapes = []
    while (read := video.read())[0]:
        shapes.append(read[1].shape)
    video.release()
    document = json.loads((tmp_path / "street.json").read_text())
    assert shapes == [(180, 320, 3)] * 10
    assert (document["fps"], len(document["frames"])) == (5.0, 10)
    ids = {row["track_id"] for frame in document["frames"] for row in frame}
    assert ids <= {mover.track_id for mover in clip.movers}
    assert len(document["crossings"]) == len(clip.crossings())
    assert math.isclose(document["line"]["start"][0], clip.line.start[0])


def test_scenes_written_again_leave_none_of_the_earlier(tmp_path: Path) -> None:
    """A folder's pictures are those that its annotations.json knows; what is not ours stays."""
    (tmp_path / "notes.txt").touch()
    for count in (3, 1):
        write_scenes(tmp_path, count, 5, size=SIZE, scenarios=SCENARIOS)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["000000.jpg", "annotations.json", "notes.txt"]
    assert list(read_annotations(tmp_path)) == ["000000.jpg"]
