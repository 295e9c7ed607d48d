"""Settings from a file: DeepStream's words to records."""

from pathlib import Path

import pytest

from penstock_video.infer.options import RowMemory
from penstock_video.mux import MuxOptions
from penstock_video.settings.models import (
    ApiSettings,
    EngineChoice,
    EngineSettings,
    GpuSettings,
    MuxSettings,
    PrimarySettings,
    SecondarySettings,
)
from penstock_video.sinks.hls import HlsOptions
from penstock_video.sinks.jpeg import JpegKind
from penstock_video.sinks.jsonl import JsonlOptions
from penstock_video.sinks.kafka import KafkaOptions
from penstock_video.sinks.mqtt import MqttOptions
from penstock_video.sinks.preview import PreviewOptions
from penstock_video.sinks.redis_stream import RedisOptions
from penstock_video.sinks.rtsp_out import RtspOutOptions
from penstock_video.sinks.video_file import AnnotatedOptions
from penstock_video.sinks.webhook import WebhookOptions
from penstock_video.source_ids import Shard, owner
from penstock_video.track.registry import TrackerOptions, TrackerType
from penstock_video.types import DecoderKind, DropPolicy, SourceConfig
from tests.deepstream_pipeline.settings.reading import read

LEAST = "source: {uri: rtsp://cam/1}\nprimary-gie: {model: people}\n"


def test_settings_of_a_least_file_have_the_defaults(tmp_path: Path) -> None:
    """A source and a model are enough."""
    settings = read(LEAST, tmp_path)
    assert [source.config for source in settings.sources] == [SourceConfig("rtsp://cam/1", "cam-1")]
    assert (settings.primary, settings.mux) == (PrimarySettings("people"), MuxSettings())
    assert (settings.tracker, settings.sinks, settings.api) == (TrackerOptions(), (), ApiSettings())
    assert (settings.engine, settings.shard, settings.elsewhere) == (EngineSettings(), Shard(), 0)
    assert settings.sources[0].config.decoder is DecoderKind.AUTO
    assert settings.gpu == GpuSettings(16, True, RowMemory.AUTO, 0)


SOURCE = """
source:
  - uri: rtsp://admin:${CAM_PASSWORD}@10.0.0.7:554/stream1
    camera_id: entrance
    camera_name: Entrance, north
    loop: 0
    drop-policy: drop-newest
    expected-fps: 12.5
    rtsp-reconnect-interval: 5
    rtsp-reconnect-attempts: 3
    open-timeout: 4
    frozen-after: 60
    rtsp-transport: udp
    smart-rec-cache: 8
    decoder: cpu
    analytics:
      line-crossing: [{name: Door, line: [[0, 5], [9, 5]], class-id: person}]
primary-gie: {model: people}
analytics:
  dwell: [{name: Hall, roi: 1;1;5;1;5;5}]
"""


def test_source_with_every_key_says_each_of_them(tmp_path: Path) -> None:
    """The password's signs are percent-encoded where it stands in an address."""
    (source,) = read(SOURCE, tmp_path).sources
    assert source.config == SourceConfig(
        uri="rtsp://admin:p%40ss%3Aw%2Frd@10.0.0.7:554/stream1",
        source_id="entrance",
        camera_name="Entrance, north",
        is_loop=False,
        policy=DropPolicy.DROP_NEWEST,
        expected_fps=12.5,
        reconnect_interval_s=5,
        reconnect_attempts=3,
        open_timeout_s=4,
        frozen_after_s=60,
        is_udp=True,
        record_cache_s=8,
        decoder=DecoderKind.CPU,
    )


def test_analytics_of_a_source_hold_instead_of_those_for_all(tmp_path: Path) -> None:
    """As plain values, for rules_from; a source without its own has the common ones."""
    text = SOURCE.replace("primary-gie", "  - uri: rtsp://cam/2\nprimary-gie")
    settings = read(text, tmp_path)
    own, common = (settings.rules_section(source) for source in settings.sources)
    assert own == {"line-crossing": [{"name": "Door", "line": [[0, 5], [9, 5]], "class-id": "person"}]}
    assert settings.analytics is not None
    assert common == settings.analytics.content == {"dwell": [{"name": "Hall", "roi": "1;1;5;1;5;5"}]}


PARTS = """
source: [{uri: rtsp://cam/1}]
streammux: {batch-size: 8, batched-push-timeout: 40000, max-same-source-frames: 1, max-latency-s: 0.25}
primary-gie: {model: people, version: 2, interval: 4, operate-on-class-ids: 0;2, pre-cluster-threshold: 0.3}
secondary-gie:
  - {model: googlenet, operate-on-class-ids: [person, 3], classifier-threshold: 0.2, secondary-reinfer-interval: 10}
  - {model: mnist, input-object-min-width: 32, input-object-min-height: 48}
tracker: {type: none, probationAge: 5, maxShadowTrackingAge: 60, minMatchingScore4Iou: 0.2, minDetectorConfidence: 0.6}
osd: {display-text: no, trail-duration: 1.5}
engine: {gateway: "https://gpu.example:8000", gateway-grpc: "gpu.example:9001", api-key-variable: GPU_KEY}
api:
  {host: 0.0.0.0, port: 0, allowed-host: v.example, cors-origin: "https://a.example", allow-outbound: [10.0.0.0/8, cam]}
gpu: {cameras-per-process: 4, pin-processes: false, hand-over: host, device: 1}
"""


def test_parts_with_every_key_say_each_of_them(tmp_path: Path) -> None:
    """DeepStream's units (µs, ms) become seconds; classes are numbers or labels."""
    settings = read(PARTS, tmp_path)
    assert settings.mux == MuxSettings(8, 40_000, max_same_source=1, max_latency_s=0.25)
    assert settings.mux.options(3) == MuxOptions(8, push_timeout_s=0.04, max_same_source=1, max_latency_s=0.25)
    assert settings.primary == PrimarySettings("people", "2", 4, (0, 2), 0.3)
    assert settings.secondaries == (
        SecondarySettings("googlenet", "", ("person", 3), 0.2, 10),
        SecondarySettings("mnist", min_width=32, min_height=48),
    )
    assert settings.tracker == TrackerOptions(TrackerType.NONE, 5, 60, 0.2, 0.6)
    assert (settings.osd.has_labels, settings.osd.has_boxes, settings.osd.trail_s) == (False, True, 1.5)
    address = ("https://gpu.example:8000", "gpu.example:9001", "GPU_KEY")
    assert settings.engine == EngineSettings(EngineChoice.AUTO, *address)
    assert settings.api == ApiSettings(
        "0.0.0.0",
        0,
        allowed_hosts=("v.example",),
        cors_origins=("https://a.example",),
        allowed_outbound=("10.0.0.0/8", "cam"),
    )
    assert settings.gpu == GpuSettings(4, False, RowMemory.HOST, 1)


PICTURES = """
sink:
  - {type: mp4, folder: a}
  - {type: hls, folder: b, crf: 30}
  - {type: rtsp, url: "rtsp://server/live"}
  - {type: preview, jpeg: nvjpeg}
"""


def test_sinks_of_pictures_have_their_options(tmp_path: Path) -> None:
    """Given ones, and defaults."""
    mp4, hls, rtsp, preview = read(LEAST + PICTURES, tmp_path).sinks
    assert mp4 == AnnotatedOptions(tmp_path / "a")
    assert hls == HlsOptions(tmp_path / "b", crf=30)
    assert rtsp == RtspOutOptions("rtsp://server/live")
    assert preview == PreviewOptions(jpeg=JpegKind.NVJPEG)


SINKS = """
sink:
  - {type: jsonl, folder: results, schema: minimal}
  - {type: kafka, brokers: ["a:9092", "b:9092"], topic: t, settings: {sasl.password: "${CAM_PASSWORD}"}, what: both}
  - {type: mqtt, host: broker, username: u, password: "${CAM_PASSWORD}", tls: 1, spool-messages: 5, spool-bytes: 2048}
  - {type: redis, url: "redis://:${CAM_PASSWORD}@r:6379/1", stream: s, max-length: 10}
  - {type: webhook, url: "${HOOK}", headers: {X-Key: "${CAM_PASSWORD}"}, attempts: 2, dead-letters: dead.jsonl}
"""


def test_sinks_with_secrets_take_them_from_the_environment(tmp_path: Path) -> None:
    """Passwords as they are, but percent-encoded in an address; folders are meant from the file's."""
    password = "p@ss:w/rd"
    jsonl, kafka, mqtt, redis, webhook = read(LEAST + SINKS, tmp_path).sinks
    assert jsonl == JsonlOptions(tmp_path / "results", schema="minimal")  # type: ignore[arg-type]
    assert isinstance(kafka, KafkaOptions)
    assert (kafka.brokers, kafka.topic, kafka.what) == ("a:9092,b:9092", "t", "both")
    assert kafka.settings == (("sasl.password", password),)
    assert isinstance(mqtt, MqttOptions)
    assert (mqtt.port, mqtt.password, mqtt.is_tls) == (8883, password, True)
    assert (mqtt.spool_messages, mqtt.spool_bytes, mqtt.what, mqtt.schema) == (5, 2048, "events", "full")
    assert isinstance(redis, RedisOptions)
    assert (redis.url, redis.stream, redis.max_length) == ("redis://:p%40ss%3Aw%2Frd@r:6379/1", "s", 10)
    assert isinstance(webhook, WebhookOptions)
    assert (webhook.url, webhook.headers) == ("https://user:hush@hook.example/x?token=hush", (("X-Key", password),))
    assert (webhook.attempts, webhook.dead_letters) == (2, tmp_path / "dead.jsonl")


def test_settings_that_are_shown_hide_every_secret(tmp_path: Path) -> None:
    """A traceback, or a new log line, holds no password."""
    rtsp = '  - {type: rtsp, url: "rtsp://u:${CAM_PASSWORD}@out/one"}\n'
    cameras = LEAST.replace("rtsp://cam/1", '"rtsp://u:${CAM_PASSWORD}@cam/1"')
    shown = repr(read(cameras + SINKS + rtsp, tmp_path))
    assert "RtspOutOptions" in shown
    assert not [word for word in ("ss:w/rd", "p%40ss", "hush") if word in shown]


def test_sources_of_a_folder_are_its_videos_sorted(tmp_path: Path) -> None:
    """Other files are left out; names become ids, safe and unique."""
    clips = tmp_path / "clips"
    clips.mkdir()
    for name in ("b.mp4", "a 1.MKV", "a_1.mp4", "notes.txt", "b.avi", ".mp4"):
        (clips / name).touch()
    settings = read("source: {uri: clips}\nprimary-gie: {model: people}\n", tmp_path)
    assert [Path(source.config.uri).name for source in settings.sources] == ["a 1.MKV", "a_1.mp4", "b.avi", "b.mp4"]
    assert [source.config.source_id for source in settings.sources] == ["a-1", "a_1", "b", "b-2"]


IDS = {
    "rtsp://u:p@cam.local:554/": "cam.local",
    "rtsp://cam/live/main?token=1": "cam-main",
    "http://[::1]:80/x.mp4": "1-x",
    "rtsp://objects.jsonl": "objects.jsonl-2",
    "rtsp://" + "a" * 90: "a" * 64,
}


@pytest.mark.parametrize(("uri", "source_id"), IDS.items())
def test_source_without_a_name_is_named_after_its_address(tmp_path: Path, uri: str, source_id: str) -> None:
    """By host and path, without user, password, query, and without a name that stands for a file of ours."""
    settings = read(f'source: {{uri: "{uri}"}}\nprimary-gie: {{model: people}}\n', tmp_path)
    assert [source.config.source_id for source in settings.sources] == [source_id]


def test_source_that_has_a_name_keeps_it_before_those_without(tmp_path: Path) -> None:
    """Whatever their order."""
    text = "source:\n- uri: rtsp://cam\n- {uri: rtsp://other, camera_id: cam}\nprimary-gie: {model: people}\n"
    assert [source.config.source_id for source in read(text, tmp_path).sources] == ["cam-2", "cam"]


def test_sources_on_shards_are_each_on_one(tmp_path: Path) -> None:
    """Three replicas read one file; together they have each camera once, and each knows how many it leaves."""
    cameras = [f"c{number}" for number in range(30)]
    text = "primary-gie: {model: people}\nsource:\n" + "".join(f"- uri: rtsp://{name}\n" for name in cameras)
    seen = []
    for index in range(3):
        settings = read(text, tmp_path, PENSTOCK_SHARD=f"{index}/3")
        mine = [source.config.source_id for source in settings.sources]
        assert mine == [name for name in cameras if owner(name, 3) == index]
        assert settings.elsewhere == 30 - len(mine)
        seen += mine
    assert sorted(seen) == sorted(cameras)


def test_aliases_stand_for_what_they_name(tmp_path: Path) -> None:
    """Many cameras share one section of rules by YAML's own means."""
    text = """
primary-gie: {model: people}
source:
  - {uri: rtsp://a, analytics: &door {dwell: [{name: Hall, roi: 1;1;5;1;5;5}]}}
  - {uri: rtsp://b, analytics: *door}
"""
    first, second = read(text, tmp_path).sources
    sections = [source.analytics.content for source in (first, second) if source.analytics is not None]
    assert sections == 2 * [{"dwell": [{"name": "Hall", "roi": "1;1;5;1;5;5"}]}]


def test_file_without_sources_waits_for_the_control_api(tmp_path: Path) -> None:
    """Cameras may all come at run time."""
    assert read("primary-gie: {model: people}\n", tmp_path).sources == ()


def test_former_key_of_the_latency_is_read_in_milliseconds(tmp_path: Path) -> None:
    """An older file means what it meant."""
    settings = read(PARTS.replace("max-latency-s: 0.25", "max-latency: 250"), tmp_path)
    assert settings.mux.options(3) == MuxOptions(8, push_timeout_s=0.04, max_same_source=1, max_latency_s=0.25)
