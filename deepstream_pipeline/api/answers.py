"""How the control API says no: {"error": "…"} and a status, whatever went wrong and wherever."""

from collections.abc import Sequence
from http import HTTPStatus

from starlette.responses import JSONResponse

from deepstream_pipeline import errors

RETRY_AFTER_S = 1

_STATUS_OF: tuple[tuple[type[errors.PipelineError], int], ...] = (
    (errors.UnknownSource, 404),
    (errors.SourceExists, 409),
    (errors.NotSetUp, 409),
    (errors.SourceNotOpen, 409),
    (errors.RuleRefused, 400),
    (errors.SourceNotAllowed, 400),
    (errors.TooManySources, 429),
    (errors.SinkFailed, 503),
)


class Refusal(Exception):
    """A request is not served. text: what was wrong, with which value, what to do; the client is shown it."""

    def __init__(self, status: int, text: str) -> None:
        super().__init__(text)
        self.status = status
        self.text = text


def status_of(error: errors.PipelineError) -> int:
    """The HTTP status for what the pipeline says; 500 for what it should not have said here."""
    return next((status for kind, status in _STATUS_OF if isinstance(error, kind)), 500)


def error_answer(status: int, text: str, *, is_last: bool = False) -> JSONResponse:
    """The answer. is_last: the connection closes after it."""
    headers = {}
    if status in (429, 503):
        headers["retry-after"] = str(RETRY_AFTER_S)
    if is_last:
        headers["connection"] = "close"
    if status == HTTPStatus.UNAUTHORIZED:
        headers["www-authenticate"] = 'Basic realm="penstock video", charset="UTF-8"'
    return JSONResponse({"error": text}, status_code=status, headers=headers)


def named_faults(faults: Sequence[object]) -> str:
    """What is wrong with a body, field by field: "value.camera_id: Field required". Never with a field's value."""
    return "; ".join(_named(fault) for fault in faults[:5])


def _named(fault: object) -> str:
    if not isinstance(fault, dict):
        return "the body cannot be read"
    where = [str(part) for part in fault.get("loc", ()) if part != "body"]
    if fault.get("type") == "json_invalid":
        context = fault.get("ctx")
        reason = context.get("error", "") if isinstance(context, dict) else ""
        return f"the body is not JSON ({reason}, at character {where[0] if where else 0})"
    name = ".".join(where) or "the body"
    if fault.get("type") == "missing" and not where:
        return "the body is missing; send a JSON object, {} where nothing is to be said"
    if fault.get("type") == "extra_forbidden":
        return f"{name}: there is no such field; leave it out"
    return f"{name}: {fault.get('msg', 'is not right')}"
