"""Converts pixels to a network's input, and boxes back to source pixels."""

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import Array, Datatype, FloatArray
from penstock.vision.decode import DecodedImage, Image
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode, ScalingFilter

Allocate = Callable[[tuple[int, ...], npt.DTypeLike], Array]

NUMPY_OF = {Datatype.FP32: np.float32, Datatype.FP16: np.float16, Datatype.UINT8: np.uint8}
_INTERPOLATION = {
    ScalingFilter.NEAREST: cv2.INTER_NEAREST,
    ScalingFilter.BILINEAR: cv2.INTER_LINEAR,
    ScalingFilter.AREA: cv2.INTER_AREA,
    ScalingFilter.CUBIC: cv2.INTER_CUBIC,
}


@dataclass(frozen=True, slots=True)
class Geometry:
    """Position of the source in the network's image: network = source * scale + pad, in pixels."""

    source_width: int
    source_height: int
    network_width: int
    network_height: int
    scale_x: float
    scale_y: float
    pad_x: int = 0  # negative if the source is cropped, like pad_y
    pad_y: int = 0

    @property
    def is_stretched(self) -> bool:
        """Whether the source fills the network's image, without padding or crop."""
        resized = (round(self.source_width * self.scale_x), round(self.source_height * self.scale_y))
        return resized == (self.network_width, self.network_height) and self.pad_x == self.pad_y == 0

    def to_source(self, xyxy: FloatArray) -> FloatArray:
        """Boxes (n, 4) in network pixels to source pixels, clipped to the source."""
        shift = np.array([self.pad_x, self.pad_y] * 2, np.float64)
        scale = np.array([self.scale_x, self.scale_y] * 2, np.float64)
        limit = np.array([self.source_width, self.source_height] * 2, np.float64)
        return np.clip((xyxy - shift) / scale, 0.0, limit).astype(np.float32)

    def normalised_to_source(self, xyxy: FloatArray) -> FloatArray:
        """Boxes (n, 4) in fractions of the network's image to source pixels, clipped to the source."""
        return self.to_source(xyxy * np.array([self.network_width, self.network_height] * 2, np.float64))

    def points_to_source(self, xy: FloatArray) -> FloatArray:
        """Points (n, k, 2) in network pixels to source pixels, clipped to the source."""
        shift, scale = np.array([self.pad_x, self.pad_y], np.float64), np.array([self.scale_x, self.scale_y])
        limit = np.array([self.source_width, self.source_height], np.float64)
        points: FloatArray = np.clip((xy - shift) / scale, 0.0, limit).astype(np.float32)
        return points


# Before a crop, only the middle of a very long picture is resized: one row of 40,000 pixels would become 256 rows of 10
# million.
_MOST_SIDES = 8


class CropRegion(NamedTuple):
    """The part of a source that is resized, and its position in the network's image. pad is negative if cropped."""

    left: int  # left, top, width, height: in source pixels
    top: int
    width: int
    height: int
    resized_width: int
    resized_height: int
    network_width: int
    network_height: int
    pad_x: int
    pad_y: int


def prepare(decoded: DecodedImage, spec: PrepareSpec, allocate: Allocate = np.empty) -> tuple[Array, Geometry]:
    """The network's input without batch axis, and its geometry. decoded must be in spec's colour order.

    The array is (C, H, W) or (H, W, C) by spec.layout, of spec.datatype: scale * (pixel - offset) * factor, computed in
    float64 and rounded once to float32. Padding has spec.pad_value before that.
    """
    placement = _compute_placement(decoded.source_width, decoded.source_height, spec)
    pixels = _resize(decoded.pixels, placement, spec.filter)
    array = allocate(_shape(placement, spec), NUMPY_OF[spec.datatype])
    top, left = max(placement.pad_y, 0), max(placement.pad_x, 0)
    rows, columns = slice(top, top + pixels.shape[0]), slice(left, left + pixels.shape[1])
    if pixels.shape[:2] == (placement.network_height, placement.network_width):
        _normalise(pixels, spec, array)
    elif spec.layout is InputOrder.NCHW:
        _fill_around(array, rows, columns, _padding_of(spec)[:, np.newaxis, np.newaxis])
        _normalise(pixels, spec, array[:, rows, columns])
    else:
        planes = array.transpose(2, 0, 1)
        _fill_around(planes, rows, columns, _padding_of(spec)[:, np.newaxis, np.newaxis])
        _normalise(pixels, spec, array[rows, columns])
    return array, geometry_of(decoded.source_width, decoded.source_height, spec)


@lru_cache(maxsize=1024)
def geometry_of(source_width: int, source_height: int, spec: PrepareSpec) -> Geometry:
    """Geometry of a source of that size in `prepare`'s output."""
    placement = _compute_placement(source_width, source_height, spec)
    return Geometry(
        source_width=source_width,
        source_height=source_height,
        network_width=placement.network_width,
        network_height=placement.network_height,
        scale_x=placement.resized_width / source_width,
        scale_y=placement.resized_height / source_height,
        pad_x=placement.pad_x,
        pad_y=placement.pad_y,
    )


def least_decoded_size(spec: PrepareSpec) -> tuple[int, int] | None:
    """Minimum (width, height) in pixels for a scaled decode: twice the network's, for accuracy. None: full size."""
    if not spec.has_scaled_decode:
        return None
    if spec.fit is ResizeMode.CROP:
        return 2 * spec.shorter_side, 2 * spec.shorter_side
    if spec.fit is ResizeMode.KEEP:
        return (2 * spec.max_side, 2 * spec.max_side) if spec.max_side else None
    if spec.fit is ResizeMode.FIT_HEIGHT:
        return None
    return 2 * spec.width, 2 * spec.height


def _compute_placement(source_width: int, source_height: int, spec: PrepareSpec) -> CropRegion:
    """Size and position of the whole source in the network's image."""

    def placed(width: int, height: int, network: tuple[int, int], pad_x: int = 0, pad_y: int = 0) -> CropRegion:
        return CropRegion(0, 0, source_width, source_height, width, height, *network, pad_x, pad_y)

    network = (spec.width, spec.height)
    if spec.fit is ResizeMode.STRETCH:
        return placed(*network, network)
    if spec.fit is ResizeMode.KEEP:
        size = _own_size(source_width, source_height, spec)
        return placed(*size, size)
    if spec.fit is ResizeMode.FIT_HEIGHT:
        width = min(math.ceil(source_width * spec.height / source_height), spec.max_side or sys.maxsize)
        return placed(width, spec.height, (max(width, spec.min_width), spec.height))
    if spec.fit is ResizeMode.CROP:
        scale = spec.shorter_side / min(source_width, source_height)
        width, height = _scaled(source_width, scale), _scaled(source_height, scale)
        return placed(width, height, network, -((width - spec.width) // 2), -((height - spec.height) // 2))
    scale = min(spec.height / source_height, spec.width / source_width)
    if spec.fit is ResizeMode.PAD_RIGHT_BOTTOM:  # truncates, as nvinfer and YOLOX do
        width, height = max(int(source_width * scale), 1), max(int(source_height * scale), 1)
        return placed(width, height, network)
    width, height = _scaled(source_width, scale), _scaled(source_height, scale)
    return placed(width, height, network, (spec.width - width) // 2, (spec.height - height) // 2)


def _own_size(source_width: int, source_height: int, spec: PrepareSpec) -> tuple[int, int]:
    """(width, height) with KEEP: enlarged to min_side, reduced to max_side, rounded to size_multiple."""
    scale = max(spec.min_side / min(source_width, source_height), 1.0)
    if 0 < spec.max_side < scale * max(source_width, source_height):
        scale = spec.max_side / max(source_width, source_height)
    width, height = (
        max(round(side * scale / spec.size_multiple), 1) * spec.size_multiple for side in (source_width, source_height)
    )
    return width, height


def _scaled(side: int, scale: float) -> int:
    return max(round(side * scale), 1)


def part_of(
    source_width: int, source_height: int, spec: PrepareSpec, decoded_size: tuple[int, int] | None = None
) -> CropRegion:
    """The part of a source of that size that `prepare` resizes. The rest of the network's image is padding.
    decoded_size: (width, height) after a scaled decode; the part is in its pixels."""
    width, height = decoded_size or (source_width, source_height)
    return _middle_part(width, height, _compute_placement(source_width, source_height, spec))


def values_of(spec: PrepareSpec) -> Array:
    """Lookup table (channels, 256) of spec.datatype: `prepare`'s value for each pixel value."""
    channels = spec.color.channels
    if spec.datatype is Datatype.UINT8:
        return np.tile(np.arange(256, dtype=np.uint8), (channels, 1))
    return _tables(spec.scale, spec.offsets, spec.channel_factors)[:channels].astype(NUMPY_OF[spec.datatype])


def _resize(pixels: Image, placement: CropRegion, scaling_filter: ScalingFilter) -> Image:
    part = _middle_part(pixels.shape[1], pixels.shape[0], placement)
    resized = pixels[part.top : part.top + part.height, part.left : part.left + part.width]
    if resized.shape[:2] != (part.resized_height, part.resized_width):
        size = (part.resized_width, part.resized_height)
        resized = cv2.resize(resized, size, interpolation=_INTERPOLATION[scaling_filter])
    left, top = max(-part.pad_x, 0), max(-part.pad_y, 0)
    return resized[top : top + part.network_height, left : left + part.network_width]


def _fill_around(planes: Array, rows: slice, columns: slice, values: Array) -> None:
    """Writes the padding: all of planes (C, H, W) but the given rows and columns. values: (C, 1, 1)."""
    planes[:, : rows.start] = values
    planes[:, rows.stop :] = values
    planes[:, rows, : columns.start] = values
    planes[:, rows, columns.stop :] = values


def _middle_part(width: int, height: int, placement: CropRegion) -> CropRegion:
    """The middle of a very long picture, more than a crop can show; otherwise the whole picture."""
    whole = placement._replace(width=width, height=height)  # smaller than the source after a scaled decode
    if whole.resized_width > _MOST_SIDES * whole.network_width:
        part = _middle_count(width, whole.resized_width, whole.network_width)
        size = round(part * whole.resized_width / width)
        pad_x = -((size - whole.network_width) // 2)
        return whole._replace(left=(width - part) // 2, width=part, resized_width=size, pad_x=pad_x)
    if whole.resized_height > _MOST_SIDES * whole.network_height:
        part = _middle_count(height, whole.resized_height, whole.network_height)
        size = round(part * whole.resized_height / height)
        pad_y = -((size - whole.network_height) // 2)
        return whole._replace(top=(height - part) // 2, height=part, resized_height=size, pad_y=pad_y)
    return whole


def _middle_count(length: int, resized: int, network: int) -> int:
    """Pixels of `length` that become _MOST_SIDES network sides; has length's parity, so that the centre stays."""
    count = math.ceil(length * _MOST_SIDES * network / resized)
    return count + (length - count) % 2


def _shape(placement: CropRegion, spec: PrepareSpec) -> tuple[int, int, int]:
    channels, height, width = spec.color.channels, placement.network_height, placement.network_width
    return (channels, height, width) if spec.layout is InputOrder.NCHW else (height, width, channels)


def _padding_of(spec: PrepareSpec) -> Array:
    """(C,) of spec.datatype: the network's value of the padding in each channel."""
    channels = spec.color.channels
    if spec.datatype is Datatype.UINT8:
        return np.full(channels, round(spec.pad_value), np.uint8)
    shift, factors = np.array(spec.offsets[:channels]), np.array(spec.channel_factors[:channels])
    padding: Array = (
        (spec.scale * (spec.pad_value - shift) * factors).astype(np.float32).astype(NUMPY_OF[spec.datatype])
    )
    return padding


def _normalise(pixels: Image, spec: PrepareSpec, out: Array) -> None:
    """Writes pixels (H, W, 3) or (H, W) to out. One table lookup per value: faster than arithmetic, and exact."""
    if spec.datatype is Datatype.UINT8:
        planar = pixels if pixels.ndim == 3 else pixels[..., np.newaxis]
        np.copyto(out, planar.transpose(2, 0, 1) if spec.layout is InputOrder.NCHW else planar)
        return
    if spec.datatype is Datatype.FP16:
        wide = np.empty(out.shape, np.float32)
        _look_up(pixels, spec, wide)
        np.copyto(out, wide, casting="same_kind")
        return
    _look_up(pixels, spec, out)


def _look_up(pixels: Image, spec: PrepareSpec, out: Array) -> None:
    tables = _tables(spec.scale, spec.offsets, spec.channel_factors)
    if spec.color is ColorFormat.GRAY:
        plane = out[0] if spec.layout is InputOrder.NCHW else out[..., 0]
        cv2.LUT(pixels, tables[0], dst=plane)
    elif spec.layout is InputOrder.NCHW:
        for channel, plane in enumerate(cv2.split(pixels)):
            cv2.LUT(plane, tables[channel], dst=out[channel])
    else:
        cv2.LUT(pixels, np.ascontiguousarray(tables.T).reshape(1, 256, 3), dst=out)


@lru_cache(maxsize=64)
def _tables(
    scale: float, offsets: tuple[float, float, float], factors: tuple[float, float, float]
) -> npt.NDArray[np.float32]:
    """(3, 256): the value for each channel and pixel value."""
    values = np.arange(256, dtype=np.float64)
    rows = [scale * (values - offset) * factor for offset, factor in zip(offsets, factors, strict=True)]
    return np.stack(rows).astype(np.float32)
