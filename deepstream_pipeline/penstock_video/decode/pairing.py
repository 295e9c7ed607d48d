"""Decoders of one process, each for one or two streams: two streams take turns at one decoder, picture by picture.

The driver allows a number of decoders a card (288 on an H200), which a card with fast video engines reaches before its
engines are busy. Each stream has its own parser and its own half of the decoder's surfaces. On an H200 (driver 580)
every picture of two, three and four H.264 streams was right where their surfaces were 16 together at most, with
B-frames and several slices, too. With 20 and more, and with any two HEVC streams, pictures were wrong without an error.
Therefore `verification` compares the first pictures of streams that share.
"""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock_video.decode.cuvid import (
    CHROMA_420,
    Cuvid,
    CuvidFailed,
    HardwareDecoder,
    MappedPicture,
    PictureFormat,
    PictureIndices,
)

STREAMS = 2  # a decoder
SHARED_CODEC = "h264"
MOST_SHARED_SURFACES = 8  # of a stream that shares: its reference pictures, those that wait to be shown, and one
MOST_WRONG = 3  # streams of a codec and size whose pictures were wrong
FULL_WAIT_S, WAITS = 0.025, 512  # mean wait for a picture at which NVDEC is full, over about so many pictures
OUTPUTS = 2  # mapped pictures of a stream


def may_share(one: PictureFormat) -> bool:
    """Whether a stream with such pictures may share a decoder: H.264, 4:2:0, 8 bit, few reference pictures."""
    is_plain = (one.codec, one.chroma, one.bit_depth) == (SHARED_CODEC, CHROMA_420, 8)
    return is_plain and one.surfaces <= MOST_SHARED_SURFACES


def may_pair(one: PictureFormat, other: PictureFormat) -> bool:
    """Whether both streams' pictures may come of one decoder, which has one codec, size and depth."""
    is_alike = (one.codec, one.chroma, one.bit_depth, one.coded) == (
        other.codec, other.chroma, other.bit_depth, other.coded,
    )  # fmt: skip
    return is_alike and may_share(one) and may_share(other) and one.surfaces <= other.surfaces


class WaitMeter:
    """Mean time that a stream waits for a picture: once NVDEC has more pictures than it decodes, it approaches the
    cameras' frame interval."""

    def __init__(self) -> None:
        self.mean_s, self._count = 0.0, 0

    def note(self, wait_s: float) -> None:
        """Adds one picture's."""
        self._count += 1
        self.mean_s += (wait_s - self.mean_s) / min(self._count, WAITS)

    @property
    def is_full(self) -> bool:
        """Whether another stream would make all late."""
        return self._count >= WAITS and self.mean_s >= FULL_WAIT_S

    def forget(self) -> None:
        """Begins anew."""
        self.mean_s, self._count = 0.0, 0


class NvdecBusy(Exception):
    """NVDEC has no time for another stream. wait_s: mean wait for a picture."""

    def __init__(self, wait_s: float) -> None:
        super().__init__(f"a picture waits {wait_s * 1000:.0f} ms for its decoder")


class PictureDecoder(Protocol):
    """See HardwareDecoder."""

    def decode(self, picture: int) -> None: ...

    def map(self, index: int, stream: int) -> MappedPicture: ...

    def unmap(self, address: int) -> None: ...

    def close(self) -> None: ...


NewDecoder = Callable[[Cuvid, PictureFormat, int, int], PictureDecoder]


@dataclass(eq=False)
class SharedDecoder:
    """A decoder and its streams. free: first surface of each unused half. joined: streams that ever used it."""

    decoder: PictureDecoder
    like: PictureFormat
    free: list[int]
    streams: int = 0
    joined: int = 0
    is_suspect: bool = False  # a call of it failed: it gets no more streams
    lock: threading.Lock = field(default_factory=threading.Lock)


class Lane:
    """A stream's part of a decoder. For one thread."""

    def __init__(self, pool: "DecoderPool", shared: SharedDecoder, base: int) -> None:
        self.like, self.surfaces = shared.like, shared.like.surfaces
        self._pool, self._shared, self._base = pool, shared, base
        self._indices = PictureIndices(shared.like.codec, base)
        self._is_open = True

    @property
    def is_shared(self) -> bool:
        """Whether another stream uses the decoder now."""
        return self._shared.streams > 1

    @property
    def company(self) -> int:
        """Changes when a stream joins the decoder."""
        return self._shared.joined

    def decode(self, picture: int) -> None:
        """picture: address of a CUVIDPICPARAMS. Raises CuvidFailed."""
        with self._suspected(), self._shared.lock:
            self._shared.decoder.decode(self._indices.moved(picture))

    def map(self, index: int, stream: int) -> MappedPicture:
        """See HardwareDecoder.map. index: of the stream's parser."""
        began_s = time.perf_counter()
        with self._suspected():
            mapped = self._shared.decoder.map(self._base + index, stream)
        self._pool.waits.note(time.perf_counter() - began_s)
        return mapped

    def unmap(self, address: int) -> None:
        """See HardwareDecoder.unmap."""
        self._shared.decoder.unmap(address)

    def close(self) -> None:
        """Frees the decoder with its last stream. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._pool.leave(self._shared, self._base)

    @contextmanager
    def _suspected(self) -> Iterator[None]:
        """After a failure the decoder gets no other stream."""
        try:
            yield
        except CuvidFailed:
            self._shared.is_suspect = True
            raise


class DecoderPool:
    """The process's decoders of one GPU. Thread-safe."""

    def __init__(self, cuvid: Cuvid, new_decoder: NewDecoder = HardwareDecoder) -> None:
        self.cuvid, self._new_decoder = cuvid, new_decoder
        self._lock = threading.Lock()
        self._decoders: list[SharedDecoder] = []
        self._wrong: Counter[tuple[str, tuple[int, int]]] = Counter()
        self.waits = WaitMeter()

    def __len__(self) -> int:
        """Decoders now."""
        return len(self._decoders)

    def lane(self, like: PictureFormat, *, is_alone: bool) -> Lane:
        """A part of a decoder that has room, or of a new one. is_alone: of one that is not shared. Raises
        CuvidFailed, NvdecBusy."""
        with self._lock:
            if not self._decoders:
                self.waits.forget()
            if self.waits.is_full:
                raise NvdecBusy(self.waits.mean_s)
            is_alone = is_alone or not may_share(like) or self._wrong[like.codec, like.coded] >= MOST_WRONG
            shared = None if is_alone else self._with_room(like)
            if shared is None:
                shared = self._new(like, 1 if is_alone else STREAMS)
            shared.streams, shared.joined = shared.streams + 1, shared.joined + 1
            return Lane(self, shared, shared.free.pop(0))

    def leave(self, shared: SharedDecoder, base: int) -> None:
        """By the lane alone."""
        with self._lock:
            shared.streams -= 1
            shared.free.append(base)
            if shared.streams:
                return
            self._decoders.remove(shared)
        shared.decoder.close()

    def refuse(self, like: PictureFormat) -> None:
        """Records wrong pictures of a stream. After a few, such streams do not share decoders any more."""
        with self._lock:
            self._wrong[like.codec, like.coded] += 1

    def _with_room(self, like: PictureFormat) -> SharedDecoder | None:
        found = (one for one in self._decoders if one.free and not one.is_suspect and may_pair(like, one.like))
        return next(found, None)

    def _new(self, like: PictureFormat, streams: int) -> SharedDecoder:
        decoder = self._new_decoder(self.cuvid, like, streams * like.surfaces, streams * OUTPUTS)
        shared = SharedDecoder(decoder, like, [number * like.surfaces for number in range(streams)])
        self._decoders.append(shared)
        return shared
