"""Reads the files that Open Model Zoo has beside a model: accuracy-check.yml and model.yml.

Only the keys below are read, line by line: no YAML parser is needed. Source: openvinotoolkit/open_model_zoo,
models/public (model.yml) and tools/accuracy_checker (preprocessors).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from penstock.models.inspect.inspection import Hints

_MAX_BYTES = 1 << 20
_MAX_SIDE = 1 << 14
_ARGUMENT = re.compile(r"^\s*- --(?P<name>mean_values|scale_values|reverse_input_channels)\b=?(?P<value>.*)$", re.M)
_NUMBERS = re.compile(r"\[([^\]]*)\]")
_FRAMEWORK = re.compile(r"^\s*-\s+framework:\s*(\w+)", re.M)
_MODEL = re.compile(r"^\s*- name:[^\n]*\n\s*launchers:", re.M)
_PREPROCESSING = re.compile(r"^(?P<indent>\s*)preprocessing:\s*(?:#.*)?$", re.M)
_ENTRY = re.compile(r"^(?P<indent>\s*)(?P<dash>-\s+)?(?P<key>\w+):\s*(?P<value>[^#]*)")
_PILLOW = re.compile(r"^\s*reader:\s*pillow_imread\b|^\s*type:\s*pillow_imread\b", re.M)

Step = Mapping[str, str]


def read_open_model_zoo(folder: Path) -> tuple[Hints, str] | None:
    """Hints of the files in a model's folder, and the files' names. None if they are absent or malformed."""
    check = _of_accuracy_check(_text(folder / "accuracy-check.yml"))
    conversion = _of_model_yml(_text(folder / "model.yml"))
    found = [(name, one) for name, one in (("accuracy-check.yml", check), ("model.yml", conversion)) if one is not None]
    if not found:
        return None
    hints = found[0][1]
    if check is not None and conversion is not None and check.scale is None:  # the check is of the converted model
        hints = Hints(
            input_size=check.input_size,
            color=conversion.color,
            scale=conversion.scale,
            mean=conversion.mean,
            std=conversion.std,
            resize=check.resize,
            padding=check.padding,
            parameters=check.parameters,
        )
    return hints, f"{' and '.join(name for name, _ in found)} (Open Model Zoo)"


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8") if path.is_file() and path.stat().st_size <= _MAX_BYTES else ""
    except (OSError, UnicodeDecodeError):
        return ""


def _of_model_yml(text: str) -> Hints | None:
    """Arguments of the conversion. The ONNX file takes RGB if the converted model, which takes BGR, reverses them."""
    if "\nmodel_optimizer_args:" not in text:
        return None
    found = {match["name"]: match["value"] for match in _ARGUMENT.finditer(text)}
    mean, std = (_listed(found.get(name, "")) for name in ("mean_values", "scale_values"))
    if mean is None or std is None or 0.0 in std:
        return None
    color = "rgb" if "reverse_input_channels" in found else "bgr"
    return Hints(color=color, scale=1.0, mean=mean, std=std)


def _listed(text: str) -> tuple[float, ...] | None:
    """1 or 3 numbers of `input[1,2,3]`; () for no text, None if it is malformed."""
    if not text.strip():
        return ()
    listed = _NUMBERS.search(text)
    return _numbers(listed[1] if listed else "")


def _numbers(text: str) -> tuple[float, ...] | None:
    parts = [part.strip() for part in text.strip().strip("()[]").split(",")[:4] if part.strip()]
    try:
        found = tuple(float(part) for part in parts)
    except ValueError:
        return None
    return found if len(found) in (1, 3) and all(abs(number) < 1e6 for number in found) else None


@dataclass(frozen=True, slots=True)
class _Block:
    """One model of accuracy-check.yml. is_onnx: it describes the ONNX file, not the converted model."""

    text: str
    is_onnx: bool

    def steps(self) -> list[Step]:
        """The preprocessing of the first data set: keys of each step, `type` among them."""
        begin = _PREPROCESSING.search(self.text)
        if begin is None:
            return []
        found: list[Step] = []
        for line in self.text[begin.end() :].splitlines()[1:]:
            entry = _ENTRY.match(line)
            if entry is None:
                continue
            if len(entry["indent"]) < len(begin["indent"]) or (
                len(entry["indent"]) == len(begin["indent"]) and not entry["dash"]
            ):
                break
            if entry["dash"] or not found:
                found.append({})
            found[-1] = {**found[-1], entry["key"]: entry["value"].strip().strip("\"'")}
        return found[:32]


def _of_accuracy_check(text: str) -> Hints | None:
    starts = [match.start() for match in _MODEL.finditer(text)]
    if not starts:
        return None
    blocks = []
    for begin, end in zip(starts, [*starts[1:], len(text)], strict=True):
        framework = _FRAMEWORK.search(text, begin, end)
        blocks.append(_Block(text[begin:end], framework is not None and framework[1] == "onnx_runtime"))
    block = next((one for one in blocks if one.is_onnx), blocks[0])
    steps = block.steps()
    if not steps:
        return None
    fit = _fit_of(steps)
    if not block.is_onnx:
        return fit
    values = _normalisation_of(steps)
    if values is None:
        return None
    is_rgb = bool(_PILLOW.search(block.text))
    for step in steps:
        is_rgb = {"bgr_to_rgb": True, "rgb_to_bgr": False}.get(step.get("type", ""), is_rgb)
    return Hints(
        input_size=fit.input_size,
        color="rgb" if is_rgb else "bgr",
        scale=1.0,
        mean=values[0],
        std=values[1],
        resize=fit.resize,
        padding=fit.padding,
        parameters=fit.parameters,
    )


def _normalisation_of(steps: list[Step]) -> tuple[tuple[float, ...], tuple[float, ...]] | None:
    """(mean, std) in pixel values of all steps (x - mean) / std in turn. None if one is not of numbers."""
    factor, offset = np.ones(3), np.zeros(3)
    for step in steps:
        if step.get("type") != "normalization":
            continue
        mean, std = _numbers(step.get("mean", "0")), _numbers(step.get("std", "1"))
        if mean is None or std is None or min(map(abs, std)) < 1e-6:
            return None
        factor, offset = factor / np.array(std), (offset - np.array(mean)) / np.array(std)
    mean_of, std_of = -offset / factor, 1.0 / factor
    return tuple(map(float, mean_of.round(6))), tuple(map(float, std_of.round(6)))


def _fit_of(steps: list[Step]) -> Hints:
    """How a picture is fitted to the network."""
    named = {step.get("type", ""): step for step in steps}
    resize, crop, padding = (named.get(name) for name in ("resize", "crop", "padding"))
    size = next((found for step in (crop, padding, resize) if step and (found := _size_of(step))), None)
    if padding is not None:
        values = _numbers(padding.get("pad_value", "0"))
        where = "corner" if padding.get("pad_type") == "right_bottom" else "letterbox"
        return Hints(input_size=size, resize=where, padding=values[0] if values and 0 <= values[0] <= 255 else None)
    if resize is None:
        return Hints(input_size=size)
    if crop is None:
        return Hints(input_size=size, resize="squash" if "aspect_ratio_scale" not in resize else "letterbox")
    shorter = _size_of(resize) if resize.get("aspect_ratio_scale") == "greater" else None
    fraction = _numbers(crop.get("central_fraction", "0"))
    if size is not None and fraction and 0.1 < fraction[0] <= 1:
        shorter = (round(min(size) / fraction[0]),) * 2
    parameters = {"resize-shorter-side": str(min(shorter))} if shorter else {}
    return Hints(input_size=size, resize="crop" if shorter else "", parameters=parameters)


def _size_of(step: Step) -> tuple[int, int] | None:
    """(height, width) of a step's size, or of its dst_height and dst_width."""
    sides = [step.get(key, step.get("size", "")) for key in ("dst_height", "dst_width")]
    if not all(side.isascii() and side.isdigit() and len(side) < 6 for side in sides):
        return None
    height, width = map(int, sides)
    return (height, width) if 0 < height <= _MAX_SIDE and 0 < width <= _MAX_SIDE else None
