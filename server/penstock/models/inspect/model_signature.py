"""Inputs and outputs of a vision model as the recognition rules read them: image input, size, output shapes."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from penstock.models.inspect.facts import ModelFacts, TensorFacts
from penstock.models.inspect.inspection import Hints, Question
from penstock.models.inspect.metadata import FileMetadata
from penstock.models.inspect.sidecar_files import SidecarFiles
from penstock.protocol.inference import Datatype
from penstock.vision.layouts import yolo

_PIXEL_TYPES = (Datatype.FP32, Datatype.FP16, Datatype.UINT8)
_SIZE_TYPES = (Datatype.INT64, Datatype.INT32, Datatype.FP32)
_SIZE_NAMES = ("orig_target_sizes", "orig_size", "target_sizes", "orig_sizes")
STRIDES = (8, 16, 32)
P6 = (*STRIDES, 64)
MAX_PIXELS, MAX_SIDE = 1 << 26, 1 << 15


class NoImageInput(Exception):
    """The model has no image input that Penstock can feed. str() is a sentence for the user."""


@dataclass(frozen=True, slots=True)
class ModelSignature:
    """Facts and hints, with the image input. size: (height, width) in pixels; None if it is not known.

    size_input: the input for the source picture's width and height, or None. names: labels from the flag, the
    metadata or a file beside the model; empty if there are none. names_origin: where they are from.
    """

    facts: ModelFacts
    hints: Hints
    metadata: FileMetadata
    image: TensorFacts
    size_input: TensorFacts | None
    is_nhwc: bool
    size: tuple[int, int] | None
    names: tuple[str, ...]
    names_origin: str

    @property
    def is_size_free(self) -> bool:
        """Whether height or width is dynamic."""
        return -1 in self.image.shape[-3:-1] if self.is_nhwc else -1 in self.image.shape[-2:]

    @property
    def stated_layout(self) -> str:
        """The layout by the flag, else by the exporter's kind of model; "" if neither says."""
        return self.hints.layout or self.metadata.hints.layout

    @property
    def has_batch_axis(self) -> bool:
        """Whether the image input has a batch axis."""
        return len(self.image.shape) == 4

    def shape_per_image(self, tensor: TensorFacts) -> tuple[int, ...]:
        """The output's shape for one picture, without batch axis; -1 for what is not known."""
        shape = tensor.measured if tensor.measured is not None else tensor.shape
        return shape[1:] if self.follows_batch(tensor) else shape

    def follows_batch(self, tensor: TensorFacts) -> bool:
        """Whether the first axis is declared as the batch axis: it has the name or the number of the input's."""
        if not self.has_batch_axis or not tensor.shape:
            return False
        batch, first = self.image.shape[0], tensor.shape[0]
        if batch > 0:
            return first == batch
        if self.image.axes[0] and self.image.axes[0] == tensor.axes[0]:
            return True
        may_be_rows = len(tensor.shape) <= 2 and "NonMaxSuppression" in self.facts.operators
        return first in (-1, 1) and not may_be_rows

    def cell_count(self, strides: Sequence[int] = STRIDES, *, is_rounded_up: bool = False) -> int:
        """Cells of the grids with these strides; 0 if the size is not known."""
        return cell_count(self.size, strides, is_rounded_up=is_rounded_up) if self.size is not None else 0


def cell_count(size: tuple[int, int], strides: Sequence[int], *, is_rounded_up: bool = False) -> int:
    """Cells of the grids with these strides, in pixels, over (height, width)."""
    if is_rounded_up:
        return sum(math.ceil(size[0] / one) * math.ceil(size[1] / one) for one in strides)
    return sum((size[0] // one) * (size[1] // one) for one in strides)


@lru_cache(maxsize=64)
def anchor_counts(size: tuple[int, int], each: int) -> frozenset[int]:
    """Numbers of rows that a network of this (height, width) can have, with `each` anchors per cell."""
    rounded_up = {each * cell_count(size, strides, is_rounded_up=True) for strides in (STRIDES, P6)}
    return (yolo.anchor_counts(size[1], size[0], (each,)) | rounded_up) - {0}


@dataclass(frozen=True, slots=True)
class LayoutMatch:
    """A recognised layout. why: sentences, the strongest first. class_count: 0 for any number, or without classes.

    outputs: names in the layout's order; empty for the file's order. input_shape: as in Recognition.
    """

    layout: str
    why: tuple[str, ...]
    family: str = ""
    class_count: int = 0
    outputs: tuple[str, ...] = ()
    card: dict[str, str] = field(default_factory=dict)
    labels: tuple[str, ...] = ()
    questions: tuple[Question, ...] = ()
    warnings: tuple[str, ...] = ()
    rows_follow_batch: bool = True
    input_shape: tuple[int, ...] = ()
    needs_size: bool = True


def read_signature(facts: ModelFacts, hints: Hints, metadata: FileMetadata, sidecar: SidecarFiles) -> ModelSignature:
    """Finds the image input and its size. Raises NoImageInput if there is none."""
    image, is_nhwc = _picture_input(facts, hints)
    size_input = None
    for tensor in facts.inputs:
        if tensor is image:
            continue
        if not _takes_size(tensor):
            raise NoImageInput(
                f"input {tensor} is not supported: Penstock feeds one image input, and width and height to an input "
                f"named {' or '.join(_SIZE_NAMES[:2])}; export the model without it"
            )
        size_input = tensor
    names, origin = _names(hints, metadata, sidecar)
    size = _size_checked(_size(image, is_nhwc, hints, metadata))
    return ModelSignature(facts, hints, metadata, image, size_input, is_nhwc, size, names, origin)


def _size_checked(size: tuple[int, int] | None) -> tuple[int, int] | None:
    if size is not None and (size[0] * size[1] > MAX_PIXELS or max(size) > MAX_SIDE):
        raise NoImageInput(
            f"it takes pictures of {size[1]}x{size[0]} pixels (limit {MAX_PIXELS}); export it for smaller ones"
        )
    return size


def _names(hints: Hints, metadata: FileMetadata, sidecar: SidecarFiles) -> tuple[tuple[str, ...], str]:
    if hints.labels:
        return hints.labels, hints.labels_origin or "--labels"
    if metadata.names:
        return metadata.names, f"the metadata ({metadata.exporter})"
    if metadata.characters:
        return metadata.characters, f"the metadata ({metadata.exporter})"
    return sidecar.labels, sidecar.labels_origin


def _picture_input(facts: ModelFacts, hints: Hints) -> tuple[TensorFacts, bool]:
    found = []
    for tensor in facts.inputs:
        if len(tensor.shape) not in (3, 4) or tensor.datatype not in _PIXEL_TYPES:
            continue
        sides = tensor.shape[-3:]
        if sides[0] in (1, 3) and not (sides[2] in (1, 3) and sides[0] == 1):
            found.append((tensor, False))
        elif sides[2] in (1, 3):
            found.append((tensor, True))
        elif sides[0] == -1 and (facts.first_convolution_channels in (1, 3) or hints.input_size):
            found.append((tensor, False))
    if len(found) == 1:
        return found[0]
    listed = ", ".join(str(tensor) for tensor in facts.inputs[:4])
    if found:
        raise NoImageInput(f"{len(found)} inputs could be the image input ({listed}); Penstock feeds one")
    raise NoImageInput(
        "no image input: an input FP32, FP16 or UINT8 of shape [B, 3, H, W] or [B, H, W, 3] is needed "
        f"(inputs: {listed})"
    )


def _takes_size(tensor: TensorFacts) -> bool:
    return (
        tensor.datatype in _SIZE_TYPES
        and tensor.name.lower() in _SIZE_NAMES
        and len(tensor.shape) in (1, 2)
        and tensor.shape[-1] in (2, -1)
    )


def _size(image: TensorFacts, is_nhwc: bool, hints: Hints, metadata: FileMetadata) -> tuple[int, int] | None:
    """(height, width): the graph's where it is fixed, else the flag's, else the metadata's."""
    declared = image.shape[-3:-1] if is_nhwc else image.shape[-2:]
    stated = hints.input_size or metadata.imgsz or metadata.hints.input_size
    if -1 not in declared:
        return (declared[0], declared[1])
    if stated is None:
        return None
    height, width = (fixed if fixed > 0 else given for fixed, given in zip(declared, stated, strict=True))
    return height, width
