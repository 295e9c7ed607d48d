"""AsyncClient: the client of a gateway for asyncio."""

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterable, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Self, TypeVar, Unpack, overload

from penstock.client import deadlines, operations
from penstock.client.aio_transport import AioTransport
from penstock.client.client import CONCURRENCY
from penstock.client.exchange import Exchange
from penstock.client.operations import EngineVersion, Health, InferOptions, Operation
from penstock.client.options import MAX_ANSWER_BYTES, read_options
from penstock.client.pictures import ImageSource, is_several
from penstock.client.replies import value_of_reply
from penstock.client.results import Result
from penstock.protocol.engine import ModelMetadata, ModelState
from penstock.protocol.errors import InferenceError
from penstock.protocol.inference import Array

if TYPE_CHECKING:
    from penstock.protocol.batch_reports import ModelBatchReport
    from penstock.protocol.model_addition import ModelAdded

T = TypeVar("T")


class AsyncClient:
    """A gateway, for one event loop: the same as Client, to be awaited. `async with` or `aclose` closes it.

    Files are read and pictures encoded in threads.
    """

    def __init__(
        self,
        url: str | None = None,
        *,
        api_key: str | None = None,
        timeout_s: float = 60.0,
        retries: int = 2,
        max_answer_bytes: int = MAX_ANSWER_BYTES,
    ) -> None:
        """As for Client."""
        self._options = read_options(
            url, api_key, timeout_s=timeout_s, retries=retries, max_answer_bytes=max_answer_bytes
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
        return await self._infer_one(model, image, options)  # type: ignore[arg-type]

    async def infer_batch(
        self,
        model: str,
        images: Iterable[ImageSource] | AsyncIterable[ImageSource],
        *,
        concurrency: int = CONCURRENCY,
        **options: Unpack[InferOptions],
    ) -> AsyncIterator[Result]:
        """As Client.infer_batch; the pictures may come from an asynchronous iterable."""
        pending: deque[asyncio.Task[Result]] = deque()
        try:
            async for image in _each(images):
                if len(pending) == concurrency:
                    yield await pending.popleft()
                pending.append(asyncio.create_task(self._infer_one(model, image, options)))
            while pending:
                yield await pending.popleft()
        finally:
            for task in pending:
                task.cancel()
            await asyncio.gather(*pending, return_exceptions=True)

    async def infer_tensors(
        self, model: str, inputs: Mapping[str, Array], *, outputs: Sequence[str] = (), version: str = ""
    ) -> dict[str, Array]:
        """As Client.infer_tensors."""
        request = operations.tensor_request(model, inputs, outputs=outputs, version=version)
        found = await self.run(operations.infer_tensors(request))
        return {tensor.name: tensor.to_numpy() for tensor in found}

    async def health(self) -> Health:
        """As Client.health."""
        return await self.run(operations.health())

    async def engine(self) -> EngineVersion:
        """As Client.engine."""
        return await self.run(operations.engine_version())

    @staticmethod
    def deadline(seconds: float) -> AbstractContextManager[None]:
        """As Client.deadline: `with client.deadline(0.05):`, for the task that runs the block."""
        return deadlines.deadline(seconds)

    async def run(self, operation: Operation[T]) -> T:
        """As Client.run."""
        exchange = Exchange(operation, self._options, now=time.monotonic(), deadline=deadlines.current_deadline())
        while True:
            attempt = exchange.attempt(time.monotonic())
            try:
                return value_of_reply(operation, await self._http.send(attempt), self._options)
            except InferenceError as error:
                await asyncio.sleep(exchange.delay_s(error, time.monotonic()))

    async def aclose(self) -> None:
        """Closes the connections."""
        await self._http.aclose()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def _infer_one(self, model: str, image: ImageSource, options: InferOptions) -> Result:
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
