"""MLServer, as its documentation says: mlserver start mlserver_settings.

* docs.seldon.ai/mlserver/user-guide/custom: a runtime is an MLModel with load(), its folder's model-settings.json
  names it.
* docs.seldon.ai/mlserver/user-guide/parallel-inference: parallel_workers, as many as cores.
* mlserver.handlers.custom_handler: an endpoint of its own that takes the picture as it is. Its REST of the v2 protocol
  has JSON bodies only (docs.seldon.ai/mlserver/user-guide/content-type: pictures in base64).

Without adaptive batching, which is off by default and to be found by experiment, as
docs.seldon.ai/mlserver/user-guide/adaptive-batching says. Measured on two cores, three rounds: this 108 pictures a
second (97-138), base64 without batching 86 (65-139), base64 with batches of 4 within 5 ms 85 (64-88).
"""
# mypy: disable-error-code="import-not-found,misc,no-any-unimported,untyped-decorator"
# Runs in MLServer's own environment, where `detector` lies on the path.

from typing import Annotated

from detector import Answer, Detector, read_card
from fastapi import Body
from mlserver import MLModel
from mlserver.handlers import custom_handler


class DetectorModel(MLModel):
    """A picture to boxes."""

    async def load(self) -> bool:
        """Loads the model, once a worker."""
        self._detector = Detector(read_card())
        return True

    @custom_handler(rest_path="/detect")
    async def detect(self, jpeg: Annotated[bytes, Body(media_type="image/jpeg")]) -> Answer:
        """The boxes of a picture, which is the body."""
        answer: Answer = self._detector.detect(jpeg)
        return answer
