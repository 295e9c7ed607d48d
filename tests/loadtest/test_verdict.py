"""Verdicts: the median decides, other hardware is never passed, and a run with a complaint proves nothing."""

from typing import Any

import msgspec
import pytest

from penstock_load.hardware import Hardware
from penstock_load.measure.measures import knee_measurement, measure
from penstock_load.results import Machine, Measurement, Spread, State, Verdict
from penstock_load.scenario import read_scenario
from penstock_load.targets import (
    NOTHING_MEASURES_IT,
    UNITS,
    Comparison,
    Target,
    read_targets,
    scenario_targets,
    slo_targets,
)
from penstock_load.verdict import Circumstances, exit_code, judge, way_out
from tests.loadtest.runs import make_run

LAPTOP = Machine("AMD EPYC", 2, 8.0, (), "Linux 6.1", ())
V100 = Machine("Intel Xeon", 8, 64.0, ("Tesla V100-SXM2-16GB",), "Linux 6.1", ())
H200 = Machine("Intel Xeon", 16, 128.0, ("NVIDIA H200",), "Linux 6.1", ())
HERE = Circumstances(machine=LAPTOP, models=("street",), slo_p99_ms=250)


def target(**changes: Any) -> Target:
    """A target of 140/s at least."""
    row = Target(
        id="mine",
        title="pictures a second",
        scenarios=("image-steady",),
        measure="capacity_per_s",
        unit="/s",
        comparison=Comparison.AT_LEAST,
        figure=140,
        source="us",
    )
    return msgspec.structs.replace(row, **changes)


def measured(median: float, low: float, high: float, *, name: str = "capacity_per_s", rounds: int = 3) -> Measurement:
    """A figure over rounds."""
    return Measurement(name, UNITS[name], Spread(median, low, high), rounds)


def verdict_of(row: Target, measurement: Measurement | None, circumstances: Circumstances = HERE) -> Verdict:
    """The one verdict."""
    (verdict,) = judge([row], [measurement] if measurement else [], circumstances)
    return verdict


AT_MOST = {"comparison": Comparison.AT_MOST, "measure": "p99_ms", "unit": "ms", "figure": 250}
JUDGEMENTS: dict[str, tuple[dict[str, Any], Measurement, State, str]] = {
    "above the floor": ({}, measured(152, 147, 156), State.PASS, "152/s (147 to 156), at least 140/s"),
    "on the floor": ({}, measured(140, 140, 140), State.PASS, "140/s in all 3 rounds, at least 140/s"),
    "below the floor": ({}, measured(99, 95, 101), State.FAIL, "99/s (95 to 101), at least 140/s"),
    "hardly below": ({}, measured(139.6, 139, 139.9), State.FAIL, "139.6/s (139 to 140), at least 140/s"),
    "the rounds on both sides": (
        {},
        measured(152, 131, 156),
        State.PASS,
        "152/s (131 to 156), at least 140/s; the rounds lie on both sides, the median decides",
    ),
    "one round": ({}, measured(152, 152, 152, rounds=1), State.PASS, "152/s in one round, at least 140/s"),
    "below the ceiling": (
        AT_MOST,
        measured(91.04, 88, 95, name="p99_ms"),
        State.PASS,
        "91 ms (88 to 95), at most 250 ms",
    ),
    "above the ceiling": (
        AT_MOST,
        measured(1234, 900, 1500, name="p99_ms"),
        State.FAIL,
        "1,234 ms (900 to 1,500), at most 250 ms",
    ),
    "quoted from memory": (
        {"from_memory": True},
        measured(152, 147, 156),
        State.PASS,
        "152/s (147 to 156), at least 140/s; its condition was quoted from memory",
    ),
}


@pytest.mark.parametrize(("changes", "measurement", "state", "why"), JUDGEMENTS.values(), ids=JUDGEMENTS)
def test_median_decides_and_the_reason_shows_the_spread(
    changes: dict[str, Any], measurement: Measurement, state: State, why: str
) -> None:
    """The median is judged, and the sentence says it, the rounds about it, and what was asked for."""
    verdict = verdict_of(target(**changes), measurement)
    assert (verdict.state, verdict.why, verdict.value) == (state, why, measurement.spread.median)
    assert verdict.ratio == pytest.approx(measurement.spread.median / verdict.figure)


def test_goal_differs_from_the_floor() -> None:
    """What passes the floor says whether it reaches the goal; without a goal it says nothing of one."""
    assert verdict_of(target(goal=150), measured(152, 147, 156)).meets_goal is True
    assert verdict_of(target(goal=200), measured(152, 147, 156)).meets_goal is False
    assert verdict_of(target(), measured(152, 147, 156)).meets_goal is None


APART: dict[str, tuple[dict[str, Any], Circumstances, str]] = {
    "another GPU": (
        {"hardware": Hardware("V100")},
        HERE,
        "speaks of a V100, not AMD EPYC, 2 cores: 1.43 of its 140/s, 200/s (190 to 210)",
    ),
    "a GPU of a similar name": (
        {"hardware": Hardware("P4")},
        msgspec.structs.replace(HERE, server_hardware="Tesla P40, 8 cores"),
        "speaks of a P4, not Tesla P40, 8 cores: 1.43 of its 140/s, 200/s (190 to 210)",
    ),
    "two cards for one": (
        {"hardware": Hardware("V100")},
        msgspec.structs.replace(HERE, server_hardware="2 x V100"),
        "speaks of a V100, not 2 x V100: 1.43 of its 140/s, 200/s (190 to 210)",
    ),
    "fewer cores": (
        {"hardware": Hardware("H200", 16)},
        msgspec.structs.replace(HERE, server_hardware="H200, 64 cores"),
        "speaks of an H200 with 16 cores, not H200, 64 cores: 1.43 of its 140/s, 200/s (190 to 210)",
    ),
    "a remote server without a description": (
        {"hardware": Hardware("V100")},
        msgspec.structs.replace(HERE, machine=V100, is_local=False),
        "speaks of a V100; what the server runs on is not known: say so with --hardware: "
        "1.43 of its 140/s, 200/s (190 to 210)",
    ),
    "another model": (
        {"models": ("resnet50*", "identity*")},
        HERE,
        "speaks of resnet50* or identity*, this run asked street: 1.43 of its 140/s, 200/s (190 to 210)",
    ),
    "one other model among several": (
        {"models": ("street*",)},
        msgspec.structs.replace(HERE, models=("street", "people")),
        "speaks of street*, this run asked people: 1.43 of its 140/s, 200/s (190 to 210)",
    ),
    "another SLO": (
        {"slo_p99_ms": 15},
        HERE,
        "speaks of an SLO of 15 ms: --slo-p99-ms 15: 1.43 of its 140/s, 200/s (190 to 210)",
    ),
    "a quotation": (
        {"comparison": Comparison.QUOTED},
        HERE,
        "quoted from us, never judged: 1.43 of its 140/s, 200/s (190 to 210)",
    ),
}


@pytest.mark.parametrize(("changes", "circumstances", "why"), APART.values(), ids=APART)
def test_what_speaks_of_something_else_is_compared_and_not_judged(
    changes: dict[str, Any], circumstances: Circumstances, why: str
) -> None:
    """Another card, model or SLO: the ratio is shown, the difference named, and nothing passed although it is more."""
    verdict = verdict_of(target(**changes), measured(200, 190, 210), circumstances)
    assert (verdict.state, verdict.why, verdict.meets_goal) == (State.NOT_COMPARABLE, why, None)
    assert verdict.ratio == pytest.approx(200 / 140)


@pytest.mark.parametrize(
    "circumstances",
    [
        msgspec.structs.replace(HERE, machine=V100),
        msgspec.structs.replace(HERE, is_local=False, server_hardware="1 × V100-SXM2-16GB, 8 cores"),
        msgspec.structs.replace(HERE, machine=H200, server_hardware="V100"),
    ],
    ids=["found", "declared of a remote server", "declared against what was found"],
)
def test_same_hardware_is_judged(circumstances: Circumstances) -> None:
    """On the card that a row speaks of it is judged; what a person declares counts before what was found."""
    assert verdict_of(target(hardware=Hardware("V100")), measured(200, 190, 210), circumstances).state is State.PASS


@pytest.mark.parametrize("machine", [LAPTOP, H200], ids=["no GPU", "H200"])
def test_no_figure_of_another_card_is_ever_passed(machine: Machine) -> None:
    """Whatever is measured: of the shipped rows none that speaks of another card passes or fails."""
    rows = [row for row in read_targets() if row.hardware.gpu and row.hardware.gpu not in "".join(machine.gpus)]
    assert len(rows) > 20
    measurements = [measured(1e9, 1e9, 1e9, name=name) for name in UNITS]
    for slo_p99_ms in (7, 15, 50):
        there = Circumstances(machine=machine, models=("resnet50",), slo_p99_ms=slo_p99_ms)
        assert {verdict.state for verdict in judge(rows, measurements, there)} == {State.NOT_COMPARABLE}


def test_knee_on_the_card_and_under_the_slo_of_2017_is_judged() -> None:
    """The headline of 2017 can be met: by ResNet-50, on a V100, under 7 ms."""
    (row,) = (row for row in read_targets() if row.id == "resnet50-v100-tensorrt")
    there = Circumstances(machine=V100, models=("resnet50",), slo_p99_ms=7)
    (verdict,) = judge([row], [knee_measurement([5800.0, 5900.0, 5850.0])], there)
    assert verdict.state is State.PASS
    assert verdict.why.startswith("5,850 images/s (5,800 to 5,900), at least 5,707 images/s")


WAYS = {
    "rate_ratio": "give --beside URL of the Triton behind",
    "knee_per_s": "run penstock load knee",
    "cpu_ms_per_ok": "run it on the server's own machine",
    "load_ms": "run penstock load run cold-start",
    "refusal_p99_ms": "nothing was refused",
    "p99_ms": "no answer came",
}


@pytest.mark.parametrize(("name", "way"), WAYS.items())
def test_what_was_not_measured_says_what_would_measure_it(name: str, way: str) -> None:
    """A row without a figure is not measured, and its sentence says what to do."""
    verdict = verdict_of(target(measure=name), None)
    assert (verdict.state, verdict.value, verdict.ratio) == (State.NOT_MEASURED, None, None)
    assert way in verdict.why


def test_what_other_programs_measure_names_them() -> None:
    """The batcher's replay and benches are sent to their programs; facts say that they are facts."""
    expected = {
        "batcher-replay": "comes with penstock plan",
        "bench peers": "run python -m loadtest.bench.peers",
        NOTHING_MEASURES_IT: "a fact, which no load test measures",
    }
    assert {name: way_out(target(scenarios=(name,))) for name in expected} == expected


@pytest.mark.parametrize(("median", "outcome"), [(152, "pass"), (99, "fail")])
def test_run_with_a_complaint_is_not_trusted_either_way(median: float, outcome: str) -> None:
    """A generator that was the bottleneck spares the server and looks late: neither a pass nor a fail stands."""
    complaint = "the generator reached 97 of 150 requests/s."
    verdict = verdict_of(
        target(goal=90), measured(median, 90, 160), msgspec.structs.replace(HERE, complaints=(complaint,))
    )
    assert (verdict.state, verdict.value, verdict.meets_goal) == (State.NOT_MEASURED, median, None)
    assert verdict.why.startswith(f"not to be trusted, {complaint[:-1]}; it says {median}/s")
    assert verdict.why.endswith(f": {outcome}")


EXITS: dict[str, tuple[tuple[State, ...], tuple[str, ...], int]] = {
    "one passed": ((State.PASS,), (), 0),
    "passed, and rows of other hardware": ((State.PASS, State.NOT_COMPARABLE, State.NOT_MEASURED), (), 0),
    "one failed": ((State.PASS, State.FAIL), (), 1),
    "passed with a complaint": ((State.PASS,), ("the generator was too slow",), 1),
    "nothing to compare with": ((State.NOT_COMPARABLE,), (), 1),
    "nothing measured": ((State.NOT_MEASURED,), (), 1),
    "no target": ((), (), 1),
}


@pytest.mark.parametrize(("states", "complaints", "code"), EXITS.values(), ids=EXITS)
def test_exit_code_is_0_only_where_something_passed_and_nothing_failed(
    states: tuple[State, ...], complaints: tuple[str, ...], code: int
) -> None:
    """A failed row, a complaint, or nothing that was judged: 1."""
    verdicts = [msgspec.structs.replace(verdict_of(target(), None), state=state) for state in states]
    assert exit_code(verdicts, complaints) == code


@pytest.mark.parametrize(("min_rate_per_s", "code"), [(50.0, 0), (5000.0, 1)], ids=["below", "above"])
def test_run_against_a_target_below_and_above_what_it_reached(min_rate_per_s: float, code: int) -> None:
    """The exit code is 0 for a target below what a run of 100/s reached, 1 for one above it."""
    scenario = read_scenario("image-steady")
    run = make_run()
    documented = scenario_targets(read_targets(), scenario.name)
    rows = (*documented, *slo_targets(scenario, documented=documented, min_rate_per_s=min_rate_per_s))
    verdicts = judge(rows, measure(run.phases), HERE)
    assert exit_code(verdicts, run.complaints) == code
    assert {verdict.target_id: verdict.state for verdict in verdicts} == {
        "clean": State.PASS,
        "h200-jpeg": State.NOT_COMPARABLE,
        "slo": State.PASS,
        "min-rate": State.FAIL if code else State.PASS,
    }
