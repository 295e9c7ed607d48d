"""OpenNMT's default translator with seeded random weights: the true arithmetic of the network, and no knowledge at all.

    python -m deploy.models.opennmt                              # opennmt-random: ONNX, for a CPU
    python -m deploy.models.opennmt --torch                      # opennmt-torch-random: a program for a GPU, FP16
    python -m deploy.models.opennmt --torch --precision fp32     # opennmt-torch-fp32-random

The same seed gives both forms the same weights. The gateway forms the batches of either. What one form needs (onnx,
PyTorch) the other does without.
"""

import argparse
import hashlib
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

from deploy.models.opennmt_weights import SOURCE, TARGET, Size, Weights, draw
from penstock.models.model_folder import disk_sentence, new_model_folder

MAX_BATCH_SIZE = 64
DEFAULT_HOME = "~/.penstock"
FP16, FP32 = "fp16", "fp32"
ONNX_NAME = "opennmt-random"
TORCH_NAMES = {FP16: "opennmt-torch-random", FP32: "opennmt-torch-fp32-random"}
_CPU_SLO_MS, _GPU_SLO_MS = 30_000, 1000  # a batch of 64 takes two idle cores half a second, a GPU milliseconds
_FAILED = 1


@dataclass(frozen=True, slots=True)
class Order:
    """What is to be written. precision: of the program for a GPU; None for the ONNX file."""

    precision: str | None = None
    seed: int = 0
    size: Size = field(default_factory=Size)

    @property
    def name(self) -> str:
        return TORCH_NAMES[self.precision] if self.precision else ONNX_NAME

    @property
    def file(self) -> str:
        return "model.pt2" if self.precision else "model.onnx"

    @property
    def command(self) -> str:
        form = f" --torch --precision {self.precision}" if self.precision else ""
        return f"python -m deploy.models.opennmt{form} --seed {self.seed}"


def write(order: Order, home: Path) -> Path:
    """The complete folder in home's repository, at once. Raises OSError, and ImportError without the PyTorch needed."""
    weights = draw(order.size, order.seed)
    with new_model_folder(home, order.name) as staged:
        (staged / "1").mkdir()
        path = staged / "1" / order.file
        _write_file(order, weights, path)
        (staged / "config.pbtxt").write_text(config_text(order), encoding="utf-8")
        (staged / "MODEL.md").write_text(_facts(order, path), encoding="utf-8")
    return home / "models" / order.name


def _write_file(order: Order, weights: Weights, path: Path) -> None:
    if order.precision:
        from deploy.models.opennmt_torch import export

        export(order.size, weights, path, max_batch_size=MAX_BATCH_SIZE)
    else:
        from deploy.models.opennmt_onnx import translator

        path.write_bytes(translator(order.size, weights).SerializeToString(deterministic=True))


def config_text(order: Order) -> str:
    """config.pbtxt."""
    is_torch = order.precision is not None
    precision = f'parameters {{ key: "precision" value {{ string_value: "{order.precision}" }} }}\n'
    return f"""\
# OpenNMT's translator with random weights, for measuring speed: see MODEL.md.
name: "{order.name}"
backend: "{"torch" if is_torch else "onnxruntime"}"
default_model_filename: "{order.file}"
max_batch_size: {MAX_BATCH_SIZE}
input [
  {{ name: "{SOURCE}" data_type: TYPE_INT64 dims: [ {order.size.source_length} ] }}
]
output [
  {{ name: "{TARGET}" data_type: TYPE_INT64 dims: [ {order.size.target_length} ] }}
]
instance_group [ {{ kind: {"KIND_GPU" if is_torch else "KIND_CPU"} count: 1 }} ]

# The answers have no meaning, and no accuracy is measured.
parameters {{ key: "weights" value {{ string_value: "random" }} }}

# Every sentence takes the same {order.size.target_length} steps, so sentences of any length go together.
parameters {{ key: "batch_owner" value {{ string_value: "gateway" }} }}
parameters {{ key: "rows_follow_batch" value {{ string_value: "1" }} }}
parameters {{ key: "slo_p99_ms" value {{ string_value: "{_GPU_SLO_MS if is_torch else _CPU_SLO_MS}" }} }}
{precision if is_torch else ""}"""


def _facts(order: Order, path: Path) -> str:
    size, data = order.size, path.read_bytes()
    form = (
        f"torch.export; float32 in the file, {order.precision} on the GPU; widths padded with zeros to multiples of 64"
        if order.precision
        else "ONNX, opset 17, IR 8; the decoder is one Loop"
    )
    return f"""\
# {order.name}: RANDOM WEIGHTS, answers mean nothing

OpenNMT's default translator with seeded random weights: as much work as the trained network, for measuring speed. It
knows no word; words are numbers here.

| | |
|---|---|
| architecture | Klein and others, *OpenNMT: Open-Source Toolkit for Neural Machine Translation*, ACL 2017 |
| sizes | encoder and decoder of {size.layers} LSTM layers of {size.width}, word vectors of {size.width} |
| words | two vocabularies of {size.vocabulary:,} |
| attention | global ("general"), with input feeding |
| licence | made on this machine by Apache-2.0 code of this project; nothing in it was trained or fetched |
| file | `1/{order.file}`, {len(data):,} bytes, SHA-256 `{hashlib.sha256(data).hexdigest()}` |
| made | `{order.command}`; the same seed gives the same weights |
| format | {form} |
| parameters | {size.parameter_count:,}{", as OpenNMT prints for its default model" if size == Size() else ""} |
| multiply-accumulates | {size.multiply_accumulates:,} a sentence, of the matrix products |
| weights | uniform in ±0.1, as OpenNMT begins; word vectors and generator in ±1, so that sentences differ |

## Shapes

| | name | type | shape | what |
|---|---|---|---|---|
| in | `{SOURCE}` | INT64 | [N, {size.source_length}] | words; 0 (`<blank>`) at the end where a sentence is shorter |
| out | `{TARGET}` | INT64 | [N, {size.target_length}] | the likeliest word of every step (greedy) |

N is free, up to {MAX_BATCH_SIZE} a batch. Always {size.target_length} words are answered; a trained model's
caller would cut at 3 (`</s>`). A number that is no word's is taken as 1 (`<unk>`). There is no beam and no
log-probability: less work than a beam search, so compare with greedy figures only. `weights: random` in config.pbtxt
tells programs what this page tells you: accuracy is never judged on it.
"""


def run(arguments: Sequence[str]) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="python -m deploy.models.opennmt",
        description="Write OpenNMT's default translator with seeded random weights as a model.",
    )
    home = os.environ.get("PENSTOCK_HOME", DEFAULT_HOME)
    parser.add_argument("--home", type=Path, default=Path(home), help=f"its models/ gets the folder [{home}]")
    parser.add_argument("--seed", type=int, default=0, help="of the weights, in either form [0]")
    parser.add_argument("--torch", action="store_true", help="a program for a GPU instead of an ONNX file")
    parser.add_argument("--precision", choices=(FP16, FP32), default=FP16, help="of the program on the GPU [fp16]")
    given = parser.parse_args(arguments)
    order = Order(given.precision if given.torch else None, given.seed)
    try:
        folder = write(order, given.home.expanduser())
    except OSError as error:
        _end(f"{parser.prog}: {disk_sentence(error, given.home)}")
    except ImportError as error:
        how = (
            "the form for a GPU wants PyTorch: run it by the Python of .venv-triton after make gpu"
            if given.torch
            else "onnx writes the form for a CPU: run it by the Python of .venv"
        )
        _end(f"{parser.prog}: {error}; {how}")
    sys.stdout.write(
        f"{order.name} is in {folder}; its weights are random, so its answers mean nothing\n"
        f"a stack that runs serves it after: penstock models load {order.name}\n"
    )


def _end(sentence: str) -> NoReturn:
    sys.stderr.write(sentence + "\n")
    raise SystemExit(_FAILED)


if __name__ == "__main__":
    run(sys.argv[1:])
