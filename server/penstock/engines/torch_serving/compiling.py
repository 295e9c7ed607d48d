"""Programs compiled by AOTInductor: one file for all batch sizes, in a cache that is shared by processes.

Compiling takes a minute or more. It needs a C++ compiler and the Triton language. Loading takes seconds.
"""

import hashlib
import os
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch._inductor

from .config import EngineSpec
from .package_cache import cache_folder, package_of
from .trial import drawn_rows, sample_of

Report = Callable[[str], object]


def compiled_program(module: Any, spec: EngineSpec, device: Any, file: Path, report: Report) -> Any:
    """The module compiled for the device, from the cache if it is there. Takes inputs, returns a list.

    module: prepared, of the program in `file`. report: gets a line before a compilation. Raises OSError, and errors of
    the compiler, of any type.
    """
    key = cache_key(file, spec, device)
    with package_of(cache_folder(), key, lambda path: _compile(module, spec, device, path), report) as package:
        return torch._inductor.aoti_load_package(str(package), run_single_threaded=True, device_index=_index(device))


def cache_key(file: Path, spec: EngineSpec, device: Any) -> str:
    """Names the compiled file: of the program, what it is compiled for, and by what."""
    digest = hashlib.sha256()
    with file.open("rb") as source:
        while block := source.read(1 << 20):
            digest.update(block)
    card = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    made_for = (
        (card.name, card.major, card.minor, card.multi_processor_count) if card is not None else "CPU",
        (torch.__version__, torch.version.cuda, torch.backends.cudnn.version()),
        (spec.precision.value, spec.is_channels_last, spec.is_fused, spec.buckets[-1], spec.inputs),
    )
    digest.update(repr(made_for).encode())
    return digest.hexdigest()[:40]


def _compile(module: Any, spec: EngineSpec, device: Any, path: Path) -> None:
    os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "1")  # else each load tries the compiler for a minute
    is_batched = spec.max_batch_size > 1
    rows = torch.export.Dim("rows", min=1, max=spec.buckets[-1])
    sample = tuple(sample_of(spec, device, drawn_rows(spec, 2 if is_batched else 1), 2 if is_batched else 1))
    shapes = tuple({0: rows} for _ in sample) if is_batched else None
    own = os.environ.get("TORCHINDUCTOR_CACHE_DIR")
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        os.environ["TORCHINDUCTOR_CACHE_DIR"] = scratch  # removed: inductor's own cache has no limit
        try:
            with torch.no_grad():
                exported = torch.export.export(module, sample, dynamic_shapes=shapes)
                torch._inductor.aoti_compile_and_package(exported, package_path=str(path))
        finally:
            if own is None:
                del os.environ["TORCHINDUCTOR_CACHE_DIR"]
            else:
                os.environ["TORCHINDUCTOR_CACHE_DIR"] = own


def _index(device: Any) -> int:
    return -1 if device.index is None else int(device.index)
