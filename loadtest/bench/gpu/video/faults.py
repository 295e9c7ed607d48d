"""What a killed decode process and cameras that send rubbish cost: their own cameras, and all others."""

import json
import math
import os
import signal
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from loadtest.bench.gpu.video.fleet import Fleet
from loadtest.bench.gpu.video.page import dropped_between, latency_between
from loadtest.bench.gpu.video.usage import decode_processes
from loadtest.bench.wire import BadAnswer

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
                    told = json.loads(line)
                    seen = Seen(int(told["frame_num"]), datetime.fromisoformat(told["time"]).timestamp())
                except (ValueError, KeyError):
                    continue
                found.setdefault(told["source_id"], []).append(seen)
    return found


def judged(span: Mapping[str, Any], frames: Mapping[str, Sequence[Seen]]) -> dict[str, Any]:
    """A span with the largest gap of its own cameras and of the others, in seconds, and the frames that are missing."""
    own = set(span["own"])
    sides = {"own": own, "others": set(span["ids"]) - own}
    told = {key: value for key, value in span.items() if key not in ("ids", "own", "begin_s", "end_s")}
    for side, ids in sides.items():
        gaps = [gap_of(frames.get(one, ()), span["begin_s"], span["end_s"]) for one in sorted(ids)]
        told[side] = {
            "cameras": len(ids),
            "largest_gap_s": max((gap for gap, _ in gaps), default=0.0),
            "median_gap_s": sorted(gap for gap, _ in gaps)[len(gaps) // 2] if gaps else 0.0,
            "missing_frames": sum(missing for _, missing in gaps),
        }
    return told


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
