"""A worker's own calls for pictures that Triton batches. Pictures that arrive during a call are sent in the next one.

The core is one process: at 6,500 pictures a second on an H200 it used 0.86 of a core, and requests waited for it.
Triton's batcher joins the calls of all workers.
"""

from collections.abc import Callable, Mapping
from dataclasses import replace

from penstock.engines.model_health import EngineView
from penstock.gateway.batching.batcher import BatcherPool, OnBatchFormed
from penstock.gateway.batching.options import BatchOptions, DeclaredOptions
from penstock.gateway.batching.queue import QueueStatistics, joined_statistics
from penstock.protocol.engine import Engine
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.inference import Batcher, BatchOwner, InferRequest, InferResponse
from penstock.protocol.shared_memory import Slab


class PictureBatches:
    """Batcher for the image endpoint of a worker. Other models' batches are formed by `core`."""

    def __init__(  # noqa: PLR0913 - one argument for each part
        self,
        core: Batcher,
        backend: Engine,
        watch: EngineView,
        options: DeclaredOptions,
        *,
        workers: int = 1,
        slab: Slab | None = None,
        is_apart: Callable[[str], bool] = lambda _: False,
        formed: OnBatchFormed | None = None,
    ) -> None:
        """workers: of the stack, which share each model's limits. is_apart: whether only the core calls the model.
        formed: see BatcherPool. Create it inside the running loop.
        """
        self._core, self._watch, self._options, self._is_apart = core, watch, options, is_apart
        self._workers = workers
        self._own: dict[str, tuple[BatchOptions, BatchOptions]] = {}  # the model's, and those of this worker's calls
        self._pool = BatcherPool(backend, self._own_options, slab=slab, formed=formed)

    def owns(self, model_name: str) -> bool:
        """Whether its pictures share calls; see Batcher."""
        return self._core.owns(model_name) or self._own_options(model_name) is not None

    def refuse_hopeless(self, model_name: str, *, rows: int, deadline: float | None) -> None:
        """See Batcher."""
        batches: Batcher = self._core if self._core.owns(model_name) else self._pool
        batches.refuse_hopeless(model_name, rows=rows, deadline=deadline)

    async def infer(self, request: InferRequest, *, client: str, priority: int = 0) -> InferResponse:
        """See Batcher. The batches are Triton's, so a call of this worker explains none."""
        if self._core.owns(request.model_name):
            return await self._core.infer(request, client=client, priority=priority)
        if self._own_options(request.model_name) is None:  # unloaded meanwhile
            raise EngineUnavailable(f"model {request.model_name!r} is being reloaded; retry in a second")
        response = await self._pool.infer(request, client=client, priority=priority)
        return replace(response, explanation=None)

    def statistics(self) -> Mapping[str, QueueStatistics]:
        """Statistics by model of this worker's own queues."""
        return self._pool.statistics()

    async def aclose(self) -> None:
        """Fails every request that waits or runs; after a drain there are none."""
        await self._pool.aclose()

    def _own_options(self, model_name: str) -> BatchOptions | None:
        """Of this worker's calls; None for a model whose pictures do not share them."""
        known = self._watch.models.get(model_name)
        if known is None or known.config is None or not known.is_ready or self._is_apart(model_name):
            return None
        options = self._options.of(known.config)
        if options.owner is not BatchOwner.TRITON or not options.reads_slab or known.config.merged_rows < 2:
            return None
        found = self._own.get(model_name)
        if found is None or found[0] is not options:
            own = share_of(options, rows=known.config.merged_rows, workers=self._workers)
            found = self._own[model_name] = options, own
        return found[1]


CALLS_OF_MANY_WORKERS = 2  # with one, a picture that just misses a call waits for a whole one


def share_of(options: BatchOptions, *, rows: int, workers: int) -> BatchOptions:
    """One worker's share of the model's calls and queue. rows: of one engine call.

    All workers together have about as many rows in Triton as the core would have, so a picture with a near deadline
    does not wait longer. With at most one worker per instance, there is about one call per instance: calls that queue
    in Triton take longer, and fewer pictures then meet their deadlines. With more workers, Triton merges the queued
    calls.
    """
    few = max(1, round(options.instances / workers))
    instances = few if workers <= options.instances else CALLS_OF_MANY_WORKERS
    return replace(
        options,
        owner=BatchOwner.GATEWAY,
        instances=instances,
        max_batch_size=min(rows, _share(rows * options.slots, workers * instances)),
        max_queue_size=_share(options.max_queue_size, workers),
        max_queue_bytes=_share(options.max_queue_bytes, workers),
        is_queued_again=True,
    )


def _share(number: int, parts: int) -> int:
    return -(-number // parts)


class ReportedQueues:
    """The workers' own queues, as they report them to the core. Counts of ended workers stay."""

    def __init__(self) -> None:
        self._latest: dict[int, Mapping[str, QueueStatistics]] = {}  # by the worker's number
        self._ended: dict[str, QueueStatistics] = {}

    def take(self, worker: int, queues: Mapping[str, QueueStatistics]) -> None:
        """Replaces the worker's report. A process that replaced another one begins at zero."""
        for name, former in self._latest.get(worker, {}).items():
            if name not in queues or _count(queues[name]) < _count(former):
                ended = self._ended.get(name)
                self._ended[name] = _idle(former) if ended is None else ended.with_former(_idle(former))
        self._latest[worker] = queues

    def lost(self, worker: int) -> None:
        """The worker's connection ended: nothing waits or runs there."""
        self._latest[worker] = {name: _idle(queue) for name, queue in self._latest.get(worker, {}).items()}

    def joined(self, own: Mapping[str, QueueStatistics]) -> dict[str, QueueStatistics]:
        """Statistics by model of all processes. own: the core's."""
        found: dict[str, list[QueueStatistics]] = {}
        for queues in (own, *self._latest.values(), self._ended):
            for name, queue in queues.items():
                found.setdefault(name, []).append(queue)
        return {name: joined_statistics(queues) for name, queues in found.items()}


def _count(queue: QueueStatistics) -> int:
    return sum(queue.closed_by.values()) + sum(queue.dropped.values())


def _idle(queue: QueueStatistics) -> QueueStatistics:
    return replace(queue, depth=0, rows=0, size_bytes=0, in_flight=0, fit=None, wait_s=None)
