"""Routes /v1/streams of the control API, and which source IDs and URIs a client may add."""

from collections.abc import Callable
from dataclasses import replace
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Body, Path, Response

from penstock_video.api.calls import Calls, Refusal
from penstock_video.api.models import (
    SOURCE_ID,
    Added,
    ErrorAnswer,
    NewStream,
    Recording,
    RecordingFile,
    Stream,
    Streams,
)
from penstock_video.api.options import ApiOptions
from penstock_video.decode.uri import UriKind, kind_of, redacted
from penstock_video.interfaces import PipelineControl, SourceStatistics
from penstock_video.types import SourceConfig, SourceState

_IS = {SourceState.ENDED: "has ended", SourceState.FAILED: "has failed"}
OVER = tuple(_IS)


def validated_source(config: SourceConfig, options: ApiOptions) -> SourceConfig:
    """The source that an API client adds, marked as from the API.

    Resolved addresses are checked when the source is opened.

    Raises SourceNotAllowed for an invalid source, Refusal (403) for a file or device if clients may not add one, and
    for a host that is not allowed.
    """
    kind = kind_of(config.uri)
    if kind in (UriKind.FILE, UriKind.DEVICE):
        if not options.is_local:
            raise Refusal(
                403, "files and devices of this machine can be added only if the API listens on 127.0.0.1; give a URL"
            )
    elif why := options.outbound.why_refused_unresolved(urlsplit(config.uri).hostname or ""):
        raise Refusal(403, why)
    return replace(config, is_from_api=True)


def stream_of(statistics: SourceStatistics) -> Stream:
    """The stream for clients, with user and password removed from its URI."""
    stream = Stream.model_validate(statistics)
    return stream.model_copy(update={"uri": redacted(stream.uri)})


def refuse_over(source: SourceStatistics) -> None:
    """Raises Refusal (409) for a source that ended or failed."""
    if source.state in OVER:
        raise Refusal(409, f"{source.source_id!r} {_IS[source.state]}; to read it anew remove it and add it again")


def refuse_pictureless(source: SourceStatistics) -> None:
    """Raises Refusal (409) if the source has no picture in its state."""
    if source.state is SourceState.PAUSED:
        raise Refusal(409, f"{source.source_id!r} is paused and has no picture; resume it")
    refuse_over(source)


SourceId = Annotated[str, Path(pattern=SOURCE_ID, description="The source's id: DeepStream's camera_id.")]
ERRORS: dict[int | str, dict[str, object]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


def streams_router(control: PipelineControl, calls: Calls, options: ApiOptions) -> APIRouter:
    """List, add, remove, pause, record, and the rules of each."""
    router = APIRouter(prefix="/v1/streams", tags=["streams"])

    @router.get("", summary="Every source, with its statistics.")
    async def list_streams() -> Streams:
        return Streams(streams=[stream_of(each) for each in await calls.run(control.statistics)])

    @router.post("", status_code=201, summary="Add a source.")
    async def add_stream(new: NewStream, response: Response) -> Added:
        config = validated_source(new.config(), options)
        await calls.run(lambda: control.add(config))
        response.headers["location"] = f"/v1/streams/{new.source_id}"
        return Added(source_id=new.source_id)

    @router.get("/{source_id}", summary="One source, with its statistics.")
    async def read_stream(source_id: SourceId) -> Stream:
        return stream_of(await calls.run(lambda: control.source(source_id)))

    @router.delete("/{source_id}", status_code=204, summary="Take a source out.")
    async def remove_stream(source_id: SourceId) -> None:
        await calls.run(lambda: control.remove(source_id))

    @router.post("/{source_id}/pause", status_code=204, summary="Read nothing of it until it is resumed.")
    async def pause_stream(source_id: SourceId) -> None:
        await calls.run(lambda: _turn(control, source_id, control.pause))

    @router.post("/{source_id}/resume", status_code=204, summary="Read on.")
    async def resume_stream(source_id: SourceId) -> None:
        await calls.run(lambda: _turn(control, source_id, control.resume))

    _add_recording_and_rules(router, control, calls)
    return router


def _turn(control: PipelineControl, source_id: str, verb: Callable[[str], None]) -> None:
    """Refuses a source that is over."""
    refuse_over(control.source(source_id))
    verb(source_id)


def _add_recording_and_rules(router: APIRouter, control: PipelineControl, calls: Calls) -> None:
    @router.post("/{source_id}/record", status_code=202, summary="Begin a recording, from before now to after now.")
    async def record_stream(source_id: SourceId, recording: Recording) -> RecordingFile:
        before_s, after_s = recording.before_s, recording.after_s
        path = await calls.run(lambda: control.record(source_id, before_s=before_s, after_s=after_s))
        return RecordingFile(path=path)

    @router.get("/{source_id}/rules", summary="Its analytics section, as PUT takes it.")
    async def read_rules(source_id: SourceId) -> object:
        return await calls.run(lambda: control.rules(source_id))

    @router.put("/{source_id}/rules", summary="Another analytics section, from its next frame on.")
    async def change_rules(source_id: SourceId, section: Annotated[dict[str, object], Body()]) -> object:
        def change() -> object:
            control.set_rules(source_id, section)
            return control.rules(source_id)

        return await calls.run(change)
