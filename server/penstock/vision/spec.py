"""Preprocessing parameters, also as a message to another process."""

from dataclasses import dataclass
from enum import IntEnum

import msgspec

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


class NetworkType(IntEnum):
    """nvinfer's network-type: which kind of result an output layout makes. OTHER: embeddings, depth, text."""

    DETECTOR = 0
    CLASSIFIER = 1
    SEGMENTATION = 2
    INSTANCE_SEGMENTATION = 3
    OTHER = 100


class InputOrder(IntEnum):
    """nvinfer's network-input-order."""

    NCHW = 0
    NHWC = 1


class ResizeMode(IntEnum):
    """How a source is fitted to the network's size."""

    STRETCH = 0
    PAD_RIGHT_BOTTOM = 1
    PAD_SYMMETRIC = 2
    KEEP = 3  # its own size, within min_side and max_side, rounded to size_multiple
    CROP = 4  # resize the shorter side to shorter_side, then crop the centre
    FIT_HEIGHT = 5  # resize to the height; the width follows, padded at the right to min_width


class ScalingFilter(IntEnum):
    """BILINEAR is cv2.INTER_LINEAR: no antialiasing."""

    NEAREST = 0
    BILINEAR = 1
    AREA = 2
    CUBIC = 3


@dataclass(frozen=True, slots=True)
class PrepareSpec:
    """Preprocessing of an image: value = scale * (pixel - offset) * channel_factor."""

    width: int  # of the network; 0 with KEEP and FIT_HEIGHT
    height: int  # 0 with KEEP
    color: ColorFormat = ColorFormat.RGB
    layout: InputOrder = InputOrder.NCHW
    fit: ResizeMode = ResizeMode.STRETCH
    filter: ScalingFilter = ScalingFilter.BILINEAR
    datatype: Datatype = Datatype.FP32  # FP32, FP16 or UINT8
    scale: float = 1.0
    offsets: Triple = (0.0, 0.0, 0.0)  # in the network's colour order; GRAY uses the first
    channel_factors: Triple = (1.0, 1.0, 1.0)
    max_side: int = 0  # with KEEP and FIT_HEIGHT: longest side in pixels, 0 for no limit
    has_scaled_decode: bool = False  # JPEGs may be decoded at a fraction of their size
    shorter_side: int = 0  # with CROP: in pixels, before the crop
    pad_value: float = 0.0  # of the padding, as a pixel value from 0 to 255
    min_side: int = 0  # with KEEP: smaller pictures are enlarged until their shorter side has it
    size_multiple: int = 1  # with KEEP: both sides are rounded to multiples of it
    min_width: int = 0  # with FIT_HEIGHT: narrower pictures are padded at the right

    def __hash__(self) -> int:
        """Hashes only a few fields, because the hash is computed for each picture."""
        return hash((self.width, self.height, self.shorter_side))

    @property
    def row_bytes(self) -> int:
        """Size of one image as network input; 0 for a variable size."""
        return self.width * self.height * self.color.channels * (self.datatype.size_bytes or 1)

    def pack(self) -> bytes:
        """A message for unpack()."""
        return msgspec.msgpack.encode(self)

    @classmethod
    def unpack(cls, message: bytes) -> "PrepareSpec":
        """The inverse of pack()."""
        return msgspec.msgpack.decode(message, type=cls)
