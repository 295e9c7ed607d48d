"""LitServe, as its documentation says: python litserve_server.py PORT WORKERS.

* lightning.ai/docs/litserve/api-reference/litserver: workers_per_device is the number of cores on a CPU; fast_queue
  above 100 requests a second; as many API servers as workers; log level "warning" in production.
* lightning.ai/docs/litserve/features/request-response-format: type hints say what comes; here the body as it is.

Without its batching (lightning.ai/docs/litserve/features/batching), because it serves this model faster so: on two
cores 146 pictures a second (104-158, three rounds) against 90 (87-93) with max_batch_size 4 and batch_timeout 5 ms; 8
and 10 ms were slower still. A batch costs the CPU as much as its pictures one by one, and a worker waits to fill it.
"""
# mypy: disable-error-code="import-not-found,misc,no-any-unimported"
# Runs in LitServe's own environment, where `detector` lies on the path.

import sys
from typing import Annotated

import litserve
from detector import Answer, Detector, read_card
from fastapi import Body


class DetectorApi(litserve.LitAPI):
    """A picture to boxes."""

    def setup(self, device: str) -> None:
        """Loads the model, once a worker."""
        self.detector = Detector(read_card())

    def decode_request(self, request: Annotated[bytes, Body(media_type="image/jpeg")]) -> bytes:
        """The body as it came."""
        return request

    def predict(self, x: bytes) -> Answer:
        """The boxes of a picture."""
        answer: Answer = self.detector.detect(x)
        return answer

    def encode_response(self, output: Answer) -> Answer:
        """FastAPI writes the JSON."""
        return output


if __name__ == "__main__":
    litserve.LitServer(
        DetectorApi(api_path="/detect"),
        accelerator="cpu",
        devices=1,
        workers_per_device=int(sys.argv[2]),
        fast_queue=True,
    ).run(host="127.0.0.1", port=int(sys.argv[1]), log_level="warning", generate_client_file=False)
