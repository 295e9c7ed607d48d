"""targets.toml: what its rows state, and that a mistake in one's own file is named."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock_load.hardware import ANY, Hardware
from penstock_load.scenario import Scenario, read_scenario, scenario_names
from penstock_load.targets import (
    Comparison,
    Origin,
    Provenance,
    Target,
    TargetsError,
    read_targets,
    scenario_targets,
    slo_targets,
    with_unit,
)

TARGETS = {target.id: target for target in read_targets()}


def test_shipped_targets_each_say_where_they_come_from() -> None:
    """No row is without source and conditions; foreign figures are cited, and only those of 2017 may be from memory."""
    for target in TARGETS.values():
        assert target.source, target.id
        assert target.conditions.endswith("."), target.id
        assert (target.standing is Provenance.CITED) == (target.origin is not Origin.OWN), target.id
        assert not target.from_memory or target.origin is Origin.FIGURES_OF_2017, target.id


def test_shipped_targets_of_a_card_speak_of_that_card() -> None:
    """A row that is named after a card is bound to it: on another machine it can be compared, never passed."""
    for target in TARGETS.values():
        if found := re.search(r"\b(v100|p4|t4|a100|h100|h200)\b", target.id):
            assert target.hardware.gpu == found[1].upper(), target.id
    assert TARGETS["h200-jpeg"].hardware == Hardware("H200", 16)
    assert TARGETS["clean"].hardware == ANY


@pytest.mark.parametrize("name", scenario_names())
def test_shipped_scenarios_each_have_something_to_answer_to(name: str) -> None:
    """Whatever is run, at least one row can be judged on any machine."""
    rows = scenario_targets(TARGETS.values(), name)
    assert any(row.comparison is not Comparison.QUOTED and row.hardware == ANY and not row.models for row in rows)


MINIMAL = """
[[target]]
id = "mine"
scenario = "image-steady"
measure = "capacity_per_s"
comparison = "at_least"
figure = 140
"""


@pytest.fixture
def read(tmp_path: Path) -> Callable[[str], tuple[Target, ...]]:
    """Reads the text as a file of targets."""

    def read_text(text: str) -> tuple[Target, ...]:
        (tmp_path / "mine.toml").write_text(text)
        return read_targets(tmp_path / "mine.toml", also=["my-scenario"])

    return read_text


def test_row_of_ones_own_needs_five_fields(read: Callable[[str], tuple[Target, ...]]) -> None:
    """Id, scenario, measure, comparison and figure are enough: the unit is the measure's, the source is the file."""
    (row,) = read(MINIMAL)
    assert (row.wanted, row.hardware, row.origin) == ("at least 140/s", ANY, Origin.OWN)
    assert row.source.endswith("mine.toml")
    assert row.title == "right answers a second in a closed loop: each client sends its next request after the answer"
    assert read(MINIMAL.replace('"image-steady"', '["soak", "my-scenario"]'))[0].scenarios == ("soak", "my-scenario")


MISTAKES = {
    "an unknown field": (
        "figure = 140",
        "figur = 140",
        "mine.toml:2: target 'mine': unknown field 'figur'; did you mean",
    ),
    "a missing field": ('scenario = "image-steady"\n', "", "target 'mine': it lacks the field scenario"),
    "an unknown measure": (
        "capacity_per_s",
        "capcity_per_s",
        "unknown measure 'capcity_per_s'; did you mean capacity_per_s?",
    ),
    "an unknown scenario": (
        "image-steady",
        "image-stedy",
        "unknown scenario 'image-stedy'; did you mean image-steady?",
    ),
    "an unknown comparison": ("at_least", "atleast", "comparison cannot be 'atleast'; did you mean at_least?"),
    "a figure that is none": ("140", '"140"', "figure: expected a number, got a text"),
    "an infinite figure": ("140", "inf", "figure = inf is no finite number"),
    "no figure": ("figure = 140", "", "no figure to compare with"),
    "a goal below the floor": ("140", "140\ngoal = 130", "goal = 130 is worse than figure = 140, at least"),
    "hardware in words": ("140", '140\nhardware = "V100"', "hardware = 'V100' is neither \"any\" nor a table"),
    "an unknown field of hardware": (
        "140",
        '140\nhardware = { gpus = "V100" }',
        "unknown field 'gpus'; did you mean gpu?",
    ),
    "a bad id": ('"mine"', '"My target"', "an id is small letters"),
    "a fact that is judged": ('"image-steady"', '"none"', "its comparison can only be quoted, not at_least"),
    "the same id twice": ("140", "140" + MINIMAL, "mine.toml:8: target 'mine': the id stands twice; the first is"),
    "another table": ("[[target]]", "[[targets]]", "unknown table 'targets'"),
    "no TOML": ("[[target]]", "[[target]", "not valid TOML"),
}


@pytest.mark.parametrize(("before", "after", "sentence"), MISTAKES.values(), ids=MISTAKES)
def test_mistake_in_a_file_is_one_sentence_with_its_place(
    before: str, after: str, sentence: str, read: Callable[[str], tuple[Target, ...]]
) -> None:
    """What is wrong is said in one line with the file and, inside a row, the row; near names are suggested."""
    assert MINIMAL.count(before) == 1
    with pytest.raises(TargetsError) as caught:
        read(MINIMAL.replace(before, after))
    assert sentence in str(caught.value)
    assert "\n" not in str(caught.value)
    assert "mine.toml" in str(caught.value)


def test_goal_of_at_most_is_the_lower_one(read: Callable[[str], tuple[Target, ...]]) -> None:
    """Less is better where the figure is a ceiling, so a goal above it is refused."""
    ceiling = MINIMAL.replace("at_least", "at_most")
    assert read(f"{ceiling}goal = 130")[0].goal == 130
    with pytest.raises(TargetsError, match="goal = 150 is worse than figure = 140, at most"):
        read(f"{ceiling}goal = 150")


def test_missing_file_is_one_sentence(tmp_path: Path) -> None:
    """A file that is not there is named, with what to give instead."""
    with pytest.raises(TargetsError, match=r"gone\.toml: cannot be read \(No such file or directory\); give a TOML"):
        read_targets(tmp_path / "gone.toml")


def test_scenario_brings_its_slo_and_the_rate_that_was_asked_for() -> None:
    """The SLO of the scenario as it is run is a row, and --min-rate another; reloads have no p99 to judge."""
    scenario: Scenario = read_scenario("image-steady")
    slo, rate = slo_targets(scenario, documented=read_targets(), min_rate_per_s=100)
    assert (slo.measure, slo.wanted, slo.scenarios) == ("p99_ms", "at most 250 ms", ("image-steady",))
    assert (rate.measure, rate.wanted) == ("ok_per_s", "at least 100/s")
    assert slo_targets(read_scenario("cold-start"), documented=()) == ()


def test_slo_limits_errors_where_no_other_row_does(read: Callable[[str], tuple[Target, ...]]) -> None:
    """Errors are in no percentile, so that with the SLO's p99 alone a server which fails at once would pass."""
    scenario: Scenario = read_scenario("image-steady")
    rates = read(MINIMAL)
    on_other_hardware = read(
        MINIMAL.replace("capacity_per_s", "error_share").replace("at_least", "at_most") + 'hardware = { gpu = "V100" }'
    )
    for documented in ((), rates, on_other_hardware):
        _, errors = slo_targets(scenario, documented=documented)
        assert (errors.measure, errors.wanted) == ("error_share", "at most 0.01")


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (5707.4, "images/s", "5,707 images/s"),
        (152.31, "/s", "152/s"),
        (12.345, "ms", "12.3 ms"),
        (0.95, "share", "0.95"),
        (0.0012345, "", "0.00123"),
        (0, "ms", "0 ms"),
        (-1.5, "ms", "-1.5 ms"),
        (999.7, "/s", "1,000/s"),
    ],
)
def test_figures_are_written_with_three_digits_and_their_unit(value: float, unit: str, text: str) -> None:
    """A noisy figure has no fourth digit; whole parts are never rounded away."""
    assert with_unit(value, unit) == text


def test_figures_that_differ_look_different() -> None:
    """139.6 against 140 gets as many digits as it takes to see which is more."""
    assert with_unit(139.6, "/s", unlike=140) == "139.6/s"
    assert with_unit(140, "/s", unlike=140) == "140/s"
