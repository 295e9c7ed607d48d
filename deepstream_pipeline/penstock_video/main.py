"""The video program: builds the parts from the settings and runs one pipeline."""

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING

import structlog

from penstock.gateway.card_engines import NO_CARDS, read_card_engines
from penstock.vision.spec import NetworkType
from penstock_video.analytics.config import rules_from
from penstock_video.analytics.rules import Rules
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.api.options import DEFAULT_PARTS, ApiOptions, ApiParts, check_address
from penstock_video.decode.uri import is_live
from penstock_video.errors import ModelUnusable, PipelineError, TooManySources
from penstock_video.gpu_setup import open_gpu
from penstock_video.infer.crops import SecondaryOptions
from penstock_video.infer.engine import Engine
from penstock_video.infer.network import Network
from penstock_video.infer.options import EngineAddress
from penstock_video.interfaces import Analytics, PipelineControl, SourceStatistics
from penstock_video.metrics import VideoMetrics
from penstock_video.runner.dispatch import DispatchOptions
from penstock_video.runner.pipeline import Pipeline, PipelineOptions, PipelineParts
from penstock_video.runner.secondary import SecondaryModel
from penstock_video.settings.document import InvalidSettings, SettingsFault, close_to
from penstock_video.settings.models import PrimarySettings, SecondarySettings, VideoSettings
from penstock_video.settings.sources import check_classes
from penstock_video.sink_set import SinkSet, allowing, compose_sinks
from penstock_video.sinks.run_record import SourceRecord
from penstock_video.sources.options import GpuSources, SourcesOptions
from penstock_video.track.registry import new_tracker
from penstock_video.types import DecoderKind, SourceConfig

if TYPE_CHECKING:
    from penstock_video.api.server import ApiServer

log = structlog.get_logger(component="video")
ENGINE_TIMEOUT_S = 60.0
MODEL_TIMEOUT_S = 60.0
FITTING_BATCH = 4  # default batch size, if the model and the sources allow it
SPARE_SLOTS = 3  # of a ring, beyond the engine's: one being written, two waiting
LEAST_SLOTS = 6
OPENING_ON_A_CARD = 32  # sources at the same time, since several share a process


@dataclass(frozen=True, slots=True)
class _Models:
    """The models of the settings, as the engine describes them."""

    network: Network
    secondaries: tuple[SecondaryModel, ...]
    gpu: GpuSources | None
    gpu_absence: str


class Program:
    """Call `prepare`, `start`, `wait`, `stop`. Raises PipelineError, with a text for display, if it cannot start."""

    def __init__(self, settings: VideoSettings, place: EngineAddress, api: ApiParts = DEFAULT_PARTS) -> None:
        """api: parts of the control API."""
        self._settings = settings
        self._api_parts = api
        engines = read_card_engines(place.run_dir) if place.run_dir is not None else NO_CARDS
        self._card = open_gpu(settings.gpu, _decoders(settings), engines)
        self._engine = Engine(place, device=self._card.device)
        self._metrics = VideoMetrics()
        self._models: _Models | None = None
        self._outlets: SinkSet | None = None
        self._pipeline: Pipeline | None = None
        self._api: ApiServer | None = None

    @property
    def api_url(self) -> str:
        """URL of the control API; "" if it is off."""
        return self._api.url if self._api is not None else ""

    @property
    def control(self) -> PipelineControl:
        if self._pipeline is None:
            raise PipelineError("the video program has not started yet")
        return self._pipeline

    def prepare(self) -> None:
        """Loads the models and checks the settings. Touches no file. Raises InvalidSettings, ModelUnusable."""
        try:
            self._models = self._prepared()
        except BaseException:
            self.stop(0.0)
            raise

    def start(self) -> None:
        """Starts the threads and begins to open every source; calls `prepare` if needed."""
        if self._models is None:
            self.prepare()
        assert self._models is not None
        try:
            self._start(self._models)
        except BaseException:
            self.stop(0.0)
            raise

    def _prepared(self) -> _Models:
        settings, most = self._settings, SourcesOptions().max_sources
        self._check_api()
        if len(settings.sources) > most:
            raise TooManySources(f"{len(settings.sources)} sources are given, and {most} are the most; use --shard i/n")
        new_tracker(settings.tracker)  # its library takes seconds to import: not while cameras wait
        self._engine.start(ENGINE_TIMEOUT_S)
        network = _primary(self._engine, settings.primary)
        check_classes(settings.rules_sections, network.labels)
        secondaries = tuple(_secondary(self._engine, network, row) for row in settings.secondaries)
        return _Models(network, secondaries, *self._card.sources(settings.gpu, self._engine, network))

    def _start(self, models: _Models) -> None:
        settings, network = self._settings, models.network
        rules_of = partial(rules_from, labels=network.labels, has_tracker=settings.tracker.has_tracks)
        is_single = len(settings.sources) == 1
        sinks = allowing(settings.sinks, settings.api.allowed_outbound)
        if settings.events is not None:
            sinks = (*sinks, settings.events)
        self._outlets = compose_sinks(
            sinks, self._metrics, self._watch, settings.osd, is_single=is_single, device=self._card.device
        )
        outlets = self._outlets

        def analytics_of(source: SourceConfig, section: object, former: Analytics | None) -> Analytics:
            rules: Rules = rules_of(section)
            is_camera = is_live(source.uri)
            outlets.set_source(source.source_id, name=source.camera_name, rules=rules, is_live=is_camera)
            return (
                former.changed(rules) if isinstance(former, SourceAnalytics) else SourceAnalytics(rules, network.labels)
            )

        parts = PipelineParts(
            engine=self._engine,
            network=network,
            secondaries=models.secondaries,
            new_tracker=partial(new_tracker, settings.tracker),
            new_analytics=analytics_of,
            section=settings.analytics.content if settings.analytics is not None else None,
            outlets=outlets.outlets,
            recorder=outlets.recorder,
            forget_drawing=outlets.forget_source,
            metrics=self._metrics,
        )
        self._pipeline = Pipeline(parts, _options(settings, models))
        self._pipeline.start()
        for source in settings.sources:
            self._pipeline.take_in(source.config, settings.rules_section(source))
        self._start_api(self._pipeline, outlets)

    def _watch(self, source_id: str, fps: float) -> None:
        if self._pipeline is not None:
            self._pipeline.watch(source_id, fps)

    def _check_api(self) -> None:
        """Checks the API before cameras are opened and folders are made."""
        if self._settings.api.is_enabled:
            check_address(self._api_options())

    def _start_api(self, pipeline: Pipeline, outlets: SinkSet) -> None:
        if not self._settings.api.is_enabled:
            return
        from penstock_video.api.server import ApiServer  # FastAPI: a quarter of the imports of a run

        server = ApiServer(pipeline, outlets.previews, _Page(pipeline), self._api_options(), outlets.archive)
        server.start()
        self._api = server

    def _api_options(self) -> ApiOptions:
        return ApiOptions.of(self._settings.api, self._api_parts)

    def statistics(self) -> tuple[SourceStatistics, ...]:
        """Statistics of every source; empty before the start."""
        return self._pipeline.statistics() if self._pipeline is not None else ()

    def removed(self) -> tuple[SourceStatistics, ...]:
        return self._pipeline.removed() if self._pipeline is not None else ()

    def sink_failures(self) -> tuple[str, ...]:
        """For each failed sink: why, and how many results are missing."""
        outlets = self._outlets.outlets if self._outlets is not None else ()
        failed = (outlet for outlet in outlets if outlet.failure)
        return tuple(one.sentence for one in failed) + (
            self._outlets.recorder.failures() if self._outlets is not None and self._outlets.recorder else ()
        )

    def records(self) -> Mapping[str, SourceRecord]:
        """By source, for the page of the run; empty without the sink `summary`. Complete after `stop`."""
        return self._outlets.records if self._outlets is not None else {}

    def wait(self, timeout_s: float) -> bool:
        """Whether every source is over; False if the API may add the first. Raises PipelineError on a fatal error."""
        return self._pipeline is None or self._pipeline.wait(timeout_s)

    def stop(self, grace_s: float) -> None:
        """Finishes decoded frames and files, as time allows. A second call does nothing."""
        until = time.monotonic() + grace_s
        if self._api is not None:
            self._api.stop(min(max(grace_s, 0.1), 2.0))
        is_whole = self._pipeline is None or self._pipeline.stop(grace_s, is_hurried=grace_s <= 0)
        if not is_whole and grace_s > 0:
            log.error("not everything was finished in time", seconds=grace_s)
        self._engine.close(max(until - time.monotonic(), 1.0))
        self._card.close()


class _Page:
    """The metrics page, rendered for each request."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def page(self) -> bytes:
        return self._pipeline.metrics_page()


def _primary(engine: Engine, settings: PrimarySettings) -> Network:
    network = engine.network(settings.model, MODEL_TIMEOUT_S, settings.version)
    if not network.finds_objects and not network.is_classifier:
        raise ModelUnusable(
            f"a primary-gie is a detector or a classifier, and {network.name!r} is neither; networks for text and "
            "embeddings are secondary-gie"
        )
    wanted = _class_ids(network, settings, "primary-gie.operate-on-class-ids")
    return network.with_threshold(settings.threshold).with_iou(settings.iou).of_classes(wanted)


def _secondary(engine: Engine, primary: Network, settings: SecondarySettings) -> SecondaryModel:
    network = engine.network(settings.model, MODEL_TIMEOUT_S, settings.version)
    if not primary.finds_objects:
        raise ModelUnusable(f"{primary.name!r} finds no objects that {network.name!r} could look at; give a detector")
    if network.finds_objects and not network.has_keypoints:
        raise ModelUnusable(
            f"a secondary-gie describes an object; {network.name!r} is a detector without keypoints (a model with "
            "keypoints has a keypoint-shape in its config.pbtxt)"
        )
    if network.card.network_type is NetworkType.SEGMENTATION:
        raise ModelUnusable(f"a secondary-gie describes an object; {network.name!r} is a segmentation of pixels")
    options = SecondaryOptions(
        class_ids=_class_ids(primary, settings, "secondary-gie.operate-on-class-ids"),
        min_width=settings.min_width,
        min_height=settings.min_height,
        reinfer_interval=settings.reinfer_interval,
    )
    return SecondaryModel(network.with_threshold(settings.threshold or None), options)


def _class_ids(network: Network, settings: PrimarySettings | SecondarySettings, key: str) -> frozenset[int]:
    names: Sequence[int | str] = settings.operate_on_class_ids
    past = [name for name in names if isinstance(name, int) and 0 < len(network.labels) <= name]
    if past:
        text = f"{key} names class {past[0]}; {network.name!r} has classes 0 to {len(network.labels) - 1}"
        raise InvalidSettings([SettingsFault(settings.classes_at, text)])
    unknown = [name for name in names if isinstance(name, str) and name not in network.labels]
    if unknown:
        known = ", ".join(network.labels[:20]) or "none"
        more = ", …" if len(network.labels) > 20 else ""
        hint = close_to(unknown[0], network.labels) or f"its labels: {known}{more}"
        text = f"{key} names {unknown[0]!r}, which {network.name!r} does not know; {hint}"
        raise InvalidSettings([SettingsFault(settings.classes_at, text)])
    return frozenset(network.labels.index(name) if isinstance(name, str) else name for name in names)


def _decoders(settings: VideoSettings) -> set[DecoderKind]:
    """The decoders of all sources that exist or that the API may add."""
    wishes = {source.config.decoder for source in settings.sources}
    return wishes if wishes and not settings.api.is_enabled else wishes | {DecoderKind.AUTO}


def _options(settings: VideoSettings, models: _Models) -> PipelineOptions:
    sources, network = max(len(settings.sources), 1), models.network
    mux = settings.mux.options(min(max(network.max_batch_size, 1), max(FITTING_BATCH, sources)))
    dispatch = DispatchOptions()
    frames = math.ceil(mux.batch_size * dispatch.max_batches / sources) + SPARE_SLOTS
    on_cpu = SourcesOptions(
        ring_frames=max(frames, LEAST_SLOTS),
        gpu_absence=models.gpu_absence,
        allowed_outbound=settings.api.allowed_outbound,
    )
    on_card = replace(on_cpu, gpu=models.gpu, max_opening=OPENING_ON_A_CARD)
    return PipelineOptions(
        mux=mux,
        dispatch=dispatch,
        sources=on_cpu if models.gpu is None else on_card,
        interval=settings.primary.interval,
    )
