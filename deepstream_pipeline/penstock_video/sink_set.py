"""Composes the sinks that the settings name, each with its queue and thread, and the previews."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace
from pkgutil import resolve_name

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

PICTURES = 16  # waiting for a sink that draws: of 1080p, 6 MB each
RESULTS = 1024  # waiting for a sink that does not draw


@dataclass(frozen=True, slots=True)
class SinkSet:
    """osd: what is drawn on every picture. previews: of the API. recorder: None without recordings."""

    outlets: tuple[SinkWorker, ...]
    osd: Osd
    previews: PreviewBoard
    recorder: SmartRecorder | None


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
    with ExitStack() as half_made:
        for one in options:
            kind = kind_of(one)
            if kind.takes is SinkInput.NONE:
                continue
            name = _name(one, names)
            sink = _sink(kind, one, osd, is_single, SinkGauge(name, metrics))
            half_made.callback(_let_go, sink)
            rows.append((sink, _worker_options(name, kind)))
        recorder = SmartRecorder(record, metrics) if record is not None else None
        half_made.pop_all()
    return SinkSet(tuple(SinkWorker(sink, row, metrics) for sink, row in rows), osd, previews, recorder)


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
