"""Reads the files beside a model: labels, and the preprocessing that Roboflow and Open Model Zoo write."""

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from penstock.models.inspect.inspection import Hints
from penstock.models.inspect.labels import labels_of_file
from penstock.models.inspect.open_model_zoo import read_open_model_zoo

_MAX_BYTES = 1 << 20
_LEAST_DIVISOR = 1e-6
_LABEL_FILES = ("labels.txt", "classes.txt", "class_names.txt", "coco.names", "obj.names")
_EDGES = {"Fit (black edges) in": 0.0, "Fit (white edges) in": 255.0, "Fit (grey edges) in": 114.0}
_RESIZES = {"stretch": "squash", "letterbox": "letterbox", "center-crop": "crop"}


@dataclass(frozen=True, slots=True)
class SidecarFiles:
    """Labels and preprocessing from files beside a model. labels_origin, hints_origin: the files; empty if none."""

    labels: tuple[str, ...] = ()
    labels_origin: str = ""
    hints: Hints = field(default_factory=Hints)
    hints_origin: str = ""


def read_sidecar_files(path: Path) -> SidecarFiles:
    """Reads the model's folder. A labels file with the model's name (best.names) comes first."""
    own = [path.with_suffix(suffix) for suffix in (".names", ".txt", ".yaml", ".yml")]
    labels: tuple[str, ...] = ()
    origin = ""
    for candidate in (*own, *(path.with_name(name) for name in _LABEL_FILES)):
        labels = labels_of_file(candidate)
        if labels:
            origin = candidate.name
            break
    for name, read in (("inference_config.json", _of_inference_config), ("environment.json", _of_environment)):
        hints = read(_json(path.with_name(name)))
        if hints is not None:
            return SidecarFiles(labels, origin, hints, f"{name} (Roboflow)")
    found = read_open_model_zoo(path.parent)
    return SidecarFiles(labels, origin, *found) if found else SidecarFiles(labels, origin)


def _json(path: Path) -> Any:
    """The object in the file; an empty one if it is absent, large or malformed."""
    try:
        if not path.is_file() or path.stat().st_size > _MAX_BYTES:
            return {}
        found = json.loads(path.read_text("utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}


def _of_inference_config(config: dict[str, Any]) -> Hints | None:
    """Source: roboflow/inference, the class NetworkInputDefinition and what applies it: pixel / scaling_factor, then
    normalization.
    """
    network = config.get("network_input")
    if not isinstance(network, dict):
        return None
    size = network.get("training_input_size")
    sides: list[Any] = [size.get(key) for key in ("height", "width")] if isinstance(size, dict) else []
    divisor: Any = network.get("scaling_factor")
    mean, std = _normalization(network.get("normalization"))
    padding: Any = network.get("padding_value")
    return Hints(
        input_size=(sides[0], sides[1]) if len(sides) == 2 and all(map(_is_side, sides)) else None,
        color=str(network.get("color_mode")) if network.get("color_mode") in ("rgb", "bgr") else "",
        scale=1.0 / divisor if _is_number(divisor) and divisor > _LEAST_DIVISOR else 1.0,
        mean=mean,
        std=std,
        resize=_RESIZES.get(str(network.get("resize_mode")), ""),
        padding=float(padding) if _is_number(padding) and 0 <= padding <= 255 else None,
    )


def _of_environment(environment: dict[str, Any]) -> Hints | None:
    """Source: roboflow/inference, the reading of PREPROCESSING in its models of the platform."""
    preprocessing = environment.get("PREPROCESSING")
    if isinstance(preprocessing, str):
        try:
            preprocessing = json.loads(preprocessing)
        except (ValueError, RecursionError):
            return None
    resize = preprocessing.get("resize") if isinstance(preprocessing, dict) else None
    method = str(resize.get("format", "Stretch to")) if isinstance(resize, dict) else ""
    if method in _EDGES:
        return Hints(resize="letterbox", padding=_EDGES[method])
    return Hints(resize="squash") if method == "Stretch to" else None


def _normalization(value: object) -> tuple[tuple[float, ...], tuple[float, ...]]:
    if not isinstance(value, list) or len(value) != 2:
        return (), ()
    mean, std = value
    for numbers in (mean, std):
        if not isinstance(numbers, list) or len(numbers) not in (1, 3) or not all(map(_is_number, numbers)):
            return (), ()
    return (tuple(map(float, mean)), tuple(map(float, std))) if 0 not in std else ((), ())


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e6  # not NaN


def _is_side(value: object) -> bool:
    return type(value) is int and 0 < value <= 1 << 14
