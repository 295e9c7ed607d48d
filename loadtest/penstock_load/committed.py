"""The results that are kept in version control, each with its verdicts: runs of scenarios, and what benches wrote."""

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from penstock_load.measure.run_folder import RUN_FILE, RunFolderError, read_run_folder
from penstock_load.results import Machine, Measurement, Spread, State, Verdict
from penstock_load.scenario import scenario_names
from penstock_load.targets import BENCH, UNITS, Target, scenario_targets
from penstock_load.verdict import Circumstances, circumstances_of, judge, way_out

FOLDER = Path(__file__).resolve().parents[1] / "results"  # of a checkout
JUDGED = (State.PASS, State.FAIL)


class ResultsError(ValueError):
    """A committed result that cannot be read. The text is one sentence."""


class Committed(msgspec.Struct, frozen=True, kw_only=True):
    """One result. name: the scenario, or "bench NAME". began_at: ISO 8601, or "" (benches do not say). on: hardware."""

    name: str
    path: Path
    began_at: str
    on: str
    models: tuple[str, ...]
    measurements: tuple[Measurement, ...]
    verdicts: tuple[Verdict, ...]


class TargetRow(msgspec.Struct, frozen=True):
    """A target and how it stands. on: the hardware of the result that says so; "" without one."""

    target: Target
    state: State
    why: str
    on: str


class _Bench(msgspec.Struct, frozen=True):
    """What bench.report.write_json writes. Each bench has results of its own shape."""

    conditions: dict[str, str]
    results: list[dict[str, Any]]


_OF_ALL_MODELS = (f"{BENCH}gpu", f"{BENCH}gpu.agreement", f"{BENCH}gpu.onnx_image")
Results = Sequence[Mapping[str, Any]]  # of a bench, each of its own shape


def read_committed(targets: Iterable[Target], folder: Path = FOLDER) -> tuple[Committed, ...]:
    """Every run.json and bench file one level below the folder, newest first. Raises ResultsError.

    A run keeps the verdicts that it got; a bench has none, so it is judged by the targets given.
    """
    targets = tuple(targets)
    files = sorted(folder.glob("*/*.json"))
    found = [_from_run(path) if path.name == RUN_FILE else read_bench(path, targets) for path in files]
    return tuple(sorted((one for one in found if one), key=lambda one: one.began_at, reverse=True))


def target_rows(targets: Iterable[Target], committed: Iterable[Committed]) -> tuple[TargetRow, ...]:
    """Each target with the newest result that passed or failed it, else with the newest that speaks of it at all."""
    committed = tuple(committed)
    return tuple(_row(target, committed) for target in targets)


def _row(target: Target, committed: tuple[Committed, ...]) -> TargetRow:
    about = [(one, verdict) for one in committed for verdict in one.verdicts if verdict.target_id == target.id]
    for one, verdict in sorted(about, key=lambda pair: pair[1].state not in JUDGED):
        return TargetRow(target, verdict.state, verdict.why, one.on)
    return TargetRow(target, State.NOT_MEASURED, _way(target), "")


def _way(target: Target) -> str:
    """What would measure it, where no result speaks of it."""
    own = next((name for name in target.scenarios if name in scenario_names()), "")
    return f"run penstock load run {own}" if own and target.measure != "knee_per_s" else way_out(target)


def _from_run(path: Path) -> Committed:
    try:
        run = read_run_folder(path).run
    except RunFolderError as error:
        raise ResultsError(str(error)) from None
    circumstances = circumstances_of(run)
    return Committed(
        name=run.scenario,
        path=path,
        began_at=run.began_at,
        on=circumstances.server_on or "not known",
        models=run.models,
        measurements=run.measurements,
        verdicts=run.verdicts,
    )


def _judged_results(name: str, results: Results) -> Results:
    """The results whose models a target may speak of. Of most benches the first stands for all."""
    return results if name in _OF_ALL_MODELS else results[:1]


def read_bench(path: Path, targets: tuple[Target, ...]) -> Committed | None:
    """What a bench wrote; None for one that measures nothing that a target speaks of. Raises ResultsError."""
    try:
        bench = msgspec.json.decode(path.read_bytes(), type=_Bench)
    except (OSError, msgspec.DecodeError) as error:
        raise ResultsError(f"{path}: neither a run nor what a bench wrote ({error}); measure it again") from None
    found = re.search(r"loadtest\.bench\.(?:gateway\.)?(\w+(?:\.[a-z]\w*)?)", bench.conditions.get("command", ""))
    name = f"{BENCH}{found[1]}" if found else ""
    if name not in _READINGS:
        return None
    try:
        measurements = tuple(_READINGS[name](bench.results))
        models: tuple[str, ...] = tuple(
            dict.fromkeys(str(row["model"]) for row in _judged_results(name, bench.results))
        )
    except (LookupError, TypeError, ValueError, msgspec.ValidationError) as error:
        raise ResultsError(f"{path}: no result of {name} ({error!r}); measure it again with --json") from None
    on = bench.conditions.get("machine") or bench.conditions.get("cpu", "not known").partition(", load ")[0]
    circumstances = Circumstances(
        machine=Machine(on, 0, 0.0, (), "", ()),
        models=models,
        slo_p99_ms=float(bench.conditions.get("slo_p99_ms", 0.0)),
        server_hardware=on,
    )
    return Committed(
        name=name,
        path=path,
        began_at="",
        on=on,
        models=models,
        measurements=measurements,
        verdicts=judge(scenario_targets(targets, name), measurements, circumstances),
    )


def _of_image_endpoint(results: Results) -> Iterable[Measurement]:
    yield _measurement("limit_share", results[0]["ratio"])


_VIDEO_FIELDS = (
    ("model", "limit_share", "limit_share"),
    ("model", "peer_ratio", "rate_ratio"),
    ("streams", "best_share", "best_share"),
    ("streams", "jain", "jain"),
    ("overload", "goodput_of_capacity", "goodput_of_capacity"),
)


def _of_video(results: Results) -> Iterable[Measurement]:
    """Of several models the worse one counts."""
    for kind, field, measure in _VIDEO_FIELDS:
        if spreads := [one[field] for one in results if one["kind"] == kind]:
            yield _measurement(measure, min(spreads, key=lambda spread: spread["median"]))


def _of_peers(results: Results) -> Iterable[Measurement]:
    """The first row is ours; the best peer is the one to whom our rate is the least."""
    result = results[0]
    rounds = int(result["rounds"])
    peers = [row for row in result["rows"] if not row["name"].startswith("penstock")]
    best = min(peers, key=lambda row: float(row["rate_ratio"]["median"]))
    yield _measurement("rate_ratio", best["rate_ratio"], rounds)
    yield _measurement("p99_ratio", best["light_p99_ratio"], rounds)
    yield _measurement("cpu_ms_per_ok", result["rows"][0]["server_ms"], rounds)


def _of_sentences(results: Results) -> Iterable[Measurement]:
    """Of every way to batch the best counts, of several models the fastest."""
    fours = [row["sentences_per_s"] for row in results if (row["callers"], row["sentences"]) == (1, 4)]
    batched = [row["sentences_per_s"] for row in results if row["callers"] * row["sentences"] > 1]
    for measure, spreads in (("sentences_4_per_s", fours), ("sentences_per_s", batched)):
        yield _measurement(measure, max(spreads, key=lambda spread: spread["median"]))


def _of_gpu(results: Results) -> Iterable[Measurement]:
    """The ratios within rounds; what was not measured in that run has no row."""
    for row in results:
        if row["kind"] == "ratio" and row["measure"] in UNITS:
            yield _measurement(row["measure"], row["value"], int(row["rounds"]))


_READINGS: Mapping[str, Callable[[Results], Iterable[Measurement]]] = {
    "bench image_endpoint": _of_image_endpoint,
    "bench video": _of_video,
    "bench peers": _of_peers,
    "bench gpu": _of_gpu,
    "bench gpu.agreement": _of_gpu,
    "bench gpu.onnx_image": _of_gpu,
    "bench gpu.sentences": _of_sentences,
    "bench gpu.video": _of_gpu,
}


def _measurement(measure: str, spread: object, rounds: int = 0) -> Measurement:
    """rounds: 0 where the bench does not say."""
    return Measurement(measure, UNITS[measure], msgspec.convert(spread, Spread), rounds)
