"""AsyncClient: the asyncio client of a gateway."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, overload

from penstock.client import deadlines, operations
from penstock.client.aio_transport import AioTransport
from penstock.client.exchange import Exchange
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
    from penstock.client.grpc_transport import AioGrpcTransport
    from penstock.protocol.batch_reports import ModelBatchReport
    from penstock.protocol.model_addition import ModelAdded

S = TypeVar("S")
T = TypeVar("T")


class AsyncClient:
    """The asyncio version of Client, for one event loop. `async with` or `aclose` closes the connections.

    Files are read and images encoded in threads.
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
        """As for Client."""
        self._options = read_options(
            url,
            api_key,
            protocol=protocol,
            grpc_address=grpc_address,
            timeout_s=timeout_s,
            retries=retries,
            max_response_bytes=max_response_bytes,
        )
        self._http = AioTransport(self._options)
        self.models = AsyncModels(self)

    def __repr__(self) -> str:
        return f"AsyncClient({self._options.url!r})"

    @property
    def url(self) -> str:
        """The gateway's address."""
        return self._options.url

    @overload
    async def infer(  # type: ignore[overload-overlap]  # a str is also a sequence of str
        self, model: str, image: ImageSource, **options: Unpack[InferOptions]
    ) -> Result: ...

    @overload
    async def infer(
        self, model: str, image: Sequence[ImageSource], **options: Unpack[InferOptions]
    ) -> list[Result]: ...

    async def infer(
        self, model: str, image: ImageSource | Sequence[ImageSource], **options: Unpack[InferOptions]
    ) -> Result | list[Result]:
        """As Client.infer."""
        if is_several(image):
            return [result async for result in self.infer_batch(model, image, **options)]  # type: ignore[arg-type]
        return await self._infer_one(model, options, image)  # type: ignore[arg-type]

    async def infer_batch(
        self,
        model: str,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        *,
        concurrency: int = CONCURRENCY,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[Result]:
        """As Client.infer_batch; `images` may be an asynchronous iterable."""
        infer = partial(self._infer_one, model, options)
        async for _, result in self._in_order(_each(images), infer, concurrency):
            yield result

    async def stream(
        self,
        model: str,
        source: VideoSource,
        *,
        concurrency: int | None = None,
        drop: bool | None = None,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[tuple[VideoFrame, Result]]:
        """As Client.stream. The source is read in threads."""
        is_dropping = is_live(source) if drop is None else drop
        frames = LatestFrames(source) if is_dropping else frames_of(source)
        infer = partial(self._infer_frame, model, options)
        try:
            number = concurrency or (1 if is_dropping else FRAMES_IN_FLIGHT)
            async for pair in self._in_order(_each_in_thread(frames), infer, number):
                yield pair
        finally:
            if isinstance(frames, LatestFrames):
                await asyncio.to_thread(frames.close)

    async def _in_order(
        self, items: AsyncIterator[S], infer: Callable[[S], Awaitable[Result]], concurrency: int
    ) -> AsyncIterator[tuple[S, Result]]:
        """Yields (item, result) in the order of the items, with `concurrency` requests in flight."""
        pending: deque[tuple[S, asyncio.Future[Result]]] = deque()
        try:
            async for item in items:
                pending.append((item, asyncio.ensure_future(infer(item))))
                if len(pending) == concurrency:
                    first, task = pending.popleft()
                    yield first, await task
            while pending:
                first, task = pending.popleft()
                yield first, await task
        finally:
            for _, task in pending:
                task.cancel()
            await asyncio.gather(*(task for _, task in pending), return_exceptions=True)

    async def _infer_frame(self, model: str, options: InferOptions, frame: VideoFrame) -> Result:
        return await self._infer_one(model, options, frame.image)

    async def infer_tensors(
        self, model: str, inputs: Mapping[str, Array], *, outputs: Sequence[str] = (), version: str = ""
    ) -> dict[str, Array]:
        """As Client.infer_tensors."""
        request = operations.tensor_request(model, inputs, outputs=outputs, version=version)
        is_grpc = self._options.protocol == "grpc"
        found = await self.run((operations.infer_tensors_by_grpc if is_grpc else operations.infer_tensors)(request))
        return {tensor.name: tensor.to_numpy() for tensor in found}

    async def health(self) -> Health:
        """As Client.health."""
        return await self.run(operations.health())

    async def engine(self) -> EngineVersion:
        """As Client.engine."""
        return await self.run(operations.engine_version())

    @staticmethod
    def deadline(seconds: float) -> AbstractContextManager[None]:
        """As Client.deadline, for requests of the task that runs the block."""
        return deadlines.deadline(seconds)

    async def run(self, operation: Operation[T]) -> T:
        """As Client.run."""
        exchange = Exchange(operation, self._options, now=time.monotonic(), deadline=deadlines.current_deadline())
        while True:
            attempt = exchange.attempt(time.monotonic())
            try:
                transport = self._grpc if operation.method == operations.GRPC else self._http
                return value_of_reply(operation, await transport.send(attempt), self._options)
            except InferenceError as error:
                await asyncio.sleep(exchange.delay_s(error, time.monotonic()))

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()
        if "_grpc" in vars(self):
            await self._grpc.aclose()

    @cached_property
    def _grpc(self) -> "AioGrpcTransport":
        from penstock.client.grpc_transport import AioGrpcTransport  # loads gRPC

        return AioGrpcTransport(self._options)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _infer_one(self, model: str, options: InferOptions, image: ImageSource) -> Result:
        if isinstance(image, bytes):
            return await self.run(operations.infer_picture(model, image, options))
        return await self.run(await asyncio.to_thread(operations.infer_picture, model, image, options))


class AsyncModels:
    """The gateway's models: `client.models`. The methods are those of Models."""

    def __init__(self, client: AsyncClient) -> None:
        """client: sends the requests."""
        self._client = client

    async def list(self) -> tuple[ModelState, ...]:
        """As Models.list."""
        return await self._client.run(operations.repository_index())

    async def get(self, name: str, *, version: str = "") -> ModelMetadata:
        """As Models.get."""
        return await self._client.run(operations.model_metadata(name, version))

    async def parameters(self, name: str) -> dict[str, str]:
        """As Models.parameters."""
        return await self._client.run(operations.model_parameters(name))

    async def explain(self, name: str) -> "ModelBatchReport":
        """As Models.explain."""
        return await self._client.run(operations.explain_model(name))

    async def load(self, name: str) -> None:
        """As Models.load."""
        await self._client.run(operations.load_model(name))

    async def unload(self, name: str) -> None:
        """As Models.unload."""
        await self._client.run(operations.unload_model(name))

    async def add(
        self,
        file: str | Path,
        *,
        name: str = "",
        replace: bool = False,
        settings: Mapping[str, str | float] | None = None,
    ) -> "ModelAdded":
        """As Models.add."""
        operation = operations.add_model(Path(file), name, replace=replace, settings=settings or {})
        return await self._client.run(operation)


async def _each(images: Iterable[ImageSource] | AsyncIterable[ImageSource]) -> AsyncIterator[ImageSource]:
    if isinstance(images, AsyncIterable):
        async for image in images:
            yield image
        return
    for image in images:
        yield image


async def _each_in_thread(frames: Iterator[VideoFrame]) -> AsyncIterator[VideoFrame]:
    while (frame := await asyncio.to_thread(next, frames, None)) is not None:
        yield frame
