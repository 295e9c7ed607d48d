"""Opens a model instance on its device, runs numpy rows through it, and detects a lost CUDA context."""

import ctypes
import os
import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from .config import EngineSpec, thread_percentage
from .dtypes import WIRE_TYPES
from .instance import Instance, PictureInput, PictureRunner, TorchRequest
from .parameters import Config, TorchLoadError, TorchRequestError
from .program import Loaded, load_program
from .runners import EagerRunner, GraphRunner
from .staging import CopyRows, PinnedRegions, PitchedRows


def array_runner(instance: Instance, spec: EngineSpec) -> Callable[[dict[str, Any]], dict[str, Any] | str]:
    """A function from inputs by name to outputs by name, or to the reason of a failure."""

    def run(inputs: dict[str, Any]) -> dict[str, Any] | str:
        try:
            (outcome,) = instance.answer([_request(inputs, spec)])
        except (RuntimeError, ValueError, TypeError) as error:  # the program's own errors, reported as for a request
            return f"{type(error).__name__}: {error}"
        if isinstance(outcome, TorchRequestError):
            return str(outcome)
        return {one.name: _array(rows) for one, rows in zip(spec.outputs, outcome, strict=True)}

    return run


def _request(inputs: dict[str, Any], spec: EngineSpec) -> TorchRequest:
    if spec.pictures is not None:
        return TorchRequest(pictures=tuple(inputs[spec.inputs[0].name].ravel().tolist()))
    return TorchRequest(tuple(torch.from_numpy(inputs[one.name]).to(WIRE_TYPES[one.data_type]) for one in spec.inputs))


def _array(rows: Any) -> Any:
    """Copies, because the next run overwrites the rows. numpy has no BF16."""
    return (rows.float() if rows.dtype is torch.bfloat16 else rows.clone()).numpy()


_EXIT_DELAY_S = 0.5  # lets the faulty batch's responses reach Triton
_BROKEN_CONTEXT_EXIT = 70
THREAD_PERCENTAGE = "CUDA_MPS_ACTIVE_THREAD_PERCENTAGE"
# A cuBLAS workspace on Hopper is 32 MiB by default: 1.5 GiB for 47 processes.
_SMALL_WORKSPACE = ":4096:2:16:8"


@dataclass(frozen=True)
class InstanceDevice:
    """Triton's placement of an instance."""

    is_gpu: bool
    device_id: int
    config: Config


@dataclass(frozen=True)
class OpenedInstance:
    """An instance, a remark for the user, and its log line."""

    instance: Instance
    note: str
    facts: str
    enter_thread: Callable[[], object]  # call it first in every other thread that uses the instance: sets CUDA's device


@dataclass(frozen=True)
class OpenedRunner:
    """A loaded program. note, facts: see OpenedInstance."""

    runner: PictureRunner
    device: Any
    note: str
    facts: str


def open_runner(
    file: Path,
    spec: EngineSpec,
    placement: InstanceDevice,
    report: Callable[[str], object] = lambda _: None,
    *,
    slots: int,  # of a GPU's runs whose outputs are kept; with two, copies overlap with runs
    is_lent: bool = False,
) -> OpenedRunner:
    """The program in a file, on its device. report: gets a line before what takes long. Raises TorchLoadError."""
    device = _device(placement, spec)
    loaded = load_program(file, spec, device, report)
    runner: PictureRunner
    if spec.has_cuda_graphs:
        runner = GraphRunner(loaded.program, spec, device, pinned=pinned_regions(), slots=slots, is_lent=is_lent)
    else:
        runner = EagerRunner(loaded.program, spec, device)
    return OpenedRunner(runner, device, loaded.note, _log_fields(spec, device, loaded))


def open_instance(
    folder: Path, spec: EngineSpec, placement: InstanceDevice, report: Callable[[str], object] = lambda _: None
) -> OpenedInstance:
    """The instance of the program in a version's folder. report: gets a line before what takes long.

    Raises TorchLoadError.
    """
    slots = spec.batches_in_flight  # with two, execute returns before the run has ended
    opened = open_runner(folder / spec.file_name, spec, placement, report, slots=slots, is_lent=slots > 1)
    instance = Instance(spec, opened.runner, _picture_input(spec, opened))
    enter_thread = partial(torch.cuda.set_device, opened.device) if placement.is_gpu else lambda: None
    return OpenedInstance(instance, opened.note, opened.facts, enter_thread)


def _device(placement: InstanceDevice, spec: EngineSpec) -> Any:
    if not placement.is_gpu:
        torch.set_num_threads(max(1, available_cores() // instance_count(placement.config)))
        return torch.device("cpu")
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", _SMALL_WORKSPACE)
    if percentage := thread_percentage(spec, os.environ):
        os.environ[THREAD_PERCENTAGE] = str(percentage)  # CUDA reads it at this process's first call
    if not torch.cuda.is_available():
        raise TorchLoadError("the instance is on a GPU and PyTorch sees none: KIND_CPU runs it on the CPU")
    device = torch.device("cuda", placement.device_id)
    torch.cuda.set_device(device)
    return device


def _picture_input(spec: EngineSpec, opened: OpenedRunner) -> PictureInput | None:
    if spec.pictures is None:
        return None
    from .pictures import PictureReader  # imports torchvision, a second that only these models need

    return PictureInput(PictureReader(spec.pictures, opened.device), opened.runner)


def _log_fields(spec: EngineSpec, device: Any, loaded: Loaded) -> str:
    how = "cuda-graphs" if spec.has_cuda_graphs else "eager"
    return (
        f"device={device} torch={torch.__version__} precision={spec.precision.value} run={how} "
        f"channels_last={int(spec.is_channels_last)} buckets={';'.join(map(str, spec.buckets))} "
        f"fuse={loaded.fused} wait={'block' if spec.waits_blocking else 'spin'} in-flight={spec.batches_in_flight}"
        f"{' trial=' * bool(loaded.trial)}{loaded.trial}"
    )


def instance_count(config: Config) -> int:
    """Instances of all groups on all their GPUs."""
    groups = config.get("instance_group") or []
    return max(1, sum(int(group.get("count", 1)) * max(1, len(group.get("gpus") or [])) for group in groups))


def available_cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def is_broken(error: BaseException) -> bool:
    """Whether the CUDA context is lost, so that even synchronizing fails."""
    if not isinstance(error, RuntimeError) or not torch.cuda.is_initialized():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


def exit_after(seconds: float = _EXIT_DELAY_S) -> None:
    """Ends the process without unwinding, because the driver may not answer."""
    threading.Timer(seconds, os._exit, (_BROKEN_CONTEXT_EXIT,)).start()


class _Copy2d(ctypes.Structure):
    """The driver's CUDA_MEMCPY2D_v2."""

    _fields_ = (
        ("src_x_bytes", ctypes.c_size_t),
        ("src_y", ctypes.c_size_t),
        ("src_memory_type", ctypes.c_uint),
        ("src_host", ctypes.c_void_p),
        ("src_device", ctypes.c_uint64),
        ("src_array", ctypes.c_void_p),
        ("src_pitch", ctypes.c_size_t),
        ("dst_x_bytes", ctypes.c_size_t),
        ("dst_y", ctypes.c_size_t),
        ("dst_memory_type", ctypes.c_uint),
        ("dst_host", ctypes.c_void_p),
        ("dst_device", ctypes.c_uint64),
        ("dst_array", ctypes.c_void_p),
        ("dst_pitch", ctypes.c_size_t),
        ("width_bytes", ctypes.c_size_t),
        ("height", ctypes.c_size_t),
    )


_HOST, _DEVICE = 1, 2  # CUmemorytype


def _row_copier(driver: ctypes.CDLL) -> CopyRows:
    """Copies page-locked rows by one call of the driver, in the calling thread's CUDA context."""
    copy = driver.cuMemcpy2DAsync_v2
    copy.argtypes = (ctypes.POINTER(_Copy2d), ctypes.c_void_p)

    def copy_rows(target: int, rows: PitchedRows, stream: int) -> bool:
        description = _Copy2d(
            src_memory_type=_HOST,
            src_host=rows.address,
            src_pitch=rows.pitch,
            dst_memory_type=_DEVICE,
            dst_device=target,
            dst_pitch=rows.width,
            width_bytes=rows.width,
            height=rows.count,
        )
        return int(copy(ctypes.byref(description), stream)) == 0

    return copy_rows


def pinned_regions() -> PinnedRegions:
    """Page-locks memory for this process's CUDA context. Not by torch, whose next kernel would report a failure."""
    driver = ctypes.CDLL("libcuda.so.1")
    lock, unlock = driver.cuMemHostRegister_v2, driver.cuMemHostUnregister
    lock.argtypes, unlock.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_uint), (ctypes.c_void_p,)
    return PinnedRegions(
        lambda address, size: lock(address, size, 0) == 0, lambda address, _: unlock(address), copy=_row_copier(driver)
    )
