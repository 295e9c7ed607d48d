"""The HTML page with every stream's state, figures and preview, and the preview images."""

import asyncio
import base64
import functools
import hashlib
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from html import escape
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import HTMLResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from penstock_video.api.calls import Calls, Refusal
from penstock_video.api.models import Stream
from penstock_video.api.routes import OVER, SourceId, refuse_pictureless, stream_of
from penstock_video.errors import UnknownSource
from penstock_video.interfaces import PipelineControl, Previews, View
from penstock_video.types import SourceState

FIRST_PICTURE_S = 2.0
_TURN_S = 1.0  # how often a viewer of a source without pictures looks whether the source is still there
_BEFORE_ALL = -1
_BOUNDARY = b"\r\n--frame\r\n"
_JPEG: dict[int | str, dict[str, object]] = {200: {"content": {"image/jpeg": {}}}}
_MJPEG: dict[int | str, dict[str, object]] = {200: {"content": {"multipart/x-mixed-replace": {}}}}


Width = Annotated[int, Query(ge=0, le=7680, description="Pixels; the next of 160 to 1280 is sent. 0: the default.")]
Draw = Annotated[bool, Query(description="With objects and rules.")]


class Viewers:
    """How many watch, and how many may."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.count = 0

    def enter(self) -> None:
        """One more. Raises Refusal (503)."""
        if self.count >= self._limit:
            raise Refusal(503, f"{self.count} viewers watch previews (limit {self._limit}); retry, or take preview.jpg")
        self.count += 1

    def leave(self) -> None:
        """One less."""
        self.count -= 1


class _Moving(StreamingResponse):
    """Pictures, each in the place of the former; who stops reading is cut by its connection."""

    def __init__(self, pictures: AsyncIterator[bytes], leave: Callable[[], None]) -> None:
        super().__init__(pictures, media_type="multipart/x-mixed-replace; boundary=frame")
        self._leave = leave

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._leave()


class _Watch:
    """The pictures of sources, for as long as they are there."""

    def __init__(self, control: PipelineControl, previews: Previews, calls: Calls) -> None:
        self._control, self._previews, self._calls = control, previews, calls

    async def check(self, source_id: str) -> None:
        """Raises Refusal (409) where no picture comes of it until it is resumed, or added anew; UnknownSource."""
        refuse_pictureless(await self._calls.run(lambda: self._control.source(source_id)))

    async def next(self, source_id: str, after: int, timeout_s: float, view: View) -> tuple[int, bytes] | None:
        return await self._calls.run(lambda: self._previews.wait(source_id, after, timeout_s, view))

    async def parts(self, source_id: str, view: View) -> AsyncIterator[bytes]:
        """Of a multipart answer: each picture with the boundary behind it, at which a browser shows it."""
        number, clock = _BEFORE_ALL, asyncio.get_running_loop().time
        yield _BOUNDARY.lstrip()
        while True:
            requested_at = clock()
            try:
                found = await self.next(source_id, number, _TURN_S, view)
                if found is None and not await self._is_there(source_id):
                    return
            except Refusal:  # the program ends, or the pipeline hangs
                return
            if found is not None:
                number, jpeg = found
                yield b"content-type: image/jpeg\r\ncontent-length: %d\r\n\r\n" % len(jpeg) + jpeg + _BOUNDARY
            else:  # a source that is over has none at once, too
                await asyncio.sleep(requested_at + _TURN_S - clock())

    async def _is_there(self, source_id: str) -> bool:
        try:
            await self._calls.run(lambda: self._control.source(source_id))
        except UnknownSource:
            return False
        return True


def previews_router(control: PipelineControl, previews: Previews, calls: Calls, viewers: Viewers) -> APIRouter:
    """preview.jpg and preview.mjpeg of each source. viewers: of the latter. calls: of their own, they wait long."""
    router = APIRouter(prefix="/v1/streams", tags=["previews"])
    watch = _Watch(control, previews, calls)

    @router.get("/{source_id}/preview.jpg", response_class=Response, responses=_JPEG, summary="Its newest picture.")
    async def still(source_id: SourceId, width: Width = 0, draw: Draw = True) -> Response:
        await watch.check(source_id)
        found = await watch.next(source_id, _BEFORE_ALL, FIRST_PICTURE_S, View(width, draw))
        if found is None:
            raise Refusal(503, f"no picture of {source_id!r} came within {FIRST_PICTURE_S:g} s; its state says why")
        return Response(found[1], media_type="image/jpeg")

    @router.get("/{source_id}/preview.mjpeg", response_class=Response, responses=_MJPEG, summary="Picture by picture.")
    async def moving(source_id: SourceId, width: Width = 0, draw: Draw = True) -> Response:
        await watch.check(source_id)
        viewers.enter()
        return _Moving(watch.parts(source_id, View(width, draw)), viewers.leave)

    return router


# Hidden without JavaScript, which they need.
_VERBS = (
    '<div class="verbs"><button type="button" data-verb="pause" hidden>Pause</button>'
    '<button type="button" data-verb="resume" hidden>Resume</button>'
    '<button type="button" data-verb="remove" hidden>Remove</button><span class="said" role="status"></span></div>'
)
STILL = (SourceState.PAUSED, *OVER)  # no picture comes


@functools.cache
def _asset(name: str) -> str:
    """The text of page.css or page.js."""
    return (files("penstock_video.api") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}'"


def _policy() -> str:
    return (
        "default-src 'none'; img-src 'self' data:; connect-src 'self'; "
        f"style-src {_hash(_asset('page.css'))}; script-src {_hash(_asset('page.js'))}; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
    )


def page_router(control: PipelineControl, calls: Calls) -> APIRouter:
    """GET /"""
    router, headers = APIRouter(), {"content-security-policy": _policy()}

    @router.get("/", response_class=HTMLResponse, include_in_schema=False)
    async def page() -> HTMLResponse:
        streams = [stream_of(each) for each in await calls.run(control.statistics)]
        return HTMLResponse(render(streams), headers=headers)

    return router


def render(streams: Sequence[Stream]) -> str:
    """The page. Whatever a source is called, or says of itself, is text in it."""
    cards = "".join(_card(stream) for stream in streams)
    nothing = "<p>No streams. <code>POST /v1/streams</code> adds one.</p>"
    fps = sum(stream.fps for stream in streams)
    noun = "stream" if len(streams) == 1 else "streams"
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>penstock video</title>'
        '<meta name="viewport" content="width=device-width,initial-scale=1">'
        '<noscript><meta http-equiv="refresh" content="5"></noscript>'
        f'<link rel="icon" href="data:,"><style>{_asset("page.css")}</style></head>'
        "<body><header><h1>penstock video</h1>"
        f'<span>{len(streams)} {noun}, <b id="fps">{fps:.1f}</b> frames/s</span>'
        '<a href="/metrics">metrics</a><a href="/v1/streams">JSON</a><a href="/openapi.json">API</a>'
        f'<span id="note" role="status"></span></header><main>{nothing if not streams else ""}'
        f'<div id="streams">{cards}</div></main><script>{_asset("page.js")}</script></body></html>'
    )


def _card(stream: Stream) -> str:
    source_id, name = escape(stream.source_id), escape(stream.camera_name or stream.source_id)
    way = f"/v1/streams/{source_id}"
    state = stream.state.value.replace("_", " ") + (" (frozen)" if stream.is_frozen else "")
    is_still = stream.state in STILL
    shown, source = (state, "") if is_still else ("no picture", f'src="{way}/preview.jpg"')
    size = f"{stream.width}×{stream.height} {stream.codec}" if stream.width else ""
    return (
        f'<article data-id="{source_id}" data-state="{stream.state.value}">'
        f'<a class="picture" href="{way}/preview.mjpeg"><span>{escape(shown)}</span>'
        f'<img {source} data-src="{way}/preview.jpg" alt="" loading="lazy"></a>'
        f'<div class="body"><h2><span class="name">{name}</span>'
        f'<span class="state {stream.state.value}">{escape(state)}</span></h2>'
        f'<div class="id" title="{escape(stream.uri)}">{source_id} {escape(size)}'
        f' <span data-f="decoder">{escape(stream.decoder)}</span></div>'
        f'<div class="reason" data-f="reason">{escape(stream.reason)}</div><dl>{_figures(stream)}</dl>'
        f'<table><tbody class="counts">{_counts(stream.counts)}</tbody></table>{_VERBS}</div></article>'
    )


def _figures(stream: Stream) -> str:
    dropped = ", ".join(f"{reason} {n}" for reason, n in stream.drops.items() if n)
    latency = "–" if stream.latency_s is None else f"{stream.latency_s * 1000:.0f} ms"
    rows = (
        ("frames/s", "fps", f"{stream.fps:.1f}", ""),
        ("latency", "latency", latency, ""),
        ("decoded", "frames", str(stream.frames), ""),
        ("inferred", "inferred", str(stream.inferred), ""),
        ("dropped", "drops", str(sum(stream.drops.values())), dropped),
        ("restarts", "restarts", str(stream.restarts), ""),
    )
    return "".join(
        f'<dt>{label}</dt><dd data-f="{name}" title="{escape(title)}">{text}</dd>' for label, name, text, title in rows
    )


def _counts(counts: Mapping[str, int]) -> str:
    return "".join(f"<tr><th>{escape(name)}</th><td>{counts[name]}</td></tr>" for name in shown_counts(counts))


def shown_counts(counts: Mapping[str, int]) -> list[str]:
    """The names that are shown: not of a rule's only class, whose count is the rule's. The script has the same."""

    def is_shown(name: str) -> bool:
        rule = next((other for other in counts if name.startswith(f"{other}/")), None)
        if rule is None or counts[rule] != counts[name]:
            return True
        return sum(other.startswith(f"{rule}/") for other in counts) > 1

    return [name for name in counts if is_shown(name)]
