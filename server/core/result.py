"""What vision models see, as arrays."""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float32]
IntArray = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Detections:
    """Boxes of one image.

    xyxy: (n, 4) float32, corners in source pixels (of the image as a person sees it: EXIF applied).
    score: (n,) float32 in [0, 1], falling. class_id: (n,) int64.
    """

    xyxy: FloatArray
    score: FloatArray
    class_id: IntArray


@dataclass(frozen=True, slots=True)
class Classes:
    """The likeliest classes of one image: score (n,) float32, falling; class_id (n,) int64."""

    score: FloatArray
    class_id: IntArray


VisionResult = Detections | Classes
