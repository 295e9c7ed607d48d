"""What the control API is sent and answers, field by field; the OpenAPI description is made of these."""

from pydantic import BaseModel, ConfigDict, Field

from deepstream_pipeline.source_ids import ID_PATTERN
from deepstream_pipeline.types import DecoderKind, DropPolicy, SourceConfig, SourceState

SOURCE_ID = f"^{ID_PATTERN}$"
MAX_URI_CHARACTERS = 2048
_DEFAULT = SourceConfig(uri="", source_id="")


class Strict(BaseModel):
    """A body of ours: a field that is not known is refused."""

    model_config = ConfigDict(extra="forbid", hide_input_in_errors=True)


class NewStream(Strict):
    """A source to add. Its fields are those of types.SourceConfig."""

    uri: str = Field(min_length=1, max_length=MAX_URI_CHARACTERS)
    source_id: str = Field(pattern=SOURCE_ID)
    camera_name: str = Field(default=_DEFAULT.camera_name, max_length=200)
    is_loop: bool = _DEFAULT.is_loop
    is_realtime: bool = _DEFAULT.is_realtime
    policy: DropPolicy | None = _DEFAULT.policy
    expected_fps: float | None = Field(default=_DEFAULT.expected_fps, gt=0, le=1000)
    reconnect_interval_s: float = Field(default=_DEFAULT.reconnect_interval_s, gt=0, le=3600)
    reconnect_attempts: int = Field(default=_DEFAULT.reconnect_attempts, ge=-1, le=1_000_000)
    open_timeout_s: float = Field(default=_DEFAULT.open_timeout_s, gt=0, le=300)
    frozen_after_s: float = Field(default=_DEFAULT.frozen_after_s, gt=0, le=86_400)
    is_udp: bool = _DEFAULT.is_udp
    record_cache_s: float = Field(default=_DEFAULT.record_cache_s, ge=0, le=300)
    decoder: DecoderKind = _DEFAULT.decoder

    def config(self) -> SourceConfig:
        """As the pipeline takes it."""
        return SourceConfig(**{name: getattr(self, name) for name in type(self).model_fields})


class Recording(Strict):
    """A recording to begin: from so long ago to so long from now, in seconds."""

    before_s: float = Field(default=5.0, ge=0, le=300)
    after_s: float = Field(default=10.0, ge=0, le=3600)


class RecordingFile(BaseModel):
    """Where the recording will be, once it is whole."""

    path: str


class Stream(BaseModel):
    """A source as it is now: types.SourceStatistics. uri: without user and password."""

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
    is_live: bool
    is_frozen: bool
    latency_s: float | None
    position_s: float
    duration_s: float | None
    counts: dict[str, int]


class Streams(BaseModel):
    """Every source, in the order in which they were added."""

    streams: list[Stream]


class Added(BaseModel):
    """The source that was added."""

    source_id: str


class Health(BaseModel):
    """live: the API answers. ready: the pipeline's threads turn and its engine answers."""

    live: bool = True
    ready: bool | None = None


class ErrorAnswer(BaseModel):
    """Why a request was not served, and what to do."""

    error: str


class SensorValue(BaseModel):
    """DeepStream's value of a stream/add or stream/remove; what else it holds (metadata, …) is not looked at."""

    model_config = ConfigDict(coerce_numbers_to_str=True, hide_input_in_errors=True)

    camera_id: str = Field(pattern=SOURCE_ID)
    camera_name: str = Field(default="", max_length=200)
    camera_url: str = Field(default="", max_length=MAX_URI_CHARACTERS)
    change: str = ""


class SensorChange(BaseModel):
    """DeepStream's body of a stream/add or stream/remove; `event` is another word for `value`."""

    model_config = ConfigDict(hide_input_in_errors=True)

    key: str = "sensor"
    value: SensorValue | None = None
    event: SensorValue | None = None


class DeepStreamAnswer(BaseModel):
    """DeepStream's answer to a change. status: the HTTP status line. reason: STREAM_ADD_SUCCESS and the like."""

    status: str
    reason: str


class DeepStreamError(DeepStreamAnswer):
    """DeepStream's answer to a change that was refused, and our own word."""

    error: str
