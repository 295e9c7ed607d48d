"""Sinks, trackers and rules of users: the examples of docs/extend.md, loaded from a settings file."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.protocol.extensions import ExtensionError, load_extension
from penstock_video.analytics import registry
from penstock_video.analytics.config import rules_from, section_of
from penstock_video.analytics.source_analytics import SourceAnalytics
from penstock_video.errors import RuleRefused
from penstock_video.metrics import VideoMetrics
from penstock_video.settings.loader import read_rules
from penstock_video.settings.sources import rules_of
from penstock_video.sink_set import compose_sinks
from penstock_video.sinks.osd import OsdOptions
from penstock_video.track.registry import new_tracker
from penstock_video.types import FrameAnalytics, FrameResult
from tests.deepstream_pipeline.analytics.scenes import frame_at, observe, tracks_at
from tests.deepstream_pipeline.settings.reading import faults, read
from tests.support.stack import CHECKOUT

EXAMPLES = CHECKOUT / "deepstream_pipeline" / "examples" / "extend"
LEAST = "source: {uri: rtsp://cam/1}\nprimary-gie: {model: people}\n"
RULE = 'analytics: {"queue_rule:QueueRecord": [{name: Till, left: 500}]}\n'


@pytest.fixture(autouse=True)
def _examples(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The examples are importable, and their rules are registered in the test alone."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    monkeypatch.setattr(registry, "USER_RULES", registry.USER_RULES)
    before = dict(registry.USER_RULES)
    yield
    registry.USER_RULES.clear()
    registry.USER_RULES.update(before)


def test_page_shows_the_examples_as_they_run() -> None:
    """Each example is on the page, word for word."""
    page = (CHECKOUT / "docs" / "extend.md").read_text()
    for path in EXAMPLES.glob("*.py"):
        assert f"```python\n{path.read_text()}```" in page, path.name


def test_sink_of_a_user_writes_the_results(tmp_path: Path) -> None:
    """It has its own keys, --out is its folder, and it runs behind the queue of every sink."""
    text = "sink: [{type: 'csv_sink:CsvSink', folder: out, separator: ';'}]\n"
    settings = read(LEAST + text, tmp_path)
    composed = compose_sinks(settings.sinks, VideoMetrics(), lambda *_: None, OsdOptions(), is_single=True)
    [worker] = [one for one in composed.outlets if one.options.name == "csvsink"]
    worker.start()
    worker.put(
        FrameResult(frame_at(3), tracks_at({1: (5, 5), 2: (9, 9)}), FrameAnalytics(), ("person",)), may_wait=True
    )
    assert all(one.close(10.0) for one in composed.outlets)
    assert (tmp_path / "out" / "objects.csv").read_text() == "cam;3;2\n"


def test_tracker_of_a_user_gives_the_identities(tmp_path: Path) -> None:
    """Each source has a tracker of its own, made with the section's other keys."""
    options = read(LEAST + "tracker: {type: 'nearest_tracker:NearestTracker', max-distance: 20}\n", tmp_path).tracker
    tracker = new_tracker(options)
    steps = [{1: (100, 100), 2: (200, 200)}, {1: (105, 100), 2: (400, 200)}]
    ids = [tracker.update(frame_at(n), tracks_at(step).detections).track_id.tolist() for n, step in enumerate(steps)]
    assert ids == [[1, 2], [1, 3]]
    assert options.has_tracks


def test_rule_of_a_user_gives_events_and_counts(tmp_path: Path) -> None:
    """Its shapes are scaled, and its events have its kind."""
    path = tmp_path / "rules.yaml"
    path.write_text(RULE.replace("analytics: {", "analytics: {config-width: 2000, config-height: 2000, "))
    rules = rules_of(read_rules(path, ()), ())
    found = observe(rules, {1: [(100, 100), (300, 100)], 2: [(900, 100), (900, 100)]})
    assert [(event.kind, event.rule, event.value) for one in found for event in one.events] == [
        ("queue-record", "Till", 1.0), ("queue-record", "Till", 2.0),
    ]  # fmt: skip
    assert found[-1].counts["queue-record/Till"] == 2


def test_rule_of_a_user_is_known_to_the_api_only_by_its_kind(tmp_path: Path) -> None:
    """A client can use a rule that the operator's file loaded, and cannot load one."""
    with pytest.raises(RuleRefused, match="there is no key 'queue_rule:QueueRecord'"):
        rules_from({"queue_rule:QueueRecord": [{"name": "Till"}]}, ())
    section = read(LEAST + RULE, tmp_path).analytics
    assert section is not None
    rules = rules_from(section.content, ())
    assert section_of(rules) == {"queue-record": [{"name": "Till", "left": 500}]}
    analytics = SourceAnalytics(rules, ())
    assert analytics.changed(rules)._watches == analytics._watches


FAULTS: dict[str, str] = {
    "sink: [{type: 'no_such:Sink'}]": "sink[0].type is 'no_such:Sink': it cannot be loaded (ModuleNotFoundError",
    "sink: [{type: 'csv_sink:'}]": "sink[0].type is 'csv_sink:': module:Name is needed",
    "sink: [{type: 'csv_sink:CsvSink'}]": "sink[0].folder: is missing",
    "sink: [{type: 'csv_sink:CsvSink', folder: a, seperator: x}]": "unknown key; did you mean separator?",
    "sink: [{type: 'nearest_tracker:NearestTracker'}]": "it has no method write; it needs write, end_source, close",
    "tracker: {type: 'nearest_tracker:NearestTracker', max-distance: 0}": "a number above 0 and at most 10000",
    "sink: [{type: 'csv_sink:CsvSnk', folder: a}]": "the module csv_sink has no CsvSnk; did you mean csv_sink:CsvSink?",
    "analytics: {'queue_rule:Nothing': []}": "3:13: analytics.queue_rule:Nothing: the module queue_rule has no Nothing",
    RULE.replace("500", "far"): "3:53: analytics.queue-record[0].left: 'far': Input should be a valid number",
    RULE.replace("name: Till, ", ""): "analytics.queue-record[0]: name is missing",
    RULE.replace("Till", "a/b"): "analytics.queue-record[0].name: 'a/b': a name has 1 to 64 printable characters",
}


@pytest.mark.parametrize(("text", "fault"), FAULTS.items())
def test_faulty_extension_is_reported_at_its_place(tmp_path: Path, text: str, fault: str) -> None:
    """Nothing is raised but the settings' own error, with FILE:LINE:COLUMN."""
    [found] = faults(LEAST + text, tmp_path)
    assert found.startswith("cameras.yaml:3:")
    assert fault in found


@pytest.mark.parametrize("name", ["os", "os:", ":path", "os:path.join", "os path:x", "../a:b"])
def test_name_that_is_no_extension_is_refused(name: str) -> None:
    """Nothing is imported for a malformed name."""
    with pytest.raises(ExtensionError, match="module:Name is needed"):
        load_extension(name)
