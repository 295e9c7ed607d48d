"""Hostile pictures leave no memory behind in the stack, nor a status of ours in their answers."""

import random
import struct
import time
import zlib
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import psutil
import pytest

from tests.conftest import RunningStack
from tests.damage import MIB, damaged
from tests.integration.test_bad_input import unharmed
from tests.integration.web import call

pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.timeout(300)]
MAY_GROW_BYTES = 100 * MIB
GIVEN_BACK_WITHIN_S = 200.0  # the gateway looks every 10 s, less often where nothing was given back
FORM = "multipart/form-data; boundary=xx"
PART = b'--xx\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\n'
REFUSED = {200, 400, 413, 503, 504}


def encoded(extension: str, width: int, height: int, *flags: int) -> bytes:
    noise = np.random.default_rng(3).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    return cv2.imencode(extension, cv2.resize(noise, (width, height)), flags)[1].tobytes()


def chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def bomb(number: int) -> bytes:
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1000, 1000 + number, 8, 2, 0, 0, 0))
    pixels = zlib.compress(bytes(64 * MIB))
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def form(parts: list[bytes]) -> bytes:
    return b"".join(PART + part + b"\r\n" for part in parts) + b"--xx--\r\n"


def hostile(count: int) -> Iterator[tuple[str, bytes]]:
    """(content type, body): truncated, damaged, bombs, and a hundred pictures at once of which one is torn."""
    chance = random.Random(11)
    whole = [encoded(extension, 4000, 3000) for extension in (".jpg", ".png", ".webp")]
    whole += [encoded(".jpg", 6000, 5000, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)]
    small = encoded(".jpg", 640, 480)
    for number in range(count):
        one = whole[number % len(whole)]
        match number % 8:
            case 0:
                yield "image/png", bomb(number)
            case 1:
                torn = chance.randrange(8)
                parts = [small[:-50] if index == torn else small for index in range(100)]
                yield FORM, form(parts)
            case 2 | 3 | 4:
                yield "image/jpeg", one[: chance.randrange(10, len(one))]
            case _:
                yield "image/jpeg", damaged(one, chance)


def private_bytes(stack: RunningStack) -> dict[str, int]:
    """Of each process of the stack, without what it shares with others."""
    sizes = {}
    for process in psutil.Process(stack.process.pid).children(recursive=True):
        memory = process.memory_info()
        sizes[f"{process.pid} {' '.join(process.cmdline()[-3:])[:60]}"] = memory.rss - memory.shared
    return sizes


def test_hostile_pictures_leave_no_memory_behind(stack: RunningStack) -> None:
    """After 64 of them, eight at once, all processes together are as large as before, but for a bound."""

    def send(request: tuple[str, bytes]) -> int:
        content_type, body = request
        headers = {"content-type": content_type, "x-request-timeout-ms": "20000"}
        return call("POST", f"{stack.http_url}/v2/models/street/image", body, headers, timeout_s=90).status

    with unharmed(stack, may_grow_bytes=4 * MAY_GROW_BYTES), ThreadPoolExecutor(8) as pool:
        Counter(pool.map(send, [(FORM, form([encoded(".jpg", 640, 480)] * 100))] * 8 + list(hostile(8))))
        before = private_bytes(stack)
        statuses = Counter(pool.map(send, hostile(64)))
        assert set(statuses) <= REFUSED, statuses
        assert statuses[400] > 16, statuses
        deadline = time.monotonic() + GIVEN_BACK_WITHIN_S
        while True:
            after = private_bytes(stack)
            grown = sum(after.values()) - sum(before.values())
            if grown < MAY_GROW_BYTES or time.monotonic() > deadline:
                break
            time.sleep(1.0)
        assert grown < MAY_GROW_BYTES, f"{grown >> 20} MiB more after {statuses}: from {before} to {after}"
