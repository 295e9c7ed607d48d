"""What came of the rows that were submitted together."""

from dataclasses import dataclass

from deepstream_pipeline.errors import InferFailed
from server.core.infer import InferResponse


@dataclass(frozen=True, slots=True, eq=False)
class AnsweredRow:
    """One row's outputs: its place in the batch of the response, None where the whole response is this row's.

    error: why there is no response.
    """

    response: InferResponse | None
    place: int | None = None
    error: InferFailed | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Answer:
    """error: the first where any row failed; rows that did not are there all the same. rows: in the order submitted.

    infer_s: the engine's longest call for them; queue_s: the longest wait for it. engine_rows: of the largest batch
    that held some of them, other callers' rows among them.
    """

    error: InferFailed | None = None
    rows: tuple[AnsweredRow, ...] = ()
    infer_s: float = 0.0
    queue_s: float = 0.0
    engine_rows: int = 0

    def row(self, index: int) -> tuple[InferResponse, int | None]:
        """The response with that row's outputs, and its place there. Raises the row's InferFailed."""
        if index < len(self.rows):
            row = self.rows[index]
            if row.response is not None:
                return row.response, row.place
            raise row.error or InferFailed("the row was not answered")
        raise self.error or InferFailed(f"row {index} was never submitted")

    def error_of(self, index: int) -> InferFailed | None:
        """Why that row was not answered; None where it was."""
        return self.rows[index].error if index < len(self.rows) else self.error


def failed(error: InferFailed, count: int) -> Answer:
    """The answer to so many rows of which none was answered."""
    return Answer(error, (AnsweredRow(None, None, error),) * count)
