"""The folder of an exported PyTorch program with random weights, and the words of the commands that write one.

What a network is stands with it (resnet50_torch, googlenet_torch); how its command speaks and how its folder comes to
be, whole or not at all, is here. Nothing of it wants PyTorch before a program is exported.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

from penstock.models.model_folder import disk_sentence, new_model_folder

DEFAULT_HOME = "~/.penstock"
CLASS_COUNT = 1000
CLASSES = tuple(f"class {number}" for number in range(CLASS_COUNT))
_NO_TORCH, _CANNOT_WRITE = 2, 1


def add_flags(parser: argparse.ArgumentParser, batching: Collection[str]) -> None:
    """What every such command takes. batching: who may form batches; one of them is triton."""
    home = os.environ.get("PENSTOCK_HOME", DEFAULT_HOME)
    parser.add_argument("--home", type=Path, default=Path(home), help=f"its models/ gets the folder [{home}]")
    parser.add_argument("--seed", type=int, default=0, help="of the weights: the same seed gives the same weights [0]")
    parser.add_argument("--instances", type=at_least_one, default=1, help="each a process, and a client of MPS [1]")
    parser.add_argument("--batching", choices=tuple(batching), default="triton", help="who forms batches [triton]")
    parser.add_argument("--max-batch", type=at_least_one, default=64, metavar="N", help="rows a batch [64]")


def at_least_one(text: str) -> int:
    """Of a flag. Raises argparse.ArgumentTypeError."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number above 0")
    return int(text)


def write_and_tell(program: str, name: str, home: Path, write: Callable[[Path], Path]) -> None:
    """The command: write(home) gives the folder. Ends the program with a sentence where it cannot be."""
    if "-random" not in name:
        _end(f"{program}: --name {name} must have -random in it: the weights are", _NO_TORCH)
    try:
        folder = write(home.expanduser())
    except ModuleNotFoundError as error:
        _end(f"{program}: {error.name} is not here: run it by the Python of .venv-triton after make gpu", _NO_TORCH)
    except OSError as error:
        _end(f"{program}: {disk_sentence(error, home)}", _CANNOT_WRITE)
    sys.stdout.write(
        f"{name} is in {folder}; its weights are random, so its answers mean nothing\n"
        f"a stack that runs serves it after: penstock models load {name}\n"
    )


def write_folder(
    home: Path, name: str, *, export: Callable[[Path], None], config: str, facts: Callable[[bytes], str]
) -> Path:
    """The complete folder in home's repository, at once. export: writes the program. facts: MODEL.md, of its bytes.

    Raises OSError; ModuleNotFoundError without torch.
    """
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "model.pt2"
        export(program)
        data = program.read_bytes()
    with new_model_folder(home, name) as staged:
        (staged / "1").mkdir()
        (staged / "1" / "model.pt2").write_bytes(data)
        (staged / "config.pbtxt").write_text(config, encoding="utf-8")
        (staged / "labels.txt").write_text("".join(f"{label}\n" for label in CLASSES), encoding="utf-8")
        (staged / "MODEL.md").write_text(facts(data), encoding="utf-8")
    return home / "models" / name


def save_program(module: Any, sample: Any, path: Path) -> None:
    """module: torch.nn.Module of one tensor. sample: two rows of it; the program's first dimension is free from 1 to
    1024."""
    import torch  # here, so that --help needs none

    rows = torch.export.Dim("rows", min=1, max=1024)
    with torch.no_grad():
        exported = torch.export.export(module.eval(), (sample,), dynamic_shapes=({0: rows},))
    torch.export.save(exported, path)


def _end(sentence: str, code: int) -> None:
    sys.stderr.write(f"{sentence}\n")
    raise SystemExit(code)
