"""The examples are read as they stand."""

import shutil
from pathlib import Path

import pytest

from penstock_video.settings.loader import Surroundings, read_rules, read_settings
from penstock_video.settings.sources import rules_of
from tests.support.stack import CHECKOUT

EXAMPLES = CHECKOUT / "deepstream_pipeline" / "examples"
ENVIRON = {"DOOR_PASSWORD": "a", "MQTT_PASSWORD": "b", "KAFKA_PASSWORD": "c"}
SHOWN = {"cameras.yaml": ["door", "yard"], "clips.yaml": ["a", "b"], "replicas.yaml": ["camera-11"]}


@pytest.mark.parametrize(("name", "sources"), SHOWN.items())
def test_example_is_read_without_a_fault(tmp_path: Path, name: str, sources: list[str]) -> None:
    """With the sources that it says, on the first of three replicas where it is for replicas."""
    shutil.copy(EXAMPLES / name, tmp_path)
    (tmp_path / "clips").mkdir()
    for clip in ("a.mp4", "b.mp4"):
        (tmp_path / "clips" / clip).touch()
    shards = {"PENSTOCK_SHARDS": "3"} if name == "replicas.yaml" else {}
    settings = read_settings(tmp_path / name, surroundings=Surroundings(ENVIRON | shards, "video-0"))
    assert [source.config.source_id for source in settings.sources] == sources
    assert settings.sinks


def test_example_of_rules_is_read_without_a_fault() -> None:
    """With the labels of a model that knows people."""
    rules = rules_of(read_rules(EXAMPLES / "rules.yaml", ()), ("person",))
    assert [rule.name for rule in (*rules.line_crossing, *rules.roi_filtering)] == ["Pavement", "Lawn"]


def test_examples_each_have_a_test() -> None:
    """None is left to rot."""
    assert {path.name for path in EXAMPLES.iterdir()} == {*SHOWN, "rules.yaml", "extend"}
