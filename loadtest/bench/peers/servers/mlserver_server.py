"""MLServer, as its documentation says: mlserver start mlserver_settings.

* docs.seldon.ai/mlserver/user-guide/custom: a runtime is an MLModel with load() and predict().
* docs.seldon.ai/mlserver/user-guide/adaptive-batching: max_batch_size and max_batch_time in model-settings.json.
* docs.seldon.ai/mlserver/user-guide/parallel-inference: parallel_workers, as many as cores.
* docs.seldon.ai/mlserver/user-guide/content-type: a picture is a BYTES element in base64, because its REST has JSON
  bodies only.
"""
# mypy: disable-error-code="import-not-found,misc,no-any-unimported,untyped-decorator"
# Runs in MLServer's own environment, where `detector` lies on the path.

import json

from detector import Detector, read_card
from mlserver import MLModel
from mlserver.codecs import Base64Codec, StringCodec
from mlserver.types import InferenceRequest, InferenceResponse


class DetectorModel(MLModel):
    """Pictures to boxes, a JSON text each."""

    async def load(self) -> bool:
        """Loads the model, once a worker."""
        self._detector = Detector(read_card())
        return True

    async def predict(self, payload: InferenceRequest) -> InferenceResponse:
        """One run of the network for all rows of the batch."""
        answers = self._detector.detect_many(Base64Codec.decode_input(payload.inputs[0]))
        output = StringCodec.encode_output("answers", [json.dumps(answer) for answer in answers])
        return InferenceResponse(model_name=self.name, outputs=[output])
