"""A stack with a low limit of open files, and more idle connections to one of its ports than that limit."""

import resource
import shutil
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest
import tritonclient.grpc

from tests.integration.embedded_stack import NO_TRITON, look_up, write_models
from tests.integration.living import gateway_of
from tests.support.http import call
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

pytestmark = [
    pytest.mark.xdist_group("embedded"),
    pytest.mark.skipif(not shutil.which("prlimit"), reason="needs prlimit, of util-linux"),
]
PRLIMIT = shutil.which("prlimit") or ""
OPEN_FILES = 1024
HELLO = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack with a hard limit of 1,024 open files."""
    folder = tmp_path_factory.mktemp("few-files")
    write_models(folder / "models")
    arguments = ("--engine", "embedded", "--model-repository", str(folder / "models"))
    few_files = (PRLIMIT, f"--nofile={OPEN_FILES}:{OPEN_FILES}")
    running = start_stack(folder / "home", *arguments, environ=NO_TRITON, wrapper=few_files)
    yield running
    assert stop_stack(running) == 0, "".join(running.log[-30:])


@contextmanager
def idle_connections(address: str, hello: bytes) -> Iterator[None]:
    """More idle connections than the stack may have open files."""
    host, _, port = address.rpartition(":")
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(8192, hard), hard))
    with ExitStack() as opened:
        opened.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(OPEN_FILES + 200):
            connection = opened.enter_context(socket.create_connection((host, int(port)), 10))
            with suppress(OSError):  # closed by the server already
                connection.sendall(hello)
        yield


def is_served_by_grpc(stack: RunningStack) -> bool:
    """Whether an inference on a new connection is answered."""
    index = tritonclient.grpc.InferInput("index", [1, 1], "INT64")
    index.set_data_from_numpy(np.array([[3]], np.int64))
    own = [("grpc.use_local_subchannel_pool", 1)]
    with tritonclient.grpc.InferenceServerClient(stack.grpc_address, channel_args=own) as client:
        try:
            client.infer("lookup", [index], client_timeout=10)
        except tritonclient.grpc.InferenceServerException:
            return False
        return True


@pytest.mark.parametrize("port", ["rest", "grpc", "metrics"])
def test_idle_connections_to_one_port_leave_descriptors_to_the_others(stack: RunningStack, port: str) -> None:
    """The other ports serve new clients meanwhile, the gateway stays ready, and afterwards all is as before."""
    gateway, rest_address = gateway_of(stack), urlsplit(stack.http_url).netloc
    before = gateway.num_fds()
    addresses = {"rest": rest_address, "grpc": stack.grpc_address, "metrics": urlsplit(stack.metrics_url).netloc}
    with idle_connections(addresses[port], HELLO if port == "grpc" else b""):
        if port != "rest":
            assert look_up(stack).status == 200
            assert call("GET", f"{stack.http_url}/v2/health/ready").status == 200
        if port != "metrics":
            assert b"penstock_ready 1" in call("GET", f"{stack.metrics_url}/penstock").body
        wait_for(lambda: is_served_by_grpc(stack), 20, "gRPC serves a new client")
        assert gateway.num_fds() < OPEN_FILES * 2 // 3
    wait_for(lambda: gateway.num_fds() <= before + 8, 20, "the descriptors are given back")
    assert look_up(stack).status == 200


def test_limit_of_open_files_that_is_too_low_is_refused_at_start(tmp_path: Path) -> None:
    """The message names the limit, what is needed, and how to raise it."""
    few_files = (PRLIMIT, "--nofile=256:256")
    running = start_stack(tmp_path, "--engine", "embedded", environ=NO_TRITON, wrapper=few_files, wait=False)
    assert running.process.wait(60) != 0
    wait_for(lambda: "limit of open files is 256" in "".join(running.log), 10, "the message")
    assert "ulimit -n" in "".join(running.log)
