"""Pictures with more data than their header states cost bounded work and memory; other clients are served."""

import asyncio
import re
import struct
import zlib
from collections.abc import Callable
from contextlib import suppress
from functools import cache

import pytest

from penstock.engines.torch_serving.picture_header import (
    MAX_SCANNED_PIXELS,
    MIN_JPEG_SCANS,
    PictureRejected,
    read_header,
)
from penstock.protocol.errors import InferenceError, UndecodableImage
from tests.vision import images
from tests.vision.pools import (
    FIRST,
    SECOND,
    SPEC,
    assert_is,
    open_pool,
    peak_memory_kb,
    stop_workers,
    wake_workers,
    workers,
)

MIB = 1 << 20
RGB = images.picture(64, 48)


@cache
def zeros() -> bytes:
    """A zlib stream of 128 MiB."""
    return zlib.compress(bytes(128 * MIB), 1)


def png_with_pixels(data: bytes) -> bytes:
    header = images.png_header(64, 48, depth=8, color_type=2)
    return b"\x89PNG\r\n\x1a\n" + header + images.png_chunk(b"IDAT", data) + images.png_chunk(b"IEND", b"")


def png_with(kind: bytes, payload: bytes) -> bytes:
    return images.png(RGB, color_type=2, before_pixels=images.png_chunk(kind, payload))


def jpeg_with(marker: int, payload: bytes, count: int) -> bytes:
    encoded = images.jpeg(RGB)
    segment = bytes((0xFF, marker)) + struct.pack(">H", len(payload) + 2) + payload
    return encoded[:2] + segment * count + encoded[2:]


def webp_of_frames(count: int) -> bytes:
    place = bytes(6) + (63).to_bytes(3, "little") + (47).to_bytes(3, "little") + bytes(4)
    frame = images.webp_chunk(b"ANMF", place + images.webp(RGB)[12:])
    return images.webp_file(images.webp_canvas(64, 48, flags=2), images.webp_chunk(b"ANIM", bytes(6)), frame * count)


def webp_with_profile() -> bytes:
    profile = images.webp_chunk(b"ICCP", bytes(8 * MIB))
    return images.webp_file(images.webp_canvas(64, 48, flags=0x20), profile, images.webp(RGB)[12:])


def webp_beyond_its_canvas() -> bytes:
    return images.webp_file(images.webp_canvas(8, 8), images.webp(images.picture(700, 700))[12:])


# A picture and the text of its refusal, "" if it is decoded without its additional data.
BOMBS: dict[str, tuple[Callable[[], bytes], str]] = {
    "png pixels": (lambda: png_with_pixels(zeros()), "is longer than the 9264 bytes"),
    "png zTXt": (lambda: png_with(b"zTXt", b"note\0\0" + zeros()), ""),
    "png iTXt": (lambda: png_with(b"iTXt", b"note\0\1\0\0\0" + zeros()), ""),
    "png iCCP": (lambda: png_with(b"iCCP", b"profile\0\0" + zeros()), ""),
    "png eXIf": (lambda: png_with(b"eXIf", images.exif(1) + bytes(MIB)), ""),
    "jpeg profile": (lambda: jpeg_with(0xE2, b"ICC_PROFILE\0\1\xff" + bytes(60_000), 200), "bad ICC marker"),
    "jpeg EXIF": (lambda: jpeg_with(0xE1, b"Exif\0\0" + images.exif(1) + bytes(60_000), 200), ""),
    "webp profile": (webp_with_profile, ""),
    "webp frame beyond its canvas": (webp_beyond_its_canvas, "cannot be decoded"),
    "webp of many frames": (lambda: webp_of_frames(5000), ""),
}


async def test_picture_is_decoded_within_the_bounds_of_its_header() -> None:
    """Data other than pixels is not inflated; pixels beyond the header's size are refused."""
    async with open_pool() as pool:
        await pool.prepare(FIRST, SPEC)
        peak_kb = peak_memory_kb(workers()[0])
        for kind, (make, refusal) in BOMBS.items():
            if refusal:
                with pytest.raises(UndecodableImage, match=re.escape(refusal)):
                    await pool.prepare(make(), SPEC)
            else:
                assert (await pool.prepare(make(), SPEC)).geometry.source_width == 64, kind
            assert peak_memory_kb(workers()[0]) - peak_kb < 64 << 10, kind
        assert pool.statistics().restarts == 0


def test_scans_of_a_jpeg_are_bounded_by_its_size() -> None:
    """Each scan has a cost per pixel, even if it has few bytes."""
    scans = b"\xff\xda\0\3\1" * (MIN_JPEG_SCANS + 1)
    side = int(MAX_SCANNED_PIXELS**0.5 / MIN_JPEG_SCANS**0.5) + 1
    frame = b"\xff\xc2" + struct.pack(">HBHHB", 11, 8, side, side, 1) + b"\1\x11\0"
    with pytest.raises(PictureRejected, match=f"more than {MIN_JPEG_SCANS} scans"):
        read_header(b"\xff\xd8" + frame + scans + b"\xff\xd9")
    small = b"\xff\xc2" + struct.pack(">HBHHB", 11, 8, side // 2, side // 2, 1) + b"\1\x11\0"
    assert read_header(b"\xff\xd8" + small + scans + b"\xff\xd9").width == side // 2


async def test_many_bombs_at_once_do_not_hold_up_another_clients_pictures() -> None:
    """However many wait, the other client's picture is next; no process dies."""
    async with open_pool(max_waiting=99) as pool:
        ended: list[str] = []

        async def ask(client: str, encoded: bytes) -> None:
            with suppress(InferenceError):
                await pool.prepare(encoded, SPEC, client=client)
            ended.append(client)

        stop_workers()
        jobs = [asyncio.create_task(ask("bad", make())) for make, _ in BOMBS.values()]
        while pool.statistics().waiting < len(jobs) - 1:
            await asyncio.sleep(0)
        good = [asyncio.create_task(ask("good", encoded)) for encoded in (FIRST, SECOND)]
        while pool.statistics().waiting < len(jobs) + 1:
            await asyncio.sleep(0)
        wake_workers()
        await asyncio.gather(*jobs, *good)
        assert ended[:4] == ["bad", "good", "bad", "good"]
        assert pool.statistics().restarts == 0
        assert_is(await pool.prepare(FIRST, SPEC), FIRST)
