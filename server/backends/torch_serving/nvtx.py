"""Ranges with names in a profiler's timeline (Nsight Systems, Nsight Compute): `with stage("decode"):`.

They cost nothing unless PENSTOCK_NVTX=1, which `penstock up --profile` sets.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

VARIABLE = "PENSTOCK_NVTX"
_NOTHING = nullcontext()

Stage = Callable[[str], AbstractContextManager[None]]


def stages(environment: "os._Environ[str] | dict[str, str]" = os.environ) -> Stage:
    """How a stage is marked here: in the profiler's timeline where that is asked for and torch can, else not at all."""
    if environment.get(VARIABLE) != "1":
        return _unmarked
    try:
        import torch

        torch.cuda.nvtx.range_push("penstock")
        torch.cuda.nvtx.range_pop()
    except (ImportError, RuntimeError, AttributeError):  # a torch without CUDA has no NVTX
        return _unmarked

    @contextmanager
    def marked(name: str) -> Iterator[None]:
        torch.cuda.nvtx.range_push(name)
        try:
            yield
        finally:
            torch.cuda.nvtx.range_pop()

    return marked


def _unmarked(name: str) -> AbstractContextManager[None]:
    del name
    return _NOTHING


stage: Stage = stages()
