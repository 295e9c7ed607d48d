"""One picture in two memories: as FFmpeg decodes it, for the CPU's way, and as NVDEC leaves it, for a card's."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import av
import cv2
import numpy as np
import numpy.typing as npt

from penstock.protocol.inference import Datatype
from penstock.vision.spec import ColorFormat, InputOrder, PrepareSpec, ResizeMode, ScalingFilter
from penstock_video.decode.codec import Painter, upright
from penstock_video.gpu.device import CudaStream, Device
from penstock_video.preprocess.device_rows import DevicePreparer, Made
from penstock_video.sources.child_link import prepare_row
from penstock_video.types import UPRIGHT, DevicePicture, Orientation

Plane = npt.NDArray[np.uint8]
ORIENTATIONS = tuple(Orientation(*flags) for flags in itertools.product((False, True), repeat=3))
BT_709, UNSPECIFIED, FCC, BT_470, BT_601, SMPTE_240, BT_2020 = 1, 2, 4, 5, 6, 7, 9
MATRICES = (BT_709, UNSPECIFIED, FCC, BT_470, BT_601, SMPTE_240, BT_2020)
NETWORK = PrepareSpec(
    *(160, 128),
    datatype=Datatype.FP32,
    scale=1 / 255,
    offsets=(123.675, 116.28, 103.53),
    channel_factors=(1 / 0.229, 1 / 0.224, 1 / 0.225),
)
LEVELS = replace(NETWORK, datatype=Datatype.UINT8, scale=1.0, offsets=(0.0,) * 3, channel_factors=(1.0,) * 3)


@dataclass(frozen=True)
class Stored:
    """Planes of 4:2:0 and what the stream says of them."""

    luma: Plane
    blue: Plane
    red: Plane
    matrix: int = UNSPECIFIED
    is_full_range: bool = False
    orientation: Orientation = UPRIGHT

    def rgb(self) -> Plane:
        """By the CPU's way, upright."""
        height, width = self.luma.shape
        frame = av.VideoFrame(width, height, "yuv420p")
        for plane, values in zip(frame.planes, (self.luma, self.blue, self.red), strict=True):
            lines = np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)
            lines[: values.shape[0], : values.shape[1]] = values
        frame.colorspace, frame.color_range = self.matrix, 2 if self.is_full_range else 1
        return upright(Painter().rgb(frame), self.orientation)

    def row(self, spec: PrepareSpec) -> npt.NDArray[np.generic]:
        """By the CPU's way."""
        return prepare_row(np.ascontiguousarray(self.rgb()), spec)


def noise(width: int, height: int, seed: int = 1, **said: object) -> Stored:
    """Every sample differs from its neighbours: all values, many that no RGB has."""
    draw = np.random.default_rng(seed)
    chroma = ((height + 1) // 2, (width + 1) // 2)
    luma, blue, red = (draw.integers(0, 256, shape, np.uint8) for shape in ((height, width), chroma, chroma))
    return replace(Stored(luma, blue, red), **said)  # type: ignore[arg-type]


def smooth(width: int, height: int, seed: int = 1, **said: object) -> Stored:
    """As a camera's picture is: no edge sharper than some pixels, no colour that RGB has not."""
    rough = noise(width, height, seed, **said)
    luma, blue, red = (
        cv2.resize(plane[:9, :16].copy(), plane.shape[::-1], interpolation=cv2.INTER_LINEAR)
        for plane in (rough.luma, rough.blue, rough.red)
    )
    return replace(rough, luma=64 + luma // 2, blue=96 + blue // 4, red=96 + red // 4)


@contextmanager
def on_card(device: Device, stored: Stored, stream: CudaStream) -> Iterator[DevicePicture]:
    """As NVDEC leaves it, with lines that lie further apart than the picture is wide."""
    (height, width), chroma_height = stored.luma.shape, stored.blue.shape[0]
    pitch = -(-width // 256) * 256
    nv12 = np.full((height + chroma_height, pitch), 99, np.uint8)
    nv12[:height, :width] = stored.luma
    nv12[height:, 0 : 2 * stored.blue.shape[1] : 2] = stored.blue
    nv12[height:, 1 : 2 * stored.red.shape[1] : 2] = stored.red
    block = device.allocate(nv12.nbytes)
    try:
        device.copy(block.address, nv12.ctypes.data, nv12.nbytes, stream.handle)
        stream.synchronize()
        chroma = block.address + height * pitch
        shape = (pitch, width, height, stream.handle, stored.orientation, stored.matrix, stored.is_full_range)
        yield DevicePicture(block.address, chroma, *shape)
    finally:
        block.close()


def made_row(device: Device, stored: Stored, spec: PrepareSpec) -> npt.NDArray[np.generic]:
    """By the card's way, on the host."""
    expected = stored.row(spec)
    row = np.zeros(expected.nbytes, np.uint8)
    made = made_of(device, stored, spec, row)
    assert made.row_shape == expected.shape
    return row.view(expected.dtype).reshape(expected.shape)


def made_of(
    device: Device,
    stored: Stored,
    spec: PrepareSpec | None,
    row: npt.NDArray[np.uint8] | int | None,
    image: Plane | None = None,
) -> Made:
    """By a preparer of its own, whose thumbnail is copied."""
    stream, preparer = device.new_stream(), DevicePreparer(device, spec)
    try:
        with on_card(device, stored, stream) as picture:
            made = preparer.prepare(picture, row=row, image=image)
            return made._replace(thumbnail=made.thumbnail.copy())
    finally:
        preparer.close()
        stream.close()


def fitted(spec: PrepareSpec, fit: ResizeMode) -> PrepareSpec:
    """The same network with another fit; its padding is grey."""
    if fit is ResizeMode.KEEP:
        return replace(spec, fit=fit, width=0, height=0, max_side=150)
    if fit is ResizeMode.FIT_HEIGHT:
        return replace(spec, fit=fit, width=0, min_width=180, pad_value=114.0)
    return replace(spec, fit=fit, shorter_side=170 if fit is ResizeMode.CROP else 0, pad_value=114.0)


def specs(fit: ResizeMode) -> Iterator[PrepareSpec]:
    """Every colour order, datatype, layout and filter that a card knows."""
    for color in ColorFormat:
        for layout in InputOrder:
            yield fitted(replace(NETWORK, color=color, layout=layout), fit)
            yield fitted(replace(LEVELS, color=color, layout=layout, filter=ScalingFilter.NEAREST), fit)
        yield fitted(replace(NETWORK, color=color, datatype=Datatype.FP16), fit)
    if fit is ResizeMode.KEEP:
        yield replace(fitted(NETWORK, fit), size_multiple=32, min_side=100)


def difference(found: npt.NDArray[np.generic], expected: npt.NDArray[np.generic]) -> tuple[float, float]:
    """(the largest, the mean) of the values' differences."""
    apart = np.abs(found.astype(np.float64) - expected.astype(np.float64))
    return float(apart.max()), float(apart.mean())
