"""A pipeline that is none: what the control API asks of one, kept in dicts."""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace

from penstock.gateway.auth.api_keys import ApiKey, digest_of
from penstock.gateway.auth.authenticator import Authenticator, AuthOptions
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.protocol.identity import ALL_ROLES, Role
from penstock_video.api.options import ApiOptions
from penstock_video.api.server import ApiServer
from penstock_video.errors import NotSetUp, RuleRefused, SourceExists, TooManySources, UnknownSource
from penstock_video.interfaces import FULL_VIEW, ProbedSource, SourceStatistics, View
from penstock_video.metrics import VideoMetrics
from penstock_video.source_ids import require_source_id
from penstock_video.types import SourceConfig, SourceState

JPEG = b"\xff\xd8\xff\xe0 not really a picture \xff\xd9"


class FakePipeline:
    """PipelineControl and Previews in one. before: called first by each of its calls, with the call's name."""

    def __init__(self, limit: int = 200) -> None:
        self._limit = limit
        self._lock = threading.Lock()
        self.reset()

    def reset(self) -> None:
        """As it was made."""
        self.sources: dict[str, SourceStatistics] = {}
        self.configs: dict[str, SourceConfig] = {}
        self.sections: dict[str, object] = {}
        self.recordings: list[tuple[str, float, float]] = []
        self.has_recorder = True
        self.healthy = True
        self.before: Callable[[str], None] = lambda _: None
        self.pictures = True
        self.picture_bytes = JPEG
        self.picture_interval_s = 0.02
        self.waits = 0
        self.probed: list[SourceConfig] = []
        self.views: list[View] = []
        self.max_wait_s = 60.0  # for a picture; less where it is known at once that none will come

    def add(self, source: SourceConfig) -> None:
        self.before("add")
        require_source_id(source.source_id)
        with self._lock:
            if source.source_id in self.sources:
                raise SourceExists(f"there is a source {source.source_id!r} already")
            if len(self.sources) >= self._limit:
                raise TooManySources(f"{self._limit} sources are there, the limit")
            self.configs[source.source_id] = source
            self.sources[source.source_id] = SourceStatistics(
                source.source_id, source.camera_name, source.uri, SourceState.CONNECTING
            )

    def remove(self, source_id: str) -> None:
        self.before("remove")
        with self._lock:
            self._known(source_id)
            del self.sources[source_id], self.configs[source_id]

    def probe(self, source: SourceConfig) -> ProbedSource:
        self.before("probe")
        self.probed.append(source)
        return ProbedSource(1280, 720, 25.0, "h264", True, None, JPEG)

    def config(self, source_id: str) -> SourceConfig:
        self._known(source_id)
        return self.configs[source_id]

    def change(self, source: SourceConfig) -> None:
        self.before("change")
        self._known(source.source_id)
        self.configs[source.source_id] = source

    def restart(self, source_id: str) -> None:
        self.before("restart")
        self.sources[source_id] = replace(self._known(source_id), state=SourceState.CONNECTING)

    def pause(self, source_id: str) -> None:
        self.before("pause")
        self.sources[source_id] = replace(self._known(source_id), state=SourceState.PAUSED)

    def resume(self, source_id: str) -> None:
        self.before("resume")
        self.sources[source_id] = replace(self._known(source_id), state=SourceState.RUNNING)

    def record(self, source_id: str, *, before_s: float, after_s: float) -> str:
        self.before("record")
        self._known(source_id)
        if not self.has_recorder:
            raise NotSetUp("no folder for recordings was given")
        self.recordings.append((source_id, before_s, after_s))
        return f"/recordings/{source_id}.mp4"

    def statistics(self) -> tuple[SourceStatistics, ...]:
        self.before("statistics")
        with self._lock:
            return tuple(self.sources.values())

    def source(self, source_id: str) -> SourceStatistics:
        self.before("source")
        with self._lock:
            return self._known(source_id)

    def rules(self, source_id: str) -> object:
        self.before("rules")
        self._known(source_id)
        return self.sections.get(source_id, {})

    def set_rules(self, source_id: str, section: object) -> None:
        self.before("set_rules")
        self._known(source_id)
        if isinstance(section, dict) and "line-crosing" in section:
            raise RuleRefused("analytics.line-crosing: there is no such rule; did you mean line-crossing?")
        self.sections[source_id] = section

    def is_healthy(self) -> bool:
        self.before("is_healthy")
        return self.healthy

    def wait(self, source_id: str, after: int, timeout_s: float, view: View = FULL_VIEW) -> tuple[int, bytes] | None:
        self.before("wait")
        self.views.append(view)
        self.waits += 1
        if not self.pictures or source_id not in self.sources:
            time.sleep(min(timeout_s, self.max_wait_s))
            return None
        if after >= 0:
            time.sleep(self.picture_interval_s)
        return after + 1, self.picture_bytes

    def _known(self, source_id: str) -> SourceStatistics:
        if source_id not in self.sources:
            raise UnknownSource(f"there is no source {source_id!r}")
        return self.sources[source_id]


def one_key(secret: str, *roles: Role, name: str = "api-key") -> Authenticator:
    """An access that knows this key. roles: all of them, unless given."""
    key = ApiKey(name, digest_of(secret), frozenset(roles) or ALL_ROLES)
    return Authenticator(AuthOptions(keys=(key,)), RateLimiter(max_requests=8, max_bytes=1 << 20))


@contextmanager
def serving(pipeline: FakePipeline, options: ApiOptions | None = None) -> Iterator[ApiServer]:
    """A server over the pipeline, on a port that is free, until the block ends."""
    server = ApiServer(pipeline, pipeline, VideoMetrics(), options or ApiOptions(port=0))
    server.start()
    try:
        yield server
    finally:
        server.stop(2.0)
