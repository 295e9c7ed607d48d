"""Data plane of a worker process: what it serves itself, and what it forwards to the core unchanged."""

from penstock.gateway.dataplane import DataPlane, PlaneParts
from penstock.gateway.workers.core_relay import CoreRelay
from penstock.protocol.call import A, Call, InferHead
from penstock.protocol.identity import ANONYMOUS, Identity, Verb
from penstock.protocol.request_checks import EncodedCall, ImageInput


class WorkerDataPlane(DataPlane):
    """Forwards to the core: the repository, clients' shared memory, and an embedded engine (is_engine_in_core)."""

    def __init__(self, parts: PlaneParts, core: CoreRelay, *, is_engine_in_core: bool) -> None:
        super().__init__(parts)
        self._core, self._is_engine_in_core = core, is_engine_in_core

    async def relay(
        self,
        verb: Verb,
        head: InferHead,
        call: Call[A] | EncodedCall[A],
        *,
        caller: Identity = ANONYMOUS,
        deadline: float | None = None,
    ) -> A:
        if self._is_for_core(verb, head) and not isinstance(call, EncodedCall):
            self._admission.require_engine()
            return await self._core.send(call, caller, deadline=deadline)
        return await super().relay(verb, head, call, caller=caller, deadline=deadline)

    def image_input(self, model_name: str) -> ImageInput | None:
        """See DataPlane; the core decodes images for an embedded engine."""
        return None if self._is_engine_in_core else super().image_input(model_name)

    def _is_for_core(self, verb: Verb, head: InferHead) -> bool:
        return self._is_engine_in_core or bool(head.regions) or verb is not Verb.INFER
