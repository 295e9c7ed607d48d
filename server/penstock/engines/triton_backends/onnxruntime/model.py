"""Triton's Python-based backend `onnxruntime`: serves models of NGC's C++ backend of that name, on a GPU or the CPU.

Runs in Triton's interpreter, one process per instance, with ort_serving/, torch_serving/ and row_trial.py beside this
file. With `image-decoder: engine` requests have encoded pictures, which PyTorch's part of the backend `torch` decodes.
"""

import json
import time
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime as ort
import row_trial
import triton_python_backend_utils as pb_utils
from ort_serving.batch import BatchRunner, OrtRequest, Outcome, Run, missing_batch_dimension
from ort_serving.config import (
    Config,
    OrtDeviceLost,
    OrtLoadError,
    OrtRequestError,
    Signature,
    complete,
    input_specs,
    needs_completion,
    read_signature,
    refuse_numpy_2,
    validate,
)
from ort_serving.cudart import CudaRuntime, exit_after
from ort_serving.device_tensor import DeviceTensor
from ort_serving.memory import MemoryLimit, prefer_for_oom_kill
from ort_serving.opening import Placement, open_model
from ort_serving.placement import CPU, CUDA
from ort_serving.session import OrtModel, describe, model_path, open_for_reading, parameter, session_options
from ort_serving.threads import thread_budget
from torch_serving.parameters import TorchLoadError, TorchRequestError
from torch_serving.picture_spec import PictureSpec, picture_spec
from torch_serving.staging import PinnedRegions

MIN_RUN_TO_CHECK_CANCELLATION_S = 0.005  # the check is a round trip to Triton of 0.04 to 0.2 ms per request
RUN_TIME_DECAY = 0.9  # per run: also covers requests that waited for a slow run


class TritonPythonModel:
    """One instance of a model."""

    @staticmethod
    def auto_complete_config(auto_complete_model_config: Any) -> Any:
        """Triton's ModelConfig, completed from the ONNX file if it has no inputs or no outputs."""
        config = auto_complete_model_config.as_dict()
        try:
            refuse_numpy_2(np.__version__)
            if needs_completion(config):
                path = model_path(Path(pb_utils.get_model_dir()), config)
                complete(config, read_signature(open_for_reading(path, config)))
        except OrtLoadError as error:
            raise _load_failure(config["name"], error) from None
        return auto_complete_model_config

    def initialize(self, args: dict[str, str]) -> None:
        """Opens the session. Raises with one sentence if the model cannot be served as configured."""
        self._name = args["model_name"]
        self._recent_run_s = 0.0
        try:
            refuse_numpy_2(np.__version__)
            self._runner = self._open(args)
        except OrtLoadError as error:
            raise _load_failure(self._name, error) from None

    def _open(self, args: dict[str, str]) -> BatchRunner:
        given: Config = json.loads(args["model_config"])
        pictures = _picture_spec(given)
        config = given if pictures is None else _network_config(given, pictures)
        path = model_path(Path(args["model_repository"], args["model_version"]), config)
        kind, device_id = args["model_instance_kind"], int(args["model_instance_device_id"])
        budget, memory = thread_budget(config), MemoryLimit()

        def new_options() -> ort.SessionOptions:
            if kind == "CPU":
                memory.check()
            return session_options(config, budget)

        def checked(signature: Signature) -> Config:
            validate(config, signature)
            return config

        if kind == "CPU":
            prefer_for_oom_kill()
        open_cuda = partial(CudaRuntime, regions=PinnedRegions)
        opened = open_model(path, Placement(kind, device_id), new_options, checked, open_cuda=open_cuda)
        for reason in opened.facts.fallbacks:
            pb_utils.Logger.log_warn(f"model '{self._name}': {reason}")
        instance = f"instance={args['model_instance_name']} model={self._name}"
        instance += f" version={args['model_version']} kind={kind}"
        options = describe(config, session_options(config, budget), budget)
        pb_utils.Logger.log_info(f"onnxruntime backend ready {instance} {opened.facts.log_fields()} {options}")
        run: Run = OrtModel(opened.session, opened.signature, config, memory).run
        if pictures is not None:
            device = opened.facts.device if opened.facts.provider == CUDA else CPU  # others take arrays of the CPU
            run = _run_of_pictures(pictures, config, device, run)
        is_on_gpu = opened.facts.device_id is not None
        return BatchRunner(run, is_batching=self._may_merge(run, path, given, is_on_gpu=is_on_gpu))

    def _may_merge(self, run: Run, path: Path, config: Config, *, is_on_gpu: bool) -> bool:
        """Whether requests of one execute() may share a run. Logs why not."""
        if config["max_batch_size"] < 2 or "dynamic_batching" not in config:
            return False  # Triton passes them one by one
        if why := _why_not_merged(run, path, config, is_on_gpu=is_on_gpu):
            pb_utils.Logger.log_warn(f"model '{self._name}': each request runs alone: {why}")
        return not why

    def execute(self, requests: Sequence[Any]) -> list[Any]:
        """One response per request, in order."""
        try:
            return self._respond(requests)
        except Exception as error:  # noqa: BLE001  root: Triton would send the client a traceback
            pb_utils.Logger.log_error(f"model '{self._name}': {error!r}")
            sentence = f"model '{self._name}': {type(error).__name__} in the onnxruntime backend, see the server's log"
            return [_error_response(sentence, pb_utils.TritonError.INTERNAL) for _ in requests]

    def _respond(self, requests: Sequence[Any]) -> list[Any]:
        wanted = self._uncancelled(requests)
        start = time.perf_counter()
        outcomes = self._runner.answer([_ort_request(requests[i]) for i in wanted])
        self._recent_run_s = max(time.perf_counter() - start, self._recent_run_s * RUN_TIME_DECAY)
        answers = dict(zip(wanted, outcomes, strict=True))
        return [self._response(answers.get(i)) for i in range(len(requests))]

    def _uncancelled(self, requests: Sequence[Any]) -> list[int]:
        """Indices of the requests to run. Checks for cancellation only if a run costs more than the checks."""
        if self._recent_run_s < MIN_RUN_TO_CHECK_CANCELLATION_S * len(requests):
            return list(range(len(requests)))
        return [i for i, request in enumerate(requests) if not request.is_cancelled()]

    def _response(self, outcome: Outcome | None) -> Any:
        if outcome is None:
            return _error_response(f"model '{self._name}': the request was cancelled", pb_utils.TritonError.CANCELLED)
        if isinstance(outcome, OrtDeviceLost):
            pb_utils.Logger.log_error(f"model '{self._name}': {outcome}")
            exit_after()
        if isinstance(outcome, OrtRequestError):
            code = pb_utils.TritonError.INVALID_ARG if outcome.is_client_error else pb_utils.TritonError.INTERNAL
            return _error_response(f"model '{self._name}': {outcome}", code)
        return pb_utils.InferenceResponse([pb_utils.Tensor(name, array) for name, array in outcome.items()])


def _picture_spec(config: Config) -> PictureSpec | None:
    try:
        return picture_spec(config)
    except TorchLoadError as error:
        raise OrtLoadError(str(error)) from None


def _network_config(config: Config, pictures: PictureSpec) -> Config:
    """The configuration with the network's own input instead of encoded pictures."""
    dims = [pictures.channels, pictures.height, pictures.width]
    return {**config, "input": [{**config["input"][0], "data_type": "TYPE_FP32", "dims": dims}]}


def _run_of_pictures(pictures: PictureSpec, config: Config, device: str, run: Run) -> Run:
    """A run that takes encoded pictures. Raises OrtLoadError without PyTorch."""
    try:
        from torch_serving.session_pictures import SessionPictures
    except ImportError as error:
        raise OrtLoadError(
            f"image-decoder: engine needs PyTorch in the environment of Triton's models ({error}): `penstock setup "
            "triton --gpu`"
        ) from error
    reader = SessionPictures(
        pictures,
        run,
        input_name=config["input"][0]["name"],
        max_batch_size=int(config["max_batch_size"]),
        device=device,
    )

    def run_pictures(names: Sequence[str], inputs: Mapping[str, Any]) -> Sequence[Any]:
        try:
            return reader.run(names, inputs)
        except TorchRequestError as error:
            raise OrtRequestError(str(error), is_client_error=True) from None

    return run_pictures


def _why_not_merged(run_model: Run, path: Path, config: Config, *, is_on_gpu: bool) -> str:
    """Why not, by configuration, trial and graph; empty if rows follow the batch."""
    try:
        says = row_trial.declared(parameter(config, row_trial.PARAMETER))
    except ValueError as error:
        return str(error)
    if says is False:
        return row_trial.DENIED
    outputs = tuple(entry["name"] for entry in config["output"])

    def run(inputs: dict[str, Any]) -> row_trial.Answer:
        try:
            return dict(zip(outputs, run_model(outputs, inputs), strict=True))
        except OrtRequestError as error:
            return str(error)

    inputs = [row_trial.InputSpec(*spec) for spec in input_specs(config)]
    data_types = [entry["data_type"].removeprefix("TYPE_") for entry in (*config["input"], *config["output"])]
    is_reduced = is_on_gpu or row_trial.computes_in_8_bits(path)
    tolerance = row_trial.tolerance_of(data_types, is_reduced=is_reduced)
    trial = row_trial.row_trial(inputs, tolerance, takes_pictures=picture_spec(config) is not None)
    why = row_trial.run_trial(trial, run)
    return why or ("" if says else missing_batch_dimension(path, config))


def _ort_request(request: Any) -> OrtRequest:
    """Tensors in GPU memory stay there: Triton passes them with FORCE_CPU_ONLY_INPUT_TENSORS: no."""
    inputs = {
        tensor.name(): tensor.as_numpy() if tensor.is_cpu() else DeviceTensor(tensor.to_dlpack())
        for tensor in request.inputs()
    }
    return OrtRequest(inputs, tuple(request.requested_output_names()))


def _error_response(sentence: str, code: Any) -> Any:
    return pb_utils.InferenceResponse(error=pb_utils.TritonError(sentence, code))


def _load_failure(model_name: str, error: OrtLoadError) -> Exception:
    failure: Exception = pb_utils.TritonModelException(f"model '{model_name}': {error}")
    return failure
