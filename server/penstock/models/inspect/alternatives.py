"""Compares the proposed colour order and scale with the alternatives, by the confidence of results on the pictures.

Measured on five networks and the packaged pictures, each also mirrored: the right colour order is 0.01 to 0.10 more
confident, with a standard error of up to 0.09. On 18 sections of the pictures it is 0.05 to 0.17 more confident, two to
five standard errors. The wrong scale finds nothing, or everything: scores of 1.00 all over the picture.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from penstock.models.inspect.inspection import Hints, Question
from penstock.models.inspect.picture_views import Views
from penstock.models.inspect.trial_session import TrialFailed
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import Datatype, FloatArray
from penstock.protocol.vision_results import Classes, Detections, VisionResult
from penstock.vision.card import VisionCard
from penstock.vision.spec import ColorFormat, PrepareSpec

ResultsOf = Callable[[VisionCard, Views], list[VisionResult]]
_SURE = 0.3  # confidence from which the network finds something in the pictures
_CERTAIN = 0.98
_MANY = 5  # times as many results, which are found everywhere with a wrong scale
_NOTHING = 0.05
_FOUND = 0.4  # least confidence of both colour orders for a comparison that blocks: a swap never hides all objects
_CLEARLY, _CLEARLY_WITH_METADATA = 0.05, 0.1  # how much more confident another colour order is
_CLEARLY_ON_PARTS = 0.03
_STANDARD_ERRORS = 2.0  # of the mean difference on parts
_ALIKE = 0.02
_PIXEL = 1.0 / 255.0


@dataclass(frozen=True, slots=True)
class Comparison:
    """Outcome of the comparison with the alternatives."""

    evidence: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    warnings: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Confidence:
    """best: mean of each picture's best score. results: count over 0.5. classes: of a classifier, or 0."""

    best: float
    results: int
    classes: int = 0


def compare(card: VisionCard, results_of: ResultsOf, hints: Hints, *, has_metadata: bool) -> Comparison:
    """Questions where an alternative is clearly better than the proposal. Values given by flags are not compared.

    card: the proposed card. results_of: runs views of the pictures with a card; no parts if the network is slow.
    has_metadata: the exporter is known.
    """
    proposed = confidence(results_of(card, Views.WHOLE))
    if proposed is None:
        return Comparison()
    scales = _compared_scales(card, results_of, hints, proposed, has_metadata=has_metadata)
    runs = results_of if not scales.questions else _of_whole_pictures(results_of)
    colors = _compared_colors(card, runs, hints, proposed, has_metadata=has_metadata)
    warnings: tuple[str, ...] = ()
    if not proposed.classes and not colors.questions and not scales.questions and proposed.best < _SURE:
        warnings = (
            f"the network finds nothing in the pictures (confidence {proposed.best:.2f}), so colour order and scale "
            "are not checked; pass your own pictures with --picture",
        )
    return Comparison(colors.evidence + scales.evidence, colors.questions + scales.questions, warnings)


def _of_whole_pictures(results_of: ResultsOf) -> ResultsOf:
    """Without parts: with a wrong scale, they show nothing, and thousands of results take time."""
    return lambda card, views: results_of(card, views) if views is Views.WHOLE else []


def confidence(results: list[VisionResult]) -> Confidence | None:
    """How confident results are; None for results without scores of objects or classes."""
    scores = [result.score for result in results if isinstance(result, Detections | Classes)]
    if not scores or len(scores) < len(results):
        return None
    best = float(np.mean(_best_scores(scores)))
    classes = len(scores[0]) if isinstance(results[0], Classes) else 0
    return Confidence(best, sum(int(np.count_nonzero(score > 0.5)) for score in scores), classes)


def _compared_colors(
    card: VisionCard, results_of: ResultsOf, hints: Hints, proposed: Confidence, *, has_metadata: bool
) -> Comparison:
    spec = card.prepare_spec
    if spec.color is ColorFormat.GRAY or proposed.classes or hints.color or "model-color-format" in hints.parameters:
        return Comparison()
    swapped = ColorFormat.BGR if spec.color is ColorFormat.RGB else ColorFormat.RGB
    changed = replace(spec, color=swapped, offsets=spec.offsets[::-1], channel_factors=spec.channel_factors[::-1])
    other = _of(card, changed, results_of)
    if other is None:
        return Comparison()
    own_name, other_name = spec.color.name, swapped.name
    seen = f"confidence on the pictures: {proposed.best:.3f} as {own_name}, {other.best:.3f} as {other_name}"
    choices = (other_name.lower(), own_name.lower())
    margin = _CLEARLY_WITH_METADATA if has_metadata else _CLEARLY
    if proposed.best >= _FOUND and other.best > proposed.best + margin:
        return Comparison(questions=(Question(f"the colour order is not certain: {seen}", "--color", choices),))
    is_clear = proposed.best >= other.best + (0.0 if has_metadata else _CLEARLY)
    if is_clear or max(proposed.best, other.best) < _SURE:
        return Comparison((seen,))
    if proposed.best >= _FOUND and (parts := _on_parts(card, changed, results_of)) is not None:
        means = f"{parts.own:.3f} as {own_name}, {parts.other:.3f} as {other_name}"
        seen_in_parts = f"confidence on {parts.count} sections cut from the pictures: {means}"
        if parts.lead(_CLEARLY_WITH_METADATA if has_metadata else _CLEARLY_ON_PARTS) < 0:
            sentence = f"the colour order is not certain: {seen_in_parts}"
            return Comparison(questions=(Question(sentence, "--color", choices),))
        if parts.lead(_CLEARLY_ON_PARTS) > 0:
            return Comparison((f"{seen_in_parts}; {own_name} is used",))
    if not has_metadata and proposed.best > other.best + _ALIKE:
        return Comparison((seen,))
    alike = f"the pictures do not show the colour order: {seen}; {own_name}, the usual one, is used"
    return Comparison(questions=(Question(alike, "--color", choices[::-1], is_blocking=False),))


@dataclass(frozen=True, slots=True)
class _PartsComparison:
    """Best scores on the same parts of the pictures: means, and the standard error of their difference."""

    own: float
    other: float
    error: float
    count: int

    def lead(self, margin: float) -> int:
        """1 if the proposal is clearly more confident, -1 if the alternative is, else 0."""
        difference = self.own - self.other
        is_clear = abs(difference) > max(margin, _STANDARD_ERRORS * self.error)
        return 0 if not is_clear else 1 if difference > 0 else -1


def _on_parts(card: VisionCard, spec: PrepareSpec, results_of: ResultsOf) -> _PartsComparison | None:
    """The card and the card with that preprocessing on parts of the pictures; None if it cannot be run."""
    try:
        pairs = [results_of(one, Views.PARTS) for one in (card, replace(card, prepare_spec=spec))]
    except (InferenceError, TrialFailed):
        return None
    own, other = (
        _best_scores([result.score for result in results if isinstance(result, Detections)]) for results in pairs
    )
    if not len(own) or len(own) != len(other):
        return None
    difference = own - other
    error = float(difference.std() / np.sqrt(len(difference)))
    return _PartsComparison(float(own.mean()), float(other.mean()), error, len(own))


def _best_scores(scores: list[FloatArray]) -> FloatArray:
    """The best score of each result, 0 without any."""
    return np.array([score.max(initial=0.0) for score in scores], np.float32)


def _compared_scales(
    card: VisionCard, results_of: ResultsOf, hints: Hints, proposed: Confidence, *, has_metadata: bool
) -> Comparison:
    spec = card.prepare_spec
    is_given = hints.scale is not None or hints.mean or hints.std or "net-scale-factor" in hints.parameters
    if is_given or spec.datatype is Datatype.UINT8:
        return Comparison()
    is_raw = spec.scale == 1.0 and spec.channel_factors == (1.0, 1.0, 1.0)
    changed = replace(spec, scale=_PIXEL if is_raw else 1.0, offsets=(0.0, 0.0, 0.0), channel_factors=(1.0, 1.0, 1.0))
    other = _of(card, changed, results_of)
    if other is None:
        return Comparison()
    named = ("pixels of 0 to 255", "pixels of 0 to 1") if is_raw else ("the proposed scale", "pixels of 0 to 255")
    seen = f"confidence on the pictures: {proposed.best:.3f} with {named[0]}, {other.best:.3f} with {named[1]}"
    if _is_wrong_scale(proposed, other):
        choices = (f"{changed.scale:.6g}", f"{spec.scale:.6g}")
        is_blocking = not has_metadata or proposed.best < _NOTHING
        question = Question(f"the scale is not certain: {seen}", "--scale", choices, is_blocking)
        return Comparison(questions=(question,))
    return Comparison((seen + _why_kept(proposed, other, named),))


def _why_kept(proposed: Confidence, other: Confidence, named: tuple[str, str]) -> str:
    """Why the proposed scale is used although the other one is more confident; empty if it is not."""
    if other.best <= proposed.best:
        return ""
    if not proposed.classes and other.best >= _CERTAIN and other.results > _MANY * max(proposed.results, 1):
        more = f"with {named[1]} it finds {other.results} objects in place of {proposed.results}"
        return f"; {more}, as with a wrong scale, so {named[0]} is used"
    return f"; the difference is no clear sign of a wrong scale, so {named[0]} is used"


def _is_wrong_scale(proposed: Confidence, other: Confidence) -> bool:
    """Whether the proposed scale finds nothing and the other does, or it is certain of everything."""
    if proposed.classes:
        return proposed.best < min(2.0 / proposed.classes, other.best / 2) and _SURE <= other.best < _CERTAIN
    finds_nothing = other.best >= _SURE and proposed.best < other.best / 2 and other.best < _CERTAIN
    finds_all = (
        proposed.best >= _CERTAIN
        and _SURE <= other.best < _CERTAIN
        and proposed.results > _MANY * max(other.results, 1)
    )
    return finds_nothing or finds_all


def _of(card: VisionCard, spec: PrepareSpec, results_of: ResultsOf) -> Confidence | None:
    try:
        return confidence(results_of(replace(card, prepare_spec=spec), Views.WHOLE))
    except (InferenceError, TrialFailed):
        return None
