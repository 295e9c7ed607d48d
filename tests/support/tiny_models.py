"""Tiny models for the integration tests, as Triton's python backend runs them."""

import shutil
from pathlib import Path

SHIPPED_IDENTITY = Path(__file__).resolve().parents[2] / "model_repository" / "identity_fp32"

IDENTITY = '''"""Answers what it is given."""
import numpy as np
import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]))
        return answers
'''

SLOW = '''"""Sleeps as many milliseconds as it is asked to, then answers them."""
import time

import triton_python_backend_utils as pb_utils


class TritonPythonModel:
    def execute(self, requests):
        answers = []
        for request in requests:
            array = pb_utils.get_input_tensor_by_name(request, "x").as_numpy()
            time.sleep(float(array.ravel()[0]) / 1000)
            answers.append(pb_utils.InferenceResponse([pb_utils.Tensor("y", array)]))
        return answers
'''

GATE = "gate"  # a file beside a repository, while whose absence a held model answers nothing

CONFIG = """backend: "python"
max_batch_size: {max_batch_size}
input [ {{ name: "x" data_type: {data_type} dims: [ -1 ] }} ]
output [ {{ name: "y" data_type: {data_type} dims: [ -1 ] }} ]
instance_group [ {{ kind: KIND_CPU count: {count} }} ]
"""


def write_model(repository: Path, name: str, source: str, config: str) -> None:
    """One python-backend model."""
    folder = repository / name / "1"
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(source)
    (folder.parent / "config.pbtxt").write_text(config)


def write_held(repository: Path, name: str, source: str, config: str) -> None:
    """That model, which answers while the gate beside the repository is open; open it is. No canary is sent to it."""
    gate = repository.parent / GATE
    waiting = f"        while not os.path.exists({str(gate)!r}):\n            time.sleep(0.01)\n"
    held = source.replace("        answers = []\n", f"        import os, time\n{waiting}        answers = []\n")
    write_model(repository, name, held, config + 'parameters { key: "canary" value { string_value: "off" } }\n')
    gate.touch()


def write_tiny_repository(repository: Path) -> None:
    """identity_bytes answers its input, slow sleeps for it, broken cannot be loaded; identity_fp32 is shipped."""
    fp32 = CONFIG.format(max_batch_size=8, data_type="TYPE_FP32", count=1)
    write_model(
        repository, "identity_bytes", IDENTITY, CONFIG.format(max_batch_size=8, data_type="TYPE_STRING", count=1)
    )
    write_model(repository, "slow", SLOW, CONFIG.format(max_batch_size=0, data_type="TYPE_FP32", count=2))
    write_model(repository, "broken", "raise ValueError('this model is broken on purpose')\n", fp32)


def copy_identity(repository: Path) -> None:
    """The shipped identity_fp32, for an engine that is given this repository alone."""
    shutil.copytree(SHIPPED_IDENTITY, repository / SHIPPED_IDENTITY.name)
