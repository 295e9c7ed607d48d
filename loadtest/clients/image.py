"""Pictures to an image endpoint: Penstock's, whose answers say more, or anybody's that takes an encoded picture."""

from collections.abc import Sequence
from urllib.parse import quote

import msgspec
from yarl import URL

from loadtest.clients.client import Answer, Endpoint
from loadtest.clients.http_port import HttpPort, HttpReply, HttpRequest
from loadtest.payloads import Picture
from loadtest.results import Stages, Status

PENSTOCKS_PATH = "/v2/models/{model}/image"
_BOUNDARY = b"penstock-load-7f3a19c2d45b"
_MULTIPART = f"multipart/form-data; boundary={_BOUNDARY.decode()}"


class _Timings(msgspec.Struct):
    decode: float = 0.0
    preprocess: float = 0.0
    queue: float = 0.0
    infer: float = 0.0
    postprocess: float = 0.0
    total: float = 0.0


class _Results(msgspec.Struct):
    results: list[msgspec.Raw]


class _ServersWord(msgspec.Struct):
    timings_ms: _Timings
    batch_size: int


_RESULTS = msgspec.json.Decoder(_Results)
_SERVERS_WORD = msgspec.json.Decoder(_ServersWord)


class ImageClient:
    """Posts prepared requests in turn, by number."""

    def __init__(self, port: HttpPort, requests: Sequence[HttpRequest], *, results: int) -> None:
        """results: how many an answer must hold; 0: whatever the answer holds is fine."""
        self._port = port
        self._requests = requests
        self._results = results

    async def send(self, number: int) -> Answer:
        """The picture with that number, counted round, and what became of it."""
        return await self._port.post(self._requests[number % len(self._requests)], self._judge)

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._port.aclose()

    def _judge(self, reply: HttpReply) -> Answer:
        if self._results and (count := _count_of_results(reply.body)) != self._results:
            return reply.bad(
                f"{count} results for {self._results} pictures in {reply.body[:100].decode(errors='replace')}"
            )
        try:
            told = _SERVERS_WORD.decode(reply.body)
        except (msgspec.DecodeError, UnicodeDecodeError):
            return reply.good()
        timings = told.timings_ms
        stages = Stages(
            timings.decode, timings.preprocess, timings.queue, timings.infer, timings.postprocess, timings.total
        )
        code = str(reply.status)
        return Answer(Status.OK, code, "", reply.sent_bytes, len(reply.body), told.batch_size, stages)


def results_wanted(endpoint: Endpoint, batch: int) -> int:
    """How many results an answer must hold: one a picture behind Penstock's path; behind another nobody knows: 0."""
    return batch if endpoint.image_path == PENSTOCKS_PATH else 0


def image_requests(endpoint: Endpoint, model: str, pictures: Sequence[Picture], *, batch: int) -> list[HttpRequest]:
    """A request a picture, or with a batch multipart/form-data of that many, each beginning with another picture."""
    url = URL(image_url(endpoint, model), encoded=True)
    if batch == 1:
        return [HttpRequest(url, {"Content-Type": one.media_type}, one.content) for one in pictures]
    turns = range(len(pictures))
    headers = {"Content-Type": _MULTIPART}
    return [
        HttpRequest(url, headers, _multipart([pictures[(turn + row) % len(pictures)] for row in range(batch)]))
        for turn in turns
    ]


def image_url(endpoint: Endpoint, model: str) -> str:
    """Where the pictures go."""
    return endpoint.http_url.rstrip("/") + endpoint.image_path.replace("{model}", quote(model, safe=""))


def _multipart(pictures: Sequence[Picture]) -> bytes:
    parts = []
    for number, picture in enumerate(pictures):
        head = f'Content-Disposition: form-data; name="file"; filename="{number}"\r\nContent-Type: {picture.media_type}'
        parts.append(b"--" + _BOUNDARY + b"\r\n" + head.encode() + b"\r\n\r\n" + picture.content + b"\r\n")
    return b"".join(parts) + b"--" + _BOUNDARY + b"--\r\n"


def _count_of_results(body: bytes) -> int:
    try:
        return len(_RESULTS.decode(body).results)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return 0
