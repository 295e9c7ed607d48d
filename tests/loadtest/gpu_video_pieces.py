"""Pieces of a run of the bench of video on a GPU, made up: nothing in them was measured."""

from pathlib import Path
from typing import Any

from loadtest.bench.gpu.video.clips import CAMERAS, FPS
from loadtest.bench.gpu.video.plan import BenchPiece, Folder

CONDITIONS = {
    "machine": "1 × NVIDIA H200, made up, 16 cores",
    "at": "2026-11-23 12:00 UTC",
    "versions": "Python 3.11",
    "gpu versions": "driver 580",
    "slo_p99_ms": "100",
    "command": "python -m loadtest.bench.gpu.video --out made-up",
    "model": "googlenet-torch-uint8-random (4 instances)",
    "programs": "4, 16 cameras a decode process, MPS on",
    "clip": "240 frames, 3.0 Mbit/s, no B-frames",
}


def window(streams: int, complaint: str = "") -> dict[str, Any]:
    """A try's figures."""
    cores = {"machine": 12.0, "decode process": 5.0, "video program": 3.0}
    return {
        "streams": streams,
        "complaint": complaint,
        "seconds": 7.0,
        "rate": streams * 30.0,
        "played": 1.0,
        "p50_ms": 12.0,
        "p99_ms": 150.0 if complaint else 40.0,
        "frames_a_batch": 20.0,
        "infer_ms_a_batch": 5.0,
        "rows": {"device": 100, "host": 0},
        "decode_processes": {"cpu": 0, "nvdec": 20},
        "cores": cores,
        "cpu_ms_a_frame": {kind: one / 9 for kind, one in cores.items()},
        "card": {"nvdec": 0.97 if complaint else 0.9, "sm": 0.5, "pcie_to_card_mb_s": 90.0, "pcie_to_host_mb_s": 60.0},
        "processes": [["decode process, pid 9", 0.4], ["video program, pid 7", 0.8]],
        "threads_by_name": [["video program: results", 1.9]],
        "threads": [["video program, pid 7, main thread", 0.6]],
    }


def made_up(out: Path, held: int = 320, rounds: int = 3) -> None:
    """Every part of every round."""
    folder = Folder(out)
    for number in range(1, rounds + 1):
        for name, camera in CAMERAS.items():
            best = {"processes": 8, "threads": 2, "rate": 332.0 * FPS, "cores": 2.0, "card": {"nvdec": 1.0}}
            folder.write(BenchPiece("nvdec", name, number), {"best": best, "tries": [best]}, CONDITIONS)
            count = held if name == "h264-720p" else camera.goal
            found = {"decoder": "nvdec", "held": count, "missed": count + 5, "alone_per_s": 332.0 * FPS, "took_s": 60.0}
            tries = [window(count), window(count + 5, "p99 150 ms")]
            folder.write(BenchPiece("streams", name, number), found | {"tries": tries}, CONDITIONS)
        ways = {"device": window(280), "host": window(280)}
        folder.write(BenchPiece("hand-over", "h264-720p", number), {"streams": 280, "ways": ways}, CONDITIONS)
        cpu = {"held": 64, "missed": 70, "tries": [window(64)], "machine_cores": 16}
        folder.write(BenchPiece("cpu", "h264-720p", number), cpu, CONDITIONS)
    side = {"cameras": 16, "largest_gap_s": 1.25, "median_gap_s": 1.0, "missing_frames": 0}
    fault = {"what": "a decode process is killed", "slowest_within_s": 0.1, "dropped": {}, "own": side}
    others = side | {"cameras": 144, "largest_gap_s": 0.04}
    folder.write(
        BenchPiece("faults", "h264-720p", 1), {"streams": 160, "faults": [fault | {"others": others}]}, CONDITIONS
    )
