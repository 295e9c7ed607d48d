"""The load test, headless, against the real stack."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import CHECKOUT, RunningStack
from tests.integration.pictures import frames, jpeg

pytestmark = pytest.mark.xdist_group("stack")


def locust(stack: RunningStack, *arguments: str) -> dict[str, int]:
    """Two seconds of four users; the only row of the statistics."""
    command = [sys.executable, "-m", "locust", "-f", "loadtest/locustfile.py", "--headless", "--json", "--only-summary"]
    where = ["--host", stack.http_url, "--grpc", stack.grpc_address]
    load = ["-u", "4", "-r", "4", "-t", "2s", "--stop-timeout", "10"]
    answer = subprocess.run(
        [*command, *where, *load, *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
    )
    assert answer.returncode == 0, answer.stderr
    (row,) = json.loads(answer.stdout[answer.stdout.index("[") :])
    figures: dict[str, int] = row
    return figures


def test_image_users_with_street_pictures_get_results(stack: RunningStack, shared_dir: Path, tmp_path: Path) -> None:
    """Four users of the image endpoint, without a failure."""
    for index, picture in enumerate(frames(shared_dir / "media" / "vtest.avi")):
        (tmp_path / f"{index}.jpg").write_bytes(jpeg(picture))
    row = locust(stack, "--model", "fastestdet", "--images", str(tmp_path), "ImageUser")
    assert row["num_requests"] >= 4
    assert row["num_failures"] == 0


def test_image_users_with_generated_pictures_get_results(stack: RunningStack) -> None:
    """The shipped model and no picture of one's own are enough for a first load test."""
    row = locust(stack, "--model", "people", "ImageUser")
    assert row["num_requests"] >= 4
    assert row["num_failures"] == 0


@pytest.mark.parametrize("model", ["identity_fp32", "identity_bytes", "people"])
def test_grpc_users_get_answers(stack: RunningStack, model: str) -> None:
    """Four users of the tensor path, without a failure, whatever the model takes."""
    row = locust(stack, "--model", model, "GrpcUser")
    assert row["num_requests"] >= 4
    assert row["num_failures"] == 0
