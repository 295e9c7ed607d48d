"""What a decoder process must know to turn encoded bytes into a network's input: one small struct on the wire."""

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
    """How a source becomes the network's size.

    KEEP: its own size, unless a side is over max_side. CROP: its shorter side becomes shorter_side, and the network's
    size is cut from the middle.
    """

    STRETCH = 0
    PAD_RIGHT_BOTTOM = 1
    PAD_SYMMETRIC = 2
    KEEP = 3
    CROP = 4


class ScalingFilter(IntEnum):
    """bilinear is cv2.INTER_LINEAR: no antialiasing."""

    NEAREST = 0
    BILINEAR = 1
    AREA = 2
    CUBIC = 3


_WIRE = struct.Struct("<IIIIBBBBB?7d")
_DATATYPES = (Datatype.FP32, Datatype.FP16, Datatype.UINT8)


@dataclass(frozen=True, slots=True)
class PrepareSpec:
    """How a network wants to see an image: value = scale * (pixel - offset) * channel_factor.

    width, height: of the network, 0 with KEEP. max_side: with KEEP, the longest side allowed, 0 for any.
    shorter_side: with CROP, what the source's shorter side becomes before the cut: the network's size or more.
    offsets, channel_factors: in the network's own colour order; the first alone counts for GRAY.
    datatype: FP32, FP16 or UINT8. has_scaled_decode: JPEGs may be decoded at a fraction of their size.
    """

    width: int
    height: int
    color: ColorFormat = ColorFormat.RGB
    layout: InputOrder = InputOrder.NCHW
    fit: ResizeMode = ResizeMode.STRETCH
    filter: ScalingFilter = ScalingFilter.BILINEAR
    datatype: Datatype = Datatype.FP32
    scale: float = 1.0
    offsets: Triple = (0.0, 0.0, 0.0)
    channel_factors: Triple = (1.0, 1.0, 1.0)
    max_side: int = 0
    has_scaled_decode: bool = False
    shorter_side: int = 0

    WIRE_SIZE = _WIRE.size

    def __hash__(self) -> int:
        """Of what tells networks apart; each picture's geometry is looked up by it."""
        return hash((self.width, self.height, self.shorter_side))

    @property
    def row_bytes(self) -> int:
        """Of one image as this network's input; 0 where images keep their own size."""
        return self.width * self.height * self.color.channels * (self.datatype.size_bytes or 1)

    def pack(self) -> bytes:
        """WIRE_SIZE bytes that unpack() understands."""
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
