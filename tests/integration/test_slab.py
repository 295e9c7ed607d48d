"""Tensors and pictures that the real Triton reads from the gateway's memory, and what is left of that: nothing."""

import asyncio
import contextlib
import http.client
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import cv2
import numpy as np
import psutil
import pytest

from penstock.engines.triton.client import TritonEngine
from penstock.gateway.batching.merging import merge_requests, split_outputs
from penstock.gateway.workers import slab_registration
from penstock.gateway.workers.slab import SharedSlab
from penstock.gateway.workers.slab_registration import SlabEngine, SlabRegistration
from penstock.protocol.inference import InferRequest, tensor_from_numpy
from tests.integration.living import gateway_of, running, triton_of
from tests.support.http import call
from tests.support.stack import RunningStack
from tests.support.tiny_models import write_model
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("slab")

PAIR = '''"""Answers its two inputs, each as it came."""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        return [
            pb_utils.InferenceResponse(
                [pb_utils.Tensor(y, pb_utils.get_input_tensor_by_name(r, x).as_numpy()) for x, y in ("ac", "bd")]
            )
            for r in requests
        ]
'''
PAIR_CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "a" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "b" data_type: TYPE_FP32 dims: [ -1 ] } ]
output [ { name: "c" data_type: TYPE_FP32 dims: [ -1 ] }, { name: "d" data_type: TYPE_FP32 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""
BRIGHTNESS = '''"""How bright a picture is, as the score of a class."""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            pixels = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            means = pixels.mean(axis=(1, 2, 3), dtype=np.float64).astype(np.float32)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", np.stack([means, 1 - means], axis=1))]))
        return answers
'''
BRIGHTNESS_CONFIG = """backend: "python"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3, 128, 128 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 2 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
parameters { key: "network-type" value { string_value: "1" } }
parameters { key: "net-scale-factor" value { string_value: "0.00392156862745098" } }
parameters { key: "labels" value { string_value: "bright;dark" } }
parameters { key: "batch_owner" value { string_value: "gateway" } }
"""


@pytest.fixture(scope="module")
def slab_stack(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[RunningStack]:
    """A stack of this file's own. In the end all of it is killed, in the middle of a crowd."""
    folder = tmp_path_factory.mktemp("slab")
    write_model(folder / "models", "pair", PAIR, PAIR_CONFIG)
    write_model(folder / "models", "brightness", BRIGHTNESS, BRIGHTNESS_CONFIG)
    with running(folder, folder / "models") as stack:
        yield stack
        kill_in_a_crowd(stack, psutil.Process(stack.process.pid), gateway_of(stack), triton_of(stack))
        stack.process.wait(10)
        wait_for(lambda: not slab_files(), 10, "no file is left")


def slabs_of(process: psutil.Process) -> set[str]:
    """The slabs that it maps; their files have no names."""
    return {
        line.split()[-2].rpartition("/")[2]
        for line in Path(f"/proc/{process.pid}/maps").read_text().splitlines()
        if "_slab (deleted)" in line
    }


def slab_files() -> set[str]:
    return {name for name in os.listdir("/dev/shm") if name.endswith("_slab")}


def leased_bytes(stack: RunningStack) -> float:
    text = call("GET", f"{stack.metrics_url}/penstock").body.decode()
    return float(text.split("\npenstock_slab_leased_bytes ")[1].split("\n")[0])


def brightness_of(stack: RunningStack, level: int) -> float:
    """Of a grey picture, by the gateway; -1 where it does not answer."""
    is_written, encoded = cv2.imencode(".png", np.full((90, 160, 3), level, np.uint8))
    assert is_written
    url = f"{stack.http_url}/v2/models/brightness/image"
    try:
        answer = call("POST", url, encoded.tobytes(), {"content-type": "image/png"})
    except (OSError, http.client.HTTPException):
        return -1.0
    if answer.status != 200:
        return -1.0
    classes = {one["label"]: one["score"] for one in answer.json["results"][0]["classes"]}
    return float(classes["bright"] if "bright" in classes else 1 - classes["dark"])


def test_inputs_by_place_and_inputs_by_bytes_in_one_request(slab_stack: RunningStack) -> None:
    """Triton gives every row of a batch back, whichever way an input came; by a place that it lost, too."""

    async def ask() -> None:
        slab = SharedSlab(asyncio.get_running_loop().call_later)
        async with TritonEngine(
            http_url=slab_stack.engine_http_url, grpc_address=slab_stack.engine_grpc_address, max_connections=2
        ) as backend:
            engine = SlabEngine(backend, backend, lambda: 1)
            registration = SlabRegistration(slab, [engine], size_bytes=8 << 20)
            keeping = asyncio.create_task(registration.run())
            async with asyncio.timeout(60):
                while slab.lease(1) is None:
                    await asyncio.sleep(0.01)
            await assert_pairs(backend, slab)
            await registration.aclose()
            await assert_pairs(backend, slab)
            keeping.cancel()
            await asyncio.gather(keeping, return_exceptions=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(slab_registration, "LOOK_S", 0.01)
        asyncio.run(ask())


async def assert_pairs(backend: TritonEngine, slab: SharedSlab) -> None:
    requests = [
        InferRequest(
            "pair",
            (
                tensor_from_numpy("a", np.random.default_rng(number).random((rows, 20_000), np.float32)),
                tensor_from_numpy("b", np.full((rows, 3), number, np.float32)),
            ),
        )
        for number, rows in enumerate((2, 1, 3))
    ]
    merged = merge_requests(requests, slab)
    assert [tensor.place is not None for tensor in merged.request.inputs] == [True, False]
    response = await backend.infer(merged.request)
    for request, outputs in zip(requests, split_outputs(response, merged), strict=True):
        assert [(bytes(tensor.data), tensor.shape) for tensor in outputs] == [
            (bytes(tensor.data), tensor.shape) for tensor in request.inputs
        ]
    merged.release(is_answered=True)


def test_pictures_of_a_crowd_are_answered_with_their_own_and_all_leases_come_back(slab_stack: RunningStack) -> None:
    """Decoded where Triton reads them, in batches that the gateway formed."""
    wait_for(lambda: slabs_of(triton_of(slab_stack)), 20, "Triton has opened the slab")
    wait_for(lambda: not slab_files(), 10, "no file has a name")
    levels = [number * 5 for number in range(48)]
    with ThreadPoolExecutor(12) as crowd:
        answers = list(crowd.map(lambda level: brightness_of(slab_stack, level), levels))
    assert answers == pytest.approx([level / 255 for level in levels], abs=1e-5)
    wait_for(lambda: leased_bytes(slab_stack) == 0, 5, "no lease is left")


def kill_in_a_crowd(stack: RunningStack, *processes: psutil.Process) -> None:
    """No answer is a wrong one."""
    with ThreadPoolExecutor(6) as crowd:
        asking = [crowd.submit(brightness_of, stack, 200) for _ in range(40)]
        wait_for(lambda: any(answer.done() for answer in asking), 20, "the crowd is served")
        for process in processes:
            with contextlib.suppress(psutil.NoSuchProcess):  # it may have died with its parent
                process.kill()
        assert {round(answer.result(), 4) for answer in asking} <= {-1.0, round(200 / 255, 4)}


@pytest.mark.parametrize("process_of", [triton_of, gateway_of])
def test_nothing_is_left_of_the_slab_of_who_is_killed(
    slab_stack: RunningStack, process_of: Callable[[RunningStack], psutil.Process]
) -> None:
    """In the middle of a crowd: a new engine opens a new slab, a living one lets the dead gateway's go."""
    wait_for(lambda: slabs_of(triton_of(slab_stack)), 20, "Triton has opened the slab")
    former = slabs_of(triton_of(slab_stack))
    kill_in_a_crowd(slab_stack, process_of(slab_stack))
    wait_for(lambda: brightness_of(slab_stack, 100) == pytest.approx(100 / 255, abs=1e-5), 40, "it serves again")
    wait_for(lambda: len(slabs_of(triton_of(slab_stack)) - former) == 1, 20, "another slab is opened")
    wait_for(lambda: not slabs_of(triton_of(slab_stack)) & former, 20, "the former one is let go")
    wait_for(lambda: not slab_files(), 10, "no file is left")
    assert brightness_of(slab_stack, 30) == pytest.approx(30 / 255, abs=1e-5)
    wait_for(lambda: leased_bytes(slab_stack) == 0, 5, "no lease is left")
