"""Composes the sinks that the settings name, each with its queue and thread, and the previews."""

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pkgutil import resolve_name

import structlog

from penstock_video.errors import SinkFailed
from penstock_video.gpu.device import Device
from penstock_video.interfaces import Extension, Sink
from penstock_video.metrics import VideoMetrics
from penstock_video.runner.recorder import SmartRecorder
from penstock_video.runner.sink_worker import SinkWorker, SinkWorkerOptions
from penstock_video.sinks.broker import BrokerOptions, SinkGauge
from penstock_video.sinks.jpeg import jpeg_encoder
from penstock_video.sinks.osd import Osd, OsdOptions
from penstock_video.sinks.preview import PreviewBoard, PreviewOptions
from penstock_video.sinks.recordings import RecordOptions
from penstock_video.sinks.registry import SinkInput, SinkKind, kind_of
from penstock_video.sinks.rtsp_out import RtspOutOptions
from penstock_video.sinks.rule_drawing import RuleShapes
from penstock_video.sinks.run_record import SourceRecord, SummarySink
from penstock_video.store.options import EventsOptions, Snapshots
from penstock_video.store.reader import EventArchive, EventReader
from penstock_video.store.writer import EventStore

log = structlog.get_logger(component="video")

SAMPLE_S = 0.2  # the event store looks at tracks and counts five times a second
PICTURES = 16  # waiting for a sink that draws: of 1080p, 6 MB each
RESULTS = 1024  # waiting for a sink that does not draw


@dataclass(frozen=True, slots=True)
class SinkSet:
    """osd: what is drawn on every picture. previews: of the API. recorder: None without recordings. events: None
    without a store. archive: what the API reads of it. records: by source, for the page of the run; empty without the
    sink `summary`."""

    outlets: tuple[SinkWorker, ...]
    osd: Osd
    previews: PreviewBoard
    recorder: SmartRecorder | None
    events: EventStore | None = None
    archive: EventArchive | None = None
    records: Mapping[str, SourceRecord] = field(default_factory=dict)

    def set_source(self, source_id: str, *, name: str, rules: RuleShapes, is_live: bool) -> None:
        """Sets what is drawn of a source and how its times are stored."""
        self.osd.set_source(source_id, name=name, rules=rules, is_live=is_live)
        if self.events is not None:
            self.events.set_source(source_id, name=name, rules=rules, is_live=is_live)

    def forget_source(self, source_id: str) -> None:
        """Forgets what is drawn of a removed source."""
        self.osd.forget(source_id)
        if self.events is not None:
            self.events.forget_source(source_id)


def allowing(options: Sequence[object], allowed_outbound: tuple[str, ...]) -> tuple[object, ...]:
    """The sinks with --allow-outbound's values. Without them no sink connects to a cloud's metadata service."""
    return tuple(
        replace(one, allowed_outbound=allowed_outbound) if isinstance(one, BrokerOptions | RtspOutOptions) else one
        for one in options
    )


def compose_sinks(
    options: Sequence[object],
    metrics: VideoMetrics,
    on_watch: Callable[[str, float], None],
    drawing: OsdOptions,
    *,
    is_single: bool,
    device: Device | None = None,
) -> SinkSet:
    """The sinks. on_watch: see PreviewBoard. is_single: the only source's files
    need no folder of their own. device: the open GPU, for previews. Raises SinkFailed for a folder that is not
    writable; then no sink is left open."""
    osd = Osd(drawing)
    preview_options = next((one for one in options if isinstance(one, PreviewOptions)), PreviewOptions())
    jpeg = jpeg_encoder(preview_options.jpeg, device)
    previews = PreviewBoard(preview_options, osd, on_watch=on_watch, jpeg=jpeg)
    record = next((one for one in options if isinstance(one, RecordOptions)), None)
    rows: list[tuple[Sink, SinkWorkerOptions]] = [(previews, SinkWorkerOptions("preview", capacity=2, draws=True))]
    names: set[str] = set()
    records: Mapping[str, SourceRecord] = {}
    with ExitStack() as half_made:
        for one in options:
            if isinstance(one, EventsOptions):
                continue
            kind = kind_of(one)
            if kind.takes is SinkInput.NONE:
                continue
            name = _name(one, names)
            sink = _sink(kind, one, osd, is_single, SinkGauge(name, metrics))
            half_made.callback(_let_go, sink)
            records = sink.records if isinstance(sink, SummarySink) else records
            rows.append((sink, _worker_options(name, kind)))
        events = next((one for one in options if isinstance(one, EventsOptions)), None)
        store = _event_store(events, drawing, record) if events is not None else None
        if events is not None and store is not None:
            half_made.callback(_let_go, store)
            rows.append((store, _store_options(events, has_gpu=device is not None)))
        recorder = _recorder(record, metrics, store)
        half_made.pop_all()
    archive = None
    if store is not None and events is not None and events.folder is not None:
        recordings = record.folder if record is not None else None
        archive = EventArchive(EventReader(events.folder), recordings, lambda: store.alarm)
    workers = tuple(SinkWorker(sink, row, metrics) for sink, row in rows)
    return SinkSet(workers, osd, previews, recorder, store, archive, records)


def _event_store(options: EventsOptions, drawing: OsdOptions, record: RecordOptions | None) -> EventStore | None:
    """The store; None, with a warning, if its default folder cannot be used."""
    osd = Osd(replace(drawing, has_boxes=True, has_labels=True, has_rules=True, has_trails=False, has_counters=False))
    recordings = record.folder if record is not None else None
    try:
        return EventStore(options, osd, recordings=recordings)
    except SinkFailed as error:
        if options.is_enabled:
            raise
        log.warning("events are not stored", reason=error.message)
        return None


def _store_options(options: EventsOptions, *, has_gpu: bool) -> SinkWorkerOptions:
    has_snapshots = options.snapshots is Snapshots.ON or (options.snapshots is Snapshots.AUTO and not has_gpu)
    return SinkWorkerOptions("events", RESULTS, has_snapshots=has_snapshots, sample_s=SAMPLE_S)


def _recorder(options: RecordOptions | None, metrics: VideoMetrics, store: EventStore | None) -> SmartRecorder | None:
    if options is None:
        return None
    return SmartRecorder(options, metrics, store.note_clip) if store is not None else SmartRecorder(options, metrics)


def _let_go(sink: Sink) -> None:
    """Closes an unused sink; errors do not matter."""
    with suppress(SinkFailed):
        sink.close()


def _name(options: object, taken: set[str]) -> str:
    """The sink's name in metrics and logs: kafka, kafka-2, …"""
    class_name = options.type.partition(":")[2] if isinstance(options, Extension) else type(options).__name__
    kind = class_name.removesuffix("Options").lower()
    name, number = kind, 1
    while name in taken:
        number += 1
        name = f"{kind}-{number}"
    taken.add(name)
    return name


def _sink(kind: SinkKind, options: object, osd: Osd, is_single: bool, gauge: SinkGauge) -> Sink:
    if isinstance(options, Extension):
        sink: Sink = options.create()
        return sink
    new = resolve_name(kind.sink)
    if kind.takes is SinkInput.PICTURES:
        sink = new(options, osd, is_single=is_single)
    elif kind.takes is SinkInput.SPOOL:
        sink = new(options, gauge)
    else:
        sink = new(options)
    return sink


def _worker_options(name: str, kind: SinkKind) -> SinkWorkerOptions:
    draws, has_spool = kind.takes is SinkInput.PICTURES, kind.takes is SinkInput.SPOOL
    capacity = PICTURES if draws else RESULTS
    return SinkWorkerOptions(name, capacity, draws=draws, always_draws=draws, has_spool=has_spool)
