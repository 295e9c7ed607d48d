"""Reads DeepStream's config_infer_primary.txt (Gst-nvinfer) as hints.

Source: NVIDIA's DeepStream developer guide, Gst-nvinfer, and the files of marcoslucianops/DeepStream-Yolo.
"""

import configparser
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.models.inspect.inspection import Hints
from penstock.models.inspect.labels import labels_of_file
from penstock.vision.layouts.registry import LAYOUTS

MAX_BYTES = 1 << 20
_COLORS = {"0": "rgb", "1": "bgr", "2": "gray"}
_NONE_CLUSTER_MODES = ("4",)
_PARSERS = {
    "nvdsinferparseyolo": "deepstream-yolo",
    "nvdsinferparseyolocuda": "deepstream-yolo",
    "nvdsinferparseyoloe": "deepstream-yolo",
    "nvdsinferparseyoloecuda": "deepstream-yolo",
    "nvdsinferparsecustomefficientnms": "efficient-nms",
    "nvdsinferparsecustomefficientnmstlt": "efficient-nms",
    "nvdsinferparsecustombatchednmstlt": "efficient-nms",
    "nvdsinferparsecustomddetrtao": "detr",
}


class NotDeepStream(Exception):
    """The file is not a configuration of Gst-nvinfer. str() is one sentence."""


@dataclass(frozen=True, slots=True)
class DeepStreamHints:
    """Hints, and sentences on settings that Penstock does not use."""

    hints: Hints
    unused: tuple[str, ...]


def hints_from_deepstream(path: Path) -> DeepStreamHints:
    """The hints of the file. nvinfer pads with black. Raises NotDeepStream with the fault."""
    properties, classes = _sections(path)
    factor = _number(path, properties, "net-scale-factor", 1.0)
    offsets = _numbers(path, properties, "offsets")
    if factor == 0.0:
        raise NotDeepStream(f"{path}: net-scale-factor is 0, which makes every pixel 0")
    layout, unused = _layout(properties)
    keeps_aspect = properties.get("maintain-aspect-ratio", "0") == "1"
    is_symmetric = properties.get("symmetric-padding", "0") == "1"
    labels = _labels(path, properties)
    parameters, more_unused = _classes(path, properties, classes)
    return DeepStreamHints(
        Hints(
            layout=layout,
            input_size=_size(path, properties),
            labels=labels,
            labels_origin=properties.get("labelfile-path", "") if labels else "",
            color=_COLORS.get(properties.get("model-color-format", "0"), ""),
            scale=factor,
            mean=tuple(offset * factor for offset in offsets),
            resize=("letterbox" if is_symmetric else "corner") if keeps_aspect else "squash",
            padding=0.0 if keeps_aspect else None,
            conf=_fraction(path, classes.get("all", {}), "pre-cluster-threshold"),
            iou=_fraction(path, classes.get("all", {}), "nms-iou-threshold"),
            parameters=parameters,
        ),
        (*unused, *more_unused),
    )


def _sections(path: Path) -> tuple[dict[str, str], dict[str, dict[str, str]]]:
    """[property], and the sections [class-attrs-…] by what follows the dash."""
    try:
        if path.stat().st_size > MAX_BYTES:
            raise NotDeepStream(f"{path} has over {MAX_BYTES} bytes: it is not a configuration of nvinfer")
        text = path.read_text("utf-8")
    except OSError as error:
        raise NotDeepStream(f"{path} cannot be read: {error.strerror}") from None
    except UnicodeDecodeError:
        raise NotDeepStream(f"{path} is not UTF-8 text") from None
    parser = configparser.ConfigParser(interpolation=None, strict=False, comment_prefixes=("#",), delimiters=("=",))
    try:
        parser.read_string(text)
    except configparser.Error as error:
        raise NotDeepStream(f"{path} is not a configuration of nvinfer: {' '.join(str(error).split())[:200]}") from None
    if not parser.has_section("property"):
        raise NotDeepStream(f"{path} has no section [property]: it is not a configuration of nvinfer")
    attributes = {
        name.removeprefix("class-attrs-"): dict(parser.items(name))
        for name in parser.sections()
        if name.startswith("class-attrs-")
    }
    return {key: value.strip() for key, value in parser.items("property")}, attributes


def _layout(properties: Mapping[str, str]) -> tuple[str, tuple[str, ...]]:
    """A layout that the parser's name gives; a classifier's or an embedding's by network-type."""
    name = properties.get("parse-bbox-func-name") or properties.get("parse-classifier-func-name") or ""
    if name in LAYOUTS:
        return name, ()
    known = _PARSERS.get(name.lower(), "")
    if known or not name:
        is_classifier = properties.get("network-type") == "1" and not known
        return ("classification" if is_classifier else known), ()
    return "", (f"the parser {name!r} is in a library and cannot be used; the layout is recognised from the outputs",)


def _size(path: Path, properties: Mapping[str, str]) -> tuple[int, int] | None:
    sides = _numbers(path, properties, "infer-dims")
    if len(sides) != 3 or not all(side == int(side) and 0 < side <= 1 << 16 for side in sides):
        return None
    is_nhwc = properties.get("network-input-order") == "1"
    height, width = (sides[0], sides[1]) if is_nhwc else (sides[1], sides[2])
    return int(height), int(width)


def _labels(path: Path, properties: Mapping[str, str]) -> tuple[str, ...]:
    """Of the file beside the configuration; nvinfer's classifiers have them in one line, with semicolons."""
    name = properties.get("labelfile-path", "")
    if not name:
        return ()
    found = labels_of_file(path.parent / name)
    if len(found) == 1 and properties.get("network-type") == "1":
        return tuple(part.strip() for part in found[0].split(",") if part.strip())
    return found


def _classes(
    path: Path, properties: Mapping[str, str], classes: Mapping[str, Mapping[str, str]]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Card parameters of the class sections, and what is not used."""
    found: dict[str, str] = {}
    unused: list[str] = []
    own = {
        name: _fraction(path, section, "pre-cluster-threshold") for name, section in classes.items() if name.isdecimal()
    }
    thresholds = [f"{name}:{share:g}" for name, share in own.items() if share is not None]
    if thresholds:
        found["class-thresholds"] = ";".join(thresholds)
    topk = classes.get("all", {}).get("topk", "")
    if topk.isdecimal() and len(topk) < 10 and int(topk) > 0:
        found["topk"] = topk
    threshold = _fraction(path, properties, "classifier-threshold")
    if threshold is not None and properties.get("network-type") == "1":
        found["classifier-threshold"] = f"{threshold:g}"
    mode = properties.get("cluster-mode", "2")
    if mode not in ("2", *_NONE_CLUSTER_MODES):
        unused.append(f"cluster-mode {mode} is not non-maximum suppression (2), which is used instead")
    return found, tuple(unused)


def _number(path: Path, section: Mapping[str, str], key: str, default: float) -> float:
    try:
        number = float(section.get(key, default))
    except ValueError:
        number = math.nan
    if not math.isfinite(number):
        raise NotDeepStream(f"{path}: {key} is {section[key]!r}, which is not a number")
    return number


def _fraction(path: Path, section: Mapping[str, str], key: str) -> float | None:
    if key not in section:
        return None
    number = _number(path, section, key, 0.0)
    if not 0.0 <= number <= 1.0:
        raise NotDeepStream(f"{path}: {key} is {section[key]!r}, which is not between 0 and 1")
    return number


def _numbers(path: Path, section: Mapping[str, str], key: str) -> tuple[float, ...]:
    parts = [part for part in section.get(key, "").replace(",", ";").split(";") if part.strip()]
    try:
        numbers = tuple(float(part) for part in parts)
    except ValueError:
        numbers = (math.nan,)
    if len(numbers) > 4 or not all(map(math.isfinite, numbers)):
        raise NotDeepStream(f"{path}: {key} is {section[key]!r}, which is not a list of numbers separated by ';'")
    return numbers
