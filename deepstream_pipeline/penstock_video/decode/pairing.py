"""Decoders of one process, each for one or two streams: two streams take turns at one decoder, picture by picture.

The driver limits the decoders of a GPU (288 on an H200). A GPU with fast video engines reaches that limit before its
engines are busy. Each stream has its own parser and its own half of the decoder's surfaces. On an H200 (driver 580)
every picture of two streams was right where their surfaces were 16 together at most, of H.264 and HEVC, with B-frames,
several references and slices, too. With 20 and more, pictures were wrong without an error. Therefore `verification`
compares the first pictures of streams that share.
"""

import ctypes
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from penstock_video.decode.cuvid import (
    CHROMA_420,
    CURRENT,
    PICTURE_BYTES,
    REFERENCES,
    Cuvid,
    CuvidFailed,
    HardwareDecoder,
    MappedPicture,
    PictureFormat,
)

STREAMS = 2  # a decoder
MOST_SHARED_SURFACES = 8  # of a stream that shares: its reference pictures, those that wait to be shown, and one
MOST_WRONG = 3  # streams of a codec and size whose pictures were wrong
TURN_S = 5.0  # for the other stream's picture, which takes milliseconds
_LOOK_S = 0.0005
OUTPUTS = 2  # mapped pictures of a stream


def may_share(one: PictureFormat) -> bool:
    """Whether a stream with such pictures may share a decoder: 4:2:0, 8 bit, few reference pictures, and full size, at
    which they are compared with FFmpeg's."""
    return (
        one.scaled is None and one.chroma == CHROMA_420 and one.bit_depth == 8 and one.surfaces <= MOST_SHARED_SURFACES
    )


def may_pair(one: PictureFormat, other: PictureFormat) -> bool:
    """Whether one decoder may decode both streams: a decoder has one codec, size and depth."""
    is_alike = (one.codec, one.chroma, one.bit_depth, one.coded) == (
        other.codec, other.chroma, other.bit_depth, other.coded,
    )  # fmt: skip
    return is_alike and may_share(one) and may_share(other) and one.surfaces <= other.surfaces


class PictureDecoder(Protocol):
    """See HardwareDecoder."""

    def decode(self, picture: int) -> None: ...

    def map(self, index: int, stream: int) -> MappedPicture: ...

    def is_under_way(self, index: int) -> bool: ...

    def unmap(self, address: int) -> None: ...

    def close(self) -> None: ...


NewDecoder = Callable[[Cuvid, PictureFormat, int, int], PictureDecoder]


@dataclass(eq=False)
class SharedDecoder:
    """A decoder and its streams. free: first surface of each unused half. held: PictureIndices.held by first surface.
    joined: streams that ever used it."""

    decoder: PictureDecoder
    like: PictureFormat
    free: list[int]
    held: dict[int, tuple[int, ...]] = field(default_factory=dict)
    streams: int = 0
    joined: int = 0
    is_suspect: bool = False  # a call of it failed: it gets no more streams
    lock: threading.Lock = field(default_factory=threading.Lock)


class ForeignSurface(CuvidFailed):
    """A stream's parser named a surface that is not the stream's own."""


class PictureIndices:
    """Moves a picture's indices by a base, so that two streams use disjoint surfaces of one decoder. held: surfaces to
    which the stream's next pictures may refer, moved."""

    def __init__(self, codec: str, base: int, surfaces: int) -> None:
        """surfaces: of the stream; its pictures must not have larger indices."""
        self._base, self._surfaces, self._is_forgetful = base, surfaces, codec == "hevc"
        self._copy = (ctypes.c_int * (PICTURE_BYTES // 4))()  # faster than numpy for so few numbers
        self._places = range(PICTURE_BYTES // 4)[REFERENCES[codec]]
        self._address = ctypes.addressof(self._copy)
        self.held: tuple[int, ...] = ()

    @property
    def current(self) -> int:
        """Surface of the last picture, moved."""
        return self._copy[CURRENT]

    def moved(self, address: int, others: Sequence[int]) -> int:
        """Address of a copy of this CUVIDPICPARAMS with moved indices, valid until the next call. others: `held` of
        the decoder's other stream. The decoder drops surfaces that an HEVC picture does not list, so the other
        stream's are listed, although they are unused. Raises ForeignSurface if the picture's own index is not of the
        stream's surfaces."""
        copy, base = self._copy, self._base
        ctypes.memmove(self._address, address, PICTURE_BYTES)
        self.check(copy[CURRENT])
        copy[CURRENT] += base
        used, unused = [], []
        for place in self._places:
            index = copy[place]
            if not 0 <= index < self._surfaces:  # another index would be the other stream's picture
                copy[place] = -1
                unused.append(place)
            else:
                copy[place] = index + base
                used.append(index + base)
        if self._is_forgetful:
            for place, other in zip(unused, others, strict=False):
                copy[place] = other
            self.held = (*used, self.current)
        return self._address

    def check(self, index: int) -> None:
        """Raises ForeignSurface for an index that is not of the stream's own surfaces."""
        if not 0 <= index < self._surfaces:
            raise ForeignSurface("the stream's parser", f"surface {index} of {self._surfaces}")


class Lane:
    """A stream's part of a decoder. For one thread. A decoder works on one stream's pictures at a time: with pictures
    of two under way, an H200 was measured to show wrong ones."""

    def __init__(self, pool: "DecoderPool", shared: SharedDecoder, base: int) -> None:
        self.like, self.surfaces = shared.like, shared.like.surfaces
        self._pool, self._shared, self._base = pool, shared, base
        self._indices = PictureIndices(shared.like.codec, base, self.surfaces)
        self._under_way: set[int] = set()  # surfaces of pictures that were not mapped
        self._is_open, self._has_turn = True, False

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
        shared = self._shared
        with self._turn():
            others = [index for base, held in shared.held.items() if base != self._base for index in held]
            shared.decoder.decode(self._indices.moved(picture, others))
            shared.held[self._base] = self._indices.held
            self._under_way.add(self._indices.current)

    def map(self, index: int, stream: int) -> MappedPicture:
        """See HardwareDecoder.map. index: of the stream's parser."""
        self._indices.check(index)
        with self._turn():
            self._under_way.discard(self._base + index)
            return self._shared.decoder.map(self._base + index, stream)

    def unmap(self, address: int) -> None:
        """See HardwareDecoder.unmap."""
        with self._turn():
            self._shared.decoder.unmap(address)

    def end_turn(self) -> None:
        """Lets the other stream use the decoder, once pictures that are shown later are decoded."""
        if self._has_turn:
            if self.is_shared:
                self._await_pictures()
            self._has_turn = False
            self._shared.lock.release()

    def _await_pictures(self) -> None:
        until_s = time.monotonic() + TURN_S
        while any(self._shared.decoder.is_under_way(index) for index in self._under_way):
            if time.monotonic() > until_s:
                self._shared.is_suspect = True
                break
            time.sleep(_LOOK_S)
        self._under_way.clear()

    def close(self) -> None:
        """Frees the decoder with its last stream. A second call does nothing."""
        if self._is_open:
            self._is_open = False
            self._pool.leave(self._shared, self._base)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Holds the decoder until `end_turn`. If a call fails, the decoder gets no other stream."""
        try:
            if not self._has_turn and not self._shared.lock.acquire(timeout=TURN_S):
                raise CuvidFailed("the decoder's other stream", f"not within {TURN_S:g} s")
            self._has_turn = True
            yield
        except ForeignSurface:  # the stream's fault
            raise
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

    def __len__(self) -> int:
        """Decoders now."""
        return len(self._decoders)

    def lane(self, like: PictureFormat, *, is_alone: bool) -> Lane:
        """A part of a decoder that has room, or of a new one. is_alone: of one that is not shared. Raises
        CuvidFailed."""
        with self._lock:
            is_alone = is_alone or not may_share(like) or self._wrong[like.codec, like.coded] >= MOST_WRONG
            shared = None if is_alone else self._with_room(like)
            if shared is None:
                shared = self._new(like, 1 if is_alone else STREAMS)
            shared.streams, shared.joined = shared.streams + 1, shared.joined + 1
            return Lane(self, shared, shared.free.pop(0))

    def has_room(self, codec: str, size: tuple[int, int]) -> bool:
        """Whether a decoder of such pictures, (width, height), probably takes another stream."""
        with self._lock:
            return any(
                one.free and not one.is_suspect and one.like.codec == codec and one.like.size == size
                for one in self._decoders
            )

    def leave(self, shared: SharedDecoder, base: int) -> None:
        """Called only by the lane."""
        with self._lock:
            shared.streams -= 1
            shared.held.pop(base, None)
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
