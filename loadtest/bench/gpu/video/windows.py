"""A window of a fleet: what was answered, what it cost, what the card did; and the search for what is held."""

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from loadtest.bench.gpu.penstock_up import PenstockUp
from loadtest.bench.gpu.video.card import CardMeter
from loadtest.bench.gpu.video.clips import FPS
from loadtest.bench.gpu.video.engine import ask_engine, busy_between
from loadtest.bench.gpu.video.fleet import Fleet
from loadtest.bench.gpu.video.interrupts import interrupted_between, look_at_cores
from loadtest.bench.gpu.video.page import dropped_between, latency_between
from loadtest.bench.gpu.video.patience import NotAllThere
from loadtest.bench.gpu.video.usage import busiest, cores_by_kind, usage_of
from loadtest.bench.gpu.video.verdict import HeldSearch, Window, complaint
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
    told = card.during(pacing.seconds)
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
        "card": told,
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
        told = {"streams": count, "complaint": str(error), "waited_s": round(error.waited_s, 1)}
        return told | {"full_at": error.answered} if error.is_full else window() | told
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


def search(finding: HeldSearch, attempt: Callable[[int], dict[str, Any]], budget_s: float = math.inf) -> dict[str, Any]:
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
