"""Several engines with the same models behind the interface of one. replica_routing.py chooses the engine of a call."""

import asyncio
from collections.abc import Awaitable
from dataclasses import replace

from penstock.engines.dedicated_engines import DeferredStream
from penstock.engines.relayed_calls import INFER_METHOD, is_for_all_replicas, load_change, named_by
from penstock.engines.replica import CountedStream, merged_pages
from penstock.engines.replica_routing import ReplicaRouter, RoutedCall, always, never, verdict_of
from penstock.protocol.call import A, Answer, Call, GrpcCall, GrpcMetadata, HttpCall, HttpStream
from penstock.protocol.engine import Engine, GrpcStream, ModelConfig, ModelMetadata, ModelState
from penstock.protocol.errors import EngineUnavailable, ModelNotReady
from penstock.protocol.inference import InferRequest, InferResponse


class Replicas(ReplicaRouter):
    """An engine of several. Create it inside the running loop; aclose() closes the engines, too."""

    # Relay

    async def send(self, call: Call[A], *, deadline: float | None) -> A:
        def ask(engine: Engine) -> Awaitable[A]:
            return engine.send(call, deadline=deadline)

        if is_for_all_replicas(call):
            answer = max(await self._call_all(ask, self._homes(named_by(call))), key=lambda answer: answer.status_code)
            self._note_change(load_change(call), answer)
            return answer
        return await self._ask(ask, self._question(call), verdict_of)

    async def stream(self, call: HttpCall, *, deadline: float | None) -> HttpStream:
        replica = self._pick(self._question(call))
        stream = await self._attempt(replica, lambda engine: engine.stream(call, deadline=deadline), lambda _: None)
        chunks = replica.held(stream.chunks)
        await anext(chunks)
        return replace(stream, chunks=chunks)

    async def open_stream(self, method: str, metadata: GrpcMetadata, *, deadline: float | None) -> GrpcStream:
        """The whole stream on one replica, because it may be a sequence. It has the first request's model."""

        async def opened(first: bytes = b"") -> GrpcStream:
            replica = self._pick(self._question(GrpcCall(INFER_METHOD, first)) if first else RoutedCall(never))
            return CountedStream(await replica.engine.open_stream(method, metadata, deadline=deadline), replica)

        return DeferredStream(opened) if self._homes_by_model else await opened()

    # Backend

    async def infer(self, request: InferRequest) -> InferResponse:
        sequence = request.parameters.get("sequence_id") or ""
        question = RoutedCall(lambda: not sequence, request.model_name, str(sequence), lambda: request.model_name)
        return await self._ask(lambda engine: engine.infer(request), question, lambda _: True)

    async def model_metadata(self, model_name: str, model_version: str = "") -> ModelMetadata:
        question = RoutedCall(always, model_name)
        return await self._ask(lambda engine: engine.model_metadata(model_name, model_version), question)

    async def model_config(self, model_name: str, model_version: str = "") -> ModelConfig:
        """One replica's config, with the instances of all."""
        question = RoutedCall(always, model_name)
        config = await self._ask(lambda engine: engine.model_config(model_name, model_version), question)
        (self._sequential.add if config.has_sequence_batching else self._sequential.discard)(model_name)
        count = self._counted_homes[model_name] = max(1, len(self._homes(model_name)))
        return replace(config, instance_count=config.instance_count * count)

    async def ready(self, model_name: str = "", model_version: str = "") -> bool:
        """Whether at least one replica is ready. Does not wait for slow ones."""
        if model_name:
            question = RoutedCall(always, model_name)
            try:
                return await self._ask(lambda engine: engine.ready(model_name, model_version), question)
            except EngineUnavailable:
                return False
        pending = {probe for replica in self._replicas if (probe := replica.probe()) is not None}
        while pending:
            done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            if any(not probe.cancelled() and probe.result() for probe in done):
                return True
        return False

    async def repository_index(self) -> list[ModelState]:
        """The index of all answering replicas. A version is ready if it is in one of them."""
        rows: dict[tuple[str, str], ModelState] = {}
        for listed in await self._each(self._passable(), lambda replica: replica.index_rows()):
            for row in listed:
                known = rows.get((row.name, row.version))
                if known is None or (row.state == "READY" and known.state != "READY"):
                    rows[row.name, row.version] = row
        for name in self._homes_by_model:
            if reason := self._why_homeless(name):
                rows = {key: row for key, row in rows.items() if row.name != name}
                rows[name, ""] = ModelState(name, "", "UNAVAILABLE", reason)
        ready = {name for (name, _), row in rows.items() if row.state == "READY"}
        return [row for (name, version), row in rows.items() if version or row.state or name not in ready]

    async def load(self, model_name: str) -> None:
        """Loads into all answering replicas; recovering ones load it, too."""
        if reason := self._why_homeless(model_name):
            self._wanted.add(model_name)
            raise ModelNotReady(reason)
        await self._call_all(lambda engine: engine.load(model_name), self._homes(model_name))
        self._wanted.add(model_name)

    async def unload(self, model_name: str) -> None:
        self._wanted.discard(model_name)
        await self._call_all(lambda engine: engine.unload(model_name), self._homes(model_name))

    async def metrics(self) -> bytes:
        """All replicas' pages merged, with the label `replica`."""
        pages = await asyncio.gather(*(replica.engine.metrics() for replica in self._replicas))
        return merged_pages({replica.name: page for replica, page in zip(self._replicas, pages, strict=True) if page})

    async def aclose(self) -> None:
        for replica in self._replicas:
            replica.close()
        await asyncio.gather(*(replica.engine.aclose() for replica in self._replicas))

    def _note_change(self, change: tuple[str, bool] | None, answer: Answer) -> None:
        """A relayed load or unload: recovering replicas follow it."""
        if change is not None and answer.succeeded:
            model, is_load = change
            (self._wanted.add if is_load else self._wanted.discard)(model)
