"""Rules that recognise the other detectors, mostly by their outputs' names and shapes."""

import re

from penstock.models.inspect.facts import TensorFacts
from penstock.models.inspect.inspection import Question
from penstock.models.inspect.model_signature import STRIDES, LayoutMatch, ModelSignature, anchor_counts
from penstock.protocol.inference import Datatype

_FACE = ("face",)
_YUNET = tuple(f"{kind}_{stride}" for kind in ("cls", "obj", "bbox", "kps") for stride in STRIDES)
_FACE_PARTS = {"keypoint-shape": "5;2", "keypoint-names": "right_eye;left_eye;nose;right_mouth;left_mouth"}
_BINS = 32  # columns of four sides with 8 bins each
_PICO = (*STRIDES, 64)
_GRAPH_PREFIX = re.compile(r"^graph\d{1,3}_")


def plain(tensor: TensorFacts) -> str:
    """The name without TensorFlow's port and scope, and without SuperGradients' prefix.

    `StatefulPartitionedCall/detection_boxes:0`, `graph2_pred_boxes`.
    """
    name = tensor.name.partition(":")[0].rpartition("/")[2].lower()
    return _GRAPH_PREFIX.sub("", name)


def _named(model: ModelSignature, *names: str) -> tuple[TensorFacts, ...] | None:
    """The outputs of these names, in their order; None if one is missing."""
    by_name = {plain(tensor): tensor for tensor in model.facts.outputs}
    return tuple(by_name[name] for name in names) if all(name in by_name for name in names) else None


def _is_integer(tensor: TensorFacts) -> bool:
    return tensor.datatype is not None and "INT" in tensor.datatype


def tensorflow(model: ModelSignature) -> LayoutMatch | None:
    """TensorFlow's object detection API: uint8 pixels in, detection_… out."""
    found = _named(model, "detection_boxes", "detection_classes", "detection_scores", "num_detections")
    if found is None or model.image.datatype is not Datatype.UINT8:
        return None
    why = (
        "outputs detection_boxes, detection_classes, detection_scores, num_detections of uint8 pixels: TensorFlow's API"
    )
    names = tuple(found[index].name for index in range(4))
    return LayoutMatch(
        "tf-detection",
        (why,),
        "tensorflow-any-size" if model.is_size_free else "raw",
        class_count=0 if model.names else 91,
        outputs=names,
        needs_size=not model.is_size_free,
    )


def efficient_nms(model: ModelSignature) -> LayoutMatch | None:
    """EfficientNMS's four outputs, of the plugin or of a graph that has the same ones."""
    kinds = (
        ("num_dets", "det_boxes", "det_scores", "det_classes"),
        ("num_detections", "detection_boxes", "detection_scores", "detection_classes"),
        ("num_detections", "nmsed_boxes", "nmsed_scores", "nmsed_classes"),
        ("num_dets", "boxes", "scores", "labels"),
        ("num_predictions", "pred_boxes", "pred_scores", "pred_classes"),
    )
    for names in kinds:
        found = _named(model, *names)
        if found is not None:
            outputs = tuple(tensor.name for tensor in found)
            return LayoutMatch("efficient-nms", (f"outputs {', '.join(names)}: EfficientNMS's",), outputs=outputs)
    return None


def two_inputs(model: ModelSignature) -> LayoutMatch | None:
    """RT-DETR, D-FINE, DEIM: labels, boxes and scores of a picture and its size."""
    found = _named(model, "labels", "boxes", "scores")
    if found is None or model.size_input is None:
        return None
    boxes = found[1]
    has_batch = len(boxes.shape) == 3 or not boxes.has_shape
    why = f"inputs {model.image.name} and {model.size_input.name}, outputs labels, boxes, scores: RT-DETR's family"
    return LayoutMatch(
        "rt-detr",
        (why,),
        class_count=0 if model.names else 80,
        outputs=tuple(tensor.name for tensor in found),
        card={"image-size-input": model.size_input.name},
        rows_follow_batch=has_batch,
        warnings=() if has_batch else ("its outputs have no batch axis: one picture per call",),
    )


def detr(model: ModelSignature) -> LayoutMatch | None:
    """Queries with logits and normalized boxes: softmax with a last column for no object, or sigmoid."""
    found = _named(model, "logits", "pred_boxes") or _named(model, "pred_logits", "pred_boxes")
    if found is None or len(model.shape_per_image(found[0])) != 2:
        return None
    columns = model.shape_per_image(found[0])[1]
    names, outputs = len(model.names), (found[0].name, found[1].name)
    why = f"outputs {outputs[0]} with {columns} columns and pred_boxes: DETR's"
    if columns == 92 or (names and columns == names + 1):
        seen = (why, "the last column is no object")
        family = "detr-any-size" if model.is_size_free else "detr"
        is_fixed = not model.is_size_free
        return LayoutMatch("detr", seen, family, class_count=columns - 1, outputs=outputs, needs_size=is_fixed)
    if names and columns == names:
        shape = "no column is left for no object, so each class has a sigmoid, as in RF-DETR"
        return LayoutMatch("rf-detr", (why, shape), class_count=columns, outputs=(outputs[1], outputs[0]))
    question = Question(
        f"{columns} columns are {columns} classes with a sigmoid each, or {columns - 1} classes and no object, softmax",
        "--layout",
        ("rf-detr", "detr") if columns in (80, 90, 91) else ("detr", "rf-detr"),
    )
    is_softmax = model.hints.layout == "detr" or (not model.hints.layout and columns not in (80, 90, 91))
    questions = () if model.hints.layout else (question,)
    if is_softmax:
        return LayoutMatch("detr", (why,), class_count=columns - 1, outputs=outputs, questions=questions)
    return LayoutMatch("rf-detr", (why,), class_count=columns, outputs=(outputs[1], outputs[0]), questions=questions)


def poses(model: ModelSignature) -> LayoutMatch | None:
    """dets and keypoints: RTMO's final boxes with their score, and x, y and score of each keypoint."""
    found = _named(model, "dets", "keypoints")
    if found is None or model.shape_per_image(found[0])[1:] != (5,) or len(model.shape_per_image(found[1])) != 3:
        return None
    count, values = model.shape_per_image(found[1])[1:]
    if count < 1 or values not in (2, 3):
        return None
    why = f"outputs dets [B, n, 5] and keypoints [B, n, {count}, {values}]: RTMO's"
    card = {"keypoint-shape": f"{count};{values}"}
    return LayoutMatch("rtmo", (why,), "", 1, outputs=tuple(one.name for one in found), card=card, labels=("person",))


def boxes_and_labels(model: ModelSignature) -> LayoutMatch | None:
    """dets and labels: mmdeploy's boxes with their score and integer labels, or RF-DETR's queries with logits."""
    floats = [tensor for tensor in model.facts.outputs if not _is_integer(tensor)]
    whole = [tensor for tensor in model.facts.outputs if _is_integer(tensor)]
    with_score = next((tensor for tensor in floats if model.shape_per_image(tensor)[1:] == (5,)), None)
    labels = next((tensor for tensor in whole if len(model.shape_per_image(tensor)) == 1), None)
    if labels is None and with_score is not None:
        labels = next(
            (tensor for tensor in floats if "label" in plain(tensor) and len(model.shape_per_image(tensor)) == 1), None
        )
    if with_score is not None and labels is not None:
        why = f"{with_score.name} [B, K, 5] and integers {labels.name} [B, K]: mmdeploy's"
        return LayoutMatch("mmdeploy", (why,), outputs=(with_score.name, labels.name))
    found = _named(model, "dets", "labels")
    if found is None or model.shape_per_image(found[0])[1:] != (4,) or len(model.shape_per_image(found[1])) != 2:
        return None
    columns = model.shape_per_image(found[1])[1]
    masks = next((tensor for tensor in model.facts.outputs if len(model.shape_per_image(tensor)) == 3), None)
    outputs = (found[0].name, found[1].name, *((masks.name,) if masks else ()))
    why = f"float outputs dets [B, Q, 4] and labels [B, Q, {columns}]: RF-DETR's"
    return LayoutMatch("rf-detr-seg" if masks else "rf-detr", (why,), class_count=columns, outputs=outputs)


def deepstream(model: ModelSignature) -> LayoutMatch | None:
    """DeepStream-Yolo's three outputs: boxes [B, n, 4], scores [B, n, 1], classes [B, n, 1]."""
    found = _named(model, "boxes", "scores", "classes")
    if found is None or len(model.facts.outputs) != 3:
        return None
    shapes = [model.shape_per_image(tensor) for tensor in found]
    if any(len(shape) != 2 for shape in shapes) or [shape[1] for shape in shapes] != [4, 1, 1]:
        return None
    why = "outputs boxes [B, n, 4], scores [B, n, 1], classes [B, n, 1]: DeepStream-Yolo's; the trial run decides"
    return LayoutMatch("deepstream-yolo", (why,), outputs=tuple(tensor.name for tensor in found))


def boxes_and_scores(model: ModelSignature) -> LayoutMatch | None:
    """YOLO-NAS without NMS: corners [B, n, 4] and scores [B, n, C], n cells of the grids."""
    outputs = model.facts.outputs
    shapes = [model.shape_per_image(tensor) for tensor in outputs]
    if len(outputs) != 2 or model.size is None or any(len(shape) != 2 or shape[1] < 1 for shape in shapes):
        return None
    count = shapes[0][0]
    if any(map(_is_integer, outputs)) or shapes[1][0] != count or count not in anchor_counts(model.size, 1):
        return None
    named = [index for index in (0, 1) if shapes[index][1] == 4 and "box" in plain(outputs[index])]
    candidates = named or [index for index in (0, 1) if shapes[index][1] == 4]
    if not candidates:
        return None
    boxes, scores = outputs[candidates[0]], outputs[1 - candidates[0]]
    classes = shapes[1 - candidates[0]][1]
    why = f"{boxes.name} [B, n, 4] and {scores.name} [B, n, {classes}], {count} rows are one per grid cell: YOLO-NAS's"
    return LayoutMatch("yolo-nas", (why,), class_count=classes, outputs=(boxes.name, scores.name))


def ultraface(model: ModelSignature) -> LayoutMatch | None:
    """scores [B, n, 2] and boxes [B, n, 4]."""
    found = _named(model, "scores", "boxes")
    if found is None or len(model.facts.outputs) != 2:
        return None
    scores, boxes = (model.shape_per_image(tensor) for tensor in found)
    if scores[1:] != (2,) or boxes[1:] != (4,):
        return None
    card = {"pre-cluster-threshold": "0.5", "nms-iou-threshold": "0.3"}
    why = "outputs scores [B, n, 2] and boxes [B, n, 4]: UltraFace's"
    outputs = tuple(tensor.name for tensor in found)
    return LayoutMatch("ultraface", (why,), "ultraface", 1, outputs=outputs, card=card, labels=_FACE)


def torchvision(model: ModelSignature) -> LayoutMatch | None:
    """boxes [M, 4], labels [M] int64, scores [M], found by type and shape, not by name. M is not the batch."""
    boxes = labels = scores = None
    for tensor in model.facts.outputs:
        shape = model.shape_per_image(tensor) if not tensor.shape else tensor.shape
        if len(shape) == 2 and shape[1] == 4 and not _is_integer(tensor):
            boxes = tensor
        elif len(shape) == 1 and tensor.datatype is Datatype.INT64:
            labels = tensor
        elif len(shape) == 1 and not _is_integer(tensor):
            scores = tensor
    if boxes is None or labels is None or scores is None or boxes.shape[0] > 0 or model.size_input is not None:
        return None
    if [plain(tensor) for tensor in (boxes, scores, labels)] == ["boxes", "scores", "class_ids"]:
        return LayoutMatch("boxes", ("outputs boxes, scores, class_ids",), rows_follow_batch=False, needs_size=False)
    why = f"{boxes.name} [M, 4], {labels.name} [M] int64 and {scores.name} [M] with free M: torchvision's detectors"
    masks = [tensor.name for tensor in model.facts.outputs if len(tensor.shape) == 4]
    return LayoutMatch(
        "torchvision",
        (why,),
        class_count=0 if model.names else 91,
        outputs=(boxes.name, labels.name, scores.name),
        warnings=tuple(f"output {name!r}, the masks, is not read" for name in masks),
        rows_follow_batch=False,
        needs_size=False,
    )


def single_shot(model: ModelSignature) -> LayoutMatch | None:
    """SSD: OpenVINO's [1, 1, N, 7], or bboxes, labels and scores."""
    outputs = model.facts.outputs
    if len(outputs) == 1 and len(outputs[0].shape) == 4 and outputs[0].shape[3] == 7 and outputs[0].shape[1] == 1:
        why = "[1, 1, N, 7]: image, class, score, normalized corners, as OpenVINO's DetectionOutput writes them"
        return LayoutMatch("ssd", (why,), "raw", rows_follow_batch=False)
    found = _named(model, "bboxes", "labels", "scores")
    if found is not None and len(outputs) == 3:
        return LayoutMatch(
            "ssd", ("outputs bboxes, labels, scores: an SSD's",), outputs=tuple(one.name for one in found)
        )
    return None


def yunet(model: ModelSignature) -> LayoutMatch | None:
    """Twelve outputs cls_8 to kps_32."""
    found = _named(model, *_YUNET)
    if found is None:
        return None
    card = {**_FACE_PARTS, "pre-cluster-threshold": "0.5", "nms-iou-threshold": "0.3"}
    why = ("outputs cls_8 … kps_32: YuNet's",)
    return LayoutMatch(
        "yunet", why, "yunet", 1, outputs=tuple(tensor.name for tensor in found), card=card, labels=_FACE
    )


def centerface(model: ModelSignature) -> LayoutMatch | None:
    """Maps of 1, 2, 2 and 10 channels at a quarter of the size. Its declared input size can be wrong."""
    shapes = [model.shape_per_image(tensor) for tensor in model.facts.outputs]
    if len(shapes) != 4 or [shape[0] for shape in shapes if len(shape) == 3] != [1, 2, 2, 10]:
        return None
    card = {
        "keypoint-shape": "5;2",
        "keypoint-names": "left_eye;right_eye;nose;left_mouth;right_mouth",
        "pre-cluster-threshold": "0.5",
        "nms-iou-threshold": "0.3",
    }
    height, width = model.size or (0, 0)
    is_wrong_size = model.is_size_free or max(height, width) < 64
    warnings: tuple[str, ...] = ()
    if is_wrong_size and not model.is_size_free:
        declared = " x ".join(map(str, model.image.shape))
        warnings = (f"it declares an input of {declared}, which is wrong: the network takes any size",)
    return LayoutMatch(
        "centerface",
        ("maps of 1, 2, 2 and 10 channels at a quarter of the size: CenterFace's",),
        "centerface",
        1,
        outputs=tuple(tensor.name for tensor in model.facts.outputs),
        card=card,
        labels=_FACE,
        warnings=warnings,
        input_shape=(1, 3, -1, -1) if is_wrong_size and not model.is_size_free else (),
        needs_size=not is_wrong_size,
    )


def nanodet(model: ModelSignature) -> LayoutMatch | None:
    """Pairs of scores [n, C] and distributions [n, 32] for each stride: NanoDet's three, PicoDet's four."""
    shapes = {tensor.name: model.shape_per_image(tensor) for tensor in model.facts.outputs}
    if len(shapes) not in (6, 8) or any(len(shape) not in (2, 3) for shape in shapes.values()):
        return None
    rows_columns = {name: shape[-2:] for name, shape in shapes.items()}
    sides = [shape for shape in rows_columns.values() if shape[1] == _BINS]
    scores = [shape for shape in rows_columns.values() if shape[1] != _BINS]
    if len(sides) != len(scores) or len({shape[1] for shape in scores}) != 1:
        return None
    strides = STRIDES if len(sides) == 3 else _PICO
    cells = sorted((model.cell_count((stride,), is_rounded_up=True) for stride in strides), reverse=True)
    if sorted((shape[0] for shape in sides), reverse=True) != cells:
        return None
    layout = "nanodet" if len(sides) == 3 else "picodet"
    why = f"{len(sides)} pairs of {scores[0][1]} classes and {_BINS} columns of distributions: {layout}"
    return LayoutMatch(layout, (why,), layout, class_count=scores[0][1])


def own_layouts(model: ModelSignature) -> LayoutMatch | None:
    """FastestDet's grid, and the heatmap of Penstock's own detector."""
    if _named(model, "heatmap", "distances") is not None and model.size is not None:
        outputs = tuple(tensor.name for tensor in model.facts.outputs)
        channels = model.shape_per_image(model.facts.outputs[0])[0]
        why = "outputs heatmap and distances: Penstock's street detector"
        labels = ("person", "bicycle", "car") if channels == 3 else ()
        return LayoutMatch("center-heatmap", (why,), "street", channels, outputs=outputs, labels=labels)
    if len(model.facts.outputs) != 1 or model.size is None:
        return None
    shape = model.shape_per_image(model.facts.outputs[0])
    height, width = model.size
    if len(shape) != 3 or shape[1:] != (height // 16, width // 16) or shape[0] < 6:
        return None
    if not {"Softmax", "Sigmoid"} <= model.facts.all_tail():
        return None
    why = f"one grid of a sixteenth of the size with {shape[0]} channels after a sigmoid and a softmax: FastestDet's"
    return LayoutMatch(
        "fastestdet", (why,), "fastestdet", class_count=shape[0] - 5, card={"pre-cluster-threshold": "0.65"}
    )
