"""LitServe, as its documentation says: python litserve_server.py PORT WORKERS.

* lightning.ai/docs/litserve/api-reference/litserver: workers_per_device is the number of cores on a CPU; fast_queue
  above 100 requests a second; as many API servers as workers; log level "warning" in production.
* lightning.ai/docs/litserve/features/batching: max_batch_size and batch_timeout of the LitAPI.
* lightning.ai/docs/litserve/features/request-response-format: type hints say what comes; here the body as it is.
"""
# mypy: disable-error-code="import-not-found,misc,no-any-unimported"
# Runs in LitServe's own environment, where `detector` lies on the path.

import sys
from collections.abc import Sequence
from typing import Annotated

import litserve
from detector import Answer, Detector, Prepared, read_card
from fastapi import Body

MAX_BATCH_SIZE, BATCH_TIMEOUT_S = 4, 0.005


class DetectorApi(litserve.LitAPI):
    """A picture to boxes."""

    def setup(self, device: str) -> None:
        """Loads the model, once a worker."""
        self.detector = Detector(read_card())

    def decode_request(self, request: Annotated[bytes, Body(media_type="image/jpeg")]) -> Prepared:
        """The body, ready for the network."""
        return self.detector.prepare(request)

    def batch(self, inputs: Sequence[Prepared]) -> Sequence[Prepared]:
        """The detector stacks them itself."""
        return inputs

    def predict(self, x: Sequence[Prepared]) -> list[Answer]:
        """One run of the network for all."""
        answers: list[Answer] = self.detector.infer(x)
        return answers

    def unbatch(self, output: list[Answer]) -> list[Answer]:
        """An answer a picture, as it is."""
        return output

    def encode_response(self, output: Answer) -> Answer:
        """FastAPI writes the JSON."""
        return output


if __name__ == "__main__":
    litserve.LitServer(
        DetectorApi(max_batch_size=MAX_BATCH_SIZE, batch_timeout=BATCH_TIMEOUT_S, api_path="/detect"),
        accelerator="cpu",
        devices=1,
        workers_per_device=int(sys.argv[2]),
        fast_queue=True,
    ).run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
