"""Probe inferences: liveness of the engine, canaries of models, and trials of newly loaded models."""

import asyncio
import math
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np

from penstock.engines import row_trial
from penstock.engines.row_trial import GREY_JPEG, Answer, Arrays, InputSpec
from penstock.logs import get_logger
from penstock.protocol.engine import Engine, ModelConfig, TensorSpec
from penstock.protocol.errors import (
    DeadlineExceeded,
    EngineFailed,
    EngineUnavailable,
    InferenceError,
    InvalidRequest,
    ModelNotFound,
    OutOfMemory,
    Overloaded,
)
from penstock.protocol.inference import Array, Datatype, InferRequest, Tensor, tensor_from_bytes, tensor_from_numpy

STALL_TOLERANCE_S = 0.25


async def answers_within(max_wait_s: float, engine: Engine) -> bool:
    """Whether the engine answers in that time. Also True if this process stalled, and so may read answers late."""
    started = time.monotonic()
    try:
        async with asyncio.timeout(max_wait_s):
            return await engine.ready()
    except TimeoutError:
        return time.monotonic() - started > max_wait_s + STALL_TOLERANCE_S


CANARY_ID = "penstock-canary"
MAX_CANARY_BYTES = 16 << 20


def canary_request(config: ModelConfig, *, deadline: float) -> InferRequest | None:
    """One row of zeros, with 1 for variable dimensions; empty strings for BYTES, a grey picture for picture models.

    None for stateful and decoupled models, inputs over MAX_CANARY_BYTES, and `canary: off`.
    """
    if config.has_sequence_batching or config.is_decoupled or config.parameters.get("canary") == "off":
        return None
    batch = (1,) if config.max_batch_size > 0 else ()
    if len(config.inputs) == 1 and config.parameters.get("image-decoder", "").lower() in ("1", "engine"):
        spec = config.inputs[0]
        picture = tensor_from_bytes(spec.name, (GREY_JPEG,), (*batch, *spec.shape))
        return InferRequest(config.name, (picture,), id=CANARY_ID, deadline=deadline)
    inputs = tuple(_zeros(spec, batch) for spec in config.inputs)
    if not inputs or sum(tensor.data.nbytes for tensor in inputs) > MAX_CANARY_BYTES:
        return None
    return InferRequest(config.name, inputs, id=CANARY_ID, deadline=deadline)


def _zeros(spec: TensorSpec, batch: tuple[int, ...]) -> Tensor:
    shape = (*batch, *[1 if size < 0 else size for size in spec.shape])
    size_bytes = 4 if spec.datatype is Datatype.BYTES else spec.datatype.size_bytes or 0
    count = math.prod(shape)
    data = bytes(count * size_bytes) if count * size_bytes <= MAX_CANARY_BYTES else bytes(MAX_CANARY_BYTES + 1)
    return Tensor(spec.name, spec.datatype, shape, memoryview(data))


log = get_logger("batching")
ROW_TRIAL_ID = "penstock-row-trial"
GRAPH_S = 60.0
ONNX = "onnxruntime"  # backend whose model files show whether rows follow the batch
_GRAPH_PROGRAM = (sys.executable, "-P", "-m", "penstock.engines.ort_serving.batch")
_NO_EVIDENCE = (EngineUnavailable, DeadlineExceeded, ModelNotFound, Overloaded)  # no evidence about the model


class RowChecks:
    """Whether requests to a model may share a call: config or graph allow it, and a trial confirms it."""

    def __init__(
        self,
        backend: Engine,
        repositories: Sequence[Path],  # folders with ONNX files; empty for a remote engine
        execution_timeout_s: Callable[[ModelConfig], float] = lambda _: 30.0,
    ) -> None:
        """execution_timeout_s: of a model, by its config; limits each inference of the trial."""
        self._backend = backend
        self._execution_timeout_s = execution_timeout_s
        self._repositories = repositories

    async def why_unmerged(self, config: ModelConfig) -> str:
        """Empty if requests may be merged. Raises InferenceError if the engine did not answer; try again later."""
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
                why = await _lost_batch_axis(path)
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
        request = InferRequest(config.name, inputs, version, ROW_TRIAL_ID, deadline=deadline)
        try:
            response = await self._backend.infer(request)
            return {tensor.name: tensor.to_numpy() for tensor in response.outputs}
        except _NO_EVIDENCE:
            raise
        except InferenceError as error:
            return error.message

    def _onnx_file(self, config: ModelConfig, version: str) -> Path | None:
        if config.backend != ONNX:
            return None
        folders = [repository / config.name / version for repository in self._repositories]
        return next((found for folder in folders for found in sorted(folder.glob("*.onnx")) if found.is_file()), None)


async def try_rows(checks: RowChecks, config: ModelConfig, *, wants: Callable[[ModelConfig], bool]) -> str | None:
    """Tests whether requests may be merged. Returns ModelConfig.unmerged. Raises as RowChecks.why_unmerged."""
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
    """A row of noise for the model's inputs; None without inputs, or if they are too large."""
    trial = _trial_of(config, is_reduced=False)
    try:
        asked = next(trial)
    except StopIteration:
        return None
    rows = asked if config.max_batch_size else {name: array[0] for name, array in asked.items()}
    inputs = tuple(_tensor(spec.name, spec.datatype, rows[spec.name]) for spec in config.inputs)
    return InferRequest(config.name, inputs, id=ROW_TRIAL_ID, deadline=deadline)


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


async def _lost_batch_axis(path: Path) -> str:
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


LOAD_TRIAL_ID = "penstock-load-trial"
TryImage: TypeAlias = Callable[[ModelConfig, float], Awaitable[str]]


class TrialResult(NamedTuple):
    """failure: why the model cannot serve, or empty. unmerged: see ModelConfig."""

    failure: str = ""
    unmerged: str | None = None


class LoadTrial:
    """Tries a loaded model after its canary. Raises InferenceError if the engine did not answer; try again later."""

    def __init__(
        self,
        backend: Engine,
        *,
        see: TryImage,
        try_rows: Callable[[ModelConfig], Awaitable[str | None]],
        execution_timeout_s: Callable[[ModelConfig], float],
    ) -> None:
        """see: tries pictures as `/image` does; returns the failure, or "". try_rows: returns ModelConfig.unmerged."""
        self._backend = backend
        self._see = see
        self._try_rows = try_rows
        self._execution_timeout_s = execution_timeout_s

    async def __call__(self, config: ModelConfig) -> TrialResult:
        timeout_s = self._execution_timeout_s(config)
        why = await self._why_unanswered(config, timeout_s) or await self._see(config, timeout_s)
        if why:
            return TrialResult(f"its trial at load failed: {why}")
        unmerged = await self._try_rows(config)
        if unmerged == "" and config.max_batch_size > 1:
            why = await self._see(replace(config, unmerged=""), timeout_s)
        return TrialResult(f"its trial at load failed: {why}") if why else TrialResult(unmerged=unmerged)

    async def _why_unanswered(self, config: ModelConfig, timeout_s: float) -> str:
        """Tries zeros, and noise if zeros fail. A model without a canary is not tried."""
        request = canary_request(config, deadline=time.monotonic() + timeout_s)
        if request is None:
            return ""
        why = await self._failure(config, replace(request, id=LOAD_TRIAL_ID))
        if not why:
            return ""
        noise = noise_request(config, deadline=time.monotonic() + timeout_s)
        return why if noise is None or await self._failure(config, noise) else ""

    async def _failure(self, config: ModelConfig, request: InferRequest) -> str:
        try:
            response = await self._backend.infer(request)
        except (InvalidRequest, OutOfMemory):  # the input is invalid for this model, or memory is short
            return ""
        except EngineFailed as error:  # the client's message already names the model
            return error.message.removeprefix(f"model {config.name!r} failed: ").removeprefix(
                f"model {config.name!r}: "
            )
        answered = {tensor.name for tensor in response.outputs}
        missing = [spec.name for spec in config.outputs if spec.name not in answered]
        return f"its answer lacks the output {missing[0]!r}" if missing else ""
