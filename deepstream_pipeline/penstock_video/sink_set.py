"""Composes the sinks that the settings name, each with its queue and thread, and the previews."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from penstock_video.errors import SinkFailed
from penstock_video.gpu.device import Device
from penstock_video.interfaces import Sink
from penstock_video.metrics import VideoMetrics
from penstock_video.runner.recorder import SmartRecorder
from penstock_video.runner.sink_worker import SinkWorker, SinkWorkerOptions
from penstock_video.settings.sinks import SinkOptions
from penstock_video.sinks.broker import BrokerOptions, BrokerSink
from penstock_video.sinks.hls import HlsOptions, HlsSink
from penstock_video.sinks.jpeg import jpeg_encoder
from penstock_video.sinks.jsonl import JsonlOptions, JsonlSink
from penstock_video.sinks.osd import Osd, OsdOptions
from penstock_video.sinks.preview import PreviewBoard, PreviewOptions
from penstock_video.sinks.recordings import RecordOptions
from penstock_video.sinks.rtsp_out import RtspOutOptions, RtspOutSink
from penstock_video.sinks.video_file import AnnotatedOptions, AnnotatedSink

PICTURES = 16  # that wait for a sink that draws: of 1080p, 6 MB each
RESULTS = 1024  # that wait for a sink that does not


@dataclass(frozen=True, slots=True)
class SinkSet:
    """osd: what is drawn on every picture. previews: of the API. recorder: None without recordings."""

    outlets: tuple[SinkWorker, ...]
    osd: Osd
    previews: PreviewBoard
    recorder: SmartRecorder | None


class _Gauge:
    """A broker's spool in the metrics, under the sink's name."""

    def __init__(self, name: str, metrics: VideoMetrics) -> None:
        self._name = name
        self._metrics = metrics

    def depth(self, n: int, size_bytes: int) -> None:
        self._metrics.sink_depth(self._name, n, size_bytes)

    def dropped(self, n: int) -> None:
        self._metrics.sink_dropped(self._name, n)

    def failed(self) -> None:
        self._metrics.sink_errors(self._name)


def allowing(options: Sequence[SinkOptions], allowed_outbound: tuple[str, ...]) -> tuple[SinkOptions, ...]:
    """The same sinks with --allow-outbound's values. Without them no sink connects to a cloud's metadata service."""
    return tuple(
        replace(one, allowed_outbound=allowed_outbound) if isinstance(one, BrokerOptions | RtspOutOptions) else one
        for one in options
    )


def compose_sinks(
    options: Sequence[SinkOptions],
    metrics: VideoMetrics,
    on_watch: Callable[[str, bool], None],
    drawing: OsdOptions,
    *,
    is_single: bool,
    device: Device | None = None,
) -> SinkSet:
    """on_watch: called with a source and whether its preview is watched. is_single: the only source's files need
    no folder of their own. device: the card that the program has open, for previews. Raises SinkFailed for a folder
    that cannot be written to; then no sink is left open."""
    osd = Osd(drawing)
    preview_options = next((one for one in options if isinstance(one, PreviewOptions)), PreviewOptions())
    jpeg = jpeg_encoder(preview_options.jpeg, device)
    previews = PreviewBoard(preview_options, osd, on_watch=on_watch, jpeg=jpeg)
    record = next((one for one in options if isinstance(one, RecordOptions)), None)
    rows: list[tuple[Sink, SinkWorkerOptions]] = [(previews, SinkWorkerOptions("preview", capacity=2, draws=True))]
    names: set[str] = set()
    with ExitStack() as half_made:
        for one in options:
            if isinstance(one, PreviewOptions | RecordOptions):
                continue
            name = _name(one, names)
            sink, draws = _sink(one, osd, is_single, _Gauge(name, metrics))
            half_made.callback(_let_go, sink)
            capacity, has_spool = PICTURES if draws else RESULTS, isinstance(one, BrokerOptions)
            rows.append((sink, SinkWorkerOptions(name, capacity, draws=draws, always_draws=draws, has_spool=has_spool)))
        recorder = SmartRecorder(record, metrics) if record is not None else None
        half_made.pop_all()
    return SinkSet(tuple(SinkWorker(sink, row, metrics) for sink, row in rows), osd, previews, recorder)


def _let_go(sink: Sink) -> None:
    """Close one that got nothing: what it says of that is not why the program does not start."""
    with suppress(SinkFailed):
        sink.close()


def _name(options: SinkOptions, taken: set[str]) -> str:
    """kafka, kafka-2, …: the sink's name in metrics and logs."""
    kind = type(options).__name__.removesuffix("Options").lower()
    name, number = kind, 1
    while name in taken:
        number += 1
        name = f"{kind}-{number}"
    taken.add(name)
    return name


def _sink(options: SinkOptions, osd: Osd, is_single: bool, gauge: _Gauge) -> tuple[Sink, bool]:
    """(the sink, whether it draws)."""
    if isinstance(options, JsonlOptions):
        return JsonlSink(options), False
    if isinstance(options, AnnotatedOptions):
        return AnnotatedSink(options, osd, is_single=is_single), True
    if isinstance(options, HlsOptions):
        return HlsSink(options, osd, is_single=is_single), True
    if isinstance(options, RtspOutOptions):
        return RtspOutSink(options, osd, is_single=is_single), True
    assert isinstance(options, BrokerOptions)
    return _broker(options, gauge), False


def _broker(options: BrokerOptions, gauge: _Gauge) -> BrokerSink:
    """Clients of brokers are imported only where one is asked for."""
    from penstock_video.sinks.kafka import KafkaOptions, kafka_sink
    from penstock_video.sinks.mqtt import MqttOptions, mqtt_sink
    from penstock_video.sinks.redis_stream import RedisOptions, redis_sink
    from penstock_video.sinks.webhook import WebhookOptions, webhook_sink

    if isinstance(options, KafkaOptions):
        return kafka_sink(options, gauge)
    if isinstance(options, MqttOptions):
        return mqtt_sink(options, gauge)
    if isinstance(options, RedisOptions):
        return redis_sink(options, gauge)
    assert isinstance(options, WebhookOptions)
    return webhook_sink(options, gauge)
