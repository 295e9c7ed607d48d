"""Photo-like JPEGs drawn from a seed: what the GPU bench decodes."""

import cv2
import numpy as np
import numpy.typing as npt

Pixels = npt.NDArray[np.uint8]

# (width, height) and its share: ImageNet's most frequent ones.
PHOTO_SIZES = {(500, 375): 0.6, (375, 500): 0.15, (500, 333): 0.15, (333, 500): 0.05, (500, 500): 0.05}
_MASTERS = 12
_MASTER_SIDE = 640
_QUALITIES = (89, 97)
_LUMA, _CHROMA = 35.0, 10.0  # standard deviations of shapes: photographs differ in brightness more than in colour


def photos(count: int, *, seed: int = 0, sizes: dict[tuple[int, int], float] | None = None) -> list[bytes]:
    """Encoded JPEGs, the same for the same arguments and OpenCV; each its own crop, colours and quality."""
    random = np.random.default_rng(seed)
    shares = sizes or PHOTO_SIZES
    masters = [_master(random) for _ in range(min(_MASTERS, count))]
    chosen = random.choice(len(shares), count, p=list(shares.values()))
    every = list(shares)
    return [_photo(random, masters[i % len(masters)], *every[choice]) for i, choice in enumerate(chosen)]


def _photo(random: np.random.Generator, master: Pixels, width: int, height: int) -> bytes:
    scale = max(width, height) / _MASTER_SIDE
    if scale > 1:
        master = cv2.resize(master, None, fx=scale, fy=scale)
    left = int(random.integers(master.shape[1] - width + 1))
    top = int(random.integers(master.shape[0] - height + 1))
    crop = master[top : top + height, left : left + width]
    crop = crop[:: random.choice([-1, 1]), :: random.choice([-1, 1])]
    lit = cv2.convertScaleAbs(np.ascontiguousarray(crop), alpha=random.uniform(0.8, 1.1), beta=random.uniform(-15, 15))
    quality = int(random.integers(*_QUALITIES))
    return bytes(cv2.imencode(".jpg", lit, [cv2.IMWRITE_JPEG_QUALITY, quality])[1])


def _master(random: np.random.Generator) -> Pixels:
    """Clouds whose amplitude falls with frequency as in photographs, shapes with edges, and a sensor's grain."""
    side = _MASTER_SIDE
    canvas = np.full((side, side, 3), random.uniform(100, 150), np.float32)
    cells = 2
    while cells <= side:
        canvas += cv2.resize(_colors(random, (cells, cells), (2.0 / cells) ** 0.6), (side, side))
        cells *= 2
    for _ in range(30):
        corners = random.normal(0, random.uniform(0.05, 0.3), (int(random.integers(3, 8)), 2)) + random.uniform(0, 1, 2)
        shape = cv2.fillPoly(np.zeros((side, side), np.uint8), [np.int32(corners * side)], 255, cv2.LINE_AA)
        canvas += (shape / np.float32(255.0))[..., None] * _colors(random, (1, 1), 1.0)
    canvas += random.normal(0, random.uniform(3, 9), (side, side, 1)).astype(np.float32)
    return np.clip(canvas, 0, 255).astype(np.uint8)


def _colors(random: np.random.Generator, shape: tuple[int, int], strength: float) -> npt.NDArray[np.float32]:
    """(*shape, 3) around 0: mostly brightness, some colour."""
    brightness, color = random.normal(0, _LUMA, (*shape, 1)), random.normal(0, _CHROMA, (*shape, 3))
    return ((brightness + color) * strength).astype(np.float32)
