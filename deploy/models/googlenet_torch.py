"""GoogLeNet with seeded random weights as an exported PyTorch program of pixels, for Triton's backend `torch`.

    python -m deploy.models.googlenet_torch                    googlenet-torch-uint8-random

It wants PyTorch (`make gpu`); the program is exported on the CPU and runs on either. The weights are those of
deploy.models.googlenet of the same seed, and so are its answers: within 1e-4 of a share on a CPU.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deploy.models.torch_folder import CLASS_COUNT, CLASSES, add_flags, save_program, write_and_tell, write_folder

NAME = "googlenet-torch-uint8-random"
PROGRAM = "python -m deploy.models.googlenet_torch"
_BATCHING = {"off": "", "triton": "dynamic_batching { }\n"}
_PAPER = "Szegedy et al., *Going Deeper with Convolutions*, CVPR 2015, without the auxiliary heads, with LRN"


@dataclass(frozen=True, slots=True)
class Form:
    """Of its folder. batching: off or triton."""

    name: str = NAME
    seed: int = 0
    instances: int = 1
    batching: str = "triton"
    max_batch_size: int = 64


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    given = _parser().parse_args(arguments)
    form = Form(given.name, given.seed, given.instances, given.batching, given.max_batch)
    write_and_tell(PROGRAM, form.name, given.home, partial(write, form))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Write GoogLeNet with seeded random weights as an exported PyTorch program."
    )
    add_flags(parser, _BATCHING)
    parser.add_argument("--name", default=NAME, help=f"of the model, -random in it [{NAME}]")
    return parser


def write(form: Form, home: Path) -> Path:
    """The complete folder in home's repository, at once. Raises OSError; ModuleNotFoundError without torch."""
    return write_folder(
        home, form.name, export=partial(export, form.seed), config=config_text(form), facts=partial(_facts, form)
    )


def export(seed: int, path: Path) -> None:
    """The program, its first dimension free."""
    import torch  # here, so that --help needs none

    from deploy.models.googlenet_network import GoogLeNet
    from deploy.models.resnet50_network import OfPixels

    save_program(OfPixels(GoogLeNet(seed)), torch.zeros((2, 3, 224, 224), dtype=torch.uint8), path)


def config_text(form: Form) -> str:
    """config.pbtxt. Pixels, RGB: the program normalises as ImageNet's networks do."""
    return f"""\
# GoogLeNet (Inception v1) with random weights, for measuring speed: see MODEL.md.
name: "{form.name}"
backend: "torch"
default_model_filename: "model.pt2"
max_batch_size: {form.max_batch_size}
input [
  {{ name: "image" data_type: TYPE_UINT8 dims: [ 3, 224, 224 ] }}
]
output [
  {{ name: "prob" data_type: TYPE_FP32 dims: [ {CLASS_COUNT} ] label_filename: "labels.txt" }}
]
# No kind: the GPU where there is one, else the CPU. An instance is a process of its own, and a client of MPS.
instance_group [ {{ count: {form.instances} }} ]
{_BATCHING[form.batching]}\
# Tensors in CUDA shared memory come to the instance as they are.
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "no" }} }}

# The answers have no meaning, and no accuracy is measured.
parameters {{ key: "weights" value {{ string_value: "random" }} }}

# How it sees images, in nvinfer's words.
parameters {{ key: "network-type" value {{ string_value: "1" }} }}
parameters {{ key: "network-input-order" value {{ string_value: "0" }} }}
parameters {{ key: "model-color-format" value {{ string_value: "0" }} }}
parameters {{ key: "apply-softmax" value {{ string_value: "0" }} }}
parameters {{ key: "topk" value {{ string_value: "5" }} }}
parameters {{
  key: "labels"
  value {{
    string_value: "{";".join(CLASSES)}"
  }}
}}
"""


def _facts(form: Form, data: bytes) -> str:
    return f"""\
# {form.name}: RANDOM WEIGHTS, answers mean nothing

GoogLeNet (Inception v1) as published, with seeded random weights: as much work as the trained network,
for measuring speed. It knows no class; `class 0` to `class {CLASS_COUNT - 1}` are numbers, not names.

| | |
|---|---|
| architecture | {_PAPER} |
| licence | made on this machine by Apache-2.0 code of this project; nothing in it was trained or fetched |
| file | `1/model.pt2`, {len(data):,} bytes, SHA-256 `{hashlib.sha256(data).hexdigest()}` |
| made | `{PROGRAM}`, seed {form.seed}; the weights are `googlenet-random`'s of that seed |
| format | a program of `torch.export.save`, its first dimension free |
| in | `image`, UINT8 [N, 3, 224, 224]: RGB pixels; the program normalises |
| out | `prob`, FP32 [N, {CLASS_COUNT}]: shares that add up to 1 |

N is free, up to {form.max_batch_size} a batch. On a GPU it runs in FP16, channels last, by CUDA graphs; on a CPU in
FP32. `weights: random` in config.pbtxt tells programs what this page tells you: accuracy is never judged on it.
"""


if __name__ == "__main__":
    run(sys.argv[1:])
