"""FAULTS 91: /dev/shm is full. The stack has its own in a mount namespace."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.http import Answer, call, post_json
from tests.support.stack import RunningStack, start_stack, stop_stack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("shared_memory_full")

MOUNTED = "mount -t tmpfs -o size=64m tmpfs /dev/shm && "
LEFT_BYTES = 64 << 10
PROMISED_S = 20.0


@pytest.fixture(scope="module")
def small(triton_environment: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningStack]:
    """A stack with 64 MiB of shared memory and one model."""
    if subprocess.run(["unshare", "-m", "sh", "-c", f"{MOUNTED} true"], capture_output=True, check=False).returncode:
        pytest.skip("no right to mount a file system here")
    wrapper = ("unshare", "-m", "sh", "-c", f'{MOUNTED} exec "$@"', "up")
    stack = start_stack(tmp_path_factory.mktemp("home"), "--models", "identity_fp32", wrapper=wrapper)
    yield stack
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def ask(stack: RunningStack, values: int) -> Answer:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, values], "data": [0.5] * values}
    return post_json(f"{stack.http_url}/v2/models/identity_fp32/infer", {"inputs": [tensor]})


def is_ready(stack: RunningStack) -> bool:
    return call("GET", f"{stack.http_url}/v2/health/ready").status == 200


def test_full_shared_memory_is_503_and_not_ready_until_there_is_room(small: RunningStack) -> None:
    """A request that needs more is refused at once, without a region's key; with room everything serves again."""
    folder = Path(f"/proc/{small.process.pid}/root/dev/shm")
    assert ask(small, 4).status == 200
    room = os.statvfs(folder)
    (folder / "fill").write_bytes(bytes(room.f_bavail * room.f_frsize - LEFT_BYTES))
    refused = [ask(small, 400_000)]
    wait_for(lambda: not is_ready(small), PROMISED_S, "readiness")
    refused.append(ask(small, 4))
    (folder / "fill").unlink()
    wait_for(lambda: is_ready(small), PROMISED_S, "readiness")
    assert [answer.status for answer in refused] == [503, 503]
    for answer in refused:
        assert "shared memory" in answer.json["error"]
        assert "penstock_" not in answer.json["error"]
        assert "region" not in answer.json["error"]
    assert ask(small, 400_000).status == 200
