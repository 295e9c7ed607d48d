"""ResNet-50 v1.5 with seeded random weights as an exported PyTorch program, for Triton's backend `torch`.

    python -m deploy.models.resnet50_torch                     resnet50-torch-random: FP32 tensors
    python -m deploy.models.resnet50_torch --input uint8       resnet50-torch-uint8-random: pixels, a quarter the bytes
    python -m deploy.models.resnet50_torch --pictures          resnet50-jpeg-random: encoded pictures, read on the GPU

It wants PyTorch (`make gpu`); the program is exported on the CPU and runs on either. The weights are those of
deploy.models.resnet50 of the same seed: two engines can be compared.
"""

import argparse
import hashlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from deploy.models.torch_folder import CLASS_COUNT, CLASSES, add_flags, save_program, write_and_tell, write_folder

PROGRAM = "python -m deploy.models.resnet50_torch"
NAMES = {"fp32": "resnet50-torch-random", "uint8": "resnet50-torch-uint8-random", "pictures": "resnet50-jpeg-random"}
_NORMALISING = """\
parameters { key: "net-scale-factor" value { string_value: "0.00392156862745098" } }
parameters { key: "offsets" value { string_value: "123.675;116.28;103.53" } }
parameters {
  key: "channel-scale-factors" value { string_value: "4.366812227074235;4.464285714285714;4.444444444444445" }
}
"""
_PICTURES = """\
# The instance decodes and resizes encoded pictures by itself.
parameters { key: "image-decoder" value { string_value: "engine" } }
parameters { key: "infer-dims" value { string_value: "3;224;224" } }
"""
_INPUTS = {
    "fp32": '{ name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }',
    "uint8": '{ name: "image" data_type: TYPE_UINT8 dims: [ 3, 224, 224 ] }',
    "pictures": '{ name: "image" data_type: TYPE_STRING dims: [ 1 ] }',
}
_BATCHING = {
    "off": "",
    "triton": "dynamic_batching { }\n",
    "gateway": 'parameters { key: "batch_owner" value { string_value: "gateway" } }\n',
}
_PAPER = "He, Zhang, Ren, Sun, *Deep Residual Learning for Image Recognition*, CVPR 2016; stride in the 3×3 (v1.5)"
_SHAPES = {
    "fp32": "FP32 [N, 3, 224, 224]: RGB, (x / 255 - mean) / deviation of ImageNet",
    "uint8": "UINT8 [N, 3, 224, 224]: RGB pixels; the program normalises",
    "pictures": "BYTES [N, 1]: encoded pictures (JPEG, PNG, WebP); the instance decodes, resizes, normalises",
}


@dataclass(frozen=True, slots=True)
class Form:
    """Which of its folders. wire: fp32, uint8 or pictures. batching: off, triton or gateway."""

    wire: str = "fp32"
    name: str = NAMES["fp32"]
    seed: int = 0
    instances: int = 1
    batching: str = "triton"
    max_batch_size: int = 64


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    given = _parser().parse_args(arguments)
    wire = "pictures" if given.pictures else given.input
    name = given.name or NAMES[wire]
    form = Form(wire, name, given.seed, given.instances, given.batching, given.max_batch)
    write_and_tell(PROGRAM, name, given.home, partial(write, form))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=PROGRAM, description="Write ResNet-50 v1.5 with seeded random weights as an exported PyTorch program."
    )
    add_flags(parser, _BATCHING)
    parser.add_argument("--input", choices=("fp32", "uint8"), default="fp32", help="what its tensors are [fp32]")
    parser.add_argument("--pictures", action="store_true", help="take encoded pictures, which the instance decodes")
    parser.add_argument("--name", help="of the model, -random in it")
    return parser


def write(form: Form, home: Path) -> Path:
    """The complete folder in home's repository, at once. Raises OSError; ModuleNotFoundError without torch."""
    return write_folder(
        home, form.name, export=partial(export, form), config=config_text(form), facts=partial(_facts, form)
    )


def export(form: Form, path: Path) -> None:
    """The program, its first dimension free."""
    import torch  # here, so that --help needs none

    from deploy.models.resnet50_network import OfPixels, Resnet50

    network = Resnet50(form.seed)
    pixels = torch.zeros((2, 3, 224, 224), dtype=torch.uint8)
    is_of_pixels = form.wire == "uint8"
    module, sample = (OfPixels(network), pixels) if is_of_pixels else (network, pixels.float())
    save_program(module, sample, path)


def config_text(form: Form) -> str:
    """config.pbtxt. The preprocessing is ImageNet's: RGB, (x / 255 - mean) / deviation."""
    return f"""\
# ResNet-50 v1.5 with random weights, for measuring speed: see MODEL.md.
name: "{form.name}"
backend: "torch"
default_model_filename: "model.pt2"
max_batch_size: {form.max_batch_size}
input [
  {_INPUTS[form.wire]}
]
output [
  {{ name: "logits" data_type: TYPE_FP32 dims: [ {CLASS_COUNT} ] label_filename: "labels.txt" }}
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
parameters {{ key: "resize-shorter-side" value {{ string_value: "256" }} }}
{"" if form.wire == "uint8" else _NORMALISING}\
{_PICTURES if form.wire == "pictures" else ""}\
parameters {{ key: "apply-softmax" value {{ string_value: "1" }} }}
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

ResNet-50 v1.5 as published, with seeded random weights: as much work as the trained network,
for measuring speed. It knows no class; `class 0` to `class {CLASS_COUNT - 1}` are numbers, not names.

| | |
|---|---|
| architecture | {_PAPER} |
| licence | made on this machine by Apache-2.0 code of this project; nothing in it was trained or fetched |
| file | `1/model.pt2`, {len(data):,} bytes, SHA-256 `{hashlib.sha256(data).hexdigest()}` |
| made | `{PROGRAM}`, seed {form.seed}; the weights are `resnet50-random`'s of that seed |
| format | a program of `torch.export.save`, its first dimension free |
| in | `image`, {_SHAPES[form.wire]} |
| out | `logits`, FP32 [N, {CLASS_COUNT}]; the gateway applies the softmax |

N is free, up to {form.max_batch_size} a batch. On a GPU it runs in FP16, channels last, by CUDA graphs; on a CPU in
FP32. `weights: random` in config.pbtxt tells programs what this page tells you: accuracy is never judged on it.
"""


if __name__ == "__main__":
    run(sys.argv[1:])
