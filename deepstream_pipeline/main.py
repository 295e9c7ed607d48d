"""The composer of the video program: settings become parts, and the parts one pipeline."""

import math
import os
import ssl
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import structlog

from deepstream_pipeline.analytics.reading import rules_from
from deepstream_pipeline.analytics.rules import Rules
from deepstream_pipeline.analytics.source import SourceAnalytics, new_analytics
from deepstream_pipeline.api.audit import Audit
from deepstream_pipeline.api.listening import check_address
from deepstream_pipeline.api.options import ApiOptions
from deepstream_pipeline.api.server import ApiServer
from deepstream_pipeline.card import open_card
from deepstream_pipeline.decode.uri import is_live
from deepstream_pipeline.errors import ModelUnusable, PipelineError, TooManySources
from deepstream_pipeline.infer.crops import SecondaryOptions
from deepstream_pipeline.infer.engine import Engine
from deepstream_pipeline.infer.network import Network
from deepstream_pipeline.infer.place import EnginePlace
from deepstream_pipeline.interfaces import Analytics, PipelineControl
from deepstream_pipeline.metrics import VideoMetrics
from deepstream_pipeline.outlets import Outlets, allowing, compose_outlets
from deepstream_pipeline.runner.dispatch import DispatchOptions
from deepstream_pipeline.runner.pipeline import Pipeline, PipelineOptions, PipelineParts
from deepstream_pipeline.runner.secondary import SecondaryModel
from deepstream_pipeline.settings.complaints import Complaint, SettingsRefused, close_to
from deepstream_pipeline.settings.records import PrimarySettings, SecondarySettings, VideoSettings
from deepstream_pipeline.settings.rules import check_classes
from deepstream_pipeline.sources.options import GpuSources, SourcesOptions
from deepstream_pipeline.track.options import new_tracker
from deepstream_pipeline.types import DecoderKind, SourceConfig, SourceStatistics

log = structlog.get_logger(component="video")
ENGINE_TIMEOUT_S = 60.0
MODEL_TIMEOUT_S = 60.0
FITTING_BATCH = 4  # frames of a batch where nobody said, and the model and the sources allow it
SPARE_SLOTS = 3  # of a ring, beyond what the engine may hold: one that is written, two that wait
LEAST_SLOTS = 6
OPENING_ON_A_CARD = 32  # sources at one moment: a process begins once for several


@dataclass(frozen=True, slots=True)
class _Models:
    """What the engine says of the models that the settings name."""

    network: Network
    secondaries: tuple[SecondaryModel, ...]
    gpu: GpuSources | None
    gpu_absence: str


class Program:
    """`prepare`, `start`, `wait`, `stop`. Raises PipelineError, with a text for a person, where it cannot start."""

    def __init__(
        self,
        settings: VideoSettings,
        place: EnginePlace,
        *,
        tls: Callable[[], ssl.SSLContext] | None = None,
        audit: Audit | None = None,
    ) -> None:
        """tls, audit: of the control API."""
        self._settings = settings
        self._tls, self._audit = tls, audit
        self._card = open_card(settings.gpu, _decoders(settings))
        self._engine = Engine(place, device=self._card.device)
        self._metrics = VideoMetrics()
        self._models: _Models | None = None
        self._outlets: Outlets | None = None
        self._pipeline: Pipeline | None = None
        self._api: ApiServer | None = None

    @property
    def api_url(self) -> str:
        """Of the control API; empty where there is none."""
        return self._api.url if self._api is not None else ""

    @property
    def control(self) -> PipelineControl:
        """What the API asks, for whoever has the program in hand."""
        if self._pipeline is None:
            raise PipelineError("the video program has not started yet")
        return self._pipeline

    def prepare(self) -> None:
        """Returns when the models are known, and all that the settings say of them holds. No file is touched by then.

        Raises SettingsRefused, with places, for classes that a model does not have; ModelUnusable for the model.
        """
        try:
            self._models = self._prepared()
        except BaseException:
            self.stop(0.0)
            raise

    def start(self) -> None:
        """Returns when the threads run and every source is being opened; prepares what was not prepared."""
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
        self._outlets = compose_outlets(
            sinks, self._metrics, self._watch, settings.osd, is_single=is_single, device=self._card.device
        )
        osd = self._outlets.osd

        def analytics_of(source: SourceConfig, section: object, former: Analytics | None) -> Analytics:
            rules: Rules = rules_of(section)
            is_camera = is_live(source.uri)
            osd.set_source(source.source_id, name=source.camera_name, rules=rules, is_live=is_camera)
            return (
                former.changed(rules) if isinstance(former, SourceAnalytics) else new_analytics(rules, network.labels)
            )

        parts = PipelineParts(
            engine=self._engine,
            network=network,
            secondaries=models.secondaries,
            new_tracker=partial(new_tracker, settings.tracker),
            new_analytics=analytics_of,
            section=settings.analytics.content if settings.analytics is not None else None,
            outlets=self._outlets.outlets,
            recorder=self._outlets.recorder,
            forget_drawing=osd.forget,
            metrics=self._metrics,
        )
        self._pipeline = Pipeline(parts, _options(settings, models))
        self._pipeline.start()
        for source in settings.sources:
            self._pipeline.take_in(source.config, settings.rules_section(source))
        self._start_api(self._pipeline, self._outlets)

    def _watch(self, source_id: str, is_watched: bool) -> None:
        if self._pipeline is not None:
            self._pipeline.watch(source_id, is_watched)

    def _check_api(self) -> None:
        """Before cameras are opened and folders made for nothing."""
        if self._settings.api.is_enabled:
            check_address(self._api_options())

    def _start_api(self, pipeline: Pipeline, outlets: Outlets) -> None:
        if not self._settings.api.is_enabled:
            return
        server = ApiServer(pipeline, outlets.previews, _Page(pipeline), self._api_options())
        server.start()
        self._api = server

    def _api_options(self) -> ApiOptions:
        return ApiOptions.of(self._settings.api, os.environ, tls=self._tls, audit=self._audit)

    def statistics(self) -> tuple[SourceStatistics, ...]:
        """Of every source; empty before the start."""
        return self._pipeline.statistics() if self._pipeline is not None else ()

    def removed(self) -> tuple[SourceStatistics, ...]:
        """Of sources that went while it ran: how they were at last."""
        return self._pipeline.removed() if self._pipeline is not None else ()

    def sink_failures(self) -> tuple[str, ...]:
        """A sentence for each sink that failed, now or before: why, and how many results are not in it."""
        outlets = self._outlets.outlets if self._outlets is not None else ()
        failed = (outlet for outlet in outlets if outlet.failure)
        return tuple(one.sentence for one in failed) + (
            self._outlets.recorder.failures() if self._outlets is not None and self._outlets.recorder else ()
        )

    def wait(self, timeout_s: float) -> bool:
        """Whether every source is over by then; never while there is none, which the API may add.

        Raises PipelineError where that will never be.
        """
        return self._pipeline is None or self._pipeline.wait(timeout_s)

    def stop(self, grace_s: float) -> None:
        """What was decoded is finished and files are whole, if the time allows it. Harmless again."""
        until = time.monotonic() + grace_s
        if self._api is not None:
            self._api.stop(min(max(grace_s, 0.1), 2.0))
        is_whole = self._pipeline is None or self._pipeline.stop(grace_s, is_hurried=grace_s <= 0)
        if not is_whole and grace_s > 0:
            log.error("not everything was finished in time", seconds=grace_s)
        self._engine.close(max(until - time.monotonic(), 1.0))


class _Page:
    """The metrics, made fresh for who asks."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline

    def page(self) -> bytes:
        return self._pipeline.metrics_page()


def _primary(engine: Engine, settings: PrimarySettings) -> Network:
    network = engine.network(settings.model, MODEL_TIMEOUT_S, settings.version)
    wanted = _class_ids(network, settings, "primary-gie.operate-on-class-ids")
    return network.with_threshold(settings.threshold).of_classes(wanted)


def _secondary(engine: Engine, primary: Network, settings: SecondarySettings) -> SecondaryModel:
    network = engine.network(settings.model, MODEL_TIMEOUT_S, settings.version)
    if primary.is_classifier:
        raise ModelUnusable(f"{primary.name!r} finds no objects that {network.name!r} could look at; give a detector")
    if not network.is_classifier:
        raise ModelUnusable(f"a secondary-gie names what an object is; {network.name!r} is a detector")
    options = SecondaryOptions(
        class_ids=_class_ids(primary, settings, "secondary-gie.operate-on-class-ids"),
        min_width=settings.min_width,
        min_height=settings.min_height,
        reinfer_interval=settings.reinfer_interval,
    )
    return SecondaryModel(network.with_threshold(settings.threshold or None), options)


def _class_ids(network: Network, settings: PrimarySettings | SecondarySettings, key: str) -> frozenset[int]:
    names: Sequence[int | str] = settings.operate_on_class_ids
    unknown = [name for name in names if isinstance(name, str) and name not in network.labels]
    if unknown:
        known = ", ".join(network.labels[:20]) or "none"
        more = ", …" if len(network.labels) > 20 else ""
        hint = close_to(unknown[0], network.labels) or f"its labels: {known}{more}"
        text = f"{key} names {unknown[0]!r}, which {network.name!r} does not know; {hint}"
        raise SettingsRefused([Complaint(settings.classes_at, text)])
    return frozenset(network.labels.index(name) if isinstance(name, str) else name for name in names)


def _decoders(settings: VideoSettings) -> set[DecoderKind]:
    """Of the sources that there are, or may be: the API adds what it is asked to."""
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
