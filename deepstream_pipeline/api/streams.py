"""The plain API: /v1/streams, one resource a source."""

from collections.abc import Callable
from typing import Annotated

from fastapi import APIRouter, Body, Path, Response

from deepstream_pipeline.api.asked_sources import asked_source, found_in, refuse_over, stream_of
from deepstream_pipeline.api.bodies import (
    SOURCE_ID,
    Added,
    ErrorAnswer,
    NewStream,
    Recording,
    RecordingFile,
    Stream,
    Streams,
)
from deepstream_pipeline.api.calls import Calls
from deepstream_pipeline.api.options import ApiOptions
from deepstream_pipeline.interfaces import PipelineControl

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
        config = asked_source(new.config(), options)
        await calls.run(lambda: control.add(config))
        response.headers["location"] = f"/v1/streams/{new.source_id}"
        return Added(source_id=new.source_id)

    @router.get("/{source_id}", summary="One source, with its statistics.")
    async def read_stream(source_id: SourceId) -> Stream:
        return stream_of(found_in(await calls.run(control.statistics), source_id))

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
    """Refused where the source is over: it would stay so."""
    refuse_over(found_in(control.statistics(), source_id))
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
