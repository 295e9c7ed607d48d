"""Checks the output values of maps, text and vectors in a trial run."""

import numpy as np

from penstock.models.inspect.trial_outputs import (
    LOGITS,
    Correction,
    OutputCheck,
    TrialOutputs,
    logits_sentence,
    unit_question,
)
from penstock.models.inspect.value_ranges import are_probabilities

_MAX_STRETCH = 2.0  # of a map's aspect ratio against the picture's


def scores_of(outputs: TrialOutputs, index: int) -> OutputCheck:
    """Whether an output has probabilities; else a sigmoid is applied."""
    scores = outputs.floats(index)
    if are_probabilities(scores):
        return OutputCheck(evidence=(f"values are from {scores.min():.2f} to {scores.max():.2f}: probabilities",))
    return OutputCheck(Correction(logits_sentence(scores), card=LOGITS))


def check_text_map(outputs: TrialOutputs) -> OutputCheck:
    """Whether the output is a map with about the aspect ratio of the picture or of the network."""
    for array, source in zip(outputs.arrays[outputs.names[0]], outputs.sources, strict=True):
        height, width = array.shape[-2:] if array.ndim > 1 else (1, array.size)
        ratios = [height / max(width, 1) / (side[0] / side[1]) for side in (source, outputs.size)]
        if not any(1 / _MAX_STRETCH < ratio < _MAX_STRETCH for ratio in ratios):
            seen = f"output {outputs.names[0]!r} has {height} x {width} values"
            return OutputCheck(fault=f"{seen}, which is not a map of a picture of {source[1]} x {source[0]} pixels")
    return scores_of(outputs, 0)


def check_semantic(outputs: TrialOutputs) -> OutputCheck:
    """Whether each pixel has one class or several."""
    values = outputs.floats(0)
    if outputs.class_count == 1:
        return scores_of(outputs, 0)
    evidence = (f"values are from {values.min():.3g} to {values.max():.3g}",)
    arrays = outputs.arrays[outputs.names[0]]
    axis = next((index for index, side in enumerate(arrays[0].shape) if side == outputs.class_count), None)
    if axis is None or not are_probabilities(values):
        return OutputCheck(evidence=evidence)
    if all(np.allclose(array.sum(axis, np.float64), 1.0, atol=0.02) for array in arrays):
        return OutputCheck(evidence=("values are 0 to 1 and sum to 1 in each pixel: one class per pixel",))
    why = "values are 0 to 1 and do not sum to 1: independent classes (--layout semantic takes a pixel's best class)"
    return OutputCheck(Correction(why, "semantic-multilabel"), evidence)


def check_ctc(outputs: TrialOutputs) -> OutputCheck:
    """Most steps of a photo read nothing: their best column is the blank."""
    steps = outputs.floats(0)
    best = steps.reshape(-1, steps.shape[-1]).argmax(axis=1)
    if (best == 0).any() or (best == steps.shape[-1] - 1).mean() <= 0.5:
        return OutputCheck()
    return OutputCheck(questions=(unit_question("the blank should be the first column", "it seems to be the last"),))


def check_range(outputs: TrialOutputs) -> OutputCheck:
    """The range of the values, for layouts that take any."""
    values = outputs.floats(0)
    if values.size and values.min() == values.max():
        return OutputCheck(warnings=(f"all values of {outputs.names[0]!r} are {values.flat[0]:.3g} on the pictures",))
    return OutputCheck(evidence=(f"values are from {values.min():.3g} to {values.max():.3g}",))
