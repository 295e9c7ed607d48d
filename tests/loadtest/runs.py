"""Made-up but plausible runs, the same for the same seed: what summaries, verdicts and reports are tried on."""

from collections.abc import Sequence

import msgspec
import numpy as np

from penstock_load.measure.ledger import Ledger
from penstock_load.measure.measures import measure
from penstock_load.measure.summary import PhaseFacts, summarise_phase
from penstock_load.results import (
    GeneratorHealth,
    Load,
    Machine,
    PhaseResult,
    Record,
    Reload,
    Run,
    ServerQuantile,
    Side,
    Status,
    Witness,
)

LABELS = ("image street", "grpc street")
MACHINE = Machine(
    cpu="Imagined 3000 @ 2.0 GHz",
    cores=2,
    memory_gib=7.8,
    gpus=(),
    system="Linux 6.1",
    versions=(("python", "3.11.7"), ("penstock", "0.1.0")),
)
REFUSAL = "503 street is full: 64 requests wait (limit 64); retry after 0.2 s"


def make_records(
    *,
    round: int = 1,
    phase: str = "steady",
    side: Side = Side.TARGET,
    began_s: float = 0.0,
    seconds: float = 10.0,
    per_s: float = 100.0,
    median_ms: float = 10.0,
    spread: float = 0.3,
    refused: float = 0.0,
    failed: float = 0.0,
    timeouts: float = 0.0,
    not_sent: float = 0.0,
    labels: Sequence[str] = LABELS,
    has_stages: bool = True,
    seed: int = 0,
) -> list[Record]:
    """Poisson arrivals with log-normal latencies (spread: sigma of the logarithm), ordered by the intended moment.

    refused, failed, timeouts, not_sent: shares of the requests. A refusal takes 1 ms, a timeout 10 s.
    """
    random = np.random.default_rng(seed)
    count = int(random.poisson(per_s * seconds))
    intended_s = began_s + np.sort(random.uniform(0.0, seconds, count))
    latency_ms = median_ms * np.exp(random.normal(0.0, spread, count))
    lag_ms = random.gamma(2.0, 0.05, count)
    bad = [refused, failed, timeouts, not_sent]
    kinds = (Status.OK, Status.REFUSED, Status.FAILED, Status.TIMEOUT, Status.NOT_SENT)
    statuses = random.choice(len(kinds), size=count, p=[1.0 - sum(bad), *bad])
    return [
        _record(
            round=round,
            phase=phase,
            side=side,
            label=labels[place % len(labels)],
            intended_s=float(intended_s[place]),
            lag_ms=float(lag_ms[place]),
            latency_ms=float(latency_ms[place]),
            status=kinds[statuses[place]],
            has_stages=has_stages,
            batch_size=int(random.integers(1, 9)),
        )
        for place in range(count)
    ]


def _record(
    *,
    round: int,
    phase: str,
    side: Side,
    label: str,
    intended_s: float,
    lag_ms: float,
    latency_ms: float,
    status: Status,
    has_stages: bool,
    batch_size: int,
) -> Record:
    took_ms, code, error = {
        Status.OK: (latency_ms, "200", ""),
        Status.REFUSED: (1.0 + lag_ms, "503", REFUSAL),
        Status.FAILED: (latency_ms, "500", "500 the model raised ValueError"),
        Status.TIMEOUT: (10_000.0, "", "no answer within 10 s"),
        Status.NOT_SENT: (lag_ms, "", "no socket was free"),
    }[status]
    is_known = has_stages and status is Status.OK
    inside_ms = max(latency_ms - lag_ms, 0.0) if is_known else 0.0
    return Record(
        round=round,
        phase=phase,
        side=side,
        request=label,
        intended_s=intended_s,
        sent_s=intended_s + lag_ms / 1e3,
        done_s=intended_s + took_ms / 1e3,
        status=status,
        code=code,
        error=error,
        sent_bytes=40_000,
        received_bytes=900 if status is Status.OK else 90,
        batch_size=batch_size if is_known else 0,
        decode_ms=inside_ms * 0.2,
        preprocess_ms=inside_ms * 0.1,
        queue_ms=inside_ms * 0.25,
        infer_ms=inside_ms * 0.3,
        postprocess_ms=inside_ms * 0.05,
        total_ms=inside_ms * 0.9,
    )


def make_health(intended: int, seconds: float, *, not_sent: int = 0, complaint: str = "") -> GeneratorHealth:
    """A generator that held its rate, or one with a complaint."""
    sent = intended - not_sent
    return GeneratorHealth(
        intended=intended,
        sent=sent,
        intended_per_s=intended / seconds if seconds else 0.0,
        sent_per_s=sent / seconds if seconds else 0.0,
        lag_p50_ms=0.08,
        lag_p99_ms=0.4,
        cpu=0.99 if complaint else 0.35,
        processes=1,
        complaint=complaint,
    )


def make_loads(began_s: float, seconds: float, *, rss_slope_mib: float = 0.0, seed: int = 0) -> list[Load]:
    """A reading a second; resident memory grows by rss_slope_mib a second from 400 MiB."""
    random = np.random.default_rng(seed)
    return [
        Load(
            at_s=began_s + second + 0.5,
            server_cpu=float(random.uniform(0.9, 1.1)),
            machine_cpu=float(random.uniform(0.55, 0.7)),
            rss_mib=400.0 + rss_slope_mib * (began_s + second),
        )
        for second in range(int(seconds))
    ]


def make_phase(
    records: Sequence[Record],
    *,
    seconds: float = 10.0,
    is_judged: bool = True,
    is_capacity: bool = False,
    is_open_loop: bool = True,
    slo_p99_ms: float = 100.0,
    complaint: str = "",
    rss_slope_mib: float = 0.0,
    began_s: float | None = None,
    has_witness: bool = False,
) -> PhaseResult:
    """One phase's result; round, name and side are the first record's. One core of the server was busy."""
    first = records[0]
    began_s = float(int(first.intended_s)) if began_s is None else began_s
    not_sent = sum(record.status is Status.NOT_SENT for record in records)
    facts = PhaseFacts(
        round=first.round,
        phase=first.phase,
        side=first.side,
        is_judged=is_judged,
        is_capacity=is_capacity,
        is_open_loop=is_open_loop,
        began_s=began_s,
        seconds=seconds,
        server_cpu_s=seconds,
    )
    result = summarise_phase(
        Ledger.of(records),
        facts,
        slo_p99_ms=slo_p99_ms,
        health=make_health(len(records), seconds, not_sent=not_sent, complaint=complaint),
        loads=make_loads(began_s, seconds, rss_slope_mib=rss_slope_mib, seed=first.round),
    )
    return msgspec.structs.replace(result, witness=make_witness(result)) if has_witness else result


def make_witness(phase: PhaseResult) -> Witness:
    """Server's metrics that agree with the phase."""
    return Witness(
        source="http://127.0.0.1:8002/metrics",
        answered=phase.all.ok,
        mean_ms=phase.all.latency.mean * 0.9,
        quantiles=(ServerQuantile(0.5, 5.0, 10.0), ServerQuantile(0.99, 10.0, 25.0)),
        stages_ms=(("decode", 2.0), ("preprocess", 1.0), ("queue", 2.5), ("infer", 3.0), ("postprocess", 0.5)),
        batch_sizes=((1, phase.all.ok // 2), (4, phase.all.ok // 8)),
    )


def make_run_records(
    *,
    rounds: int = 3,
    seconds: float = 10.0,
    per_s: float = 100.0,
    median_ms: float = 10.0,
    has_beside: bool = False,
    beside_median_ms: float = 12.0,
    refused: float = 0.0,
    seed: int = 0,
) -> list[Record]:
    """The records of make_run: in each round "capacity" (a closed loop, three times the rate) and "steady" (judged)."""
    records: list[Record] = []
    began_s = 0.0
    for round in range(1, rounds + 1):
        for phase, rate, slowdown in (("capacity", per_s * 3, 3.0), ("steady", per_s, 1.0)):
            for side, base_ms in _sides(has_beside, median_ms, beside_median_ms):
                records += make_records(
                    round=round,
                    phase=phase,
                    side=side,
                    began_s=began_s,
                    seconds=seconds,
                    per_s=rate,
                    median_ms=base_ms * slowdown,
                    refused=refused if phase == "steady" else 0.0,
                    seed=seed + len(records),
                )
                began_s += seconds + 1.0
    return records


def _sides(has_beside: bool, median_ms: float, beside_median_ms: float) -> list[tuple[Side, float]]:
    beside = [(Side.BESIDE, beside_median_ms)] if has_beside else []
    return [(Side.TARGET, median_ms), *beside]


def make_reloads(rounds: int) -> tuple[Reload, ...]:
    """One reload a round: 801 ms, 802 ms, … to load; 91 ms, 92 ms, … to the first answer."""
    return tuple(
        Reload(round, Side.TARGET, "street", load_ms=800.0 + round, first_answer_ms=90.0 + round, second_answer_ms=9.0)
        for round in range(1, rounds + 1)
    )


def make_run(
    records: Sequence[Record] | None = None,
    *,
    scenario: str = "image-steady",
    seconds: float = 10.0,
    slo_p99_ms: float = 100.0,
    complaints: tuple[str, ...] = (),
    has_reloads: bool = False,
    seed: int = 0,
) -> Run:
    """A run of those records (make_run_records' own without any), summarised as a real one; no verdicts."""
    if records is None:
        records = make_run_records(seconds=seconds, seed=seed)
    groups: dict[tuple[int, str, Side], list[Record]] = {}
    for record in records:
        groups.setdefault((record.round, record.phase, record.side), []).append(record)
    phases = tuple(
        make_phase(
            group,
            seconds=seconds,
            is_judged=phase != "capacity",
            is_capacity=phase == "capacity",
            is_open_loop=phase != "capacity",
            slo_p99_ms=slo_p99_ms,
            has_witness=side is Side.TARGET,
        )
        for (_, phase, side), group in groups.items()
    )
    rounds = max(record.round for record in records)
    reloads = make_reloads(rounds) if has_reloads else ()
    has_beside = any(side is Side.BESIDE for _, _, side in groups)
    return Run(
        scenario=scenario,
        about="Pictures at a steady rate",
        command=f"penstock load run {scenario}",
        began_at="2025-11-21T08:00:00Z",
        target_url="http://127.0.0.1:8000",
        beside_url="http://127.0.0.1:9000" if has_beside else "",
        server="penstock 0.1.0",
        is_local=True,
        machine=MACHINE,
        server_hardware="cpu",
        models=("street",),
        slo_p99_ms=slo_p99_ms,
        rounds=rounds,
        seed=seed,
        phases=phases,
        reloads=reloads,
        measurements=measure(phases, reloads),
        complaints=complaints,
    )
