"""A worker's own calls for pictures that Triton batches. Pictures that arrive during a call are sent in the next one.

The core is one process: at 6,500 pictures a second on an H200 it used 0.86 of a core, and requests waited for it.
Triton's batcher joins the calls of all workers, and neither waits while an instance is free.
"""

from collections.abc import Callable
from dataclasses import replace

from penstock.engines.model_health import EngineView
from penstock.gateway.batching.batcher import BatcherPool
from penstock.gateway.batching.options import BatchOptions, DeclaredOptions
from penstock.protocol.engine import Engine
from penstock.protocol.errors import EngineUnavailable
from penstock.protocol.inference import Batcher, BatchOwner, InferRequest, InferResponse
from penstock.protocol.shared_memory import Slab


class PictureBatches:
    """Batcher for the image endpoint of a worker. Other models' batches are formed by `core`."""

    def __init__(
        self,
        core: Batcher,
        backend: Engine,
        watch: EngineView,
        options: DeclaredOptions,
        *,
        slab: Slab | None = None,
        is_apart: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """is_apart: whether only the core calls the model. Create it inside the running loop."""
        self._core, self._watch, self._options, self._is_apart = core, watch, options, is_apart
        self._own: dict[str, tuple[BatchOptions, BatchOptions]] = {}  # the model's, and those of this worker's calls
        self._pool = BatcherPool(backend, self._own_options, slab=slab)

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
            own = replace(options, owner=BatchOwner.GATEWAY, instances=1, max_batch_size=known.config.merged_rows)
            found = self._own[model_name] = options, own
        return found[1]
