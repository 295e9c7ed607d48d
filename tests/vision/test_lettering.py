"""Colours, text and lines of drawn pictures: what people can tell apart and read."""

import threading

import cv2
import numpy as np
import numpy.typing as npt
import pytest

from penstock.vision import lettering
from penstock.vision.lettering import Lettering, Picture, line_px_of, text_px_of
from penstock.vision.palette import ALARM, INK, PALETTE, WHITE, Color, color_of, ink_on

Floats = npt.NDArray[np.float64]
# Machado, Oliveira and Fernandes 2009: colours as seen without one kind of cone, of linear RGB.
VISIONS = {
    "normal": np.eye(3),
    "protan": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deutan": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "tritan": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colors: Floats) -> Floats:
    """sRGB of 0 to 255 as linear 0 to 1."""
    share = colors / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def contrast(one: Color, other: Color) -> float:
    """WCAG's contrast ratio, 1 to 21."""
    weights = np.array([0.2126, 0.7152, 0.0722])
    low, high = sorted(float(linear(np.array(color, float)) @ weights) for color in (one, other))
    return (high + 0.05) / (low + 0.05)


def seen_as(vision: str, colors: Floats) -> Floats:
    """Lab values of the colours for this vision."""
    seen = np.clip(linear(colors) @ np.array(VISIONS[vision]).T, 0, 1)
    share = np.where(seen <= 0.0031308, 12.92 * seen, 1.055 * seen ** (1 / 2.4) - 0.055)
    return np.asarray(cv2.cvtColor(share.astype(np.float32)[None], cv2.COLOR_RGB2Lab)[0], np.float64)


@pytest.mark.parametrize("vision", VISIONS)
def test_palette_colours_differ_for_every_vision(vision: str) -> None:
    """Any two colours, the alarm and white differ clearly, also for colour-blind people."""
    lab = seen_as(vision, np.array([*PALETTE, ALARM, WHITE], float))
    distances = np.linalg.norm(lab[:, None] - lab[None], axis=2) + 1000 * np.eye(len(lab))
    assert distances.min() > 14


def test_color_of_gives_neighbours_different_colours() -> None:
    """Nine consecutive classes or tracks have nine colours, and 0, 10 and 20 have three."""
    for first in range(200):
        assert len({color_of(number) for number in range(first, first + 9)}) == 9
    assert len({color_of(0), color_of(10), color_of(20)}) == 3


def test_palette_carries_readable_text_and_shows_on_dark_pictures() -> None:
    """Text on its plate has the contrast that WCAG requires; a line is seen on black, its dark edge on white."""
    for color in (*PALETTE, ALARM, WHITE, INK):
        assert contrast(color, ink_on(color)) >= 4.5
    assert min(contrast(color, (0, 0, 0)) for color in (*PALETTE, ALARM)) >= 3
    assert contrast(INK, WHITE) >= 3


@pytest.mark.parametrize(
    ("width", "height", "capital_px", "line_px"),
    [
        (854, 480, 10, 2),
        (640, 480, 10, 2),
        (1920, 1080, 20, 4),
        (3840, 2160, 38, 8),
        (1080, 1920, 16, 3),
        (600, 400, 9, 2),
    ],
)
def test_lettering_grows_with_the_picture(width: int, height: int, capital_px: int, line_px: int) -> None:
    """Capital letters have about 2 % of the height of the picture; they are legible at 480p."""
    letters = Lettering(text_px_of(width, height))
    picture = np.full((height, width, 3), 255, np.uint8)
    letters.plate(picture, "H", (20, 20), WHITE)
    rows = np.nonzero((picture < 128).all(axis=2).any(axis=1))[0]
    assert len(rows) >= capital_px
    assert line_px_of(width, height) == line_px


@pytest.mark.parametrize("text", ["person #12 0.83", "Ågjy", "車 #1", "x" * 400])
def test_lettering_plate_is_as_large_as_it_says(text: str) -> None:
    """Nothing is drawn beside the plate, and the text is inside it with a margin."""
    letters = Lettering(20)
    picture = np.full((200, 8000, 3), 128, np.uint8)
    letters.plate(picture, text, (50, 60), WHITE)
    rows, columns = np.nonzero((picture != 128).any(axis=2))
    assert (rows.min(), rows.max() + 1) == (60, 60 + letters.height)
    assert (columns.min(), columns.max() + 1) == (50, 50 + letters.width(text))
    dark = np.nonzero((picture < 100).all(axis=2))
    assert dark[0].min() > 60
    assert dark[0].max() < 60 + letters.height - 1
    assert dark[1].min() > 50
    assert dark[1].max() < 50 + letters.width(text) - 1


def test_lettering_fits_long_text_with_an_ellipsis() -> None:
    """The plate is not wider than allowed; a short text stays as it is; without room there is no text."""
    letters = Lettering(20)
    cut = letters.fitted("a very long name of a camera", 120)
    assert cut.startswith("a very")
    assert cut.endswith("…")
    assert letters.width(cut) <= 120
    assert letters.fitted("short", 120) == "short"
    assert letters.fitted("short", 3) == ""


def test_lettering_of_threads_has_a_font_each() -> None:
    """OpenCV draws wrong letters if threads share a font."""
    fonts = [lettering._font()]
    thread = threading.Thread(target=lambda: fonts.append(lettering._font()))
    thread.start()
    thread.join(30)
    assert fonts[0] is lettering._font()
    assert fonts[0] is not fonts[1]


def test_lettering_draws_over_the_edge_of_a_small_picture() -> None:
    """A plate that does not fit is cut, without an error."""
    picture: Picture = np.full((10, 10, 3), 128, np.uint8)
    Lettering(20).plate(picture, "person", (0, 0), WHITE, strength=0.5)
    assert (picture != 128).any()
