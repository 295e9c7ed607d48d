"""Requests and response bodies of the control API, and readable messages for requests that fail validation."""

import base64
import binascii
import json
import math
import struct
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from difflib import get_close_matches
from typing import Annotated

from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, Field, WithJsonSchema

from penstock_video.errors import needed_value, resolved_schema
from penstock_video.interfaces import Saved
from penstock_video.source_ids import ID_FORM, ID_PATTERN
from penstock_video.store.reader import MAX_PAGE, Filter, Position
from penstock_video.types import DecoderKind, DropPolicy, SourceConfig, SourceState

SOURCE_ID = f"^{ID_PATTERN}$"
MAX_URI_CHARACTERS = 2048
_DEFAULT = SourceConfig(uri="", source_id="")


class Strict(BaseModel):
    """Base of request bodies: unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class StreamOptions(Strict):
    """Configuration of a source. Its fields are those of types.SourceConfig."""

    uri: str = Field(min_length=1, max_length=MAX_URI_CHARACTERS)
    camera_name: str = Field(default=_DEFAULT.camera_name, max_length=200)
    is_loop: bool = _DEFAULT.is_loop
    is_realtime: bool = _DEFAULT.is_realtime
    policy: DropPolicy | None = _DEFAULT.policy
    expected_fps: float | None = Field(default=_DEFAULT.expected_fps, gt=0, le=1000)
    reconnect_interval_s: float = Field(default=_DEFAULT.reconnect_interval_s, gt=0, le=3600)
    reconnect_attempts: int = Field(default=_DEFAULT.reconnect_attempts, ge=-1, le=1_000_000)
    open_timeout_s: float = Field(default=_DEFAULT.open_timeout_s, gt=0, le=600)
    frozen_after_s: float = Field(default=_DEFAULT.frozen_after_s, gt=0, le=86_400)
    is_udp: bool = _DEFAULT.is_udp
    record_cache_s: float = Field(default=_DEFAULT.record_cache_s, ge=0, le=600)
    decoder: DecoderKind = _DEFAULT.decoder

    def config(self, source_id: str) -> SourceConfig:
        """The configuration for the pipeline."""
        return SourceConfig(source_id=source_id, **{name: getattr(self, name) for name in StreamOptions.model_fields})


class NewStream(StreamOptions):
    """A source to add."""

    source_id: str = Field(pattern=SOURCE_ID, description=ID_FORM)


class ProbeRequest(Strict):
    """A URL to test. source_id: source whose user and password are used if the URL contains `***` in their place."""

    uri: str = Field(min_length=1, max_length=MAX_URI_CHARACTERS)
    source_id: str | None = Field(default=None, pattern=SOURCE_ID, description=ID_FORM)
    is_udp: bool = _DEFAULT.is_udp
    open_timeout_s: float = Field(default=_DEFAULT.open_timeout_s, gt=0, le=30)


class Probed(BaseModel):
    """Video properties of a URL. fps: 0 if unknown. duration_s: for a file. jpeg: a frame, base64.

    is_recordable: whether its packets fit into MP4; otherwise its events have no clip.
    """

    model_config = ConfigDict(from_attributes=True)

    width: int
    height: int
    fps: float
    codec: str
    is_live: bool
    duration_s: float | None
    jpeg: str
    is_recordable: bool


class Recording(Strict):
    """A recording to start: before_s and after_s from now, in seconds."""

    before_s: float = Field(default=5.0, ge=0, le=300)
    after_s: float = Field(default=10.0, ge=0, le=3600)


class RecordingFile(BaseModel):
    """The recording's path, once it is finished."""

    path: str


MAX_EXPORT_ROWS = 1_000_000
_LATEST_UNIX_S = 253_402_300_799.0  # the year 9999
_CURSOR = struct.Struct(">dq")
_MAX_ID = 2**63 - 1


def _moment(given: object) -> float:
    """Unix seconds of an ISO 8601 time (UTC if it names no zone) or of a number."""
    text = str(given)
    try:
        number = float(text)
    except ValueError:
        time = datetime.fromisoformat(text)
        number = (time if time.tzinfo else time.replace(tzinfo=UTC)).timestamp()
    if not 0 <= number <= _LATEST_UNIX_S:
        raise ValueError("out of range")
    return number


def _position(text: str) -> Position:
    """The position of a cursor. Raises ValueError."""
    try:
        unix_s, row_id = _CURSOR.unpack(base64.b64decode(text, b"-_", validate=True))
    except (binascii.Error, struct.error):
        raise ValueError("no cursor") from None
    if not math.isfinite(unix_s):
        raise ValueError("no cursor")
    return unix_s, row_id


def _checked_cursor(text: str) -> str:
    _position(text)
    return text


def cursor(unix_s: float, row_id: int) -> str:
    """The opaque cursor of the next page."""
    return base64.urlsafe_b64encode(_CURSOR.pack(unix_s, row_id)).decode()


_TIME = "a time is needed, such as 2026-11-28T09:30:00Z, or unix seconds"
_CURSOR_NEEDED = "the `next` of the page before is needed; leave it out for the first page"
Moment = Annotated[
    float, BeforeValidator(_moment), WithJsonSchema({"type": "string", "pattern": "^.+$", "description": _TIME})
]
Cursor = Annotated[
    str,
    AfterValidator(_checked_cursor),
    WithJsonSchema({"type": "string", "pattern": "^[A-Za-z0-9_=-]+$", "description": _CURSOR_NEEDED}),
]
Name = Annotated[str, Field(min_length=1, max_length=200)]
SourceName = Annotated[str, Field(pattern=SOURCE_ID, description=ID_FORM)]


class TimeRange(Strict):
    """since: inclusive. until: exclusive."""

    since: Moment | None = None
    until: Moment | None = None


class EventFilter(TimeRange):
    """Filter of events."""

    source_id: SourceName | None = None
    rule: Name | None = None
    kind: Name | None = None
    label: Name | None = None

    def filter(self, limit: int, after: str | None = None) -> Filter:
        """The same for the reader. after: a cursor."""
        position = None if after is None else _position(after)
        return Filter(
            self.source_id or "", self.rule or "", self.kind or "", self.label or "", self.since, self.until, limit,
            position,
        )  # fmt: skip


class EventQuery(EventFilter):
    """A page of events."""

    limit: int = Field(default=100, ge=1, le=MAX_PAGE)
    after: Cursor | None = None


class EventExport(EventFilter):
    """Events to export, newest first."""

    limit: int = Field(default=100_000, ge=1, le=MAX_EXPORT_ROWS)


class TrackQuery(TimeRange):
    """A page of tracks. zone: name of a rule that matched them. since, until: time range that they overlap."""

    source_id: SourceName | None = None
    label: Name | None = None
    zone: Name | None = None
    limit: int = Field(default=100, ge=1, le=MAX_PAGE)
    after: Cursor | None = None

    def filter(self) -> Filter:
        """The same for the reader."""
        position = None if self.after is None else _position(self.after)
        return Filter(
            self.source_id or "", self.zone or "", "", self.label or "", self.since, self.until, self.limit, position
        )


class SeriesQuery(TimeRange):
    """step_s: seconds per point, a multiple of 60; None chooses one."""

    step_s: int | None = Field(default=None, ge=60, le=86_400, multiple_of=60)


class Stream(BaseModel):
    """Current state of a source: types.SourceStatistics. uri: without user and password."""

    model_config = ConfigDict(from_attributes=True)

    source_id: str
    camera_name: str
    uri: str
    state: SourceState
    reason: str
    fps: float
    frames: int
    frames_total: int | None
    inferred: int
    drops: dict[str, int]
    restarts: int
    width: int
    height: int
    codec: str
    decoder: str
    decoder_reason: str
    is_live: bool
    is_frozen: bool
    latency_s: float | None
    position_s: float
    duration_s: float | None
    counts: dict[str, int]
    is_recordable: bool


class Streams(BaseModel):
    """Every source, in the order of addition."""

    streams: list[Stream]


class Added(BaseModel):
    """The source that was added or changed. saved: whether it was written to the settings file."""

    source_id: str
    saved: Saved


class Health(BaseModel):
    """live: the API answers. ready: the pipeline's threads run and its engine answers."""

    live: bool = True
    ready: bool | None = None


class ErrorAnswer(BaseModel):
    """Why a request was not served, and the fix."""

    error: str


class SensorValue(BaseModel):
    """DeepStream's value of a stream/add or stream/remove; other fields (metadata, …) are ignored."""

    model_config = ConfigDict(coerce_numbers_to_str=True, hide_input_in_errors=True)

    camera_id: str = Field(pattern=SOURCE_ID, description=ID_FORM)
    camera_name: str = Field(default="", max_length=200)
    camera_url: str = Field(default="", max_length=MAX_URI_CHARACTERS)
    change: str = ""


class SensorChange(BaseModel):
    """DeepStream's body of a stream/add or stream/remove; `event` is an alias of `value`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    key: str = "sensor"
    value: SensorValue | None = None
    event: SensorValue | None = None


class DeepStreamAnswer(BaseModel):
    """DeepStream's answer to a change. status: the HTTP status line. reason: STREAM_ADD_SUCCESS and the like."""

    status: str
    reason: str


class DeepStreamError(DeepStreamAnswer):
    """DeepStream's answer to a refused change, with our error text."""

    error: str


_MOST = 5  # faults of a body that are listed
_SHOWN_CHARACTERS = 80
_PARTS_OF_REQUEST = ("body", "path", "query")
_SHOWN = ("source_id", "camera_id", "policy", "decoder", "since", "until", "limit", "step_s")
_OBJECT = "a JSON object is needed"


def _properties(model: type[BaseModel]) -> Iterator[tuple[str, str]]:
    whole = model.model_json_schema()
    definitions = whole.get("$defs", {})
    for part in (whole, *definitions.values()):
        for name, schema in part.get("properties", {}).items():
            yield name, needed_value(resolved_schema(schema, definitions))


_NEEDED = dict(
    pair
    for model in (NewStream, ProbeRequest, Recording, SensorChange, EventQuery, TrackQuery, SeriesQuery)
    for pair in _properties(model)
)


def named_faults(faults: Sequence[object]) -> str:
    """Field by field: "reconnect_attempts: -5 is not taken; a whole number from -1 to 1000000 is needed"."""
    return "; and ".join(_named(fault) for fault in faults[:_MOST])


def missing(name: str) -> str:
    """Path of a missing field, "value.camera_id"; empty for the body."""
    if not name:
        return "the body is missing; send a JSON object, {} where nothing is to be said"
    return f"{name} is missing; {_NEEDED.get(name.rpartition('.')[2], _OBJECT)}"


def _named(fault: object) -> str:
    if not isinstance(fault, dict):
        return "the body cannot be read"
    where = [str(part) for part in fault.get("loc", ()) if part not in _PARTS_OF_REQUEST]
    name, kind = ".".join(where), fault.get("type")
    if kind == "json_invalid":
        context = fault.get("ctx")
        reason = context.get("error", "") if isinstance(context, dict) else ""
        return f"the body is not JSON ({reason}, at character {name or 0})"
    if kind == "missing":
        return missing(name)
    if kind == "extra_forbidden":
        return f"{name}: there is no such field; {_instead(where[-1])}"
    given = _given(fault.get("input"), where)
    return f"{name or 'the body'}: {given} is not taken; {_NEEDED.get(where[-1], _OBJECT) if where else _OBJECT}"


def _instead(name: str) -> str:
    near = [known for known in get_close_matches(name, _NEEDED, 2) if known != name]
    return f"did you mean {near[0]}?" if near else "leave it out; /openapi.json names those that there are"


def _given(value: object, where: Sequence[str]) -> str:
    if isinstance(value, str):
        is_shown = bool(where) and where[-1] in _SHOWN and "@" not in value and len(value) <= _SHOWN_CHARACTERS
        return repr(value) if is_shown else f"a text of {len(value)} characters"
    if isinstance(value, list | dict):
        return "a list" if isinstance(value, list) else "an object"
    return json.dumps(value, default=lambda _: "what was sent")[:_SHOWN_CHARACTERS]
