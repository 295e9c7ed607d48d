"""`penstock load`: wrong words are one sentence, lists are for people and programs, foreign servers can be asked."""

import json
import socket
from pathlib import Path

import msgspec
import pytest

from penstock_load.cli import commands as load
from penstock_load.cli.options import beside_or_fail, command_line
from penstock_load.measure.run_folder import read_run_folder, write_run
from tests.cli.conftest import Call, StandIn
from tests.loadtest.runs import make_run

QUICK = """
name = "quick"
about = "one second"
slo_p99_ms = 5000
[[request]]
kind = "image"
model = "m"
picture_px = [64, 48]
[[phase]]
name = "steady"
seconds = 1
arrivals = { shape = "constant", rate = 20 }
is_judged = true
"""


@pytest.fixture(autouse=True)
def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a command leaves, it leaves here."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "quick.toml").write_text(QUICK)


WRONG_WORDS = {
    "run image-stedy": "did you mean image-steady",
    "run quick.toml --target localhost:8000": "an address such as http://127.0.0.1:8000",
    "run quick.toml --target http://127.0.0.1:999999": "an address such as",
    "run quick.toml --beside nowhere": "--beside nowhere",
    "run quick.toml --beside-header-file quick.toml": "--beside-header-file goes with --beside URL",
    "run quick.toml --beside http://h --beside-header-file quick.toml": "quick.toml:2: not a header",
    "run quick.toml --grpc here": "--grpc here",
    "run quick.toml --header secret": "'NAME: VALUE' is needed",
    "run quick.toml --header x:a\x01b": "printable ASCII",
    "run quick.toml --header x:ä": "printable ASCII",
    "run quick.toml --model a\udcff": "a name is printable text",
    "run quick.toml --min-rate 0": "--min-rate 0",
    "run quick.toml --duration -1": "--duration -1",
    "run quick.toml --slo-p99-ms nan": "--slo-p99-ms nan",
    "run cold-start --duration 5": "counts reloads",
    "run quick.toml --replay quick.toml": "quick.toml:2: 'name = \"quick\"' is neither a record nor a time",
    "run overload --targets quick.toml": "quick.toml",
    "knee quick.toml --precision 0": "--precision 0",
    "knee quick.toml --start inf": "--start inf",
    "targets steady": "no target applies to 'steady'",
    "locust image-stedy": "did you mean image-steady",
}


@pytest.mark.parametrize(("words", "sentence"), WRONG_WORDS.items())
def test_wrong_words_are_one_sentence_and_leave_nothing(
    penstock: Call, tmp_path: Path, words: str, sentence: str
) -> None:
    """Exit code 2, what was wrong, and no folder of a run that never began."""
    answer = penstock("load", *words.split())
    assert answer.exit_code == 2, answer.output
    assert sentence in answer.stderr
    assert answer.stderr.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["quick.toml"]


def test_target_where_nothing_listens_is_one_sentence(penstock: Call, tmp_path: Path) -> None:
    """Exit code 1, the address, and no empty folder."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
        answer = penstock("load", "run", "quick.toml", "--target", url)
    assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)
    assert url in answer.stderr
    assert not list(tmp_path.glob("load-results/*"))


def test_program_reads_one_object_where_there_is_no_verdict(penstock: Call) -> None:
    """With --json a run that cannot begin is an object with its error, too."""
    answer = penstock("load", "run", "quick.toml", "--target", "http://127.0.0.1:1", "--json")
    said = json.loads(answer.stdout)
    assert (answer.exit_code, said["exit_code"]) == (1, 1)
    assert said["error"].startswith("nothing answers at http://127.0.0.1:1")


def test_report_of_impossible_figures_is_one_sentence(penstock: Call, tmp_path: Path) -> None:
    """run.json is JSON of the right form, and what it says cannot be drawn."""
    run = make_run()
    phases = [msgspec.structs.replace(phase, timeline=()) for phase in run.phases]
    latency = msgspec.structs.replace(phases[-1].all.latency, p99=float("nan"))
    phases[-1] = msgspec.structs.replace(
        phases[-1], all=msgspec.structs.replace(phases[-1].all, latency=latency, histogram=((-1.0, 2),))
    )
    write_run(tmp_path / "monday", msgspec.structs.replace(run, phases=tuple(phases)))
    answer = penstock("load", "report", "monday")
    assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)
    assert "figures that no run has" in answer.stderr


def test_foreign_picture_endpoint_can_be_judged(penstock: Call, stand_in: StandIn, tmp_path: Path) -> None:
    """A server that knows nothing of v2, at a path of its own, with a header that it wants; the report hides that."""
    where = ["--target", stand_in.url, "--image-path", "/v1/predict/it/image", "--header", "x-key: secret"]
    stand_in.refusals["/v2"] = (404, "{}", {})
    answer = penstock("load", "run", "quick.toml", *where, "--out", "out", "--quiet")
    assert answer.exit_code == 0, answer.output
    assert "PASS" in answer.stdout
    posted = [asked for asked in stand_in.asked if asked.path == "/v1/predict/it/image"]
    assert len(posted) >= 20
    assert {asked.headers["x-key"] for asked in posted} == {"secret"}
    run = read_run_folder(tmp_path / "out").run
    assert run.phases[0].all.ok == 20
    assert all(b"secret" not in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_password_in_an_address_is_sent_and_never_printed(
    penstock: Call, stand_in: StandIn, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """user:password@ goes as a header; neither the report nor what is printed has it."""
    stand_in.refusals["/v2"] = (404, "{}", {})
    words = ["load", "run", "quick.toml", "--target", stand_in.url.replace("//", "//me:hush%21@"), "--out", "out"]
    monkeypatch.setattr("sys.argv", ["penstock", *words])
    answer = penstock(*words, "--image-path", "/v1/predict/it/image")
    assert answer.exit_code == 0, answer.output
    posted = [asked for asked in stand_in.asked if asked.path == "/v1/predict/it/image"]
    assert {asked.headers["authorization"] for asked in posted} == {"Basic bWU6aHVzaCE="}
    assert "hush" not in answer.output
    assert all(b"hush" not in path.read_bytes() for path in (tmp_path / "out").iterdir())


def test_name_of_a_scenario_leads_nowhere_else(penstock: Call, stand_in: StandIn, tmp_path: Path) -> None:
    """It is a text of the scenario's file, and the folder of its run lies beside the others all the same."""
    (tmp_path / "mine.toml").write_text(QUICK.replace('"quick"', '"a/../../b c"'))
    penstock("load", "run", "mine.toml", "--target", stand_in.url, "--image-path", "/v1/predict/it/image", "--quiet")
    (folder,) = (tmp_path / "load-results").iterdir()
    assert folder.name.startswith("a-..-..-b-c-")
    assert (folder / "run.json").is_file()


def test_run_does_not_write_over_another(penstock: Call, tmp_path: Path) -> None:
    """Exit code 2 where --out holds a run, which stays as it was."""
    path = write_run(tmp_path / "monday", make_run())
    before = path.read_bytes()
    answer = penstock("load", "run", "quick.toml", "--out", "monday")
    assert (answer.exit_code, answer.stderr.count("\n")) == (2, 1)
    assert "monday holds another run" in answer.stderr
    assert path.read_bytes() == before


def test_header_file_of_the_server_beside_goes_to_that_server_alone(tmp_path: Path) -> None:
    """Its secret is not sent to the target, overrides --header, and has Triton's prefix for gRPC."""
    file = tmp_path / "headers"
    file.write_text("engine-key: secret\n")
    beside = beside_or_fail("http://127.0.0.1:9000", ["Engine-Key: other", "x: 1"], file)
    assert beside is not None
    assert beside.headers == (("x", "1"), ("engine-key", "secret"), ("triton-grpc-protocol-engine-key", "secret"))
    assert beside_or_fail("", ["x: 1"], None) is None


def test_command_line_of_the_report_tells_no_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """A header's value is left out however it was given, and so is who asks."""
    words = ["penstock", "load", "run", "--header", "authorization: Bearer s3", "--header=x-key: s3", "--seed", "1"]
    monkeypatch.setattr("sys.argv", [*words, "--target=http://me:s3@there:8000", "--metrics", "http://s3@there/m"])
    assert "s3" not in command_line()
    assert "--seed 1" in command_line()


def test_scenarios_are_listed_for_people_and_programs(penstock: Call) -> None:
    """Nine of them, each with what it asks."""
    rows = json.loads(penstock("load", "scenarios", "--json").stdout)
    table = penstock("load", "scenarios").stdout
    assert len(rows) == 10
    assert all(row["name"] in table for row in rows)


def test_targets_are_listed_for_people_and_programs(penstock: Call) -> None:
    """Every documented figure with where it stands; a scenario's alone where one is named."""
    rows = json.loads(penstock("load", "targets", "--json").stdout)
    overload = json.loads(penstock("load", "targets", "overload", "--json").stdout)
    assert len(rows) > 80
    assert 0 < len(overload) < 10
    assert all("overload" in row["target"]["scenarios"] for row in overload)
    assert "deepstream" in penstock("load", "targets").stdout.lower()


def test_targets_of_ones_own_scenario_are_listed(penstock: Call, tmp_path: Path) -> None:
    """By the scenario's file or its name; without either a strange name is a slip."""
    target = 'id = "mine"\nscenario = "quick"\nmeasure = "p99_ms"\ncomparison = "at_most"\nfigure = 60\n'
    (tmp_path / "targets.toml").write_text(f"[[target]]\n{target}")
    for words in (["quick.toml"], ["quick"]):
        rows = json.loads(penstock("load", "targets", *words, "--targets", "targets.toml", "--json").stdout)
        assert [row["target"]["id"] for row in rows] == ["mine"]
    refused = penstock("load", "targets", "--targets", "targets.toml")
    assert (refused.exit_code, "unknown scenario 'quick'" in refused.stderr) == (1, True)


def test_comparison_of_two_committed_runs_says_what_differs(penstock: Call, tmp_path: Path) -> None:
    """Two run.json without records: medians side by side, and that no interval can be drawn."""
    for name, seed in (("a", 1), ("b", 2)):
        write_run(tmp_path / name, make_run(seed=seed))
    answer = penstock("load", "compare", "a", "b")
    assert answer.exit_code == 0, answer.output
    assert "p99_ms" in answer.stdout
    answer = penstock("load", "compare", "a", "quick.toml")
    assert (answer.exit_code, answer.stderr.count("\n")) == (1, 1)


def test_locust_is_started_with_the_scenario_on_the_loopback(penstock: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process becomes locust, whose web page is this machine's alone, and what follows -- is locust's."""
    became: list[list[str]] = []
    monkeypatch.setattr(load.os, "execv", lambda program, words: became.append(words))
    assert penstock("load", "locust", "image-steady", "--capacity", "50", "--", "--run-time", "5s").exit_code == 0
    (words,) = became
    assert words[1:4] == ["-P", "-m", "locust"]
    assert words[words.index("--web-host") + 1] == "127.0.0.1"
    assert words[words.index("--scenario") + 1] == "image-steady"
    assert words[-2:] == ["--run-time", "5s"]
