"""The video bench's result as a person reads it."""

from collections.abc import Sequence

from loadtest.bench.report import format_table
from loadtest.bench.video.figures import ModelResult, OverloadResult, StreamsResult


def model_table(one: ModelResult) -> str:
    """One stream: the stages, the limit, ours, the peer."""
    rows: list[Sequence[object]] = [
        ("ffmpeg -f null", one.decode_rate, one.decode_alone_cpu_ms),
        ("colours, resize, normalise", one.prepare_rate, one.prepare_alone_cpu_ms),
        (f"engine ({one.engine_load})", one.engine_rate, ""),
        ("harmonic limit", one.limit_rate, ""),
        ("penstock video run", one.ours_rate, ""),
        ("  the program", "", one.program_cpu_ms),
        ("  its decode process", "", one.decode_cpu_ms),
        ("  the stack", "", one.stack_cpu_ms),
        *((f"OpenCV + onnxruntime, {name}", rate, "") for name, rate in one.peers.items()),
        (f"  the best: {one.peer}", one.peer_rate, one.peer_cpu_ms),
    ]
    return "\n".join(
        [
            f"{one.model}: one 720p H.264 stream",
            format_table(("", "frames/s", "CPU ms a frame"), rows),
            f"of the harmonic limit: {one.limit_share}   (floor 0.90, goal 0.95)",
            f"by the best peer: {one.peer_ratio}   (floor 1.3)",
        ]
    )


def streams_table(one: StreamsResult) -> str:
    """How the aggregate stands over the numbers of streams."""
    rows = [(f"{count} streams", one.rates[count], one.best_shares[count]) for count in one.rates]
    return "\n".join(
        [
            f"{one.model}: several 720p H.264 streams",
            format_table(("", "frames/s", "of the best"), rows),
            f"Jain's index over the sources' frames, {max(one.rates)} streams: {one.jain}   (floor 0.98)",
            f"memory, MiB, {max(one.rates)} streams, {one.processes} processes: PSS {one.pss_mib}   USS {one.uss_mib}",
        ]
    )


def overload_table(one: OverloadResult) -> str:
    """What is left of the capacity."""
    drops = "   ".join(f"{reason} {rate}" for reason, rate in one.drops.items())
    return "\n".join(
        [
            f"{one.model}: cameras at more than the capacity, frames/s",
            format_table(
                ("", "frames/s"), [("offered", one.offered), ("capacity", one.capacity), ("answered", one.answered)]
            ),
            f"answered within {one.bound_ms:g} ms, of the capacity: {one.goodput_of_capacity}   (floor 0.90; at most "
            f"{one.ceiling} where every picture is decoded)",
            f"CPU ms an answered frame: {one.cpu_ms}   of the files: {one.capacity_cpu_ms}, of which decoding "
            f"{one.decoding_cpu_ms}",
            f"latency, ms: p50 {one.p50_ms}   p99 {one.p99_ms}",
            f"the least of a source by the mean: {one.least_share}   Jain's index: {one.jain}",
            f"dropped a second: {drops or 'nothing'}",
        ]
    )
