"""Frozen pictures and cuts, by brightness."""

from pathlib import Path

import av
import numpy as np
import pytest

from penstock_video.decode.codec import Painter, PictureSimilarity, Plane, thumbnail_of

DICE = np.random.default_rng(3)
SCENE = DICE.integers(0, 90, (480, 640), np.uint8)


def look(likeness: PictureSimilarity, luma: Plane) -> tuple[int, bool]:
    """At a picture, through its thumbnail."""
    return likeness.look(thumbnail_of(luma))


def test_frozen_picture_keeps_its_digest() -> None:
    """Equal pictures are equal, also where a codec adds a grey level here and there; another one is another."""
    likeness = PictureSimilarity()
    noise = (DICE.random(SCENE.shape) < 0.5).astype(np.uint8)
    first, _ = look(likeness, SCENE)
    assert look(likeness, SCENE.copy()) == (first, False)
    assert look(likeness, SCENE + noise)[0] == first
    moved = SCENE.copy()
    moved[200:260, 300:340] = 255
    assert look(likeness, moved)[0] != first
    assert 0 <= first < 2**64


def test_slow_change_is_no_frozen_picture() -> None:
    """Dusk changes less than noise from one frame to the next, and is seen all the same."""
    likeness = PictureSimilarity()
    digests = {look(likeness, SCENE + np.uint8(step // 4))[0] for step in range(40)}
    assert len(digests) > 3


def test_another_scene_is_a_cut() -> None:
    """A picture of other brightnesses begins another scene, unless cuts are not asked for, or it is the first."""
    bright = 255 - SCENE
    assert [look(PictureSimilarity(), bright)[1], *_cuts(PictureSimilarity(), SCENE, SCENE, bright, bright)] == [
        False
    ] * 3 + [True, False]
    assert _cuts(PictureSimilarity(cut=0.0), SCENE, bright) == [False, False]
    likeness = PictureSimilarity()
    look(likeness, SCENE)
    likeness.begin()
    assert look(likeness, bright)[1] is False


@pytest.mark.parametrize("size", [(1, 1), (7, 3), (18, 64), (2000, 3), (2160, 3840)])
def test_picture_of_any_size_is_looked_at(size: tuple[int, int]) -> None:
    """Height and width may be anything."""
    assert look(PictureSimilarity(), np.zeros(size, np.uint8))[1] is False


def test_real_scene_has_no_cut_and_never_stands_still(shared_dir: Path) -> None:
    """People who walk through one scene are no cut, and no frozen picture."""
    likeness, painter = PictureSimilarity(), Painter()
    with av.open(str(shared_dir / "media" / "vtest.avi")) as container:
        seen = [look(likeness, painter.luma(frame)) for frame in container.decode(video=0)]
    assert [cut for _, cut in seen] == [False] * 795
    assert len({digest for digest, _ in seen}) == 795


def _cuts(likeness: PictureSimilarity, *pictures: Plane) -> list[bool]:
    return [look(likeness, picture)[1] for picture in pictures]
