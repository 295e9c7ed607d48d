"""A fake plane, a fake recorder, and two ways to ask the app: in process, and over a socket from uvicorn."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from fastapi import FastAPI

from penstock.engines.model_health import KnownModel
from penstock.gateway.auth.authenticator import Authenticator
from penstock.gateway.batching.batch_report import explain_queue
from penstock.gateway.batching.explanation import explain_unbatched
from penstock.gateway.batching.options import BatchOptions
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.load.service import LoadTests
from penstock.gateway.model_adder import ModelAdder
from penstock.gateway.model_check import ModelChecker
from penstock.gateway.model_command import ModelProcessOptions
from penstock.gateway.model_uploads import ModelUploads
from penstock.gateway.readiness import Readiness, as_served
from penstock.gateway.rest.app import CoreServices, create_app
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.listener import HttpListener
from penstock.gateway.rest.openapi import describe
from penstock.gateway.rest.routes import ForwardedIdentity, RequestAuthentication
from penstock.gateway.shared_memory.regions import SWITCHED_OFF
from penstock.gateway.system.model_reports import ModelReports
from penstock.gateway.system.reports import SystemReports
from penstock.gateway.tracing import Tracer
from penstock.network import bind
from penstock.protocol.batch_reports import ModelBatchReport, RequestExplanation
from penstock.protocol.call import HttpAnswer, HttpCall, InferHead
from penstock.protocol.identity import ALL_ROLES, ANONYMOUS, Identity, Role, Verb
from penstock.protocol.inference import BatchOwner, Tensor, Timings, tensor_from_numpy
from penstock.protocol.request_checks import BLOCKED_EXTENSIONS, EncodedCall, ImageInput
from penstock.protocol.vision_results import Detections
from penstock.vision.results import ImageRequest, ImageResponse
from tests.support.system_sources import plain_model_sources, plain_sources

Headers = Sequence[tuple[bytes, bytes]]
KNOWN_MODEL = "ident"
VALID_INFER = b'{"inputs":[{"name":"x","shape":[1,2],"datatype":"FP32","data":[1,2]}]}'
JSON = ((b"content-type", b"application/json"),)


def one_box() -> ImageResponse:
    """An answer with one detection."""
    box = Detections(
        np.array([[10.12345, 20.5, 110.0, 220.25]], np.float32), np.array([0.91], np.float32), np.array([1], np.int64)
    )
    timings = Timings(0.0012345, 0.0004, 0.0001, 0.004, 0.00005, 7)
    return ImageResponse("ident", "1", (box,), ("background", "person"), timings, 0.0058)


class FakePlane:
    """Records what it is asked. error: raised by every call. holds: calls wait until released or cancelled."""

    def __init__(self) -> None:
        self.relayed: list[tuple[Verb, InferHead, HttpCall, float | None]] = []
        self.images: list[ImageRequest] = []
        self.tracer: Tracer | None = None
        self.classified: list[tuple[str, ...]] = []
        self.image_inputs: dict[str, ImageInput] = {}
        self.more_inputs: tuple[Tensor, ...] = ()
        self.encoded: list[tuple[bytes, ...]] = []
        self.answer = HttpAnswer(200, JSON, b'{"ok":true}')
        self.image_answer = one_box()
        self.error: Exception | None = None
        self.unready_reason = ""
        self.withheld: dict[str, KnownModel] = {}
        self.unmerged: dict[str, str] = {}
        self.holds = False
        self.is_stopping = False
        self.admission = InFlightLimiter(InFlightLimits())
        self.added: list[str] = []
        self.refused_additions: list[tuple[str, str]] = []
        self.removed: list[str] = []
        self.load_error: Exception | None = None
        self.taken_back: list[tuple[str, bool]] = []
        self.entered = asyncio.Event()
        self.released = asyncio.Event()
        self.cancelled = asyncio.Event()

    def readiness(self) -> Readiness:
        return Readiness(not self.unready_reason, self.unready_reason)

    def not_formed(self, head: InferHead) -> RequestExplanation:
        return explain_unbatched(head.model_name, BatchOwner.TRITON)

    async def explain_model(self, model_name: str, caller: Identity = ANONYMOUS) -> ModelBatchReport:
        await self._work()
        return explain_queue(model_name, BatchOptions(owner=BatchOwner.GATEWAY), None)

    why_no_shared_memory = SWITCHED_OFF
    blocked_extensions = BLOCKED_EXTENSIONS

    def model_label(self, model_name: str) -> str:
        return model_name if model_name == KNOWN_MODEL else "unknown"

    async def relay(
        self,
        verb: Verb,
        head: InferHead,
        call: HttpCall | EncodedCall[HttpAnswer],
        *,
        caller: Identity = ANONYMOUS,
        deadline: float | None = None,
    ) -> HttpAnswer:
        """Encoded images become a tensor of their sizes in bytes."""
        if head.classification_outputs:
            self.classified.append(head.classification_outputs)
            if self.error is not None:
                raise self.error
        if isinstance(call, EncodedCall):
            self.encoded.append(call.images)
            sizes = np.array([len(image) for image in call.images], np.float32)
            call = call.with_tensors((tensor_from_numpy("x", sizes), *self.more_inputs))
        self.relayed.append((verb, head, call, deadline))
        await self._work()
        unmerged = self.unmerged.get(head.model_name, "")
        return as_served(verb, head.model_name, call, self.answer, self.withheld, unmerged)

    def image_input(self, model_name: str) -> ImageInput | None:
        return self.image_inputs.get(model_name)

    async def infer_images(self, request: ImageRequest, caller: Identity = ANONYMOUS) -> ImageResponse:
        self.images.append(request)
        await self._work()
        if request.write is None or request.is_drawn:
            return self.image_answer
        results = [request.write(one, self.image_answer.labels) for one in self.image_answer.results]
        return replace(self.image_answer, results=tuple(results))

    def refused_addition(self, model_name: str, caller: Identity, outcome: str) -> None:
        self.refused_additions.append((model_name, outcome))

    @contextmanager
    def adding(self, model_name: str, caller: Identity) -> Iterator[None]:
        self.added.append(model_name)
        yield

    async def remove_model(self, model_name: str, caller: Identity, remove: Callable[[], None]) -> None:
        await self._work()
        self.removed.append(model_name)
        remove()

    async def load_added(self, model_name: str) -> None:
        await self._work()
        if self.load_error is not None:
            raise self.load_error

    async def restore(self, model_name: str, *, has_previous: bool) -> None:
        self.taken_back.append((model_name, has_previous))

    async def _work(self) -> None:
        self.entered.set()
        if self.error is not None:
            raise self.error
        if self.holds:
            try:
                await self.released.wait()
            except asyncio.CancelledError:
                self.cancelled.set()
                raise


class FakeRecorder:
    """Stores what the app counts."""

    def __init__(self) -> None:
        self.done: list[tuple[str, str, str]] = []
        self.reasons: list[str] = []
        self.cancelled_count = 0

    def request_done(self, *, model: str, protocol: str, code: str, seconds: float) -> None:
        assert seconds >= 0
        self.done.append((model, protocol, code))

    def rejected(self, reason: str) -> None:
        self.reasons.append(reason)

    def cancelled(self, protocol: str) -> None:
        assert protocol == "http"
        self.cancelled_count += 1


@dataclass
class Reply:
    """An answer. headers: names in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes


@dataclass
class Front:
    """The app over fakes, asked in process."""

    plane: FakePlane = field(default_factory=FakePlane)
    recorder: FakeRecorder = field(default_factory=FakeRecorder)
    limits: RestOptions = field(default_factory=RestOptions)
    door: Authenticator | None = None
    uploads: ModelUploads | None = None  # of models that are added by `add_options`
    add_options: ModelProcessOptions | None = None
    gate: ForwardedIdentity | None = None  # of a core
    system: SystemReports = field(default_factory=lambda: SystemReports(plain_sources()))
    models: ModelReports = field(default_factory=lambda: ModelReports(plain_model_sources()))
    load: LoadTests | None = None
    checker: ModelChecker | None = None

    def __post_init__(self) -> None:
        plane: Any = self.plane
        recorder: Any = self.recorder
        gate = RequestAuthentication(self.door) if self.door is not None else self.gate
        adder = ModelAdder(plane, self.uploads, self.add_options) if self.uploads is not None else None
        services = CoreServices(adder, self.system, self.models, self.load, self.checker)
        self.app = create_app(plane, self.limits, recorder, gate=gate, services=services)

    @property
    def fastapi(self) -> FastAPI:
        """The application inside the middleware."""
        app: Any = self.app
        while not isinstance(app, FastAPI):
            app = app._app
        return app

    async def ask(self, method: str, target: str, body: bytes = b"", headers: Headers = ()) -> Reply:
        """One request as an ASGI server hands it over, the body in one piece."""
        path, _, query = target.encode("latin-1").partition(b"?")
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": "1.1",
            "method": method,
            "scheme": "http",
            "path": path.decode("latin-1"),
            "raw_path": path,
            "query_string": query,
            "root_path": "",
            "headers": [(b"host", b"test"), (b"content-length", b"%d" % len(body)), *headers],
            "client": ("127.0.0.1", 1),
            "server": ("127.0.0.1", 2),
        }
        pending: list[dict[str, Any]] = [{"type": "http.request", "body": body, "more_body": False}]
        sent: list[dict[str, Any]] = []

        async def receive() -> dict[str, Any]:
            if not pending:
                await asyncio.Event().wait()
            return pending.pop()

        async def send(message: dict[str, Any]) -> None:
            sent.append(message)

        await self.app(scope, receive, send)
        answer_headers = {name.decode(): value.decode() for name, value in sent[0]["headers"]}
        return Reply(sent[0]["status"], answer_headers, b"".join(message.get("body", b"") for message in sent[1:]))

    @asynccontextmanager
    async def served(self) -> AsyncIterator[int]:
        """The app behind uvicorn; gives the port."""
        listener = HttpListener(self.app, bind("127.0.0.1", 0, flag="--http-port"))
        listener.start()
        try:
            yield listener.port
        finally:
            await listener.stop(5.0)


def described_by(
    front: Front,
    extensions: frozenset[str] | None = None,
    blocked: frozenset[str] = frozenset(),
    open_to: frozenset[Role] = ALL_ROLES,
) -> dict[str, Any]:
    """The description of its API; by default of all that can be served."""
    return describe(front.fastapi, extensions, blocked, open_to)


class Client:
    """A raw connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader = reader
        self.writer = writer

    @classmethod
    @asynccontextmanager
    async def connected(cls, port: int, *, address: str = "127.0.0.1") -> AsyncIterator["Client"]:
        """address: the client's."""
        client = cls(*await asyncio.open_connection("127.0.0.1", port, local_addr=(address, 0)))
        try:
            yield client
        finally:
            await client.close()

    async def send(self, data: bytes) -> None:
        self.writer.write(data)
        await self.writer.drain()

    async def reply(self) -> Reply:
        """The next answer on this connection; interim 1xx answers are skipped."""
        status, headers = 100, {}
        while status < 200:
            head = (await self.reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
            status = int(head[0].split()[1])
            headers = {line.partition(":")[0].lower(): line.partition(":")[2].strip() for line in head[1:] if line}
        return Reply(status, headers, await self.reader.readexactly(int(headers.get("content-length", "0"))))

    async def until_closed(self) -> bytes:
        """All that still comes, whether an end or a reset follows it."""
        received = b""
        with contextlib.suppress(ConnectionResetError):
            while piece := await self.reader.read(1024):
                received += piece
        return received

    async def close(self) -> None:
        self.writer.close()
        try:
            await self.writer.wait_closed()
        except ConnectionError:
            return


def request_bytes(method: str, target: str, body: bytes = b"", headers: Headers = ()) -> bytes:
    """A request as it stands on the wire."""
    lines = [f"{method} {target} HTTP/1.1".encode(), b"Host: test", b"Content-Length: %d" % len(body)]
    lines += [name + b": " + value for name, value in headers]
    return b"\r\n".join(lines) + b"\r\n\r\n" + body
