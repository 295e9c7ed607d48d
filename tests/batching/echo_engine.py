"""An engine for the batcher's tests: answers every row plus one, and fails or waits as configured."""

import asyncio
from collections.abc import Sequence

import numpy as np

from penstock.protocol.engine import Engine, ModelConfig, ModelMetadata, ModelState
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import InferRequest, InferResponse, tensor_from_numpy

POISON = -1.0


class EchoEngine(Engine):
    """calls: the rows of every call, as they came. cancelled: calls that were given up.

    While `gate` is clear, calls wait. refusals: raised by the next calls, one each. poison_error: raised by every call
    with a row of POISON, behind their numbers where it `names_rows`. missing_rows: that an answer lacks. takes_s: what
    a call takes.
    """

    def __init__(self) -> None:
        self.calls: list[list[float]] = []
        self.requests: list[InferRequest] = []
        self.cancelled = 0
        self.running = 0
        self.most_running = 0
        self.gate = asyncio.Event()
        self.gate.set()
        self.refusals: list[InferenceError] = []
        self.poison_error: InferenceError | None = None
        self.names_rows = False
        self.missing_rows = 0
        self.takes_s = 0.0

    async def infer(self, request: InferRequest) -> InferResponse:
        rows = request.inputs[0].to_numpy().ravel()
        self.calls.append(rows.tolist())
        self.requests.append(request)
        self.running += 1
        self.most_running = max(self.running, self.most_running)
        try:
            await asyncio.sleep(self.takes_s)
            await self.gate.wait()
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.running -= 1
        if self.refusals:
            raise self.refusals.pop(0)
        if self.poison_error is not None and POISON in rows:
            raise self._named(rows.tolist(), self.poison_error) if self.names_rows else self.poison_error
        answer = (rows + 1)[: len(rows) - self.missing_rows].reshape(-1, 1)
        return InferResponse(request.model_name, "1", (tensor_from_numpy("y", answer.astype(np.float32)),), request.id)

    @staticmethod
    def _named(rows: list[float], error: InferenceError) -> InferenceError:
        bad = ", ".join(str(number) for number, row in enumerate(rows) if row == POISON)
        return type(error)(f"model 'm': rows {bad} of {len(rows)}: {error}" if len(rows) > 1 else str(error))

    def forget(self) -> None:
        """Of the calls so far."""
        self.calls.clear()
        self.requests.clear()
        self.most_running = 0

    async def called(self, times: int) -> None:
        """Until so many calls came."""
        async with asyncio.timeout(60):
            while len(self.calls) < times:
                await asyncio.sleep(0)

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
        raise NotImplementedError

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        raise NotImplementedError

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        return True

    async def repository_index(self) -> list[ModelState]:
        return []

    async def load(self, model_name: str) -> None: ...

    async def unload(self, model_name: str) -> None: ...

    async def metrics(self) -> bytes:
        return b""

    async def aclose(self) -> None: ...


def asking(*rows: float, id: str = "", deadline: float | None = None, outputs: Sequence[str] = ()) -> InferRequest:
    """A request of so many rows of one number."""
    array = np.array(rows, np.float32).reshape(-1, 1)
    return InferRequest("m", (tensor_from_numpy("x", array),), "", id, tuple(outputs), deadline=deadline)


def rows_in(response: InferResponse) -> list[float]:
    """The answer's numbers."""
    numbers: list[float] = response.outputs[0].to_numpy().ravel().tolist()
    return numbers
