"""The locustfile, run headless as a user would, against a stand-in."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock_load.clients.payloads import make_pictures
from tests.loadtest.stand_in import StandIn, running_stand_in

CHECKOUT = Path(__file__).resolve().parents[2]


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with running_stand_in() as running:
        yield running


def locust(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A second of two users; --json makes the statistics the only thing on standard output."""
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        "loadtest/penstock_load/locustfile.py",
        "--headless",
        "--json",
        "--only-summary",
    ]
    load = ["-u", "2", "-r", "2", "-t", "1s", "--stop-timeout", "5"]
    return subprocess.run(
        [*command, *load, *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=60, check=False
    )


def rows(answer: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    """The statistics, a row a kind of request."""
    found: list[dict[str, object]] = json.loads(answer.stdout[answer.stdout.index("[") :])
    return found


def test_image_users_with_a_folder_post_its_pictures(stand_in: StandIn, tmp_path: Path) -> None:
    """The pictures of --images arrive as they are, with their media type, at the model's image endpoint."""
    (tmp_path / "a.jpg").write_bytes(b"jpeg bytes")
    (tmp_path / "b.PNG").write_bytes(b"png bytes")
    (tmp_path / "notes.txt").write_text("not a picture")
    answer = locust("--host", stand_in.http_url, "--model", "people", "--images", str(tmp_path), "ImageUser")
    assert answer.returncode == 0, answer.stderr
    assert set(stand_in.images) == {
        ("/v2/models/people/image", "image/jpeg", b"jpeg bytes"),
        ("/v2/models/people/image", "image/png", b"png bytes"),
    }
    assert [(row["method"], row["name"], row["num_failures"]) for row in rows(answer)] == [("POST", "image people", 0)]


def test_image_users_without_a_folder_post_generated_jpegs(stand_in: StandIn) -> None:
    """Without --images the pictures are made from a seed."""
    answer = locust("--host", stand_in.http_url, "ImageUser")
    assert answer.returncode == 0, answer.stderr
    made = {picture.content for picture in make_pictures(8, seed=1)}
    assert {content for _, _, content in stand_in.images} <= made


@pytest.mark.parametrize(
    ("status", "body", "said"),
    [(503, {"error": "full"}, "503"), (200, {"error": "?"}, "results for")],
    ids=["refused", "no results"],
)
def test_image_users_with_a_bad_answer_count_a_failure(
    stand_in: StandIn, status: int, body: dict[str, object], said: str
) -> None:
    """A refusal and an answer without results both fail the run."""
    stand_in.image_status, stand_in.image_body = status, body
    answer = locust("--host", stand_in.http_url, "ImageUser")
    assert answer.returncode == 1
    assert said in answer.stderr
    assert all(row["num_failures"] == row["num_requests"] for row in rows(answer))


def test_image_users_with_an_empty_folder_fail_the_run(stand_in: StandIn, tmp_path: Path) -> None:
    """A run without a request is a failure that says why."""
    answer = locust("--host", stand_in.http_url, "--images", str(tmp_path), "ImageUser")
    assert answer.returncode == 1
    assert "no picture" in answer.stderr
    assert "Traceback" not in answer.stderr
    assert "no request was made" in answer.stderr


def test_grpc_users_send_a_tensor_of_the_models_shape(stand_in: StandIn) -> None:
    """The tensor has batch 1, the model's fixed dimensions and 256 for a free one."""
    answer = locust("--host", "http://127.0.0.1:1", "--grpc", stand_in.grpc_address, "--model", "m", "GrpcUser")
    assert answer.returncode == 0, answer.stderr
    request = stand_in.tensors[0]
    assert list(request.inputs[0].shape) == [1, 2, 256]
    assert np.frombuffer(request.raw_input_contents[0], "<f4").shape == (512,)
    assert rows(answer)[0]["num_failures"] == 0
    assert rows(answer)[0]["num_requests"] == len(stand_in.tensors)


def test_grpc_users_with_a_status_count_a_failure(stand_in: StandIn) -> None:
    """A status other than OK fails the run and is named."""
    answer = locust("--host", stand_in.http_url, "--grpc", stand_in.grpc_address, "--model", "broken", "GrpcUser")
    assert answer.returncode == 1
    assert "the engine is down" in answer.stderr


def test_refusals_have_no_latency(stand_in: StandIn) -> None:
    """A server that refuses at once is not a fast one: the statistics hold the count and no response time."""
    stand_in.image_status, stand_in.image_body = 503, {"error": "full, retry after 0.25 s"}
    (row,) = rows(locust("--host", stand_in.http_url, "ImageUser"))
    assert row["num_none_requests"] == row["num_requests"]
    assert row["response_times"] == {}


@pytest.mark.parametrize(("slo_ms", "exit_code", "word"), [("60000", 0, "PASS"), ("0.01", 1, "FAIL")])
def test_an_slo_is_judged(stand_in: StandIn, slo_ms: str, exit_code: int, word: str) -> None:
    """The exit code and the last word are the verdict's."""
    answer = locust("--host", stand_in.http_url, "--slo-p99-ms", slo_ms, "ImageUser")
    assert answer.returncode == exit_code, answer.stderr
    assert answer.stderr.split()[-1] == word


def test_failures_within_the_share_pass(stand_in: StandIn) -> None:
    """Every request fails, and every one may."""
    stand_in.image_status = 503
    answer = locust("--host", stand_in.http_url, "--max-error-share", "1", "ImageUser")
    assert answer.returncode == 0, answer.stderr


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "image-stedy"], "did you mean image-steady?"),
        (["--scenario", "image-steady"], "--capacity REQUESTS_PER_S"),
        (["--scenario", "cold-start"], "penstock load run cold-start"),
        (["--scenario", "soak", "--capacity", "much"], "--capacity much"),
        (["--scenario", "soak", "--capacity", "9", "ImageUser"], "leave out the users' names"),
    ],
    ids=["unknown", "no capacity", "no arrivals", "no number", "users"],
)
def test_what_cannot_be_run_ends_before_anything_is_sent(stand_in: StandIn, arguments: list[str], said: str) -> None:
    """One sentence, exit code 1."""
    answer = locust("--host", stand_in.http_url, *arguments)
    assert answer.returncode == 1
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert stand_in.images == []
