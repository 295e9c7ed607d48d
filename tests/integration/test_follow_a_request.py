"""The lists of files under "Follow a request" in server/README.md are those that a request enters."""

import os
import re
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
import tritonclient.grpc
import tritonclient.http

from tests.support.http import call
from tests.support.stack import CHECKOUT, RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("follow-a-request")
README = CHECKOUT / "server" / "README.md"
PACKAGE = CHECKOUT / "server" / "penstock"
RECORDINGS = 6  # a file is of a request if each recording has it: what runs beside requests is in some only
BACKGROUND = {"gateway/workers/core_server.py"}  # it looks for silent client processes every 50 ms
SLAB = "gateway/workers/slab_allocator.py"  # Triton reads pictures from there, some seconds after its start
WARM_UP = 3  # the first requests enter files once: caches, connections


class Recorder:
    """Recordings of a stack's gateway process."""

    def __init__(self, stack: RunningStack, folder: Path) -> None:
        family = psutil.Process(stack.process.pid).children(recursive=True)
        (self._pid,) = [one.pid for one in family if "penstock.gateway" in one.cmdline()]
        self._written = folder / str(self._pid)

    def files_of(self, request: Callable[[], object]) -> set[str]:
        """The files, relative to the package, that each of several requests enters."""
        for _ in range(WARM_UP):
            request()
        recordings = [self.record(request) for _ in range(RECORDINGS)]
        return set.intersection(*recordings) - BACKGROUND

    def record(self, request: Callable[[], object]) -> set[str]:
        """The files that this process enters while a request runs."""
        self._written.unlink(missing_ok=True)
        os.kill(self._pid, signal.SIGUSR1)
        request()
        os.kill(self._pid, signal.SIGUSR2)
        wait_for(self._written.exists)
        return {str(Path(line).relative_to(PACKAGE)) for line in self._written.read_text().splitlines()}


Recorded = tuple[RunningStack, Recorder]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory, triton_environment: Path) -> Iterator[Recorded]:
    folder = tmp_path_factory.mktemp("recorded")
    environ = {
        "PYTHONPATH": str(Path(__file__).parent / "module_recorder"),
        "RECORD_FOLDER": str(folder),
        "RECORD_PACKAGES": f"{PACKAGE}/",
    }
    stack = start_stack(folder / "home", "--models", "identity_fp32,street", environ=environ)
    yield stack, Recorder(stack, folder)
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def listed(flow: str) -> set[str]:
    """The files that README names for a flow."""
    (line,) = re.findall(rf"^\* {re.escape(flow)} enters \d+ files: (.*)$", README.read_text(), re.MULTILINE)
    return set(re.findall(r"`([^`]+)`", line))


def tensor_of(module: Any) -> Any:
    """Four numbers for the identity model, as one of Triton's two clients sends them."""
    tensor = module.InferInput("x", [1, 4], "FP32")
    tensor.set_data_from_numpy(np.ones((1, 4), np.float32))
    return tensor


@pytest.mark.parametrize("module", [tritonclient.http, tritonclient.grpc], ids=["HTTP", "gRPC"])
def test_relayed_request_enters_the_files_that_the_readme_names(recorded: Recorded, module: Any) -> None:
    """Triton's own client sends a tensor; the gateway enters the listed files and no other."""
    stack, recorder = recorded
    is_grpc = module is tritonclient.grpc
    address = stack.grpc_address if is_grpc else stack.http_url.removeprefix("http://")
    with module.InferenceServerClient(address) as client:
        entered = recorder.files_of(lambda: client.infer("identity_fp32", [tensor_of(module)]))
    assert entered == listed(f"A tensor over {'gRPC' if is_grpc else 'HTTP'}")


def test_image_request_enters_the_files_that_the_readme_names(recorded: Recorded) -> None:
    """A picture is decoded, batched and answered with boxes; the gateway enters the listed files and no other."""
    stack, recorder = recorded
    picture = (CHECKOUT / "model_repository" / "street" / "golden.jpg").read_bytes()
    url = f"{stack.http_url}/v2/models/street/image"

    def send() -> object:
        return call("POST", url, picture, {"Content-Type": "image/jpeg"})

    wait_for(lambda: SLAB in recorder.record(send), what="Triton reads the slab")
    entered = recorder.files_of(send)
    assert entered == listed("A picture")


@pytest.mark.parametrize("flow", ["A tensor over HTTP", "A tensor over gRPC", "A picture"])
def test_readme_counts_the_files_that_it_names(flow: str) -> None:
    """The number in the sentence is the number of its names."""
    (count,) = re.findall(rf"^\* {re.escape(flow)} enters (\d+) files: ", README.read_text(), re.MULTILINE)
    assert int(count) == len(listed(flow))
