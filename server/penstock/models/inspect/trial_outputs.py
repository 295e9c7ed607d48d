"""Outputs of a trial run, and the outcome of a check of their values."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from penstock.models.inspect.inspection import Question
from penstock.models.inspect.value_ranges import Columns
from penstock.protocol.inference import Array, FloatArray

LOGITS = {"apply-sigmoid": "1"}
NOT_DECODED = "; this layout does not decode them"


def unit_question(what: str, seen: str) -> Question:
    """Values in another form than the layout's. what: a sentence on what they should be. seen: what they are."""
    return Question(f"{what}, but {seen}{NOT_DECODED}", "--layout")


def logits_sentence(scores: FloatArray) -> str:
    """Why a sigmoid is applied."""
    return f"scores are logits, from {scores.min():.1f} to {scores.max():.1f}: a sigmoid is applied"


@dataclass(frozen=True, slots=True)
class Correction:
    """Layout, family or card parameters that fit the values better than what shapes suggest. why: a sentence.

    is_certain: the layout that was tried cannot decode such values, whatever a flag says.
    """

    why: str
    layout: str = ""
    family: str = ""
    card: dict[str, str] = field(default_factory=dict)
    class_count: int | None = None
    is_certain: bool = False


@dataclass(frozen=True, slots=True)
class OutputCheck:
    """The outcome. correction: None if the layout fits. fault: why no picture can have a result, "" if it can."""

    correction: Correction | None = None
    evidence: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    warnings: tuple[str, ...] = ()
    fault: str = ""


@dataclass(frozen=True, slots=True)
class TrialOutputs:
    """Outputs of the trial's pictures. arrays: by output name, one array per picture, without batch axis.

    anchor_counts: rows that networks of this size have. size: (height, width) of the network's picture. sources: sizes
    of the pictures. card: the proposed parameters. class_count: 0 if it is not known.
    """

    arrays: Mapping[str, list[Array]]
    names: tuple[str, ...]
    anchor_counts: frozenset[int]
    size: tuple[int, int]
    sources: tuple[tuple[int, int], ...]
    card: Mapping[str, str]
    class_count: int = 0
    has_metadata: bool = False

    def floats(self, index: int) -> FloatArray:
        """An output of all pictures, joined along its first axis, float32; flat if the pictures' sizes differ."""
        parts = [np.atleast_1d(one) for one in self.arrays[self.names[index]]]
        is_flat = len({part.shape[1:] for part in parts}) > 1
        return np.concatenate([part.ravel() if is_flat else part for part in parts]).astype(np.float32)

    def columns(self, index: int = 0) -> Columns:
        """An output of rows of anchors, whichever axis they are."""
        parts = []
        for array in self.arrays[self.names[index]]:
            rows = array if array.ndim == 2 else array.reshape(-1, array.shape[-1])
            first, last = rows.shape
            is_rows_last = (last in self.anchor_counts, first in self.anchor_counts) == (True, False)
            is_longer = (last in self.anchor_counts) == (first in self.anchor_counts) and last > first
            parts.append(rows.T if is_rows_last or is_longer else rows)
        return Columns(np.concatenate(parts).astype(np.float32))
