"""The page on rolling a model: its commands do what it says, beside clients that go on asking."""

import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.engines import onnx_models
from tests.support.http import Answer, call, post_json
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = pytest.mark.xdist_group("stack")

PAGE = CHECKOUT / "deploy" / "helm" / "penstock" / "examples" / "roll-a-model.md"
NAME = "rolled"
PAUSE_S = 0.01  # between a client's requests: the page's commands want the cores, too
CONFIG = """backend: "onnxruntime"
max_batch_size: 8
input [ { name: "x" data_type: TYPE_FP32 dims: [ 3 ] } ]
output [ { name: "y" data_type: TYPE_FP32 dims: [ 3 ] } ]
parameters { key: "batch_owner" value { string_value: "gateway" } }
"""
BODY = {"inputs": [{"name": "x", "shape": [1, 3], "datatype": "FP32", "data": [1.0, 1.0, 1.0]}]}


class Clients:
    """A few that request the model until they are stopped; their answers, in order."""

    def __init__(self, url: str, count: int = 3) -> None:
        self.answers: list[Answer] = []
        self._url = f"{url}/v2/models/{NAME}/infer"
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self) -> None:
        while not self._ended.wait(PAUSE_S):
            try:
                self.answers.append(post_json(self._url, BODY))
            except OSError as error:
                self.answers.append(Answer(0, {}, repr(error).encode()))

    def end(self) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(30)


@pytest.fixture
def rolled(stack: RunningStack) -> Iterator[RunningStack]:
    """The shared stack with one more model, x + 1, which is gone afterwards."""
    repository = stack.home / "models"
    onnx_models.save(onnx_models.plus(1), repository, NAME, config=CONFIG)
    assert call("POST", f"{stack.http_url}/v2/repository/models/{NAME}/load").status == 200
    yield stack
    call("POST", f"{stack.http_url}/v2/repository/models/{NAME}/unload")
    shutil.rmtree(repository / NAME)


def blocks() -> list[str]:
    """What the page has to be typed."""
    return re.findall(r"```sh\n(.*?)```", PAGE.read_text(), re.DOTALL)


def run(block: str, stack: RunningStack, new: Path) -> None:
    """As typed by a person: each line has to succeed."""
    given = {name: value for name, value in os.environ.items() if not name.startswith("PENSTOCK_")}
    port = urlsplit(stack.http_url).port
    mine = {
        "PATH": f"{Path(sys.executable).parent}:{given['PATH']}",
        "PENSTOCK_HOME": str(stack.home),
        "PENSTOCK_HTTP_PORT": str(port),
        "NAME": NAME,
        "NEW": str(new),
    }
    ended = subprocess.run(["bash", "-euc", block], env=given | mine, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 0, ended.stdout + ended.stderr


def versions(stack: RunningStack) -> list[str]:
    found: list[str] = call("GET", f"{stack.http_url}/v2/models/{NAME}").json["versions"]
    return found


def test_page_on_rolling_a_model_beside_asking_clients_changes_over_and_back_and_fails_none(
    rolled: RunningStack, tmp_path: Path
) -> None:
    """Every command of the page succeeds, the version is the one that it says, and each answer is its version's own."""
    onnx_models.save(onnx_models.plus(2), tmp_path, NAME, version=2)
    forward, back = blocks()
    clients = Clients(rolled.http_url)
    try:
        run(forward, rolled, tmp_path / NAME / "2" / "model.onnx")
        after_roll = versions(rolled)
        run(back, rolled, tmp_path)
        after_back = versions(rolled)
    finally:
        clients.end()
    assert (after_roll, after_back) == (["2"], ["1"])
    assert {answer.status for answer in clients.answers} == {200}, {answer.body for answer in clients.answers}
    answers = {(answer.json["model_version"], answer.json["outputs"][0]["data"][0]) for answer in clients.answers}
    assert answers == {("1", 2.0), ("2", 3.0)}
