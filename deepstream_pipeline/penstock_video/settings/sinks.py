"""The `sink` sections. Modules of sinks are imported only when the sink is configured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias, TypeVar
from urllib.parse import urlsplit

from penstock_video.settings.document import choices, did_you_mean
from penstock_video.settings.section import Section
from penstock_video.sinks.broker import BrokerOptions, ResultKind
from penstock_video.sinks.jsonl import JsonlOptions
from penstock_video.sinks.schemas import Schema
from penstock_video.types import AnalyticsKind

if TYPE_CHECKING:
    from penstock_video.sinks.encoder import EncoderKind
    from penstock_video.sinks.hls import HlsOptions
    from penstock_video.sinks.kafka import KafkaOptions
    from penstock_video.sinks.mqtt import MqttOptions
    from penstock_video.sinks.preview import PreviewOptions
    from penstock_video.sinks.recordings import RecordOptions
    from penstock_video.sinks.redis_stream import RedisOptions
    from penstock_video.sinks.rtsp_out import RtspOutOptions
    from penstock_video.sinks.video_file import AnnotatedOptions
    from penstock_video.sinks.webhook import WebhookOptions

    SinkOptions: TypeAlias = (
        JsonlOptions | AnnotatedOptions | HlsOptions | RtspOutOptions | PreviewOptions | RecordOptions
        | KafkaOptions | MqttOptions | RedisOptions | WebhookOptions
    )  # fmt: skip
else:
    SinkOptions = object

MAX_SPOOL_MESSAGES, MAX_SPOOL_BYTES = 10_000_000, 16 << 30
TOPIC = "penstock"
B = TypeVar("B", bound=BrokerOptions)


def read_sink(section: Section, out: Path | None) -> SinkOptions | None:
    """One sink; None if it has a fault. out: the folder of those that name none."""
    kind = section.text("type")
    section.require("type")
    reader = READERS.get(kind)
    if kind and reader is None:
        section.complain(section["type"], f"{section.at('type')} is {kind!r}", choices(kind, READERS))
    if reader is None:
        return None
    before = len(section.reading.complaints)
    options = reader(section, out)
    section.close()
    return options if len(section.reading.complaints) == before else None


def _folder(section: Section, out: Path | None) -> Path:
    text = section.text("folder")
    if not text and out is None:
        section.complain(None, section.at("folder"), "is missing; give a folder, or --out for all sinks")
    return section.reading.folder / Path(text) if text else out or Path()


def _jsonl(section: Section, out: Path | None) -> SinkOptions:
    return JsonlOptions(_folder(section, out), section.choice("schema", Schema, Schema.FULL))


def _annotated(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.video_file import AnnotatedOptions

    return AnnotatedOptions(_folder(section, out), crf=section.whole("crf", 23, 0, 51), encoder=_encoder(section))


def _hls(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.hls import HlsOptions

    return HlsOptions(
        _folder(section, out),
        segment_s=section.number("segment-duration", 2.0, 0.5, 60),
        list_size=section.whole("list-size", 6, 2, 10_000),
        crf=section.whole("crf", 25, 0, 51),
        encoder=_encoder(section),
    )


def _rtsp(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.rtsp_out import RtspOutOptions

    return RtspOutOptions(_address(section, "url", ("rtsp", "rtsps")), encoder=_encoder(section))


def _encoder(section: Section) -> EncoderKind:
    from penstock_video.sinks.encoder import EncoderKind

    return section.choice("encoder", EncoderKind, EncoderKind.AUTO)


def _preview(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.jpeg import JpegKind
    from penstock_video.sinks.preview import PreviewOptions

    return PreviewOptions(
        max_fps=section.number("max-fps", 5.0, 0.1, 60),
        width=section.whole("width", 640, 16, 7680),
        jpeg=section.choice("jpeg", JpegKind, JpegKind.AUTO),
    )


def _record(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.recordings import RecordOptions

    words = tuple(kind.value for kind in AnalyticsKind)
    kinds = section.texts("kinds")
    for wrong in sorted(set(kinds) - set(words)):
        section.complain(section["kinds"], f"{section.at('kinds')} has {wrong!r}", did_you_mean(wrong, words))
    return RecordOptions(
        _folder(section, out),
        before_s=section.number("before", 5.0, 0, 600),
        after_s=section.number("after", 10.0, 0.5, 600),
        kinds=tuple(AnalyticsKind(kind) for kind in kinds if kind in words),
        sources=section.texts("sources"),
        cool_down_s=section.number("cool-down", 10.0, 0, 86_400),
        max_at_once=section.whole("max-at-once", 8, 1, 1000),
        quota_bytes=section.whole("quota-bytes", 10 << 30, 1 << 20, 1 << 50),
    )


def _kafka(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.kafka import KafkaOptions

    section.require("brokers", "topic")
    options = KafkaOptions(
        brokers=",".join(section.texts("brokers")),
        topic=section.text("topic", TOPIC),
        settings=section.pairs("settings"),
    )
    return _holding(options, section)


def _mqtt(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.mqtt import PLACEHOLDERS, MqttOptions

    section.require("host")
    is_tls = section.flag("tls")
    options = MqttOptions(
        host=section.text("host"),
        port=section.whole("port", 8883 if is_tls else 1883, 1, 65_535),
        topic=_mqtt_topic(section, "topic", "penstock/{source_id}/{kind}", PLACEHOLDERS),
        username=section.text("username", is_secret=True),
        password=section.text("password", is_secret=True),
        qos=section.whole("qos", 1, 0, 2),
        is_tls=is_tls,
        status_topic=_mqtt_topic(section, "status-topic", "", ()),
    )
    return _holding(options, section)


def _mqtt_topic(section: Section, key: str, default: str, placeholders: tuple[str, ...]) -> str:
    from penstock_video.sinks.mqtt import topic_fault

    topic = section.text(key, default)
    if fault := topic_fault(topic, placeholders):
        section.complain(section[key], f"{section.at(key)} is {topic!r}", fault)
    return topic


def _redis(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.redis_stream import RedisOptions

    options = RedisOptions(
        url=_address(section, "url", ("redis", "rediss", "unix")),
        stream=section.text("stream", TOPIC),
        max_length=section.whole("max-length", 100_000, 1, 1_000_000_000),
    )
    return _holding(options, section)


def _webhook(section: Section, out: Path | None) -> SinkOptions:
    from penstock_video.sinks.webhook import WebhookOptions

    dead_letters = section.text("dead-letters")
    options = WebhookOptions(
        url=_address(section, "url", ("http", "https")),
        headers=section.pairs("headers"),
        timeout_s=section.number("timeout", 5.0, 0.1, 120),
        attempts=section.whole("attempts", 5, 1, 100),
        dead_letters=section.reading.folder / dead_letters if dead_letters else None,
    )
    return _holding(options, section)


def _holding(options: B, section: Section) -> B:
    """With what all brokers' sections have."""
    return replace(
        options,
        what=section.choice("what", ResultKind, ResultKind.EVENTS),
        schema=section.choice("schema", Schema, Schema.FULL),
        spool_messages=section.whole("spool-messages", 10_000, 1, MAX_SPOOL_MESSAGES),
        spool_bytes=section.whole("spool-bytes", 64 << 20, 1 << 10, MAX_SPOOL_BYTES),
    )


def _address(section: Section, key: str, schemes: tuple[str, ...]) -> str:
    section.require(key)
    url = section.text(key, is_secret=True)
    if url and (fault := address_fault(url, schemes)):
        section.complain(section[key], section.at(key), fault)
    return url


def address_fault(url: str, schemes: tuple[str, ...]) -> str:
    """Why the text is no address of these protocols; empty where it is one. Shows nothing of it."""
    try:
        parts = urlsplit(url)
        is_address = parts.scheme in schemes and bool(parts.hostname or parts.scheme == "unix") and parts.port != 0
    except ValueError:
        is_address = False
    return "" if is_address else f"an address such as {schemes[0]}://HOST[:PORT]/… is needed"


READERS: Mapping[str, Callable[[Section, Path | None], SinkOptions]] = {
    "jsonl": _jsonl,
    "mp4": _annotated,
    "hls": _hls,
    "rtsp": _rtsp,
    "preview": _preview,
    "record": _record,
    "kafka": _kafka,
    "mqtt": _mqtt,
    "redis": _redis,
    "webhook": _webhook,
}
