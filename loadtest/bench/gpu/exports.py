"""The models that the GPU bench measures: ResNet-50 with the same random weights, exported side by side."""

import subprocess
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from loadtest.bench.gpu.raw import CHECKOUT
from loadtest.bench.wire import BadAnswer


@dataclass(frozen=True, slots=True)
class Export:
    """One model of deploy.models.resnet50_torch, in home's models/. flags: of that program."""

    home: Path
    name: str
    flags: tuple[str, ...] = ()

    @property
    def folder(self) -> Path:
        """Where it lies."""
        return self.home / "models" / self.name


def export_all(wanted: Sequence[Export], python: str) -> None:
    """Each by a process of its own, all at once; those that lie there already stay. Raises BadAnswer, OSError."""
    missing = [one for one in wanted if not (one.folder / "config.pbtxt").is_file()]
    if missing:
        with ThreadPoolExecutor(len(missing)) as pool:
            list(pool.map(lambda one: _export(one, python), missing))


def _export(wanted: Export, python: str) -> None:
    program = (python, "-m", "deploy.models.resnet50_torch", "--home", str(wanted.home), "--name", wanted.name)
    done = subprocess.run([*program, *wanted.flags], capture_output=True, text=True, cwd=CHECKOUT)
    if done.returncode or not (wanted.folder / "config.pbtxt").is_file():
        raise BadAnswer(f"{' '.join(program[1:])} made no model: {done.stderr.strip()[-500:]}")
