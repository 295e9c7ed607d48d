"""Figures of the video bench, from runs to rows, and its printed tables."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any

from loadtest.bench.gateway.image_endpoint import harmonic_limit
from loadtest.bench.report import format_table, spread
from loadtest.bench.stages import StageRun
from loadtest.bench.video.program import Memory, ProgramRun
from penstock_load.measure.buckets import jain_index

Result = dict[str, Any]


@dataclass(slots=True)
class ModelRounds:
    """One stream of one model. peers: by the peer's setting."""

    decode: list[StageRun] = field(default_factory=list)
    prepare: list[StageRun] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    ours: list[ProgramRun] = field(default_factory=list)
    peers: dict[str, list[StageRun]] = field(default_factory=dict)


@dataclass(slots=True)
class StreamRounds:
    """Several streams of one model. streams: by their number. memory: of the most of them."""

    streams: dict[int, list[ProgramRun]] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    overload: list[ProgramRun] = field(default_factory=list)
    offered: list[float] = field(default_factory=list)
    capacity: list[ProgramRun] = field(default_factory=list)


def model_result(model: str, engine_load: str, rounds: ModelRounds) -> Result:
    """The rounds as figures: frames a second, milliseconds of CPU a frame. engine_load: how the engine was asked.

    limit_share: ours by the harmonic limit of the same round. peer: the best of the peer's settings by its median;
    peer_ratio: ours by it.
    """
    stages = list(zip(rounds.decode, rounds.prepare, rounds.engine, strict=True))
    limits = [harmonic_limit(decode.rate, prepare.rate, engine) for decode, prepare, engine in stages]
    ours = [stretch.rate for stretch in rounds.ours]
    best = max(rounds.peers, key=lambda name: median(run.rate for run in rounds.peers[name]))
    runs = rounds.peers[best]
    return {
        "kind": "model",
        "model": model,
        "engine_load": engine_load,
        "decode_rate": spread([run.rate for run in rounds.decode]),
        "prepare_rate": spread([run.rate for run in rounds.prepare]),
        "engine_rate": spread(rounds.engine),
        "limit_rate": spread(limits),
        "ours_rate": spread(ours),
        "limit_share": spread([rate / limit for rate, limit in zip(ours, limits, strict=True)]),
        "program_cpu_ms": spread([one.program_ms for one in rounds.ours]),
        "decode_cpu_ms": spread([one.decode_ms for one in rounds.ours]),
        "stack_cpu_ms": spread([one.stack_ms for one in rounds.ours]),
        "decode_alone_cpu_ms": spread([run.cpu_ms for run in rounds.decode]),
        "prepare_alone_cpu_ms": spread([run.cpu_ms for run in rounds.prepare]),
        "peer": best,
        "peer_rate": spread([run.rate for run in runs]),
        "peer_ratio": spread([rate / run.rate for rate, run in zip(ours, runs, strict=True)]),
        "peer_cpu_ms": spread([run.cpu_ms for run in runs]),
        "peers": {name: spread([run.rate for run in found]) for name, found in rounds.peers.items()},
    }


def streams_result(model: str, rounds: StreamRounds) -> Result:
    """The rounds as figures. rates: aggregate, by the number of streams. best_shares: by the best aggregate of the same
    round; best_share: of the most streams. jain: of their frames. pss_mib, uss_mib: of program and decode processes."""
    rates = {count: [one.rate for one in runs] for count, runs in rounds.streams.items()}
    best = [max(of_round) for of_round in zip(*rates.values(), strict=True)]
    most = max(rates)
    shares = {
        count: spread([rate / top for rate, top in zip(found, best, strict=True)]) for count, found in rates.items()
    }
    return {
        "kind": "streams",
        "model": model,
        "rates": {count: spread(found) for count, found in rates.items()},
        "best_shares": shares,
        "best_share": shares[most],
        "jain": spread([jain_index(one.inferred) for one in rounds.streams[most]]),
        "pss_mib": spread([one.pss_mib for one in rounds.memory]),
        "uss_mib": spread([one.uss_mib for one in rounds.memory]),
        "processes": max(one.processes for one in rounds.memory),
    }


def overload_result(model: str, bound_s: float, rounds: StreamRounds) -> Result:
    """The rounds as figures. offered: frames a second of all cameras. goodput_of_capacity: those answered within the
    bound, by the rate of as many files of the same round. ceiling: of that share, if every picture is decoded and the
    CPU is full. cpu_ms: of an answered frame; capacity_cpu_ms: of the files, decoding_cpu_ms: of that for decoding.
    least_share: the frames of the source that got the least, by the mean. drops: by reason."""
    runs = rounds.overload
    good = [one.latency.within(bound_s) / one.seconds for one in runs]
    reasons = sorted({reason for one in runs for reason in one.drops})
    files = list(zip(rounds.offered, rounds.capacity, strict=True))
    return {
        "kind": "overload",
        "model": model,
        "bound_ms": bound_s * 1000,
        "offered": spread(rounds.offered),
        "capacity": spread([one.rate for one in rounds.capacity]),
        "answered": spread([one.rate for one in runs]),
        "goodput_of_capacity": spread([rate / one.rate for rate, one in zip(good, rounds.capacity, strict=True)]),
        "ceiling": spread([_ceiling(offered / one.rate, one.decoding_ms / one.cpu_ms) for offered, one in files]),
        "cpu_ms": spread([one.cpu_ms for one in runs]),
        "capacity_cpu_ms": spread([one.cpu_ms for one in rounds.capacity]),
        "decoding_cpu_ms": spread([one.decoding_ms for one in rounds.capacity]),
        "p50_ms": spread([one.latency.percentile_ms(0.5) for one in runs]),
        "p99_ms": spread([one.latency.percentile_ms(0.99) for one in runs]),
        "least_share": spread([min(one.inferred) * len(one.inferred) / max(sum(one.inferred), 1) for one in runs]),
        "jain": spread([jain_index(one.inferred) for one in runs]),
        "drops": {reason: spread([one.drops.get(reason, 0) / one.seconds for one in runs]) for reason in reasons},
    }


def _ceiling(overload: float, decoding: float) -> float:
    """What is left of the capacity where so many times as much is decoded, which takes a share of each frame's CPU."""
    return max((1 - overload * decoding) / (1 - decoding), 0.0)


def table(one: Result) -> str:
    """For people."""
    return {"model": _model_table, "streams": _streams_table, "overload": _overload_table}[one["kind"]](one)


def _model_table(one: Result) -> str:
    rows: list[Sequence[object]] = [
        ("ffmpeg -f null", one["decode_rate"], one["decode_alone_cpu_ms"]),
        ("colours, resize, normalise", one["prepare_rate"], one["prepare_alone_cpu_ms"]),
        (f"engine ({one['engine_load']})", one["engine_rate"], ""),
        ("harmonic limit", one["limit_rate"], ""),
        ("penstock video run", one["ours_rate"], ""),
        *((f"  {part}", "", one[f"{part}_cpu_ms"]) for part in ("program", "decode", "stack")),
        *((f"OpenCV + onnxruntime, {name}", rate, "") for name, rate in one["peers"].items()),
        (f"  the best: {one['peer']}", one["peer_rate"], one["peer_cpu_ms"]),
    ]
    return "\n".join(
        [
            f"{one['model']}: one 720p H.264 stream",
            format_table(("", "frames/s", "CPU ms a frame"), rows),
            f"of the harmonic limit: {one['limit_share']}   (floor 0.90, goal 0.95)",
            f"by the best peer: {one['peer_ratio']}   (floor 1.3)",
        ]
    )


def _streams_table(one: Result) -> str:
    rows = [(f"{count} streams", rate, one["best_shares"][count]) for count, rate in one["rates"].items()]
    most = max(one["rates"])
    return "\n".join(
        [
            f"{one['model']}: several 720p H.264 streams",
            format_table(("", "frames/s", "of the best"), rows),
            f"Jain's index over the sources' frames, {most} streams: {one['jain']}   (floor 0.98)",
            f"memory, MiB, {most} streams, {one['processes']} processes: PSS {one['pss_mib']}   USS {one['uss_mib']}",
        ]
    )


def _overload_table(one: Result) -> str:
    drops = "   ".join(f"{reason} {rate}" for reason, rate in one["drops"].items())
    return "\n".join(
        [
            f"{one['model']}: cameras at more than the capacity, frames/s",
            format_table(("", "frames/s"), [(name, one[name]) for name in ("offered", "capacity", "answered")]),
            f"answered within {one['bound_ms']:g} ms, of the capacity: {one['goodput_of_capacity']}   (floor 0.90; at "
            f"most {one['ceiling']} if every picture is decoded)",
            f"CPU ms an answered frame: {one['cpu_ms']}   of the files: {one['capacity_cpu_ms']}, of which decoding "
            f"{one['decoding_cpu_ms']}",
            f"latency, ms: p50 {one['p50_ms']}   p99 {one['p99_ms']}",
            f"the least of a source by the mean: {one['least_share']}   Jain's index: {one['jain']}",
            f"dropped a second: {drops or 'nothing'}",
        ]
    )
