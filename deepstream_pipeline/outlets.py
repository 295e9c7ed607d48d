"""The sinks that the settings name, each behind its channel; what they share; and what is always there: previews."""

from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass, replace

from deepstream_pipeline.errors import SinkFailed
from deepstream_pipeline.gpu.device import Device
from deepstream_pipeline.interfaces import Sink
from deepstream_pipeline.metrics import VideoMetrics
from deepstream_pipeline.runner.outlet import Outlet, OutletOptions
from deepstream_pipeline.runner.recorder import Recorder
from deepstream_pipeline.settings.sinks import SinkOptions
from deepstream_pipeline.sinks.broker import BrokerOptions, BrokerSink
from deepstream_pipeline.sinks.hls import HlsOptions, HlsSink
from deepstream_pipeline.sinks.jpeg import jpeg_encoder
from deepstream_pipeline.sinks.jsonl import JsonlOptions, JsonlSink
from deepstream_pipeline.sinks.osd import Osd, OsdOptions
from deepstream_pipeline.sinks.preview import PreviewBoard, PreviewOptions
from deepstream_pipeline.sinks.recordings import RecordOptions
from deepstream_pipeline.sinks.rtsp_out import RtspOutOptions, RtspOutSink
from deepstream_pipeline.sinks.video_file import AnnotatedOptions, AnnotatedSink

PICTURES = 16  # that wait for a sink that draws: of 1080p, 6 MB each
RESULTS = 1024  # that wait for a sink that does not


@dataclass(frozen=True, slots=True)
class Outlets:
    """osd: what is drawn on every picture. previews: of the API. recorder: None where nobody asked for recordings."""

    outlets: tuple[Outlet, ...]
    osd: Osd
    previews: PreviewBoard
    recorder: Recorder | None


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


def compose_outlets(
    options: Sequence[SinkOptions],
    metrics: VideoMetrics,
    on_watch: Callable[[str, bool], None],
    drawing: OsdOptions,
    *,
    is_single: bool,
    device: Device | None = None,
) -> Outlets:
    """on_watch: told of a source whether anybody looks at its preview. is_single: there is one source, whose files need
    no folder of their own. device: the card that the program has open, for previews. Raises SinkFailed for a folder
    that cannot be written to; then no sink is left open."""
    osd = Osd(drawing)
    preview_options = next((one for one in options if isinstance(one, PreviewOptions)), PreviewOptions())
    jpeg = jpeg_encoder(preview_options.jpeg, device)
    previews = PreviewBoard(preview_options, osd, on_watch=on_watch, jpeg=jpeg)
    record = next((one for one in options if isinstance(one, RecordOptions)), None)
    rows: list[tuple[Sink, OutletOptions]] = [(previews, OutletOptions("preview", capacity=2, draws=True))]
    names: set[str] = set()
    with ExitStack() as half_made:
        for one in options:
            if isinstance(one, PreviewOptions | RecordOptions):
                continue
            name = _name(one, names)
            sink, draws = _sink(one, osd, is_single, _Gauge(name, metrics))
            half_made.callback(_let_go, sink)
            capacity, has_spool = PICTURES if draws else RESULTS, isinstance(one, BrokerOptions)
            rows.append((sink, OutletOptions(name, capacity, draws=draws, always_draws=draws, has_spool=has_spool)))
        recorder = Recorder(record, metrics) if record is not None else None
        half_made.pop_all()
    return Outlets(tuple(Outlet(sink, row, metrics) for sink, row in rows), osd, previews, recorder)


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
    from deepstream_pipeline.sinks.kafka import KafkaOptions, kafka_sink
    from deepstream_pipeline.sinks.mqtt import MqttOptions, mqtt_sink
    from deepstream_pipeline.sinks.redis_stream import RedisOptions, redis_sink
    from deepstream_pipeline.sinks.webhook import WebhookOptions, webhook_sink

    if isinstance(options, KafkaOptions):
        return kafka_sink(options, gauge)
    if isinstance(options, MqttOptions):
        return mqtt_sink(options, gauge)
    if isinstance(options, RedisOptions):
        return redis_sink(options, gauge)
    assert isinstance(options, WebhookOptions)
    return webhook_sink(options, gauge)
