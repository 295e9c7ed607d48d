"""Models for Triton's python backend: a decoupled one, as slow as it is asked to be, and one for BF16."""

from pathlib import Path

from tests.support.tiny_models import write_model

NAME = "words"
WORDS = '''"""Answers text_input n times with an index; "fail" breaks after the first, rest_ms lie between two."""
import time

import numpy as np
import triton_python_backend_utils as pb_utils


def number(request, name, default):
    tensor = pb_utils.get_input_tensor_by_name(request, name)
    return default if tensor is None else tensor.as_numpy().ravel()[0]


class TritonPythonModel:
    def execute(self, requests):
        for request in requests:
            self.answer(request, request.get_response_sender())

    def answer(self, request, sender):
        text = pb_utils.get_input_tensor_by_name(request, "text_input").as_numpy().ravel()[0].decode()
        for index in range(int(number(request, "n", 3))):
            if request.is_cancelled():
                pb_utils.Logger.log_info(f"words: {text} was cancelled")
                break
            if text == "fail" and index == 1:
                sender.send(pb_utils.InferenceResponse(error=pb_utils.TritonError("it broke")))
                break
            output = np.array([f"{text} {index}".encode()], dtype=object)
            outputs = [pb_utils.Tensor("text_output", output), pb_utils.Tensor("index", np.array([index], np.int32))]
            sender.send(pb_utils.InferenceResponse(outputs))
            time.sleep(float(number(request, "rest_ms", 0)) / 1000)
        sender.send(flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
'''
CONFIG = """backend: "python"
max_batch_size: 0
input [ { name: "text_input" data_type: TYPE_STRING dims: [ 1 ] } ]
input [ { name: "n" data_type: TYPE_INT32 dims: [ 1 ] optional: true } ]
input [ { name: "rest_ms" data_type: TYPE_FP32 dims: [ 1 ] optional: true } ]
output [ { name: "text_output" data_type: TYPE_STRING dims: [ 1 ] } ]
output [ { name: "index" data_type: TYPE_INT32 dims: [ 1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
model_transaction_policy { decoupled: true }
"""


BF16 = '''"""Answers what it is given; numpy knows no BF16."""
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        tensors = [pb_utils.get_input_tensor_by_name(request, "x") for request in requests]
        copies = [pb_utils.Tensor.from_dlpack("y", tensor.to_dlpack()) for tensor in tensors]
        return [pb_utils.InferenceResponse([copy]) for copy in copies]
'''
BF16_CONFIG = """backend: "python"
max_batch_size: 0
input [ { name: "x" data_type: TYPE_BF16 dims: [ -1 ] } ]
output [ { name: "y" data_type: TYPE_BF16 dims: [ -1 ] } ]
instance_group [ { kind: KIND_CPU count: 1 } ]
"""


def write_bf16(repository: Path) -> None:
    """The model `bf16`: x → y = x."""
    write_model(repository, "bf16", BF16, BF16_CONFIG)


def write_words(repository: Path) -> None:
    """The model `words`."""
    write_model(repository, NAME, WORDS, CONFIG)
