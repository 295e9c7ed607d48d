"""A front's data plane: what it serves itself, and what it hands to the core as it came."""

from server.backends.core_relay import CoreRelay
from server.core.caller import NOBODY, Caller
from server.core.encoded_images import ImageInput
from server.core.relay import GrpcAnswer, GrpcCall, HttpAnswer, HttpCall, InferHead
from server.core.verb import Verb
from server.dataplane import DataPlane


class FrontPlane(DataPlane):
    """The plane, but for what only the core can do.

    That is everything about the repository and the engine, and requests whose tensors stand in memory that clients
    share with the engine: the core keeps those regions. An engine that lives in the core's process is asked through
    it alone (is_engine_in_core). The core lets such requests in and counts them; here they hold no place.
    """

    core: CoreRelay
    is_engine_in_core = False

    async def relay_http(
        self, verb: Verb, head: InferHead, call: HttpCall, *, caller: Caller = NOBODY, deadline: float | None = None
    ) -> HttpAnswer:
        """See DataPlane."""
        if self._is_for_core(verb, head):
            self._passage.require_engine()
            return await self.core.http(call, caller, deadline=deadline)
        return await super().relay_http(verb, head, call, caller=caller, deadline=deadline)

    async def relay_grpc(
        self, verb: Verb, head: InferHead, call: GrpcCall, *, caller: Caller = NOBODY, deadline: float | None = None
    ) -> GrpcAnswer:
        """See DataPlane."""
        if self._is_for_core(verb, head):
            self._passage.require_engine()
            return await self.core.grpc(call, caller, deadline=deadline)
        return await super().relay_grpc(verb, head, call, caller=caller, deadline=deadline)

    def image_input(self, model_name: str) -> ImageInput | None:
        """See DataPlane; the core decodes images for an engine of its own."""
        return None if self.is_engine_in_core else super().image_input(model_name)

    def _is_for_core(self, verb: Verb, head: InferHead) -> bool:
        return self.is_engine_in_core or bool(head.regions) or verb is not Verb.INFER
