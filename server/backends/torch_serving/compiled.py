"""Programs compiled ahead by AOTInductor (`compile: inductor`), kept for the next start.

An artefact a bucket, in a folder named after what it depends on: the program's file, PyTorch, the device's kind, the
precision and layout. The first instance compiles, in a process of its own, while the others wait; it takes from half a
minute to minutes a bucket. Each artefact holds the weights, on the disk and on the device: say batch-buckets.
"""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from .cache import folder_of, locked
from .config import Config, EngineSpec, engine_spec
from .dtypes import network_type
from .errors import LoadError

COMPILE_S = 3600.0
_ANY = 0  # the bucket of an artefact that takes any number of rows
_LAST_LINES = 3


def compiled_program(path: Path, config: Config, spec: EngineSpec, device: Any) -> Callable[..., Any]:
    """The program of a file, by its artefacts; they are made where they are not there yet. Raises LoadError.

    config: the model's, as Triton hands it over, for the process that compiles.
    """
    buckets = spec.buckets if spec.has_cuda_graphs and spec.max_batch_size else (_ANY,)
    try:
        folder = folder_of(path, spec, device)
    except OSError as error:
        raise LoadError(f"compile: inductor has no place for what it makes ({error}); set XDG_CACHE_HOME") from None
    with locked(folder):
        missing = [bucket for bucket in buckets if not _artefact(folder, bucket).is_file()]
        if missing:
            _compile_apart(path, config, device, missing, folder)
    try:
        artefacts = {bucket: _loaded(_artefact(folder, bucket), device) for bucket in buckets}
    except RuntimeError as error:
        raise LoadError(f"compiled program in {folder} cannot be loaded, remove that folder: {error}") from None
    if buckets == (_ANY,):
        return artefacts[_ANY]  # type: ignore[no-any-return]  # torch is Any where the types are checked
    return lambda *inputs: artefacts[inputs[0].shape[0]](*inputs)


def _loaded(artefact: Path, device: Any) -> Any:
    """Without locks and events of its own, which a CUDA graph's capture does not take: one thread runs it."""
    index = device.index if device.type == "cuda" else -1
    return torch._inductor.aoti_load_package(str(artefact), run_single_threaded=True, device_index=index)


def _artefact(folder: Path, bucket: int) -> Path:
    return folder / f"bucket-{bucket or 'any'}.pt2"


def _compile_apart(path: Path, config: Config, device: Any, buckets: Sequence[int], folder: Path) -> None:
    """In a process of its own: what compiling takes of memory goes with it, and a crash of it is a sentence."""
    asked = json.dumps([str(path), config, str(device), list(buckets), str(folder)])
    here = Path(sys.executable)
    python = (
        str(here) if here.name.startswith("python") else shutil.which("python3") or "python3"
    )  # Triton's stub is none
    package = Path(__file__).resolve().parent
    command = [python, "-c", f"from {package.name}.compiled import main; main()"]
    environ = os.environ | {"PYTHONPATH": str(package.parent)}
    try:
        done = subprocess.run(
            command, input=asked, capture_output=True, text=True, env=environ, timeout=COMPILE_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LoadError(f"compile: inductor does not work here ({error}); say compile: off") from None
    if done.returncode:
        said = " ".join(" ".join(done.stderr.split("\n")[-_LAST_LINES:]).split())
        raise LoadError(f"compile: inductor does not work here ({said}); say compile: off")


def main() -> None:
    """The process that compiles: asked by a line of JSON on its stdin."""
    path, config, device_name, buckets, folder = json.load(sys.stdin)
    device = torch.device(device_name)
    spec = engine_spec(config, is_gpu=device.type == "cuda")
    from .program import prepared_module

    module = prepared_module(Path(path), spec, device)
    for bucket in buckets:
        target = _artefact(Path(folder), bucket)
        unfinished = target.with_name(f"unfinished-{os.getpid()}.pt2")
        with torch.no_grad():
            torch._inductor.aoti_compile_and_package(
                _exported(module, spec, device, bucket), package_path=str(unfinished)
            )
        unfinished.rename(target)


def _exported(module: Any, spec: EngineSpec, device: Any, bucket: int) -> Any:
    """The module for so many rows, or with free ones."""
    rows = (bucket or 2,) if spec.max_batch_size else ()
    sample = tuple(
        _empty(spec, (*rows, *(max(dim, 2) for dim in one.dims)), one.data_type, device) for one in spec.inputs
    )
    if bucket or not spec.max_batch_size:
        return torch.export.export(module, sample)
    free = torch.export.Dim("rows", min=1, max=max(spec.max_batch_size, 2))
    shapes = [
        {0: free} | {place: torch.export.Dim.AUTO for place, dim in enumerate(one.dims, 1) if dim < 0}
        for one in spec.inputs
    ]
    return torch.export.export(module, sample, dynamic_shapes=tuple(shapes))


def _empty(spec: EngineSpec, shape: tuple[int, ...], data_type: str, device: Any) -> Any:
    empty = torch.zeros(shape, dtype=network_type(data_type, spec.precision), device=device)
    is_image = spec.is_channels_last and len(shape) == 4 and empty.is_floating_point()
    return empty.to(memory_format=torch.channels_last) if is_image else empty
