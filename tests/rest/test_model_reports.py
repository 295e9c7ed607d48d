"""GET /v1/models, its rows, and DELETE of an added model."""

import json
import time
from pathlib import Path
from typing import Any
from urllib.parse import quote

import jsonschema_rs
import pytest

from penstock.engines.model_health import Cause, KnownModel
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.model_command import ModelProcessOptions
from penstock.gateway.model_uploads import ModelUploads
from penstock.gateway.request_counts import RequestCounts
from penstock.gateway.system.model_reports import ModelReports
from penstock.metric_table import SECONDS
from penstock.protocol.engine import ModelConfig, ModelState
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.identity import Role
from penstock.protocol.inference import CloseReason
from tests.auth.listeners import KEYS, door
from tests.rest.harness import Front, described_by
from tests.support.system_sources import plain_model_sources


def front_with(**changes: Any) -> Front:
    return Front(models=ModelReports(plain_model_sources(**changes)))


async def get(front: Front, target: str, key: Role | None = None, method: str = "GET") -> tuple[int, Any]:
    headers = [(b"x-api-key", KEYS[key].encode())] if key is not None else []
    reply = await front.ask(method, target, b"", headers)
    return reply.status, json.loads(reply.body or b"null")


async def test_rows_have_their_described_form(front: Front) -> None:
    """By the schema in the API description; the list and one model."""
    document = described_by(front)
    for path, target in (("/v1/models", "/v1/models"), ("/v1/models/{model}", "/v1/models/street")):
        content = document["paths"][path]["get"]["responses"]["200"]["content"]["application/json"]
        status, body = await get(front, target)
        assert status == 200
        jsonschema_rs.validate(content["schema"] | {"components": document["components"]}, body)


async def test_row_says_what_a_model_takes_and_answers(front: Front) -> None:
    """The card, with the parameters that /image supports for it; the labels are text as in the model."""
    _, row = await get(front, "/v1/models/street")
    assert (row["state"], row["is_removable"]) == ("ready", False)
    assert row["versions"] == [{"version": "1", "state": "READY", "reason": ""}]
    card = row["card"]
    assert (card["network_type"], card["layout"], card["width"], card["height"]) == ("detector", "yolox", 640, 416)
    assert (card["label_count"], card["labels"]) == (2, ["person", "<b>car</b>"])
    assert card["options"] == ["classes", "conf", "iou", "max_detections"]
    assert (card["conf"], card["iou"]) == (0.25, 0.45)
    assert row["inputs"] == [{"name": "images", "datatype": "FP32", "shape": [3, 416, 640]}]


async def test_row_says_where_a_model_runs(front: Front) -> None:
    """Device, precision, CUDA graphs and fallbacks as the engine reports them; null without a report."""
    _, row = await get(front, "/v1/models/street")
    expected = {"device": "cuda:0", "precision": "fp16", "graph_batch_sizes": [1, 8], "fallbacks": ["no FP8 here"]}
    assert row["runs_on"] == expected
    _, row = await get(front, "/v1/models/broken")
    assert row["runs_on"] is None


async def test_row_of_a_model_that_does_not_serve_has_the_reason(front: Front) -> None:
    """Without a config there is no card, and no tensors."""
    _, row = await get(front, "/v1/models/broken")
    assert (row["state"], row["reason"], row["card"], row["inputs"]) == ("unavailable", "its file is empty", None, [])
    assert row["is_removable"] is True


async def test_row_has_batches_queue_and_traffic() -> None:
    """Batches are those that the gateway formed; refusals are by reason; the rate is over the last seconds."""
    queue = QueueStatistics(
        3, 4, 100, 2, 8, None, 0.0125, {1: 2, 4: 1}, {CloseReason.FULL: 3}, {"deadline_unreachable": 7}
    )
    now, counts = 0.0, {"street": RequestCounts()}
    reports = ModelReports(
        plain_model_sources(queues=lambda: {"street": queue}, counts=lambda: counts), clock=lambda: now
    )
    reports._history.add(0.0, {})
    now, counts = 10.0, {"street": RequestCounts({"200": 20, "503": 7}, [27, *[0] * len(SECONDS)])}
    _, row = await get(Front(models=reports), "/v1/models/street?over_s=10")
    batching = row["batching"]
    assert (batching["count"], batching["rows"], batching["mean_rows"]) == (3, 6, 2.0)
    assert batching["closed_by"] == {"full": 3}
    assert row["queue"] == {"waiting": 3, "in_flight": 2, "wait_ms": 12.5}
    assert row["traffic"] == {
        "requests": 27,
        "codes": {"200": 20, "503": 7},
        "refused": {"deadline_unreachable": 7},
        "over_s": 10.0,
        "rate_per_s": 2.7,
        "p50_ms": 0.25,
        "p99_ms": 0.495,
    }


async def test_list_is_answered_while_the_engine_is_down() -> None:
    """The versions are not known then."""

    async def index() -> list[ModelState]:
        raise EngineUnavailable("the engine is down")

    known = {"street": KnownModel("street", False, "it hangs", unavailable=Cause.HANG)}
    status, body = await get(front_with(index=index, models=lambda: known), "/v1/models")
    assert (status, body["models"][0]["state"], body["models"][0]["versions"]) == (200, "unavailable", [])


async def test_card_that_cannot_be_used_is_a_problem_of_its_row() -> None:
    """One malformed card does not hide the other models."""
    bad = ModelConfig("street", "onnxruntime", 8, (), (), {"network-type": "7"})
    front = front_with(models=lambda: {"street": KnownModel("street", True, config=bad)})
    _, row = await get(front, "/v1/models/street")
    assert row["card"] is None
    assert "network-type" in row["card_problem"]


async def test_hundred_models_are_listed_quickly() -> None:
    """Well under 50 ms on any machine that runs the gateway; the test allows for a busy one."""
    sources = plain_model_sources()
    street = sources.models()["street"]
    known = {f"m{number}": KnownModel(f"m{number}", True, config=street.config) for number in range(100)}
    front = front_with(models=lambda: known)
    await get(front, "/v1/models")
    times = []
    for _ in range(5):
        started = time.perf_counter()
        _, body = await get(front, "/v1/models")
        times.append(time.perf_counter() - started)
    assert len(body["models"]) == 100
    assert min(times) < 0.05


async def test_list_is_bounded() -> None:
    """What is left out is counted."""
    known = {f"m{number:04}": KnownModel(f"m{number:04}", True) for number in range(1003)}
    _, body = await get(front_with(models=lambda: known), "/v1/models")
    assert (len(body["models"]), body["omitted"]) == (1000, 3)


@pytest.mark.parametrize("over_s", ["0", "61", "-1", "1.5", "x", "", "٣"])
async def test_duration_that_is_none_is_refused(front: Front, over_s: str) -> None:
    """400 names the parameter."""
    status, body = await get(front, f"/v1/models?over_s={quote(over_s)}")
    assert (status, "over_s is" in body["error"]) == (400, True)


async def test_unknown_model_is_404(front: Front) -> None:
    """The sentence says where to look."""
    status, body = await get(front, "/v1/models/none")
    assert (status, "GET /v1/models lists them" in body["error"]) == (404, True)


async def test_reader_lists_models_and_only_an_admin_removes_one() -> None:
    """GET needs the role read, DELETE the role admin."""
    for role, allowed in ((Role.READ, 200), (Role.INFER, 403), (Role.ADMIN, 403)):
        assert (await get(Front(door=door()), "/v1/models", role))[0] == allowed
    for role, allowed in ((Role.READ, 403), (Role.INFER, 403), (Role.ADMIN, 404)):
        assert (await get(Front(door=door()), "/v1/models/street", role, "DELETE"))[0] == allowed


async def test_added_model_is_removed_with_its_folder(tmp_path: Path) -> None:
    """Others stay, whatever the name in the path."""
    for repository, name in (("models", "ppe"), ("shipped", "people")):
        (tmp_path / repository / name / "1").mkdir(parents=True)
    uploads = ModelUploads(tmp_path, (tmp_path / "shipped", tmp_path / "models"))
    front = Front(uploads=uploads, add_options=ModelProcessOptions())
    assert (await get(front, "/v1/models/ppe", method="DELETE"))[0] == 204
    assert front.plane.removed == ["ppe"]
    assert not (tmp_path / "models" / "ppe").exists()
    assert not list((tmp_path / "staging").iterdir())
    for name in ("ppe", "people", "..", "..%2Fshipped%2Fpeople", "%2E%2E"):
        assert (await get(front, f"/v1/models/{name}", method="DELETE"))[0] == 404
    assert (tmp_path / "shipped" / "people" / "1").is_dir()
