"""The benches behind docs/settings.md, and that the page says what they measured."""

import json
import re
from pathlib import Path

import pytest

from loadtest.bench.gateway.settings import P99_MS, RATE, REFUSED, SETTINGS, Setting, Side, effects, write_model
from loadtest.bench.gateway.settings import parse_arguments as gateway_options
from loadtest.bench.video.detection_settings import outcome_of
from loadtest.bench.wire import BadAnswer
from tests.support.stack import CHECKOUT

RESULTS = CHECKOUT / "loadtest" / "results" / "settings-epyc-2"
SETTING = Setting("decoders", Side("2"), Side("1"))


def test_effects_are_ratios_of_the_other_value_by_the_usual_one() -> None:
    """With a spread; a share of refusals has none, and is left out where nothing was refused."""
    pairs = [
        ({RATE: 100.0, P99_MS: 10.0, REFUSED: 0.0}, {RATE: 50.0 + n, P99_MS: 30.0, REFUSED: 0.0}) for n in range(6)
    ]
    rate, p99 = effects(SETTING, pairs)
    assert rate.ratio is not None
    assert p99.ratio is not None
    assert (rate.ratio.low, rate.ratio.high, p99.ratio.median) == (0.5, 0.55, 3.0)
    refused = [(usual, other | {REFUSED: 0.25}) for usual, other in pairs]
    assert [effect.other.median for effect in effects(SETTING, refused) if effect.measure == REFUSED] == [0.25]
    with pytest.raises(ValueError, match="at least 6"):
        effects(SETTING, pairs[:5])


def test_model_of_a_stack_gets_the_number_of_instances(tmp_path: Path) -> None:
    """In its copy; a config without a count cannot be measured, which is said."""
    (model := tmp_path / "ppe").mkdir()
    (model / "config.pbtxt").write_text("instance_group [ { count: 2 } ]\n")
    write_model(model, tmp_path / "one", 1)
    assert (tmp_path / "one" / "models" / "ppe" / "config.pbtxt").read_text() == "instance_group [ { count: 1 } ]\n"
    (model / "config.pbtxt").write_text("max_batch_size: 8\n")
    with pytest.raises(BadAnswer, match="no instance_group"):
        write_model(model, tmp_path / "two", 1)


def test_outcome_counts_objects_tracks_and_crossings() -> None:
    """Objects without a track count as objects; crossings are those of the last line."""
    counts = {"line-crossing/door.in": 1, "line-crossing/door.out": 2}
    lines: list[dict[str, object]] = [
        {"objects": [{"track_id": 1}, {"track_id": None}], "counts": {}},
        {"objects": [{"track_id": 1}, {"track_id": 2}], "counts": counts},
    ]
    outcome = outcome_of("usual", lines, "door")
    assert (outcome.objects, outcome.tracks, outcome.crossed_in, outcome.crossed_out) == (2.0, 2, 1, 2)


def test_unknown_setting_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    """With the names that exist."""
    with pytest.raises(SystemExit):
        gateway_options(["--model-folder", "ppe", "--only", "wrokers"])
    assert SETTINGS[0].name in capsys.readouterr().err


def test_page_states_the_committed_figures() -> None:
    """Each ratio on docs/settings.md is the median, with its interval, of a row of the committed results."""
    page = (CHECKOUT / "docs" / "settings.md").read_text()
    rows = [row for path in RESULTS.glob("settings*.json") for row in json.loads(path.read_text())["results"]]
    known = {
        "{median:.2f} ({low:.2f} to {high:.2f})".format(**row["ratio"]) for row in rows if row["ratio"] is not None
    }
    stated = re.findall(r"\d+\.\d\d \(\d+\.\d\d to \d+\.\d\d\)", page)
    assert len(stated) >= 12
    assert set(stated) <= known
    found = json.loads((RESULTS / "detection_settings.json").read_text())["results"]
    for row in found:
        assert f"| {row['objects']:.1f} | {row['tracks']} | {row['crossed_in']} | {row['crossed_out']} |" in page
