"""The table of errors, and errors that are in no table."""

import json

import cv2
import numpy as np
import pytest
import structlog

from penstock.protocol import errors
from tests.rest.harness import VALID_INFER, Front

TABLE = [
    (errors.InvalidRequest("bad"), 400, None),
    (errors.UndecodableImage("bad"), 400, None),
    (errors.ModelNotFound("bad"), 404, None),
    (errors.ModelRefused("bad"), 404, None),
    (errors.RegionNotFound("bad"), 404, None),
    (errors.RegionTaken("bad"), 400, None),
    (errors.BodyTooSlow("bad"), 408, None),
    (errors.TooLarge("bad"), 413, None),
    (errors.UnsupportedMedia("bad"), 415, None),
    (errors.NotSupported("bad"), 501, None),
    (errors.LoadRunNotFound("bad"), 404, None),
    (errors.Conflict("bad"), 409, None),
    (errors.Unauthenticated("bad"), 401, None),
    (errors.AccessUnavailable("bad", retry_after_s=1.2), 503, "2"),
    (errors.PermissionDenied("bad"), 403, None),
    (errors.OriginNotAllowed("bad"), 403, None),
    (errors.HostNotAllowed("bad"), 421, None),
    (errors.QuotaExceeded("bad", retry_after_s=1.2), 429, "2"),
    (errors.ModelNotReady("bad"), 503, "1"),
    (errors.ModelUnavailable("bad", retry_after_s=2.1), 503, "3"),
    (errors.ModelUnavailable("bad", retry_after_s=None), 503, None),
    (errors.EngineUnavailable("bad", retry_after_s=0.0), 503, "1"),
    (errors.EngineUnavailable("bad", retry_after_s=2.1), 503, "3"),
    (errors.ConnectionFailed("bad"), 502, None),
    (errors.GatewayUnreachable("bad"), 502, None),
    (errors.Overloaded("bad", reason="full", retry_after_s=0.2), 503, "1"),
    (errors.DeadlineExceeded("bad"), 504, None),
    (errors.StorageFull("bad"), 507, None),
    (errors.EngineFailed("bad"), 500, None),
    (errors.OutOfMemory("bad", retry_after_s=1.2), 503, "2"),
    (errors.InferenceError("bad"), 500, None),
]


@pytest.mark.parametrize(("error", "status", "retry_after"), TABLE, ids=lambda value: type(value).__name__)
@pytest.mark.parametrize("suffix", ["infer", "image"])
async def test_error_of_the_tree_becomes_its_status(
    front: Front, error: errors.InferenceError, status: int, retry_after: str | None, suffix: str
) -> None:
    """{"error": text} and nothing else; 503 and 429 say when to come back; the reason is counted and logged (debug).

    A 503 says so or a little later, so that a herd does not come back as one.
    """
    front.plane.error = error
    with structlog.testing.capture_logs() as logged:
        reply = await front.ask("POST", f"/v2/models/ident/{suffix}", VALID_INFER, ((b"content-type", b"image/png"),))
    assert (reply.status, json.loads(reply.body)) == (status, {"error": "bad"})
    assert reply.headers["content-type"] == "application/json"
    delay_s = reply.headers.get("retry-after")
    if status == 503 and retry_after is not None:
        assert delay_s is not None
        assert int(retry_after) <= int(delay_s) <= 2 * int(retry_after)
    else:
        assert delay_s == retry_after
    assert front.recorder.done == [("ident", "http", str(status))]
    assert front.recorder.reasons == [error.reason]
    assert reply.headers["x-penstock-reason"] == error.reason
    assert [(line["event"], line["log_level"], line["reason"]) for line in logged] == [
        ("request refused", "debug", error.reason)
    ]


def test_error_table_covers_the_whole_tree() -> None:
    """A class that is added to the tree must find its row here."""
    tree = {value for value in vars(errors).values() if isinstance(value, type)}
    assert tree == {type(error) for error, _, _ in TABLE}


async def test_unexpected_error_is_logged_once_and_tells_the_client_nothing(front: Front) -> None:
    """One line with the trace for us, `internal error` for the client."""
    front.plane.error = RuntimeError("secret\nstate")
    with structlog.testing.capture_logs() as logged:
        reply = await front.ask("POST", "/v2/models/ident/infer", VALID_INFER)
    assert (reply.status, reply.body) == (500, b'{"error":"internal error"}')
    assert [(line["event"], line["error"]) for line in logged] == [("request failed", "RuntimeError('secret\\nstate')")]
    assert "test_errors" not in reply.body.decode()
    assert front.recorder.done == [("ident", "http", "500")]
    assert front.recorder.reasons == ["internal"]


def _opencv_out_of_memory() -> Exception:
    with pytest.raises(cv2.error) as caught:
        cv2.resize(np.zeros((4, 4), np.float32), (1 << 20, 1 << 22))
    return caught.value


@pytest.mark.parametrize(
    "error",
    [MemoryError(), _opencv_out_of_memory(), RuntimeError("can't start new thread")],
    ids=["python", "opencv", "threads"],
)
async def test_too_little_memory_is_503_with_retry_after(front: Front, error: Exception) -> None:
    """Unlike a bug, it is temporary: the client may retry. The log has the trace."""
    front.plane.error = error
    with structlog.testing.capture_logs() as logged:
        reply = await front.ask("POST", "/v2/models/ident/infer", VALID_INFER)
    assert (reply.status, reply.headers["retry-after"]) in [(503, "1"), (503, "2")]
    assert "too little memory" in json.loads(reply.body)["error"]
    assert front.recorder.reasons == ["memory"]
    assert [line["event"] for line in logged] == ["request failed"]
