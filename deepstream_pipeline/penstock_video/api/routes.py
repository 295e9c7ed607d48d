"""Routes /v1/streams of the control API, and which source IDs and URIs a client may add."""

import base64
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Annotated
from urllib.parse import urlsplit

from fastapi import APIRouter, Body, Depends, Path, Request, Response

from penstock_video.api.calls import Calls, Refusal
from penstock_video.api.models import (
    SOURCE_ID,
    Added,
    ErrorAnswer,
    NewStream,
    Probed,
    ProbeRequest,
    Recording,
    RecordingFile,
    Stream,
    StreamOptions,
    Streams,
)
from penstock_video.api.options import REMOTE, ApiOptions
from penstock_video.decode.uri import UriKind, kind_of, redacted
from penstock_video.interfaces import (
    Change,
    PipelineControl,
    RulesChanged,
    Saved,
    SourceAdded,
    SourceChanged,
    SourceRemoved,
    SourceStatistics,
)
from penstock_video.types import SourceConfig, SourceState

HIDDEN = "***"  # in place of user and password, where an address is shown
PROBE_ID = "probe"
_IS = {SourceState.ENDED: "has ended", SourceState.FAILED: "has failed"}
OVER = tuple(_IS)


def validated_source(config: SourceConfig, options: ApiOptions, *, is_remote: bool = False) -> SourceConfig:
    """The source that an API client adds, marked as from the API. is_remote: a console calls for another machine.

    Resolved addresses are checked when the source is opened.

    Raises SourceNotAllowed for an invalid source, Refusal (403) for a file or device if clients may not add one, and
    for a host that is not allowed, Refusal (400) for an address with hidden parts, or a name that cannot be printed.
    """
    _check_name(config)
    if HIDDEN in config.uri:
        raise Refusal(400, f"the address has {HIDDEN} in place of a user and password; enter them")
    kind = kind_of(config.uri)
    if kind in (UriKind.FILE, UriKind.DEVICE):
        if not options.is_local or is_remote:
            raise Refusal(
                403,
                "files and devices of this machine can be added only if the API and the console listen on 127.0.0.1; "
                "give a URL",
            )
    elif why := options.outbound.why_refused_unresolved(urlsplit(config.uri).hostname or ""):
        raise Refusal(403, why)
    return replace(config, is_from_api=True)


def _check_name(config: SourceConfig) -> None:
    """As in a settings file. Raises Refusal (400)."""
    if not config.camera_name.isprintable():
        raise Refusal(400, f"camera_name is {config.camera_name!r}; a printable text of one line is needed")


def edited_source(
    options: StreamOptions, known: SourceConfig, access: ApiOptions, *, is_remote: bool = False
) -> SourceConfig:
    """The source that a client changes. Its address as it is shown stands for itself, with user and password.

    Another address is checked as that of a new source. Raises as `validated_source`.
    """
    config = options.config(known.source_id)
    if config.uri in (known.uri, redacted(known.uri)):
        _check_name(config)
        return replace(config, uri=known.uri, is_from_api=known.is_from_api)
    return validated_source(config, access, is_remote=is_remote)


def stream_of(statistics: SourceStatistics) -> Stream:
    """The stream for clients, with user and password removed from its URI."""
    stream = Stream.model_validate(statistics)
    return stream.model_copy(update={"uri": redacted(stream.uri)})


def refuse_over(source: SourceStatistics) -> None:
    """Raises Refusal (409) for a source that ended or failed."""
    if source.state in OVER:
        raise Refusal(409, f"{source.source_id!r} {_IS[source.state]}; start it over first")


def refuse_pictureless(source: SourceStatistics) -> None:
    """Raises Refusal (409) if the source has no picture in its state."""
    if source.state is SourceState.PAUSED:
        raise Refusal(409, f"{source.source_id!r} is paused and has no picture; resume it")
    refuse_over(source)


SAVED_HEADER = "x-penstock-saved"  # of each change's answer: a value of Saved
Making = tuple[Change, Callable[[], None]]


async def make(calls: Calls, options: ApiOptions, response: Response, making: Making) -> Saved:
    """Makes a change, and notes in the response whether it was saved."""
    saved = await calls.run(lambda: options.saver.apply(*making))
    response.headers[SAVED_HEADER] = saved.value
    return saved


async def _is_remote(request: Request) -> bool:
    return bool(request.scope.get(REMOTE))


IsRemote = Annotated[bool, Depends(_is_remote)]
SourceId = Annotated[str, Path(pattern=SOURCE_ID, description="The source's id: DeepStream's camera_id.")]
ERRORS: dict[int | str, dict[str, object]] = {"4XX": {"model": ErrorAnswer}, "5XX": {"model": ErrorAnswer}}


def streams_router(control: PipelineControl, calls: Calls, probes: Calls, options: ApiOptions) -> APIRouter:
    """List, add, probe, edit, remove, pause, record, and the rules of each. probes: their calls wait for cameras."""
    router = APIRouter(prefix="/v1/streams", tags=["streams"])

    @router.get("", summary="Every source, with its statistics.")
    async def list_streams() -> Streams:
        return Streams(streams=[stream_of(each) for each in await calls.run(control.statistics)])

    @router.post("", status_code=201, summary="Add a source.")
    async def add_stream(new: NewStream, response: Response, is_remote: IsRemote) -> Added:
        config = validated_source(new.config(new.source_id), options, is_remote=is_remote)
        saved = await make(calls, options, response, (SourceAdded(config), lambda: control.add(config)))
        response.headers["location"] = f"/v1/streams/{new.source_id}"
        return Added(source_id=new.source_id, saved=saved)

    @router.get("/{source_id}", summary="One source, with its statistics.")
    async def read_stream(source_id: SourceId) -> Stream:
        return stream_of(await calls.run(lambda: control.source(source_id)))

    @router.delete("/{source_id}", status_code=204, summary="Take a source out.")
    async def remove_stream(source_id: SourceId, response: Response) -> None:
        await make(calls, options, response, (SourceRemoved(source_id), lambda: control.remove(source_id)))

    @router.post("/{source_id}/pause", status_code=204, summary="Read nothing of it until it is resumed.")
    async def pause_stream(source_id: SourceId) -> None:
        await calls.run(lambda: _turn(control, source_id, control.pause))

    @router.post("/{source_id}/resume", status_code=204, summary="Read on.")
    async def resume_stream(source_id: SourceId) -> None:
        await calls.run(lambda: _turn(control, source_id, control.resume))

    @router.post("/{source_id}/restart", status_code=204, summary="Restart it; a file plays from its beginning.")
    async def restart_stream(source_id: SourceId) -> None:
        """Its rules and stored events are kept. Its counts restart at 0."""
        await calls.run(lambda: control.restart(source_id))

    _add_editing(router, control, calls, options)
    _add_probe(router, control, (calls, probes), options)
    _add_recording_and_rules(router, control, calls, options)
    return router


def _turn(control: PipelineControl, source_id: str, verb: Callable[[str], None]) -> None:
    """Refuses a source that is over."""
    refuse_over(control.source(source_id))
    verb(source_id)


def _add_probe(router: APIRouter, control: PipelineControl, both: tuple[Calls, Calls], options: ApiOptions) -> None:
    calls, probes = both

    @router.post("/probe", summary="Test a URL: returns its video properties and a frame.")
    async def probe_address(asked: ProbeRequest, is_remote: IsRemote) -> Probed:
        asked_options = StreamOptions(uri=asked.uri, is_udp=asked.is_udp, open_timeout_s=asked.open_timeout_s)
        if (source_id := asked.source_id) is not None:
            known = await calls.run(lambda: control.config(source_id))
            config = edited_source(asked_options, known, options, is_remote=is_remote)
        else:
            config = validated_source(asked_options.config(PROBE_ID), options, is_remote=is_remote)
        found = await probes.run(lambda: control.probe(config))
        return Probed.model_validate({**asdict(found), "jpeg": base64.b64encode(found.jpeg).decode()})


def _add_editing(router: APIRouter, control: PipelineControl, calls: Calls, options: ApiOptions) -> None:
    @router.get("/{source_id}/options", summary="Its configuration, as PUT accepts it, without user and password.")
    async def read_options(source_id: SourceId) -> StreamOptions:
        config = await calls.run(lambda: control.config(source_id))
        values = {name: getattr(config, name) for name in StreamOptions.model_fields}
        return StreamOptions.model_validate({**values, "uri": redacted(config.uri)})

    @router.put("/{source_id}", summary="Change the URL or options. Its rules and their counts are kept.")
    async def edit_stream(source_id: SourceId, edited: StreamOptions, response: Response, is_remote: IsRemote) -> Added:
        known = await calls.run(lambda: control.config(source_id))
        config = edited_source(edited, known, options, is_remote=is_remote)
        change = SourceChanged(config, is_new_address=config.uri != known.uri)
        saved = await make(calls, options, response, (change, lambda: control.change(config)))
        return Added(source_id=source_id, saved=saved)


def _add_recording_and_rules(router: APIRouter, control: PipelineControl, calls: Calls, options: ApiOptions) -> None:
    @router.post("/{source_id}/record", status_code=202, summary="Begin a recording, from before now to after now.")
    async def record_stream(source_id: SourceId, recording: Recording) -> RecordingFile:
        before_s, after_s = recording.before_s, recording.after_s
        path = await calls.run(lambda: control.record(source_id, before_s=before_s, after_s=after_s))
        return RecordingFile(path=path)

    @router.get("/{source_id}/rules", summary="Its analytics section, as PUT takes it.")
    async def read_rules(source_id: SourceId) -> object:
        return await calls.run(lambda: control.rules(source_id))

    @router.put("/{source_id}/rules", summary="Another analytics section, from its next frame on.")
    async def change_rules(
        source_id: SourceId, section: Annotated[dict[str, object], Body()], response: Response
    ) -> object:
        """Points are pixels, or relative, from 0 to 1. Rules that do not change keep their counts."""
        change = RulesChanged(source_id, section)
        await make(calls, options, response, (change, lambda: control.set_rules(source_id, section)))
        return await calls.run(lambda: control.rules(source_id))
