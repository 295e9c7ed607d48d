"""What exporters write into an ONNX file's metadata_props."""

import ast
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from penstock.models.inspect.inspection import Hints

MAX_LITERAL = 256 << 10  # characters of a Python literal; ast needs some hundred times as many bytes
MAX_CLASSES = 30_000
_MAX_LABEL = 200
_RESIZE = {"standard": "squash", "fit_to_window": "corner", "fit_to_window_letterbox": "letterbox", "crop": "crop"}
_KINDS = {"classification": "classification", "segmentation": "semantic"}  # model_type: layout


@dataclass(frozen=True, slots=True)
class FileMetadata:
    """The file's metadata. exporter: the program that writes such keys, "" if none is known. imgsz: (height, width).

    task: Ultralytics'; empty in YOLOv5's and older files. keypoint_shape: (count, values). is_end_to_end: None if the
    file does not say. characters: of a text recogniser, or class names. is_multilabel: a classifier's classes are
    independent. hints: preprocessing and thresholds; their layout is that of the exporter's kind of model.
    """

    exporter: str = ""
    names: tuple[str, ...] = ()
    task: str = ""
    imgsz: tuple[int, int] | None = None
    keypoint_shape: tuple[int, int] | None = None
    is_end_to_end: bool | None = None
    characters: tuple[str, ...] = ()
    is_multilabel: bool = False
    hints: Hints = field(default_factory=Hints)
    hints_origin: str = ""  # where hints are from, for display; "" if there are none


def metadata_of(metadata: Mapping[str, str]) -> FileMetadata:
    """Metadata of known exporters. Malformed values are ignored."""
    names = labels_of(literal(metadata.get("names", "")))
    if names:
        return FileMetadata(
            exporter="Ultralytics",
            names=names,
            task=metadata.get("task", "").strip().lower()[:_MAX_LABEL],
            imgsz=_pair(literal(metadata.get("imgsz", "")), most=1 << 16),
            keypoint_shape=_pair(literal(metadata.get("kpt_shape", "")), most=4096),
            is_end_to_end={"true": True, "false": False}.get(metadata.get("end2end", "").strip().lower()),
        )
    if any(key.split()[:1] == ["model_info"] for key in metadata):
        return _of_model_api({key.split()[-1]: value for key, value in metadata.items() if "model_info" in key.split()})
    if metadata.get("character", "").strip("\r\n"):
        lines = metadata["character"].replace("\r", "").strip("\n").split("\n")[:MAX_CLASSES]
        return FileMetadata(exporter="PaddlePaddle", characters=tuple(lines))
    names = labels_of(literal(metadata.get("class_names", "")))
    if names:
        mean, std = (_three(literal(metadata.get(f"standardization_{name}", ""))) for name in ("mean", "std"))
        hints = Hints(mean=mean, std=() if 0.0 in std else std)
        return FileMetadata("class_names", names, hints=hints, hints_origin="the metadata" if hints != Hints() else "")
    return FileMetadata()


def ultralytics_literal(metadata: Mapping[str, str], labels: Sequence[str], size: tuple[int, int] | None) -> str:
    """The parameter `metadata` of config.pbtxt, which Ultralytics' own Triton client evaluates as a Python literal.

    labels, size: as served; size is (height, width), None if it is free. Empty if the file has not all the keys that
    the client requires. Source: ultralytics/ultralytics, ultralytics/utils/triton.py and ultralytics/nn/autobackend.py.
    """
    known = metadata_of(metadata)
    stride, batch = literal(metadata.get("stride", "")), literal(metadata.get("batch", ""))
    imgsz = size or known.imgsz
    if not known.names or not known.task or imgsz is None or type(stride) is not int or type(batch) is not int:
        return ""
    arguments = literal(metadata.get("args", ""))
    has_nms = isinstance(arguments, dict) and arguments.get("nms") is True
    value = {
        "task": known.task,
        "stride": stride,
        "batch": batch,
        "imgsz": list(imgsz),
        "names": dict(enumerate(labels or known.names)),
        "end2end": bool(known.is_end_to_end),
        "args": {"dynamic": size is None, "nms": has_nms},  # dynamic: the client then sends pictures of other sizes
    }
    if known.keypoint_shape:
        value["kpt_shape"] = list(known.keypoint_shape)
    return repr(value)


def _of_model_api(entries: Mapping[str, str]) -> FileMetadata:
    """OpenVINO's Model API, as its training extensions export: keys `model_info NAME`, lists with blanks between.

    Its YOLO models have defaults of their own, as their families here; others pad with 0 and have no normalisation.
    Source: open-edge-platform/model_api, src/model_api/adapters/utils.py (load_parameters_from_onnx), models/types.py,
    models/image_model.py.
    """
    kind = entries.get("model_type", "").strip().lower()
    resize = _RESIZE.get(entries.get("resize_type", "").strip(), "")
    mean, std = _numbers(entries.get("mean_values", "")), _numbers(entries.get("scale_values", ""))
    reverse = entries.get("reverse_input_channels", "").strip().lower()
    conf, iou = _fraction(entries.get("confidence_threshold", "")), _fraction(entries.get("iou_threshold", ""))
    is_yolo = "yolo" in kind
    padding = _numbers(entries.get("pad_value", ""))
    return FileMetadata(
        exporter="OpenVINO Model API",
        is_multilabel=entries.get("multilabel", "").strip().lower() in ("true", "yes", "1"),
        hints_origin="the metadata (OpenVINO Model API)",
        names=tuple(one_label(name.replace("_", " ")) for name in entries.get("labels", "").split()[:MAX_CLASSES]),
        hints=Hints(
            color="rgb" if reverse in ("true", "yes", "1") else "bgr" if reverse in ("false", "no", "0") else "",
            mean=mean if len(mean) in (1, 3) else (),
            std=std if len(std) in (1, 3) and 0.0 not in std else (),
            scale=None if is_yolo and not mean and not std else 1.0,
            resize=resize,
            padding=padding[0] if padding and 0 <= padding[0] <= 255 else None if is_yolo or not resize else 0.0,
            conf=conf,
            iou=iou,
            layout=_KINDS.get(kind, ""),
        ),
    )


def _fraction(text: str) -> float | None:
    found = _numbers(text)
    return found[0] if found and 0 <= found[0] <= 1 else None


def _numbers(text: str) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in text.split()[:4])
    except ValueError:
        return ()
    return found if all(abs(number) < 1e6 for number in found) else ()


def _three(value: object) -> tuple[float, ...]:
    if not isinstance(value, list | tuple) or len(value) != 3:
        return ()
    numbers = tuple(float(one) for one in value if isinstance(one, int | float) and abs(one) < 1e6)
    return numbers if len(numbers) == 3 and any(numbers) else ()


def literal(text: str) -> object:
    """The value of a Python literal; None if it is none, or too large. Never evaluated."""
    if not text or len(text) > MAX_LITERAL:
        return None
    try:
        return ast.literal_eval(text.strip())
    except (ValueError, SyntaxError, MemoryError, RecursionError, TypeError):
        return None


def labels_of(value: object) -> tuple[str, ...]:
    """Names by class id from {0: "person", …} in any order, or a list; ids without a name have their number."""
    if isinstance(value, list | tuple):
        value = dict(enumerate(value))
    if not isinstance(value, dict) or not 0 < len(value) <= MAX_CLASSES:
        return ()
    by_id = {}
    for key, name in value.items():
        number = int(key) if isinstance(key, str) and key.isascii() and key.isdigit() and len(key) < 6 else key
        if type(number) is not int or not 0 <= number < MAX_CLASSES or not isinstance(name, str | int | float):
            return ()
        by_id[number] = one_label(str(name))
    return tuple(by_id.get(number) or str(number) for number in range(max(by_id) + 1))


def one_label(text: str) -> str:
    """The label without what config.pbtxt's list cannot hold: semicolons, line breaks, control characters."""
    spaced = " ".join(text.replace(";", ",").split())[:_MAX_LABEL]
    return "".join(sign for sign in spaced if sign.isprintable())


def _pair(value: object, *, most: int) -> tuple[int, int] | None:
    if type(value) is int:
        value = (value, value)
    if not isinstance(value, list | tuple) or len(value) != 2:
        return None
    one, other = value
    if type(one) is not int or type(other) is not int or not (0 < one <= most and 0 < other <= most):
        return None
    return one, other
