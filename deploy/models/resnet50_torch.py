"""ResNet-50 v1.5 with seeded random weights as an exported PyTorch program, for Triton's backend `torch`.

    python -m deploy.models.resnet50_torch                     resnet50-torch-random: FP32 tensors
    python -m deploy.models.resnet50_torch --input uint8       resnet50-torch-uint8-random: pixels, a quarter the bytes
    python -m deploy.models.resnet50_torch --pictures          resnet50-jpeg-random: encoded pictures, read on the GPU

It wants PyTorch (`make gpu`); the program is exported on the CPU and runs on either. The weights are those of
deploy.models.resnet50 of the same seed: two engines can be compared.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from server.catalogue.placing import disk_sentence, new_model_folder

DEFAULT_HOME = "~/.penstock"
CLASS_COUNT = 1000
NAMES = {"fp32": "resnet50-torch-random", "uint8": "resnet50-torch-uint8-random", "pictures": "resnet50-jpeg-random"}
_NO_TORCH, _CANNOT_WRITE = 2, 1
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
    program = "python -m deploy.models.resnet50_torch"
    if "-random" not in name:
        _end(f"{program}: --name {name} must have -random in it: the weights are", _NO_TORCH)
    try:
        folder = write(form, given.home.expanduser())
    except ModuleNotFoundError as error:
        _end(f"{program}: {error.name} is not here: run it by the Python of .venv-triton after make gpu", _NO_TORCH)
    except OSError as error:
        _end(f"{program}: {disk_sentence(error, given.home)}", _CANNOT_WRITE)
    sys.stdout.write(
        f"{name} is in {folder}; its weights are random, so its answers mean nothing\n"
        f"a stack that runs serves it after: penstock models load {name}\n"
    )


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m deploy.models.resnet50_torch",
        description="Write ResNet-50 v1.5 with seeded random weights as an exported PyTorch program.",
    )
    home = os.environ.get("PENSTOCK_HOME", DEFAULT_HOME)
    parser.add_argument("--home", type=Path, default=Path(home), help=f"its models/ gets the folder [{home}]")
    parser.add_argument("--seed", type=int, default=0, help="of the weights: the same seed gives the same weights [0]")
    parser.add_argument("--input", choices=("fp32", "uint8"), default="fp32", help="what its tensors are [fp32]")
    parser.add_argument("--pictures", action="store_true", help="take encoded pictures, which the instance decodes")
    parser.add_argument("--instances", type=_at_least_one, default=1, help="each a process, and a client of MPS [1]")
    parser.add_argument("--batching", choices=tuple(_BATCHING), default="triton", help="who forms batches [triton]")
    parser.add_argument("--max-batch", type=_at_least_one, default=64, metavar="N", help="rows a batch [64]")
    parser.add_argument("--name", help="of the model, -random in it")
    return parser


def _at_least_one(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def _end(sentence: str, code: int) -> None:
    sys.stderr.write(f"{sentence}\n")
    raise SystemExit(code)


def write(form: Form, home: Path) -> Path:
    """The complete folder in home's repository, at once. Raises OSError; ModuleNotFoundError without torch."""
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "model.pt2"
        export(form, program)
        data = program.read_bytes()
    with new_model_folder(home, form.name) as staged:
        (staged / "1").mkdir()
        (staged / "1" / "model.pt2").write_bytes(data)
        (staged / "config.pbtxt").write_text(config_text(form), encoding="utf-8")
        labels = "".join(f"class {number}\n" for number in range(CLASS_COUNT))
        (staged / "labels.txt").write_text(labels, encoding="utf-8")
        (staged / "MODEL.md").write_text(_facts(form, data), encoding="utf-8")
    return home / "models" / form.name


def export(form: Form, path: Path) -> None:
    """The program, its first dimension free from 1 to 1024."""
    import torch  # here, so that --help needs none

    from deploy.models.resnet50_network import OfPixels, Resnet50

    network = Resnet50(form.seed)
    pixels = torch.zeros((2, 3, 224, 224), dtype=torch.uint8)
    is_of_pixels = form.wire == "uint8"
    module, sample = (OfPixels(network), pixels) if is_of_pixels else (network, pixels.float())
    rows = torch.export.Dim("rows", min=1, max=1024)
    with torch.no_grad():
        exported = torch.export.export(module.eval(), (sample,), dynamic_shapes=({0: rows},))
    torch.export.save(exported, path)


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

# Its answers mean nothing, and nobody judges them.
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
    string_value: "{";".join(f"class {number}" for number in range(CLASS_COUNT))}"
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
| made | `python -m deploy.models.resnet50_torch`, seed {form.seed}; the weights are `resnet50-random`'s of that seed |
| format | a program of `torch.export.save`, its first dimension free |
| in | `image`, {_SHAPES[form.wire]} |
| out | `logits`, FP32 [N, {CLASS_COUNT}]; the gateway applies the softmax |

N is free, up to {form.max_batch_size} a batch. On a GPU it runs in FP16, channels last, by CUDA graphs; on a CPU in
FP32. `weights: random` in config.pbtxt tells programs what this page tells you: accuracy is never judged on it.
"""


if __name__ == "__main__":
    run(sys.argv[1:])
