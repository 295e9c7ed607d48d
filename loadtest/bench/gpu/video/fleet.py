"""Video programs with some streams between them: started, added to, taken from, looked at."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import yaml

from loadtest.bench.gpu.raw import CHECKOUT
from loadtest.bench.gpu.video.page import Page, joined, read_page
from loadtest.bench.gpu.video.verdict import shares
from loadtest.bench.wire import BadAnswer
from server.commands.video_engine import BOND

NAMING = Path(__file__).with_name("named_threads")
MOST_SOURCES = 200  # of a program
STOP_S, KILL_S, ASK_S, CHANGE_S, LOOK_S = 20.0, 10.0, 20.0, 15.0, 0.5
WARM_FRAMES = 8  # of each source, before anything is measured


def with_named_threads(environ: Mapping[str, str]) -> dict[str, str]:
    """An environment in which a Python tells the kernel its threads' names, so that a profile has them."""
    return {**environ, "PYTHONPATH": os.pathsep.join(filter(None, (str(NAMING), environ.get("PYTHONPATH", ""))))}


class NotAllThere(BadAnswer):
    """Some streams had no answer in the time that they got."""


@dataclass(frozen=True, slots=True)
class Setup:
    """What every program of a fleet is told. hand_over: auto, device, host. interval: frames not inferred between two.

    sections: more of the settings file, as YAML has them. results: a folder for objects.jsonl; None for no sink.
    """

    model: str
    clip: Path
    decoder: str
    programs: int
    hand_over: str = "auto"
    cameras_per_process: int = 16
    interval: int = 0
    sections: Mapping[str, Any] = field(default_factory=dict)
    results: Path | None = None

    def settings(self, ids: Sequence[str], port: int, program: int) -> dict[str, Any]:
        """A program's settings file."""
        said: dict[str, Any] = {
            "source": [self.source(source_id) for source_id in ids],
            "primary-gie": {"model": self.model, "interval": self.interval},
            "tracker": {"type": "bytetrack"},
            "gpu": {"cameras-per-process": self.cameras_per_process, "hand-over": self.hand_over},
            "api": {"port": port},
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
    page: Page


class Fleet:
    """A context: entered, every program is starting. Raises BadAnswer with a program's own last words."""

    def __init__(self, setup: Setup, work: Path, count: int) -> None:
        if count > MOST_SOURCES * setup.programs:
            raise BadAnswer(f"{count} streams need more than {setup.programs} programs of {MOST_SOURCES}: --programs")
        self.setup, self._work = setup, work
        self._number = 0
        self._programs = [_Program(setup, work, number) for number in range(setup.programs)]
        for program, share in zip(self._programs, shares(count, setup.programs), strict=False):
            program.ids = [self._new_id() for _ in range(share)]
        self._programs = [program for program in self._programs if program.ids]
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
        """Until every stream has answers; how long that took. Raises NotAllThere with how many have none."""
        began_s = time.monotonic()
        while True:
            answered = self.look(is_patient=True).page.answered
            cold = [source_id for source_id in self.ids if answered.get(source_id, 0) < WARM_FRAMES]
            if not cold:
                return time.monotonic() - began_s
            if time.monotonic() - began_s > timeout_s:
                raise NotAllThere(
                    f"{len(cold)} of {len(self.ids)} streams have no answers after {timeout_s:g} s, {cold[0]} among "
                    f"them; {self._words()}"
                )
            time.sleep(LOOK_S)

    def resize(self, count: int) -> None:
        """Streams are added or taken out until there are so many, the programs evenly filled. Raises BadAnswer."""
        wanted = [*shares(count, len(self._programs)), *[0] * len(self._programs)]
        list(self._pool.map(lambda pair: self._fill(*pair), zip(self._programs, wanted, strict=False)))

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

    def _fill(self, program: "_Program", count: int) -> None:
        for source_id in program.ids[count:]:
            program.ask("DELETE", f"/v1/streams/{source_id}")
        program.ids = program.ids[:count]
        while len(program.ids) < count:
            source_id = self._new_id()
            program.add(source_id, self.setup.clip)
            program.ids.append(source_id)

    def _new_id(self) -> str:
        self._number += 1
        return f"cam{self._number:04d}"

    def _words(self) -> str:
        return "; ".join(filter(None, (program.last_words() for program in self._programs)))[-800:] or "nothing is said"


class _Program:
    """`penstock video run` of a settings file, its log beside that."""

    process: subprocess.Popen[bytes]

    def __init__(self, setup: Setup, work: Path, number: int) -> None:
        self.ids: list[str] = []
        self._setup, self._number = setup, number
        self._file, self._log = work / f"program-{number}.yaml", work / f"program-{number}.log"

    def start(self) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        settings = self._setup.settings(self.ids, port, self._number)
        self._file.write_text(yaml.safe_dump(settings, sort_keys=False))
        bond = [sys.executable, "-m", BOND, str(os.getpid())]  # it ends with the bench, however that ends
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
                return Look(began_s, Page())
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
        request = urllib.request.Request(self._url + path, data=body, headers=head, method=method)
        with urllib.request.urlopen(request, timeout=ASK_S) as answer:
            return bytes(answer.read()).decode()

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
