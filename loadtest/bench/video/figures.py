"""What the video bench found, round by round, and as figures with their spread."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import median

from loadtest.bench.image_endpoint import harmonic_limit
from loadtest.bench.report import Spread, spread
from loadtest.bench.stages import StageLap
from loadtest.bench.video.program import Memory, Stretch
from loadtest.measure.buckets import jain_index

MANY = 16


@dataclass(slots=True)
class ModelRounds:
    """One stream of one model. peers: by the peer's setting."""

    decode: list[StageLap] = field(default_factory=list)
    prepare: list[StageLap] = field(default_factory=list)
    engine: list[float] = field(default_factory=list)
    ours: list[Stretch] = field(default_factory=list)
    peers: dict[str, list[StageLap]] = field(default_factory=dict)


@dataclass(slots=True)
class StreamRounds:
    """Several streams of one model. streams: by their number. memory: of the most of them."""

    streams: dict[int, list[Stretch]] = field(default_factory=dict)
    memory: list[Memory] = field(default_factory=list)
    overload: list[Stretch] = field(default_factory=list)
    offered: list[float] = field(default_factory=list)
    capacity: list[Stretch] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class ModelResult:
    """Frames a second, milliseconds of CPU a frame. limit_share: ours by the harmonic limit of the same round.

    engine_load: how the engine was asked. peer: the best of the peer's settings by its median; peer_ratio: ours by it.
    """

    kind: str
    model: str
    engine_load: str
    decode_rate: Spread
    prepare_rate: Spread
    engine_rate: Spread
    limit_rate: Spread
    ours_rate: Spread
    limit_share: Spread
    program_cpu_ms: Spread
    decode_cpu_ms: Spread
    stack_cpu_ms: Spread
    decode_alone_cpu_ms: Spread
    prepare_alone_cpu_ms: Spread
    peer: str
    peer_rate: Spread
    peer_ratio: Spread
    peer_cpu_ms: Spread
    peers: Mapping[str, Spread]


@dataclass(frozen=True, slots=True)
class StreamsResult:
    """rates: aggregate, by the number of streams. best_shares: by the best aggregate of the same round. jain: of the
    frames that each source of the most streams got. pss_mib, uss_mib: of program and decode processes together."""

    kind: str
    model: str
    rates: Mapping[int, Spread]
    best_shares: Mapping[int, Spread]
    best_share: Spread
    jain: Spread
    pss_mib: Spread
    uss_mib: Spread
    processes: int


@dataclass(frozen=True, slots=True)
class OverloadResult:
    """offered: frames a second of all cameras. goodput: those answered within the bound, by the capacity: frames a
    second of as many files of the same round. ceiling: of that share, where every picture is decoded and the CPU is
    full. cpu_ms: of an answered frame, capacity_cpu_ms: of the files, decoding_cpu_ms: of that for decoding alone.
    least_share: the frames of the source that got the least, by the mean. drops: by reason, of all decoded frames."""

    kind: str
    model: str
    bound_ms: float
    offered: Spread
    capacity: Spread
    answered: Spread
    goodput_of_capacity: Spread
    ceiling: Spread
    cpu_ms: Spread
    capacity_cpu_ms: Spread
    decoding_cpu_ms: Spread
    p50_ms: Spread
    p99_ms: Spread
    least_share: Spread
    jain: Spread
    drops: Mapping[str, Spread]


def model_result(model: str, engine_load: str, rounds: ModelRounds) -> ModelResult:
    """The rounds as figures."""
    stages = list(zip(rounds.decode, rounds.prepare, rounds.engine, strict=True))
    limits = [harmonic_limit(decode.rate, prepare.rate, engine) for decode, prepare, engine in stages]
    ours = [stretch.rate for stretch in rounds.ours]
    best = max(rounds.peers, key=lambda name: median(lap.rate for lap in rounds.peers[name]))
    laps = rounds.peers[best]
    return ModelResult(
        kind="model",
        model=model,
        engine_load=engine_load,
        decode_rate=spread([lap.rate for lap in rounds.decode]),
        prepare_rate=spread([lap.rate for lap in rounds.prepare]),
        engine_rate=spread(rounds.engine),
        limit_rate=spread(limits),
        ours_rate=spread(ours),
        limit_share=spread([rate / limit for rate, limit in zip(ours, limits, strict=True)]),
        program_cpu_ms=spread([one.program_ms for one in rounds.ours]),
        decode_cpu_ms=spread([one.decode_ms for one in rounds.ours]),
        stack_cpu_ms=spread([one.stack_ms for one in rounds.ours]),
        decode_alone_cpu_ms=spread([lap.cpu_ms for lap in rounds.decode]),
        prepare_alone_cpu_ms=spread([lap.cpu_ms for lap in rounds.prepare]),
        peer=best,
        peer_rate=spread([lap.rate for lap in laps]),
        peer_ratio=spread([rate / lap.rate for rate, lap in zip(ours, laps, strict=True)]),
        peer_cpu_ms=spread([lap.cpu_ms for lap in laps]),
        peers={name: spread([lap.rate for lap in found]) for name, found in rounds.peers.items()},
    )


def streams_result(model: str, rounds: StreamRounds) -> StreamsResult:
    """The rounds as figures; best_share is that of the most streams."""
    rates = {count: [one.rate for one in laps] for count, laps in rounds.streams.items()}
    best = [max(of_round) for of_round in zip(*rates.values(), strict=True)]
    most = max(rates)
    shares = {
        count: spread([rate / top for rate, top in zip(found, best, strict=True)]) for count, found in rates.items()
    }
    return StreamsResult(
        kind="streams",
        model=model,
        rates={count: spread(found) for count, found in rates.items()},
        best_shares=shares,
        best_share=shares[most],
        jain=spread([jain_index(one.inferred) for one in rounds.streams[most]]),
        pss_mib=spread([one.pss_mib for one in rounds.memory]),
        uss_mib=spread([one.uss_mib for one in rounds.memory]),
        processes=max(one.processes for one in rounds.memory),
    )


def overload_result(model: str, bound_s: float, rounds: StreamRounds) -> OverloadResult:
    """The rounds as figures."""
    laps = rounds.overload
    good = [one.latency.within(bound_s) / one.seconds for one in laps]
    reasons = sorted({reason for one in laps for reason in one.drops})
    files = list(zip(rounds.offered, rounds.capacity, strict=True))
    return OverloadResult(
        kind="overload",
        model=model,
        bound_ms=bound_s * 1000,
        offered=spread(rounds.offered),
        capacity=spread([one.rate for one in rounds.capacity]),
        answered=spread([one.rate for one in laps]),
        goodput_of_capacity=spread([rate / one.rate for rate, one in zip(good, rounds.capacity, strict=True)]),
        ceiling=spread([_ceiling(offered / one.rate, one.decoding_ms / one.cpu_ms) for offered, one in files]),
        cpu_ms=spread([one.cpu_ms for one in laps]),
        capacity_cpu_ms=spread([one.cpu_ms for one in rounds.capacity]),
        decoding_cpu_ms=spread([one.decoding_ms for one in rounds.capacity]),
        p50_ms=spread([one.latency.percentile_ms(0.5) for one in laps]),
        p99_ms=spread([one.latency.percentile_ms(0.99) for one in laps]),
        least_share=spread([min(one.inferred) * len(one.inferred) / max(sum(one.inferred), 1) for one in laps]),
        jain=spread([jain_index(one.inferred) for one in laps]),
        drops={reason: spread([one.drops.get(reason, 0) / one.seconds for one in laps]) for reason in reasons},
    )


def _ceiling(overload: float, decoding: float) -> float:
    """What is left of the capacity where so many times as much is decoded, which takes a share of each frame's CPU."""
    return max((1 - overload * decoding) / (1 - decoding), 0.0)
