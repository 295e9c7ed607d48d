"""A run of `penstock video run` from its settings to its exit code."""

import os
import signal
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, TracebackType
from typing import NoReturn, Protocol, Self

from deepstream_pipeline.api.listening import check_address
from deepstream_pipeline.api.options import KEY_VARIABLE, ApiOptions, ApiRefused
from deepstream_pipeline.errors import ModelUnusable, PipelineError, RuleRefused, TooManySources
from deepstream_pipeline.infer.place import EnginePlace
from deepstream_pipeline.settings.complaints import Complaint, SettingsRefused
from deepstream_pipeline.settings.reading import is_endless
from deepstream_pipeline.settings.records import ApiSettings, VideoSettings
from deepstream_pipeline.types import SourceStatistics
from server.access.keys import LEAST_SECRET
from server.commands.terminal import fail, say_failure, table_console
from server.commands.video_complaints import refuse
from server.commands.video_engine import EngineUnavailable, share_card
from server.commands.video_results import move_earlier_aside, written_files
from server.commands.video_rows import FAILED
from server.commands.video_summary import (
    Summary,
    is_failed,
    say_summary,
    summary_record,
)
from server.commands.video_watch import QuietWatch, write_json
from server.local.core_keeper import kept_off_interrupts
from server.logs import get_logger

log = get_logger("video")
LOOK_S, GRACE_S = 0.25, 15.0
_STOPPED, _TERMINATED = 130, 143  # 128 + the signal's number, as shells have it
_WRONG_SETTINGS = (ModelUnusable, RuleRefused, TooManySources)


class RunningProgram(Protocol):
    """deepstream_pipeline.main.Program, as it is used here. Calls raise PipelineError, with a text for a person."""

    @property
    def api_url(self) -> str: ...

    def prepare(self) -> None:
        """All that the settings say of models holds; no file is touched yet."""
        ...

    def start(self) -> None: ...

    def statistics(self) -> tuple[SourceStatistics, ...]: ...

    def removed(self) -> tuple[SourceStatistics, ...]:
        """Sources that went while it ran."""
        ...

    def wait(self, timeout_s: float) -> bool:
        """Whether every source is over by then."""
        ...

    def sink_failures(self) -> tuple[str, ...]:
        """A sentence for each sink that failed."""
        ...

    def stop(self, grace_s: float) -> None:
        """What was decoded is finished, files are whole; returns when that is done."""
        ...


ProgramOf = Callable[[VideoSettings, EnginePlace], RunningProgram]
EngineOf = Callable[[], AbstractContextManager[EnginePlace]]


@dataclass(frozen=True, slots=True)
class Ended:
    """How the loop came to its end. stopped_by: the signal's number, 0 for the sources' own end. sink_failures: in
    sentences."""

    sources: tuple[SourceStatistics, ...]
    stopped_by: int = 0
    sink_failures: tuple[str, ...] = ()
    removed: tuple[SourceStatistics, ...] = ()


class Stopping:
    """Ctrl-C and SIGTERM, heard as `asked_by`.

    While the program runs (is_running) the first one asks for an orderly end; each other one raises KeyboardInterrupt.
    """

    def __init__(self) -> None:
        self.asked_by = 0
        self.is_running = False

    def __enter__(self) -> Self:
        self._before = {number: signal.signal(number, self._hear) for number in (signal.SIGINT, signal.SIGTERM)}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def _hear(self, number: int, frame: FrameType | None) -> None:
        is_first, self.asked_by = not self.asked_by, number
        if not (is_first and self.is_running):
            raise KeyboardInterrupt


def run_to_its_end(
    settings: VideoSettings, watch: QuietWatch, *, engine: EngineOf, program_of: ProgramOf, is_json: bool
) -> int:
    """The exit code: 0 all ended well, 1 a source, a sink or the engine failed, 2 the settings are wrong, 130 after
    Ctrl-C, 143 after SIGTERM."""
    if not settings.sources and not settings.api.is_enabled:
        return _nothing_to_do(settings, watch, is_json=is_json)
    stopping = Stopping()
    try:
        with stopping, kept_off_interrupts():
            ended = _run(settings, watch, stopping, engine=engine, program_of=program_of)
    except EngineUnavailable as error:
        for line in error.lines:
            sys.stderr.write(f"    {line}\n")
        _give_up(str(error), error.code, is_json=is_json)
    except SettingsRefused as refused:
        refuse(refused, as_json=is_json)
    except PipelineError as error:
        _give_up(error.message, 2 if isinstance(error, _WRONG_SETTINGS) else 1, is_json=is_json)
    except KeyboardInterrupt:
        cut = "at once: files that were being written may be cut short"
        end_at_once(f"stopped {cut if stopping.is_running else 'before the first frame'}", stopping.asked_by)
    summary = _summary(settings, ended, watch.seconds)
    if is_json:
        write_json(summary_record(summary))
    else:
        say_summary(summary, table_console())
    return summary.code


def end_at_once(sentence: str, stopped_by: int) -> NoReturn:
    """Says so and ends this process; its threads are not waited for, its children see their sockets close."""
    say_failure(sentence)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(_TERMINATED if stopped_by == signal.SIGTERM else _STOPPED)


def exit_code(sources: Sequence[SourceStatistics], stopped_by: int, *, has_lost: bool = False) -> int:
    """Of the whole command. SIGTERM is the ordinary end of what watches cameras, and cuts a file short.

    has_lost: a sink failed. Of a run that came to its own end the results should be whole.
    """
    if stopped_by == signal.SIGINT:
        return _STOPPED
    if any(map(is_failed, sources)) or (has_lost and not stopped_by):
        return 1
    has_cut_a_file = not sources or not all(source.is_live for source in sources)
    return _TERMINATED if stopped_by == signal.SIGTERM and has_cut_a_file else 0


def require_api_address(settings: ApiSettings, environ: Mapping[str, str]) -> None:
    """Raises PipelineError where the control API could not listen now: said before an engine takes half a minute."""
    if not settings.is_enabled:
        return
    try:
        options = ApiOptions.of(settings, environ)
    except ApiRefused as error:
        raise SettingsRefused([Complaint("api", error.message)]) from error
    check_address(options)
    if 0 < len(options.api_key) < LEAST_SECRET and not options.is_local:
        told = "the control API's key is short, and others can reach it: it can be guessed"
        log.warning(told, variable=KEY_VARIABLE, characters=len(options.api_key), needed=LEAST_SECRET)


def _run(
    settings: VideoSettings, watch: QuietWatch, stopping: Stopping, *, engine: EngineOf, program_of: ProgramOf
) -> Ended:
    require_api_address(settings.api, os.environ)
    with engine() as place:
        share_card(place, os.environ)
        program = program_of(settings, place)
        with watch:
            try:
                program.prepare()
                if not is_endless(settings):  # of cameras the lines go on
                    move_earlier_aside(result_folders(settings), watch.note)
                program.start()
                stopping.is_running = True
                watch.begin(_beginning(program, settings, place), _beginning_record(program, settings, place))
                return _looked_after(program, watch, stopping)
            except PipelineError:
                program.stop(0.0)
                raise
            except (OSError, SystemExit):  # nobody reads what it says (rich makes that an exit): files are still whole
                program.stop(GRACE_S)
                raise


def _looked_after(program: RunningProgram, watch: QuietWatch, stopping: Stopping) -> Ended:
    while not stopping.asked_by and not program.wait(LOOK_S):
        watch.show(program.statistics())
    before = program.statistics()
    watch.show(before)
    if stopping.asked_by:
        watch.note("stopping: what was decoded is finished; Ctrl-C again ends at once")
    program.stop(GRACE_S)
    after = _both(before, program.statistics())
    return Ended(after, stopping.asked_by, program.sink_failures(), program.removed())


def _beginning(program: RunningProgram, settings: VideoSettings, place: EnginePlace) -> str:
    waits = "" if settings.sources else "waits for sources over the "
    api = f"; {waits}control API {program.api_url}" if settings.api.is_enabled else ""
    lost = "" if settings.sinks else "; nothing is written: give --out FOLDER, --sink, or sinks in CONFIG.yaml"
    return f"{_sources_in_words(settings)}, model {settings.primary.model}, engine: {place.title}{api}{lost}"


def _beginning_record(program: RunningProgram, settings: VideoSettings, place: EnginePlace) -> dict[str, object]:
    """The same for programs."""
    return {
        "kind": "start",
        "sources": len(settings.sources),
        "elsewhere": settings.elsewhere,
        "model": settings.primary.model,
        "engine": place.title,
        "api_url": program.api_url,
    }


def _sources_in_words(settings: VideoSettings) -> str:
    count = len(settings.sources)
    elsewhere = f" ({settings.elsewhere} more on other shards than {settings.shard})" if settings.elsewhere else ""
    return f"{count} source{'s' * (count != 1)}{elsewhere}"


def _nothing_to_do(settings: VideoSettings, watch: QuietWatch, *, is_json: bool) -> int:
    """The exit code: a shard that none of the files belongs to is done."""
    watch.note(f"{_sources_in_words(settings)}: nothing to do, and without the control API nothing comes")
    if is_json:
        write_json(summary_record(_summary(settings, Ended(()), 0.0)))
    return 0


def _both(before: Sequence[SourceStatistics], after: Sequence[SourceStatistics]) -> tuple[SourceStatistics, ...]:
    """What is known at the end; a source that had failed before is not said to have ended well."""
    failed = {source.source_id: source for source in before if source.state in FAILED}
    known = tuple(failed.get(source.source_id, source) for source in after)
    return known or tuple(before)


def result_folders(settings: VideoSettings) -> tuple[Path, ...]:
    """Where its sinks write files."""
    folders = (getattr(sink, "folder", None) for sink in settings.sinks)
    return tuple(dict.fromkeys(folder for folder in folders if folder is not None))


def _summary(settings: VideoSettings, ended: Ended, seconds: float) -> Summary:
    folders = result_folders(settings)
    return Summary(
        sources=ended.sources,
        files=written_files(_outermost(folders), seconds),
        seconds=seconds,
        code=exit_code(ended.sources, ended.stopped_by, has_lost=bool(ended.sink_failures)),
        removed=ended.removed,
        is_stopped=bool(ended.stopped_by),
        sink_failures=ended.sink_failures,
    )


def _outermost(folders: Sequence[Path]) -> list[Path]:
    """Without those that lie in another of them."""
    return [folder for folder in folders if not any(other in folder.parents for other in folders)]


def _give_up(sentence: str, code: int, *, is_json: bool) -> NoReturn:
    if is_json:
        write_json({"kind": "summary", "exit_code": code, "error": sentence})
    fail(sentence, code=code)
