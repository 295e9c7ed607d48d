"""Hostile pictures (truncated, damaged, bombs, a hundred at once), and the memory that a stack retains after them."""

import json
import random
import struct
import threading
import zlib
from collections import Counter
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor

import cv2
import numpy as np
import psutil

from tests.support.damage import MIB, damaged
from tests.support.http import call
from tests.support.stack import RunningStack

FORM = "multipart/form-data; boundary=xx"
PART = b'--xx\r\nContent-Disposition: form-data; name="a"; filename="b"\r\n\r\n'
CLIENTS = 8
Request = tuple[str, bytes, dict[str, str]]  # path, body, headers


def encoded(extension: str, width: int, height: int, *flags: int) -> bytes:
    """A picture of blurred noise, which no format compresses well."""
    noise = np.random.default_rng(3).integers(0, 255, (height // 4, width // 4, 3), np.uint8)
    return cv2.imencode(extension, cv2.resize(noise, (width, height)), flags)[1].tobytes()


def chunk(kind: bytes, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload)) + kind + payload + struct.pack(">I", zlib.crc32(kind + payload))


def bomb(number: int) -> bytes:
    """A PNG with 64 MiB of pixel data. Each is different, so none is refused as known."""
    header = chunk(b"IHDR", struct.pack(">IIBBBBB", 1000, 1000 + number, 8, 2, 0, 0, 0))
    pixels = zlib.compress(bytes(64 * MIB), 1)
    return b"\x89PNG\r\n\x1a\n" + header + chunk(b"IDAT", pixels) + chunk(b"IEND", b"")


def hostile(count: int, *, width: int, height: int, model: str = "people") -> Iterator[Request]:
    """Requests to the image endpoint; valid pictures have this size, and one in eight requests has a hundred."""
    chance = random.Random(11)
    whole = [encoded(extension, width, height) for extension in (".jpg", ".png", ".webp")]
    whole += [encoded(".jpg", width, height, cv2.IMWRITE_JPEG_PROGRESSIVE, 1)]
    small = encoded(".jpg", 640, 480)
    for number in range(count):
        one, kind = whole[number % len(whole)], "image/jpeg"
        match number % 8:
            case 0:
                body, kind = bomb(number), "image/png"
            case 1:
                torn = chance.randrange(8)
                parts = [small[:-50] if index == torn else small for index in range(100)]
                body, kind = b"".join(PART + part + b"\r\n" for part in parts) + b"--xx--\r\n", FORM
            case 2 | 3 | 4:
                body = one[: chance.randrange(10, len(one))]
            case _:
                body = damaged(one, chance)
        yield f"/v2/models/{model}/image", body, {"content-type": kind}


def large_tensors(count: int, sizes_bytes: tuple[int, ...]) -> Iterator[Request]:
    """Requests to identity_fp32 with these sizes in turn, like the tensors of pictures."""
    for number in range(count):
        floats = sizes_bytes[number % len(sizes_bytes)] // 4
        tensor = {"name": "x", "shape": [1, floats], "datatype": "FP32", "parameters": {"binary_data_size": floats * 4}}
        head = json.dumps({"inputs": [tensor], "parameters": {"binary_data_output": True}}).encode()
        headers = {"inference-header-content-length": str(len(head))}
        yield "/v2/models/identity_fp32/infer", head + bytes(floats * 4), headers


def answered(stack: RunningStack, requests: Iterable[Request]) -> Counter[int]:
    """Sends the requests, some at a time. Returns the number of responses by status."""
    turn = threading.Lock()
    left = iter(requests)

    def send_in_turn(_: int) -> Counter[int]:
        statuses: Counter[int] = Counter()
        while True:
            with turn:
                request = next(left, None)
            if request is None:
                return statuses
            path, body, headers = request
            statuses[call("POST", stack.http_url + path, body, headers, timeout_s=120).status] += 1

    with ThreadPoolExecutor(CLIENTS) as pool:
        return sum(pool.map(send_in_turn, range(CLIENTS)), Counter[int]())


def private_bytes(stack: RunningStack) -> dict[str, int]:
    """Memory of each process of the stack by name and PID, without shared memory."""
    sizes = {}
    for process in psutil.Process(stack.process.pid).children(recursive=True):
        try:
            memory, words = process.memory_info(), process.cmdline()[:4]
        except psutil.NoSuchProcess:
            continue
        sizes[f"{process.pid} {' '.join(words)[-80:]}"] = memory.rss - memory.shared
    return sizes
