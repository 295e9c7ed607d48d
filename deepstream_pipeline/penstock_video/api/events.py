"""Routes of the event store: events with snapshot and clip, tracks, exports; occupancy, positions and counters."""

import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from stat import S_ISREG
from typing import Annotated, TypeVar

from fastapi import APIRouter, Path, Query
from starlette.responses import FileResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock_video.api.calls import Calls, Refusal
from penstock_video.api.event_models import (
    Counters,
    Event,
    Events,
    HeatAnswer,
    OccupancyAnswer,
    OccupancyPoint,
    OccupancySeries,
    RuleCounter,
    TrackedObject,
    TrackedObjects,
)
from penstock_video.api.models import EventExport, EventQuery, SeriesQuery, TimeRange, TrackQuery, cursor
from penstock_video.api.routes import SourceId
from penstock_video.errors import NotSetUp, UnknownSource
from penstock_video.interfaces import PipelineControl
from penstock_video.sinks.schemas import iso_time
from penstock_video.store.export import EVENT_COLUMNS, PARQUET_ADVICE, csv_parts, has_parquet, parquet_parts
from penstock_video.store.reader import EventArchive, pages
from penstock_video.store.records import GRID_HEIGHT, GRID_WIDTH, RuleCount, SourceTimes, StoredEvent
from penstock_video.types import AnalyticsKind

MAX_EXPORTS = 2  # concurrent
MAX_POINTS = 1_500  # per series
STEPS_S = (60, 300, 900, 3600, 21_600, 86_400)
_DAY_S = 86_400.0
_OFF = "this run stores no events; start it without `--events off`"
_JPEG: dict[int | str, dict[str, object]] = {200: {"content": {"image/jpeg": {}}}}
_MP4: dict[int | str, dict[str, object]] = {200: {"content": {"video/mp4": {}}}, 206: {"content": {"video/mp4": {}}}}
_CSV: dict[int | str, dict[str, object]] = {200: {"content": {"text/csv": {}}}}
_PARQUET: dict[int | str, dict[str, object]] = {200: {"content": {"application/vnd.apache.parquet": {}}}}
EventId = Annotated[int, Path(ge=1, le=2**63 - 1)]
T = TypeVar("T")


class _Store:
    """The archive; every call is 409 if there is none."""

    def __init__(self, archive: EventArchive | None, calls: Calls) -> None:
        self._archive, self.calls = archive, calls
        self.exports = 0

    @property
    def archive(self) -> EventArchive:
        if self._archive is None:
            raise NotSetUp(_OFF)
        return self._archive

    async def ask(self, question: Callable[[EventArchive], T]) -> T:
        """Runs a read in a thread and returns its result."""
        archive = self.archive
        return await self.calls.run(lambda: question(archive))

    async def event(self, event_id: int) -> StoredEvent:
        """Raises Refusal (404)."""
        found = await self.ask(lambda archive: archive.reader.event(event_id))
        if found is None:
            raise Refusal(404, f"no event {event_id}; old events are removed (--events-max-days, --events-max-bytes)")
        return found


def events_router(archive: EventArchive | None, calls: Calls) -> APIRouter:
    """/v1/events and /v1/tracks. calls: a separate limit for these routes."""
    router, store = APIRouter(prefix="/v1", tags=["events"]), _Store(archive, calls)

    @router.get("/events", summary="Events, newest first.")
    async def list_events(query: Annotated[EventQuery, Query()]) -> Events:
        found = await store.ask(lambda archive: archive.reader.events(query.filter(query.limit, query.after)))
        is_last = len(found) < query.limit
        after = None if is_last else cursor(found[-1].unix_s, found[-1].id)
        return Events(events=[Event.of(one) for one in found], next=after, alarm=store.archive.alarm())

    @router.get("/events.csv", response_class=Response, responses=_CSV, summary="Events as CSV, newest first.")
    async def events_csv(query: Annotated[EventExport, Query()]) -> Response:
        return await _export(store, query, csv_parts, "text/csv; charset=utf-8", "events.csv")

    @router.get("/events.parquet", response_class=Response, responses=_PARQUET, summary="Events as Parquet.")
    async def events_parquet(query: Annotated[EventExport, Query()]) -> Response:
        if not has_parquet():
            raise Refusal(501, PARQUET_ADVICE)
        return await _export(store, query, parquet_parts, "application/vnd.apache.parquet", "events.parquet")

    @router.get("/tracks", summary="Tracked objects, latest start first.")
    async def list_tracks(query: Annotated[TrackQuery, Query()]) -> TrackedObjects:
        found = await store.ask(lambda archive: archive.reader.tracks(query.filter()))
        after = None if len(found) < query.limit else cursor(found[-1].first_unix_s, found[-1].id)
        return TrackedObjects(tracks=[TrackedObject.of(one) for one in found], next=after)

    _add_one_event(router, store)
    return router


def _add_one_event(router: APIRouter, store: _Store) -> None:
    @router.get("/events/{event_id}", summary="One event.")
    async def read_event(event_id: EventId) -> Event:
        return Event.of(await store.event(event_id))

    @router.get(
        "/events/{event_id}/snapshot.jpg",
        response_class=Response,
        responses=_JPEG,
        summary="Snapshot of the event as JPEG.",
    )
    async def read_snapshot(event_id: EventId) -> Response:
        number = (await store.event(event_id)).snapshot_id
        jpeg = await store.ask(lambda archive: archive.reader.snapshot(number) if number is not None else None)
        if jpeg is None:
            raise Refusal(404, f"event {event_id} has no snapshot")
        return Response(jpeg, media_type="image/jpeg")

    @router.get(
        "/events/{event_id}/clip.mp4", response_class=FileResponse, responses=_MP4, summary="Clip of the event as MP4."
    )
    async def read_clip(event_id: EventId) -> Response:
        event = await store.event(event_id)
        path = store.archive.clip(event)
        if path is None:
            raise Refusal(404, f"event {event_id} has no recording; a sink of type `record` writes them")
        try:
            status = path.lstat()
        except OSError:
            raise Refusal(404, f"the recording of event {event_id} was removed") from None
        if not S_ISREG(status.st_mode):
            raise Refusal(404, f"the recording of event {event_id} is not a file")
        return FileResponse(path, media_type="video/mp4", stat_result=status)


Encode = Callable[[Sequence[object], Iterator[Sequence[object]]], Iterator[bytes]]


async def _export(
    store: _Store, query: EventExport, encode: "Callable[..., Iterator[bytes]]", media: str, name: str
) -> Response:
    """Streams a file in chunks; each is read and encoded by a separate call."""
    reader = store.archive.reader
    rows = pages(reader.events, query.filter(query.limit), lambda one: (one.unix_s, one.id))
    parts = encode(EVENT_COLUMNS, rows)
    if store.exports >= MAX_EXPORTS:
        raise Refusal(503, f"{store.exports} exports are running (limit {MAX_EXPORTS}); retry")
    store.exports += 1
    try:
        begin = [part for part in [await store.calls.run(lambda: next(parts, b"")) for _ in range(2)] if part]
    except BaseException:
        store.exports -= 1
        raise

    async def content() -> AsyncIterator[bytes]:
        for part in begin:
            yield part
        while part := await store.calls.run(lambda: next(parts, b"")):
            yield part

    return _Export(store, content(), media, name)


class _Export(StreamingResponse):
    """A file on its way to the client. Counts as running until its end, also if the client leaves before its begin."""

    def __init__(self, store: _Store, content: AsyncIterator[bytes], media: str, name: str) -> None:
        headers = {"content-disposition": f'attachment; filename="{name}"'}
        super().__init__(content, media_type=media, headers=headers)
        self._store = store

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._store.exports -= 1


async def _span(
    store: _Store, control: PipelineControl, source_id: str, query: TimeRange, *, from_begin: bool
) -> tuple[float, float, SourceTimes | None]:
    """The time range, and the source's times. Raises UnknownSource if nothing is known of it."""
    times = await store.ask(lambda archive: archive.reader.source_times(source_id))
    if times is None:
        await store.calls.run(lambda: control.source(source_id))
    now = time.time()
    is_file = times is not None and not times.is_live
    newest = now + 60.0
    if times is not None and is_file:  # events have the time of reading, series the position in the file
        newest = max(newest, times.last_unix_s) if from_begin else times.last_unix_s
    until = query.until if query.until is not None else newest
    began = times.began_unix_s if times is not None and (is_file or from_begin) else now - _DAY_S
    since = query.since if query.since is not None else min(began, until)
    if since > until:
        raise Refusal(400, "since is after until; swap them")
    return since, until, times


def source_router(archive: EventArchive | None, control: PipelineControl, calls: Calls) -> APIRouter:
    """Stored data of one source, including removed sources."""
    router, store = APIRouter(prefix="/v1/streams", tags=["events"]), _Store(archive, calls)

    @router.get("/{source_id}/occupancy", summary="Objects and events of each rule over time.")
    async def occupancy(source_id: SourceId, query: Annotated[SeriesQuery, Query()]) -> OccupancyAnswer:
        since, until, times = await _span(store, control, source_id, query, from_begin=False)
        step_s = query.step_s or next((step for step in STEPS_S if until - since <= step * MAX_POINTS), STEPS_S[-1])
        rows = await store.ask(lambda archive: archive.reader.occupancy(source_id, since, until, step_s))
        series: dict[tuple[str, str], list[OccupancyPoint]] = {}
        for row in rows:
            series.setdefault((row.kind, row.rule), []).append(OccupancyPoint.of(row))
        return OccupancyAnswer(
            source_id=source_id,
            clock="wall" if times is None or times.is_live else "video",
            began=iso_time(times.began_unix_s) if times is not None else None,
            since=iso_time(since),
            until=iso_time(until),
            step_s=step_s,
            series=[OccupancySeries(kind=kind, rule=rule, points=points) for (kind, rule), points in series.items()],
        )

    @router.get("/{source_id}/heatmap", summary="Heat map: seconds with an object's foot in each grid cell.")
    async def heatmap(source_id: SourceId, query: Annotated[TimeRange, Query()]) -> HeatAnswer:
        since, until, _ = await _span(store, control, source_id, query, from_begin=False)
        grid = await store.ask(lambda archive: archive.reader.heat(source_id, since, until))
        return HeatAnswer(
            source_id=source_id,
            since=iso_time(since),
            until=iso_time(until),
            columns=GRID_WIDTH,
            rows=GRID_HEIGHT,
            seconds=[[round(value, 2) for value in row] for row in grid.tolist()],
        )

    @router.get("/{source_id}/counters", summary="Event counts of each rule, by direction, since the run started.")
    async def counters(source_id: SourceId, query: Annotated[TimeRange, Query()]) -> Counters:
        since, until, _ = await _span(store, control, source_id, query, from_begin=True)
        stored = await store.ask(lambda archive: archive.reader.counters(source_id, since, until))
        running = await calls.run(lambda: _running(control, source_id))
        return Counters(
            source_id=source_id, since=iso_time(since), until=iso_time(until), rules=_rule_counters(stored, running)
        )

    return router


def _running(control: PipelineControl, source_id: str) -> Mapping[str, int]:
    """Current counts of a running source; empty for others."""
    try:
        return control.source(source_id).counts
    except UnknownSource:
        return {}


def _rule_counters(stored: Sequence[RuleCount], counts: Mapping[str, int]) -> list[RuleCounter]:
    """Rules with events, and active rules without. counts: FrameAnalytics.counts."""
    known = {(one.kind, one.rule): one for one in stored}
    current: dict[tuple[str, str], int | None] = dict.fromkeys(known)  # None for lines and removed rules
    for key, count in counts.items():
        kind, _, rule = key.partition("/")
        if kind == "objects" or any(key.startswith(f"{other}/") for other in counts if other != key):
            continue
        if kind == AnalyticsKind.LINE_CROSSING:
            current.setdefault((kind, rule.removesuffix(".in").removesuffix(".out")), None)
        else:
            current[kind, rule] = count
    return [
        RuleCounter(kind=kind, rule=rule, events=one.events, entered=one.entered, left=one.left, current=count)
        for (kind, rule), count in current.items()
        for one in [known.get((kind, rule)) or RuleCount(kind, rule, 0, 0, 0)]
    ]
