"""Classifiers: one score per class."""

import numpy as np

from penstock.protocol.inference import Classes, FloatArray, IntArray
from penstock.vision.layouts.layout import Outputs, ParserOptions


def parse_classification(outputs: Outputs, options: ParserOptions) -> Classes:
    """The topk best classes of the first output, (classes,) per image; ties by class id. Raises EngineFailed."""
    score = outputs.floats(options.output_names[0], rank=1)
    if options.has_softmax:
        score = _softmax(score)
    class_id = _best(score, options.topk)
    best = score[class_id]
    if best.size and best[-1] < options.classifier_threshold:
        is_good = best >= options.classifier_threshold
        best, class_id = best[is_good], class_id[is_good]
    return Classes(best, class_id.astype(np.int64, copy=False))


def _best(score: FloatArray, topk: int | None) -> IntArray:
    """The topk (None: all) class ids by descending score, ties by class id. Partitioning is faster than a full sort."""
    if topk is None or topk >= len(score):
        return (-score).argsort(kind="stable")
    parted, least = score.copy(), len(score) - topk
    parted.partition(least)
    good = (score >= parted[least]).nonzero()[0]
    best: IntArray = good[(-score[good]).argsort(kind="stable")[:topk]]
    return best


def _softmax(logits: FloatArray) -> FloatArray:
    powers = np.exp(logits - logits.max(initial=-np.inf))
    shares: FloatArray = powers / powers.sum()
    return shares
