"""Time of decoding one picture's outputs, for each output layout: validation, scores, suppression, source pixels.

    python -m loadtest.bench.gateway.layouts --json layouts.json
    python -m loadtest.bench.gateway.layouts --layout yolov8,yolov5

Each layout has examples: outputs at batch 1 of a network with an input of 640x640 and 80 classes, with 60 objects that
each have a few overlapping boxes over the threshold, and low scores elsewhere. `crowd` has a thousand boxes over the
threshold. Masks, keypoints and oriented boxes are of 10 objects on a photo of 640x480, unless the name says otherwise.
Masks of classes count as read once. The layouts take turns, call by call, in one thread.
"""

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import numpy.typing as npt

from loadtest.bench.report import chosen_of, format_table, present
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Classes, Detections, SegmentationMap, TextLines, VisionResult
from penstock.vision.layouts.layout import LayoutOptions, Outputs
from penstock.vision.layouts.registry import LAYOUTS
from penstock.vision.preprocess import Geometry

SIDE = 640
GEOMETRY = Geometry(1280, 720, SIDE, SIDE, 0.5, 0.5, pad_y=140)
PHOTO = Geometry(640, 480, SIDE, SIDE, 1.0, 1.0, pad_y=80)
STRETCHED = Geometry(640, 480, SIDE, SIDE, 1.0, SIDE / 480)
LARGE_PHOTO = Geometry(4000, 3000, SIDE, SIDE, 0.16, 0.16, pad_y=80)
FEW_OBJECTS = 10
CLASSES, OBJECTS, ROWS_PER_OBJECT = 80, 60, 5
CELLS = sum((SIDE // stride) ** 2 for stride in (8, 16, 32))
HEAD = ("layout, example", "median ms", "p10 ms", "p90 ms", "results")
GOAL_MS = 2.0
DEFAULTS = LayoutOptions(())

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class LayoutExample:
    """Outputs of one picture, as a network gives them at batch 1. options: what the layout needs beyond the names."""

    layout: str
    name: str
    outputs: Mapping[str, Array]
    options: LayoutOptions = DEFAULTS
    geometry: Geometry = GEOMETRY

    def call(self) -> Callable[[], Any]:
        """Decodes the outputs as the gateway does."""
        tensors = tuple(tensor_from_numpy(name, array) for name, array in self.outputs.items())
        options = replace(self.options, output_names=tuple(self.outputs))
        outputs, decode = Outputs(InferResponse("bench", "1", tensors), 0), LAYOUTS[self.layout].decode

        def decoded() -> VisionResult:
            result = decode(outputs, options, self.geometry)
            if isinstance(result, SegmentationMap):
                for mask in result.masks:  # computed here
                    mask.area  # noqa: B018
            return result

        return decoded


def anchor_rows(count: int, *, objects: int = OBJECTS, has_objectness: bool = False) -> Array:
    """(count, 4 + classes) or (count, 5 + classes): cxcywh in pixels, scores; the rows of objects are spread."""
    random = np.random.default_rng(7)
    head = 5 if has_objectness else 4
    rows = np.empty((count, head + CLASSES), np.float32)
    rows[:, :2], rows[:, 2:4] = random.uniform(0, SIDE, (count, 2)), random.uniform(8, 200, (count, 2))
    rows[:, 4:] = random.uniform(0, 0.05, (count, head - 4 + CLASSES))
    hot = random.permutation(count)[: objects * ROWS_PER_OBJECT].reshape(objects, -1)
    centre, size = random.uniform(60, SIDE - 60, (objects, 1, 2)), random.uniform(20, 120, (objects, 1, 2))
    rows[hot, :2] = centre + random.uniform(-2, 2, (*hot.shape, 2))
    rows[hot, 2:4] = size + random.uniform(-2, 2, (*hot.shape, 2))
    rows[hot, head + random.integers(0, CLASSES, (objects, 1))] = random.uniform(0.4, 0.95, hot.shape)
    if has_objectness:
        rows[hot, 4] = 0.9
    return rows


def final_rows(count: int) -> tuple[Array, Array, Array]:
    """Corners (count, 4) in pixels, falling scores (count,), classes (count,)."""
    random = np.random.default_rng(9)
    low = random.uniform(0, SIDE - 100, (count, 2))
    corners = np.hstack([low, low + random.uniform(10, 100, (count, 2))]).astype(np.float32)
    scores = np.linspace(0.95, 0.01, count, dtype=np.float32)
    return corners, scores, random.integers(0, CLASSES, count)


def yolo_examples() -> list[LayoutExample]:
    """Layouts with a row for each anchor."""
    v8, v5 = anchor_rows(CELLS), anchor_rows(3 * CELLS, has_objectness=True)
    yolox = anchor_rows(CELLS, has_objectness=True)
    yolox[:, :2], yolox[:, 2:4] = yolox[:, :2] % 1, yolox[:, 2:4] % 2
    columns = v8.T[np.newaxis]
    v6 = anchor_rows(CELLS, has_objectness=True)
    crowd = anchor_rows(CELLS, objects=200).T[np.newaxis]
    any_score = LayoutOptions((), pre_cluster_threshold=0.001)
    return [
        LayoutExample("yolov8", "[84, 8400]", {"output0": columns}),
        LayoutExample("yolov8", "[8400, 84]", {"output0": v8[np.newaxis]}),
        LayoutExample("yolov8", "[84, 8400] FP16", {"output0": columns.astype(np.float16)}),
        LayoutExample("yolov8", "[84, 8400] logits", {"output0": columns}, LayoutOptions((), 0.7, has_sigmoid=True)),
        LayoutExample("yolov8", "[84, 8400] crowd", {"output0": crowd}),
        LayoutExample("yolov8", "[84, 8400] conf 0.001", {"output0": columns}, any_score),
        LayoutExample("yolov5", "[25200, 85]", {"output": v5[np.newaxis]}),
        LayoutExample("yolov5", "[25200, 85] FP16", {"output": v5[np.newaxis].astype(np.float16)}),
        LayoutExample("yolov5", "[8400, 85]", {"output": v6[np.newaxis]}),
        LayoutExample("yolov5", "[8400, 85] conf 0.001", {"output": v6[np.newaxis]}, any_score),
        LayoutExample("yolox", "[8400, 85]", {"output": yolox[np.newaxis]}),
    ]


def row_examples() -> list[LayoutExample]:
    """Layouts with a row for each box."""
    corners, scores, classes = final_rows(300)
    six = np.hstack([corners, scores[:, np.newaxis], classes[:, np.newaxis]]).astype(np.float32)
    seven = np.hstack([np.zeros((300, 1)), corners, classes[:, np.newaxis], scores[:, np.newaxis]]).astype(np.float32)
    anchors = anchor_rows(CELLS)
    shares = np.ascontiguousarray(anchors[:, 4:], np.float32)
    centre, half, best = anchors[:, :2], anchors[:, 2:4] / 2, anchors[:, 4:].max(axis=1)
    labels = anchors[:, 4:].argmax(axis=1)
    every = np.hstack([centre - half, centre + half, best[:, np.newaxis], labels[:, np.newaxis]]).astype(np.float32)
    return [
        LayoutExample("yolo-end2end", "[300, 6]", {"output0": six[np.newaxis]}),
        LayoutExample("yolov7-nms", "[300, 7]", {"output": seven}),
        LayoutExample("yolo-nas-flat", "[300, 7]", {"output": seven[:, [0, 1, 2, 3, 4, 6, 5]]}),
        LayoutExample("yolo-nas", "[8400, 80]", {"boxes": every[np.newaxis, :, :4], "scores": shares[np.newaxis]}),
        LayoutExample("deepstream-yolo", "[8400, 6]", {"output": every[np.newaxis]}),
        LayoutExample("mmdeploy", "[300]", {"dets": six[np.newaxis, :, :5], "labels": classes[np.newaxis]}),
        LayoutExample(
            "efficient-nms",
            "[300]",
            {
                "num_dets": np.array([[250]], np.int32),
                "det_boxes": corners[np.newaxis],
                "det_scores": scores[np.newaxis],
                "det_classes": classes[np.newaxis].astype(np.int32),
            },
        ),
    ]


def query_examples() -> list[LayoutExample]:
    """Layouts of transformers, and of networks that finish their boxes."""
    corners, scores, classes = final_rows(300)
    rows = anchor_rows(300)
    places, shares = rows[:, :4] / SIDE, np.clip(rows[:, 4:], 1e-3, 0.999)
    logits = np.log(shares / (1 - shares)).astype(np.float32)
    background = np.hstack([logits, np.full((300, 1), 0.5)]).astype(np.float32)
    parts = (corners / SIDE).astype(np.float32)
    seven = np.hstack([np.zeros((300, 1)), classes[:, np.newaxis], scores[:, np.newaxis], parts]).astype(np.float32)
    return [
        LayoutExample("rt-detr", "[300]", {"labels": classes[np.newaxis], "boxes": corners, "scores": scores}),
        LayoutExample("rt-detr-ultralytics", "[300, 84]", {"output0": np.hstack([places, shares])[np.newaxis]}),
        LayoutExample("detr", "[300, 81]", {"pred_logits": background, "pred_boxes": places}),
        LayoutExample("rf-detr", "[300, 80]", {"dets": places[np.newaxis], "labels": logits[np.newaxis]}),
        LayoutExample("torchvision", "[300]", {"3047": corners, "3048": classes, "3049": scores}),
        LayoutExample("ssd", "[300, 7]", {"detection_out": seven[np.newaxis, np.newaxis]}),
        LayoutExample("ssd", "[300]", {"bboxes": parts[np.newaxis], "labels": classes, "scores": scores}),
        LayoutExample(
            "tf-detection",
            "[300]",
            {
                "detection_boxes": parts[np.newaxis],
                "detection_classes": classes[np.newaxis].astype(np.float32),
                "detection_scores": scores[np.newaxis],
                "num_detections": np.array([250], np.float32),
            },
        ),
    ]


def grid_examples() -> list[LayoutExample]:
    """Layouts of several feature maps: NanoDet's distributions, and faces with keypoints."""
    random = np.random.default_rng(11)
    cells = {stride: (SIDE // stride) ** 2 for stride in (8, 16, 32, 64)}
    objects = dict(zip(cells, (30, 20, 9, 1), strict=True))
    rows = {stride: anchor_rows(count, objects=objects[stride]) for stride, count in cells.items()}
    scores = {stride: part[:, 4:] for stride, part in rows.items()}
    bins = {stride: random.normal(0, 2, (count, 32)).astype(np.float32) for stride, count in cells.items()}
    pairs = {f"{kind}_{stride}": part[stride] for kind, part in (("cls", scores), ("dis", bins)) for stride in cells}
    plus = np.vstack([np.hstack([scores[stride], bins[stride]]) for stride in cells])
    faces = {stride: scores[stride].max(axis=1, keepdims=True) for stride in (8, 16, 32)}
    yunet = {f"{kind}_{stride}": part for kind in ("cls", "obj") for stride, part in faces.items()}
    yunet |= {
        f"{kind}_{stride}": random.uniform(0, 2, (len(part), columns))
        for kind, columns in (("bbox", 4), ("kps", 10))
        for stride, part in faces.items()
    }
    maps = {name: random.uniform(0, 2, (channels, 160, 160)) for name, channels in (("b", 2), ("c", 2), ("d", 10))}
    heat = anchor_rows(160 * 160)[:, 4:].max(axis=1).reshape(1, 160, 160)
    anchors = anchor_rows(17640)
    shares, corners = (
        anchors[:, 4:].max(axis=1),
        anchors[:, [0, 1, 0, 1]] + anchors[:, [2, 3, 2, 3]] * [-1, -1, 1, 1] / 2,
    )
    return [
        LayoutExample("nanodet", "3 strides", {name: array for name, array in pairs.items() if "64" not in name}),
        LayoutExample("picodet", "4 strides", pairs),
        LayoutExample("nanodet-plus", "[8500, 112]", {"output": plus[np.newaxis]}),
        LayoutExample(
            "ultraface", "[17640]", _singles({"scores": np.stack([1 - shares, shares], 1), "boxes": corners / SIDE})
        ),
        LayoutExample("yunet", "3 strides", _singles(yunet)),
        LayoutExample("centerface", "[160, 160]", _singles({"heatmap": heat, **maps})),
    ]


def mask_examples() -> list[LayoutExample]:
    """Instance segmentation, poses and oriented boxes."""
    random = np.random.default_rng(11)
    prototypes = random.normal(size=(1, 32, SIDE // 4, SIDE // 4)).astype(np.float32)

    def with_columns(rows: Array, count: int) -> Array:
        more = random.uniform(-1, 1, (len(rows), count)).astype(np.float32)
        return np.hstack([rows, more])[np.newaxis]

    v8, v5 = anchor_rows(CELLS, objects=FEW_OBJECTS), anchor_rows(3 * CELLS, objects=FEW_OBJECTS, has_objectness=True)
    columns = np.ascontiguousarray(with_columns(v8, 32).transpose(0, 2, 1))
    corners, _, classes = final_rows(300)
    scores = np.where(np.arange(300) < FEW_OBJECTS, 0.9, 0.1)
    final = np.hstack([corners, scores[:, np.newaxis], classes[:, np.newaxis]]).astype(np.float32)
    pose = np.hstack([v8[:, :4], v8[:, 4:].max(axis=1, keepdims=True)])
    turned = np.hstack([v8[:, :4], v8[:, 4:19]])
    turned[v8[:, 19:].max(axis=1) > 0.3, 4] = 0.9
    crowd = anchor_rows(CELLS, objects=200)[:, :20]
    crowd[:, 4] = np.where(random.permutation(CELLS) < 1000, 0.5, 0.0)
    queries: dict[str, Array] = {
        "dets": np.hstack([(corners[:, :2] + corners[:, 2:]) / 2, corners[:, 2:] - corners[:, :2]])[np.newaxis] / SIDE,
        "labels": np.where(scores[:, np.newaxis] > 0.5, 2.0, -6.0)[np.newaxis].repeat(91, axis=2).astype(np.float32),
        "masks": random.normal(size=(1, 300, 108, 108)).astype(np.float32),
    }
    queries["labels"][..., 1:] = -6
    poses = LayoutOptions((), keypoint_shape=(17, 3))
    plain, many = with_columns(turned, 1).transpose(0, 2, 1), with_columns(crowd, 1).transpose(0, 2, 1)
    pairs: dict[str, Array] = {"a": columns, "b": prototypes}
    return [
        LayoutExample("yolov8-seg", "[116, 8400]", pairs, geometry=PHOTO),
        LayoutExample("yolov8-seg", "[116, 8400], 12 megapixels", pairs, geometry=LARGE_PHOTO),
        LayoutExample("yolov5-seg", "[25200, 117]", {"a": with_columns(v5, 32), "b": prototypes}, geometry=PHOTO),
        LayoutExample("yolo-end2end-seg", "[300, 38]", {"a": with_columns(final, 32), "b": prototypes}, geometry=PHOTO),
        LayoutExample("rf-detr-seg", "[300, 91]", queries, geometry=PHOTO),
        LayoutExample("yolov8-pose", "[56, 8400]", {"a": with_columns(pose, 51).transpose(0, 2, 1)}, poses, PHOTO),
        LayoutExample("yolo-end2end-pose", "[300, 57]", {"a": with_columns(final, 51)}, poses, PHOTO),
        LayoutExample(
            "rtmo",
            "[50, 17, 3]",
            {"dets": final[np.newaxis, :50, :5], "keypoints": np.ones((1, 50, 17, 3), np.float32)},
            poses,
            PHOTO,
        ),
        LayoutExample("yolov8-obb", "[20, 8400]", {"a": plain}, geometry=PHOTO),
        LayoutExample("yolov8-obb", "[21, 8400] crowd", {"a": many}, geometry=PHOTO),
        LayoutExample("yolo-end2end-obb", "[300, 7]", {"a": with_columns(final, 1)}, geometry=PHOTO),
    ]


def map_examples() -> list[LayoutExample]:
    """Semantic maps, depth, embeddings and text."""
    random = np.random.default_rng(13)

    def smooth(count: int, side: int) -> Array:
        planes = random.normal(size=(count, side, side)).astype(np.float32)
        return np.stack([cv2.GaussianBlur(plane, (0, 0), side / 16) for plane in planes])[np.newaxis]

    few, usual, many = smooth(19, 128), smooth(21, 512), smooth(150, 128)
    lines = np.full((1, 1, 736, 1280), 0.01, np.float32)
    for top in range(20, 700, 34):
        lines[..., top : top + 16, 100:900] = 0.9
    steps = random.uniform(0, 1, (1, 40, 6625)).astype(np.float32)
    recogniser = LayoutOptions((), characters="字" * 6623)
    return [
        LayoutExample("semantic", "[19, 128, 128]", {"a": few}, geometry=PHOTO),
        LayoutExample("semantic", "[21, 512, 512]", {"a": usual}, geometry=PHOTO),
        LayoutExample("semantic", "[21, 512, 512] stretched", {"a": usual}, geometry=STRETCHED),
        LayoutExample("semantic", "[512, 512] integers", {"a": usual.argmax(axis=1)}, geometry=PHOTO),
        LayoutExample(
            "semantic", "[1, 512, 512] sigmoid", {"a": usual[:, :1]}, LayoutOptions((), has_sigmoid=True), PHOTO
        ),
        LayoutExample("semantic", "[19, 128, 128], 12 megapixels", {"a": few}, geometry=LARGE_PHOTO),
        LayoutExample("semantic", "[150, 128, 128], 12 megapixels", {"a": many}, geometry=LARGE_PHOTO),
        LayoutExample("depth", "[1, 256, 256]", {"a": smooth(1, 256)}, geometry=PHOTO),
        LayoutExample("depth", "[1, 256, 256], 12 megapixels", {"a": smooth(1, 256)}, geometry=LARGE_PHOTO),
        LayoutExample("embedding", "[512]", {"a": steps[:, 0, :512]}, LayoutOptions((), is_unit_length=True)),
        LayoutExample("ctc", "[40, 6625]", {"a": steps}, recogniser),
        LayoutExample("db", "[1, 736, 1280]", {"a": lines}, LayoutOptions((), 0.6, segmentation_threshold=0.3), PHOTO),
    ]


def _singles(outputs: Mapping[str, Array]) -> dict[str, Array]:
    """float32, with a batch axis."""
    return {name: array[np.newaxis].astype(np.float32) for name, array in outputs.items()}


def other_examples() -> list[LayoutExample]:
    """Layouts of the shipped models, and a classifier's."""
    random = np.random.default_rng(11)
    corners, scores, classes = final_rows(300)
    cells = random.uniform(0, 0.3, (1, 5 + CLASSES, 22, 22)).astype(np.float32)
    hot = random.integers(0, 22, (2, OBJECTS))
    cells[0, 0, *hot], cells[0, 7, *hot] = 0.9, 0.9
    heat = random.uniform(-9, -3, (1, CLASSES, SIDE // 8, SIDE // 8)).astype(np.float32)
    heat[0, random.integers(0, CLASSES, OBJECTS), *(hot * 3)] = 1.0
    distances = random.uniform(0, 1, (1, 4, *heat.shape[2:])).astype(np.float32)
    boxes = {"boxes": corners[np.newaxis], "scores": scores[np.newaxis], "class_ids": classes[np.newaxis]}
    return [
        LayoutExample("boxes", "[300]", boxes),
        LayoutExample("center-heatmap", "[80, 80, 80]", {"heatmap": heat, "distances": distances}),
        LayoutExample("fastestdet", "[85, 22, 22]", {"grid": cells}),
        LayoutExample("classification", "[1000]", {"scores": random.random((1, 1000), np.float32)}),
    ]


def examples() -> list[LayoutExample]:
    """All examples, in the order of the table."""
    boxes = (*yolo_examples(), *row_examples(), *query_examples(), *grid_examples(), *other_examples())
    return [*boxes, *mask_examples(), *map_examples()]


def result_count(result: VisionResult) -> int:
    """Number of boxes, classes or lines of text; 1 for the others."""
    match result:
        case Detections() | Classes():
            return len(result.score)
        case TextLines():
            return len(result.lines)
    return 1


def measure(chosen: Sequence[LayoutExample], calls: int) -> list[dict[str, Any]]:
    """Times of `calls` decodes of each example, in turn. Milliseconds."""
    decodes = [example.call() for example in chosen]
    found = [result_count(decode()) for decode in decodes]
    times_ms: list[list[float]] = [[] for _ in chosen]
    for _ in range(calls):
        for decode, own in zip(decodes, times_ms, strict=True):
            begin = time.perf_counter()
            decode()
            own.append((time.perf_counter() - begin) * 1e3)
    rows = []
    for example, own, count in zip(chosen, times_ms, found, strict=True):
        tenths = statistics.quantiles(own, n=10)
        figures = {"median_ms": statistics.median(own), "p10_ms": tenths[0], "p90_ms": tenths[-1]}
        rows.append({"layout": example.layout, "example": example.name, **figures, "results": count})
    return rows


def table_of(rows: Sequence[Mapping[str, Any]]) -> str:
    """For people."""
    figures = ("median_ms", "p10_ms", "p90_ms")
    cells = [
        (f"{row['layout']} {row['example']}", *(f"{row[name]:.3f}" for name in figures), row["results"]) for row in rows
    ]
    return format_table(HEAD, cells)


def main() -> int:
    """Exit code 1 if the median of an example is over GOAL_MS."""
    parser = argparse.ArgumentParser(prog="python -m loadtest.bench.gateway.layouts", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--layout", type=chosen_of(tuple(LAYOUTS)), help="only these, separated by commas")
    parser.add_argument("--calls", type=int, default=300, help="decodes of each example")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    cv2.setNumThreads(1)
    chosen = [example for example in examples() if not options.layout or example.layout in options.layout]
    if not chosen:
        parser.error(f"no example has the layout {', '.join(options.layout)}; add one to this module")
    rows = measure(chosen, options.calls)
    present(rows, f"Decoding one picture's outputs; goal: {GOAL_MS:g} ms", table_of(rows), options.json)
    return int(any(row["median_ms"] > GOAL_MS for row in rows))


if __name__ == "__main__":
    sys.exit(main())
