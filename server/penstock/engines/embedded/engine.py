"""EmbeddedEngine: runs the ONNX models of the repositories in this process."""

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from tritonclient.grpc import model_config_pb2, service_pb2

from penstock.engines.config_pbtxt import config_from_proto
from penstock.engines.embedded import statistics as metrics
from penstock.engines.embedded.inference import version_number
from penstock.engines.embedded.loading import OpenedModel, StateOnDisk, open_folder
from penstock.engines.embedded.model_version import LoadedVersion, Run
from penstock.engines.embedded.relay import MAX_BODY_BYTES, InProcessRelay
from penstock.engines.embedded.repository import ModelFolder, RepositoryReader
from penstock.engines.embedded.shared_memory import SharedRegions
from penstock.engines.ort_serving.memory import MemoryLimit
from penstock.engines.ort_serving.placement import EngineFacts
from penstock.logs import get_logger
from penstock.protocol.engine import ModelConfig, ModelMetadata, ModelState
from penstock.protocol.errors import EngineUnavailable, InvalidRequest, ModelNotFound, ModelNotReady
from penstock.protocol.inference import InferRequest, InferResponse

UNLOADED = "unloaded"


@dataclass(slots=True)
class ServedModel:
    """lock: for loads and unloads. state_on_disk: source of the serving versions."""

    name: str
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    is_loading: bool = False
    state_on_disk: StateOnDisk | None = None
    serving: dict[int, LoadedVersion] = field(default_factory=dict)
    leaving: list[LoadedVersion] = field(default_factory=list)
    reasons: dict[int, str] = field(default_factory=dict)

    def install(self, model: OpenedModel, *, max_waiting: int) -> None:
        """Serves the opened versions. If one failed, the old versions stay, as in Triton."""
        if model.failures:
            if not self.serving:
                self.reasons = dict.fromkeys(model.opened, UNLOADED) | dict(model.failures)
            return
        old = self.serving
        self.serving = {
            version: LoadedVersion(opened, max_waiting=max_waiting) for version, opened in model.opened.items()
        }
        self.reasons = {version: UNLOADED for version in old if version not in self.serving}
        self.state_on_disk = model.state_on_disk
        self._retire(old)

    def remove(self) -> None:
        """Accepts no more requests; running ones finish."""
        old, self.serving, self.state_on_disk = self.serving, {}, None
        self.reasons |= dict.fromkeys(old, UNLOADED)
        self._retire(old)

    def stop(self, error: EngineUnavailable) -> list[LoadedVersion]:
        """Ends all versions at once; returns those to wait for."""
        versions = [*self.serving.values(), *self.leaving]
        self.serving = {}
        for version in versions:
            version.stop(error)
        return versions

    def find(self, version: str) -> LoadedVersion:
        """The version, or the highest for an empty string. Raises InvalidRequest, ModelNotFound."""
        if not self.serving:
            raise ModelNotFound(f"Request for unknown model: '{self.name}' has no available versions")
        number = version_number(version)
        if number is None:
            return self.serving[max(self.serving)]
        if number not in self.serving:
            raise ModelNotFound(f"Request for unknown model: '{self.name}' version {number} is not found")
        return self.serving[number]

    def rows(self) -> list[ModelState]:
        """Its rows of the repository index; empty if it was never loaded."""
        self._forget_drained()
        states = {number: ("UNAVAILABLE", reason) for number, reason in self.reasons.items()}
        states |= {version.version: ("UNLOADING", "") for version in self.leaving}
        states |= dict.fromkeys(self.serving, ("READY", ""))
        rows = [ModelState(self.name, str(number), *states[number]) for number in sorted(states)]
        if self.is_loading and not self.serving:
            return [ModelState(self.name, row.version, "LOADING", "") for row in rows] or [
                ModelState(self.name, "", "LOADING", "")
            ]
        return rows

    def _retire(self, versions: dict[int, LoadedVersion]) -> None:
        self.leaving += versions.values()
        for version in versions.values():
            version.retire()
        self._forget_drained()

    def _forget_drained(self) -> None:
        self.leaving = [version for version in self.leaving if not version.drained.is_set()]


T = TypeVar("T")
log = get_logger("engine")
LOADER_THREADS = 2
DISK_TIMEOUT_S = 5.0
CLOSE_TIMEOUT_S = 2.0  # below the time that the gateway's parent process allows
MAX_WAITING_REQUESTS = 512
MAX_HUNG_RUNS = 8  # abandoned threads of all models; with more, hanging models are not reloaded


class EmbeddedEngine(InProcessRelay):
    """Inference on the repositories' models. Use on one event loop, which is never blocked."""

    def __init__(
        self,
        repositories: tuple[Path, ...],
        *,
        max_waiting: int = MAX_WAITING_REQUESTS,  # per version; then Overloaded
        disk_timeout_s: float = DISK_TIMEOUT_S,  # one read of the repositories; loaded models do not depend on it
        max_body_bytes: int = MAX_BODY_BYTES,
    ) -> None:
        super().__init__(self, max_body_bytes)
        self._max_waiting = max_waiting
        self._memory = MemoryLimit()
        self.regions = SharedRegions()
        self._models: dict[str, ServedModel] = {}
        self._disk = RepositoryReader(repositories, max_wait_s=disk_timeout_s)
        self._loaders = ThreadPoolExecutor(LOADER_THREADS, thread_name_prefix="loader")
        self._loads: set[asyncio.Task[None]] = set()
        self._hung_runs: list[Run] = []
        self._is_closed = False

    async def infer(self, request: InferRequest) -> InferResponse:
        """See Engine. A cancelled run occupies its instance until its current node ends."""
        return await self._find(request.model_name, request.model_version).infer(request)

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
        version = self._find(model_name, model_version)
        numbers = [version.version] if model_version else sorted(self._models[model_name].serving)
        return config_from_proto(version.config).metadata(tuple(map(str, numbers)), version.config.platform)

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        return config_from_proto(self._find(model_name, model_version).config)

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        if not model_name:
            return not self._is_closed
        try:
            self._find(model_name, model_version)
        except (EngineUnavailable, InvalidRequest, ModelNotFound):
            return False
        return True

    async def repository_index(self) -> list[ModelState]:
        """One row per version; one without version and state for a model that was never loaded."""
        self._check_open()
        disk = await self._disk.read_or_remember()
        rows: list[ModelState] = []
        for name in disk.folders:
            model = self._models.get(name)
            own = model.rows() if model is not None else []
            if not own and name in disk.problems:
                own = [ModelState(name, "", "UNAVAILABLE", disk.problems[name])]
            rows += own or [ModelState(name, "", "", "")]
        return rows

    async def load(self, model_name: str, config_json: str | None = None) -> None:
        """Loads, or reloads if files or config changed; old versions serve until the new ones are ready.

        config_json: replaces config.pbtxt, as in Triton's load API. Cancellation does not stop the load. Raises
        ModelNotReady.
        """
        self._check_open()
        await asyncio.shield(self._start_load(model_name, config_json))

    def renew(self, model_name: str, reason: str) -> None:
        """Reloads a hanging or failing model; its pending calls fail now. At most MAX_HUNG_RUNS threads may hang."""
        model = self._models.get(model_name)
        self._hung_runs = [run for run in self._hung_runs if not run.is_over]
        if model is None or len(self._hung_runs) >= MAX_HUNG_RUNS:
            log.error("model is not restarted: too many threads hang", model=model_name, hung_runs=len(self._hung_runs))
            return
        self._abandon(model, EngineUnavailable(f"model {model_name!r} is restarted: {reason}"))
        self._start_load(model_name, None)

    async def give_up(self, model_name: str) -> None:
        """Unloads a hanging model. Its clients get an error now; runs end with their current node."""
        if (model := self._models.get(model_name)) is not None:
            self._abandon(model, EngineUnavailable(f"model {model_name!r} is restarted: it hung"))
            model.remove()

    def _abandon(self, model: ServedModel, error: EngineUnavailable) -> None:
        self._hung_runs += [run for version in model.serving.values() for run in version.abandon(error)]
        model.state_on_disk = None

    async def unload(self, model_name: str) -> None:
        """Unloads after all requests are answered. Unknown names are no error, as in Triton."""
        self._check_open()
        model = self._models.get(model_name)
        if model is None:
            return
        async with model.lock:
            if model.serving:
                log.info("model unloaded", model=model_name)
            model.remove()

    async def metrics(self) -> bytes:
        return metrics.metrics_page(
            metrics.VersionMetrics(model.name, str(number), version.statistics, version.pending)
            for model in self._sorted_models()
            for number, version in sorted(model.serving.items())
        )

    async def aclose(self) -> None:
        """Fails all requests. Returns within CLOSE_TIMEOUT_S even if a run hangs."""
        self._is_closed = True
        self.regions.unregister()
        error = self._closed_error()
        leaving = [version for model in self._models.values() for version in model.stop(error)]
        self._loaders.shutdown(wait=False, cancel_futures=True)
        self._disk.close()
        try:
            async with asyncio.timeout(CLOSE_TIMEOUT_S):
                for version in leaving:
                    await version.drained.wait()
                if self._loads:
                    await asyncio.wait(self._loads)
        except TimeoutError:
            runs = sum(not version.drained.is_set() for version in leaving)
            log.warning("the engine is closed while it works", runs=runs, loads=len(self._loads))

    # Further protocol methods

    def config_message(self, model_name: str, version: str = "") -> model_config_pb2.ModelConfig:
        """The version's complete config. Raises ModelNotFound, InvalidRequest."""
        message = model_config_pb2.ModelConfig()
        message.CopyFrom(self._find(model_name, version).config)
        return message

    def statistics(self, model_name: str = "", version: str = "") -> "list[service_pb2.ModelStatistics]":
        """Statistics of one version, of a model, or of all models. Raises InvalidRequest with Triton's text."""
        number = version_number(version)
        models = self._sorted_models() if not model_name else [self._models.get(model_name, ServedModel(model_name))]
        rows = [
            loaded.statistics.message(model.name, str(loaded.version))
            for model in models
            for loaded in sorted(model.serving.values(), key=lambda one: one.version)
            if number in (None, loaded.version)
        ]
        if model_name and not models[0].serving:
            raise InvalidRequest(f"requested model '{model_name}' is not available")
        if model_name and not rows:
            raise InvalidRequest(f"requested model version is not available for model '{model_name}'")
        return rows

    def labels(self, model_name: str, version: str, output_name: str) -> tuple[str, ...]:
        """The lines of the output's label file; empty without one. Raises ModelNotFound, InvalidRequest."""
        return self._find(model_name, version).labels.get(output_name, ())

    def facts(self, model_name: str, version: str = "") -> EngineFacts:
        """Provider, precision and CUDA graphs of the version. Raises ModelNotFound, InvalidRequest."""
        return self._find(model_name, version).facts

    def _find(self, model_name: str, version: str) -> LoadedVersion:
        self._check_open()
        model = self._models.get(model_name)
        if model is None:
            raise ModelNotFound(f"Request for unknown model: '{model_name}' is not found")
        return model.find(version)

    def _sorted_models(self) -> list[ServedModel]:
        return [self._models[name] for name in sorted(self._models)]

    async def _in_loader(self, work: Callable[[], T]) -> T:
        """Runs work in a loader thread. Raises EngineUnavailable if the engine is or gets closed."""
        self._check_open()
        try:
            done = await asyncio.get_running_loop().run_in_executor(self._loaders, work)
        except asyncio.CancelledError:
            self._check_open()
            raise
        self._check_open()
        return done

    def _start_load(self, model_name: str, config_json: str | None) -> "asyncio.Task[None]":
        task = asyncio.create_task(self._load(model_name, config_json))
        self._loads.add(task)
        task.add_done_callback(self._loaded)
        return task

    async def _load(self, model_name: str, config_json: str | None) -> None:
        self._check_open()
        folder = (await self._disk.read()).folders.get(model_name)
        if folder is None or folder.is_empty:
            raise ModelNotReady(f"model {model_name!r} cannot be loaded: it is not in the engine's model repository")
        model = self._models.setdefault(model_name, ServedModel(model_name))
        async with model.lock:
            model.is_loading = True
            try:
                await self._open(model, folder, config_json)
            finally:
                model.is_loading = False

    async def _open(self, model: ServedModel, folder: ModelFolder, config_json: str | None) -> None:
        opened = await self._in_loader(
            lambda: open_folder(folder, config_json, loaded=model.state_on_disk, memory=self._memory)
        )
        if opened.state_on_disk is None:
            return
        model.install(opened, max_waiting=self._max_waiting)
        if opened.failures:
            reasons = "; ".join(f"version {number}: {reason}" for number, reason in opened.failures.items())
            raise ModelNotReady(f"model {model.name!r} cannot be loaded: {reasons}")
        facts, versions = model.serving[max(model.serving)].facts, ",".join(map(str, sorted(model.serving)))
        log.info("model loaded", model=model.name, versions=versions, device=facts.device, precision=facts.precision)

    def _loaded(self, task: "asyncio.Task[None]") -> None:
        self._loads.discard(task)
        if not task.cancelled():
            task.exception()  # marked as retrieved: the caller may have been cancelled

    def _check_open(self) -> None:
        if self._is_closed:
            raise self._closed_error()

    @staticmethod
    def _closed_error() -> EngineUnavailable:
        return EngineUnavailable("the embedded engine is closed")
