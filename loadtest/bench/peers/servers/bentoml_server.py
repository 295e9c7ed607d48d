"""BentoML, as its documentation says: bentoml serve bentoml_server:DetectorService.

* docs.bentoml.com/en/latest/get-started/adaptive-batching.html: batchable=True, max_batch_size, max_latency_ms; a
  batchable method takes a list, so that a picture comes as a list of one in multipart.
* docs.bentoml.com/en/latest/build-with-bentoml/parallelize-requests.html: workers, a process each, as many as cores.
* docs.bentoml.com/en/latest/build-with-bentoml/iotypes.html: files come as pathlib.Path.

Measured on two cores, three rounds: batches of 4 112 pictures a second (80-127), of 16 with the default latency 94
(92-95), without batching 117 (87-130).
"""
# mypy: disable-error-code="import-not-found,misc,no-any-unimported,untyped-decorator"
# Runs in BentoML's own environment, where `detector` lies on the path.

import os
from pathlib import Path

import bentoml
from detector import Answer, Detector, read_card

MAX_BATCH_SIZE, MAX_LATENCY_MS = 4, 1000


@bentoml.service(workers=int(os.environ["PEER_WORKERS"]))
class DetectorService:
    """Pictures to boxes."""

    def __init__(self) -> None:
        self._detector = Detector(read_card())

    @bentoml.api(route="/detect", batchable=True, max_batch_size=MAX_BATCH_SIZE, max_latency_ms=MAX_LATENCY_MS)
    def detect(self, pictures: list[Path]) -> list[Answer]:
        """One run of the network for all."""
        answers: list[Answer] = self._detector.detect_many([picture.read_bytes() for picture in pictures])
        return answers
