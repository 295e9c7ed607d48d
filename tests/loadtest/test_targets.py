"""targets.toml: every documented figure is a row of it, and a mistake in one's own file is named."""

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

# figure and goal of every row, by id
FIGURES_OF_2017 = {
    "resnet50-v100-tensorflow": (305, None),
    "resnet50-v100-tensorrt": (5707, None),
    "resnet50-v100-speedup": (20, None),
    "resnet50-v100-batch-1": (481, None),
    "resnet50-v100-batch-32": (4856, None),
    "resnet50-v100-batch-256": (6444, None),
    "opennmt-v100-before": (26.16, None),
    "opennmt-v100": (541, None),
    "volta-inference": (3, None),
    "volta-inference-7ms": (3.7, None),
    "mps-7x": (7, None),
    "mps-batching": (1.6, 1.67),
    "mps-clients-volta": (48, None),
    "mps-clients-pascal": (16, None),
    "deepstream-p4": (13, None),
    "deepstream-p4-streams": (93, None),
    "deepstream-e5-streams": (7, None),
    "googlenet-25": (25, None),
    "p4-card-fp32": (5.5, None),
    "p4-card-int8": (22, None),
    "p4-card-50w": (50, None),
    "p4-card-75w": (75, None),
    "v100-card-nvlink-fp32": (15.7, None),
    "v100-card-nvlink-tensor": (125, None),
    "v100-card-pcie-fp32": (14, None),
    "v100-card-pcie-tensor": (112, None),
    "v100-card-memory": (900, None),
    "util-lies": (None, None),
}
REFERENCES = {
    "mlperf-h200-offline": (94620, None),
    "mlperf-h200-server": (79029, None),
    "mlperf-h100-offline": (88714, None),
    "mlperf-h100-server": (72977, None),
    "mlperf-a100-offline": (39106, None),
    "mlperf-a100-server": (32504, None),
    "mlperf-t4-offline": (5622, None),
    "mlperf-t4-server": (5193, None),
    "triton-of-tensorrt-offline": (0.972, None),
    "triton-of-tensorrt-server": (0.723, None),
    "triton-network-a100": (6127, None),
    "triton-network-v100": (3558, None),
    "triton-network-t4": (2140, None),
    "nvdec-pascal-h264": (694, None),
    "nvdec-turing-h264": (771, None),
    "nvdec-turing-hevc": (1316, None),
    "nvdec-ada-h264": (903, None),
    "nvdec-ada-hevc": (1641, None),
    "deepstream-p4-nvdec": (52, None),
    "mps-clients-cuda-13.1": (60, None),
    "ray-serve": (463, None),
    "ray-serve-optimised": (2221, None),
    "mlserver-rest": (1300, None),
    "mlserver-grpc": (2259, None),
    "kserve-proxies-least": (2, None),
    "kserve-proxies-most": (3, None),
    "grpc-aio": (4300, None),
}
OWN = {
    "gateway-triton-resnet50": (0.95, 0.98),
    "gateway-triton-5ms": (0.80, 0.90),
    "gateway-triton-tiny": (0.25, 0.50),
    "gateway-added-p50": (1.0, 0.6),
    "gateway-added-p99": (3, 2),
    "jpeg-limit": (0.85, 0.92),
    "peers-rate": (1.3, 1.6),
    "peers-p99": (1, None),
    "peers-cpu": (4, None),
    "video-limit": (0.90, 0.95),
    "video-peer": (1.3, None),
    "video-16-streams": (0.95, None),
    "video-fairness": (0.98, None),
    "video-overload": (0.90, None),
    "video-streams-core": (0.5, 1),
    "batcher-nexus-7ms": (2894, None),
    "batcher-nexus-15ms": (4975, None),
    "batcher-nexus-50ms": (6242, None),
    "batcher-rivals": (1, None),
    "h200-jpeg": (5707, 10000),
    "h200-raw": (0.95, None),
    "h200-mps-8": (3.0, 7),
    "h200-mps-16": (3.8, 7),
    "h200-batching": (1.6, None),
    "h200-video-720p": (315, None),
    "h200-video-1080p": (140, None),
    "h200-video-hevc": (240, None),
    "h200-nvdec": (0.95, None),
    "clean": (0.001, None),
    "overload-goodput": (0.90, None),
    "overload-refusals": (50, None),
    "overload-failures": (0.001, None),
    "soak-memory": (1, None),
    "soak-drift": (0.10, None),
    "cold-load": (5000, None),
    "cold-first-answer": (1000, None),
}
FROM_MEMORY = {
    *("resnet50-v100-tensorrt", "resnet50-v100-tensorflow", "resnet50-v100-speedup", "opennmt-v100"),
    *("opennmt-v100-before", "mps-batching", "deepstream-p4-streams", "deepstream-e5-streams"),
}


def test_shipped_targets_are_the_documented_figures() -> None:
    """Every documented figure is a row with its floor and goal, under its origin, and there is no other."""
    by_origin = {Origin.FIGURES_OF_2017: FIGURES_OF_2017, Origin.REFERENCE: REFERENCES, Origin.OWN: OWN}
    for origin, figures in by_origin.items():
        rows = {target.id: (target.figure, target.goal) for target in TARGETS.values() if target.origin is origin}
        assert rows == figures


def test_shipped_targets_each_say_where_they_come_from() -> None:
    """No row is without source and conditions; foreign figures are cited, and a row quoted from memory says so."""
    for target in TARGETS.values():
        assert target.source, target.id
        assert target.conditions.endswith("."), target.id
        assert (target.standing is Provenance.CITED) == (target.origin is not Origin.OWN), target.id
    assert {target.id for target in TARGETS.values() if target.from_memory} == FROM_MEMORY


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
    assert row.title == "right answers a second with callers that always wait for the next answer"
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
