"""Runs the inferences that test whether a model's rows follow its batch; `row_trial` evaluates them."""

import asyncio
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np

from server.backends import row_trial
from server.backends.row_trial import Answer, Arrays, InputSpec
from server.core.backend import Backend
from server.core.errors import (
    BackendUnavailable,
    DeadlineExceeded,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    Overloaded,
)
from server.core.infer import InferRequest
from server.core.model import ModelConfig
from server.core.tensor import Array, Datatype, Tensor, tensor_from_numpy
from server.logs import get_logger

log = get_logger("batching")
TRIAL_ID = "penstock-row-trial"
GRAPH_S = 60.0
ONNX = "onnxruntime"  # the backend whose model files show whether rows follow the batch
_GRAPH_PROGRAM = (sys.executable, "-P", "-m", "server.backends.ort_serving.batch_axis")
_LATER = (BackendUnavailable, DeadlineExceeded, ModelNotFound, Overloaded)  # no evidence about the model


class RowChecks:
    """Whether requests to a model may share a call: its config or its graph says so, and a trial confirms it.

    repositories: folders with the ONNX files; empty for an engine given by URL. For such an engine, and for other
    backends, max_batch_size declares that rows follow the batch.
    """

    def __init__(
        self,
        backend: Backend,
        repositories: Sequence[Path],
        execution_timeout_s: Callable[[ModelConfig], float] = lambda _: 30.0,
    ) -> None:
        """execution_timeout_s: the time-out of a model by its config; limits each inference of the trial."""
        self._backend = backend
        self._execution_timeout_s = execution_timeout_s
        self._repositories = repositories

    async def why_unmerged(self, config: ModelConfig) -> str:
        """Empty if requests may be merged. Raises InferenceError if the engine did not answer: try again later."""
        try:
            says = row_trial.declared(config.parameters.get(row_trial.PARAMETER, ""))
        except ValueError as error:
            return str(error)
        if says is False:
            return row_trial.DENIED
        if config.has_sequence_batching or config.is_decoupled:
            return row_trial.SEQUENCES
        for version in (await self._backend.model_metadata(config.name)).versions or ("",):
            path = self._onnx_file(config, version)
            why = await self._tried(config, version, path)
            if not why and path is not None and says is None:
                why = await _lost_batch(path)
            if why:
                return why
        return ""

    async def _tried(self, config: ModelConfig, version: str, path: Path | None) -> str:
        is_reduced = config.is_on_gpu or (path is not None and row_trial.computes_in_8_bits(path))
        trial = _trial_of(config, is_reduced=is_reduced)
        try:
            asked = next(trial)
            while True:
                asked = trial.send(await self._answer(config, version, asked))
        except StopIteration as end:
            return str(end.value)

    async def _answer(self, config: ModelConfig, version: str, asked: Arrays) -> Answer:
        inputs = tuple(_tensor(spec.name, spec.datatype, asked[spec.name]) for spec in config.inputs)
        deadline = time.monotonic() + self._execution_timeout_s(config)
        request = InferRequest(config.name, inputs, version, TRIAL_ID, deadline=deadline)
        try:
            response = await self._backend.infer(request)
            return {tensor.name: tensor.to_numpy() for tensor in response.outputs}
        except _LATER:
            raise
        except InferenceError as error:
            return error.message

    def _onnx_file(self, config: ModelConfig, version: str) -> Path | None:
        if config.backend != ONNX:
            return None
        folders = [repository / config.name / version for repository in self._repositories]
        return next((found for folder in folders for found in sorted(folder.glob("*.onnx")) if found.is_file()), None)


async def try_rows(checks: RowChecks, config: ModelConfig, *, wants: Callable[[ModelConfig], bool]) -> str | None:
    """Tries a model whose requests may be merged; returns ModelConfig.unmerged. Raises like RowChecks.why_unmerged."""
    try:
        if not wants(config):
            return None
    except InvalidRequest:  # such a model is not served
        return None
    why = await checks.why_unmerged(config)
    if why:
        log.warning("requests, pictures and frames are not merged: each runs alone", model=config.name, reason=why)
    return why


def noise_request(config: ModelConfig, *, deadline: float) -> InferRequest | None:
    """A row of noise for the model's inputs; None if it has no inputs, or too large ones."""
    trial = _trial_of(config, is_reduced=False)
    try:
        asked = next(trial)
    except StopIteration:
        return None
    rows = asked if config.max_batch_size else {name: array[0] for name, array in asked.items()}
    inputs = tuple(_tensor(spec.name, spec.datatype, rows[spec.name]) for spec in config.inputs)
    return InferRequest(config.name, inputs, id=TRIAL_ID, deadline=deadline)


def _trial_of(config: ModelConfig, *, is_reduced: bool) -> row_trial.Trial:
    data_types = [spec.datatype for spec in (*config.inputs, *config.outputs)]
    return row_trial.row_trial(
        [InputSpec(spec.name, spec.datatype, spec.shape) for spec in config.inputs],
        row_trial.tolerance_of(data_types, is_reduced=is_reduced),
        takes_pictures=config.parameters.get("image-decoder", "").lower() in ("1", "engine"),
    )


def _tensor(name: str, datatype: Datatype, array: Array) -> Tensor:
    if datatype is not Datatype.BF16:
        return tensor_from_numpy(name, array)
    halves = (np.ascontiguousarray(array).view(np.uint32) >> 16).astype(np.uint16)
    return Tensor(name, datatype, array.shape, halves.reshape(-1).view(np.uint8).data)


async def _lost_batch(path: Path) -> str:
    """See server.backends.ort_serving.batch_axis, which runs in a process of its own."""
    process = await asyncio.create_subprocess_exec(
        *_GRAPH_PROGRAM,
        path,
        stdin=asyncio.subprocess.DEVNULL,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        async with asyncio.timeout(GRAPH_S):
            said, _ = await process.communicate()
    except TimeoutError:
        said = b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return said.decode(errors="replace") if process.returncode == 0 else f"the ONNX file {path} cannot be read"
