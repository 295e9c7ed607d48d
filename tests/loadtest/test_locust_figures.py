"""What is made of locust's statistics, its options and its command line, without locust."""

import io
from argparse import ArgumentParser
from dataclasses import dataclass, field

import pytest
from rich.console import Console

from penstock_load.results import State, Verdict
from penstock_load.scenario import Arrivals, Kind, Phase, RequestSpec, Scenario, ScenarioError, Shape
from penstock_load.users.figures import ProcessReport, bucket, judged_entries, measurements, shortfall, show
from penstock_load.users.options import Options, add_arguments, locust_arguments, read_options

SCENARIO = Scenario(
    name="mine",
    about="",
    requests=(RequestSpec(kind=Kind.IMAGE, model="street"), RequestSpec(kind=Kind.GRPC, model="m")),
    phases=(
        Phase(name="ladder", seconds=5, arrivals=Arrivals(shape=Shape.CONSTANT, rate=9)),
        Phase(name="steady", seconds=5, arrivals=Arrivals(shape=Shape.CONSTANT, rate=9), is_judged=True),
    ),
)


@dataclass
class Row:
    """As much of a row of locust's statistics as is read."""

    name: str = "image street"
    num_requests: int = 0
    num_failures: int = 0
    response_times: dict[float, int] = field(default_factory=dict)


def figures(*rows: Row, seconds: float = 10.0) -> dict[str, float]:
    return {one.measure: one.spread.median for one in measurements(rows, seconds, slo_p99_ms=100)}


def test_far_fewer_requests_than_planned_are_a_complaint() -> None:
    """Only judged phases count, and a Poisson plan may miss its mean by chance."""
    planned = {"ladder": 400.0, "steady": 1000.0}
    assert (shortfall(SCENARIO, planned, 1000), shortfall(SCENARIO, planned, 860)) == ([], [])
    (complaint,) = shortfall(SCENARIO, planned, 850)
    assert complaint.startswith("850 requests were sent of 1000 that mine plans")


def test_latencies_keep_three_digits() -> None:
    """A target of 104 ms is not met by 105."""
    assert [bucket(took_ms) for took_ms in (0.12345, 7.891, 104.9, 1234.0)] == [0.123, 7.89, 105, 1230]


def test_figures_are_by_nearest_rank_over_all_rows() -> None:
    """100 latencies in two rows: the 50th, the 95th, the 99th; refusals, which have none, count as errors only."""
    low = Row(num_requests=50, response_times={float(ms): 1 for ms in range(1, 51)})
    high = Row(num_requests=60, num_failures=10, response_times={float(ms): 1 for ms in range(51, 101)})
    found = figures(low, high)
    assert (found["p50_ms"], found["p95_ms"], found["p99_ms"]) == (50, 95, 99)
    assert (found["ok_per_s"], found["error_share"]) == (10, pytest.approx(10 / 110))
    assert found["good_per_s"] == 10, "within the SLO of 100 ms"


def test_without_a_request_there_is_no_figure() -> None:
    """Nothing measured is not zero; refusals alone have no latency."""
    assert figures() == {}
    assert figures(Row(num_requests=5, num_failures=5)) == {"ok_per_s": 0, "good_per_s": 0, "error_share": 1}


def test_only_judged_phases_count() -> None:
    """Rows of other phases are shown by locust and not judged; without a scenario every row counts."""
    rows = [Row(name) for name in ("image street · ladder", "image street · steady", "grpc m · steady")]
    assert judged_entries(rows, SCENARIO) == rows[1:]
    assert judged_entries(rows, None) == rows


@pytest.mark.parametrize(
    ("cpu_share", "seconds", "is_bottleneck"), [(0.95, 60, True), (0.85, 60, False), (0.95, 2, False)]
)
def test_a_busy_generator_is_named(cpu_share: float, seconds: float, is_bottleneck: bool) -> None:
    """More than nine tenths of a core for five seconds or more: the figures are the generator's."""
    complaint = ProcessReport("worker-1", 1, 0, cpu_share, seconds).complaint
    assert bool(complaint) is is_bottleneck
    assert ("worker-1 used 95%" in complaint) is is_bottleneck


def row(state: State, value: float | None = 12.5) -> Verdict:
    return Verdict(
        target_id="slo",
        title="",
        state=state,
        measure="p99_ms",
        comparison="at_most",
        figure=100,
        unit="ms",
        why="[because]",
        value=value,
    )


@pytest.mark.parametrize(
    ("rows", "complaints", "last"),
    [
        ([row(State.PASS)], [], "PASS"),
        ([row(State.PASS), row(State.FAIL)], [], "FAIL"),
        ([row(State.NOT_MEASURED, None)], [], "FAIL"),
        ([], ["it does not add up"], "FAIL"),
        ([], [], ""),
    ],
    ids=["pass", "fail", "nothing measured", "not to be trusted", "nothing to judge"],
)
def test_the_table_ends_with_one_word(rows: list[Verdict], complaints: list[str], last: str) -> None:
    """Every row with its reason as it was written, every complaint, and then the outcome."""
    shown = io.StringIO()
    show(rows, complaints, Console(file=shown, width=200))
    text = shown.getvalue()
    assert text.split()[-1:] == ([last] if last else [])
    assert text.count("[because]") == len(rows)
    assert all(complaint in text for complaint in complaints)


def parsed(*arguments: str) -> Options:
    parser = ArgumentParser()
    add_arguments(parser)
    return read_options(parser.parse_args(arguments))


def test_options_that_were_not_given_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """The page sends empty texts for them, and so does the command line; the key may come from a variable."""
    monkeypatch.setenv("PENSTOCK_API_KEY", "")  # as Compose sets it
    assert parsed() == Options()
    monkeypatch.setenv("PENSTOCK_API_KEY", "secret")
    assert parsed().endpoint("http://h:1").headers == (("x-api-key", "secret"),)
    monkeypatch.delenv("PENSTOCK_API_KEY")
    assert parsed("--scenario", "/a/file.toml").scenario == "/a/file.toml"
    assert parsed("--slo-p99-ms", "15", "--max-error-share", "0", "--capacity", "80.5") == Options(
        slo_p99_ms=15, max_error_share=0, capacity=80.5
    )


@pytest.mark.parametrize("value", ["fast", "-1", "inf", "nan", "0"])
def test_a_capacity_that_is_none_is_refused(value: str) -> None:
    """The page takes any text."""
    with pytest.raises(ScenarioError, match=f"--capacity {value}"):
        parsed(f"--capacity={value}")


def test_the_grpc_address_is_one_port_above_unless_said() -> None:
    """As the gateway's own ports are."""
    assert Options().endpoint("http://10.0.0.7:8000/").grpc_address == "10.0.0.7:8001"
    assert Options(grpc="h:9").endpoint("http://10.0.0.7:8000").grpc_address == "h:9"


def test_the_command_opens_nothing_to_other_machines() -> None:
    """Page and workers' port are on the loopback; without a head there is no page."""
    with_page = locust_arguments("image-steady", workers=2)
    assert with_page[with_page.index("--web-host") + 1] == "127.0.0.1"
    assert with_page[with_page.index("--master-bind-host") + 1] == "127.0.0.1"
    assert "--headless" not in with_page
    headless = locust_arguments("soak", target="http://h:1", capacity_per_s=80, headless=True)
    assert headless[2:] == ["--host", "http://h:1", "--scenario", "soak", "--capacity", "80", *headless[-2:]]
    assert headless[-2:] == ["--headless", "--only-summary"]


@pytest.mark.parametrize("wrong", [{"workers": -1}, {"web_port": 0}, {"capacity_per_s": 0.0}])
def test_the_command_refuses_numbers_that_cannot_be(wrong: dict[str, int]) -> None:
    """Before locust starts."""
    with pytest.raises(ValueError, match="--"):
        locust_arguments("soak", **wrong)
