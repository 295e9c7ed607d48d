"""Classifiers: one score a class."""

import numpy as np

from server.core.result import Classes, FloatArray, IntArray
from server.vision.outputs import Outputs
from server.vision.parsers.options import ParserOptions


def parse_classification(outputs: Outputs, options: ParserOptions) -> Classes:
    """The topk best classes of the model's first output, (classes,) an image; equal scores by class. BackendFailed."""
    score = outputs.floats(options.output_names[0], rank=1)
    if options.has_softmax:
        score = _softmax(score)
    class_id = _best(score, options.topk)
    class_id = class_id[score[class_id] >= options.classifier_threshold]
    return Classes(score[class_id], class_id.astype(np.int64, copy=False))


def _best(score: FloatArray, topk: int | None) -> IntArray:
    """The classes in the order of their scores, equal ones by class; topk of them where it is not None.

    To sort a thousand takes 40 us; only what is as good as the topk-th is sorted.
    """
    good = np.arange(len(score))
    if topk is not None and topk < len(score):
        least = np.partition(score, len(score) - topk)[len(score) - topk]
        good = np.nonzero(score >= least)[0]
    best: IntArray = good[np.argsort(-score[good], kind="stable")[:topk]]
    return best


def _softmax(logits: FloatArray) -> FloatArray:
    powers = np.exp(logits - logits.max(initial=-np.inf))
    shares: FloatArray = powers / powers.sum()
    return shares
