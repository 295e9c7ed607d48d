"""The sinks by their names in the settings. Modules are named as text: only configured sinks are imported."""

from dataclasses import dataclass
from enum import Enum, auto

from penstock_video.interfaces import Extension

_SINKS = "penstock_video.sinks."


class SinkInput(Enum):
    """What a sink gets: results, also pictures, results for its own spool, or nothing (previews, recordings)."""

    RESULTS = auto()
    PICTURES = auto()
    SPOOL = auto()
    NONE = auto()


@dataclass(frozen=True, slots=True)
class SinkKind:
    """options: module:Class of the section's model. sink: module:function that makes the sink of the options."""

    options: str
    sink: str
    takes: SinkInput = SinkInput.RESULTS


SINKS = {
    "jsonl": SinkKind(f"{_SINKS}jsonl:JsonlOptions", f"{_SINKS}jsonl:JsonlSink"),
    "mp4": SinkKind(f"{_SINKS}video_file:AnnotatedOptions", f"{_SINKS}video_file:AnnotatedSink", SinkInput.PICTURES),
    "poster": SinkKind(f"{_SINKS}poster:PosterOptions", f"{_SINKS}poster:PosterSink", SinkInput.PICTURES),
    "summary": SinkKind(f"{_SINKS}run_record:SummaryOptions", f"{_SINKS}run_record:SummarySink", SinkInput.PICTURES),
    "hls": SinkKind(f"{_SINKS}hls:HlsOptions", f"{_SINKS}hls:HlsSink", SinkInput.PICTURES),
    "rtsp": SinkKind(f"{_SINKS}rtsp_out:RtspOutOptions", f"{_SINKS}rtsp_out:RtspOutSink", SinkInput.PICTURES),
    "preview": SinkKind(f"{_SINKS}preview:PreviewOptions", "", SinkInput.NONE),
    "record": SinkKind(f"{_SINKS}recordings:RecordOptions", "", SinkInput.NONE),
    "kafka": SinkKind(f"{_SINKS}kafka:KafkaOptions", f"{_SINKS}kafka:kafka_sink", SinkInput.SPOOL),
    "mqtt": SinkKind(f"{_SINKS}mqtt:MqttOptions", f"{_SINKS}mqtt:mqtt_sink", SinkInput.SPOOL),
    "redis": SinkKind(f"{_SINKS}redis_stream:RedisOptions", f"{_SINKS}redis_stream:redis_sink", SinkInput.SPOOL),
    "webhook": SinkKind(f"{_SINKS}webhook:WebhookOptions", f"{_SINKS}webhook:webhook_sink", SinkInput.SPOOL),
}


def kind_of(options: object) -> SinkKind:
    """The sink whose options these are."""
    if isinstance(options, Extension):
        return SinkKind("", "", SinkInput.RESULTS)
    name = f"{type(options).__module__}:{type(options).__name__}"
    return next(kind for kind in SINKS.values() if kind.options == name)
