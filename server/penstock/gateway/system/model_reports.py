"""ModelReports: responses of GET /v1/models."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from penstock.engines.model_health import KnownModel
from penstock.engines.ort_serving.placement import EngineFacts
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.batching.queue import QueueStatistics
from penstock.gateway.request_counts import Counts, RecentFigures, RequestCounts, RequestHistory
from penstock.gateway.system.reports import RecentResult
from penstock.protocol.engine import ModelConfig, ModelState, TensorSpec
from penstock.protocol.errors import InferenceError, InvalidRequest, ModelNotFound
from penstock.protocol.inference import BatchOwner
from penstock.protocol.model_reports import (
    BatchingReport,
    CardReport,
    ModelReport,
    ModelsReport,
    QueueState,
    RunsOn,
    TensorReport,
    TrafficReport,
    VersionState,
)
from penstock.vision.card import NotAnImageModel, VisionCard
from penstock.vision.spec import NetworkType

MAX_MODELS, MAX_INSTANCES = 1000, 16
MAX_TENSORS, MAX_VERSIONS, MAX_KEYPOINTS, MAX_TEXT = 64, 64, 256, 1000
LABELS_IN_LIST, LABELS_OF_ONE = 8, 2000
INDEX_TIMEOUT_S, AGE_S = 2.0, 1.0
_EMPTY_QUEUE = QueueStatistics(0, 0, 0, 0, 0, None, None)


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSources:
    """Functions that read the gateway's state. All run in the event loop, except `counts` if counts_block.

    card: raises InvalidRequest. facts: how the engine runs a model's instances; empty if it does not report it.
    """

    models: Callable[[], Mapping[str, KnownModel]]
    is_left_out: Callable[[KnownModel], bool]
    index: Callable[[], Awaitable[list[ModelState]]]
    card: Callable[[ModelConfig], VisionCard | None]
    options: Callable[[str], BatchOptions]
    queues: Callable[[], Mapping[str, QueueStatistics]]
    counts: Callable[[], Counts]
    counts_block: bool
    is_removable: Callable[[str], bool]
    facts: Callable[[str], Sequence[EngineFacts]]


class ModelReports:
    """Create it inside the running loop."""

    def __init__(self, sources: ModelSources, clock: Callable[[], float] = time.monotonic) -> None:
        self._sources, self._clock = sources, clock
        self._history = RequestHistory()
        self._counts = RecentResult(self._read_counts, AGE_S)
        self._versions = RecentResult(self._read_versions, AGE_S)

    async def run(self) -> None:
        """Stores request counts every RequestHistory.INTERVAL_S, until cancelled."""
        while True:
            self._history.add(self._clock(), await self._read_counts())
            await asyncio.sleep(RequestHistory.INTERVAL_S)

    async def all(self, over_s: float = RequestHistory.WINDOW_S) -> ModelsReport:
        """All models, sorted by name. over_s: seconds over which rates and latencies are computed."""
        known = sorted(self._sources.models().items())
        context = await self._context(over_s)
        rows = [self._report(one, context, LABELS_IN_LIST) for _, one in known[:MAX_MODELS]]
        return ModelsReport(rows, len(known) - len(rows))

    async def one(self, name: str, over_s: float = RequestHistory.WINDOW_S) -> ModelReport:
        """One model, with more labels. Raises ModelNotFound."""
        known = self._sources.models().get(name)
        if known is None:
            raise ModelNotFound(f"there is no model {name[:200]!r}; GET /v1/models lists them")
        return self._report(known, await self._context(over_s), LABELS_OF_ONE)

    async def _context(self, over_s: float) -> "_Context":
        counts, versions = await self._counts.get(), await self._versions.get()
        return _Context(self._clock(), over_s, counts, versions, self._sources.queues())

    async def _read_counts(self) -> Counts:
        if self._sources.counts_block:
            return await asyncio.to_thread(self._sources.counts)
        return self._sources.counts()

    async def _read_versions(self) -> dict[str, list[VersionState]]:
        """Versions by model name; empty if the engine does not respond."""
        try:
            async with asyncio.timeout(INDEX_TIMEOUT_S):
                rows = sorted(await self._sources.index(), key=lambda row: row.name)
        except (InferenceError, TimeoutError):
            return {}
        return {
            name: [VersionState(row.version, row.state, row.reason[:MAX_TEXT]) for row in versions][:MAX_VERSIONS]
            for name, versions in groupby(rows, key=lambda row: row.name)
        }

    def _report(self, known: KnownModel, context: "_Context", label_count: int) -> ModelReport:
        versions, queue = context.versions.get(known.name, []), context.queues.get(known.name, _EMPTY_QUEUE)
        config, options = known.config, self._sources.options(known.name)
        card, problem = self._card(config, label_count)
        recent = self._history.figures(known.name, context.now, context.counts, context.over_s)
        return ModelReport(
            name=known.name,
            state=self._state(known, versions),
            reason=known.reason[:MAX_TEXT],
            is_removable=self._sources.is_removable(known.name),
            versions=versions,
            backend=config.backend if config is not None else "",
            inputs=_tensors(config.inputs if config is not None else ()),
            outputs=_tensors(config.outputs if config is not None else ()),
            card=card,
            card_problem=problem,
            batching=_batching(options, queue),
            queue=QueueState(queue.depth, queue.in_flight, _ms(queue.wait_s)),
            traffic=_traffic(context.counts.get(known.name, RequestCounts()), queue, recent),
            runs_on=self._runs_on(known),
        )

    def _runs_on(self, known: KnownModel) -> RunsOn | None:
        instances = self._sources.facts(known.name)[:MAX_INSTANCES] if known.is_ready else ()
        if not instances:
            return None
        first, devices = instances[0], dict.fromkeys(facts.device for facts in instances)
        fallbacks = dict.fromkeys(sentence[:MAX_TEXT] for facts in instances for sentence in facts.fallbacks)
        return RunsOn(", ".join(devices), first.precision, list(first.graph_batch_sizes), list(fallbacks))

    def _state(self, known: KnownModel, versions: list[VersionState]) -> str:
        if known.is_ready:
            return "ready"
        if any(version.state == "LOADING" for version in versions):
            return "loading"
        return "not loaded" if self._sources.is_left_out(known) else "unavailable"

    def _card(self, config: ModelConfig | None, label_count: int) -> tuple[CardReport | None, str]:
        """The card, or why it is unusable; both empty if the model has no card."""
        if config is None:
            return None, ""
        try:
            card = self._sources.card(config)
        except NotAnImageModel:
            return None, ""
        except InvalidRequest as error:
            return None, error.message[:MAX_TEXT]
        return None if card is None else card_report(card, label_count), ""


@dataclass(frozen=True, slots=True)
class _Context:
    """State that all rows of a response share."""

    now: float
    over_s: float
    counts: Counts
    versions: Mapping[str, list[VersionState]]
    queues: Mapping[str, QueueStatistics]


def card_report(card: VisionCard, label_count: int) -> CardReport:
    """The card, with label_count labels at most."""
    spec, usable = card.prepare_spec, card.layout.usable_options
    has_conf = "conf" in usable and card.network_type is not NetworkType.CLASSIFIER
    return CardReport(
        network_type=card.network_type.name.lower(),
        layout=card.layout.name,
        width=spec.width or None,
        height=spec.height or None,
        color=spec.color.name.lower(),
        resize=spec.fit.name.lower(),
        padding=spec.pad_value,
        scale=spec.scale,
        offsets=list(spec.offsets),
        channel_factors=list(spec.channel_factors),
        decoder="engine" if card.is_relayed else "gateway",
        options=sorted(usable),
        conf=card.layout_options.pre_cluster_threshold if has_conf else None,
        iou=card.layout_options.nms_iou_threshold if "iou" in usable else None,
        label_count=len(card.labels),
        labels=list(card.labels[:label_count]),
        keypoint_names=list(card.keypoint_names[:MAX_KEYPOINTS]),
        skeleton=[list(pair) for pair in card.skeleton[:MAX_KEYPOINTS]],
    )


def _tensors(specs: tuple[TensorSpec, ...]) -> list[TensorReport]:
    return [TensorReport(spec.name, str(spec.datatype), list(spec.shape)) for spec in specs[:MAX_TENSORS]]


def _batching(options: BatchOptions, queue: QueueStatistics) -> BatchingReport:
    formed = queue if options.owner is BatchOwner.GATEWAY else _EMPTY_QUEUE  # Triton joins the workers' calls
    count = sum(formed.batches_by_rows.values())
    rows = sum(size * number for size, number in formed.batches_by_rows.items())
    return BatchingReport(
        owner=options.owner,
        max_batch_size=options.max_batch_size,
        instances=options.instances,
        slo_p99_ms=_ms(options.slo_s),
        unmerged=options.unmerged,
        count=count,
        rows=rows,
        mean_rows=round(rows / count, 2) if count else None,
        closed_by=dict(formed.closed_by),
    )


def _traffic(counts: RequestCounts, queue: QueueStatistics, recent: RecentFigures) -> TrafficReport:
    return TrafficReport(
        requests=sum(counts.codes.values()),
        codes=counts.codes,
        refused=dict(queue.dropped),
        over_s=round(recent.over_s, 1),
        rate_per_s=round(recent.rate_per_s, 3),
        p50_ms=_ms(recent.p50_s),
        p99_ms=_ms(recent.p99_s),
    )


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(seconds * 1e3, 3)
