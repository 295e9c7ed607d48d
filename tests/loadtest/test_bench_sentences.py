"""The bench of sentences against a server of a few lines, and its ways to end without a figure."""

import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest

from loadtest.bench.gpu import sentences
from loadtest.bench.gpu.callers import CallerLane, CallerRequest, CallersRun
from loadtest.bench.wire import BadAnswer

PORT = 1


class Server:
    """Answers every word with the next one; `spoilt` answers wrongly while another request is there."""

    def __init__(self, states: dict[str, str]) -> None:
        self.states = states
        self.loaded: list[str] = []
        self.meeting = threading.Barrier(sentences.BATCH)

    def ask(self, port: int, path: str, body: dict[str, list[dict[str, list[int]]]], timeout_s: float = 0) -> bytes:
        """As loadtest.bench.gpu.tritons.ask."""
        if path == "/v2/repository/index":
            return json.dumps([{"name": name, "state": state} for name, state in self.states.items()]).encode()
        if path.endswith("/load"):
            self.loaded.append(path.split("/")[4])
            return b"{}"
        (tensor,) = body["inputs"]
        words = np.array(tensor["data"]).reshape(tensor["shape"]) + 1
        if threading.current_thread() is not threading.main_thread():
            self.meeting.wait(10)
            words *= "spoilt" not in path
        return json.dumps(
            {"outputs": [{"name": "target", "shape": words.shape, "data": words.ravel().tolist()}]}
        ).encode()


class Callers:
    """Generators whose callers are answered ten times each in a tenth of a second."""

    def __init__(self, failure: str = "") -> None:
        self.failure = failure
        self.lanes: list[Sequence[CallerLane]] = []

    def closed(self, lanes: Sequence[CallerLane], *, settle_s: float, seconds: float) -> object:
        """As Generators.closed."""
        self.lanes.append(lanes)
        asks = [CallerRequest(number, 0.0, 100.0, self.failure) for number in range(len(lanes)) for _ in range(10)]
        return lambda: CallersRun(asks, 1.05, 0.5)  # the eleventh answer came after the end


def served(monkeypatch: pytest.MonkeyPatch, **states: str) -> Server:
    """A server with these models, their names with hyphens."""
    server = Server({name.replace("_", "-"): state for name, state in states.items()})
    monkeypatch.setattr(sentences, "ask", server.ask)
    return server


def test_translators_of_the_repository_are_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every translator that is not, and nothing else; without one, what writes one is named."""
    server = served(monkeypatch, opennmt_b="READY", opennmt_a="UNAVAILABLE", street="UNAVAILABLE")
    assert sentences.prepare(PORT, []) == ["opennmt-a", "opennmt-b"]
    assert server.loaded == ["opennmt-a"]
    served(monkeypatch, street="READY")
    with pytest.raises(BadAnswer, match=r"deploy\.models\.opennmt"):
        sentences.prepare(PORT, [])


def test_different_answers_in_a_batch_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """A caller a sentence, all at once: a model that then answers otherwise agrees in no word."""
    served(monkeypatch)
    good, spoilt = sentences.agreements(PORT, ["opennmt-good", "opennmt-spoilt"])
    assert (good["together"], good["with_first"]) == (1.0, 1.0)
    assert (spoilt["together"], spoilt["with_first"]) == (0.0, 1.0)


def test_sentences_measured_count_sentences_not_requests() -> None:
    """Two callers with 64 sentences each in every 0.1 s are 1,280 a second; every caller has words of its own."""
    callers, options = Callers(), sentences.parse_arguments(["--rounds", "2"])
    results = sentences.measure(PORT, ["opennmt-a"], callers, options)  # type: ignore[arg-type]
    rates = {(one["callers"], one["sentences"]): one["sentences_per_s"].median for one in results}
    assert rates == pytest.approx({(1, 1): 10, (1, 4): 40, (64, 1): 640, (2, 64): 1280})
    assert all(one["p50_ms"].median == pytest.approx(100) for one in results)
    widest = max(callers.lanes, key=len)
    assert len({lane.request for lane in widest}) == len(widest) == 64
    with pytest.raises(BadAnswer, match="opennmt-a: 503 full"):
        sentences.measure(PORT, ["opennmt-a"], Callers("503 full"), options)  # type: ignore[arg-type]


def test_sentences_stand_beside_the_figures_of_2017() -> None:
    """Both rows of targets.toml, batch sizes and precision in their words."""
    before, after = sentences.references()
    assert "26.16 sentences/s" in before
    assert "batch 4" in before
    assert "541 sentences/s" in after
    assert "FP32" in after
