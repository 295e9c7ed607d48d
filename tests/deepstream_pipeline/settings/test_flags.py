"""Settings from flags, alone and over a file."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from penstock_video.settings.document import InvalidSettings
from penstock_video.settings.loader import Flags, is_endless, read_rules
from penstock_video.settings.models import EngineChoice
from penstock_video.sinks.jsonl import JsonlOptions
from penstock_video.sinks.kafka import KafkaOptions
from penstock_video.sinks.mqtt import MqttOptions
from penstock_video.sinks.redis_stream import RedisOptions
from penstock_video.sinks.webhook import WebhookOptions
from penstock_video.track.registry import TrackerOptions, TrackerType
from penstock_video.types import DecoderKind
from tests.deepstream_pipeline.settings.reading import faults, from_flags, read
from tests.support.stack import CHECKOUT

FILE = """
source: [{uri: rtsp://cam/1}, {uri: rtsp://cam/2}]
primary-gie: {model: people, interval: 2}
streammux: {batch-size: 2}
sink: [{type: jsonl, folder: here}]
engine: {type: embedded}
analytics: {line-crossing: [{name: Door, line: [[0, 5], [9, 5]]}]}
"""


def test_flags_over_a_file_win(tmp_path: Path) -> None:
    """Each for itself; what no flag says stays."""
    clip = tmp_path / "clip.mp4"
    clip.touch()
    flags = Flags(
        sources=(str(clip),), model="street", interval=0, batch_size=9, sinks=("jsonl",), out=tmp_path / "out",
        gateway="http://gpu:8000", api_port=0, has_api=False, is_loop=True, lines=("Exit=1,2,3.5,4",),
    )  # fmt: skip
    settings = read(FILE, tmp_path, flags)
    (source,) = settings.sources
    assert (source.config.uri, source.config.is_loop) == (str(clip), True)
    assert (settings.primary.model, settings.primary.interval, settings.mux.batch_size) == ("street", 0, 9)
    assert settings.sinks == (JsonlOptions(tmp_path / "out"),)
    assert (settings.engine.gateway, settings.engine.choice) == ("http://gpu:8000", EngineChoice.AUTO)
    assert (settings.api.port, settings.api.is_enabled) == (0, False)


@pytest.mark.parametrize("said", [None, DecoderKind.CPU, DecoderKind.NVDEC])
def test_decoder_of_a_flag_is_that_of_every_source(tmp_path: Path, said: DecoderKind | None) -> None:
    """Of the command line's and of the file's; without the flag each keeps its own."""
    text = "source: [{uri: rtsp://cam/1}, {uri: rtsp://cam/2, decoder: nvdec}]\nprimary-gie: {model: people}\n"
    found = read(text, tmp_path, Flags(decoder=said)).sources
    assert [one.config.decoder for one in found] == [said or DecoderKind.AUTO, said or DecoderKind.NVDEC]
    (alone,) = from_flags(Flags(sources=("rtsp://cam",), model="m", decoder=said)).sources
    assert alone.config.decoder == (said or DecoderKind.AUTO)


def test_line_of_a_flag_comes_beside_the_rules_of_a_file(tmp_path: Path) -> None:
    """As if it stood there."""
    section = read(FILE, tmp_path, Flags(lines=("Exit=1,2,3.5,4", "Way in=0,0,9,0"))).analytics
    assert section is not None
    assert section.content == {
        "line-crossing": [
            {"name": "Door", "line": [[0, 5], [9, 5]]},
            {"name": "Exit", "line": [[1.0, 2.0], [3.5, 4.0]]},
            {"name": "Way in", "line": [[0.0, 0.0], [9.0, 0.0]]},
        ]
    }


def test_zone_of_a_flag_is_a_region_beside_the_lines(tmp_path: Path) -> None:
    """In pixels, or from 0 to 1; also for a replay."""
    zones = ("Hall=1,2,30,2,30,40", "Top=0,0,1,0,1,.25,0,.25")
    rows = [
        {"name": "Hall", "roi": [[1, 2], [30, 2], [30, 40]]},
        {"name": "Top", "roi": [[0, 0], [1, 0], [1, 0.25], [0, 0.25]]},
    ]
    section = read(FILE, tmp_path, Flags(zones=zones, lines=("Exit=0.1,0.5,0.9,0.5",))).analytics
    assert section is not None
    assert isinstance(section.content, dict)
    assert section.content["roi-filtering"] == rows
    assert section.content["line-crossing"][1] == {"name": "Exit", "line": [[0.1, 0.5], [0.9, 0.5]]}
    replayed = read_rules(None, (), zones)
    assert replayed is not None
    assert replayed.content == {"roi-filtering": rows}


def test_flags_of_the_detector_win_over_the_file(tmp_path: Path) -> None:
    """--conf, --iou and --classes, whose place in a message is the flag's."""
    text = FILE.replace("interval: 2", "interval: 2, pre-cluster-threshold: 0.6, operate-on-class-ids: [dog]")
    primary = read(text, tmp_path, Flags(conf=0.3, iou=0.5, classes=("person, car", "7"))).primary
    assert (primary.threshold, primary.iou, primary.interval) == (0.3, 0.5, 2)
    assert (primary.operate_on_class_ids, primary.classes_at) == (("person", "car", 7), "--classes")
    unchanged = read(text, tmp_path, Flags()).primary
    assert (unchanged.threshold, unchanged.iou, unchanged.operate_on_class_ids) == (0.6, None, ("dog",))


def test_conf_of_a_flag_below_the_trackers_also_begins_tracks(tmp_path: Path) -> None:
    """Unless the file says what a new track needs; a higher one changes nothing there."""
    scores = {}
    for conf in (None, 0.3, 0.8):
        tracker = read(FILE, tmp_path, Flags(conf=conf)).tracker
        assert isinstance(tracker, TrackerOptions)
        scores[conf] = (tracker.activation_threshold, tracker.high_threshold)
    assert scores == {None: (0.5, 0.5), 0.3: (0.3, 0.3), 0.8: (0.5, 0.5)}
    said = read(FILE + "tracker: {minDetectorConfidence: 0.4}\n", tmp_path, Flags(conf=0.3)).tracker
    assert isinstance(said, TrackerOptions)
    assert (said.activation_threshold, said.high_threshold) == (0.4, 0.5)


def test_tracker_of_a_flag_wins_and_keeps_the_keys_of_its_type(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """bytetrack, none, or a class of one's own."""
    text = FILE.replace("analytics:", "tracker: {probationAge: 7}\nanalytics:")
    assert read(text, tmp_path, Flags(tracker="bytetrack")).tracker == TrackerOptions(probation_age=7)
    alone = replace(CAM, tracker="none")
    assert from_flags(alone).tracker == TrackerOptions(TrackerType.NONE)
    monkeypatch.syspath_prepend(str(CHECKOUT / "deepstream_pipeline" / "examples" / "extend"))
    own = from_flags(replace(CAM, tracker="nearest_tracker:NearestTracker")).tracker
    assert own.type == "nearest_tracker:NearestTracker"


HALL = "dwell: [{name: Hall, roi: 1;1;5;1;5;5}]"


@pytest.mark.parametrize("text", [HALL, f"analytics: {{{HALL}}}", f"source: []\nanalytics: {{{HALL}}}"])
def test_rules_of_a_file_are_read_with_and_without_their_key(tmp_path: Path, text: str) -> None:
    """A file of rules alone, or one of settings."""
    rules = tmp_path / "rules.yaml"
    rules.write_text(text)
    content = {"dwell": [{"name": "Hall", "roi": "1;1;5;1;5;5"}]}
    for section in (read(FILE, tmp_path, Flags(rules=rules)).analytics, read_rules(rules, ())):
        assert section is not None
        assert section.content == content


def test_rules_that_cannot_be_meant_are_placed_in_their_own_file(tmp_path: Path) -> None:
    """Not in that of the settings."""
    (tmp_path / "rules.yaml").write_text("dwell:\n  - name: Hall\n    roi: 1;1;5;1\n")
    (fault,) = faults(FILE, tmp_path, Flags(rules=tmp_path / "rules.yaml"))
    assert fault.startswith("rules.yaml:3:5: analytics.dwell[0].roi: '1;1;5;1': a polygon has three corners")


def test_sinks_in_their_short_form_are_the_same_as_in_a_file() -> None:
    """Broker, topic and more in an address; a variable keeps the password out of the command line."""
    flags = Flags(
        sources=("rtsp://cam",),
        model="people",
        sinks=(
            "kafka://a:9092,b:9092/alarms?what=both",
            "mqtt://u:p%40ss@broker:1884/doors/{source_id}?qos=2",
            "mqtt://broker",
            "redis://:${CAM_PASSWORD}@r:6379/1?stream=s&max-length=7",
            "webhook=${HOOK}",
        ),
    )
    kafka, mqtt, plain, redis, webhook = from_flags(flags).sinks
    assert kafka == KafkaOptions("a:9092,b:9092", "alarms", what="both")  # type: ignore[arg-type]
    assert isinstance(mqtt, MqttOptions)
    assert isinstance(plain, MqttOptions)
    assert (mqtt.host, mqtt.port, mqtt.topic, mqtt.qos) == ("broker", 1884, "doors/{source_id}", 2)
    assert (mqtt.username, mqtt.password) == ("u", "p@ss")
    assert (plain.port, plain.topic) == (1883, "penstock/{source_id}/{kind}")
    assert redis == RedisOptions("redis://:p%40ss%3Aw%2Frd@r:6379/1", "s", 7)
    assert webhook == WebhookOptions("https://user:hush@hook.example/x?token=hush")


CAM = Flags(sources=("rtsp://cam",), model="m")
WRONG = [
    (Flags(), "--model: is missing", "--source: is missing; give a video file"),
    (Flags(sources=("rtsp://cam",)), "--model: is missing; name a model"),
    (Flags(sources=("no.mp4",), model="m"), "--source: there is no file 'no.mp4'"),
    (Flags(sources=("rtsp://u:hush@cam:99999/1",), model="m"), "--source: rtsp://***@cam:99999/1 is no address"),
    (Flags(sources=("rtsp://u:${UNSET}@cam",), model="m"), "--source: the environment has no variable UNSET"),
    (replace(CAM, model="a b"), "--model: 'a b': a model's name is needed"),
    (replace(CAM, sinks=("kafak://b/t",)), "--sink: 'kafak://b/t': did you mean kafka://?"),
    (replace(CAM, sinks=("jsnl",)), "--sink: 'jsnl': did you mean jsonl?"),
    (replace(CAM, sinks=("jsonl",)), "--sink: folder: is missing; give a folder, or --out"),
    (replace(CAM, sinks=("kafka://b",)), "--sink: topic: is missing"),
    (replace(CAM, sinks=("kafka://b/t?wat=both",)), "--sink: wat: unknown key; did you mean what?"),
    (replace(CAM, sinks=("mqtt://b:99999",)), "--sink: 'mqtt://b:99999': this is not an address"),
    (replace(CAM, lines=("Door=1,2,3",)), "--line: 'Door=1,2,3': NAME=x1,y1,x2,y2 is needed"),
    (replace(CAM, lines=("Door=1,2,1,2",)), "--line: analytics.line-crossing[0].line"),
    (replace(CAM, lines=("Door=0.1,0.5,90,50",)), "--line: analytics.line-crossing[0].line: 0.1: coordinates are"),
    (replace(CAM, zones=("Hall=1,2,3,4",)), "--zone: 'Hall=1,2,3,4': NAME=x1,y1,x2,y2,x3,y3,… is needed, with three"),
    (replace(CAM, zones=("Hall=1,2,3,4,5,6,7",)), "--zone: 'Hall=1,2,3,4,5,6,7': NAME"),
    (replace(CAM, zones=("Hall=1,2,3,4,5,6",)), "--zone: analytics.roi-filtering[0].roi: "),
    (replace(CAM, classes=(" ,",)), "--classes: is empty; give labels of the model"),
    (replace(CAM, tracker="bytetrak"), "--tracker: type is 'bytetrak': did you mean bytetrack?"),
    (replace(CAM, tracker="no_such:Thing"), "--tracker: type is 'no_such:Thing': it cannot be loaded"),
    (replace(CAM, tracker="none", lines=("A=1,2,3,4",)), "--line: analytics.line-crossing[0]: line-crossing needs"),
    (replace(CAM, shard="3/3"), "--shard: shard 3/3"),
    (replace(CAM, gateway="gpu:8000"), "--url: a gateway's address is needed"),
    (replace(CAM, gateway="http://g:1", engine="triton"), "--engine: triton and --url"),
]  # fmt: skip


@pytest.mark.parametrize("row", WRONG, ids=range(len(WRONG)))
def test_flag_that_cannot_be_meant_is_named(row: tuple[Flags, *tuple[str, ...]]) -> None:
    """The flag, what stood there, what is allowed; nothing of a password."""
    with pytest.raises(InvalidSettings) as refused:
        from_flags(row[0])
    lines = refused.value.message.splitlines()
    assert len(lines) == len(row) - 1
    assert all(line.startswith(wanted) for line, wanted in zip(lines, row[1:], strict=True)), lines
    assert "hush" not in refused.value.message


def test_source_of_a_pattern_is_every_file_of_it(tmp_path: Path) -> None:
    """Where the shell did not do it, as in a service's unit."""
    for name in ("b.mp4", "a.mp4", "c.txt"):
        (tmp_path / name).touch()
    settings = from_flags(Flags(sources=(f"{tmp_path}/*",), model="m"))
    assert [source.config.source_id for source in settings.sources] == ["a", "b"]


def test_file_whose_name_looks_like_an_address_is_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What stands here is not looked for elsewhere."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "cam:1.mp4").touch()
    (source,) = from_flags(Flags(sources=("cam:1.mp4",), model="m")).sources
    assert (source.config.uri, source.config.source_id) == (str(tmp_path / "cam:1.mp4"), "cam-1")


ENDS = {"clip.mp4": False, "rtsp://cam/1": True, "http://host/clip.mp4": False, "http://host/live": True}


@pytest.mark.parametrize(("uri", "is_live"), ENDS.items())
def test_run_of_files_ends_and_of_cameras_does_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, uri: str, is_live: bool
) -> None:
    """A loop never ends either."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "clip.mp4").touch()
    assert is_endless(from_flags(Flags(sources=(uri,), model="m"))) is is_live
    assert is_endless(from_flags(Flags(sources=(uri,), model="m", is_loop=True)))


def test_identifiers_of_sources_are_always_safe_and_unique(tmp_path: Path) -> None:
    """Whatever the files are called."""
    names = [
        "é.mp4",
        "è.mp4",
        "..mp4",
        "-.mp4",
        "a b.mp4",
        "a-b.mp4",
        "x" * 200 + ".mp4",
        "x" * 201 + ".mp4",
        "hls.mp4",
    ]
    for name in names:
        (tmp_path / name).touch()
    settings = from_flags(Flags(sources=tuple(str(tmp_path / name) for name in names), model="m"))
    ids = [source.config.source_id for source in settings.sources]
    assert len(set(ids)) == len(names)
    assert all(re.fullmatch(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}", one) for one in ids), ids
    assert "hls" not in ids
