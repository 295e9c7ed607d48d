"""Pictures that a model's process reads in the gateway's slab, by references."""

import mmap
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from penstock.engines.torch_serving.parameters import TorchRequestError
from penstock.engines.torch_serving.slab_pictures import (
    PublishedSlab,
    SlabReader,
    SlabUnreadable,
    publish_slabs,
    readable_answered,
    slab_reference,
)

SIZE = 1 << 16
PICTURE = b"\xff\xd8\xff" + bytes(range(200))


class Memory:
    """Memory without a file name, as the slab's."""

    def __init__(self, content: bytes = PICTURE, at: int = 100) -> None:
        self.descriptor = os.memfd_create("slab")
        os.ftruncate(self.descriptor, SIZE)
        self.view = mmap.mmap(self.descriptor, SIZE)
        self.view[at : at + len(content)] = content

    def published(self, file: Path) -> Callable[[int, int], bytes]:
        """What makes references to it."""
        slab = PublishedSlab(self.descriptor, SIZE)
        publish_slabs(file, [slab])
        return partial(slab_reference, slab.token)


def test_picture_is_read_where_it_was_written(tmp_path: Path) -> None:
    """The model's process gets the bytes themselves; elements that are no references stay as they are."""
    file = tmp_path / "slab"
    memory = Memory()
    reader, published = SlabReader(str(file)), memory.published(file)
    assert reader.picture(published(100, len(PICTURE))) == PICTURE
    memory.view[100:103] = b"abc"
    assert reader.picture(published(100, 3)) == b"abc"
    assert reader.picture(PICTURE) == PICTURE
    assert file.stat().st_mode & 0o777 == 0o600


def test_client_cannot_forge_a_reference(tmp_path: Path) -> None:
    """Without the token, which only this user can read, it is an element like any other, and no picture."""
    file = tmp_path / "slab"
    reader, published = SlabReader(str(file)), Memory().published(file)
    reference = published(100, len(PICTURE))
    assert reader.picture(reference) == PICTURE
    forged = reference[:14] + bytes(16) + reference[30:]
    assert reader.picture(forged) == forged
    assert SlabReader(None).picture(reference) == reference


def test_memory_that_is_renewed_is_read_and_the_one_before_it_too(tmp_path: Path) -> None:
    """Batches that were on their way when the slab was renewed are still right."""
    file = tmp_path / "slab"
    memories = [Memory(bytes([number]) * 9) for number in range(3)]
    reader, references = SlabReader(str(file)), []
    for memory in memories:
        references.append(memory.published(file)(100, 9))
        assert reader.picture(references[-1]) == memory.view[100:109]
    assert reader.picture(references[1]) == bytes([1]) * 9
    assert reader.picture(references[0]) == references[0]


@pytest.mark.parametrize("why", ["no file", "no process", "another file", "beyond the end"])
def test_memory_that_cannot_be_read_is_said_so(tmp_path: Path, why: str) -> None:
    """The gateway then sends the pictures: they are not taken for broken ones."""
    file = tmp_path / "slab"
    published = Memory().published(file)
    offset = 100
    if why == "no file":
        file.unlink()
    elif why == "no process":
        file.write_text(file.read_text().replace(str(os.getpid()), "999999999", 1))
    elif why == "another file":
        process_id, descriptor, device, _, *rest = file.read_text().split()
        file.write_text(" ".join([process_id, descriptor, device, "1", *rest]))
    else:
        offset = SIZE
    with pytest.raises(SlabUnreadable, match="the gateway's shared memory cannot be read") as raised:
        SlabReader(str(file)).picture(published(offset, 10))
    assert "/" not in str(raised.value)  # a client may get it


def test_request_with_a_forged_reference_fails_alone(tmp_path: Path) -> None:
    """Where nothing is published, bytes that look like a reference do not fail requests of others in the same batch."""
    reader, forged = SlabReader(str(tmp_path / "none")), slab_reference(bytes(16), 0, 10)
    batches: list[list[bytes]] = []

    def answer(asked: list[bytes]) -> list[bytes]:
        batches.append(asked)
        return [picture.upper() for picture in asked]

    requests = [b"one", forged, b"two"]
    assert readable_answered(requests, reader.picture, answer, lambda _: b"refused") == [b"ONE", b"refused", b"TWO"]
    assert readable_answered([forged], reader.picture, answer, lambda _: b"refused") == [b"refused"]
    assert batches == [[b"one", b"two"]]


def test_request_that_the_backend_refuses_fails_alone() -> None:
    """Such as a tensor in CUDA shared memory for a shared program: the others of its batch are answered."""

    def read(request: int) -> int:
        if request < 0:
            raise TorchRequestError("below 0")
        return request

    answers = readable_answered([1, -2, 3], read, lambda asked: [one * 2 for one in asked], str)
    assert answers == [2, "below 0", 6]
