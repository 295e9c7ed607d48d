"""The runs in a folder of results: a summary of each, and which run came before another."""

import heapq
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec

from penstock_load.measure.run_folder import RUN_FILE, RunFolder, RunFolderError, read_run_folder
from penstock_load.results import Run, State

SUMMARY_FILE = "summary.json"
MAX_RUNS = 500  # of a folder, the newest
MAX_COMPARED_BYTES = 64 << 20  # of records.jsonl; larger ones are compared by their rounds


class RunSummary(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One run in a line: summary.json beside run.json. outcome: pass, fail or none. machine: the server's if known.

    note: what else decided the figures. is_invalid: the figures cannot be trusted, as the headline says.
    Latencies in ms, rates per second, medians over the rounds; None if not measured.
    """

    name: str
    scenario: str
    began_at: str
    target_url: str
    server: str
    commit: str
    version: str
    machine: str
    models: tuple[str, ...]
    slo_p99_ms: float
    rounds: int
    outcome: str
    headline: str
    note: str = ""
    is_invalid: bool = False
    offered_per_s: float | None = None
    ok_per_s: float | None = None
    p50_ms: float | None = None
    p99_ms: float | None = None
    error_share: float | None = None
    capacity_per_s: float | None = None
    knee_per_s: float | None = None
    load_ms: float | None = None
    streams_held: float | None = None


_MEASURES = (
    *("offered_per_s", "ok_per_s", "p50_ms", "p99_ms", "error_share", "capacity_per_s", "knee_per_s", "load_ms"),
    "streams_held",
)


def summary_of(run: Run, name: str, headline: str, note: str = "") -> RunSummary:
    """The run in a line. name: of its folder."""
    states = {verdict.state for verdict in run.verdicts}
    is_failed = bool(run.complaints) or State.FAIL in states
    figures = {one.measure: one.spread.median for one in run.measurements if one.measure in _MEASURES}
    hardware = run.server_hardware or (_machine(run) if run.is_local else "unknown")
    return RunSummary(
        name=name,
        scenario=run.scenario,
        began_at=run.began_at,
        target_url=run.target_url,
        server=run.server,
        commit=run.commit,
        version=dict(run.machine.versions).get("penstock", ""),
        machine=hardware,
        models=run.models,
        slo_p99_ms=run.slo_p99_ms,
        rounds=run.rounds,
        outcome="fail" if is_failed else "pass" if State.PASS in states else "none",
        headline=headline,
        note=note,
        is_invalid=bool(run.complaints),
        **figures,
    )


def write_summary(folder: Path, summary: RunSummary) -> None:
    """Writes summary.json. Raises OSError."""
    unfinished = folder / f"{SUMMARY_FILE}.part"
    unfinished.write_bytes(msgspec.json.encode(summary) + b"\n")
    os.replace(unfinished, folder / SUMMARY_FILE)


def run_folders(results: Path) -> list[Path]:
    """The folders below that hold a run, the newest first, at most MAX_RUNS. Raises OSError."""
    found = [(path.stat().st_mtime_ns, path.parent) for path in results.glob(f"*/{RUN_FILE}")]
    return [folder for _, folder in heapq.nlargest(MAX_RUNS, found)]


def read_history(results: Path, headline: Callable[[Run], str], scenario: str = "") -> list[RunSummary]:
    """The runs in the folder, the newest first; of one scenario, if given. Raises OSError.

    headline: makes the sentence of a run without summary.json. Folders without a readable run are passed over.
    """
    found = [summary for folder in run_folders(results) if (summary := _summary_in(folder, headline)) is not None]
    wanted = [summary for summary in found if summary.scenario == scenario or not scenario]
    return sorted(wanted, key=lambda summary: summary.began_at, reverse=True)


def _summary_in(folder: Path, headline: Callable[[Run], str]) -> RunSummary | None:
    try:
        summary = msgspec.json.decode((folder / SUMMARY_FILE).read_bytes(), type=RunSummary)
        return msgspec.structs.replace(summary, name=folder.name)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        pass
    try:
        run = read_run_folder(folder).run
        return summary_of(run, folder.name, headline(run))
    except (RunFolderError, ArithmeticError, ValueError):
        return None


def last_run(folder: Path, run: Run) -> RunFolder | None:
    """The newest earlier run beside the folder: same scenario, models and machine, no complaints; None without one.

    Folders that hold no readable run are passed over. Of large records only the rounds' medians are used.
    """
    earlier = [
        found
        for found in _runs(folder.parent)
        if found.run.began_at < run.began_at and not found.run.complaints and _likeness(found.run) == _likeness(run)
    ]
    if not earlier:
        return None
    last = max(earlier, key=lambda found: found.run.began_at)
    is_large = last.records_path is not None and last.records_path.stat().st_size > MAX_COMPARED_BYTES
    return RunFolder(last.name, last.run, None) if is_large else last


def _runs(results: Path) -> Iterator[RunFolder]:
    for folder in run_folders(results):
        try:
            yield read_run_folder(folder)
        except RunFolderError:
            continue


def _machine(run: Run) -> str:
    return ", ".join([*run.machine.gpus, run.machine.cpu, f"{run.machine.cores} cores"])


def _likeness(run: Run) -> tuple[object, ...]:
    """Properties that must be equal for runs to be comparable."""
    return run.scenario, sorted(run.models), run.is_local, run.server_hardware, _machine(run)
