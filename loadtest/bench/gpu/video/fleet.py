"""Video programs with many cameras as children of the bench, and their metrics."""

import json
import os
import re
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count as counting
from pathlib import Path
from typing import Any, Self

import yaml

from loadtest.bench.child import Child
from loadtest.bench.wire import BadAnswer
from penstock.gateway.workers.running_stacks import UP_CHILD

# In the reason of a source that found no decoder left on the GPU, or whose GPU decodes as much as it can.
DECODERS_FULL, DECODERS_BUSY = "makes no more decoders", "the video decoders are full"
WAITS = "waits for its turn at the GPU"  # in that of one that has not asked the GPU yet, or asks again
STILL_S = 12.0  # without another stream's first answers; decoders are made at 13 to 16 a second, one after another
ASK_WHY_S = 5.0  # the same: then the sources' reasons are read
MOSTLY = 0.9  # of the streams without answers, so that it is what limits their number
MOST_SOURCES = 200  # of a program
ASK_S, LOOK_S = 20.0, 0.5
WARM_FRAMES = 8  # of each source, before anything is measured
PUSH_TIMEOUT_US = 15_000
_REASON_CHARACTERS = 240
_API = re.compile(r"control API (http://[^;\s]+)")
_SAMPLE = re.compile(r"^penstock_video_(\w+?)(?:\{(.*)\})? (\S+)$", re.MULTILINE)
_LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


@dataclass(frozen=True, slots=True)
class MetricsPage:
    """Samples of one program or several: by name, source and the one other label (reason, bound, decoder …)."""

    samples: dict[tuple[str, str, str], float] = field(default_factory=dict)

    def by_source(self, name: str) -> dict[str, float]:
        """Sums over the other label."""
        return self._sums(name, 1)

    def by_word(self, name: str) -> dict[str, float]:
        """Sums over the sources."""
        return self._sums(name, 2)

    def total(self, name: str) -> float:
        """Sum of all samples."""
        return sum(value for key, value in self.samples.items() if key[0] == name)

    def _sums(self, name: str, place: int) -> dict[str, float]:
        found: dict[str, float] = {}
        for key, value in self.samples.items():
            if key[0] == name:
                found[key[place]] = found.get(key[place], 0.0) + value
        return found


def read_page(text: str) -> MetricsPage:
    """Of one program."""
    samples: dict[tuple[str, str, str], float] = {}
    for name, labels, value in _SAMPLE.findall(text):
        words = dict(_LABEL.findall(labels))
        key = (name, words.pop("source", ""), next(iter(words.values()), ""))
        samples[key] = samples.get(key, 0.0) + float(value)
    return MetricsPage(samples)


def joined(pages: Sequence[MetricsPage]) -> MetricsPage:
    """Of several programs."""
    samples: dict[tuple[str, str, str], float] = {}
    for page in pages:
        for key, value in page.samples.items():
            samples[key] = samples.get(key, 0.0) + value
    return MetricsPage(samples)


def between(before: MetricsPage, after: MetricsPage) -> MetricsPage:
    """What was counted meanwhile, of the sources that are still there: a removed one takes its counts along."""
    return MetricsPage({key: value - before.samples.get(key, 0.0) for key, value in after.samples.items()})


@dataclass(frozen=True, slots=True)
class Look:
    """At all programs. at_s: mean moment of the reads, monotonic."""

    at_s: float
    page: MetricsPage


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """Settings of each program of a fleet."""

    model: str
    clip: Path
    decoder: str
    programs: int
    cameras_per_process: int = 24
    interval: int = 0  # frames between two inferred ones
    decoder_limit: float = 1.0  # from which on a program refuses streams; 1: none

    def settings(self, ids: Sequence[str]) -> dict[str, Any]:
        """A program's settings file. Each camera plays the clip again and again, at its own speed."""
        camera = {"uri": str(self.clip), "loop": True, "realtime": True, "decoder": self.decoder}
        return {
            "source": [camera | {"camera_id": source_id} for source_id in ids],
            "primary-gie": {"model": self.model, "interval": self.interval},
            "tracker": {"type": "bytetrack"},
            "gpu": {
                "cameras-per-process": self.cameras_per_process,
                "pin-processes": True,
                "decoder-limit": self.decoder_limit,
            },
            "streammux": {"batched-push-timeout": PUSH_TIMEOUT_US},
            "api": {"port": 0},  # a free one, which the log names
        }


class NotAllThere(BadAnswer):
    """Some streams had no answers in time. answered: how many had. is_full: the GPU had no decoders for the others."""

    def __init__(self, text: str, answered: int = 0, waited_s: float = 0.0, *, is_full: bool = False) -> None:
        super().__init__(text)
        self.answered, self.waited_s, self.is_full = answered, waited_s, is_full


def not_all_there(cold: Sequence[str], count: int, reasons: dict[str, str], waited_s: float) -> NotAllThere:
    """cold: those of count streams without answers. The message has the most frequent reasons of these."""
    known = Counter(reasons[one][:_REASON_CHARACTERS] for one in cold if reasons.get(one))
    refused = (DECODERS_FULL, DECODERS_BUSY)
    full = Counter({why: n for why, n in known.items() if any(one in why for one in (*refused, WAITS))})
    is_full = any(one in why for why in full for one in refused) and full.total() >= MOSTLY * len(cold)
    text = ", ".join(f"{n} × {why!r}" for why, n in (full if is_full else known).most_common(2))
    return NotAllThere(
        f"{len(cold)} of {count} streams have no answers: {text or 'no reason is known'}",
        count - len(cold), waited_s, is_full=is_full,
    )  # fmt: skip


class Fleet:
    """A context: entered, every program is starting. Raises BadAnswer with the end of a program's log."""

    def __init__(self, setup: FleetSetup, work: Path, count: int) -> None:
        if count > MOST_SOURCES * setup.programs:
            raise BadAnswer(f"{count} streams need more than {setup.programs} programs of {MOST_SOURCES}: --programs")
        self.setup, self._work = setup, work
        self._numbers = counting(1)  # one thread a program takes of them
        self._shares = shares(count, setup.programs)
        self._programs: list[_Program] = []
        self._removed: set[str] = set()
        self._reasons: dict[str, str] = {}
        self._pool = ThreadPoolExecutor(max(len(self._shares), 1))

    def __enter__(self) -> Self:
        self._work.mkdir(parents=True, exist_ok=True)
        try:
            for number, share in enumerate(self._shares):
                ids = [self._new_id() for _ in range(share)]
                self._programs.append(_Program(self.setup, self._work / f"program-{number}", ids))
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        list(self._pool.map(lambda program: program.child.end(), self._programs))
        self._pool.shutdown()

    @property
    def ids(self) -> list[str]:
        """Of the present streams."""
        return [source_id for program in self._programs for source_id in program.ids]

    @property
    def pids(self) -> list[int]:
        """Of the programs."""
        return [program.child.process.pid for program in self._programs]

    def wait(self, timeout_s: float) -> float:
        """Until every stream has answers and removed ones are gone; how long that took. Raises NotAllThere.

        It ends early if no stream makes progress: decoders of a GPU are made in turn. The CPU's streams begin at once.
        """
        began_s = moved_s = time.monotonic()
        most, still_s = 0.0, STILL_S if self.setup.decoder == "nvdec" else timeout_s
        while True:
            page, now, ids = self.look(is_patient=True).page, time.monotonic(), self.ids
            answered = page.by_source("inferred_total")
            cold = [one for one in ids if answered.get(one, 0) < WARM_FRAMES]
            gone = len(self._removed - page.by_source("frames_total").keys())
            progress = gone + sum(min(answered.get(one, 0), WARM_FRAMES) for one in ids)
            if progress > most:
                most, moved_s = progress, now
            is_over = now - began_s > timeout_s or (most > 0 and now - moved_s > still_s)
            if not cold and (gone == len(self._removed) or is_over):
                return now - began_s
            if now - moved_s > ASK_WHY_S:
                self._ask_reasons()
            if is_over:
                raise not_all_there(cold, len(ids), self._reasons, now - began_s)
            time.sleep(LOOK_S)

    def resize(self, count: int) -> None:
        """Adds or removes streams, the programs evenly filled. Raises BadAnswer.

        Streams without answers are removed first, of all programs, before a program gets others: they wait for
        decoders that the others free.
        """
        wanted = [*shares(count, len(self._programs)), *[0] * len(self._programs)]
        answered = self.look(is_patient=True).page.by_source("inferred_total")
        cold = [one for one in self.ids if answered.get(one, 0) < WARM_FRAMES] if count < len(self.ids) else []
        before = set(self.ids)
        list(self._pool.map(lambda program, n: program.shrink(n, cold), self._programs, wanted))
        list(self._pool.map(lambda program, n: program.fill(n, self._new_id), self._programs, wanted))
        self._removed |= before.difference(self.ids)

    def look(self, *, is_patient: bool = False) -> Look:
        """At all at once. is_patient: a program that does not answer yet has an empty page."""
        found = list(self._pool.map(lambda program: program.look(is_patient=is_patient), self._programs))
        return Look(sum(look.at_s for look in found) / len(found), joined([look.page for look in found]))

    def _ask_reasons(self) -> None:
        """Of streams that do not run. One that found no decoder, and waits to ask again, keeps that reason."""
        for program in self._programs:
            with suppress(OSError, ValueError):
                for one in json.loads(program.ask("GET", "/v1/streams"))["streams"]:
                    if one["state"] != "running" and one["reason"]:
                        if WAITS in one["reason"]:
                            self._reasons.setdefault(one["source_id"], one["reason"])
                        else:
                            self._reasons[one["source_id"]] = one["reason"]

    def _new_id(self) -> str:
        return f"cam{next(self._numbers):04d}"


class _Program:
    """`penstock video run` of a settings file, its log beside that. It is starting."""

    def __init__(self, setup: FleetSetup, place: Path, ids: list[str]) -> None:
        self.ids, self._setup, self._url = ids, setup, ""
        settings = place.with_suffix(".yaml")
        settings.write_text(yaml.safe_dump(setup.settings(ids), sort_keys=False))
        bond = [sys.executable, "-m", UP_CHILD, str(os.getpid())]  # it ends with the bench, however that ends
        command = [*bond, "video", "run", str(settings), "--no-progress", "--log-level", "info"]
        self.child = Child("penstock video run", command, place.with_suffix(".log"))

    def look(self, *, is_patient: bool) -> Look:
        began_s = time.monotonic()
        try:
            page = read_page(self.ask("GET", "/metrics"))
        except OSError:
            if self.child.process.poll() is not None or not is_patient:
                raise self.child.failure("does not answer") from None
            page = MetricsPage()
        return Look((began_s + time.monotonic()) / 2, page)

    def shrink(self, count: int, cold: Collection[str]) -> None:
        kept = [one for one in self.ids if one not in cold][:count]
        for source_id in self.ids:
            if source_id not in kept:
                self.ask("DELETE", f"/v1/streams/{source_id}")
        self.ids = kept

    def fill(self, count: int, new_id: Callable[[], str]) -> None:
        while len(self.ids) < count:
            source_id = new_id()
            camera = {
                "uri": str(self._setup.clip), "source_id": source_id, "is_loop": True, "is_realtime": True,
                "decoder": self._setup.decoder,
            }  # fmt: skip
            self.ask("POST", "/v1/streams", json.dumps(camera).encode())
            self.ids.append(source_id)

    def ask(self, method: str, path: str, body: bytes | None = None) -> str:
        """Raises OSError, also while the program has no address yet."""
        if not self._url:
            found = _API.search(self.child.text())
            if found is None:
                raise ConnectionRefusedError("the control API does not listen yet")
            self._url = found[1]
        head = {"content-type": "application/json"} if body else {}
        request = urllib.request.Request(self._url + path, data=body, headers=head, method=method)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            return bytes(answer.read()).decode()


def shares(count: int, programs: int) -> tuple[int, ...]:
    """That many streams over the programs, as evenly as possible; programs without a stream are left out."""
    each, more = divmod(count, programs)
    return tuple(each + (number < more) for number in range(programs) if each + (number < more))
