"""The last steps that every detector shares: threshold, suppression, source pixels."""

from collections.abc import Callable

import numpy as np

from server.core.result import Detections, FloatArray, IntArray
from server.vision.parsers.nms import suppress
from server.vision.parsers.options import ParserOptions


def detections(
    xyxy: FloatArray,
    score: FloatArray,
    class_id: IntArray,
    options: ParserOptions,
    to_source: Callable[[FloatArray], FloatArray],
) -> Detections:
    """xyxy (n, 4) in any unit that to_source takes, score (n,), class_id (n,), in any order.

    Suppression sees the boxes before they are clipped to the source; those that lie outside of it are dropped after.
    """
    is_candidate = score > options.pre_cluster_threshold
    xyxy, score, class_id = xyxy[is_candidate], score[is_candidate], class_id[is_candidate]
    kept = suppress(xyxy, score, class_id, options.nms_iou_threshold)
    source = to_source(xyxy[kept])
    is_inside = (source[:, 2] > source[:, 0]) & (source[:, 3] > source[:, 1])
    source, kept = source[is_inside][: options.topk], kept[is_inside][: options.topk]
    return Detections(source, np.clip(score[kept], 0.0, 1.0).astype(np.float32), class_id[kept].astype(np.int64))
