"""What a camera makes of a street: glare, weather, blur, exposure, noise, compression."""

from collections.abc import Sequence
from dataclasses import dataclass

import cv2
import numpy as np
import numpy.typing as npt

from deploy.models.street.brush import Glow

Picture = npt.NDArray[np.uint8]

_MARGIN = 64


@dataclass(frozen=True, slots=True)
class Lens:
    """noise: standard deviation in grey values. blur_px, smear_px: at 640 pixels' width. quality: of the JPEG, or None.

    rain, snow: drops and flakes a picture of 640 x 360. gains: BGR. gamma: over 1 is darker.
    """

    noise: float = 0.0
    blur_px: float = 0.0
    smear_px: float = 0.0
    smear_angle: float = 0.0
    quality: int | None = None
    rain: int = 0
    snow: int = 0
    gains: tuple[float, float, float] = (1.0, 1.0, 1.0)
    gamma: float = 1.0
    contrast: float = 1.0
    vignette: float = 0.0


def sample_lens(generator: np.random.Generator, *, is_noisy: bool, is_dark: bool) -> Lens:
    """Any camera; is_noisy: a bad one."""
    noise = float(generator.uniform(8, 18) if is_noisy else generator.gamma(1.5, 1.6)) + (2.0 if is_dark else 0.0)
    smears = generator.random() < (0.3 if is_noisy else 0.08)
    falls = generator.random() < (0.3 if is_noisy else 0.1)
    is_snow = falls and generator.random() < 0.35
    tint = generator.normal(1.0, 0.025, 3)
    exposure = float(np.exp(generator.normal(0.0, 0.14)))
    return Lens(
        noise=noise,
        blur_px=float(generator.uniform(0, 1.3) if is_noisy else generator.uniform(0, 0.7)),
        smear_px=float(generator.uniform(1.5, 4.0)) if smears else 0.0,
        smear_angle=float(generator.uniform(0, 180)),
        quality=int(generator.integers(22, 60) if is_noisy else generator.integers(45, 97)),
        rain=int(generator.integers(60, 350)) if falls and not is_snow else 0,
        snow=int(generator.integers(60, 300)) if is_snow else 0,
        gains=(float(tint[0]) * exposure, float(tint[1]) * exposure, float(tint[2]) * exposure),
        gamma=float(np.exp(generator.normal(0.0, 0.12))),
        contrast=float(generator.uniform(0.75, 1.1)),
        vignette=float(generator.uniform(0, 0.35)),
    )


def take(picture: Picture, lens: Lens, generator: np.random.Generator) -> Picture:
    """The picture as the camera delivers it; the picture given is used up."""
    height, width = picture.shape[:2]
    zoom = width / 640
    if lens.rain:
        _let_rain(picture, round(lens.rain * zoom), zoom, generator)
    if lens.snow:
        _let_snow(picture, lens.snow, zoom, generator)
    if lens.blur_px * zoom > 0.25:
        picture = cv2.GaussianBlur(picture, (0, 0), lens.blur_px * zoom)
    if lens.smear_px * zoom > 1:
        picture = cv2.filter2D(picture, -1, _smear(lens.smear_px * zoom, lens.smear_angle))
    picture = cv2.LUT(picture, _curves(lens))
    if lens.vignette:
        picture = cv2.multiply(picture, _vignette(width, height, lens.vignette), dtype=cv2.CV_8U)
    if lens.noise:
        picture = cv2.add(picture, _noise(width, height, lens.noise, generator), dtype=cv2.CV_8U)
    if lens.quality is not None:
        picture = _through_jpeg(picture, lens.quality)
    return picture


def paint_glows(picture: Picture, owners: npt.NDArray[np.uint16], glows: Sequence[Glow]) -> None:
    """Adds the lights whose owners are seen where they are."""
    height, width = picture.shape[:2]
    for glow in glows:
        column, row = int(glow.u), int(glow.v)
        if not (0 <= column < width and 0 <= row < height) or owners[row, column] != glow.owner:
            continue
        reach = max(int(glow.radius_px * 2), 2)
        left, right = max(column - reach, 0), min(column + reach + 1, width)
        top, bottom = max(row - reach, 0), min(row + reach + 1, height)
        down, across = np.ogrid[top:bottom, left:right]
        square = ((across - glow.u) ** 2 + (down - glow.v) ** 2) / max(glow.radius_px * 0.5, 0.7) ** 2
        shine = (np.exp(-square) * 0.9 + 0.12 * np.exp(-square / 6)).astype(np.float32)
        patch = picture[top:bottom, left:right]
        patch[:] = np.clip(patch + shine[..., None] * np.array(glow.color, np.float32), 0, 255).astype(np.uint8)


def _through_jpeg(picture: Picture, quality: int) -> Picture:
    _, encoded = cv2.imencode(".jpg", picture, [cv2.IMWRITE_JPEG_QUALITY, quality])
    decoded: Picture | None = cv2.imdecode(encoded, cv2.IMREAD_COLOR)
    if decoded is None:
        raise ValueError("OpenCV cannot read the JPEG that it wrote")
    return decoded


def _curves(lens: Lens) -> npt.NDArray[np.uint8]:
    values = np.arange(256) / 255.0
    curve = ((values**lens.gamma) - 0.5) * lens.contrast + 0.5
    table: Picture = np.clip(curve[:, None] * np.array(lens.gains) * 255, 0, 255).astype(np.uint8).reshape(1, 256, 3)
    return table


def _vignette(width: int, height: int, strength: float) -> npt.NDArray[np.float32]:
    across = np.linspace(-1, 1, width, dtype=np.float32)[None]
    down = np.linspace(-1, 1, height, dtype=np.float32)[:, None]
    fall = 1 - np.float32(strength) * (across**2 + down**2) / 2
    whole: npt.NDArray[np.float32] = cv2.merge([fall, fall, fall])
    return whole


def _noise(width: int, height: int, deviation: float, generator: np.random.Generator) -> npt.NDArray[np.int16]:
    """Of brightness mostly, of colour a little."""
    grain = generator.standard_normal((height + _MARGIN, width + _MARGIN), dtype=np.float32) * np.float32(deviation)
    whole = grain.astype(np.int16)
    small = (grain * np.float32(0.45)).astype(np.int16)
    channels = []
    for shift in ((7, 31), (41, 3), (19, 59)):
        own = small[shift[0] : shift[0] + height, shift[1] : shift[1] + width]
        channels.append(cv2.add(whole[:height, :width], own))
    noise: npt.NDArray[np.int16] = cv2.merge(channels)
    return noise


def _smear(length: float, angle: float) -> npt.NDArray[np.float32]:
    side = int(length) | 1
    kernel = np.zeros((side, side), np.float32)
    kernel[side // 2] = 1
    turn = cv2.getRotationMatrix2D((side / 2 - 0.5, side / 2 - 0.5), angle, 1)
    turned: npt.NDArray[np.float32] = cv2.warpAffine(kernel, turn, (side, side))
    return turned / np.float32(max(float(turned.sum()), 1e-6))


def _let_rain(picture: Picture, count: int, zoom: float, generator: np.random.Generator) -> None:
    height, width = picture.shape[:2]
    layer = np.zeros((height, width), np.uint8)
    starts = generator.uniform((0, -20), (width, height), (count, 2))
    lengths = generator.uniform(6, 22, count) * zoom
    slant = float(generator.normal(0, 0.2))
    for (x, y), length in zip(starts, lengths, strict=True):
        cv2.line(layer, (int(x), int(y)), (int(x + slant * length), int(y + length)), 90, 1, cv2.LINE_AA)
    layer = cv2.GaussianBlur(layer, (3, 3), 0)
    cv2.add(picture, cv2.merge([layer, layer, layer]), dst=picture)


def _let_snow(picture: Picture, count: int, zoom: float, generator: np.random.Generator) -> None:
    height, width = picture.shape[:2]
    for x, y, radius in generator.uniform((0, 0, 0.6), (width, height, 2.2), (count, 3)):
        cv2.circle(picture, (int(x), int(y)), max(1, round(radius * zoom)), (235, 235, 235), cv2.FILLED, cv2.LINE_AA)
