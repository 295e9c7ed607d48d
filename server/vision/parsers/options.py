"""What a model's card tells its parser."""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ParserOptions:
    """Thresholds in nvinfer's words; a detector reads its three, a classifier its two.

    output_names: the model's outputs, in config.pbtxt's order. pre_cluster_threshold: boxes at or under this score go
    before the suppression. topk: results kept, the best first; None for all. classifier_threshold: classes under this
    score go. has_softmax: the scores are logits.
    """

    output_names: tuple[str, ...]
    pre_cluster_threshold: float = 0.2
    nms_iou_threshold: float = 0.3
    topk: int | None = None
    classifier_threshold: float = -math.inf
    has_softmax: bool = False
