"""An exported program (`torch.export.save`, 1/model.pt2) as a callable on a device, in its precision and layout."""

import ctypes
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from .config import EngineSpec
from .dtypes import FLOATS
from .fusing import fold_normalisation
from .parameters import TorchLoadError
from .trial import (
    FusionResult,
    ReferenceAnswers,
    compare_with_reference,
    fused_where_right,
    precision_remark,
    reference_answers,
    why_not_right,
)

_CORES_PER_SM = {(6, 0): 64, (7, 0): 64, (7, 2): 64, (7, 5): 64, (8, 0): 64}  # by compute capability
_DEFAULT_CORES_PER_SM = 128


def own_and_all(device: Any) -> tuple[int, int]:
    """SMs of (this process, the card); 0 for the card if NVML does not report them, as with MIG."""
    properties = torch.cuda.get_device_properties(device)
    cores = _core_count(f"GPU-{properties.uuid}")
    per_sm = _CORES_PER_SM.get((properties.major, properties.minor), _DEFAULT_CORES_PER_SM)
    return int(properties.multi_processor_count), cores // per_sm


def _core_count(uuid: str) -> int:
    """CUDA cores of the whole card by NVML; 0 if unknown."""
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        card, count = ctypes.c_void_p(), ctypes.c_uint()
        failed = (
            nvml.nvmlInit_v2()
            or nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(card))
            or nvml.nvmlDeviceGetNumGpuCores(card, ctypes.byref(count))
        )
    except (OSError, AttributeError):  # no driver, or one too old to report it
        return 0
    return 0 if failed else count.value


_TRIAL_THREADS = 2

# Network inputs (rows, *dims), floats in the spec's precision, on the device → outputs in config.pbtxt's order.
Program = Callable[[Sequence[Any]], tuple[Any, ...]]
Report = Callable[[str], object]


@dataclass(frozen=True)
class Loaded:
    """A loaded program. fused: "off", "fold", "cudnn" or "aot-inductor". note: a remark for the user, or empty."""

    program: Program
    fused: str
    note: str = ""
    trial: str = ""  # its SMs, and whether its results were compared with the CPU's; empty on a CPU


def load_program(path: Path, spec: EngineSpec, device: Any, report: Report = lambda _: None) -> Loaded:
    """The program on the device. Raises TorchLoadError, on a GPU also for wrong results.

    report: gets a line before what takes long.
    """
    module = _read(path, spec)
    if device.type != "cuda":
        return Loaded(
            _TupleProgram(_prepared(module, spec, device), len(spec.outputs)), "fold" if spec.is_fused else "off"
        )
    sms = own_and_all(device)
    truth, trial = _reference(module, spec, sms)
    right = truth or _on_card_in_fp32(module, spec, device)
    module = _prepared(module, spec, device)
    if truth is not None:
        trial = _compared(module, spec, device, truth, sms)
    if not spec.is_fused:
        return Loaded(_TupleProgram(module, len(spec.outputs)), "off", trial=trial)
    remark = precision_remark(module, spec, device, right) if right is not None else ""
    compiled = _compiled(module, path, spec, device, right, report)
    if compiled.is_fused:
        return Loaded(_TupleProgram(compiled.module, len(spec.outputs)), "aot-inductor", remark, trial)
    fused = fused_where_right(module, spec, device, right)
    notes = "; ".join(filter(None, (compiled.note, fused.note, remark)))
    program = _TupleProgram(fused.module, len(spec.outputs))
    return Loaded(program, "cudnn" if fused.is_fused else "fold", notes, trial)


def _on_card_in_fp32(module: Any, spec: EngineSpec, device: Any) -> ReferenceAnswers | None:
    """What fused and compiled programs are compared with; None if the card cannot compute it."""
    if not spec.is_fused or not all(one.is_fixed for one in spec.inputs):
        return None
    try:
        return reference_answers(move_program(module, torch.float32, device), spec, device)
    except Exception:  # noqa: BLE001  they are compared with the same precision then
        return None


def _compiled(
    module: Any, path: Path, spec: EngineSpec, device: Any, truth: ReferenceAnswers | None, report: Report
) -> FusionResult:
    """The module by AOTInductor, where that is asked for and answers right."""
    if not spec.is_compiled:
        return FusionResult(module)
    from .compiling import compiled_program  # loads the compiler

    try:
        candidate = compiled_program(module, spec, device, path, report)
        why = why_not_right(module, candidate, spec, device, truth)
    except Exception as error:  # noqa: BLE001  of the compiler, of any type
        why = _first_line(error)
    if why:
        return FusionResult(module, note=f"compiler: aot-inductor is not used here: {why}")
    return FusionResult(candidate, is_fused=True)


def prepared_module(path: Path, spec: EngineSpec, device: Any) -> Any:
    """The file's program on the device, with folded normalisation and the spec's precision and layout."""
    return _prepared(_read(path, spec), spec, device)


def _read(path: Path, spec: EngineSpec) -> Any:
    exported = read_program(path)
    check_inputs(exported, spec, path)
    module = exported.module(check_guards=False)
    if spec.is_fused:
        fold_normalisation(module)
    return module


def _reference(module: Any, spec: EngineSpec, sms: tuple[int, int]) -> tuple[ReferenceAnswers | None, str]:
    """Reference results for a process with limited SMs, or why there are none. sms: of this process, of the card."""
    if sms[0] == sms[1]:
        return None, f"all {sms[0]} SMs"
    if not spec.checks_answers:
        return None, _not_compared(sms, "check-answers is 0")
    if not all(one.is_fixed for one in spec.inputs):
        return None, _not_compared(sms, "an input has free dimensions")
    threads = torch.get_num_threads()
    torch.set_num_threads(min(threads, _TRIAL_THREADS))
    try:
        cpu = torch.device("cpu")
        return reference_answers(move_program(module, torch.float32, cpu), spec, cpu), ""
    except Exception as error:  # noqa: BLE001  the CPU may not support a program made for a GPU
        return None, _not_compared(sms, f"the CPU does not run it: {_first_line(error)}")
    finally:
        torch.set_num_threads(threads)


def _compared(module: Any, spec: EngineSpec, device: Any, truth: ReferenceAnswers, sms: tuple[int, int]) -> str:
    try:
        is_judged = compare_with_reference(module, spec, device, truth, sms)
    except TorchLoadError:
        raise
    except Exception as error:  # noqa: BLE001  served without a trial
        return _not_compared(sms, _first_line(error))
    return f"{_sm_share(sms)}, answers as on the CPU" if is_judged else _not_compared(sms, "no floats")


def _not_compared(sms: tuple[int, int], why: str) -> str:
    return f"{_sm_share(sms)}, answers not tried: {why}"


def _sm_share(sms: tuple[int, int]) -> str:
    return f"{sms[0]} of {sms[1] or 'unknown'} SMs"


def _prepared(module: Any, spec: EngineSpec, device: Any) -> Any:
    module = move_program(module, FLOATS[spec.precision], device)
    return module.to(memory_format=torch.channels_last) if spec.is_channels_last else module


def check_inputs(exported: Any, spec: EngineSpec, path: Path) -> None:
    """Raises TorchLoadError if the configuration has another number of inputs than the program."""
    count = len(exported.graph_signature.user_inputs)
    if count != len(spec.inputs):
        raise TorchLoadError(f"{path.name} takes {count} inputs and config.pbtxt names {len(spec.inputs)}")


def read_program(path: Path) -> Any:
    """The torch.export.ExportedProgram in a file. Raises TorchLoadError."""
    if not path.is_file():
        raise TorchLoadError(f"there is no {path.name} in {path.parent}: export one by torch.export.save")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # about weights in read-only memory, which are never written
            return torch.export.load(path)
    except Exception as error:  # noqa: BLE001  zip, pickle and schema errors of all kinds
        raise TorchLoadError(f"{path} is not a program of torch.export.save: {_first_line(error)}") from None


def move_program(module: Any, dtype: Any, device: Any) -> Any:
    """The module on the device, with all floats in dtype: weights, constants, and types and devices in its graph."""
    said = {torch.float32: dtype}

    def instead(word: Any) -> Any:
        return (
            device
            if isinstance(word, torch.device)
            else said.get(word, word)
            if isinstance(word, torch.dtype)
            else word
        )

    for node in list(module.graph.nodes):
        if node.target is torch.ops.aten._assert_tensor_metadata.default:
            module.graph.erase_node(node)
            continue
        node.args = torch.fx.node.map_aggregate(node.args, instead)
        node.kwargs = torch.fx.node.map_aggregate(node.kwargs, instead)
        if node.op == "get_attr":
            _move_constant(module, node.target, dtype, device)
    module.recompile()
    return module.to(device, dtype)


def _move_constant(module: Any, target: str, dtype: Any, device: Any) -> None:
    """Moves a tensor that is neither parameter nor buffer, which module.to does not move."""
    *path, name = target.split(".")
    owner = module.get_submodule(".".join(path))
    value = owner.__dict__.get(name)
    if isinstance(value, torch.Tensor):
        setattr(owner, name, value.to(device, dtype if value.dtype is torch.float32 else value.dtype))


class _TupleProgram:
    def __init__(self, module: Any, output_count: int) -> None:
        self.module = module
        self._output_count = output_count

    def __call__(self, inputs: Sequence[Any]) -> tuple[Any, ...]:
        answer = self.module(*inputs)
        outputs = tuple(answer) if isinstance(answer, (tuple, list)) else (answer,)
        if len(outputs) != self._output_count:
            raise TorchLoadError(
                f"the program returns {len(outputs)} tensors and config.pbtxt names {self._output_count}"
            )
        return outputs


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
