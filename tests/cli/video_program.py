"""A video program that decodes nothing: it says what a test tells it to say."""

import os
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from penstock_video.errors import PipelineError
from penstock_video.infer.options import EngineAddress
from penstock_video.interfaces import SourceStatistics
from penstock_video.settings.models import VideoSettings
from penstock_video.sinks.run_record import SourceRecord
from penstock_video.types import SourceState

PLACE = EngineAddress(None, "http://127.0.0.1:9", "127.0.0.1:10")


@dataclass
class FakeProgram:
    """Files end after `looks` looks; cameras never do. states: by source, instead of running. refusal: of start.
    fault: what prepare raises. gone: sources that were removed. seen: of the page."""

    settings: VideoSettings
    looks: int = 3
    look_s: float = 0.0
    frames_each: int = 100
    states: dict[str, tuple[SourceState, str]] = field(default_factory=dict)
    counts: dict[str, int] = field(default_factory=dict)
    events: dict[str, int] = field(default_factory=dict)
    gone: tuple[SourceStatistics, ...] = ()
    drops: dict[str, int] = field(default_factory=dict)
    refusal: str = ""
    fault: PipelineError | None = None
    failures: tuple[str, ...] = ()
    hangs_at_stop: bool = False
    api_url: str = "http://127.0.0.1:8010"
    seen: Mapping[str, SourceRecord] = field(default_factory=dict)
    looked: int = 0
    stopped: list[float] = field(default_factory=list)

    def prepare(self) -> None:
        if self.fault is not None:
            raise self.fault

    def start(self) -> None:
        if self.refusal:
            raise PipelineError(self.refusal)

    def wait(self, timeout_s: float) -> bool:
        time.sleep(self.look_s)
        self.looked += 1
        return self.looked >= self.looks

    def stop(self, grace_s: float) -> None:
        self.stopped.append(grace_s)
        while self.hangs_at_stop:
            time.sleep(0.05)
        if self.settings.out is not None:
            self.settings.out.mkdir(parents=True, exist_ok=True)
            (self.settings.out / "annotated.mp4").write_bytes(b"x" * 4096)

    def removed(self) -> tuple[SourceStatistics, ...]:
        return self.gone

    def records(self) -> Mapping[str, SourceRecord]:
        return self.seen

    def sink_failures(self) -> tuple[str, ...]:
        return self.failures

    def statistics(self) -> tuple[SourceStatistics, ...]:
        return tuple(self._of(source.config.source_id, source.config.uri) for source in self.settings.sources)

    def _of(self, source_id: str, uri: str) -> SourceStatistics:
        is_over = self.looked >= self.looks or bool(self.stopped)
        state, reason = self.states.get(source_id, (SourceState.ENDED if is_over else SourceState.RUNNING, ""))
        is_live = uri.startswith("rtsp:")
        known = SourceStatistics(
            source_id, "", "", state, reason, is_live=is_live, counts=self.counts, drops=self.drops, events=self.events
        )
        if state in (SourceState.CONNECTING, SourceState.FAILED, SourceState.AUTH_FAILED):
            return known
        done = min(self.looked * self.frames_each // self.looks, self.frames_each)
        total = None if is_live else self.frames_each
        return replace(known, fps=25.0, frames=done, frames_total=total, inferred=done, latency_s=0.041, active_s=4.0)


@contextmanager
def no_engine() -> Iterator[EngineAddress]:
    """The address of no engine."""
    yield PLACE


def main() -> None:
    """For eyes: `python -m tests.cli.video_program run …` is `penstock video run …` with the fake."""
    from penstock_video.cli import commands as video

    names = {
        "gate": (SourceState.AUTH_FAILED, "the camera wants another password"),
        "yard": (SourceState.RECONNECTING, "no frame for 10 s\x1b[31m; again in 4 s"),
        "lobby": (SourceState.CONNECTING, ""),
    }
    looks = int(os.environ.get("LOOKS", "40"))
    video.engine_for = lambda *_, **__: no_engine()  # type: ignore[assignment]
    video.program_of = lambda settings, place, api: FakeProgram(
        settings,
        looks=looks,
        look_s=0.25,
        frames_each=795,
        states={one.config.source_id: found for one in settings.sources if (found := names.get(_name(one.config.uri)))},
        counts={"line-crossing/Entry": 12, "line-crossing/Entry/person": 11, "line-crossing/Entry/car": 1},
        events={"line-crossing/Entry": 12, "line-crossing/Entry/person": 11, "line-crossing/Entry/car": 1},
        drops={"too_old": 3},
        hangs_at_stop=bool(os.environ.get("HANGS")),
    )
    video.app(sys.argv[1:], prog_name="penstock video")


def _name(uri: str) -> str:
    return Path(uri).name


if __name__ == "__main__":
    main()
