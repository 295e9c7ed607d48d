"""Tests for the values of a trial run: probabilities or logits, pixels or fractions, corners or centre and size."""

from dataclasses import dataclass

import numpy as np

from penstock.protocol.inference import FloatArray

MAX_LOG_SIZE = 8.0  # larger widths and heights cannot be logarithms
_MAX_NORMALIZED = 1.5  # normalized boxes may extend beyond the picture
_SLACK = 1e-3
_MOSTLY = 0.98
_MANY = 0.1
_MIN_BOXES = 4


def are_probabilities(values: FloatArray) -> bool:
    """Whether all values are probabilities."""
    return bool(values.size == 0 or (values.min() >= -_SLACK and values.max() <= 1.0 + _SLACK))


def sum_to_one(rows: FloatArray) -> bool:
    """Whether each row of (n, classes) is a distribution."""
    return are_probabilities(rows) and bool(np.allclose(rows.sum(axis=1), 1.0, atol=0.02))


def are_integers(values: FloatArray) -> bool:
    """Whether all values are integers."""
    return bool(np.all(values == np.round(values)))


def are_normalized(boxes: FloatArray) -> bool:
    """Whether boxes (n, 4) are in fractions of the picture, not in pixels. False for no boxes, or if all are 0."""
    return bool(boxes.size and 0.0 < np.abs(boxes).max() <= _MAX_NORMALIZED)


def are_corners(boxes: FloatArray, size: tuple[int, int]) -> bool:
    """Whether boxes (n, 4) can only be corners: read as centre and size, many would exceed (height, width)."""
    boxes = boxes[np.abs(boxes).max(axis=1) > 0] if len(boxes) else boxes
    if len(boxes) < _MIN_BOXES:
        return False
    is_ordered = (boxes[:, 2] >= boxes[:, 0]) & (boxes[:, 3] >= boxes[:, 1])
    reach = boxes[:, :2] + boxes[:, 2:] / 2
    is_outside = (reach > 1.05 * np.array(size[::-1])).any(axis=1)
    return float(is_ordered.mean()) >= _MOSTLY and float(is_outside.mean()) >= _MANY


def are_centres(boxes: FloatArray) -> bool:
    """Whether boxes (n, 4) are centre and size: some have a size below their centre's coordinates; none is negative."""
    boxes = boxes[np.abs(boxes).max(axis=1) > 0] if len(boxes) else boxes
    if len(boxes) < _MIN_BOXES or (boxes[:, 2:] < 0).any():
        return False
    return float(((boxes[:, 2] < boxes[:, 0]) | (boxes[:, 3] < boxes[:, 1])).mean()) > 1.0 - _MOSTLY


@dataclass(frozen=True, slots=True)
class Columns:
    """One row per anchor of all pictures: (n, columns) float32."""

    rows: FloatArray

    @property
    def boxes(self) -> FloatArray:
        """The first four columns."""
        return self.rows[:, :4]

    def outside_unit_range(self, first: int) -> list[int]:
        """Indices of the columns from `first` on that hold values below 0 or above 1."""
        part = self.rows[:, first:]
        is_outside = (part.min(axis=0) < -_SLACK) | (part.max(axis=0) > 1.0 + _SLACK)
        return [first + int(index) for index in np.flatnonzero(is_outside)]
