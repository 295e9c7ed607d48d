"""Load tests that the gateway starts: which, against whom, with which key, and how they end."""

import asyncio
import json
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.audit import AuditLog
from penstock.gateway.load import folders
from penstock.gateway.load.child import LoadLimits
from penstock.gateway.load.folders import LoadFolders, new_id, utc_now
from penstock.gateway.load.service import LoadOptions, LoadTests, OwnAddress
from penstock.protocol.errors import Conflict, InvalidRequest, LoadRunNotFound, NotSupported
from penstock.protocol.identity import Identity
from penstock.protocol.load_reports import LoadRun, LoadRunRequest

STAND_IN = Path(__file__).parents[1] / "support" / "load_stand_in.py"
OWN = OwnAddress("http://127.0.0.1:8000", "127.0.0.1:8001", "http://127.0.0.1:8002/metrics")
OTHER = "http://gpu-7:8000"
ADMIN = Identity("boss", address="10.0.0.1")


@pytest.fixture
async def tests(tmp_path: Path) -> AsyncIterator[LoadTests]:
    """Load tests with the stand-in; what still runs is stopped."""
    options = LoadOptions(
        tmp_path, OWN, (OTHER,), (sys.executable, str(STAND_IN)), LoadLimits(stop_s=0.3, memory_bytes=1 << 30)
    )
    audit = AuditLog(tmp_path / "audit.log")
    made = LoadTests(options, audit=audit)
    yield made
    await made.aclose()
    audit.close()


def audited(home: Path) -> list[tuple[str, str, str]]:
    lines = [json.loads(line) for line in (home / "audit.log").read_text().splitlines()]
    return [(line["action"], line["target"], line["outcome"]) for line in lines]


def seen(home: Path, run: LoadRun) -> Any:
    """The words and the environment of the run's process."""
    return json.loads((home / "load-runs" / run.id / "seen.json").read_text())


async def until(is_so: Callable[[], Awaitable[bool]]) -> None:
    """Returns when it is so."""
    async with asyncio.timeout(20):
        while not await is_so():
            await asyncio.sleep(0.01)


async def ended(tests: LoadTests, run: LoadRun) -> LoadRun:
    """The run after its end."""

    async def is_ended() -> bool:
        return (await tests.run(run.id, 0)).run.state != "running"

    await until(is_ended)
    return (await tests.run(run.id, 0)).run


async def waiting(tests: LoadTests, model: str) -> LoadRun:
    """A run that runs until it is stopped, and waits for that."""
    run = await tests.start(LoadRunRequest(scenario="steady", model=model), ADMIN, "")

    async def has_progress() -> bool:
        return bool((await tests.run(run.id, 0)).progress)

    await until(has_progress)
    return run


async def test_run_ends_with_its_figures_and_its_report(tests: LoadTests, tmp_path: Path) -> None:
    """The state, the figures, the report and the result of a run are there when it has ended."""
    started = await tests.start(LoadRunRequest(scenario="steady", model="quick", duration_s=5), ADMIN, "")
    assert (started.state, started.client) == ("running", "boss")
    run = await ended(tests, started)
    assert run.figures is not None
    assert (run.state, run.figures.p99_ms, run.has_report, run.error) == ("passed", 12.5, True, "")
    assert (await tests.report(run.id)).startswith(b"<!doctype html>")
    assert await tests.result(run.id) == b'{"format": 1}'
    assert [one.id for one in (await tests.runs()).runs] == [run.id]
    words = seen(tmp_path, run)["words"]
    assert words[3:6] == ["run", "steady", "--target=http://127.0.0.1:8000"]
    assert {"--grpc=127.0.0.1:8001", f"--server-pid={os.getpid()}", "--duration=5", "--json"} <= set(words)


async def test_key_is_in_the_environment_and_no_other_secret(
    tests: LoadTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`ps` does not show the key, and the process gets no variable that may hold another one."""
    monkeypatch.setenv("PENSTOCK_API_KEYS", "a:admin:pk-other")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "pk-other")
    run = await tests.start(LoadRunRequest(scenario="steady"), ADMIN, "pk-of-the-caller")
    await ended(tests, run)
    found = seen(tmp_path, run)
    assert found["environment"]["PENSTOCK_API_KEY"] == "pk-of-the-caller"
    assert "pk-of-the-caller" not in " ".join(found["words"])
    assert "pk-other" not in json.dumps(found)
    assert "pk-of" not in (tmp_path / "load-runs" / run.id / "request.json").read_text()


@pytest.mark.parametrize(("given", "sent"), [("", None), ("pk-for-gpu-7", "pk-for-gpu-7")])
async def test_other_target_never_gets_the_callers_key(
    tests: LoadTests, tmp_path: Path, given: str, sent: str | None
) -> None:
    """The key of this gateway is not sent to another server; the run can bring one for it."""
    request = LoadRunRequest(scenario="steady", target=f"{OTHER}/", api_key=given)
    run = await tests.start(request, ADMIN, "pk-of-the-caller")
    await ended(tests, run)
    found = seen(tmp_path, run)
    assert found["environment"].get("PENSTOCK_API_KEY") == sent
    assert f"--target={OTHER}" in found["words"]
    assert not any(word.startswith(("--grpc", "--server-pid")) for word in found["words"])


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (LoadRunRequest(scenario="steady", target="http://169.254.169.254"), "not allowed"),
        (LoadRunRequest(scenario="steady", target=f"{OTHER}:80@10.0.0.9"), "not allowed"),
        (LoadRunRequest(scenario="video-streams"), "no scenario"),
        (LoadRunRequest(scenario="../../etc/passwd"), "no scenario"),
        (LoadRunRequest(scenario="steady", model="a\nb"), "control characters"),
    ],
)
async def test_what_is_not_allowed_starts_nothing(
    tests: LoadTests, tmp_path: Path, request_: LoadRunRequest, reason: str
) -> None:
    """Only scenarios that ship, only allowed targets; a refused run is in the audit log."""
    with pytest.raises(InvalidRequest, match=reason):
        await tests.start(request_, ADMIN, "")
    assert (await tests.runs()).runs == ()
    assert [row[0::2] for row in audited(tmp_path)] == [("load_test", "invalid")]


async def test_one_run_at_a_time(tests: LoadTests, tmp_path: Path) -> None:
    """A second run is refused while one runs, and both are in the audit log with the client's name."""
    run = await waiting(tests, "waits")
    with pytest.raises(Conflict, match=run.id):
        await tests.start(LoadRunRequest(scenario="steady"), ADMIN, "")
    assert (await tests.runs()).running == run.id
    assert audited(tmp_path) == [
        ("load_test", f"steady {OWN.url}", "ok"),
        ("load_test", f"steady {OWN.url}", "conflict"),
    ]


async def test_progress_is_read_from_where_the_last_answer_ended(tests: LoadTests) -> None:
    """Each line is sent once, and a position within a line costs that line only."""
    run = await waiting(tests, "waits")
    first = await tests.run(run.id, 0)
    assert [(one.at_s, one.p99_ms, one.text) for one in first.progress] == [(1.0, 9.0, ""), (2.0, None, "note")]
    assert (await tests.run(run.id, first.next)).progress == ()
    assert [one.at_s for one in (await tests.run(run.id, 5)).progress] == [2.0]


async def test_stopped_run_keeps_what_it_measured(tests: LoadTests, tmp_path: Path) -> None:
    """A stop lets the process write its report; the run counts as stopped, and another one may start."""
    run = await waiting(tests, "waits")
    stopped = await tests.stop(run.id, ADMIN)
    assert (stopped.state, stopped.has_report) == ("stopped", True)
    assert ("load_test", f"stop {run.id}", "ok") in audited(tmp_path)
    await ended(tests, await tests.start(LoadRunRequest(scenario="steady"), ADMIN, ""))
    with pytest.raises(InvalidRequest, match="is not running"):
        await tests.stop(run.id, ADMIN)


async def test_process_that_ignores_the_stop_is_killed(tests: LoadTests) -> None:
    """A hanging run does not stay."""
    run = await waiting(tests, "stubborn")
    assert (await tests.stop(run.id, ADMIN)).state == "stopped"


async def test_gateway_that_stops_takes_the_run_with_it(tests: LoadTests) -> None:
    """At the end of the gateway no run is left, and its state says so."""
    run = await waiting(tests, "waits")
    await tests.aclose()
    assert (await tests.runs()).running is None
    assert (await tests.run(run.id, 0)).run.state == "stopped"


async def test_run_without_a_result_says_why(tests: LoadTests) -> None:
    """The process's own sentence is the run's error."""
    run = await ended(tests, await tests.start(LoadRunRequest(scenario="steady", model="fails"), ADMIN, ""))
    assert (run.state, run.error, run.has_report) == ("error", "http://127.0.0.1:8000: nothing answers", False)


async def test_run_of_a_gateway_that_died_is_interrupted(tests: LoadTests, tmp_path: Path) -> None:
    """A run without an end that is not this gateway's is over."""
    run = LoadRun(
        id=new_id("steady", utc_now()), scenario="steady", target=OWN.url, state="running", started_at="2026-11-29"
    )
    LoadFolders(tmp_path).create(run)
    assert [(one.state, one.error) for one in (await tests.runs()).runs] == [
        ("interrupted", "the gateway ended meanwhile")
    ]


async def test_oldest_runs_are_removed(tests: LoadTests, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder holds so many runs and so many bytes; foreign folders in it are left alone."""
    names = [f"steady-2026112{day}-000000-abcdef" for day in (1, 2, 3)]
    for name in names:
        LoadFolders(tmp_path).create(
            LoadRun(id=name, scenario="steady", target=OWN.url, state="running", started_at=name)
        )
    (tmp_path / "load-runs" / "mine").mkdir()
    monkeypatch.setattr(folders, "MAX_RUNS", 3)
    run = await ended(tests, await tests.start(LoadRunRequest(scenario="steady"), ADMIN, ""))
    assert [one.id for one in (await tests.runs()).runs] == [names[2], names[1], run.id]
    monkeypatch.setattr(folders, "MAX_BYTES", 10)
    run = await ended(tests, await tests.start(LoadRunRequest(scenario="steady"), ADMIN, ""))
    assert [one.id for one in (await tests.runs()).runs] == [run.id]
    assert (tmp_path / "load-runs" / "mine").is_dir()


@pytest.mark.parametrize("run_id", ["..", "../x", "steady-20261129-000000-abcdef", "", "a" * 300, "x%2f"])
async def test_unknown_ids_are_not_found(tests: LoadTests, run_id: str) -> None:
    """An id is no path: nothing outside of the folder can be named."""
    for call in (tests.report(run_id), tests.result(run_id), tests.run(run_id, 0), tests.stop(run_id, ADMIN)):
        with pytest.raises(LoadRunNotFound):
            await call


async def test_two_runs_are_compared(tests: LoadTests) -> None:
    """By the load test's own comparison."""
    a, b = [await ended(tests, await tests.start(LoadRunRequest(scenario="steady"), ADMIN, "")) for _ in range(2)]
    assert (await tests.comparison(a.id, b.id)).warnings == ("the SLO differs",)


async def test_gateway_without_load_tests_says_how_to_install_them(tmp_path: Path) -> None:
    """The command's own sentence, with the install line."""
    sentence = "penstock: `penstock load` needs packages that are not installed here (locust); pip install"
    code = f"import sys; sys.exit({sentence!r})"
    missing = LoadTests(LoadOptions(tmp_path, OWN, command=(sys.executable, "-c", code)))
    with pytest.raises(NotSupported, match=r"^`penstock load` needs packages .* pip install$"):
        await missing.scenarios()
    with pytest.raises(NotSupported):
        await missing.start(LoadRunRequest(scenario="steady"), ADMIN, "")
