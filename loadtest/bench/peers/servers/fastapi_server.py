"""FastAPI + ONNX Runtime, as FastAPI's documentation says: python fastapi_server.py PORT WORKERS.

* fastapi.tiangolo.com/deployment/server-workers: several Uvicorn workers, to use several cores.
* fastapi.tiangolo.com/advanced/events: the model is loaded in the lifespan, before the first request.
* fastapi.tiangolo.com/async: what blocks is a plain `def`, which runs in the thread pool.
* fastapi.tiangolo.com/tutorial/response-model: a return type, so that Pydantic writes the JSON.
FastAPI has no batching, and its documentation recommends none.

Measured on two cores, three rounds: 113 pictures a second (101-163); with one worker, whose threads share the lock of
one interpreter, 90 (83-94); with `async def`, which blocks the loop, less still.
"""
# mypy: disable-error-code="import-not-found,no-any-unimported,untyped-decorator"
# Runs where `detector` lies on the path, and where FastAPI need not be ours.

import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Annotated

import uvicorn
from detector import Detector, read_card
from fastapi import Body, FastAPI
from pydantic import BaseModel


class Box(BaseModel):
    """A box in the pixels of the picture."""

    xyxy: list[float]
    class_id: int
    label: str
    score: float


class Answer(BaseModel):
    """What is answered to a picture."""

    detections: list[Box]


@asynccontextmanager
async def lifespan(app: FastAPI) -> AsyncIterator[None]:
    """The model is there as long as the application."""
    app.state.detector = Detector(read_card())
    yield


app = FastAPI(lifespan=lifespan)


@app.post("/detect")
def detect(jpeg: Annotated[bytes, Body(media_type="image/jpeg")]) -> Answer:
    """The boxes of a picture, which is the body."""
    return Answer.model_validate(app.state.detector.detect(jpeg))


if __name__ == "__main__":
    uvicorn.run(
        "fastapi_server:app",
        host="127.0.0.1",
        port=int(sys.argv[1]),
        workers=int(sys.argv[2]),
        log_level="warning",
        access_log=False,
    )
