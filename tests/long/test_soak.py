"""A mixed load for minutes: memory, threads and descriptors stay where they were, and nothing is lost."""

import json
import os
import socket
import time
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import psutil
import pytest
import tritonclient.grpc

from tests.integration.pictures import frames, jpeg
from tests.long.crowd import Crowd
from tests.support.http import call, post_json
from tests.support.stack import RunningStack

pytestmark = [pytest.mark.long, pytest.mark.xdist_group("stack"), pytest.mark.timeout(1800)]
DURATION_S = float(os.environ.get("SOAK_S", "300"))
WARM_UP_S = min(60.0, DURATION_S / 4)
MIB = 1 << 20
MAX_SLOPE_MIB_A_MINUTE = 1.0


class Load(Crowd):
    """Good and bad requests, over both protocols."""

    def __init__(self, stack: RunningStack, picture: bytes) -> None:
        self._stack = stack
        self._picture = picture
        super().__init__((self.image, self.tensor, self.grpc, self.bad_image, self.bad_json, self.leave))

    def image(self) -> str:
        url = f"{self._stack.http_url}/v2/models/fastestdet/image"
        return str(call("POST", url, self._picture, {"content-type": "image/jpeg"}).status)

    def tensor(self) -> str:
        body = {"inputs": [{"name": "x", "shape": [1, 2], "datatype": "FP32", "data": [1, 2]}]}
        return str(post_json(f"{self._stack.http_url}/v2/models/identity_fp32/infer", body).status)

    def grpc(self) -> str:
        client = tritonclient.grpc.InferenceServerClient(self._stack.grpc_address)
        tensor = tritonclient.grpc.InferInput("x", [1, 1000], "FP32")
        tensor.set_data_from_numpy(np.ones((1, 1000), np.float32))
        try:
            return str(client.infer("identity_fp32", [tensor]).as_numpy("y").sum())
        finally:
            client.close()

    def bad_image(self) -> str:
        time.sleep(0.05)
        url = f"{self._stack.http_url}/v2/models/fastestdet/image"
        return str(call("POST", url, self._picture[: len(self._picture) // 2], {"content-type": "image/jpeg"}).status)

    def bad_json(self) -> str:
        time.sleep(0.05)
        url = f"{self._stack.http_url}/v2/models/identity_fp32/infer"
        return str(call("POST", url, b"[" * 10_000).status)

    def leave(self) -> str:
        """Sends a request that takes a while and hangs up."""
        time.sleep(0.1)
        body = json.dumps({"inputs": [{"name": "x", "shape": [1], "datatype": "FP32", "data": [100]}]})
        parts = urlsplit(self._stack.http_url)
        with socket.create_connection((parts.hostname, parts.port), timeout=10) as client:
            head = (
                f"POST /v2/models/slow/infer HTTP/1.1\r\nhost: localhost\r\ncontent-length: {len(body)}\r\n\r\n{body}"
            )
            client.sendall(head.encode())
            time.sleep(0.03)
        return "left"


def gateway(stack: RunningStack) -> list[psutil.Process]:
    """The gateway's process and its decoders."""
    children = psutil.Process(stack.process.pid).children(recursive=True)
    return [child for child in children if any(word.startswith("penstock") for word in child.cmdline()[1:4])]


def sizes(stack: RunningStack) -> tuple[float, int, int]:
    """Memory in MiB, threads, descriptors of all of them."""
    processes = gateway(stack)
    return (
        sum(process.memory_info().rss for process in processes) / MIB,
        sum(process.num_threads() for process in processes),
        sum(process.num_fds() for process in processes),
    )


def test_mixed_load_for_minutes_leaves_the_gateway_as_it_was(stack: RunningStack, shared_dir: Path) -> None:
    """RSS grows by less than 1 MiB a minute after warm-up; every outcome is the one it should be."""
    picture = jpeg(frames(shared_dir / "media" / "vtest.avi")[0])
    times: list[float] = []
    samples: list[tuple[float, int, int]] = []
    with Load(stack, picture) as load:
        started = time.monotonic()
        while time.monotonic() - started < DURATION_S:
            time.sleep(2)
            if time.monotonic() - started >= WARM_UP_S:
                times.append((time.monotonic() - started) / 60)
                samples.append(sizes(stack))
    expected = {"image 200", "tensor 200", "grpc 1000.0", "bad_image 400", "bad_json 400", "leave left"}
    assert set(load.outcomes) == expected, load.outcomes
    memory, threads, descriptors = (np.array(column, float) for column in zip(*samples, strict=True))
    slope = float(np.polyfit(times, memory, 1)[0])
    print(f"{dict(load.outcomes)}; RSS {memory[0]:.0f} to {memory[-1]:.0f} MiB, slope {slope:.2f} MiB a minute")  # noqa: T201
    assert slope < MAX_SLOPE_MIB_A_MINUTE
    assert threads[-5:].max() <= threads[:5].max() + 2
    assert descriptors[-5:].max() <= descriptors[:5].max() + 16
    until = time.monotonic() + 10
    while time.monotonic() < until:
        text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
        if "\npenstock_inflight_requests 0.0" in text:
            break
        time.sleep(0.1)
    assert "\npenstock_inflight_requests 0.0" in text
    assert "penstock_engine_restarts_total 0.0" in text
    assert "penstock_gateway_restarts_total 0.0" in text
