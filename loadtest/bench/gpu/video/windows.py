"""Measurement windows of a fleet, and windows with a fault."""

import json
import math
import os
import signal
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.programs import PenstockUp
from loadtest.bench.gpu.video.clips import FPS
from loadtest.bench.gpu.video.fleet import Fleet, NotAllThere
from loadtest.bench.gpu.video.usage import (
    CardMeter,
    ask_engine,
    busiest,
    busy_between,
    cores_by_kind,
    decode_processes,
    interrupted_between,
    look_at_cores,
    usage_of,
)
from loadtest.bench.gpu.video.verdict import SustainedSearch, Window, complaint, dropped_between, latency_between
from loadtest.bench.wire import BadAnswer

HOPELESS_IN_TIME, HOPELESS_DROPPED, HOPELESS_PLAYED = 0.8, 0.05, 0.9
SECOND_WINDOWS = 2  # that a number gets before it counts as missed: one moment of the machine's is not to decide


@dataclass(frozen=True, slots=True)
class Pacing:
    """bound_ms: of the p99. settle_s: after a change, before a window. start_s: that streams may take to be there."""

    seconds: float
    bound_ms: float
    settle_s: float
    start_s: float


def measure(fleet: Fleet, up: PenstockUp, card: CardMeter, pacing: Pacing) -> dict[str, Any]:
    """One window's figures, `complaint` empty where it was held. Raises BadAnswer."""
    stack = up.process.pid
    engine, used, before = ask_engine(up.metrics_url), usage_of(fleet.pids, stack), fleet.look()
    cores_before = look_at_cores()
    load = card.during(pacing.seconds)
    cores_after = look_at_cores()
    after, spent = fleet.look(), usage_of(fleet.pids, stack)
    engine_after = ask_engine(up.metrics_url)
    instances = sum(kind == "model instance" for kind, _ in spent.processes)
    seconds = after.at_s - before.at_s
    ids = fleet.ids
    window = Window(
        seconds=seconds,
        fps=FPS,
        answered=tuple(after.page.answered.get(one, 0) - before.page.answered.get(one, 0) for one in ids),
        dropped=dropped_between(before.page, after.page),
        latency=latency_between(before.page, after.page),
    )
    batches = after.page.batches - before.page.batches
    frames_per_s = max(window.rate, 1.0)
    cores = cores_by_kind(used, spent)
    return {
        "streams": len(ids),
        "complaint": complaint(window, pacing.bound_ms),
        "seconds": seconds,
        "rate": window.rate,
        "played": window.played,
        "least_frames": min(window.answered, default=0),
        "dropped_share": window.dropped_share,
        "dropped": dict(window.dropped),
        "p50_ms": window.latency.percentile_ms(0.5),
        "p99_ms": window.latency.percentile_ms(0.99),
        "in_time": window.in_time(pacing.bound_ms),
        "frames_a_batch": (after.page.batched - before.page.batched) / max(batches, 1),
        "infer_ms_a_batch": 1000 * (after.page.infer_s - before.page.infer_s) / max(batches, 1),
        "rows": {how: n - before.page.hand_over.get(how, 0) for how, n in after.page.hand_over.items()},
        "decode_processes": dict(after.page.processes),
        "restarts": sum(after.page.restarts.values()) - sum(before.page.restarts.values()),
        "cores": cores,
        "cpu_ms_a_frame": {kind: 1000 * one / frames_per_s for kind, one in cores.items()},
        "card": load,
        "interrupts": interrupted_between(cores_before, cores_after),
        "engine": busy_between(engine, engine_after, seconds, instances),
        **busiest(used, spent),
    }  # fmt: skip


def try_count(fleet: Fleet, count: int, window: Callable[[], dict[str, Any]], pacing: Pacing) -> dict[str, Any]:
    """The fleet with so many streams: the first window that was held, else the last of two. waited_s: for all streams.

    Streams that have no answer in time are a reason, and the window tells what was full meanwhile. Where that is the
    card's decoders there is none: full_at, the streams that have one, says it all. Raises BadAnswer.
    """
    fleet.resize(count)
    try:
        waited_s = round(fleet.wait(pacing.start_s), 1)
    except NotAllThere as error:
        failure = {"streams": count, "complaint": str(error), "waited_s": round(error.waited_s, 1)}
        return failure | {"full_at": error.answered} if error.is_full else window() | failure
    time.sleep(pacing.settle_s)
    found: dict[str, Any] = {}
    for _ in range(SECOND_WINDOWS):
        found = window()
        if not found["complaint"] or _is_hopeless(found):
            break
    return found | {"waited_s": waited_s}


def _is_hopeless(found: dict[str, Any]) -> bool:
    """So far from being held that another window is a waste of a lent card."""
    hopeless = found["in_time"] < HOPELESS_IN_TIME or found["dropped_share"] > HOPELESS_DROPPED
    return bool(hopeless or found["played"] < HOPELESS_PLAYED)


def search(
    finding: SustainedSearch, attempt: Callable[[int], dict[str, Any]], budget_s: float = math.inf
) -> dict[str, Any]:
    """held, missed (0 where nothing was), full_at (the decoders at which the card was full, else 0), and every try.

    budget_s: once something is held, nothing is tried after that. cut: why it ended before its time, empty where it
    did not. Raises BadAnswer, OSError where the first try breaks off: what later ones found before that stays.
    """
    tried, cut, began_s = list[dict[str, Any]](), "", time.monotonic()
    while (count := finding.next_count()) is not None:
        if finding.held and time.monotonic() - began_s > budget_s:
            cut = f"{count} streams: its {budget_s:g} s were over"
            break
        try:
            tried.append(attempt(count))
        except (BadAnswer, OSError) as error:
            if not tried:
                raise
            cut = f"{count} streams: {error}"
            break
        last = tried[-1]
        is_held, full_at = not last["complaint"], int(last.get("full_at", 0))
        finding.record(count, is_held=is_held, played=float(last.get("played", 1.0)), full_at=full_at)
    missed = [one["streams"] for one in tried if one["complaint"]]
    full_at = max((int(one.get("full_at", 0)) for one in tried), default=0)
    return {"held": finding.held, "missed": min(missed, default=0), "full_at": full_at, "tries": tried, "cut": cut}


STEADY_S, BACK_S, RUBBISH_S, LOOK_S = 3.0, 20.0, 8.0, 0.5


@dataclass(frozen=True, slots=True)
class Seen:
    """A frame that was answered. at_s: the wall clock at its capture."""

    number: int
    at_s: float


def run_faults(fleet: Fleet, results: Path, rubbish: Mapping[str, Path], start_s: float) -> list[dict[str, Any]]:
    """Steady, killed, each kind of rubbish, one after the other. The fleet writes results. Raises BadAnswer."""
    spans: list[dict[str, Any]] = []
    fleet.wait(start_s)
    time.sleep(STEADY_S)
    with _Span(fleet, spans, "nothing"):
        time.sleep(STEADY_S)
    with _Span(fleet, spans, "a decode process is killed") as span:
        found = decode_processes(fleet.pids[0])
        if not found:
            raise BadAnswer("the video program has no decode process that could be killed")
        os.kill(found[0], signal.SIGKILL)
        span["own"] = _wait_for_own(fleet)
    for name, path in rubbish.items():
        with _Span(fleet, spans, f"a camera sends rubbish: {name}") as span:
            fleet.add(f"bad-{name}", path)
            time.sleep(RUBBISH_S)
            bad = [one for one in fleet.streams() if one["source_id"] == f"bad-{name}"]
            span["rubbish"] = [
                {key: one[key] for key in ("state", "frames", "restarts", "decoder")}
                | {"reason": str(one["reason"]).replace(f"{path.parent}/", "")}
                for one in bad
            ]
            fleet.remove(f"bad-{name}")
    return spans


def _wait_for_own(fleet: Fleet) -> list[str]:
    """The cameras that were opened anew; returns when all of them have answers again, and some seconds passed."""
    before = fleet.look().page
    own: set[str] = set()
    answered: dict[str, int] = {}
    until_s = time.monotonic() + BACK_S
    while time.monotonic() < until_s:
        time.sleep(LOOK_S)
        page = fleet.look().page
        for source_id, restarts in page.restarts.items():
            if restarts > before.restarts.get(source_id, 0) and source_id not in own:
                own.add(source_id)
                answered[source_id] = page.answered.get(source_id, 0)
        if own and all(page.answered.get(one, 0) > answered[one] for one in own):
            time.sleep(STEADY_S)
            break
    last = fleet.look().page.restarts
    return sorted(one for one, n in last.items() if n > before.restarts.get(one, 0))


class _Span:
    """A context around a fault: its name, when it was, what all streams lost meanwhile, the slowest answer's bound."""

    def __init__(self, fleet: Fleet, spans: list[dict[str, Any]], what: str) -> None:
        self._fleet, self._spans = fleet, spans
        self.span: dict[str, Any] = {"what": what, "own": [], "ids": list(fleet.ids)}

    def __enter__(self) -> dict[str, Any]:
        self._before = self._fleet.look().page
        self.span["begin_s"] = time.time()
        return self.span

    def __exit__(self, kind: object, *_: object) -> None:
        if kind is not None:
            return
        self.span["end_s"] = time.time()
        after = self._fleet.look().page
        slowest, below = 0.0, 0
        for bound_s, count in latency_between(self._before, after).upto:
            if count > below:
                slowest, below = bound_s, count
        self.span["slowest_within_s"] = slowest if math.isfinite(slowest) else "more"
        self.span["dropped"] = dropped_between(self._before, after)
        self._spans.append(self.span)


def read_results(folder: Path) -> dict[str, list[Seen]]:
    """Every objects.jsonl below it: the frames of each source, in order. A last line that is half counts for none."""
    found: dict[str, list[Seen]] = {}
    for path in sorted(folder.glob("*/objects.jsonl")):
        with path.open(encoding="utf-8") as lines:
            for line in lines:
                try:
                    event = json.loads(line)
                    seen = Seen(int(event["frame_num"]), datetime.fromisoformat(event["time"]).timestamp())
                except (ValueError, KeyError):
                    continue
                found.setdefault(event["source_id"], []).append(seen)
    return found


def judged(span: Mapping[str, Any], frames: Mapping[str, Sequence[Seen]]) -> dict[str, Any]:
    """A span with the largest gap of its own cameras and of the others, in seconds, and the frames that are missing."""
    own = set(span["own"])
    sides = {"own": own, "others": set(span["ids"]) - own}
    judgement = {key: value for key, value in span.items() if key not in ("ids", "own", "begin_s", "end_s")}
    for side, ids in sides.items():
        gaps = [gap_of(frames.get(one, ()), span["begin_s"], span["end_s"]) for one in sorted(ids)]
        judgement[side] = {
            "cameras": len(ids),
            "largest_gap_s": max((gap for gap, _ in gaps), default=0.0),
            "median_gap_s": sorted(gap for gap, _ in gaps)[len(gaps) // 2] if gaps else 0.0,
            "missing_frames": sum(missing for _, missing in gaps),
        }
    return judgement


def gap_of(frames: Iterable[Seen], begin_s: float, end_s: float) -> tuple[float, int]:
    """(the longest time between two answered frames whose middle lies in the span, frame numbers missing in it).

    A camera that has none any more at the span's end was silent until then.
    """
    longest, missing, last = 0.0, 0, None
    for seen in frames:
        if last is not None and begin_s <= (last.at_s + seen.at_s) / 2 <= end_s:
            longest = max(longest, seen.at_s - last.at_s)
            missing += max(seen.number - last.number - 1, 0)
        last = seen
    if last is None or last.at_s < end_s - 1.0:
        longest = max(longest, end_s - max(begin_s, last.at_s if last is not None else begin_s))
    return longest, missing
