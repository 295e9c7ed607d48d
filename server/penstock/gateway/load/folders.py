"""Folders of load test runs in PENSTOCK_HOME, one per run. The oldest are removed. Blocks: call it in a thread."""

import re
import secrets
import shutil
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import msgspec

from penstock.protocol.errors import LoadRunNotFound
from penstock.protocol.load_reports import LoadFigures, LoadProgress, LoadRun

FOLDER = "load-runs"
MAX_RUNS, MAX_BYTES = 50, 2 << 30
MAX_FILE_BYTES = 64 << 20  # largest report or result that is returned
MAX_PROGRESS_BYTES = 256 << 10  # per response: at least 500 lines
RUN_FILE, END_FILE, PROGRESS_FILE, SUMMARY_FILE = "request.json", "end.json", "progress.jsonl", "summary.json"
RESULT_FILE, REPORT_FILE = "run.json", "report.html"
_ID = re.compile(r"[a-z0-9-]{1,64}-\d{8}-\d{6}-[0-9a-f]{6}")
_PROGRESS = msgspec.json.Decoder(LoadProgress)


class RunEnd(msgspec.Struct, frozen=True):
    """How a run ended: end.json. state, error: of LoadRun."""

    state: str
    ended_at: str
    error: str = ""


@dataclass(frozen=True, slots=True)
class LoadFolders:
    """home: PENSTOCK_HOME."""

    home: Path

    @property
    def path(self) -> Path:
        return self.home / FOLDER

    def create(self, run: LoadRun) -> Path:
        """Creates the run's folder. Removes the oldest runs beyond the limits. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True, mode=0o700)
        self._remove_oldest()
        folder = self.path / run.id
        folder.mkdir(mode=0o700)
        (folder / RUN_FILE).write_bytes(msgspec.json.encode(run))
        return folder

    def folder(self, run_id: str) -> Path:
        """The folder of an earlier run. Raises LoadRunNotFound."""
        folder = self.path / run_id
        if not _ID.fullmatch(run_id) or not (folder / RUN_FILE).is_file():
            raise LoadRunNotFound(f"there is no load test run {run_id[:80]!r}; GET /v1/load/runs lists them")
        return folder

    def end(self, folder: Path, end: RunEnd) -> None:
        """Writes how the run ended. Raises OSError."""
        (folder / END_FILE).write_bytes(msgspec.json.encode(end))

    def outcome(self, folder: Path) -> str | None:
        """pass, fail or none; None for a run without a result."""
        figures = _figures(folder / SUMMARY_FILE)
        return None if figures is None else figures.outcome

    def read(self, folder: Path, running: str | None) -> LoadRun | None:
        """The run in that folder; None if its files cannot be read. running: ID of the run in progress."""
        try:
            run = msgspec.json.decode((folder / RUN_FILE).read_bytes(), type=LoadRun)
        except (OSError, msgspec.MsgspecError):
            return None
        if run.id == running:
            return run
        end = _end(folder / END_FILE) or RunEnd("interrupted", run.started_at, "the gateway ended meanwhile")
        return msgspec.structs.replace(
            run,
            state=end.state,
            ended_at=end.ended_at,
            error=end.error,
            has_report=(folder / REPORT_FILE).is_file(),
            figures=_figures(folder / SUMMARY_FILE),
        )

    def runs(self, running: str | None) -> tuple[LoadRun, ...]:
        """The runs, newest first."""
        found = [run for folder in self._folders() if (run := self.read(folder, running)) is not None]
        return tuple(sorted(found, key=lambda run: run.started_at, reverse=True))

    def progress(self, folder: Path, after: int) -> tuple[tuple[LoadProgress, ...], int]:
        """Lines of the progress file after this position, and the position after them."""
        try:
            with (folder / PROGRESS_FILE).open("rb") as file:
                file.seek(after)
                read = file.read(MAX_PROGRESS_BYTES)
        except OSError:
            return (), after
        whole = read[: read.rfind(b"\n") + 1]
        lines = []
        for line in whole.splitlines():
            with suppress(msgspec.MsgspecError):  # `after` lies within a line
                lines.append(_PROGRESS.decode(line))
        return tuple(lines), after + len(whole)

    def file(self, run_id: str, name: str) -> bytes:
        """A file of the run, at most MAX_FILE_BYTES. Raises LoadRunNotFound."""
        try:
            with (self.folder(run_id) / name).open("rb") as file:
                content = file.read(MAX_FILE_BYTES + 1)
        except OSError:
            raise LoadRunNotFound(f"the load test run {run_id[:80]!r} has no {name}") from None
        if len(content) > MAX_FILE_BYTES:
            raise LoadRunNotFound(f"{name} of the load test run {run_id[:80]!r} is larger than {MAX_FILE_BYTES} bytes")
        return content

    def _folders(self) -> list[Path]:
        try:
            return [folder for folder in self.path.iterdir() if _ID.fullmatch(folder.name) and folder.is_dir()]
        except OSError:
            return []

    def _remove_oldest(self) -> None:
        """Removes the oldest runs until one more fits the limits."""
        sized = sorted((_started(folder), _size_bytes(folder), folder) for folder in self._folders())
        total_bytes = sum(size_bytes for _, size_bytes, _ in sized)
        while sized and (len(sized) >= MAX_RUNS or total_bytes > MAX_BYTES):
            _, size_bytes, folder = sized.pop(0)
            total_bytes -= size_bytes
            shutil.rmtree(folder, ignore_errors=True)


def new_id(scenario: str, now: datetime) -> str:
    """A new ID. IDs of one scenario sort by time."""
    return f"{scenario}-{now.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"


def utc_now() -> datetime:
    """The current time in UTC."""
    return datetime.now(UTC)


def time_text(moment: datetime) -> str:
    """ISO 8601 with a resolution of one second."""
    return moment.isoformat(timespec="seconds")


def _started(folder: Path) -> str:
    """The timestamp in the ID."""
    return "-".join(folder.name.rsplit("-", 3)[1:])


def _size_bytes(folder: Path) -> int:
    total = 0
    for path in folder.iterdir():
        with suppress(OSError):
            total += path.lstat().st_size
    return total


def _end(path: Path) -> RunEnd | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=RunEnd)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None


def _figures(path: Path) -> LoadFigures | None:
    try:
        return msgspec.json.decode(path.read_bytes(), type=LoadFigures)
    except (OSError, msgspec.MsgspecError, UnicodeDecodeError):
        return None
