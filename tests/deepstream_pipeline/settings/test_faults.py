"""Settings that cannot be meant: every fault at once, with its place and the fix, and never a secret."""

from pathlib import Path

import pytest

from penstock_video.settings import document
from penstock_video.settings.document import without_secrets
from penstock_video.settings.loader import Flags
from tests.deepstream_pipeline.settings.reading import faults, read

LEAST = "source: {uri: rtsp://cam/1}\nprimary-gie: {model: people}\n"

ONE_FAULT = {
    "strammux: {}": "cameras.yaml:3:1: strammux: unknown key; did you mean streammux?",
    "streammux: {batch-siz: 4}": "cameras.yaml:3:13: streammux.batch-siz: unknown key; did you mean batch-size?",
    "streammux: {batchSize: 4}": "cameras.yaml:3:13: streammux.batchSize: unknown key; did you mean batch-size?",
    "streammux: {batch-size: 0}": "streammux.batch-size is '0': a whole number from 1 to 1024 is needed",
    "streammux: {batch-size: '4'}": "streammux.batch-size is '4': a whole number",
    "streammux: {batch-size: 4.0}": "streammux.batch-size is '4.0': a whole number",
    "streammux: {batch-size: [4]}": "3:25: streammux.batch-size: one value is needed here, not a list or section",
    "streammux: {max-latency-s: .nan}": "streammux.max-latency-s is '.nan': a number from 0.001 to 600 is needed",
    "streammux: 4": "cameras.yaml:3:12: streammux: a section is needed here",
    "streammux: {max-latency: 99999999999999999999}": "streammux.max-latency is",
    "streammux: {max-latency: 50, max-latency-s: 1}": "streammux.max-latency: leave it out; max-latency-s is the same",
    "tracker: {type: bytetrak}": "tracker.type is 'bytetrak': did you mean bytetrack?",
    "tracker: {probationAge: 0}": "tracker.probationAge is '0': a whole number from 1 to 1000",
    "tracker: {probation-age: 3}": "tracker.probation-age: unknown key; did you mean probationAge?",
    "osd: {display-text: perhaps}": "osd.display-text is 'perhaps': true or false is needed",
    "api: {port: 65536}": "api.port is '65536': a whole number from 0 to 65535",
    "gpu: {cameras-per-proces: 4}": "gpu.cameras-per-proces: unknown key; did you mean cameras-per-process?",
    "gpu: {cameras-per-process: 65}": "3:28: gpu.cameras-per-process is '65': a whole number from 1 to 64 is needed",
    "gpu: {cameras-per-process: 0}": "gpu.cameras-per-process is '0': a whole number from 1 to 64 is needed",
    "gpu: {decoder-limit: 0}": "gpu.decoder-limit is '0': a number from 0.1 to 1 is needed",
    "gpu: {pin-processes: 2}": "gpu.pin-processes is '2': true or false is needed (or 1, 0)",
    "gpu: {pin-process: true}": "gpu.pin-process: unknown key; did you mean pin-processes?",
    "gpu: {hand-over: devise}": "gpu.hand-over is 'devise': did you mean device? It takes auto, device, host",
    "gpu: {device: 16}": "gpu.device is '16': a whole number from 0 to 15 is needed",
    "api: {allow-outbound: [10.0.0.0/99]}": "--allow-outbound '10.0.0.0/99' is not an address, a network or a host",
    "api: {host: 'a b'}": "api.host is 'a b': an address to listen on",
    "engine: {type: tritonn}": "engine.type is 'tritonn': did you mean triton?",
    "engine: {gateway: gpu.example:8000}": "engine.gateway: a gateway's address is needed, such as http://",
    "engine: {gateway: 'http://key@gpu:8000'}": "engine.gateway: a key stands in an environment variable",
    "engine: {gateway: 'http://gpu:8000', type: triton}": "engine.type: triton and a gateway exclude each other",
    "engine: {api-key-variable: sk-123}": "engine.api-key-variable is 'sk-123': the name of an environment variable",
    "sink: [{folder: x}]": "cameras.yaml:3:8: sink[0].type: is missing",
    "sink: [{type: kafak}]": "sink[0].type is 'kafak': did you mean kafka? It takes jsonl, mp4,",
    "sink: [{type: annotated}]": "sink[0].type is 'annotated': it takes jsonl, mp4,",
    "sink: [{type: jsonl}]": "sink[0].folder: is missing; give a folder, or --out for all sinks",
    "sink: [{type: jsonl, folder: x, schema: maximal}]": "sink[0].schema is 'maximal': did you mean minimal?",
    "sink: [{type: mp4, folder: x, encoder: gpu}]": "sink[0].encoder is 'gpu': did you mean cpu?",
    "sink: [{type: preview, jpeg: nvjpg}]": "sink[0].jpeg is 'nvjpg': did you mean nvjpeg? It takes auto, cpu, nvjpeg",
    "sink: [{type: redis, url: 'http://r'}]": "sink[0].url: an address such as redis://HOST",
    "sink: [{type: webhook, url: 'ftp://r'}]": "sink[0].url: an address such as http://HOST",
    "sink: [{type: mqtt, host: h, qos: 3}]": "sink[0].qos is '3': a whole number from 0 to 2",
    "sink: [{type: mqtt, host: h, topic: a/#}]": "3:37: sink[0].topic is 'a/#': a topic to publish to has no wildcard",
    "sink: [{type: mqtt, host: h, topic: 'a/{foo}'}]": "topic is 'a/{foo}': {foo} is no placeholder; there are",
    "sink: [{type: mqtt, host: h, topic: 'a/{kind'}]": "topic is 'a/{kind': a { stands alone; there are",
    "sink: [{type: mqtt, host: h, topic: '{kind}}'}]": "topic is '{kind}}': a } stands alone",
    "sink: [{type: mqtt, host: h, status-topic: '{kind}'}]": "'{kind}': {kind} is no placeholder; it takes none",
    "sink: [{type: kafka, topic: t}]": "sink[0].brokers: is missing",
    "secondary-gie: [{version: 2}]": "secondary-gie[0].model: is missing",
    "analytics: {line-crosing: []}": "3:13: analytics: there is no key 'line-crosing'; did you mean 'line-crossing'?",
    "analytics: {dwell: [{name: a, roi: 1;1;5;1}]}": "3:31: analytics.dwell[0].roi: '1;1;5;1': a polygon has three",
    "analytics: [a]": "cameras.yaml:3:12: analytics: ['a']",
    "osd: {}\nosd: {}": "cameras.yaml:4:1: osd: given twice, first in line 3; remove one",
    "osd: {<<: {display-text: 1}}": "osd.<<: unknown key; merge keys (<<) are not read",
    "osd: {? [a] : b}": "osd: a key is a word",
    "api: {host: '${HOST}'}": "api.host is '${HOST}': variables (${…}) are read in addresses, passwords and headers",
}


@pytest.mark.parametrize(("text", "fault"), ONE_FAULT.items())
def test_setting_that_cannot_be_meant_is_one_line_with_its_place(tmp_path: Path, text: str, fault: str) -> None:
    """FILE:LINE:COLUMN, the key path, the value, what is allowed."""
    (found,) = faults(LEAST + text, tmp_path)
    assert fault in found
    assert found.startswith("cameras.yaml:")


SOURCES = {
    "{uri: rstp://cam/1}": "source[0].uri: rstp:// is no protocol that is read; did you mean rtsp://?",
    "{uri: 'rtsp://'}": "source[0].uri: rtsp:// names no host",
    "{uri: rtsp://cam:99999/1}": "source[0].uri: rtsp://cam:99999/1 is no address",
    "{uri: missing.mp4}": "source[0].uri: there is no file 'missing.mp4'",
    "{uri: pavment.mp4}": "there is no file 'pavment.mp4'; did you mean pavement.mp4?",
    "{uri: '*.mkv'}": "no video file matches '*.mkv'",
    "{uri: empty}": "the folder 'empty' has no video file",
    "{uri: /dev/video987}": "this machine has no /dev/video987",
    "{camera_id: a}": "source[0].uri: is missing",
    "{uri: 'rtsp://cam', camera_id: a b}": "source[0].camera_id is 'a b': 1 to 64 of A-Z",
    "{uri: 'rtsp://cam', camera_id: ..}": "source[0].camera_id is '..': 1 to 64 of A-Z",
    "{uri: 'rtsp://cam', camera_id: events.jsonl}": "source[0].camera_id: 'events.jsonl' is a file's name",
    "{uri: 'rtsp://cam', drop-policy: oldest}": "source[0].drop-policy is 'oldest': did you mean drop-oldest?",
    "{uri: 'rtsp://cam', decoder: nvdek}": "[0].decoder is 'nvdek': did you mean nvdec? It takes auto, cpu, nvdec",
    "{uri: 'rtsp://cam', rtsp-reconnect-interval: -1}": "rtsp-reconnect-interval is '-1': a number from 0.5 to 3600",
    "{uri: 'rtsp://${UNSET}@cam'}": "source[0].uri: the environment has no variable UNSET",
    "{uri: 'rtsp://${a-b}@cam'}": "source[0].uri: a variable is written ${NAME}",
    "{uri: 'rtsp://a', camera_id: x}, {uri: 'rtsp://b', camera_id: x}": "camera_id 'x' is given to cameras.yaml:2:",
    "{uri: two, camera_id: x}": "source[0].camera_id: 2 files cannot share one",
    "5": "source[0]: a section is needed here",
}


@pytest.mark.parametrize(("source", "fault"), SOURCES.items())
def test_source_that_cannot_be_meant_is_one_line(tmp_path: Path, source: str, fault: str) -> None:
    """What is not there, or no address, is said before anything starts, with what was probably meant."""
    (tmp_path / "empty").mkdir()
    (tmp_path / "two").mkdir()
    for name in ("pavement.mp4", "two/a.mp4", "two/b.mp4"):
        (tmp_path / name).touch()
    found = faults(f"primary-gie: {{model: people}}\nsource: [{source}]\n", tmp_path)
    assert fault in found[0]
    assert len(found) == 1


def test_faults_of_a_file_are_all_reported_in_its_order(tmp_path: Path) -> None:
    """One run reports all faults of a file."""
    text = """source:
  - uri: rstp://cam/1
    lop: true
streammux:
  batch-size: many
sink:
  - type: kafak
analytics:
  roi-filtering:
    - {name: a, roi: [[1, 1], [5, 1]]}
    - {name: b, rio: 1;1;5;1;5;5}
    - {name: c, roi: 1;1;5;1;5;5, class-id: person}
trackr: {}
"""
    found = [fault.partition(": ")[0] for fault in faults(text, tmp_path)]
    places = ["2:10", "3:5", "5:15", "7:11", "10:17", "11:17", "13:1"]
    assert found == ["cameras.yaml", *(f"cameras.yaml:{place}" for place in places)]


NO_FILES = {
    "": "primary-gie.model: is missing; name a model",
    "a: b: c": "1:5: a second ': ' in one line",
    "source:\n\t- uri: x": "2:1: a tab: YAML is indented with blanks",
    "source: *missing": "1:9: an alias (*) without its anchor",
    "osd: !!python/object/apply:os.system [ls]": "1:6: tags (!…) are not read",
    "a: 1\n---\nb: 2": "a second document",
    "- a": "a section is needed here",
    "source: [": "not valid YAML",
    "a: \x07": "1:4: a sign that YAML does not take",
    "[" * 5000: "more than 16 levels",
    "a: &a [*a]": "an alias (*) that holds itself",
    "# " + "x" * (1 << 20): "larger than 1 MiB",
    "\n".join(["a: &a [x,x,x,x,x,x,x,x,x]", *(f"{b}: &{b} [{','.join([f'*{a}'] * 9)}]" for a, b in zip(
        "abcdefg", "bcdefgh", strict=True))]): "its aliases (*) stand for more than 100000 values",
}  # fmt: skip


def test_file_of_too_many_values_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before it is read to its end."""
    monkeypatch.setattr(document, "MAX_NODES", 1000)
    assert any("more than 1000 values" in found for found in faults("x: [" + "1," * 2001 + "]", tmp_path))


@pytest.mark.parametrize(("text", "fault"), NO_FILES.items(), ids=range(len(NO_FILES)))
def test_file_that_is_none_is_refused_in_a_sentence(tmp_path: Path, text: str, fault: str) -> None:
    """Broken, hostile and huge files are refused at once, with the line."""
    assert any(fault in found for found in faults(text, tmp_path))


def test_file_that_is_no_text_or_not_there_is_refused(tmp_path: Path) -> None:
    """With its name, and the line."""
    (tmp_path / "rules.yaml").write_bytes(b"dwell: []\n\xff\xfe")
    assert "rules.yaml:2:1: is not UTF-8 text" in faults(LEAST, tmp_path, Flags(rules=tmp_path / "rules.yaml"))[0]
    assert "no.yaml: cannot be read" in faults(LEAST, tmp_path, Flags(rules=tmp_path / "no.yaml"))[0]


SECRET = "hunter2"
LEAKS = [
    f"source: [{{uri: 'rtsp://u:{SECRET}@cam:99999/1'}}]",
    f"source: [{{uri: 'rstp://u:{SECRET}@cam/1'}}]",
    f"source: [{{uri: 'rtsp://u:{SECRET}@'}}]",
    f"source: [{{uri: 'u:{SECRET}@cam/1'}}]",
    f"source: [{{uri: rtsp://cam, camera_id: 'rtsp://u:{SECRET}@cam/1'}}]",
    f"source: [{{uri: rtsp://cam, camera_id: 'rtsp://cam/1?key={SECRET}'}}]",
    f"source: [{{uri: rtsp://cam, 'rtsp://u:{SECRET}@cam': 1}}]",
    f"source: [{{uri: 'rtsp://cam' u:{SECRET}@x}}]",
    f"source: [{{uri: *{SECRET}}}]",
    f"sink: [{{type: mqtt, host: h, passwrod: {SECRET}}}]",
    f"sink: [{{type: mqtt, host: h, password: [{SECRET}]}}]",
    f"sink: [{{type: kafka, brokers: b, topic: t, settings: {{sasl.password: [{SECRET}]}}}}]",
    f"sink: [{{type: redis, url: 'htp://x:{SECRET}@h'}}]",
    f"sink: [{{type: webhook, url: 'http://h', headers: {{A: {{{SECRET}: b}}}}}}]",
    f"engine: {{gateway: 'http://{SECRET}@gpu:8000'}}",
    f"engine: {{gateway: 'http://gpu:8000/?key={SECRET}'}}",
]


@pytest.mark.parametrize("text", LEAKS, ids=range(len(LEAKS)))
def test_fault_beside_a_secret_does_not_show_it(tmp_path: Path, text: str) -> None:
    """Logs are read by more people than passwords are meant for."""
    found = "\n".join(faults(f"primary-gie: {{model: people}}\n{text}\n", tmp_path))
    assert SECRET not in found


HIDDEN = {
    "rtsp://u:p@h/x": "rtsp://…@h/x",
    "rtsp://u:p@p@h/x?a@b": "rtsp://…@b",
    "http://h/x?token=1": "http://h/x?…",
    "u:p@h": "…@h",
    "street": "street",
    "my rtsp://a://b@h": "rtsp://…@h",
}


@pytest.mark.parametrize(("text", "shown"), HIDDEN.items())
def test_secrets_of_any_address_are_left_out(text: str, shown: str) -> None:
    """Rather too much than too little."""
    assert without_secrets(text) == shown


def test_file_of_two_hundred_cameras_is_read(tmp_path: Path) -> None:
    """The bounds are far above what people need."""
    rules = "{line-crossing: [{name: Door, line: [[0, 5], [9, 5]], direction: [[1, 1], [1, 9]]}]}"
    cameras = "".join(f"- {{uri: rtsp://cam{number}/1, analytics: {rules}}}\n" for number in range(200))
    assert len(read(f"primary-gie: {{model: people}}\nsource:\n{cameras}", tmp_path).sources) == 200


NEEDS_TRACKS = """tracker: {type: none}
analytics:
  roi-filtering: [{name: All, roi: 0;0;9;0;9;9}]
  line-crossing: [{name: Door, line: 0;0;9;9}]
  dwell: [{name: Wait, roi: 0;0;9;0;9;9}]
source: [{uri: rtsp://cam/1, analytics: {direction-detection: [{name: Right, direction: 0;0;9;9}]}}]
primary-gie: {model: people}
"""


def test_rules_that_need_tracks_are_refused_with_their_places_where_the_tracker_is_none(tmp_path: Path) -> None:
    """All such rules are reported, for all sources and for one; with a tracker none is."""
    found = faults(NEEDS_TRACKS, tmp_path)
    reason = "needs tracks, and the tracker's type is none; set tracker type bytetrack"
    places = ["4:19: analytics.line-crossing[0]", "5:11: analytics.dwell[0]"]
    places += ["6:64: source[0].analytics.direction-detection[0]"]
    assert [one.partition(", or remove")[0] for one in found] == [
        f"cameras.yaml:{place}: {place.split('.')[-1].partition('[')[0]} {reason}" for place in places
    ]
    assert read(NEEDS_TRACKS.replace("type: none", "type: bytetrack"), tmp_path).sources


def test_quick_line_is_refused_where_the_tracker_is_none(tmp_path: Path) -> None:
    """--line also needs tracks."""
    [found] = faults(LEAST + "tracker: {type: none}\n", tmp_path, Flags(lines=("door=1,2,3,4",)))
    assert found.startswith("--line: analytics.line-crossing[0]: line-crossing needs tracks")


def test_former_key_of_dwell_is_refused_with_its_value_in_seconds(tmp_path: Path) -> None:
    """The message has its place in the file."""
    [found] = faults(LEAST + "analytics: {dwell: [{name: W, roi: 0;0;9;0;9;9, time-threshold: 2500}]}\n", tmp_path)
    fix = "analytics.dwell[0].time-threshold: 2500: dwell takes seconds; write time-threshold-s: 2.5"
    assert found == f"cameras.yaml:3:49: {fix}"
