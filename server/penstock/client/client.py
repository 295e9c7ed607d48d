"""Client: the blocking client of a gateway."""

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager
from contextvars import copy_context
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, overload

from penstock.client import deadlines, operations
from penstock.client.exchange import Exchange
from penstock.client.http_transport import HttpTransport
from penstock.client.operations import EngineVersion, Health, InferOptions, Operation
from penstock.client.options import CONCURRENCY, FRAMES_IN_FLIGHT, MAX_ANSWER_BYTES, Protocol, read_options
from penstock.client.pictures import ImageSource, is_several
from penstock.client.replies import value_of_reply
from penstock.client.results import Result
from penstock.client.video import LatestFrames, VideoFrame, VideoSource, frames_of, is_live
from penstock.protocol.engine import ModelMetadata, ModelState
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import Array

if TYPE_CHECKING:
    from penstock.client.grpc_transport import GrpcTransport
    from penstock.protocol.batch_reports import ModelBatchReport
    from penstock.protocol.model_addition import ModelAdded

S = TypeVar("S")
T = TypeVar("T")


class Client:
    """A gateway, for threads. All methods raise InferenceError, with the gateway's sentence.

    Connections are kept open and shared. Requests that may run twice are sent again, within the deadline, if the
    connection breaks, or if the gateway answers 503 with Retry-After. Redirects are not followed: the key is sent to
    the gateway only. `close` or a `with` block closes the connections.
    """

    def __init__(  # noqa: PLR0913 - each is an option of the connection
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        protocol: Protocol = "http",
        grpc_address: str = "",
        timeout_s: float = 60.0,
        retries: int = 2,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """url: such as http://127.0.0.1:8000; by default PENSTOCK_GATEWAY_URL, else that one.

        api_key: by default PENSTOCK_API_KEY. protocol: of infer_tensors; pictures, models and health use HTTP.
        grpc_address: HOST:PORT, by default the port after HTTP's. timeout_s: longest wait for an answer, which the
        gateway is not given; see `deadline`. retries: attempts after the first. max_answer_bytes: larger answers are
        errors. TLS: the CAs of SSL_CERT_FILE, and the client certificate of PENSTOCK_CLIENT_CERTIFICATE.
        """
        self._options = read_options(
            url,
            api_key,
            protocol=protocol,
            grpc_address=grpc_address,
            timeout_s=timeout_s,
            retries=retries,
            max_answer_bytes=max_answer_bytes,
        )
        self._http = HttpTransport(self._options)
        self.models = Models(self)

    def __repr__(self) -> str:
        return f"Client({self._options.url!r})"

    @property
    def url(self) -> str:
        """The gateway's address."""
        return self._options.url

    @overload
    def infer(  # type: ignore[overload-overlap]  # a str is also a sequence of str
        self, model: str, image: ImageSource, **options: Unpack[InferOptions]
    ) -> Result: ...

    @overload
    def infer(self, model: str, image: Sequence[ImageSource], **options: Unpack[InferOptions]) -> list[Result]: ...

    def infer(
        self, model: str, image: ImageSource | Sequence[ImageSource], **options: Unpack[InferOptions]
    ) -> Result | list[Result]:
        """The result of a picture, or of each picture of a list, in its order; these are sent concurrently.

        image: a path, an http:// address, encoded bytes, a NumPy array (height, width, 3) uint8 in the channel order
        `color` (BGR by default), or a PIL image. options: see InferOptions. The result is a DetectionResult,
        ClassificationResult, EmbeddingResult, TextResult, SegmentationResult or DepthResult, by the model.
        """
        if is_several(image):
            return list(self.infer_batch(model, image, **options))  # type: ignore[arg-type]
        return self._infer_one(model, options, image)  # type: ignore[arg-type]

    def infer_batch(
        self,
        model: str,
        images: Iterable[ImageSource],
        *,
        concurrency: int = CONCURRENCY,
        **options: Unpack[InferOptions],
    ) -> Iterator[Result]:
        """The results in the order of the pictures. Pictures are taken as results are.

        concurrency: pictures in flight. The gateway merges them into batches.
        """
        for _, result in self._in_order(images, partial(self._infer_one, model, options), concurrency):
            yield result

    def stream(
        self,
        model: str,
        source: VideoSource,
        *,
        concurrency: int | None = None,
        drop: bool | None = None,
        **options: Unpack[InferOptions],
    ) -> Iterator[tuple[VideoFrame, Result]]:
        """(frame, result) for the frames of a video file, a camera (rtsp://…), a webcam (its number) or an iterable.

        drop: whether only the newest frame is sent when a result is taken, by default for cameras; otherwise every
        frame is sent, and the source is read as results are taken. concurrency: frames in flight; by default 1 where
        frames are dropped, else 4. A frame and its result are in the order of the source.
        """
        is_dropping = is_live(source) if drop is None else drop
        frames = LatestFrames(source) if is_dropping else frames_of(source)
        infer = partial(self._infer_frame, model, options)
        try:
            yield from self._in_order(frames, infer, concurrency or (1 if is_dropping else FRAMES_IN_FLIGHT))
        finally:
            if isinstance(frames, LatestFrames):
                frames.close()

    def _in_order(
        self, items: Iterable[S], infer: Callable[[S], Result], concurrency: int
    ) -> Iterator[tuple[S, Result]]:
        """(item, result) in the items' order, with so many in flight."""
        with ThreadPoolExecutor(concurrency, "penstock-client") as pool:
            pending: deque[tuple[S, Future[Result]]] = deque()
            try:
                for item in items:
                    pending.append((item, pool.submit(copy_context().run, infer, item)))
                    if len(pending) == concurrency:
                        first, future = pending.popleft()
                        yield first, future.result()
                while pending:
                    first, future = pending.popleft()
                    yield first, future.result()
            finally:
                for _, future in pending:
                    future.cancel()

    def _infer_frame(self, model: str, options: InferOptions, frame: VideoFrame) -> Result:
        return self._infer_one(model, options, frame.image)

    def _infer_one(self, model: str, options: InferOptions, image: ImageSource) -> Result:
        return self.run(operations.infer_picture(model, image, options))

    def infer_tensors(
        self, model: str, inputs: Mapping[str, Array], *, outputs: Sequence[str] = (), version: str = ""
    ) -> dict[str, Array]:
        """Raw outputs by name, for any model. BYTES are arrays of bytes objects; other arrays are read-only.

        inputs: arrays with the batch dimension, if the model has one. outputs: those wanted, all by default.
        """
        request = operations.tensor_request(model, inputs, outputs=outputs, version=version)
        is_grpc = self._options.protocol == "grpc"
        found = self.run((operations.infer_tensors_by_grpc if is_grpc else operations.infer_tensors)(request))
        return {tensor.name: tensor.to_numpy() for tensor in found}

    def health(self) -> Health:
        """Whether the gateway takes requests; true or false as a condition. Raises GatewayUnreachable."""
        return self.run(operations.health())

    def engine(self) -> EngineVersion:
        """Name and version of the engine."""
        return self.run(operations.engine_version())

    @staticmethod
    def deadline(seconds: float) -> AbstractContextManager[None]:
        """`with client.deadline(0.05):` ends requests in the block within so many seconds, counted from its start.

        The gateway is given the deadline: it refuses at once what it cannot finish in time, and drops what is late. A
        nested block can only end earlier.
        """
        return deadlines.deadline(seconds)

    def run(self, operation: Operation[T]) -> T:
        """Sends one operation of penstock.client.operations, again where that may help."""
        exchange = Exchange(operation, self._options, now=time.monotonic(), deadline=deadlines.current_deadline())
        while True:
            attempt = exchange.attempt(time.monotonic())
            try:
                transport = self._grpc if operation.method == operations.GRPC else self._http
                return value_of_reply(operation, transport.send(attempt), self._options)
            except InferenceError as error:
                time.sleep(exchange.delay_s(error, time.monotonic()))

    def close(self) -> None:
        """Closes idle connections."""
        self._http.close()
        if "_grpc" in vars(self):
            self._grpc.close()

    @cached_property
    def _grpc(self) -> "GrpcTransport":
        from penstock.client.grpc_transport import GrpcTransport  # loads gRPC

        return GrpcTransport(self._options)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Models:
    """The gateway's models: `client.models`."""

    def __init__(self, client: Client) -> None:
        """client: sends the requests."""
        self._client = client

    def list(self) -> tuple[ModelState, ...]:
        """Every model and version that the engine knows, with its state and the reason if it is not served."""
        return self._client.run(operations.repository_index())

    def get(self, name: str, *, version: str = "") -> ModelMetadata:
        """Inputs and outputs, with their shapes."""
        return self._client.run(operations.model_metadata(name, version))

    def parameters(self, name: str) -> dict[str, str]:
        """The parameters of the model's config.pbtxt: its card."""
        return self._client.run(operations.model_parameters(name))

    def explain(self, name: str) -> "ModelBatchReport":
        """How its batches are formed, with statistics."""
        return self._client.run(operations.explain_model(name))

    def load(self, name: str) -> None:
        """Loads or reloads; returns when the model takes requests. Not sent again."""
        self._client.run(operations.load_model(name))

    def unload(self, name: str) -> None:
        """Takes the model out of service. Not sent again."""
        self._client.run(operations.unload_model(name))

    def add(
        self,
        file: str | Path,
        *,
        name: str = "",
        replace: bool = False,
        settings: Mapping[str, str | float] | None = None,
    ) -> "ModelAdded":
        """Sends an ONNX file; the gateway recognises its layout, tries it and serves it. Not sent again.

        name: by default the file's. settings: what the file does not say, as the flags of `penstock models add` with
        underscores, such as {"layout": "yolov8"}; an error names them. replace: a model of that name.
        """
        operation = operations.add_model(Path(file), name, replace=replace, settings=settings or {})
        return self._client.run(operation)
