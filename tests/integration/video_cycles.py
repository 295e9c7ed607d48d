"""Sources that come and go over the control API, and what the program holds meanwhile."""

import contextlib
import itertools
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

from tests.deepstream_pipeline.rtsp.rubbish import Rubbish, rubbish_server
from tests.integration.video_chaos import Program, program_at, settings_of, spot_clip
from tests.integration.video_runs import Place
from tests.support.ports import free_port
from tests.support.waiting import wait_for

MIB = 1 << 20
API_THREADS = 3  # of its calls, which live for as long as the program


@dataclass(frozen=True)
class Held:
    """What a program and its decode processes hold.

    memory_bytes: of all of them, program_bytes: of itself, both without what is shared with anybody (libraries, rings).
    series: lines of its metrics. rings: mapped by the program.
    """

    memory_bytes: int
    program_bytes: int
    threads: int
    descriptors: int
    processes: int
    rings: int
    series: int

    @property
    def counted(self) -> tuple[int, int, int, int]:
        """What must be the same again."""
        return self.threads, self.descriptors, self.processes, self.rings


def held_by(program: Program) -> Held:
    """At this moment; of a process that just goes, nothing."""
    family = program.family()
    threads = 0
    for each in family:
        with contextlib.suppress(psutil.NoSuchProcess):
            threads += each.num_threads()
    maps = f"/proc/{program.process.pid}/maps"
    with open(maps) as file:
        rings = sum("penstock-ring" in line for line in file)
    return Held(
        memory_bytes=sum(own_bytes(each.pid) for each in family),
        program_bytes=own_bytes(program.process.pid),
        threads=threads,
        descriptors=len(os.listdir(f"/proc/{program.process.pid}/fd")),
        processes=len(family),
        rings=rings,
        series=len(program.metrics().splitlines()),
    )


def own_bytes(pid: int) -> int:
    """Memory that belongs to no file, so that it does not depend on who else runs; 0 of a process that just goes."""
    return _rollup(pid, "Anonymous:")


def shared_bytes(pid: int) -> int:
    """Its part of the memory that it shares (rings, slabs): of all who share it together, all of it, once."""
    return _rollup(pid, "Pss_Shmem:")


def _rollup(pid: int, word: str) -> int:
    try:
        text = Path(f"/proc/{pid}/smaps_rollup").read_text()
    except OSError:
        return 0
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(word))


@contextlib.contextmanager
def cycling(place: Place, folder: Path) -> Iterator[tuple[Program, list[str]]]:
    """A program with one source that stays, and addresses of what may come and go: every second gives frames."""
    clip = spot_clip(folder / "spot.mp4")
    sources = [{"uri": str(clip), "camera_id": "stays", "loop": True, "realtime": True}]
    with rubbish_server(Rubbish.BYTES) as rubbish, program_at(place, folder / "run", settings_of(sources)) as program:
        program.wait_for_states({"stays": "running"})
        yield program, [str(clip), rubbish.url, str(clip), f"rtsp://127.0.0.1:{free_port()}/a"]


def settled(program: Program, *, looks: int = 2, timeout_s: float = 30.0) -> Held:
    """What it holds when what was taken out is gone: as soon as so many looks, a second apart, agree."""
    until = time.monotonic() + timeout_s
    seen = [held_by(program)]
    while len(seen) < looks:
        assert time.monotonic() < until, f"it does not settle within {timeout_s} s: {seen[-1]}"
        time.sleep(1.0)
        now = held_by(program)
        seen = [*seen, now] if now.counted == seen[-1].counted else [now]
    return seen[-1]


def expect_same(program: Program, before: Held, *, most_grown_bytes: int = 16 * MIB) -> None:
    """As before, soon; of the API's pool of threads a few may be there that were not needed then."""
    wait_for(lambda: _is_same(held_by(program), before), 20.0, lambda: (before, held_by(program)))
    grown = held_by(program).memory_bytes - before.memory_bytes
    assert grown < most_grown_bytes, f"{grown / MIB:.1f} MiB more"


def _is_same(now: Held, before: Held) -> bool:
    return (now.processes, now.rings, now.series) == (before.processes, before.rings, before.series) and (
        now.threads <= before.threads + API_THREADS and now.descriptors <= before.descriptors + 2
    )


def come_and_go(program: Program, uris: Sequence[str], cycles: int, *, at_once: int = 5, stays: str = "") -> None:
    """So many sources added and removed: every second as soon as it is added, the others once frames came. stays: one
    that must go on giving frames all the time."""
    numbers = iter(range(cycles))
    while batch := list(itertools.islice(numbers, at_once)):
        frames = program.stream(stays)["frames"] if stays else 0
        names = [f"cycle-{number}" for number in batch]
        for name, number in zip(names, batch, strict=True):
            row = {"uri": uris[number % len(uris)], "source_id": name, "is_loop": True, "is_realtime": True}
            answer = program.ask("POST", "/v1/streams", row)
            assert answer.status == 201, answer.body
        for name in names[::2]:
            assert program.ask("DELETE", f"/v1/streams/{name}").status == 204
        for name in names[1::2]:
            wait_for(lambda name=name: _is_seen(program, name), 30.0, program.reasons)  # type: ignore[misc]
            assert program.ask("DELETE", f"/v1/streams/{name}").status == 204
        wait_for(lambda: not set(names) & set(program.streams()), 30.0, program.reasons)  # noqa: B023
        if stays:
            wait_for(lambda: program.stream(stays)["frames"] > frames, 10.0, program.reasons)  # noqa: B023


def _is_seen(program: Program, name: str) -> bool:
    """Whether a frame of it came, or it failed, as some do."""
    row = program.stream(name)
    return bool(row["frames"]) or row["state"] in ("failed", "auth_failed", "reconnecting") or bool(row["reason"])
