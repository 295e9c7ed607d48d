"""Opens a model on the GPU or the CPU: tries the configured precision, then FP32, then the CPU, and logs why."""

import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort

from .answers import Arrays, Reference, Run, check_outputs, reference_of
from .config import Config, OrtLoadError, OrtRequestError, Signature, read_signature
from .cuda_session import CudaRunner, CudaSession, DeviceThread, Forms, TensorForm, offsets, unbound_options
from .cudart import Cuda, CudaError, CudaRuntime, CudaUnavailable
from .half import converted_to_fp16
from .memory import is_out_of_memory
from .placement import (
    CUDA,
    TENSORRT_RTX,
    EngineFacts,
    GpuSettings,
    Precision,
    cuda_options,
    gpu_settings,
    has_nvidia_driver,
    unused_accelerators,
    why_no_cuda,
    why_no_graph,
)
from .rtx_session import InstalledRtx, TensorRtRtx, open_engine
from .session import CPU_ONLY, ORT_ERRORS, SEVERITY_FATAL, open_session, ort_error_text

_MEMORY_SHARE = 0.8  # of the GPU's free memory, for one session
_PARTLY_ON_CPU = "some of its operators run on the CPU"
_GRAPH_REASONS = {
    "control flow nodes": "the model has control flow (If, Loop or Scan)",
    "not been partitioned": _PARTLY_ON_CPU,
    "not been assigned": _PARTLY_ON_CPU,
}  # part of ONNX Runtime's text → reason
_UNCONVERTED = (Precision.FP32, Precision.INT8)
_one_at_a_time = threading.Lock()  # while a graph is captured, no other thread may allocate memory of the GPU

NewOptions = Callable[[], ort.SessionOptions]
OpenCuda = Callable[[int], Cuda]
SessionOf = Callable[[int], Any]  # by batch size


@dataclass(frozen=True)
class Opened:
    """session: ort.InferenceSession, or CudaSession with the same `run`. config: completed."""

    session: Any
    signature: Signature
    config: Config
    facts: EngineFacts


@dataclass(frozen=True)
class Placement:
    """Where an instance is configured to run. kind: Triton's, "AUTO", "GPU" or "CPU"."""

    kind: str
    device_id: int = 0


def open_model(
    path: Path,
    placement: Placement,
    new_options: NewOptions,
    complete: Callable[[Signature], Config],
    *,
    open_cuda: OpenCuda = CudaRuntime,
    rtx: TensorRtRtx = InstalledRtx(),  # noqa: B008 - without state
) -> Opened:
    """The model on the GPU if it is placed there and gives the CPU's outputs, else on the CPU.

    On the GPU by its TensorRT-RTX engine if one fits, else by CUDA.
    complete: the checked configuration for the file's tensors. Raises OrtLoadError.
    """
    session = open_session(path, new_options(), CPU_ONLY)
    signature = read_signature(session)
    config = complete(signature)
    on_cpu = Opened(session, signature, config, EngineFacts(fallbacks=unused_accelerators(config)))
    settings = gpu_settings(config)  # wrong values are errors on any machine
    if placement.kind == "CPU" or (placement.kind == "AUTO" and not has_nvidia_driver()):
        return on_cpu
    on_cpu, engine = _with_engine(path, placement, new_options, on_cpu, rtx)
    if engine is not None:
        return engine
    why = why_no_cuda(ort.get_available_providers(), _installed())
    if why:
        return _instead(on_cpu, placement, why)
    opener = _GpuOpener(path, settings, on_cpu, new_options)
    thread = DeviceThread(path.parent.parent.name)
    try:
        with _one_at_a_time:
            return thread.call(lambda: opener.open(open_cuda(placement.device_id), thread))
    except (CudaUnavailable, CudaError, OrtLoadError, OrtRequestError) as error:
        why = str(error)
    thread.close(opener.close)
    thread.join()
    return _instead(on_cpu, placement, why)


def _with_engine(
    path: Path, placement: Placement, new_options: NewOptions, on_cpu: Opened, rtx: TensorRtRtx
) -> tuple[Opened, Opened | None]:
    """(on_cpu, the model by its engine), or (on_cpu with the reason, None)."""
    settings, config = gpu_settings(on_cpu.config), on_cpu.config
    try:
        session = open_engine(path, placement.device_id, settings.precision, new_options, rtx)
        if session is None:
            return on_cpu, None
        if settings.checks_answers:
            reference, has_batch = _reference(path, on_cpu), int(config.get("max_batch_size", 0)) > 0
            run = _outputs_of(session, [entry["name"] for entry in config["output"]])
            for row_count in dict.fromkeys((reference.row_count, settings.buckets[-1])):
                check_outputs(run, reference, settings.precision, row_count, has_batch=has_batch)
    except (OrtLoadError, OrtRequestError) as error:
        why = f"its TensorRT-RTX engine is not used: {error}"
        return replace(on_cpu, facts=EngineFacts(fallbacks=(*on_cpu.facts.fallbacks, why))), None
    facts = replace(on_cpu.facts, provider=TENSORRT_RTX, device_id=placement.device_id)
    return on_cpu, replace(on_cpu, session=session, facts=replace(facts, precision=settings.precision.value))


def _instead(on_cpu: Opened, placement: Placement, why: str) -> Opened:
    sentence = f"the model runs on the CPU instead of GPU {placement.device_id}: {why}"
    return replace(on_cpu, facts=EngineFacts(fallbacks=(*on_cpu.facts.fallbacks, sentence)))


def _installed() -> dict[str, str]:
    found = {}
    for name in ("onnxruntime", "onnxruntime-gpu"):
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


@dataclass(frozen=True)
class _Attempt:
    source: Path | bytes
    settings: GpuSettings

    @property
    def buckets(self) -> tuple[int, ...]:
        return self.settings.buckets

    @property
    def precision(self) -> Precision:
        return self.settings.precision


class _GpuOpener:
    """Opens one model on one GPU, in the session's thread."""

    def __init__(self, path: Path, settings: GpuSettings, on_cpu: Opened, new_options: NewOptions) -> None:
        self._path = path
        self._settings = settings
        self._on_cpu = on_cpu
        self._new_options = new_options
        self._has_batch = int(on_cpu.config.get("max_batch_size", 0)) > 0
        self._obstacle = why_no_graph(on_cpu.config, on_cpu.signature)
        self._reference: Reference | None = None
        self._cuda: Cuda | None = None
        self.fallbacks: list[str] = []

    def close(self) -> None:
        """Frees the GPU's memory after a failure."""
        if self._cuda is not None:
            self._cuda.close()

    def open(self, cuda: Cuda, thread: DeviceThread) -> Opened:
        """Raises OrtLoadError, OrtRequestError, CudaError if no precision serves."""
        self._cuda = cuda
        self._reference = _reference(self._path, self._on_cpu) if self._settings.checks_answers else None
        attempts = list(self._attempts())
        for number, attempt in enumerate(attempts, start=1):
            try:
                runner, graph_sizes = self._runner(cuda, attempt)
            except (OrtLoadError, OrtRequestError, CudaError) as error:
                if number == len(attempts) or cuda.is_lost():
                    raise
                self.fallbacks.append(_why_not_used(attempt.settings, attempts[number].settings, error))
                continue
            fallbacks = (*self._on_cpu.facts.fallbacks, *self.fallbacks)
            facts = EngineFacts(CUDA, cuda.device_id, attempt.precision.value, graph_sizes, fallbacks)
            return replace(self._on_cpu, session=CudaSession(runner, cuda, thread), facts=facts)
        raise OrtLoadError("no precision serves")  # not reached: the last attempt raises or returns

    def _attempts(self) -> Iterator[_Attempt]:
        """The configured precision, then FP32, then FP32 with the provider's default kernels."""
        settings = self._settings
        if settings.precision not in _UNCONVERTED:
            if (source := self._source()) is not None:
                yield _Attempt(source, settings)
            settings = replace(settings, precision=Precision.FP32)
        yield _Attempt(self._path, settings)
        if settings != settings.plain:
            yield _Attempt(self._path, settings.plain)

    def _source(self) -> Path | bytes | None:
        """The model in the configured precision; None if it cannot be converted or its outputs cannot be compared."""
        wished, reference = self._settings.precision, self._reference
        if reference is not None and reference.why_not:
            why = f"its outputs cannot be compared, because {reference.why_not} (check-answers: 0 uses it unchecked)"
        elif wished is Precision.TF32:
            return self._path
        else:
            try:
                return converted_to_fp16(self._path)
            except OrtLoadError as error:
                why = str(error)
        self.fallbacks.append(f"precision {wished.value} is not used: {why}")
        return None

    def _runner(self, cuda: Cuda, attempt: _Attempt) -> tuple[CudaRunner, tuple[int, ...]]:
        """(runner, sizes of its graphs). If memory lacks, with smaller batches; without graphs if they fail."""
        why = self._obstacle
        while self._settings.has_graphs and not why:
            try:
                return self._captured(cuda, attempt)
            except (OrtLoadError, OrtRequestError, CudaError) as error:
                if cuda.is_lost():
                    raise
                if _lacks_memory(error) and len(attempt.buckets) > 1:
                    attempt = self._smaller(attempt)
                else:
                    why = f"no CUDA graph: {_graph_reason(str(error))}"
        session = self._session(cuda, attempt, has_graphs=False)
        forms = None if self._obstacle else self._forms(lambda _: session, attempt.buckets[-1])
        runner = CudaRunner(lambda _: session, cuda, forms, attempt.buckets)
        drawn = self._reference.row_count if self._reference is not None else 0
        for size in dict.fromkeys((drawn, *(attempt.buckets if self._has_batch else ()))):
            self._compare(runner, attempt.precision, size)
        if self._settings.has_graphs:
            self.fallbacks.append(why)
        return runner, ()

    def _smaller(self, attempt: _Attempt) -> _Attempt:
        smaller = replace(attempt, settings=replace(attempt.settings, buckets=attempt.buckets[:-1]))
        self.fallbacks.append(
            f"batches of more than {smaller.buckets[-1]} run in parts: the GPU's memory is too small for more"
        )
        return smaller

    def _captured(self, cuda: Cuda, attempt: _Attempt) -> tuple[CudaRunner, tuple[int, ...]]:
        """By one session, or by one per batch size.

        The second keeps operators on the GPU that compute shapes. And ONNX Runtime 1.31 frees buffers of a convolution
        when its input has another size, which graphs of the earlier size still use (ResNet-50 in FP16: NaN).
        """
        try:
            session = self._session(cuda, attempt, has_graphs=True)
            return self._with_graphs(cuda, attempt, lambda _: session)
        except OrtLoadError as error:
            if cuda.is_lost() or _lacks_memory(error) or not self._may_load_for_each_size(cuda, attempt):
                raise
        session = None
        sessions = {size: self._session(cuda, attempt, has_graphs=True, rows=size) for size in attempt.buckets}
        return self._with_graphs(cuda, attempt, sessions.__getitem__)

    def _may_load_for_each_size(self, cuda: Cuda, attempt: _Attempt) -> bool:
        weights = self._path.stat().st_size * len(attempt.buckets)
        return bool(self._batch_names()) and weights < cuda.free_bytes() * (1 - _MEMORY_SHARE)

    def _batch_names(self) -> set[str]:
        """Names of the inputs' first dimension; empty without a batch dimension, or if one has no name."""
        firsts = [node.shape[0] if node.shape else None for node in self._on_cpu.session.get_inputs()]
        is_named = all(isinstance(first, str) and first for first in firsts)
        return {str(first) for first in firsts} if self._has_batch and is_named else set()

    def _with_graphs(self, cuda: Cuda, attempt: _Attempt, session_of: SessionOf) -> tuple[CudaRunner, tuple[int, ...]]:
        forms = self._forms(session_of, attempt.buckets[-1])
        if forms is None:
            raise OrtLoadError("the shapes of its outputs depend on the values of its inputs")
        needed = sum(offsets(side, attempt.buckets[-1])[1] for side in (forms.inputs, forms.outputs))
        if needed > cuda.free_bytes() * (1 - _MEMORY_SHARE):
            raise OrtLoadError(
                f"failed to allocate memory: {needed >> 20} MiB of inputs and outputs of a batch of "
                f"{attempt.buckets[-1]}, and {cuda.free_bytes() >> 20} MiB are free"
            )
        runner = CudaRunner(session_of, cuda, forms, attempt.buckets)
        try:
            runner.capture(attempt.buckets)
        except ORT_ERRORS as error:
            raise OrtLoadError(ort_error_text(error)) from None
        up_and_down = (*attempt.buckets, *attempt.buckets[-2::-1])  # a graph may write what an earlier one reads
        for size in up_and_down:
            self._compare(runner, attempt.precision, size)
        return runner, attempt.buckets

    def _session(self, cuda: Cuda, attempt: _Attempt, *, has_graphs: bool, rows: int | None = None) -> Any:
        """rows: fixes the batch size."""
        cuda.free_memory()  # of an earlier attempt, whose session is gone
        options = cuda_options(
            attempt.settings,
            self._on_cpu.config,
            device_id=cuda.device_id,
            has_graphs=has_graphs,
            stream=cuda.stream,
            memory_limit_bytes=int(cuda.free_bytes() * _MEMORY_SHARE),
        )
        ort.set_default_logger_severity(SEVERITY_FATAL)  # what fails here is in the facts, by one sentence
        session_options = self._new_options()
        session_options.log_severity_level = SEVERITY_FATAL
        for name in self._batch_names() if rows is not None else ():
            session_options.add_free_dimension_override_by_name(name, rows)
        session = open_session(attempt.source, session_options, [("CUDAExecutionProvider", options), *CPU_ONLY])
        if session.get_providers() == CPU_ONLY:
            raise OrtLoadError("ONNX Runtime cannot load its CUDA provider: a library of CUDA 13 or cuDNN 9 is missing")
        return session

    def _forms(self, session_of: SessionOf, rows: int) -> Forms | None:
        """The tensors, if outputs have the batch's rows and otherwise the same shape for each batch size."""
        config = self._on_cpu.config
        forms = Forms(tuple(map(_input_form, config["input"])), (), self._has_batch)
        names = [entry["name"] for entry in config["output"]]
        outputs = []
        for size in dict.fromkeys((rows, 1)):
            feed = {form.name: np.zeros(forms.shape(form, size), form.dtype) for form in forms.inputs}
            try:
                outputs.append(session_of(size).run(names, feed, unbound_options()))
            except ORT_ERRORS as error:
                raise OrtLoadError(ort_error_text(error)) from None
        largest, smallest = outputs[0], outputs[-1]
        if not self._has_batch:
            rest = [array.shape for array in largest]
        elif all(a.shape[:1] == (rows,) and a.shape[1:] == b.shape[1:] for a, b in zip(largest, smallest, strict=True)):
            rest = [array.shape[1:] for array in largest]
        else:
            return None
        found = (TensorForm(name, array.dtype, row) for name, array, row in zip(names, largest, rest, strict=True))
        return replace(forms, outputs=tuple(found))

    def _compare(self, runner: CudaRunner, precision: Precision, row_count: int) -> None:
        """Raises OrtLoadError if a batch of that size has other outputs than the reference."""
        if self._reference is not None:
            run = _outputs_of(runner, [*self._reference.outputs])
            check_outputs(run, self._reference, precision, row_count, has_batch=self._has_batch)


def _reference(path: Path, on_cpu: Opened) -> Reference:
    run = _outputs_of(on_cpu.session, [entry["name"] for entry in on_cpu.config["output"]])
    return reference_of(on_cpu.config, path, run)


def _outputs_of(session: Any, names: list[str]) -> Run:
    """A function of a session's inputs, which raises OrtRequestError."""

    def run(inputs: Arrays) -> Arrays:
        try:
            return dict(zip(names, session.run(names, inputs), strict=True))
        except ORT_ERRORS as error:
            raise OrtRequestError(ort_error_text(error), is_client_error=False) from None

    return run


def _input_form(entry: dict[str, Any]) -> TensorForm:
    dims = (entry.get("reshape") or {}).get("shape", entry.get("dims", []))
    kind = str(entry["data_type"]).removeprefix("TYPE_")
    names = {"FP16": "float16", "FP32": "float32", "FP64": "float64"}
    return TensorForm(entry["name"], np.dtype(names.get(kind, kind.lower())), tuple(map(int, dims)))


def _why_not_used(failed: GpuSettings, following: GpuSettings, error: Exception) -> str:
    if failed.precision is following.precision:
        return f"channels-last and fuse are not used in {failed.precision.value}: {error}"
    return f"precision {failed.precision.value} is not used: {error}"


def _lacks_memory(error: Exception) -> bool:
    return is_out_of_memory(error) or "out of memory" in str(error)


def _graph_reason(text: str) -> str:
    return next((reason for part, reason in _GRAPH_REASONS.items() if part in text), text)
