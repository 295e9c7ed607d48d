"""The model folder around a graph with random weights: config.pbtxt, labels.txt, MODEL.md and the file itself."""

import argparse
import hashlib
import os
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx

from deploy.models.graph import IR_VERSION, OPSET, multiply_accumulates
from penstock.models.model_folder import disk_sentence, new_model_folder

CLASS_COUNT = 1000
MAX_BATCH_SIZE = 64
DEFAULT_HOME = "~/.penstock"
_CANNOT_WRITE = 1


@dataclass(frozen=True, slots=True)
class RandomModel:
    """An architecture for measuring speed. build: seed → (the model, how many parameters were drawn).

    Its input is `image`, [3, 224, 224]; its one output has a score a class, logits unless the softmax is in the graph.
    """

    name: str
    title: str
    paper: str
    build: Callable[[int], tuple[onnx.ModelProto, int]]
    output_name: str
    is_softmax_in_graph: bool


def main(model: RandomModel, arguments: Sequence[str]) -> None:
    """`python -m deploy.models.NAME [--home DIR] [--seed N]`: the model's folder in the repository under home."""
    parser = argparse.ArgumentParser(
        prog=f"python -m deploy.models.{model.build.__name__}",
        description=f"Write {model.title} with seeded random weights as the model {model.name}.",
    )
    home = os.environ.get("PENSTOCK_HOME", DEFAULT_HOME)
    parser.add_argument("--home", type=Path, default=Path(home), help=f"its models/ gets the folder [{home}]")
    parser.add_argument("--seed", type=int, default=0, help="of the weights: the same seed gives the same file [0]")
    given = parser.parse_args(arguments)
    try:
        folder = write(model, given.home.expanduser(), given.seed)
    except OSError as error:
        sys.stderr.write(f"{parser.prog}: {disk_sentence(error, given.home)}\n")
        raise SystemExit(_CANNOT_WRITE) from error
    sys.stdout.write(
        f"{model.name} is in {folder}; its weights are random, so its answers mean nothing\n"
        f"a stack that runs serves it after: penstock models load {model.name}\n"
    )


def write(model: RandomModel, home: Path, seed: int) -> Path:
    """The complete folder in home's repository, at once. Raises OSError, and then the repository is as it was."""
    proto, parameter_count = model.build(seed)
    data = proto.SerializeToString(deterministic=True)
    with new_model_folder(home, model.name) as staged:
        (staged / "1").mkdir()
        (staged / "1" / "model.onnx").write_bytes(data)
        (staged / "config.pbtxt").write_text(config_text(model), encoding="utf-8")
        (staged / "labels.txt").write_text("".join(f"{label}\n" for label in labels()), encoding="utf-8")
        facts = _facts(model, data, seed, parameter_count, multiply_accumulates(proto))
        (staged / "MODEL.md").write_text(facts, encoding="utf-8")
    return home / "models" / model.name


def labels() -> list[str]:
    """A thousand names that mean nothing."""
    return [f"class {number}" for number in range(CLASS_COUNT)]


def config_text(model: RandomModel) -> str:
    """config.pbtxt. The preprocessing is ImageNet's: RGB, (x / 255 - mean) / deviation."""
    return f"""\
# {model.title} with random weights, for measuring speed: see MODEL.md.
name: "{model.name}"
backend: "onnxruntime"
default_model_filename: "model.onnx"
max_batch_size: {MAX_BATCH_SIZE}
input [
  {{ name: "image" data_type: TYPE_FP32 dims: [ 3, 224, 224 ] }}
]
output [
  {{ name: "{model.output_name}" data_type: TYPE_FP32 dims: [ {CLASS_COUNT} ] label_filename: "labels.txt" }}
]
# No kind: the GPU where there is one, else the CPU, where the one instance has all cores.
instance_group [ {{ count: 1 }} ]
dynamic_batching {{ }}

# The answers have no meaning, and no accuracy is measured.
parameters {{ key: "weights" value {{ string_value: "random" }} }}

# How it sees images, in nvinfer's words.
parameters {{ key: "network-type" value {{ string_value: "1" }} }}
parameters {{ key: "network-input-order" value {{ string_value: "0" }} }}
parameters {{ key: "model-color-format" value {{ string_value: "0" }} }}
parameters {{ key: "net-scale-factor" value {{ string_value: "0.00392156862745098" }} }}
parameters {{ key: "offsets" value {{ string_value: "123.675;116.28;103.53" }} }}
parameters {{
  key: "channel-scale-factors" value {{ string_value: "4.366812227074235;4.464285714285714;4.444444444444445" }}
}}
parameters {{ key: "apply-softmax" value {{ string_value: "{int(not model.is_softmax_in_graph)}" }} }}
parameters {{ key: "topk" value {{ string_value: "5" }} }}
parameters {{
  key: "labels"
  value {{
    string_value: "{";".join(labels())}"
  }}
}}
"""


def _facts(model: RandomModel, data: bytes, seed: int, parameter_count: int, macs: int) -> str:
    scores = "shares that add up to 1" if model.is_softmax_in_graph else "logits; the gateway applies the softmax"
    return f"""\
# {model.name}: RANDOM WEIGHTS, answers mean nothing

{model.title} as published, with seeded random weights: as much work as the trained network,
for measuring speed. It knows no class; `class 0` to `class {CLASS_COUNT - 1}` are numbers, not names.

| | |
|---|---|
| architecture | {model.paper} |
| licence | made on this machine by Apache-2.0 code of this project; nothing in it was trained or fetched |
| file | `1/model.onnx`, {len(data):,} bytes, SHA-256 `{hashlib.sha256(data).hexdigest()}` |
| made | `python -m deploy.models.{model.build.__name__} --seed {seed}`; the same seed gives the same file |
| format | ONNX, opset {OPSET}, IR {IR_VERSION} |
| parameters | {parameter_count:,} |
| multiply-accumulates | {macs:,} a picture, of the convolutions and matrix products in the graph |
| weights | He's initialisation: normal, variance 2 / fan-in |

## Shapes

| | name | type | shape | what |
|---|---|---|---|---|
| in | `image` | FP32 | [N, 3, 224, 224] | RGB, (x / 255 − mean) / deviation of ImageNet |
| out | `{model.output_name}` | FP32 | [N, {CLASS_COUNT}] | {scores} |

N is free, up to {MAX_BATCH_SIZE} a batch. `weights: random` in config.pbtxt tells programs what this page tells you:
accuracy is never judged on it.
"""
