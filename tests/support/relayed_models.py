"""Models that find the bright rectangle of a picture: in the encoded bytes, or in pixels that a gateway made."""

from pathlib import Path

from tests.support.tiny_models import write_model

SIDE = 64  # of the network

FINDS = '''"""Where a picture is bright, in pixels of a network of 64 x 64."""
import cv2
import numpy as np
import triton_python_backend_utils as pb_utils

SIDE = 64


def pixels_of(encoded):
    picture = cv2.imdecode(np.frombuffer(encoded, np.uint8), cv2.IMREAD_COLOR)
    if picture is None:
        return None
    height, width = picture.shape[:2]
    scale = min(SIDE / width, SIDE / height)
    size = max(round(width * scale), 1), max(round(height * scale), 1)
    placed = np.zeros((SIDE, SIDE, 3), np.uint8)
    placed[: size[1], : size[0]] = cv2.resize(picture, size, interpolation=cv2.INTER_LINEAR)
    return placed.transpose(2, 0, 1)[::-1].astype(np.float32)


class TritonPythonModel:
    def execute(self, requests):
        return [self.answer(request) for request in requests]

    def answer(self, request):
        rows = pb_utils.get_input_tensor_by_name(request, "picture").as_numpy()
        if rows.dtype == np.object_:
            rows = [pixels_of(one) for one in rows.ravel()]
            bad = [str(number) for number, row in enumerate(rows) if row is None]
            if bad:
                said = "the picture cannot be decoded"
                if len(rows) > 1:
                    said = f"rows {', '.join(bad)} of {len(rows)}: {said}"
                return pb_utils.InferenceResponse([], pb_utils.TritonError(said, pb_utils.TritonError.INVALID_ARG))
        boxes = np.stack([[self.box(pixels)] for pixels in rows]).astype(np.float32)
        count = len(boxes)
        return pb_utils.InferenceResponse(
            [
                pb_utils.Tensor("boxes", boxes),
                pb_utils.Tensor("scores", np.full((count, 1), 0.5, np.float32)),
                pb_utils.Tensor("class_ids", np.zeros((count, 1), np.int64)),
            ]
        )

    @staticmethod
    def box(pixels):
        ys, xs = np.nonzero(pixels.min(axis=0) > 127)
        return [xs.min(), ys.min(), xs.max() + 1, ys.max() + 1] if len(xs) else [0, 0, 0, 0]
'''
_CONFIG = """backend: "python"
max_batch_size: 16
input [ {{ name: "picture" {input} }} ]
output [
  {{ name: "boxes" data_type: TYPE_FP32 dims: [ 1, 4 ] }},
  {{ name: "scores" data_type: TYPE_FP32 dims: [ 1 ] }},
  {{ name: "class_ids" data_type: TYPE_INT64 dims: [ 1 ] }}
]
instance_group [ {{ kind: KIND_CPU count: 1 }} ]
"""
_WORDS = {"network-type": "0", "maintain-aspect-ratio": "1", "labels": "bright"}
ENCODED, PIXELS = "data_type: TYPE_STRING dims: [ 1 ]", f"data_type: TYPE_FP32 dims: [ 3, {SIDE}, {SIDE} ]"
BY_ENGINE = {"image-decoder": "engine", "infer-dims": f"3;{SIDE};{SIDE}"}


def write_finder(repository: Path, name: str, *, decodes: bool, owner: str) -> None:
    """decodes: whether it takes encoded pictures. owner: of its batches."""
    config = _CONFIG.format(input=ENCODED if decodes else PIXELS)
    words = _WORDS | {"batch_owner": owner} | (BY_ENGINE if decodes else {})
    for key, value in words.items():
        config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    write_model(repository, name, FINDS, config)
