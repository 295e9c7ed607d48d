"""The model as the gateway runs it: its own preprocessing and parser around ONNX Runtime."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import onnxruntime

from server.backends.config_pbtxt import read_config
from server.core.infer import InferResponse
from server.core.result import Detections
from server.core.tensor import tensor_from_numpy
from server.vision.card import card_from_config
from server.vision.decode import Decoded
from server.vision.postprocess import parse
from server.vision.preprocess import prepare

FOLDER = Path(__file__).resolve().parents[3] / "model_repository" / "street"
_BATCH = 16


class StreetDetector:
    """One ONNX Runtime session over a model's folder. onnx: another file of the same model in place of its own."""

    def __init__(self, folder: Path = FOLDER, onnx: Path | None = None, *, threads: int = 1) -> None:
        config = read_config(folder / "config.pbtxt")
        card = card_from_config(config)
        if card is None:
            raise ValueError(f"{folder / 'config.pbtxt'} does not say how the model sees images")
        self.card = card
        self._name = config.name
        self._outputs = [output.name for output in config.outputs]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            onnx or folder / "1" / "model.onnx", options, providers=["CPUExecutionProvider"]
        )

    def find(self, pictures: Sequence[npt.NDArray[np.uint8]]) -> list[Detections]:
        """What is in each picture, (H, W, 3) BGR; boxes in its own pixels, best first, scores over the card's."""
        found: list[Detections] = []
        for start in range(0, len(pictures), _BATCH):
            found += self._find_batch(pictures[start : start + _BATCH])
        return found

    def _find_batch(self, pictures: Sequence[npt.NDArray[np.uint8]]) -> list[Detections]:
        prepared = [
            prepare(Decoded(picture, picture.shape[1], picture.shape[0]), self.card.prepare_spec)
            for picture in pictures
        ]
        answers = self._session.run(self._outputs, {self.card.input_name: np.stack([array for array, _ in prepared])})
        tensors = tuple(tensor_from_numpy(*pair) for pair in zip(self._outputs, answers, strict=True))
        response = InferResponse(self._name, "1", tensors)
        found = []
        for row, (_, geometry) in enumerate(prepared):
            result = parse(self.card, response, row, geometry)
            if not isinstance(result, Detections):
                raise TypeError(f"model {self._name!r} is no detector")
            found.append(result)
        return found
