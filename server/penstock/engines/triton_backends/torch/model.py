"""Triton's Python-based backend `torch`: serves torch.export programs, on a GPU by CUDA graphs, or on the CPU.

Runs in Triton's interpreter, one process per instance, with torch_serving/ and row_trial.py beside this file. Tensors
pass as DLPack, except encoded pictures. torch is imported in `initialize`, because auto_complete_config has its own
process.
"""

import gc
import json
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import row_trial
import triton_python_backend_utils as pb_utils
from torch_serving.config import EngineSpec, Precision, engine_spec
from torch_serving.instance import Instance, Outcome, Pipeline, StartedBatch, TorchRequest
from torch_serving.parameters import Config, TorchLoadError, TorchRequestError, without_torch
from torch_serving.shared_program import ProgramFile, numpy_runner, open_shared_instance, socket_folder
from torch_serving.slab_pictures import FILE_VARIABLE, SlabReader, SlabUnreadable, readable_answered


class TritonPythonModel:
    """One instance of a model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Triton's ModelConfig, checked but not completed, because a program does not name its tensors."""
        config = auto_complete_model_config.as_dict()
        try:
            refuse_numpy_2(engine_spec(config, is_gpu=False), np.__version__)
        except TorchLoadError as error:
            raise _load_failure(config.get("name", ""), error) from None
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Loads and captures the program. Raises with one sentence if it cannot be served as configured."""
        self._name = args["model_name"]
        try:
            with _garbage_collected_once():
                self._open(args)
        except TorchLoadError as error:
            raise _load_failure(self._name, error) from None

    def _open(self, args: dict[str, str]) -> None:
        config: Config = json.loads(args["model_config"])
        is_gpu = args["model_instance_kind"] == "GPU"
        self._spec: EngineSpec = engine_spec(config, is_gpu=is_gpu)
        self._slab = SlabReader(os.environ.get(FILE_VARIABLE))
        folder = Path(args["model_repository"], args["model_version"])
        instance = f"instance={args['model_instance_name']} version={args['model_version']}"
        if self._spec.is_shared:
            device_id = int(args["model_instance_device_id"]) if is_gpu else -1
            facts = self._open_shared(ProgramFile(folder / self._spec.file_name, config, device_id))
        else:
            facts = self._open_own(folder, args, config)
        pb_utils.Logger.log_info(f"torch backend ready {instance} {facts}")

    def _open_shared(self, program: ProgramFile) -> str:
        """Connects to the process that runs the program; returns its facts. Imports no torch."""
        shared = open_shared_instance(program, self._spec, socket_folder(os.environ.get(FILE_VARIABLE)))
        self._instance, self._pipeline, self._reads_at_end = shared.instance, None, False
        self._is_broken, self._end_after = _never, _nothing  # its process is started again at the next run
        is_gpu = program.device_id >= 0
        why = _why_not_merged(numpy_runner(shared.instance, self._spec), self._spec, program.config, is_gpu=is_gpu)
        if why:
            self._merge_nothing(shared.instance, why)
        else:
            shared.runner.may_merge = "dynamic_batching" in program.config
        self._close = shared.runner.drop
        if note := shared.runner.greeting.note:
            pb_utils.Logger.log_warn(f"model '{self._name}': {note}")
        return f"{shared.runner.greeting.facts} process=shared"

    def _merge_nothing(self, instance: Instance, why: str) -> None:
        instance.merge_nothing()
        pb_utils.Logger.log_warn(f"model '{self._name}': each request runs alone: {why}")

    def _open_own(self, folder: Path, args: dict[str, str], config: Config) -> str:
        """Loads the program into this process; returns its facts."""
        try:
            from torch.utils.dlpack import from_dlpack, to_dlpack
            from torch_serving import device
        except ImportError as error:
            raise without_torch(error) from error

        self._from_dlpack, self._to_dlpack = from_dlpack, to_dlpack
        self._is_broken, self._end_after = device.is_broken, device.exit_after
        is_gpu = args["model_instance_kind"] == "GPU"
        placement = device.InstanceDevice(is_gpu, int(args["model_instance_device_id"]), config)
        opened = device.open_instance(folder, self._spec, placement, self._report)
        self._instance = opened.instance
        runner = device.array_runner(opened.instance, self._spec)
        if why := _why_not_merged(runner, self._spec, config, is_gpu=is_gpu):
            self._merge_nothing(opened.instance, why)
        self._reads_at_end = self._tensors_are_read_at_the_end()
        self._pipeline = (
            Pipeline(
                opened.instance,
                self._answered,
                self._deliver,
                report=self._log,
                in_flight=self._spec.batches_in_flight,
                enter=opened.enter_thread,
            )
            if self._spec.batches_in_flight > 1
            else None
        )
        if self._pipeline is not None:
            self._close = self._pipeline.close
        if opened.note:
            pb_utils.Logger.log_warn(f"model '{self._name}': {opened.note}")
        facts: str = opened.facts
        return facts

    def execute(self, requests: Sequence[Any]) -> list[Any] | None:
        """One response per request, in order; None if they are sent later by each request's sender."""
        if self._pipeline is not None:
            return self._put(self._pipeline, requests)
        try:
            return readable_answered(requests, self._ask, self._answer, self._refused)
        except Exception as error:  # noqa: BLE001  root: Triton would send the client a traceback
            return self._failed(error, len(requests))

    def _answer(self, asked: list[TorchRequest]) -> list[Any]:
        return self._answered(self._instance.begin(asked, _nothing))

    def _refused(self, error: SlabUnreadable | TorchRequestError) -> Any:
        if isinstance(error, TorchRequestError):
            return self._response(error)
        pb_utils.Logger.log_warn(f"model '{self._name}': {error}; the gateway sends pictures instead")
        return _error_response(str(error), pb_utils.TritonError.INTERNAL)

    def _answered(self, started: StartedBatch) -> list[Any]:
        """The responses of the oldest batch in flight, made while the GPU computes if Triton reads them later."""
        if not self._reads_at_end:
            return self._responses(self._instance.finish(started))
        responses = self._responses(self._instance.expected(started))
        self._instance.finish(started)
        return responses

    def _tensors_are_read_at_the_end(self) -> bool:
        """Whether Triton reads a tensor's memory when its response is sent, not when it is made."""
        import torch

        rows = torch.zeros(1)
        tensor = pb_utils.Tensor.from_dlpack("rows", self._to_dlpack(rows))
        rows.fill_(1.0)
        return bool(self._from_dlpack(tensor.to_dlpack())[0] == 1.0)

    def _put(self, pipeline: Pipeline, requests: Sequence[Any]) -> list[Any] | None:
        senders = [request.get_response_sender() for request in requests]
        try:
            pipeline.put([self._ask(request) for request in requests], senders)
        except Exception as error:  # noqa: BLE001  root, as in execute: none of these has begun
            return self._failed(error, len(requests))
        return None

    def _deliver(self, senders: Sequence[Any], answered: list[Any] | Exception) -> None:
        """Sends the responses of one batch, in the pipeline's thread. A failure to send one does not affect others."""
        responses = self._failed(answered, len(senders)) if isinstance(answered, Exception) else answered
        for sender, response in zip(senders, responses, strict=True):
            try:
                sender.send(response, flags=pb_utils.TRITONSERVER_RESPONSE_COMPLETE_FINAL)
            except Exception as error:  # noqa: BLE001  root of this one
                self._log(error)

    def finalize(self) -> None:
        """Answers batches in flight, then ends the instance."""
        getattr(self, "_close", _nothing)()

    def _ask(self, request: Any) -> TorchRequest:
        inputs = {tensor.name(): tensor for tensor in request.inputs()}
        if self._spec.pictures is not None:
            elements = inputs[self._spec.inputs[0].name].as_numpy().ravel().tolist()
            return TorchRequest(pictures=tuple(map(self._slab.picture, elements)))
        if self._spec.is_shared:
            return TorchRequest(tuple(_host_rows(inputs[spec.name]) for spec in self._spec.inputs))
        return TorchRequest(tuple(self._from_dlpack(inputs[spec.name].to_dlpack()) for spec in self._spec.inputs))

    def _responses(self, outcomes: Sequence[Outcome]) -> list[Any]:
        return [self._response(outcome) for outcome in outcomes]

    def _response(self, outcome: Outcome) -> Any:
        if isinstance(outcome, TorchRequestError):
            return _error_response(f"model '{self._name}': {outcome}", pb_utils.TritonError.INVALID_ARG)
        make = pb_utils.Tensor if self._spec.is_shared else self._tensor
        tensors = [make(spec.name, rows) for spec, rows in zip(self._spec.outputs, outcome, strict=True)]
        return pb_utils.InferenceResponse(tensors)

    def _tensor(self, name: str, rows: Any) -> Any:
        return pb_utils.Tensor.from_dlpack(name, self._to_dlpack(rows))

    def _failed(self, error: Exception, count: int) -> list[Any]:
        """Error responses for a batch. If the CUDA context is lost, the process ends and is replaced."""
        sentence = f"model '{self._name}': {type(error).__name__} in the torch backend, see the server's log"
        self._log(error)
        if self._is_broken(error):
            pb_utils.Logger.log_error(f"model '{self._name}': the CUDA context is lost, this process ends")
            self._end_after()
        return [_error_response(sentence, pb_utils.TritonError.INTERNAL) for _ in range(count)]

    def _report(self, line: str) -> None:
        pb_utils.Logger.log_info(f"model '{self._name}': {line}")

    def _log(self, error: Exception) -> None:
        pb_utils.Logger.log_error(f"model '{self._name}': {error!r}")


def _why_not_merged(
    run: Callable[[dict[str, Any]], dict[str, Any] | str], spec: EngineSpec, config: Config, *, is_gpu: bool
) -> str:
    """Why not, by configuration and trial; empty if requests may share a run, or always come one by one.

    run: see device.array_runner.
    """
    if spec.max_batch_size < 2 or "dynamic_batching" not in config:
        return ""
    try:
        said = ((config.get("parameters") or {}).get(row_trial.PARAMETER) or {}).get("string_value", "")
        if row_trial.declared(said) is False:
            return row_trial.DENIED
    except ValueError as error:
        return str(error)
    is_reduced = spec.precision is not Precision.FP32 or is_gpu
    tolerance = row_trial.tolerance_of([one.data_type for one in (*spec.inputs, *spec.outputs)], is_reduced=is_reduced)
    inputs = [row_trial.InputSpec(one.name, one.data_type, one.dims) for one in spec.inputs]
    if spec.pictures is not None:
        inputs = [row_trial.InputSpec(spec.inputs[0].name, "BYTES", (1,))]
    trial = row_trial.row_trial(inputs, tolerance, takes_pictures=spec.pictures is not None)
    return row_trial.run_trial(trial, run)


def _nothing() -> None:
    """No batch is in flight."""


def _never(_: BaseException) -> bool:
    return False


def _host_rows(tensor: Any) -> Any:
    """The tensor as an array. Raises TorchRequestError if it is in a GPU's memory."""
    if not tensor.is_cpu():
        raise TorchRequestError("program-process: shared takes no tensors in CUDA shared memory")
    return tensor.as_numpy()


def refuse_numpy_2(spec: EngineSpec, version: str) -> None:
    """Raises TorchLoadError for encoded pictures with numpy 2: Triton 2.51 would pass wrong bytes and crash."""
    if spec.pictures is not None and not version.startswith("1."):
        raise TorchLoadError(
            f"image-decoder: engine needs numpy 1.26 in Triton's environment and {version} is in {sys.prefix}: "
            "Triton 2.51 would hand broken pictures over; install numpy 1.26.4 there, or say image-decoder: gateway"
        )


@contextmanager
def _garbage_collected_once() -> Iterator[None]:
    """Disables the garbage collector while loading: most objects stay. Saves CPU at start and 0.2 s pauses later."""
    gc.disable()
    try:
        yield
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


def _error_response(sentence: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(sentence, code))


def _load_failure(model_name: str, error: TorchLoadError) -> Exception:
    failure: Exception = pb_utils.TritonModelException(f"model '{model_name}': {error}")
    return failure
