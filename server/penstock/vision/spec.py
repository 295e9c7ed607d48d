"""Preprocessing parameters for a decoder process, as a fixed-size struct."""

import struct
from dataclasses import dataclass
from enum import IntEnum

from penstock.protocol.inference import Datatype

Triple = tuple[float, float, float]


class ColorFormat(IntEnum):
    """nvinfer's model-color-format."""

    RGB = 0
    BGR = 1
    GRAY = 2

    @property
    def channels(self) -> int:
        return 1 if self is ColorFormat.GRAY else 3


class InputOrder(IntEnum):
    """nvinfer's network-input-order."""

    NCHW = 0
    NHWC = 1


class ResizeMode(IntEnum):
    """How a source is fitted to the network's size."""

    STRETCH = 0
    PAD_RIGHT_BOTTOM = 1
    PAD_SYMMETRIC = 2
    KEEP = 3  # its own size, reduced to max_side
    CROP = 4  # resize the shorter side to shorter_side, then crop the centre


class ScalingFilter(IntEnum):
    """BILINEAR is cv2.INTER_LINEAR: no antialiasing."""

    NEAREST = 0
    BILINEAR = 1
    AREA = 2
    CUBIC = 3


_WIRE = struct.Struct("<IIIIBBBBB?7d")
_DATATYPES = (Datatype.FP32, Datatype.FP16, Datatype.UINT8)


@dataclass(frozen=True, slots=True)
class PrepareSpec:
    """Preprocessing of an image: value = scale * (pixel - offset) * channel_factor."""

    width: int  # of the network; 0 with KEEP
    height: int
    color: ColorFormat = ColorFormat.RGB
    layout: InputOrder = InputOrder.NCHW
    fit: ResizeMode = ResizeMode.STRETCH
    filter: ScalingFilter = ScalingFilter.BILINEAR
    datatype: Datatype = Datatype.FP32  # FP32, FP16 or UINT8
    scale: float = 1.0
    offsets: Triple = (0.0, 0.0, 0.0)  # in the network's colour order; GRAY uses the first
    channel_factors: Triple = (1.0, 1.0, 1.0)
    max_side: int = 0  # with KEEP: longest side in pixels, 0 for no limit
    has_scaled_decode: bool = False  # JPEGs may be decoded at a fraction of their size
    shorter_side: int = 0  # with CROP: in pixels, before the crop

    WIRE_SIZE = _WIRE.size

    def __hash__(self) -> int:
        """Hashes only a few fields, because the hash is computed for each picture."""
        return hash((self.width, self.height, self.shorter_side))

    @property
    def row_bytes(self) -> int:
        """Size of one image as network input; 0 for a variable size."""
        return self.width * self.height * self.color.channels * (self.datatype.size_bytes or 1)

    def pack(self) -> bytes:
        """WIRE_SIZE bytes for unpack()."""
        return _WIRE.pack(
            self.width,
            self.height,
            self.max_side,
            self.shorter_side,
            self.color,
            self.layout,
            self.fit,
            self.filter,
            _DATATYPES.index(self.datatype),
            self.has_scaled_decode,
            self.scale,
            *self.offsets,
            *self.channel_factors,
        )

    @classmethod
    def unpack(cls, wire: bytes) -> "PrepareSpec":
        """The inverse of pack()."""
        width, height, max_side, shorter_side, *fields = _WIRE.unpack(wire)
        color, layout, fit, filter_, datatype, has_scaled, scale, *floats = fields
        return cls(
            width=width,
            height=height,
            max_side=max_side,
            shorter_side=shorter_side,
            color=ColorFormat(color),
            layout=InputOrder(layout),
            fit=ResizeMode(fit),
            filter=ScalingFilter(filter_),
            datatype=_DATATYPES[datatype],
            scale=scale,
            offsets=(floats[0], floats[1], floats[2]),
            channel_factors=(floats[3], floats[4], floats[5]),
            has_scaled_decode=has_scaled,
        )
