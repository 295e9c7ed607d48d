"""The locustfile, run headless as a user would, against a stand-in."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from tests.loadtest.stand_in import StandIn, running_stand_in

CHECKOUT = Path(__file__).resolve().parents[2]
KEY = "secret-of-the-load-test"


@pytest.fixture
def stand_in() -> Iterator[StandIn]:
    with running_stand_in() as running:
        yield running


def locust(*arguments: str, seconds: int = 1) -> subprocess.CompletedProcess[str]:
    """A second of two users, if not otherwise said; --json makes the statistics the only thing on standard output."""
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
    load = ["-u", "2", "-r", "2", "-t", f"{seconds}s", "--stop-timeout", "5"]
    return subprocess.run(
        [*command, *load, *arguments], cwd=CHECKOUT, capture_output=True, text=True, timeout=120, check=False
    )


def rows(answer: subprocess.CompletedProcess[str]) -> list[dict[str, object]]:
    """The statistics, a row a kind of request."""
    found: list[dict[str, object]] = json.loads(answer.stdout[answer.stdout.index("[") :])
    return found


def test_image_users_post_the_pictures_of_a_folder_within_their_slo(stand_in: StandIn, tmp_path: Path) -> None:
    """As they are, with their media type, at the model's image endpoint; the SLO that was kept is the last word.

    The key goes with every request, and is not printed."""
    (tmp_path / "a.jpg").write_bytes(b"jpeg bytes")
    (tmp_path / "b.PNG").write_bytes(b"png bytes")
    (tmp_path / "notes.txt").write_text("not a picture")
    options = ("--model", "people", "--images", str(tmp_path), "--slo-p99-ms", "60000", "--api-key", KEY)
    answer = locust("--host", stand_in.http_url, *options, "ImageUser")
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.split()[-1] == "PASS"
    assert set(stand_in.images) == {
        ("/v2/models/people/image", "image/jpeg", b"jpeg bytes"),
        ("/v2/models/people/image", "image/png", b"png bytes"),
    }
    assert [(row["method"], row["name"], row["num_failures"]) for row in rows(answer)] == [("POST", "image people", 0)]
    assert stand_in.keys == {("image", KEY)}
    assert KEY not in answer.stdout + answer.stderr


def test_refusals_fail_the_run_and_have_no_latency(stand_in: StandIn) -> None:
    """A server that refuses at once is not a fast one: the statistics hold the count and no response time."""
    stand_in.image_status, stand_in.image_body = 503, {"error": "full, retry after 0.25 s"}
    answer = locust("--host", stand_in.http_url, "ImageUser")
    assert answer.returncode == 1
    assert "503" in answer.stderr
    (row,) = rows(answer)
    assert row["num_failures"] == row["num_none_requests"] == row["num_requests"]
    assert row["response_times"] == {}


def test_grpc_users_send_a_tensor_of_the_models_shape(stand_in: StandIn) -> None:
    """The tensor has batch 1, the model's fixed dimensions and 256 for a free one; an SLO that was missed fails."""
    options = ("--grpc", stand_in.grpc_address, "--model", "m", "--slo-p99-ms", "0.001")
    answer = locust("--host", "http://127.0.0.1:1", *options, "GrpcUser")
    assert (answer.returncode, answer.stderr.split()[-1]) == (1, "FAIL"), answer.stderr
    request = stand_in.tensors[0]
    assert list(request.inputs[0].shape) == [1, 2, 256]
    assert np.frombuffer(request.raw_input_contents[0], "<f4").shape == (512,)
    assert rows(answer)[0]["num_failures"] == 0
    assert rows(answer)[0]["num_requests"] == len(stand_in.tensors)


SCENARIO = """
name = "slow"
about = "A server that answers late."
slo_p99_ms = 5000
[[request]]
kind = "image"
model = "street"
[[phase]]
name = "steady"
seconds = 2
arrivals = { shape = "constant", rate = 20 }
is_judged = true
"""


def test_scenario_is_sent_on_schedule_however_late_the_answers_are(stand_in: StandIn, tmp_path: Path) -> None:
    """20 requests a second, each answered after one: several wait at once, and the one user waits for none.

    How long the phase lasts is locust's affair: it looks at the plan about once a second, later on a busy machine.
    """
    stand_in.image_delay_s = 1.0
    (tmp_path / "slow.toml").write_text(SCENARIO)
    answer = locust("--host", stand_in.http_url, "--scenario", str(tmp_path / "slow.toml"), seconds=60)
    assert answer.returncode == 0, answer.stderr
    assert answer.stderr.split()[-1] == "PASS"
    (row,) = rows(answer)
    assert row["name"] == "image street · steady"
    lasted_s = max(stand_in.arrived_at) - min(stand_in.arrived_at)
    assert len(stand_in.images) == row["num_requests"] <= 20 * (lasted_s + 0.5)
    assert stand_in.most_waiting > 2
    assert row["num_failures"] == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--scenario", "soak", "--capacity", "9", "ImageUser"], "leave out the users' names"),
        (["--images", ".", "ImageUser"], "no request was made"),
    ],
    ids=["users", "no pictures"],
)
def test_what_cannot_be_run_ends_with_one_sentence(stand_in: StandIn, arguments: list[str], said: str) -> None:
    """Exit code 1, and nothing was sent."""
    answer = locust("--host", stand_in.http_url, *arguments)
    assert answer.returncode == 1
    assert said in answer.stderr
    assert "Traceback" not in answer.stderr
    assert stand_in.images == []
