"""How the control API says no: {"error": "…"} and a status, whatever went wrong and wherever."""

from http import HTTPStatus

from starlette.responses import JSONResponse

from deepstream_pipeline import errors

RETRY_AFTER_S = 1

_STATUS_OF: tuple[tuple[type[errors.PipelineError], int], ...] = (
    (errors.UnknownSource, 404),
    (errors.SourceExists, 409),
    (errors.NotSetUp, 409),
    (errors.SourceNotOpen, 409),
    (errors.SourceNotRecordable, 415),
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
