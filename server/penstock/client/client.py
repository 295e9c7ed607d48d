"""Client: the synchronous client of a gateway."""

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
from penstock.client.options import CONCURRENCY, FRAMES_IN_FLIGHT, MAX_RESPONSE_BYTES, Protocol, read_options
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
    """A synchronous, thread-safe client of a gateway. All methods raise InferenceError with the gateway's message.

    Connections are reused. Idempotent requests are retried within the deadline if the connection breaks, or if the
    gateway returns 503 with Retry-After. Redirects are not followed, so the API key is sent to the gateway only.
    `close` or a `with` block closes the connections.
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
        max_response_bytes: int = MAX_RESPONSE_BYTES,
    ) -> None:
        """url: gateway URL, by default PENSTOCK_GATEWAY_URL, else http://127.0.0.1:8000.

        api_key: by default PENSTOCK_API_KEY. protocol: for infer_tensors; all other methods use HTTP. grpc_address:
        HOST:PORT, by default the HTTP port plus 1. timeout_s: timeout of a call in seconds. It is not sent to the
        gateway; `deadline` is. retries: attempts after the first. max_response_bytes: larger responses raise an error.
        TLS uses the CAs in SSL_CERT_FILE, and the client certificate in PENSTOCK_CLIENT_CERTIFICATE.
        """
        self._options = read_options(
            url,
            api_key,
            protocol=protocol,
            grpc_address=grpc_address,
            timeout_s=timeout_s,
            retries=retries,
            max_response_bytes=max_response_bytes,
        )
        self._http = HttpTransport(self._options)
        self.models = Models(self)

    def __repr__(self) -> str:
        return f"Client({self._options.url!r})"

    @property
    def url(self) -> str:
        """The gateway's URL."""
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
        """The result of an image. For a list of images: their results in the same order, sent concurrently.

        image: a path, an http:// or https:// URL, encoded bytes, a NumPy array (height, width, 3) uint8 in the channel
        order `color` (BGR by default), or a PIL image. options: see InferOptions. The model's task determines the
        class: DetectionResult, ClassificationResult, EmbeddingResult, TextResult, SegmentationResult or DepthResult.
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
        """Yields results in the order of the images. Images are read only as fast as results are consumed.

        concurrency: images in flight. The gateway batches them.
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
        """Yields (frame, result) in order for a video file, a camera (rtsp://…), a webcam (its index) or an iterable.

        drop: if true, the newest frame is sent whenever a result is consumed, and older frames are dropped; the default
        for cameras. If false, every frame is sent, and frames are read only as fast as results are consumed.
        concurrency: frames in flight; by default 1 with `drop`, else 4.
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
        """Yields (item, result) in the order of the items, with `concurrency` requests in flight."""
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
        """Output tensors by name, for any model. BYTES tensors are arrays of bytes objects; other arrays are read-only.

        inputs: arrays by name, with the batch dimension if the model has one. outputs: names to request, by default
        all.
        """
        request = operations.tensor_request(model, inputs, outputs=outputs, version=version)
        is_grpc = self._options.protocol == "grpc"
        found = self.run((operations.infer_tensors_by_grpc if is_grpc else operations.infer_tensors)(request))
        return {tensor.name: tensor.to_numpy() for tensor in found}

    def health(self) -> Health:
        """Whether the gateway is ready; the result is truthy if it is. Raises GatewayUnreachable."""
        return self.run(operations.health())

    def engine(self) -> EngineVersion:
        """Name and version of the engine."""
        return self.run(operations.engine_version())

    @staticmethod
    def deadline(seconds: float) -> AbstractContextManager[None]:
        """`with client.deadline(0.05):` sets a deadline, in seconds from now, for all requests in the block.

        The deadline is sent to the gateway, which rejects requests that it cannot finish in time. A nested block can
        only shorten the deadline.
        """
        return deadlines.deadline(seconds)

    def run(self, operation: Operation[T]) -> T:
        """Sends an operation of penstock.client.operations, with retries."""
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
        """All models and versions in the repository, with their state, and the reason if one is unavailable."""
        return self._client.run(operations.repository_index())

    def get(self, name: str, *, version: str = "") -> ModelMetadata:
        """Names, datatypes and shapes of the model's inputs and outputs."""
        return self._client.run(operations.model_metadata(name, version))

    def parameters(self, name: str) -> dict[str, str]:
        """The parameters in the model's config.pbtxt, such as its layout."""
        return self._client.run(operations.model_parameters(name))

    def explain(self, name: str) -> "ModelBatchReport":
        """Batching rules of the model, with statistics."""
        return self._client.run(operations.explain_model(name))

    def load(self, name: str) -> None:
        """Loads or reloads the model; returns when it is ready. Not retried."""
        self._client.run(operations.load_model(name))

    def unload(self, name: str) -> None:
        """Unloads the model. Not retried."""
        self._client.run(operations.unload_model(name))

    def add(
        self,
        file: str | Path,
        *,
        name: str = "",
        replace: bool = False,
        settings: Mapping[str, str | float] | None = None,
    ) -> "ModelAdded":
        """Uploads an ONNX file. The gateway detects its layout, runs a trial inference and serves it. Not retried.

        name: model name, by default the file's name. replace: replaces an existing model of that name. settings:
        options of `penstock models add` with underscores, such as {"layout": "yolov8"}, for what the file does not
        contain; an error names the missing ones.
        """
        operation = operations.add_model(Path(file), name, replace=replace, settings=settings or {})
        return self._client.run(operation)
