"""Changes over the control API in the settings file: a restart has them, and what was not changed stays as written."""

import os
import stat
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from penstock_video.errors import ChangeNotSaved, SourceExists
from penstock_video.interfaces import Change, RulesChanged, Saved, SourceAdded, SourceChanged, SourceRemoved
from penstock_video.settings.loader import Flags, Surroundings, read_settings
from penstock_video.settings.models import VideoSettings
from penstock_video.settings.saving import SettingsFile
from penstock_video.types import DecoderKind, DropPolicy, SourceConfig

ENVIRON = {"CAMERA_PASSWORD": "s3cret"}
TEXT = """\
# The gate's cameras
primary-gie: {model: street}     # of 80 classes
source:
  - uri: rtsp://viewer:${CAMERA_PASSWORD}@192.0.2.10/1
    camera_id: gate
    rtsp-reconnect-interval: 5
  - uri: "clips/*.mp4"
    loop: yes
analytics:
  line-crossing: [{name: Door, line: [[100, 300], [600, 300]]}]
"""
LINES = {"line-crossing": [{"name": "Ön: 1", "line": [[1, 2], [3, 4.5]]}]}
YARD = SourceConfig("rtsp://u:p%40s@cam.example/2", "yard", "Yard: west", is_udp=True, is_from_api=True)


def nothing() -> None:
    """A change that the program makes."""


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """A settings file with a secret, comments, and two videos in one entry."""
    (tmp_path / "clips").mkdir()
    for name in ("a.mp4", "b.mp4"):
        (tmp_path / "clips" / name).write_bytes(b"")
    path = tmp_path / "video.yaml"
    path.write_text(TEXT)
    path.chmod(0o644)
    return path


@pytest.fixture
def made(file: Path) -> Callable[[Change], VideoSettings]:
    """Makes and saves a change; returns the settings of the next start."""
    saver = SettingsFile(file, ENVIRON)

    def make(change: Change) -> VideoSettings:
        assert saver.apply(change, nothing) is Saved.YES
        return read(file)

    return make


def read(file: Path) -> VideoSettings:
    return read_settings(file, surroundings=Surroundings(ENVIRON, "here"))


def configs(settings: VideoSettings) -> dict[str, SourceConfig]:
    return {one.config.source_id: one.config for one in settings.sources}


def test_added_source_is_there_after_a_restart(file: Path, made: Callable[[Change], VideoSettings]) -> None:
    """With all its options, and still as a client's: its addresses are checked as before."""
    before = configs(read(file))
    whole = replace(
        YARD,
        policy=DropPolicy.DROP_NEWEST, expected_fps=12.5, reconnect_attempts=3, record_cache_s=4.0,
        open_timeout_s=20.0, frozen_after_s=60.0, is_loop=True, is_realtime=True, decoder=DecoderKind.CPU,
    )  # fmt: skip
    assert configs(made(SourceAdded(whole))) == {**before, "yard": whole}


def test_secrets_and_other_settings_stay_as_they_are_written(
    file: Path, made: Callable[[Change], VideoSettings]
) -> None:
    """A variable stays a variable; only the comments are lost, and a copy keeps them."""
    made(SourceAdded(YARD))
    text = file.read_text()
    assert "${CAMERA_PASSWORD}" in text
    assert "s3cret" not in text
    assert "loop: yes" in text
    assert "{model: street}" in text
    assert file.with_name("video.yaml.orig").read_text() == TEXT
    made(SourceRemoved("yard"))
    assert file.with_name("video.yaml.orig").read_text() == TEXT
    assert yaml.safe_load(file.read_text()) == yaml.safe_load(TEXT)


def test_file_is_of_its_user_alone(file: Path, made: Callable[[Change], VideoSettings]) -> None:
    """It may have passwords now, and so has the copy."""
    made(SourceAdded(YARD))
    assert {stat.S_IMODE(path.stat().st_mode) for path in file.parent.glob("*video.yaml*")} == {0o600}


def test_changed_options_keep_the_address_as_it_is_written(file: Path, made: Callable[[Change], VideoSettings]) -> None:
    """An option that is the default again is taken out; a new address takes the variable's place."""
    gate = replace(configs(read(file))["gate"], camera_name="Gate", reconnect_interval_s=10.0)
    assert configs(made(SourceChanged(gate, is_new_address=False)))["gate"] == gate
    assert "${CAMERA_PASSWORD}" in file.read_text()
    assert "rtsp-reconnect-interval" not in file.read_text()
    moved = replace(gate, uri="rtsp://other.example/1", is_from_api=True)
    assert configs(made(SourceChanged(moved, is_new_address=True)))["gate"] == moved
    assert "${CAMERA_PASSWORD}" not in file.read_text()


def test_rules_are_of_the_source_alone(file: Path, made: Callable[[Change], VideoSettings]) -> None:
    """The others keep the common section; no rule at all is saved, too."""
    settings = made(RulesChanged("gate", LINES))
    rules = {one.config.source_id: settings.rules_section(one) for one in settings.sources}
    assert rules["gate"] == LINES
    assert rules["a"] == yaml.safe_load(TEXT)["analytics"]
    settings = made(RulesChanged("gate", {}))
    assert settings.rules_section(settings.sources[0]) == {}


def test_one_video_of_a_folder_is_changed_alone(file: Path, made: Callable[[Change], VideoSettings]) -> None:
    """The entry of several videos becomes one for each, with their names and options."""
    before = configs(read(file))
    settings = made(RulesChanged("b", LINES))
    after = configs(settings)
    assert {name: one.is_loop for name, one in after.items()} == {"gate": False, "a": True, "b": True}
    assert os.path.samefile(after["a"].uri, before["a"].uri)
    assert set(configs(made(SourceRemoved("a")))) == {"gate", "b"}


def test_last_source_is_removed_and_another_added(made: Callable[[Change], VideoSettings]) -> None:
    """A program without sources waits for the next one."""
    for source_id in ("gate", "a", "b"):
        settings = made(SourceRemoved(source_id))
    assert settings.sources == ()
    assert set(configs(made(SourceAdded(YARD)))) == {"yard"}


def test_hand_edits_between_two_changes_are_kept(file: Path, made: Callable[[Change], VideoSettings]) -> None:
    """Each change is made to the file as it is then."""
    made(SourceAdded(YARD))
    file.write_text(file.read_text().replace("street", "people"))
    assert made(SourceRemoved("yard")).primary.model == "people"


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (SourceAdded(SourceConfig("rtsp://evil.example/${CAMERA_PASSWORD}", "x")), "would expand it as a variable"),
        (SourceAdded(SourceConfig("rtsp://c.example/1", "x", camera_name="a\nb")), "printable text of one line"),
        (SourceAdded(SourceConfig("/no/such.mp4", "x")), "there is no file"),
        (SourceAdded(SourceConfig("rtsp://c.example/1", "x", reconnect_interval_s=0.1)), "from 0.5"),
        (RulesChanged("gate", {"os:system": []}), "can be set in the settings file only"),
        (RulesChanged("gate", {"line-crosing": []}), "line-crossing"),
        (SourceRemoved("gone"), "'gone' is not in the settings file"),
    ],
)
def test_change_that_would_spoil_the_file_is_not_made(file: Path, change: Change, text: str) -> None:
    """Neither in the program nor in the file: both agree. A client's text never becomes a variable or an import."""
    calls: list[None] = []
    with pytest.raises(ChangeNotSaved) as refused:
        SettingsFile(file, ENVIRON).apply(change, lambda: calls.append(None))
    assert text in refused.value.message
    assert (calls, file.read_text()) == ([], TEXT)


def test_change_that_the_program_refuses_is_not_saved(file: Path) -> None:
    """The file keeps what runs."""

    def refuse() -> None:
        raise SourceExists("there already")

    with pytest.raises(SourceExists):
        SettingsFile(file, ENVIRON).apply(SourceAdded(YARD), refuse)
    assert file.read_text() == TEXT


def test_disk_that_is_full_costs_the_saving_alone(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The change is made, the answer says that it is not saved, and the file is whole."""

    def fail(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", fail)
    assert SettingsFile(file, ENVIRON).apply(SourceAdded(YARD), nothing) is Saved.FAILED
    assert file.read_text() == TEXT


def test_two_programs_do_not_save_to_one_file(file: Path) -> None:
    """The second is refused at its start; after the first has ended, the file is free."""
    first = SettingsFile(file, ENVIRON)
    with pytest.raises(ChangeNotSaved, match="another program"):
        SettingsFile(file, ENVIRON)
    first.close()
    SettingsFile(file, ENVIRON).close()


def test_flags_of_the_run_count_when_the_file_is_checked(tmp_path: Path) -> None:
    """A model that is given as a flag is not missing in the file."""
    path = tmp_path / "video.yaml"
    path.write_text("osd: {}\n")
    saver = SettingsFile(path, ENVIRON, Flags(model="street"))
    assert saver.apply(SourceAdded(YARD), nothing) is Saved.YES
    assert set(configs(read_settings(path, Flags(model="street")))) == {"yard"}
