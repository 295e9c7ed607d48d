"""`penstock video run`, from its settings to its exit code."""

import errno
import math
import os
import signal
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn, Self

from penstock.cli.terminal import fail, print_failure, table_console
from penstock.gateway.workers.interrupt_affinity import avoid_interrupted_cores
from penstock.logs import get_logger
from penstock_video.api.options import ApiOptions, ApiParts, ApiRefused, check_address
from penstock_video.cli.engine import EngineUnavailable, share_card
from penstock_video.cli.progress import QuietWatch, refuse_settings, write_json
from penstock_video.cli.summary import (
    Summary,
    is_failed,
    move_earlier_aside,
    say_summary,
    summary_record,
    write_whole,
    written_files,
)
from penstock_video.cli.table import FAILED
from penstock_video.errors import ModelUnusable, PipelineError, RuleRefused, TooManySources
from penstock_video.infer.options import EngineAddress
from penstock_video.interfaces import SourceStatistics
from penstock_video.settings.document import InvalidSettings, SettingsFault
from penstock_video.settings.loader import is_endless
from penstock_video.settings.models import ApiSettings, VideoSettings
from penstock_video.sinks.registry import SINKS, kind_of
from penstock_video.store.database import move_store_aside

if TYPE_CHECKING:
    from penstock_video.main import Program
    from penstock_video.sinks.run_record import SourceRecord

log = get_logger("video")
LOOK_S, GRACE_S = 0.25, 15.0
_STOPPED, _TERMINATED = 130, 143  # 128 + the signal's number, as shells have it
_WRONG_SETTINGS = (ModelUnusable, RuleRefused, TooManySources)


ProgramOf = Callable[[VideoSettings, EngineAddress], "Program"]
EngineOf = Callable[[], AbstractContextManager[EngineAddress]]


@dataclass(frozen=True, slots=True)
class RunParts:
    """engine: runs the engine. program_of: creates the program. api: parts of the control API. ends_with_sources:
    otherwise it runs until it is stopped, for sources that clients add."""

    engine: EngineOf
    program_of: ProgramOf
    api: ApiParts
    ends_with_sources: bool = True


@dataclass(frozen=True, slots=True)
class RunEnd:
    """How the run ended. stopped_by: the signal's number, 0 if the sources ended. sink_failures: sentences.
    records: by source, for the page of the run. engine: its title. earlier: of Summary."""

    sources: tuple[SourceStatistics, ...]
    stopped_by: int = 0
    sink_failures: tuple[str, ...] = ()
    removed: tuple[SourceStatistics, ...] = ()
    records: Mapping[str, "SourceRecord"] = field(default_factory=dict)
    engine: str = ""
    earlier: tuple[Path, ...] = ()


class Stopping:
    """Ctrl-C and SIGTERM, stored in `stop_signal`.

    While the program runs (is_running) the first one requests an orderly end; each other one raises KeyboardInterrupt.
    duration_s: after this time the program ends by itself; None for no limit.
    """

    def __init__(self, duration_s: float | None = None, *, ends_with_sources: bool = True) -> None:
        self.ends_with_sources = ends_with_sources
        self.duration_s = math.inf if duration_s is None else duration_s
        self.stop_signal = 0
        self.is_running = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_first, self.stop_signal = not self.stop_signal, number
        if not (is_first and self.is_running):
            raise KeyboardInterrupt


def run_to_its_end(
    settings: VideoSettings, watch: QuietWatch, parts: RunParts, *, is_json: bool, duration_s: float | None = None
) -> int:
    """The exit code: 0 success, 1 a source, a sink or the engine failed, 2 wrong settings, 130 after Ctrl-C, 143 after
    SIGTERM. duration_s: after this time the run ends as if its sources had ended."""
    if not settings.sources and not settings.api.is_enabled:
        return _nothing_to_do(settings, watch, is_json=is_json)
    stopping = Stopping(duration_s, ends_with_sources=parts.ends_with_sources)
    try:
        with stopping, avoid_interrupted_cores():
            ended = _run(settings, watch, stopping, parts)
    except EngineUnavailable as error:
        for line in error.lines:
            sys.stderr.write(f"    {line}\n")
        _give_up(str(error), error.code, is_json=is_json)
    except InvalidSettings as refused:
        refuse_settings(refused, as_json=is_json)
    except PipelineError as error:
        _give_up(error.message, 2 if isinstance(error, _WRONG_SETTINGS) else 1, is_json=is_json)
    except KeyboardInterrupt:
        cut = "at once: files that were being written may be cut short"
        end_at_once(f"stopped {cut if stopping.is_running else 'before the first frame'}", stopping.stop_signal)
    summary = _with_page(_summary(settings, ended, watch.seconds), settings, ended)
    if is_json:
        write_json(summary_record(summary))
    else:
        say_summary(summary, table_console())
    return summary.code


def end_at_once(sentence: str, stopped_by: int) -> NoReturn:
    """Logs and ends this process without waiting for threads; its children see their sockets close."""
    print_failure(sentence)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_TERMINATED if stopped_by == signal.SIGTERM else _STOPPED)


def exit_code(sources: Sequence[SourceStatistics], stopped_by: int, *, has_lost: bool = False) -> int:
    """The command's exit code. SIGTERM is the normal end for cameras, and cuts a file short.

    has_lost: a sink failed, so a run that ended by itself is incomplete.
    """
    if stopped_by == signal.SIGINT:
        return _STOPPED
    if any(map(is_failed, sources)) or (has_lost and not stopped_by):
        return 1
    has_cut_a_file = not sources or not all(source.is_live for source in sources)
    return _TERMINATED if stopped_by == signal.SIGTERM and has_cut_a_file else 0


def _with_free_port(settings: VideoSettings, watch: QuietWatch, parts: ApiParts) -> VideoSettings:
    """The settings; with port 0 if the API's default port is in use. Raises PipelineError if it cannot be bound."""
    try:
        require_api_address(settings.api, parts)
    except ApiRefused as error:
        is_in_use = isinstance(error.__cause__, OSError) and error.__cause__.errno == errno.EADDRINUSE
        if settings.is_api_port_given or not is_in_use:
            raise
        watch.note(f"port {settings.api.port} is in use, so the control API gets a free one; --api-port chooses one")
        return replace(settings, api=replace(settings.api, port=0))
    return settings


def require_api_address(settings: ApiSettings, parts: ApiParts) -> None:
    """Raises PipelineError if the API's address cannot be bound, before the engine starts."""
    if not settings.is_enabled:
        return
    try:
        options = ApiOptions.of(settings, parts)
    except ApiRefused as error:
        raise InvalidSettings([SettingsFault("api", error.message)]) from error
    check_address(options)


def _run(settings: VideoSettings, watch: QuietWatch, stopping: Stopping, parts: RunParts) -> RunEnd:
    settings = _with_free_port(settings, watch, parts.api)
    with parts.engine() as place:
        share_card(place, os.environ)
        program = parts.program_of(settings, place)
        with watch:
            try:
                program.prepare()
                earlier: tuple[Path, ...] = ()
                if not is_endless(settings):  # of cameras the lines go on
                    sources = [source.config for source in settings.sources]
                    earlier = move_earlier_aside(result_folders(settings), sources, watch.note)
                    _move_store_aside(settings, watch)
                program.start()
                stopping.is_running = True
                watch.begin(_beginning(program, settings, place), _beginning_record(program, settings, place))
                return replace(_looked_after(program, watch, stopping, place.title), earlier=earlier)
            except PipelineError:
                program.stop(0.0)
                raise
            except (OSError, SystemExit):  # its output is closed (rich makes that an exit): files are still completed
                program.stop(GRACE_S)
                raise


def _looked_after(program: "Program", watch: QuietWatch, stopping: Stopping, engine: str) -> RunEnd:
    until = watch.seconds + stopping.duration_s
    while not stopping.stop_signal and (left_s := until - watch.seconds) > 0:
        if program.wait(min(LOOK_S, left_s)):
            if stopping.ends_with_sources:
                break
            time.sleep(min(LOOK_S, left_s))
        watch.show(program.statistics())
    before = program.statistics()
    watch.show(before)
    if stopping.stop_signal:
        watch.note("stopping: what was decoded is finished; Ctrl-C again ends at once")
    program.stop(GRACE_S)
    after = _both(before, program.statistics())
    failures, removed = program.sink_failures(), program.removed()
    return RunEnd(after, stopping.stop_signal, failures, removed, program.records(), engine)


def _beginning(program: "Program", settings: VideoSettings, place: EngineAddress) -> str:
    waits = "" if settings.sources else "waits for sources over the "
    api = f"; {waits}control API {program.api_url}" if settings.api.is_enabled else ""
    kept = "nothing is written" if settings.events is None else f"only events are stored, in {settings.events.folder}"
    lost = "" if settings.sinks else f"; {kept}: give --out FOLDER, --sink, or sinks in CONFIG.yaml"
    return f"{_sources_text(settings)}, model {settings.primary.model}, engine: {place.title}{api}{lost}"


def _beginning_record(program: "Program", settings: VideoSettings, place: EngineAddress) -> dict[str, object]:
    """The JSON record of the start."""
    return {
        "kind": "start",
        "sources": len(settings.sources),
        "elsewhere": settings.elsewhere,
        "model": settings.primary.model,
        "engine": place.title,
        "api_url": program.api_url,
    }


def _move_store_aside(settings: VideoSettings, watch: QuietWatch) -> None:
    """Renames the store of an earlier run in the output folder. A store given by --events-folder is shared by runs."""
    if settings.out is None or settings.events is None or settings.events.folder != settings.out / "events":
        return
    moved = move_store_aside(settings.events.folder)
    if moved is not None:
        watch.note(f"the events of an earlier run are now in {moved}")


def _sources_text(settings: VideoSettings) -> str:
    count = len(settings.sources)
    elsewhere = f" ({settings.elsewhere} more on other shards than {settings.shard})" if settings.elsewhere else ""
    return f"{count} source{'s' * (count != 1)}{elsewhere}"


def _nothing_to_do(settings: VideoSettings, watch: QuietWatch, *, is_json: bool) -> int:
    """The exit code for a shard without sources."""
    watch.note(f"{_sources_text(settings)}: nothing to do, and without the control API nothing comes")
    if is_json:
        write_json(summary_record(_summary(settings, RunEnd(()), 0.0)))
    return 0


def _both(before: Sequence[SourceStatistics], after: Sequence[SourceStatistics]) -> tuple[SourceStatistics, ...]:
    """Final statistics: a source that failed earlier did not succeed."""
    failed = {source.source_id: source for source in before if source.state in FAILED}
    known = tuple(failed.get(source.source_id, source) for source in after)
    return known or tuple(before)


def result_folders(settings: VideoSettings) -> tuple[Path, ...]:
    """Folders of the file sinks."""
    folders = (getattr(sink, "folder", None) for sink in settings.sinks)
    return tuple(dict.fromkeys(folder for folder in folders if folder is not None))


def _summary(settings: VideoSettings, ended: RunEnd, seconds: float) -> Summary:
    return Summary(
        sources=ended.sources,
        files=written_files(_outermost(result_folders(settings)), seconds),
        seconds=seconds,
        code=exit_code(ended.sources, ended.stopped_by, has_lost=bool(ended.sink_failures)),
        removed=ended.removed,
        is_stopped=bool(ended.stopped_by),
        sink_failures=ended.sink_failures,
        earlier=ended.earlier,
    )


def _with_page(summary: Summary, settings: VideoSettings, ended: RunEnd) -> Summary:
    """Writes summary.html if the sink `summary` is set. Returns the summary with this file added."""
    pages = (getattr(sink, "folder", None) for sink in settings.sinks if kind_of(sink) is SINKS["summary"])
    folder: Path | None = next(pages, None)
    if folder is None:
        return summary
    from penstock_video.cli.run_page import SUMMARY_FILE, run_page  # OpenCV

    path = folder / SUMMARY_FILE
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(path, run_page(summary, ended.records, settings, ended.engine, time.time()))
    except OSError as error:
        text = f"summary failed: {path}: {error.strerror or error}"
        return replace(summary, sink_failures=(*summary.sink_failures, text), code=summary.code or 1)
    return replace(summary, files=written_files(_outermost(result_folders(settings)), summary.seconds))


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Without folders inside other ones."""
    return [folder for folder in folders if not any(other in folder.parents for other in folders)]


def _give_up(sentence: str, code: int, *, is_json: bool) -> NoReturn:
    if is_json:
        write_json({"kind": "summary", "exit_code": code, "error": sentence})
    fail(sentence, code=code)
