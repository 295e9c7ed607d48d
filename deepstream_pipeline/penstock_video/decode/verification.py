"""Compares a stream's pictures with software decoding: two streams in one decoder could be wrong without an error."""

from collections.abc import Sequence
from enum import Enum, auto
from typing import NamedTuple

import av
import numpy as np
import numpy.typing as npt
from av.codec.context import Flags
from av.error import FFmpegError
from av.video.codeccontext import VideoCodecContext

PICTURES = 30  # to compare: every surface of the stream's half is used several times
_MOST_WAITING = 20  # pictures of one side that wait for the other's

Plane = npt.NDArray[np.uint8]


class Verdict(Enum):
    """OPEN: more pictures are needed. RIGHT: all were equal. WRONG: one differs. UNCLEAR: the stream is damaged."""

    OPEN = auto()
    RIGHT = auto()
    WRONG = auto()
    UNCLEAR = auto()


class HostPicture(NamedTuple):
    """A decoder's picture in host memory. nv12: (H * 3 / 2, W)."""

    stamp: int
    nv12: Plane
    is_damaged: bool


class PictureCheck:
    """Compares the pictures of one stream, from an intra picture on. Costs a software decode of each."""

    def __init__(self, codec: str) -> None:
        """codec: h264 or hevc."""
        context = av.CodecContext.create(codec, "r")
        assert isinstance(context, VideoCodecContext)
        context.thread_count, context.flags = 1, context.flags | Flags.output_corrupt
        self._context = context
        self._sent: set[int] = set()
        self._made: dict[int, Plane] = {}
        self._right: dict[int, Plane] = {}
        self._equal = 0

    def look(self, data: bytes, stamp: int, made: Sequence[HostPicture]) -> Verdict:
        """data: the packet in Annex B, the first one with its parameter sets. made: what the decoder showed since."""
        packet = av.Packet(data)
        packet.pts = stamp
        self._sent.add(stamp)
        try:
            frames = self._context.decode(packet)
        except FFmpegError:
            return Verdict.UNCLEAR
        mine = [one for one in made if one.stamp in self._sent]
        if any(one.is_damaged for one in mine) or any(frame.is_corrupt for frame in frames):
            return Verdict.UNCLEAR
        self._made.update((one.stamp, one.nv12) for one in mine)
        self._right.update((frame.pts or 0, nv12_of(frame)) for frame in frames)
        for number in self._made.keys() & self._right.keys():
            if not np.array_equal(self._made.pop(number), self._right.pop(number)):
                return Verdict.WRONG
            self._equal += 1
            self._sent.discard(number)
        if max(len(self._made), len(self._right)) > _MOST_WAITING:
            return Verdict.UNCLEAR
        return Verdict.RIGHT if self._equal >= PICTURES else Verdict.OPEN


def nv12_of(frame: av.VideoFrame) -> Plane:
    """(H * 3 / 2, W) of a frame of 8 bit, 4:2:0, with even sides."""
    luma, *chroma = (
        np.frombuffer(memoryview(plane), np.uint8).reshape(-1, plane.line_size)[: frame.height >> (place > 0)]
        for place, plane in enumerate(frame.planes)
    )
    half = frame.width // 2
    both = chroma[0] if len(chroma) == 1 else np.stack([one[:, :half] for one in chroma], axis=2).reshape(-1, half * 2)
    return np.concatenate([luma[:, : frame.width], both[:, : frame.width]])
