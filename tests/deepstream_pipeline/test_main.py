"""What the program finds out about the settings once it knows the models, before it touches a file."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock_video.errors import ModelUnusable, SinkFailed, TooManySources
from penstock_video.infer.options import EngineAddress
from penstock_video.main import Program
from penstock_video.settings.document import InvalidSettings
from penstock_video.settings.loader import Flags
from tests.deepstream_pipeline.clips import write_clip
from tests.deepstream_pipeline.infer.fake_core import FakeCore
from tests.deepstream_pipeline.settings.reading import read

HEAD = "api: {enable: false}\nsink: {type: jsonl, folder: out}\ntracker: {type: bytetrack}\n"
DWELL = "{name: B, roi: 1;1;5;1;5;5, class-id: 7}"
SOURCES = f"source: [{{uri: rtsp://a, camera_id: a}}, {{uri: rtsp://b, analytics: {{dwell: [{DWELL}]}}}}]\n"
LINES = "{name: A, line: 0;0;9;9, class-id: dark}, {name: C, line: 0;0;9;9, class-id: drak}"
RULES = f"analytics: {{line-crossing: [{LINES}]}}\n"


@pytest.fixture
def core(tmp_path: Path) -> Iterator[FakeCore]:
    """With `owned`, which knows dark and bright."""
    (tmp_path / "run").mkdir()
    core = FakeCore(tmp_path / "run")
    yield core
    core.end()


def prepared(core: FakeCore, folder: Path, text: str) -> Program:
    program = Program(read(HEAD + text, folder), EngineAddress(core.folder, "http://127.0.0.1:1", "127.0.0.1:1"))
    try:
        program.prepare()
    finally:
        program.stop(0.0)
    return program


def test_class_that_the_model_does_not_know_is_a_fault_of_the_file_with_its_place(
    core: FakeCore, tmp_path: Path
) -> None:
    """All of them, of the sources' own rules, too; and no file is made before."""
    with pytest.raises(InvalidSettings) as refused:
        prepared(core, tmp_path, SOURCES + "primary-gie: {model: owned}\n" + RULES)
    first, second = (str(fault).replace(f"{tmp_path}/", "") for fault in refused.value.complaints)
    at = f"cameras.yaml:4:{SOURCES.index('class-id') + 1}: source[1].analytics.dwell[0].class-id"
    assert first == f"{at}: 7: the model has classes 0 to 1"
    at = f"cameras.yaml:6:{RULES.rindex('class-id') + 1}: analytics.line-crossing[1].class-id"
    assert second == f"{at}: 'drak': the model has no such class; did you mean 'dark'?"
    assert not (tmp_path / "out").exists()


def test_class_to_keep_that_the_model_does_not_know_has_its_place(core: FakeCore, tmp_path: Path) -> None:
    """As a rule's."""
    text = "source: {uri: rtsp://a}\nprimary-gie: {model: owned, operate-on-class-ids: [1, brigt]}\n"
    with pytest.raises(InvalidSettings) as refused:
        prepared(core, tmp_path, text)
    fault = "operate-on-class-ids names 'brigt', which 'owned' does not know; did you mean bright?"
    assert str(refused.value).endswith(f"cameras.yaml:5:51: primary-gie.{fault}")


@pytest.mark.parametrize(
    ("name", "fault"),
    [
        ("brigt", "names 'brigt', which 'owned' does not know; did you mean bright?"),
        ("2", "names class 2; 'owned' has classes 0 to 1"),
    ],
)
def test_class_of_a_flag_that_the_model_lacks_names_the_flag(
    core: FakeCore, tmp_path: Path, name: str, fault: str
) -> None:
    """Before a file is made; a number is held against the labels, too."""
    settings = read(HEAD + "source: {uri: rtsp://a}\nprimary-gie: {model: owned}\n", tmp_path, Flags(classes=(name,)))
    program = Program(settings, EngineAddress(core.folder, "http://127.0.0.1:1", "127.0.0.1:1"))
    with pytest.raises(InvalidSettings) as refused:
        program.prepare()
    program.stop(0.0)
    assert str(refused.value) == f"--classes: primary-gie.operate-on-class-ids {fault}"


def test_iou_of_a_model_without_nms_is_refused(core: FakeCore, tmp_path: Path) -> None:
    """As it would have no effect."""
    with pytest.raises(
        ModelUnusable, match=r"nms-iou-threshold \(--iou\) for 'owned': iou has no effect on this model"
    ):
        prepared(core, tmp_path, "source: {uri: rtsp://a}\nprimary-gie: {model: owned, nms-iou-threshold: 0.5}\n")


def test_run_without_the_api_imports_no_web_framework(
    core: FakeCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither when the program is imported, nor when it starts: FastAPI is a quarter of the imports of a run."""
    web = "{'fastapi', 'starlette.applications', 'uvicorn', 'penstock_video.api.app', 'penstock_video.api.server'}"
    code = f"import sys, penstock_video.cli.run, penstock_video.main; sys.exit(str({web} & set(sys.modules) or ''))"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert answer.stderr.strip() == ""
    monkeypatch.setitem(sys.modules, "penstock_video.api.server", None)  # an import raises ImportError
    text = HEAD + f"source: {{uri: {write_clip(tmp_path / 'a.mp4', frames=2)}}}\nprimary-gie: {{model: owned}}\n"
    program = Program(read(text, tmp_path), EngineAddress(core.folder, "http://127.0.0.1:1", "127.0.0.1:1"))
    program.start()
    program.stop(0.0)


MODELS = {
    "nosuch": "the engine has no model 'nosuch'",
    "tensors": "does not say how it sees images",
    "owned}\nsecondary-gie: {model: owned": "'owned' finds no objects that 'owned' could look at",
    "one_box}\nsecondary-gie: {model: one_box": "'one_box' is a detector without keypoints",
}


@pytest.mark.parametrize("name", MODELS)
def test_model_that_is_none_for_pictures_is_found_before_a_file_is_made(
    core: FakeCore, tmp_path: Path, name: str
) -> None:
    """Of secondary models, too."""
    with pytest.raises(ModelUnusable, match=MODELS[name]):
        prepared(core, tmp_path, f"source: {{uri: rtsp://a}}\nprimary-gie: {{model: {name}}}\n")
    assert not (tmp_path / "out").exists()


def test_more_sources_than_one_program_takes_are_refused_at_once(core: FakeCore, tmp_path: Path) -> None:
    """With what to do."""
    uris = ", ".join(f"{{uri: rtsp://camera/{number}}}" for number in range(201))
    with pytest.raises(TooManySources, match=r"201 sources are given, and 200 are the most; use --shard i/n"):
        prepared(core, tmp_path, f"source: [{uris}]\nprimary-gie: {{model: owned}}\n")
    assert core.asked == []


def test_settings_that_hold_are_prepared_without_a_file(core: FakeCore, tmp_path: Path) -> None:
    """What opens them is the start."""
    prepared(core, tmp_path, "source: {uri: rtsp://a}\nprimary-gie: {model: owned, operate-on-class-ids: [bright]}\n")
    assert not (tmp_path / "out").exists()


def test_what_the_settings_allow_reaches_the_sinks(
    core: FakeCore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An allowed metadata address is allowed for the operator's own sinks."""
    composed: list[object] = []

    def compose(sinks: tuple[object, ...], *_: object, **__: object) -> None:
        composed.extend(sinks)
        raise SinkFailed("enough is seen")

    monkeypatch.setattr("penstock_video.main.compose_sinks", compose)
    text = (
        "api: {enable: false, allow-outbound: [169.254.169.254]}\nsource: {uri: rtsp://a}\n"
        "primary-gie: {model: owned}\ntracker: {type: bytetrack}\nsink: {type: webhook, url: http://169.254.169.254/}\n"
    )
    program = Program(read(text, tmp_path), EngineAddress(core.folder, "http://127.0.0.1:1", "127.0.0.1:1"))
    with pytest.raises(SinkFailed, match="enough is seen"):
        program.start()
    (webhook,) = composed
    assert getattr(webhook, "allowed_outbound", None) == ("169.254.169.254",)
