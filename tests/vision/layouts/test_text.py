"""Text: recognisers' steps become characters, detectors' maps become rectangles."""

import math

import cv2
import numpy as np
import pytest

from penstock.protocol.errors import EngineFailed
from penstock.protocol.vision_results import TextLine, TextLines
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import ResizeMode
from tests.vision.layouts.decoding import FITS, Array, decoded, fitted

GEOMETRY = fitted((320, 48), (320, 48))
CHARACTERS = "0123456789abcé字"
BLANK = 0

# recognisers ----------------------------------------------------------------------------------------------------------


def steps_of(text: str, columns: int, *, likelihood: float = 0.9) -> Array:
    """(steps, columns): each character of `text` at one step, `_` a blank, with that likelihood."""
    alphabet = "_" + CHARACTERS + " "
    rows = np.full((len(text), columns), (1 - likelihood) / (columns - 1), np.float32)
    for row, character in zip(rows, text, strict=True):
        row[alphabet.index(character)] = likelihood
    return rows


def read(steps: Array, row: int | None = None, **options: object) -> tuple[TextLine, ...]:
    return decoded(TextLines, "ctc", (steps,), GEOMETRY, row, **{"characters": CHARACTERS, **options}).lines


@pytest.mark.parametrize(
    ("steps", "text"),
    [("__1122__33", "123"), ("1_1__1", "111"), ("é字 _a a", "é字 a a"), ("a", "a"), ("  aa  b", " a b"), ("0", "0")],
)
def test_repeats_fall_together_and_blanks_are_left_out(steps: str, text: str) -> None:
    """A blank between two equal characters keeps both; the last column is the space."""
    (line,) = read(steps_of(steps, len(CHARACTERS) + 2))
    assert (line.text, line.score, line.polygon) == (text, pytest.approx(0.9, abs=1e-6), None)


def test_recogniser_without_a_space_has_one_column_less() -> None:
    """The characters of the card are then all."""
    (line,) = read(steps_of("12字_", len(CHARACTERS) + 1))
    assert line.text == "12字"


def test_score_is_the_mean_of_the_steps_that_gave_a_character() -> None:
    """Repeats and blanks do not count."""
    steps = np.concatenate(
        [steps_of("1", 17, likelihood=0.8), steps_of("1__", 17, likelihood=0.99), steps_of("2", 17, likelihood=0.6)]
    )
    (line,) = read(steps)
    assert (line.text, line.score) == ("12", pytest.approx(0.7, abs=1e-6))
    assert read(steps, pre_cluster_threshold=0.71) == ()


def test_logits_become_probabilities_with_apply_softmax() -> None:
    """The text is the same; huge logits are no overflow."""
    steps = steps_of("_4_22", len(CHARACTERS) + 2)
    (line,) = read(np.log(steps) + 3, has_softmax=True)
    assert (line.text, line.score) == ("42", pytest.approx(0.9, abs=1e-5))
    (huge,) = read(np.where(steps > 0.5, 3e38, -3e38).astype(np.float32), has_softmax=True)
    assert (huge.text, huge.score) == ("42", 1)


def test_only_blanks_are_no_line() -> None:
    """Neither are no steps at all."""
    assert read(steps_of("____", len(CHARACTERS) + 2)) == ()
    assert read(np.zeros((0, len(CHARACTERS) + 2), np.float32)) == ()


def test_batch_of_crops_gives_each_its_text() -> None:
    """[batch, steps, columns]."""
    batch = np.stack([steps_of("12", 17), steps_of("a_", 17)])
    assert [read(batch, row)[0].text for row in (0, 1)] == ["12", "a"]


@pytest.mark.parametrize("columns", [0, 1, 15, 18, 6625])
def test_recogniser_with_other_characters_than_the_card_is_refused(columns: int) -> None:
    """The error says how many columns were expected."""
    with pytest.raises(EngineFailed) as failed:
        read(np.zeros((10, columns), np.float32))
    assert f"[steps, {len(CHARACTERS) + 2}] or [steps, {len(CHARACTERS) + 1}]" in str(failed.value)


# detectors ------------------------------------------------------------------------------------------------------------


def rectangle(x: float, y: float, width: float, height: float, degrees: float) -> Array:
    """(4, 2): corners from the top left one on, clockwise, turned clockwise about the centre (x, y)."""
    turn = math.radians(degrees)
    across = np.array([math.cos(turn), math.sin(turn)]) * width / 2
    down = np.array([-math.sin(turn), math.cos(turn)]) * height / 2
    return np.array([x, y]) + np.array([-across - down, across - down, across + down, down - across])


def grown(x: float, y: float, width: float, height: float, degrees: float, ratio: float) -> Array:
    """Each side moves out by area × ratio / perimeter."""
    out = width * height * ratio / (2 * (width + height))
    return rectangle(x, y, width + 2 * out, height + 2 * out, degrees)


def likelihood_of(*rectangles: tuple[float, ...], size: tuple[int, int] = (320, 320), inside: float = 0.9) -> Array:
    """(1, height, width) float32."""
    picture = np.full((size[1], size[0]), 0.05, np.float32)
    for one in rectangles:
        cv2.fillPoly(picture, [np.round(rectangle(*one)).astype(np.int32)], (inside,))
    return picture[np.newaxis]


def to_photo(corners: Array, geometry: Geometry) -> Array:
    """Network pixels to the photo's, cut at its edge."""
    x = np.clip((corners[..., 0] - geometry.pad_x) / geometry.scale_x, 0, geometry.source_width)
    y = np.clip((corners[..., 1] - geometry.pad_y) / geometry.scale_y, 0, geometry.source_height)
    return np.stack([x, y], axis=-1)


def lines_of(likelihood: Array, geometry: Geometry, row: int | None = None, **options: object) -> tuple[TextLine, ...]:
    return decoded(TextLines, "db", (likelihood,), geometry, row, **options).lines


@pytest.mark.parametrize("fit", FITS)
@pytest.mark.parametrize("ratio", [1.5, 2.0])
def test_upright_lines_are_found_exactly_and_from_top_to_bottom(ratio: float, fit: ResizeMode) -> None:
    """Rectangles between whole pixels, grown, in the photo's pixels."""
    geometry = fitted((800, 600), (320, 320), fit)
    wanted = [(160, 90, 100, 14, 0), (90, 140, 60, 20, 0), (200, 140, 40, 20, 0), (160, 220, 200, 30, 0)]
    lines = lines_of(likelihood_of(*wanted[::-1]), geometry, unclip_ratio=ratio)
    assert [line.text for line in lines] == [""] * 4
    for line, one in zip(lines, wanted, strict=True):
        assert line.polygon is not None
        assert (line.polygon.shape, line.polygon.dtype) == ((4, 2), np.float32)
        assert line.polygon == pytest.approx(to_photo(grown(*one, ratio), geometry), abs=1e-2)
        assert line.score == pytest.approx(0.9, abs=1e-3)


@pytest.mark.parametrize("degrees", [-89, -80, -60, -44, -30, -10, -3, 3, 10, 30, 44, 60, 80, 89])
def test_turned_line_has_its_corners_clockwise_from_the_top_left(degrees: float) -> None:
    """Of the two corners farthest left, the upper one is the first. Corners are within 2 pixels of the drawn ones."""
    one = (160, 160, 150, 24, degrees)
    (line,) = lines_of(likelihood_of(one), fitted((320, 320), (320, 320)))
    assert line.polygon is not None
    farthest_left = sorted(line.polygon.tolist())[:2]
    assert line.polygon[0].tolist() == min(farthest_left, key=lambda corner: corner[1])
    wanted = grown(*one, 1.5)
    assert min(np.abs(line.polygon - np.roll(wanted, turn, axis=0)).max() for turn in range(4)) < 2
    if abs(degrees) <= 45:
        assert np.abs(line.polygon - wanted).max() < 2


def test_map_of_half_the_networks_size_is_scaled() -> None:
    """And a map without the axis of 1 is read."""
    geometry = fitted((640, 640), (640, 640))
    (line,) = lines_of(likelihood_of((160, 160, 100, 20, 0))[0], geometry)
    assert line.polygon == pytest.approx(2 * grown(160, 160, 100, 20, 0, 1.5), abs=1e-2)


def test_faint_and_tiny_regions_are_no_lines() -> None:
    """The mean inside is over pre-cluster-threshold, pixels are over segmentation-threshold; 0.6 and 0.3 by default."""
    geometry = fitted((320, 320), (320, 320))
    faint = likelihood_of((160, 160, 100, 20, 0), inside=0.5)
    assert lines_of(faint, geometry) == ()
    assert len(lines_of(faint, geometry, pre_cluster_threshold=0.4)) == 1
    assert lines_of(faint, geometry, pre_cluster_threshold=0.4, segmentation_threshold=0.55) == ()
    assert lines_of(likelihood_of((160, 160, 100, 1, 0)), geometry) == ()
    assert lines_of(np.full((1, 320, 320), 0.2, np.float32), geometry) == ()


def test_the_best_lines_are_chosen_and_sorted_by_place() -> None:
    """max-detections takes the best by score."""
    geometry = fitted((320, 320), (320, 320))
    likelihood = np.maximum(likelihood_of((100, 60, 80, 16, 0), inside=0.8), likelihood_of((100, 200, 80, 16, 0)))
    likelihood = np.maximum(likelihood, likelihood_of((100, 120, 80, 16, 0), inside=0.7))
    scores = [line.score for line in lines_of(likelihood, geometry, topk=2)]
    assert scores == pytest.approx([0.8, 0.9], abs=1e-3)


def test_detector_of_a_batch_gives_each_picture_its_lines() -> None:
    """[batch, 1, h, w] and [batch, h, w]; logits with apply-sigmoid."""
    geometry = fitted((320, 320), (320, 320))
    batch = np.stack([likelihood_of(), likelihood_of((100, 60, 80, 16, 0))])
    for array in (batch, batch[:, 0]):
        assert [len(lines_of(array, geometry, row)) for row in (0, 1)] == [0, 1]
    (line,) = lines_of(np.log(batch / (1 - batch)), geometry, 1, has_sigmoid=True)
    assert line.score == pytest.approx(0.9, abs=1e-3)


def test_map_full_of_specks_is_decoded_in_bounded_time() -> None:
    """A quarter of a million regions of a pixel, and one that is text; the whole map as one region."""
    geometry = fitted((1024, 1024), (1024, 1024))
    specks = np.zeros((1, 1024, 1024), np.float32)
    specks[:, ::2, ::2] = 1
    specks[:, 500:540, 100:400] = 1
    assert len(lines_of(specks, geometry)) == 1
    (line,) = lines_of(np.ones((1, 1024, 1024), np.float32), geometry)
    assert line.polygon == pytest.approx(np.array([[0, 0], [1024, 0], [1024, 1024], [0, 1024]]))


@pytest.mark.parametrize(
    ("array", "what"),
    [
        (np.zeros((2, 32, 32), np.float32), "[1, h, w] or [h, w]"),
        (np.zeros((1, 0, 32), np.float32), "[1, h, w] or [h, w]"),
        (np.full((1, 32, 32), np.inf, np.float32), "infinite"),
    ],
)
def test_map_of_another_form_is_refused_with_a_sentence(array: Array, what: str) -> None:
    """It names the output and what was expected."""
    with pytest.raises(EngineFailed) as failed:
        lines_of(array, fitted((32, 32), (32, 32)))
    assert what in str(failed.value)


def test_huge_values_of_a_map_are_no_overflow() -> None:
    """Scores are in 0 to 1."""
    wild = np.random.default_rng(0).choice(np.array([3e38, -3e38, 0.9], np.float32), (1, 64, 64))
    for line in lines_of(wild, fitted((64, 64), (64, 64)), pre_cluster_threshold=0.0):
        assert 0 <= line.score <= 1
    assert len(lines_of(np.full((1, 64, 64), 3e38, np.float32), fitted((64, 64), (64, 64)))) == 1
