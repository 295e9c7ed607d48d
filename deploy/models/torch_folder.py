"""The folder of an exported PyTorch program with random weights, and the command that writes it.

Only `save_program` and the exports need PyTorch.
"""

import argparse
import hashlib
import os
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from penstock.models.model_folder import disk_sentence, new_model_folder

DEFAULT_HOME = "~/.penstock"
CLASS_COUNT = 1000
_NO_TORCH, _CANNOT_WRITE = 2, 1


BATCHING = {
    "off": "",
    "triton": "dynamic_batching { }\n",
    "gateway": 'parameters { key: "batch_owner" value { string_value: "gateway" } }\n',
}


@dataclass(frozen=True, slots=True)
class Form:
    """Options of a folder. wire: fp32, uint8 (pixels) or pictures. batching: a key of BATCHING."""

    name: str
    wire: str = "uint8"
    seed: int = 0
    instances: int = 1
    batching: str = "triton"
    max_batch_size: int = 64


@dataclass(frozen=True, slots=True)
class RandomProgram:
    """What the texts of a folder say. program: its command. onnx_name: the ONNX form of the same weights, or empty.

    card: lines of config.pbtxt that say how pictures become tensors and outputs become answers. output_dims: of a row.
    shape_in, shape_out: rows of MODEL.md.
    """

    title: str
    subtitle: str
    program: str
    paper: str
    onnx_name: str
    output: str
    input: str
    card: str
    shape_in: str
    shape_out: str
    output_dims: tuple[int, ...] = (CLASS_COUNT,)
    class_count: int = CLASS_COUNT

    @property
    def labels(self) -> tuple[str, ...]:
        """Numbers, not names."""
        return tuple(f"class {number}" for number in range(self.class_count))

    def config_text(self, form: Form) -> str:
        """config.pbtxt."""
        dims = ", ".join(map(str, self.output_dims))
        return f"""\
# {self.title}{self.subtitle} with random weights, for measuring speed: see MODEL.md.
name: "{form.name}"
backend: "torch"
default_model_filename: "model.pt2"
max_batch_size: {form.max_batch_size}
input [
  {self.input}
]
output [
  {{ name: "{self.output}" data_type: TYPE_FP32 dims: [ {dims} ] label_filename: "labels.txt" }}
]
# No kind: the GPU where there is one, else the CPU. An instance is a process of its own, and a client of MPS.
instance_group [ {{ count: {form.instances} }} ]
{BATCHING[form.batching]}\
# Tensors in CUDA shared memory come to the instance as they are.
parameters {{ key: "FORCE_CPU_ONLY_INPUT_TENSORS" value {{ string_value: "no" }} }}

# The answers have no meaning, and no accuracy is measured.
parameters {{ key: "weights" value {{ string_value: "random" }} }}

# How it sees images, in nvinfer's words.
parameters {{ key: "network-input-order" value {{ string_value: "0" }} }}
{self.card}\
parameters {{
  key: "labels"
  value {{
    string_value: "{";".join(self.labels)}"
  }}
}}
"""

    def facts(self, form: Form, data: bytes) -> str:
        """MODEL.md of the exported bytes."""
        same = f"; the weights are `{self.onnx_name}`'s of that seed" if self.onnx_name else ""
        return f"""\
# {form.name}: RANDOM WEIGHTS, answers mean nothing

{self.title}{self.subtitle} as published, with seeded random weights: as much work as the trained network,
for measuring speed. It knows no class; `class 0` to `class {self.class_count - 1}` are numbers, not names.

| | |
|---|---|
| architecture | {self.paper} |
| licence | made on this machine by Apache-2.0 code of this project; nothing in it was trained or fetched |
| file | `1/model.pt2`, {len(data):,} bytes, SHA-256 `{hashlib.sha256(data).hexdigest()}` |
| made | `{self.program}`, seed {form.seed}{same} |
| format | a program of `torch.export.save`, its first dimension free |
| in | `image`, {self.shape_in} |
| out | `{self.output}`, FP32 [N, {", ".join(map(str, self.output_dims))}]{self.shape_out} |

N is free, up to {form.max_batch_size} a batch. On a GPU it runs in FP16, channels last, by CUDA graphs; on a CPU in
FP32. `weights: random` in config.pbtxt tells programs what this page tells you: accuracy is never judged on it.
"""

    def parser(self, batching: tuple[str, ...]) -> argparse.ArgumentParser:
        """Flags of every such command. batching: who may form batches."""
        about = f"Write {self.title}{self.subtitle.partition(' (')[0]} with seeded random weights"
        parser = argparse.ArgumentParser(prog=self.program, description=f"{about} as an exported PyTorch program.")
        home = os.environ.get("PENSTOCK_HOME", DEFAULT_HOME)
        parser.add_argument("--home", type=Path, default=Path(home), help=f"its models/ gets the folder [{home}]")
        parser.add_argument("--seed", type=int, default=0, help="of the weights: the same seed, the same weights [0]")
        parser.add_argument("--instances", type=at_least_one, default=1, help="each a process, and a client of MPS [1]")
        parser.add_argument("--batching", choices=batching, default="triton", help="who forms batches [triton]")
        parser.add_argument("--max-batch", type=at_least_one, default=64, metavar="N", help="rows a batch [64]")
        return parser

    def write(self, form: Form, home: Path, export: Callable[[Path], None]) -> None:
        """The whole command behind its flags. Ends the program with a sentence where it cannot be."""
        if "-random" not in form.name:
            _end(f"{self.program}: --name {form.name} must have -random in it: the weights are", _NO_TORCH)
        try:
            folder = self.write_folder(form, home.expanduser(), export)
        except ModuleNotFoundError as error:
            how = "run it by the Python of .venv-triton after make gpu"
            _end(f"{self.program}: {error.name} is not here: {how}", _NO_TORCH)
        except OSError as error:
            _end(f"{self.program}: {disk_sentence(error, home)}", _CANNOT_WRITE)
        sys.stdout.write(
            f"{form.name} is in {folder}; its weights are random, so its answers mean nothing\n"
            f"a stack that runs serves it after: penstock models load {form.name}\n"
        )

    def write_folder(self, form: Form, home: Path, export: Callable[[Path], None]) -> Path:
        """The complete folder in home's repository, at once. Raises OSError; ModuleNotFoundError without torch."""
        with tempfile.TemporaryDirectory() as folder:
            program = Path(folder) / "model.pt2"
            export(program)
            data = program.read_bytes()
        with new_model_folder(home, form.name) as staged:
            (staged / "1").mkdir()
            (staged / "1" / "model.pt2").write_bytes(data)
            (staged / "config.pbtxt").write_text(self.config_text(form), encoding="utf-8")
            (staged / "labels.txt").write_text("".join(f"{label}\n" for label in self.labels), encoding="utf-8")
            (staged / "MODEL.md").write_text(self.facts(form, data), encoding="utf-8")
        return home / "models" / form.name


def classifier_card(preprocessing: str) -> str:
    """The card of a classifier of RGB images. preprocessing: lines of config.pbtxt."""
    return f"""\
parameters {{ key: "network-type" value {{ string_value: "1" }} }}
parameters {{ key: "model-color-format" value {{ string_value: "0" }} }}
{preprocessing}\
parameters {{ key: "topk" value {{ string_value: "5" }} }}
"""


def at_least_one(text: str) -> int:
    """Of a flag. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def save_program(module: Any, sample: Any, path: Path) -> None:
    """module: torch.nn.Module of one tensor. sample: two rows of it; the program's first dimension is free from 1 to
    1024."""
    import torch  # here, so that --help needs none

    rows = torch.export.Dim("rows", min=1, max=1024)
    with torch.no_grad():
        exported = torch.export.export(module.eval(), (sample,), dynamic_shapes=({0: rows},))
    torch.export.save(exported, path)


def _end(sentence: str, code: int) -> NoReturn:
    sys.stderr.write(f"{sentence}\n")
    raise SystemExit(code)
