"""Whether a picture is the one before it again (a frozen camera), or of another scene (a cut). By its brightness only.

Both look at a thumbnail of 64 x 18 means. Measured on vtest.avi (795 frames, one scene): the histograms of neighbours
differ by 0.021 at most, so that a cut at half is far from what moves in a picture; a picture that moves changes a mean
by more than one grey level in every frame. 0.05 ms for a picture of 1280 x 720.
"""

from hashlib import blake2b

import cv2
import numpy as np
import numpy.typing as npt

Plane = npt.NDArray[np.uint8]

DEFAULT_CUT = 0.5
_SIZE = (64, 18)
_LINES = 36  # of a picture that are looked at, two for each of the thumbnail's
_BINS = 16
_LEAST_CHANGE = 24  # grey levels, on average: two dark pictures of one scene may differ in every bin
_NOISE = 1  # grey levels: what a codec changes of a picture that stands still


class Likeness:
    """Compares the pictures of one source, in their order."""

    def __init__(self, cut: float = DEFAULT_CUT) -> None:
        """cut: the share of a picture (0..1) that must be of another brightness for a cut; 0 for no cuts."""
        self._cut = cut
        self._before: Plane | None = None
        self._shown: Plane | None = None  # of which the digest is
        self._digest = 0

    def begin(self) -> None:
        """The next picture is compared to none."""
        self._before = None

    def look(self, thumbnail: Plane) -> tuple[int, bool]:
        """(digest, whether it begins another scene) of the thumbnail (18, 64) of the next picture.

        digest: 64 bits, equal for equal pictures in a row, also where their codec adds a grey level of noise.
        """
        thumbnail = thumbnail.copy()  # it may be another picture's by the next call
        is_cut = self._is_cut(thumbnail)
        self._before = thumbnail
        if self._shown is None or _largest_difference(thumbnail, self._shown) > _NOISE:
            self._shown = thumbnail
            self._digest = int.from_bytes(blake2b(thumbnail.tobytes(), digest_size=8).digest())
        return self._digest, is_cut

    def _is_cut(self, thumbnail: Plane) -> bool:
        if not self._cut or self._before is None:
            return False
        if cv2.norm(thumbnail, self._before, cv2.NORM_L1) < _LEAST_CHANGE * thumbnail.size:
            return False
        return _histogram_difference(thumbnail, self._before) >= self._cut


def thumbnail_of(luma: Plane) -> Plane:
    """(18, 64): means of the brightness (H, W) of a picture, of some of its lines."""
    lines = luma[:: max(luma.shape[0] // _LINES, 1)]
    small: Plane = cv2.resize(lines, _SIZE, interpolation=cv2.INTER_AREA)
    return small


def _largest_difference(first: Plane, second: Plane) -> int:
    return int(cv2.norm(first, second, cv2.NORM_INF))


def _histogram_difference(first: Plane, second: Plane) -> float:
    """0 for the same brightnesses, 1 for none in common."""
    bins = [np.bincount(picture.ravel() // (256 // _BINS), minlength=_BINS) for picture in (first, second)]
    return float(np.abs(bins[0] - bins[1]).sum()) / 2 / first.size
