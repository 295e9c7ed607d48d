"""Models that find the bright rectangle of a picture: in the encoded bytes, or in pixels that a gateway made."""

import shutil
from pathlib import Path

import penstock
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
# Without PyTorch: reads pictures in the gateway's memory, as our backend does.
_READS_SLAB = """

import os
from torch_serving.slab_pictures import FILE_VARIABLE, SlabReader

READER, found_in = SlabReader(os.environ.get(FILE_VARIABLE)), pixels_of


def pixels_of(encoded):
    return found_in(READER.picture(encoded))
"""
_CONFIG = """backend: "{backend}"
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
    config = _CONFIG.format(backend="python", input=ENCODED if decodes else PIXELS)
    words = _WORDS | {"batch_owner": owner} | (BY_ENGINE if decodes else {})
    for key, value in words.items():
        config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    write_model(repository, name, FINDS, config)


def write_joined_finder(repository: Path, name: str, package: Path) -> dict[str, str]:
    """A model of our backend `torch` whose batches Triton forms. Returns the environment of its stack.

    package: a new folder with a copy of our package, in which a stand-in needs no PyTorch.
    """
    words = _WORDS | BY_ENGINE
    config = _CONFIG.format(backend="torch", input=ENCODED) + "dynamic_batching { }\n"
    for key, value in words.items():
        config += f'parameters {{ key: "{key}" value {{ string_value: "{value}" }} }}\n'
    write_model(repository, name, "", config)
    shutil.copytree(Path(penstock.__file__).parent, package / "penstock")
    (package / "penstock/engines/triton_backends/torch/model.py").write_text(FINDS + _READS_SLAB)
    return {"PYTHONPATH": str(package)}
