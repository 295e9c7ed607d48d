"""A gateway and a video program whose every text is hostile: answers made from the schemas of both OpenAPI documents.

New endpoints and fields are in the schemas, so they are attacked without a change here.
"""

import asyncio
import contextlib
import re
import threading
from collections.abc import AsyncIterator, Iterator, Mapping
from concurrent.futures import Future
from contextlib import AbstractAsyncContextManager
from typing import Any

from aiohttp import web

from docs.rest_reference import Json, documents
from tests.console.harness import FakeGateway, served_console

ATTACK = (
    "\"'>--></title></style></textarea></script><img src=x onerror=window.hacked=1><svg onload=window.hacked=1>"
    "<script>window.hacked=1</script><iframe srcdoc='<script>parent.hacked=1</script>'></iframe>"
    "<a href=javascript:window.hacked=1>{{7*7}}${7*7}%00%0d[red]\x1b[31m\u202egnp\u2066"
)
# What no one sees, or what reorders a line, is spelled out
SHOWN = ATTACK.replace("\x1b", "\\u001b").replace("\u202e", "\\u202e").replace("\u2066", "\\u2066")
PNG = "iVBORw0KGgoAAAANSUhEUgAAAAEAAAABEAAAAABq7kcWAAAAC0lEQVR4nGMQMgEAAFsAR5b7G2UAAAAASUVORK5CYII="
URL = "javascript:window.hacked=1"
_TIME = re.compile(r"(?:^|_)(?:time|at|began|since|until)$")
_VALUES: Mapping[str, object] = {  # by the name of a property, of what pages compute with
    "path": [[0.1, 0.2], [0.3, 0.4]],
    "snapshot": "/v1/events/1/snapshot.jpg",
    "clip": "/v1/events/1/clip.mp4",
    "seconds": [[1.0, 2.0], [0.0, 1.0]],
    "omitted": 0,
    "size": [1, 1],
    "xyxy": [0.1, 0.1, 0.9, 0.9],
    "roles": ["admin", "infer", "read", ATTACK],
    "line-crossing": [{"name": ATTACK, "line": [[0.1, 0.5], [0.9, 0.5]], "class-id": ATTACK}],
    "roi-filtering": [{"name": ATTACK, "roi": [[0.1, 0.1], [0.5, 0.1], [0.5, 0.5]]}],
}
_TEXTS: Mapping[str, str] = {"url": URL, "uri": URL, "png16": PNG, "counts": "01"}
_PLAIN: Mapping[str, object] = {"boolean": True, "integer": 1, "number": 1}
_PIXEL = bytes.fromhex("47494638396101000100800000ffffff00000021f90401000000002c00000000010001000002024401003b")


class HostileApis(FakeGateway):
    """Both APIs. It keeps no calls."""

    def __init__(self) -> None:
        super().__init__()
        self._documents = documents()

    async def answer(self, request: web.Request) -> web.StreamResponse:
        await request.read()
        path = request.raw_path.partition("?")[0]
        if path.endswith("/rules"):
            return web.json_response({name: _VALUES[name] for name in ("line-crossing", "roi-filtering")})
        for document in self._documents:
            for template, methods in document["paths"].items():
                pattern = re.sub(r"\\\{\w+\\\}", "[^/]+", re.escape(template))
                if request.method.lower() in methods and re.fullmatch(pattern, path):
                    return _response(methods[request.method.lower()], document)
        return web.json_response({"error": ATTACK}, status=404)


@contextlib.contextmanager
def served_apart(serving: AbstractAsyncContextManager[str]) -> Iterator[str]:
    """The URL of a server that runs in a thread of its own until the end of the block."""
    loop, stop = asyncio.new_event_loop(), asyncio.Event()
    url: Future[str] = Future()

    async def serve() -> None:
        async with serving as served:
            url.set_result(served)
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(serve()))
    thread.start()
    try:
        yield url.result(30)
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join(30)
        loop.close()


@contextlib.asynccontextmanager
async def hostile_console() -> AsyncIterator[str]:
    """A console before these APIs."""
    async with served_console(HostileApis(), has_video=True) as console:
        yield console.url


def _response(operation: Json, document: Json) -> web.Response:
    """The operation's first good answer with content; an error if it has none."""
    for status, described in operation["responses"].items():
        for kind, content in described.get("content", {}).items() if status.startswith("2") else ():
            if kind == "application/json":
                return web.json_response(_made(content.get("schema", {}), document), status=int(status))
            if kind.startswith("image/"):
                return web.Response(body=_PIXEL, content_type="image/gif")
            if kind == "text/html":
                return web.Response(text=f"<title>{ATTACK}</title><p>{ATTACK}", content_type=kind)
    return web.json_response({"error": ATTACK}, status=409)


def _made(schema: Mapping[str, Any], document: Json, name: str = "") -> object:
    """A value of the schema, whose texts and free keys are ATTACK. name: of its property."""
    while "$ref" in schema:
        schema = document["components"]["schemas"][schema["$ref"].rsplit("/", 1)[1]]
    if name in _VALUES:
        return _VALUES[name]
    if choices := schema.get("anyOf"):
        if name == "next":  # the last page
            return None
        return _made(next(choice for choice in choices if choice.get("type") != "null"), document, name)
    if "enum" in schema:
        return schema["enum"][0]
    kind = schema.get("type")
    if kind == "array":
        return [_made(item, document) for item in schema.get("prefixItems") or [schema.get("items", {})]]
    if kind == "string":
        return _TEXTS.get(name) or ("2026-11-29T08:00:00Z" if _TIME.search(name) else ATTACK)
    if kind in _PLAIN:
        return _PLAIN[kind]
    if "properties" in schema:
        return {key: _made(value, document, key) for key, value in schema["properties"].items()}
    rest = schema.get("additionalProperties")
    return {ATTACK: _made(rest, document) if rest and rest is not True else ATTACK}
