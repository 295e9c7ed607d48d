"""POST …/infer: scanned, then relayed as it came; encoded images as the tensor that they become."""

import os
import re
import time
from collections.abc import Coroutine
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from server.core.caller import Caller
from server.core.compression import NOT_ENCODED
from server.core.encoded_images import EncodedCall
from server.core.errors import TooLarge
from server.core.relay import HttpAnswer, HttpCall
from server.dataplane import DataPlane, Verb
from server.engine_turns import Room
from server.rest.body import decompressed, header_if_given, read_body, single_header
from server.rest.calls import AnswerResponse, call_of, model_of, with_client_errors
from server.rest.codec import InferScan, scan_infer
from server.rest.deadline import deadline_of
from server.rest.disconnect import run_until_disconnect
from server.rest.encoded_images import encoded_call
from server.rest.gate import caller_of
from server.rest.limits import RestLimits
from server.rest.threads import run_scan

INFLATED_AT_ONCE = max(1, min(4, (os.cpu_count() or 1) // 2))  # large bodies; each takes a core for up to 0.5 s
SMALL_BYTES = 1 << 20  # decompressed; takes 4 ms at most
_HEADER_LENGTH = "inference-header-content-length"
_LEADING_NUMBER = re.compile(r"\s*([+-]?[0-9]+)", re.ASCII)


class InferEndpoint:
    """Tensors go through untouched; what is malformed, or would kill the engine, does not."""

    def __init__(self, plane: DataPlane, limits: RestLimits) -> None:
        self._plane = plane
        self._limits = limits
        self._inflating = Room(INFLATED_AT_ONCE)

    async def __call__(self, request: Request) -> Response:
        body = await read_body(request, self._limits)
        encoding = single_header(request, "content-encoding").lower()
        if encoding in NOT_ENCODED:
            work = await self._scanned(request, body, body)
        else:
            work = self._compressed(request, body, encoding)
        return AnswerResponse(with_client_errors(await run_until_disconnect(request.scope, request.receive, work)))

    async def _compressed(self, request: Request, body: bytes, encoding: str) -> HttpAnswer:
        """The answer to a compressed call."""
        work = await self._inflated(request, body, encoding)
        return await work

    async def _inflated(self, request: Request, body: bytes, encoding: str) -> Coroutine[Any, Any, HttpAnswer]:
        """The call to the plane. Clients take turns with large bodies: 64 KiB of gzip can hold 64 MiB of text.

        The decompressed body lives until it is scanned.
        """
        try:
            plain = await decompressed(body, encoding, min(SMALL_BYTES, self._limits.max_body_bytes))
        except TooLarge:
            if self._limits.max_body_bytes <= SMALL_BYTES:
                raise
        else:
            return await self._scanned(request, body, plain)
        until = deadline_of(request) or time.monotonic() + self._limits.body_timeout_s
        await self._inflating.enter(caller_of(request).client, 1, until, "the large compressed bodies before it")
        try:
            plain = await decompressed(body, encoding, self._limits.max_body_bytes)
            return await self._scanned(request, body, plain)
        finally:
            self._inflating.leave(1)

    async def _scanned(self, request: Request, body: bytes, plain: bytes) -> Coroutine[Any, Any, HttpAnswer]:
        """The call to the plane: as it came, or with its encoded images in the hands of the plane."""
        length = header_length_of(request)
        scan = await self._scan(request, plain, length)
        deadline = deadline_of(request, scan.head.timeout_us)
        call, caller = call_of(request, body), caller_of(request)
        if scan.head.bytes_inputs or scan.is_raw:
            place = self._plane.image_input(scan.head.model_name)
            if place is not None:
                asked = await run_scan(len(plain), encoded_call, scan.head, call, plain, length, place)
                if asked is not None:
                    return self._relay_images(scan, asked, caller, deadline)
        return self._relay(scan, call, caller, deadline)

    async def _scan(self, request: Request, plain: bytes, length: int | None) -> InferScan:
        size, depth = len(plain) if length is None else length, self._limits.max_json_depth
        return await run_scan(size, scan_infer, plain, length, model_of(request), depth)

    async def _relay(self, scan: InferScan, call: HttpCall, caller: Caller, deadline: float | None) -> HttpAnswer:
        if scan.classification_outputs:
            await self._plane.refuse_classification_of_bytes(scan.head, scan.classification_outputs)
        return await self._plane.relay_http(Verb.INFER, scan.head, call, caller=caller, deadline=deadline)

    async def _relay_images(
        self, scan: InferScan, asked: EncodedCall[HttpCall], caller: Caller, deadline: float | None
    ) -> HttpAnswer:
        if scan.classification_outputs:
            await self._plane.refuse_classification_of_bytes(scan.head, scan.classification_outputs)
        return await self._plane.relay_http_images(asked, caller=caller, deadline=deadline)


def header_length_of(request: Request) -> int | None:
    """The JSON's bytes as Triton reads the header: a leading number, 0 where there is none; None without a header.

    Raises InvalidRequest where it stands twice.
    """
    given = header_if_given(request, _HEADER_LENGTH)
    if given is None:
        return None
    number = _LEADING_NUMBER.match(given)
    return int(number[1]) if number else 0
