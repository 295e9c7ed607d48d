"""Classifiers: one score per class."""

import numpy as np

from penstock.protocol.inference import FloatArray, IntArray
from penstock.protocol.vision_results import Classes
from penstock.vision.layouts.layout import Layout, LayoutOptions, Outputs, sigmoid
from penstock.vision.preprocess import Geometry
from penstock.vision.spec import NetworkType


def parse_classification(outputs: Outputs, options: LayoutOptions, _: Geometry) -> Classes:
    """The topk best classes of the first output, (classes,) per image; ties by class id. Raises EngineFailed."""
    score = outputs.floats(options.output_names[0], rank=1)
    if options.has_softmax:
        score = _softmax(score)
    elif options.has_sigmoid:
        score = sigmoid(score)
    if options.class_filter is None and not options.class_ids:
        class_id = _best(score, options.topk)
        best = score[class_id]
    else:
        ids = options.mapped(np.arange(len(score), dtype=np.int64))
        if options.class_filter is not None:
            selected = np.isin(ids, list(options.class_filter))
            score, ids = score[selected], ids[selected]
        index = _best(score, options.topk)
        best, class_id = score[index], ids[index]
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


LAYOUTS = (
    Layout(
        "classification",
        NetworkType.CLASSIFIER,
        parse_classification,
        "the first output, float `[classes]`: a score per class; logits with `apply-softmax: 1` (one class) or "
        "`apply-sigmoid: 1` (several)",
    ),
)
