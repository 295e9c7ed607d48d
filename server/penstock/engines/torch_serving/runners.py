"""Runs programs for batches of any size: eagerly, or on a GPU by one CUDA graph per bucket."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from .config import EngineSpec, TorchTensorSpec, bucket_for
from .dtypes import WIRE_TYPES, network_type
from .instance import PendingRun
from .parameters import TorchLoadError
from .program import Program
from .staging import PinnedRegions

_WARM_UP_RUNS = 2  # before a capture: cuDNN and cuBLAS select, load and allocate


class EagerRunner:
    """Runs operator by operator on the actual rows: on the CPU, and for inputs with variable dimensions."""

    def __init__(self, program: Program, spec: EngineSpec, device: Any) -> None:
        self._program = program
        self._spec = spec
        self._device = device
        self._pictures: Any = None
        if all(one.is_fixed for one in spec.inputs):
            with torch.inference_mode():
                check_answers(spec, program([_empty_input(one, 1, spec, device) for one in spec.inputs]), 1)

    def begin(self, columns: Sequence[Sequence[Any]], rows: int) -> PendingRun:
        del rows
        with torch.inference_mode():
            inputs = [self._input(spec, parts) for spec, parts in zip(self._spec.inputs, columns, strict=True)]
            return self._run(inputs)

    def picture_input(self, rows: int) -> Any:
        spec = self._spec.inputs[0]
        self._pictures = _empty_input(spec, rows, self._spec, self._device)
        return self._pictures

    def begin_pictures(self, rows: int) -> PendingRun:
        with torch.inference_mode():
            return self._run([self._pictures[:rows]])

    def _input(self, spec: TorchTensorSpec, parts: Sequence[Any]) -> Any:
        merged = parts[0] if len(parts) == 1 else torch.cat([part.to(self._device) for part in parts])
        dtype = network_type(spec.data_type, self._spec.precision)
        if self._spec.is_channels_last and merged.dim() == 4 and dtype.is_floating_point:
            return merged.to(self._device, dtype, memory_format=torch.channels_last)
        return merged.to(self._device, dtype)

    def _run(self, inputs: Sequence[Any]) -> PendingRun:
        answers = self._program(inputs)
        wire = [WIRE_TYPES[spec.data_type] for spec in self._spec.outputs]
        return FinishedRun(tuple(one.to("cpu", dtype).contiguous() for one, dtype in zip(answers, wire, strict=True)))


@dataclass(frozen=True)
class FinishedRun:
    """A completed run."""

    answers: tuple[Any, ...]

    def outputs(self) -> tuple[Any, ...]:
        return self.answers

    def memory(self) -> tuple[Any, ...]:
        return self.answers


class GraphRunner:
    """Runs one CUDA graph per bucket, on one stream, in static buffers shared by all buckets.

    A batch goes through a slot's staging buffer into the network's input, and its outputs to the slot's page-locked
    memory. With several slots, copies of one batch overlap with the run of another.
    """

    def __init__(
        self,
        program: Program,
        spec: EngineSpec,
        device: Any,
        *,
        pinned: PinnedRegions,
        slots: int,
        is_lent: bool = False,
    ) -> None:
        """Captures all buckets. is_lent: device memory is only valid until `begin` returns. Raises TorchLoadError."""
        self._program = program
        self._spec = spec
        self._device = device
        self._pinned = pinned
        self._is_lent = is_lent
        self._stream = torch.cuda.Stream(device)
        self._copies = torch.cuda.Stream(device) if slots > 1 else self._stream
        with torch.inference_mode():
            self._inputs = [_empty_input(one, spec.buckets[-1], spec, device) for one in spec.inputs]
            self._outputs: list[Any] = []
            self._graphs = self._capture_all()
            self._slots = [_Slot(spec, self._outputs, device) for _ in range(slots)]
        self._next = 0
        torch.cuda.set_stream(self._stream)

    def begin(self, columns: Sequence[Sequence[Any]], rows: int) -> PendingRun:
        slot = self._slots[self._next]
        with torch.inference_mode():
            for number, parts in enumerate(columns):
                self._fill(slot, number, parts, rows)
            pending = self._replay(rows)
        if self._is_lent and any(part.is_cuda for parts in columns for part in parts):
            slot.copied.synchronize()  # last: the copies have usually ended while the run was launched
        return pending

    def picture_input(self, rows: int) -> Any:
        return self._rows(self._inputs[0], rows)

    def begin_pictures(self, rows: int) -> PendingRun:
        with torch.inference_mode():
            return self._replay(rows)

    def _rows(self, tensor: Any, rows: int) -> Any:
        return tensor[:rows] if self._spec.max_batch_size else tensor

    def _fill(self, slot: "_Slot", number: int, parts: Sequence[Any], rows: int) -> None:
        """Casts host memory and lent device memory through the staging buffer; other device memory part by part."""
        target = self._inputs[number]
        has_device_memory = any(part.is_cuda for part in parts)
        if has_device_memory and not self._is_lent:
            self._stage(target, parts)
            return
        staged = slot.staging[number]
        if self._copies is self._stream:
            self._stage(staged, parts)
        else:
            with torch.cuda.stream(self._copies):
                self._stage(staged, parts)
                slot.copied.record(self._copies)
            self._stream.wait_event(slot.copied)
        self._rows(target, rows).copy_(self._rows(staged, rows))

    def _stage(self, target: Any, parts: Sequence[Any]) -> None:
        if len(parts) > 1 and self._gather(target, parts):
            return
        begin = 0
        for part in parts:
            if not part.is_cuda:
                self._pinned.pin(part.data_ptr())
            count = part.shape[0] if self._spec.max_batch_size else 1
            where = target[begin : begin + count] if self._spec.max_batch_size else target
            where.copy_(part, non_blocking=True)
            begin += count

    def _gather(self, target: Any, parts: Sequence[Any]) -> bool:
        """Whether all parts were copied at once: they are alike, and lie page-locked at equal distances."""
        first = parts[0]
        if first.dtype != target.dtype or first.shape[1:] != target.shape[1:] or not target.is_contiguous():
            return False
        if any(part.is_cuda or part.shape != first.shape or not part.is_contiguous() for part in parts):
            return False
        stream = torch.cuda.current_stream(self._device).cuda_stream
        return self._pinned.gather(target.data_ptr(), [part.data_ptr() for part in parts], first.nbytes, stream)

    def _replay(self, rows: int) -> PendingRun:
        """Advances to the next slot only at the end, so that a failure leaves the other slot's outputs unchanged."""
        slot = self._slots[self._next]
        self._graphs[bucket_for(rows, self._spec.buckets)].replay()
        for output, host in zip(self._outputs, slot.host, strict=True):
            self._rows(host, rows).copy_(self._rows(output, rows), non_blocking=True)
        slot.done.record(self._stream)
        self._next = (self._next + 1) % len(self._slots)
        return _ReplayedRun(slot.done, tuple(self._rows(host, rows) for host in slot.host))

    def _capture_all(self) -> dict[int, Any]:
        """The largest first, because the smaller ones reuse its memory."""
        pool = torch.cuda.graph_pool_handle()
        graphs = {bucket: self._capture(bucket, pool) for bucket in reversed(self._spec.buckets)}
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        return graphs

    def _capture(self, bucket: int, pool: Any) -> Any:
        inputs = [self._rows(one, bucket) for one in self._inputs]
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for _ in range(_WARM_UP_RUNS):
                answers = self._program(inputs)
            self._outputs = self._outputs or self._new_outputs(answers, bucket)
        del answers
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode="thread_local"):
            for output, answer in zip(self._outputs, self._program(inputs), strict=True):
                self._rows(output, bucket).copy_(answer)
        return graph

    def _new_outputs(self, answers: Sequence[Any], bucket: int) -> list[Any]:
        check_answers(self._spec, answers, bucket)
        return [
            torch.zeros(answer.shape, dtype=WIRE_TYPES[spec.data_type], device=self._device)
            for spec, answer in zip(self._spec.outputs, answers, strict=True)
        ]


def check_answers(engine: EngineSpec, answers: Sequence[Any], rows: int) -> None:
    """Raises TorchLoadError if the outputs do not fit config.pbtxt."""
    for spec, answer in zip(engine.outputs, answers, strict=True):
        batch = (rows,) if engine.max_batch_size else ()
        shape = tuple(answer.shape)
        free = tuple(said if said > 0 else found for said, found in zip(spec.dims, shape[len(batch) :], strict=False))
        if shape[: len(batch)] != batch or shape[len(batch) :] != free or len(free) != len(spec.dims):
            raise TorchLoadError(
                f"output '{spec.name}' of the program has shape {list(shape)} for {rows} rows; config.pbtxt says "
                f"{[*batch, *spec.dims]}"
            )


class _Slot:
    def __init__(self, spec: EngineSpec, outputs: Sequence[Any], device: Any) -> None:
        count = (spec.buckets[-1],) if spec.max_batch_size else ()
        self.staging = [
            None if spec.pictures else torch.empty((*count, *one.dims), dtype=WIRE_TYPES[one.data_type], device=device)
            for one in spec.inputs
        ]
        self.host = [torch.empty(one.shape, dtype=one.dtype, pin_memory=True) for one in outputs]
        self.copied = torch.cuda.Event(blocking=spec.waits_blocking)
        self.done = torch.cuda.Event(blocking=spec.waits_blocking)


@dataclass(frozen=True)
class _ReplayedRun:
    done: Any
    host: tuple[Any, ...]

    def outputs(self) -> tuple[Any, ...]:
        self.done.synchronize()
        return self.host

    def memory(self) -> tuple[Any, ...]:
        return self.host


def _empty_input(spec: TorchTensorSpec, rows: int, engine: EngineSpec, device: Any) -> Any:
    shape = (rows, *spec.dims) if engine.max_batch_size else spec.dims
    dtype = network_type(spec.data_type, engine.precision)
    is_image = engine.is_channels_last and len(shape) == 4 and dtype.is_floating_point
    empty = torch.zeros(shape, dtype=dtype, device=device)
    return empty.to(memory_format=torch.channels_last) if is_image else empty
