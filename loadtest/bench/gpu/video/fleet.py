"""A video program with many cameras as a child of the bench."""

import json
import os
import re
import signal
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import count as counting
from pathlib import Path
from typing import Any, Self

import yaml

from loadtest.bench.gpu.programs import CHECKOUT
from loadtest.bench.gpu.video.verdict import MetricsPage, joined, read_page, shares
from loadtest.bench.wire import BadAnswer
from penstock_video.cli.engine import UP_CHILD

DECODERS_FULL = "makes no more decoders"  # in the reason of a source that found none left on the card
WAITS = "waits for its turn at the card"  # in that of one that has not asked the card yet, or asks again
STILL_S = 12.0  # without another stream's first answers; decoders are made at 13 to 16 a second, one after another
FULL_STILL_S = 5.0  # the same, where the streams that are waited for found that the card has no decoder left
MOSTLY = 0.9  # of the streams that are waited for, so that it is what bounds their number
_REASON_CHARACTERS = 240


class NotAllThere(BadAnswer):
    """Some streams had no answers in time. answered: how many had. is_full: it was for want of decoders."""

    def __init__(self, words: str, answered: int = 0, waited_s: float = 0.0, *, is_full: bool = False) -> None:
        super().__init__(words)
        self.answered, self.waited_s, self.is_full = answered, waited_s, is_full


class StartTimeout:
    """Decides when to stop waiting for streams. progress: grows with every stream that starts, 0 before the first."""

    def __init__(self, now: float, timeout_s: float, still_s: float = STILL_S) -> None:
        self._began, self._moved, self._progress = now, now, 0
        self._timeout_s, self._still_s = timeout_s, still_s

    def see(self, now: float, progress: int) -> None:
        """What there is by now."""
        if progress > self._progress:
            self._moved, self._progress = now, progress

    def waited_s(self, now: float) -> float:
        """Since the begin."""
        return now - self._began

    def is_still(self, now: float) -> bool:
        """So long that it is worth asking why."""
        return now - self._moved > FULL_STILL_S

    def is_over(self, now: float, *, is_full: bool) -> bool:
        """Whether more waiting is of no use. Programs that still start, so that nothing is there, get all the time.

        is_full: every stream that is waited for found the card without a decoder left.
        """
        if is_full and self.is_still(now):
            return True
        is_stuck = self._progress > 0 and now - self._moved > self._still_s
        return is_stuck or now - self._began > self._timeout_s


def all_full(cold: Sequence[str], said: Mapping[str, str]) -> bool:
    """Whether none of these streams has another reason than that the card makes no more decoders: some found that, the
    others may still wait for their turn to find it. One that found it is enough: a single wrong refusal bounds all."""
    reasons = [said.get(one, "") for one in cold]
    return _found_full(reasons) and all(_is_of_full(reason) for reason in reasons)


def progressed(said: Mapping[str, str], now_said: Mapping[str, str]) -> dict[str, str]:
    """The last reason of each stream, but one that found no decoder, and waits to ask again, has found none."""
    again = {one for one, why in now_said.items() if WAITS in why and DECODERS_FULL in said.get(one, "")}
    return {**said, **{one: why for one, why in now_said.items() if one not in again}}


def not_all_there(cold: Sequence[str], count: int, said: Mapping[str, str], waited_s: float) -> NotAllThere | None:
    """Those of so many streams that have no answers, with the most frequent reason that they said: with both, where
    some found the card full and others wait for their turn. None without one."""
    reasons = Counter(_short(said[one]) for one in cold if said.get(one))
    if not reasons:
        return None
    full = {why: times for why, times in reasons.items() if _is_of_full(why)}
    is_full = _found_full(full) and sum(full.values()) >= MOSTLY * len(cold)
    named = Counter(full).most_common(2) if is_full else reasons.most_common(1)
    words = ", ".join(f"{times} × {why!r}" for why, times in named)
    return NotAllThere(
        f"{len(cold)} of {count} streams have no answers: {words}", count - len(cold), waited_s, is_full=is_full
    )


def _is_of_full(reason: str) -> bool:
    return DECODERS_FULL in reason or WAITS in reason


def _found_full(reasons: Iterable[str]) -> bool:
    return any(DECODERS_FULL in reason for reason in reasons)


def _short(reason: str) -> str:
    return reason if len(reason) <= _REASON_CHARACTERS else f"{reason[:_REASON_CHARACTERS]}…"


_API = re.compile(r"control API (http://[^;\s]+)")
NAMING = Path(__file__).with_name("named_threads")
MOST_SOURCES = 200  # of a program
STOP_S, KILL_S, ASK_S, CHANGE_S, LOOK_S = 20.0, 10.0, 20.0, 15.0, 0.5
WARM_FRAMES = 8  # of each source, before anything is measured


def with_named_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a Python tells the kernel its threads' names, so that a profile has them."""
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(NAMING), environ.get("PYTHONPATH", ""))))}


@dataclass(frozen=True, slots=True)
class FleetSetup:
    """Settings of each program of a fleet. hand_over: auto, device, host. interval: frames not inferred between two.

    sections: more of the settings file, as YAML has them. results: a folder for objects.jsonl; None for no sink.
    """

    model: str
    clip: Path
    decoder: str
    programs: int
    hand_over: str = "auto"
    cameras_per_process: int = 16
    has_pinned_processes: bool = True
    interval: int = 0
    sections: Mapping[str, Any] = field(default_factory=dict)
    results: Path | None = None

    def settings(self, ids: Sequence[str], program: int) -> dict[str, Any]:
        """A program's settings file."""
        said: dict[str, Any] = {
            "source": [self.source(source_id) for source_id in ids],
            "primary-gie": {"model": self.model, "interval": self.interval},
            "tracker": {"type": "bytetrack"},
            "gpu": {
                "cameras-per-process": self.cameras_per_process,
                "pin-processes": self.has_pinned_processes,
                "hand-over": self.hand_over,
            },
            "api": {"port": 0},  # a free one, which the log tells
            **self.sections,
        }
        if self.results is not None:
            said["sink"] = [{"type": "jsonl", "folder": str(self.results / str(program))}]
        return said

    def source(self, source_id: str) -> dict[str, Any]:
        """A camera: the clip again and again, at its own speed."""
        return {
            "uri": str(self.clip), "camera_id": source_id, "loop": True, "realtime": True, "decoder": self.decoder,
        }  # fmt: skip


@dataclass(frozen=True, slots=True)
class Look:
    """At all programs. at_s: of each, the middle of the time that its page took. page: of all together."""

    at_s: float
    page: MetricsPage


def cold_of(ids: Sequence[str], page: MetricsPage) -> list[str]:
    """Those that have not answered for some frames yet."""
    return [one for one in ids if page.answered.get(one, 0) < WARM_FRAMES]


class Fleet:
    """A context: entered, every program is starting. Raises BadAnswer with a program's own last words."""

    def __init__(self, setup: FleetSetup, work: Path, count: int) -> None:
        if count > MOST_SOURCES * setup.programs:
            raise BadAnswer(f"{count} streams need more than {setup.programs} programs of {MOST_SOURCES}: --programs")
        self.setup, self._work = setup, work
        self._numbers = counting(1)  # one thread a program takes of them
        self._programs = [_Program(setup, work, number) for number in range(setup.programs)]
        for program, share in zip(self._programs, shares(count, setup.programs), strict=False):
            program.ids = [self._new_id() for _ in range(share)]
        self._programs = [program for program in self._programs if program.ids]
        self._taken_out: set[str] = set()
        self._pool = ThreadPoolExecutor(max(len(self._programs), 1))

    def __enter__(self) -> Self:
        self._work.mkdir(parents=True, exist_ok=True)
        try:
            for program in self._programs:
                program.start()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for program in self._programs:
            program.tell_to_end()
        for program in self._programs:
            program.wait_for_end()
        self._pool.shutdown()

    @property
    def ids(self) -> list[str]:
        """Of the streams that there are now."""
        return [source_id for program in self._programs for source_id in program.ids]

    @property
    def pids(self) -> list[int]:
        """Of the programs."""
        return [program.process.pid for program in self._programs]

    def wait(self, timeout_s: float) -> float:
        """Until every stream has answers, and what was taken out is gone; how long that took. Raises NotAllThere with
        how many have none, and why.

        Early where no stream gets further: decoders of a card are made in turn. The CPU's streams all begin at once.
        """
        still_s = STILL_S if self.setup.decoder == "nvdec" else timeout_s
        timeouts, said = StartTimeout(time.monotonic(), timeout_s, still_s), dict[str, str]()
        while True:
            page, now, ids = self.look(is_patient=True).page, time.monotonic(), self.ids
            cold, leaving = cold_of(ids, page), self._taken_out & page.decoded.keys()
            waited_s, gone = timeouts.waited_s(now), len(self._taken_out) - len(leaving)
            timeouts.see(now, gone + sum(min(page.answered.get(one, 0), WARM_FRAMES) for one in ids))
            if not cold and (not leaving or timeouts.is_over(now, is_full=False)):
                return waited_s
            if timeouts.is_still(now):
                said = progressed(said, self._reasons())
            if timeouts.is_over(now, is_full=all_full(cold, said)):
                raise not_all_there(cold, len(ids), progressed(said, self._reasons()), waited_s) or NotAllThere(
                    f"{len(cold)} of {len(ids)} streams have no answers after {waited_s:.0f} s, {cold[0]} among them; "
                    f"{self._words()}",
                    len(ids) - len(cold), waited_s,
                )  # fmt: skip
            time.sleep(LOOK_S)

    def resize(self, count: int) -> None:
        """Streams are added or taken out until there are so many, the programs evenly filled. Raises BadAnswer.

        Where some are taken out, those without answers go first, of all programs, before a program gets others: they
        wait for what the others give back.
        """
        wanted = [*shares(count, len(self._programs)), *[0] * len(self._programs)]
        cold = cold_of(self.ids, self.look(is_patient=True).page) if count < len(self.ids) else []
        before = set(self.ids)
        for change in (self._empty, self._fill):
            list(self._pool.map(change, self._programs, wanted, [cold] * len(self._programs)))
        self._taken_out |= before.difference(self.ids)

    def add(self, source_id: str, uri: Path, program: int = 0) -> None:
        """One more, which is not counted among `ids`: what it does is the caller's matter."""
        self._programs[program].add(source_id, uri)

    def remove(self, source_id: str, program: int = 0) -> None:
        """What was added so."""
        self._programs[program].ask("DELETE", f"/v1/streams/{source_id}")

    def streams(self, program: int = 0) -> list[dict[str, Any]]:
        """What a program says of its sources."""
        found: list[dict[str, Any]] = json.loads(self._programs[program].ask("GET", "/v1/streams"))["streams"]
        return found

    def look(self, *, is_patient: bool = False) -> Look:
        """At all at once. is_patient: a program that does not answer yet has an empty page."""
        found = list(self._pool.map(lambda program: program.look(is_patient=is_patient), self._programs))
        return Look(sum(look.at_s for look in found) / len(found), joined(look.page for look in found))

    def _reasons(self) -> dict[str, str]:
        """By stream, of those that do not run and say why. A program that does not answer says nothing."""
        found: dict[str, str] = {}
        for program in range(len(self._programs)):
            with suppress(OSError, ValueError):
                listed = self.streams(program)
                found |= {
                    one["source_id"]: one["reason"] for one in listed if one["state"] != "running" and one["reason"]
                }
        return found

    @staticmethod
    def _empty(program: "_Program", count: int, cold: Collection[str]) -> None:
        kept = [one for one in program.ids if one not in cold][:count]
        for source_id in program.ids:
            if source_id not in kept:
                program.ask("DELETE", f"/v1/streams/{source_id}")
        program.ids = kept

    def _fill(self, program: "_Program", count: int, _: Collection[str]) -> None:
        while len(program.ids) < count:
            source_id = self._new_id()
            program.add(source_id, self.setup.clip)
            program.ids.append(source_id)

    def _new_id(self) -> str:
        return f"cam{next(self._numbers):04d}"

    def _words(self) -> str:
        return "; ".join(filter(None, (program.last_words() for program in self._programs)))[-800:] or "nothing is said"


class _Program:
    """`penstock video run` of a settings file, its log beside that."""

    process: subprocess.Popen[bytes]

    def __init__(self, setup: FleetSetup, work: Path, number: int) -> None:
        self.ids: list[str] = []
        self._url = ""
        self._setup, self._number = setup, number
        self._file, self._log = work / f"program-{number}.yaml", work / f"program-{number}.log"

    def start(self) -> None:
        settings = self._setup.settings(self.ids, self._number)
        self._file.write_text(yaml.safe_dump(settings, sort_keys=False))
        bond = [sys.executable, "-m", UP_CHILD, str(os.getpid())]  # it ends with the bench, however that ends
        command = [*bond, "video", "run", str(self._file), "--no-progress", "--log-level", "info"]
        with self._log.open("wb") as log:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=CHECKOUT, start_new_session=True,
                env=with_named_threads(os.environ),
            )  # fmt: skip

    def look(self, *, is_patient: bool) -> Look:
        began_s = time.monotonic()
        try:
            page = self.ask("GET", "/metrics")
        except OSError:
            if self.process.poll() is None and is_patient:
                return Look(began_s, MetricsPage())
            raise BadAnswer(f"penstock video run does not answer: {self.last_words()}") from None
        return Look((began_s + time.monotonic()) / 2, read_page(page))

    def add(self, source_id: str, uri: Path) -> None:
        camera = {
            "uri": str(uri), "source_id": source_id, "is_loop": True, "is_realtime": True,
            "decoder": self._setup.decoder,
        }  # fmt: skip
        self.ask("POST", "/v1/streams", json.dumps(camera).encode())

    def ask(self, method: str, path: str, body: bytes | None = None) -> str:
        head = {"content-type": "application/json"} if body else {}
        request = urllib.request.Request(self._address() + path, data=body, headers=head, method=method)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            return bytes(answer.read()).decode()

    def _address(self) -> str:
        """Raises OSError while the program has none yet."""
        if not self._url:
            found = _API.search(self._log.read_text(errors="replace"))
            if found is None:
                raise ConnectionRefusedError("the control API does not listen yet")
            self._url = found[1]
        return self._url

    def last_words(self) -> str:
        return self._log.read_text(errors="replace").strip()[-400:] if self._log.exists() else ""

    def tell_to_end(self) -> None:
        if hasattr(self, "process"):
            self.process.terminate()

    def wait_for_end(self) -> None:
        """In order, else by force, with all that it started."""
        if not hasattr(self, "process"):
            return
        try:
            self.process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait(KILL_S)
