"""Pictures that the engine decodes: looked at, laid down, not decoded."""

import time
from unittest.mock import Mock

import numpy as np
import pytest

from penstock.gateway.workers.slab import SharedSlab, anonymous_memory
from penstock.protocol.errors import DeadlineExceeded, TooLarge, UndecodableImage, UnsupportedMedia
from penstock.protocol.inference import Datatype
from penstock.vision import image_tasks as room
from penstock.vision.decode import MAX_PIXELS, decode
from penstock.vision.decoder_process import PreparedImage
from penstock.vision.image_tasks import input_tensor, pass_encoded, pass_encoded_now
from penstock.vision.preprocess import prepare
from penstock.vision.spec import ColorFormat, PrepareSpec, ResizeMode
from tests.vision.images import jpeg, picture, png, webp

SPEC = PrepareSpec(64, 48, fit=ResizeMode.PAD_SYMMETRIC)
RGB = picture(200, 100)
JPEG = jpeg(RGB)
SIDEWAYS = JPEG[:2] + b"\xff\xe1\0\x22Exif\0\0MM\0*\0\0\0\x08\0\1\1\x12\0\3\0\0\0\1\0\6" + bytes(6) + JPEG[2:]


def slab_of(size_bytes: int) -> SharedSlab:
    slab = SharedSlab(lambda _, release: release())
    slab.renew(anonymous_memory(size_bytes))
    return slab


def relay_now(data: bytes, slab: SharedSlab | None = None) -> PreparedImage:
    return pass_encoded_now(data, SPEC, MAX_PIXELS, slab)


@pytest.mark.parametrize(
    "data", [JPEG, SIDEWAYS, png(RGB, color_type=2), webp(RGB)], ids=["jpeg", "sideways", "png", "webp"]
)
def test_geometry_of_a_picture_is_that_of_its_pixels(data: bytes) -> None:
    """The header alone says where it will lie in the network's input, EXIF's turn counted in."""
    _, wanted = prepare(decode(data, ColorFormat.RGB), SPEC)
    assert relay_now(data).geometry == wanted
    assert (wanted.source_width, wanted.source_height) == ((100, 200) if data is SIDEWAYS else (200, 100))


def test_picture_lies_in_the_slab_behind_its_length_however_small() -> None:
    """Nothing is copied again to name it to the engine; without room the bytes are sent."""
    slab = slab_of(1 << 20)
    prepared = relay_now(JPEG, slab)
    assert prepared.lease is not None
    tensor = input_tensor("x", prepared.array[np.newaxis], prepared.lease)
    assert (tensor.datatype, tensor.shape, tensor.place) == (Datatype.BYTES, (1, 1), prepared.lease.place)
    assert tensor.to_numpy().tolist() == [[JPEG]]
    assert slab.window(prepared.lease.place, tensor.data.nbytes) == tensor.data
    full = relay_now(JPEG, slab_of(4096))
    sent = input_tensor("x", full.array[np.newaxis], full.lease)
    assert (sent.place, sent.to_numpy().tolist()) == (None, [[JPEG]])


@pytest.mark.parametrize(
    ("data", "kind"), [(b"GIF89a" + bytes(9), UnsupportedMedia), (JPEG[:90], UndecodableImage), (b"", UndecodableImage)]
)
def test_picture_with_a_bad_header_takes_no_room(data: bytes, kind: type[Exception]) -> None:
    """It is refused before it is laid down."""
    slab = slab_of(1 << 20)
    with pytest.raises(kind):
        relay_now(data, slab)
    with pytest.raises(TooLarge, match=r"200 x 100 = 20000 pixels \(limit 19999\)"):
        pass_encoded_now(JPEG, SPEC, 19_999, slab)
    assert slab.statistics().leases == 0


async def test_long_picture_is_looked_at_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its checksums do not block the event loop; the result is the same."""
    slab, threads = slab_of(1 << 20), []
    monkeypatch.setattr(room, "MAX_INLINE_BYTES", 10)
    monkeypatch.setattr(room.asyncio, "to_thread", _noted(room.asyncio.to_thread, threads))
    prepared = await pass_encoded(JPEG, SPEC, MAX_PIXELS, slab, len(JPEG), None)
    assert len(threads) == 1
    assert prepared.lease is not None
    assert prepared.lease.view[4:] == JPEG
    with pytest.raises(TooLarge):
        await pass_encoded(JPEG, SPEC, 5, slab, len(JPEG), None)


async def test_pictures_of_a_request_are_long_together() -> None:
    """A hundred small pictures would block the event loop as long as a large one."""
    assert room.reads_headers_inline(room.MAX_INLINE_BYTES)
    assert not room.reads_headers_inline(100 * (room.MAX_INLINE_BYTES // 50))


async def test_long_picture_whose_deadline_passes_before_its_turn_is_not_looked_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A thread that gets it too late does not read it."""
    monkeypatch.setattr(room, "header_within", Mock(side_effect=AssertionError("its header was read")))
    with pytest.raises(DeadlineExceeded, match="before the image's header was read"):
        await pass_encoded(JPEG, SPEC, MAX_PIXELS, None, room.MAX_INLINE_BYTES + 1, time.monotonic())


def _noted(to_thread: object, threads: list[object]) -> object:
    async def run(work: object, *arguments: object) -> object:
        threads.append(work)
        return await to_thread(work, *arguments)  # type: ignore[operator]

    return run
