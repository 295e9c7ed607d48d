"""A Triton of our own, where nobody but us decides who may load."""

from server.backends.quiet_loads import as_http, quiet_load
from server.backends.triton import TritonBackend
from server.core.relay import HttpAnswer, HttpCall


class OwnTriton(TritonBackend):
    """Its models are loaded aside, however the load came. Somebody else's may guard its two ports in different ways."""

    async def http(self, call: HttpCall, *, deadline: float | None) -> HttpAnswer:
        if (load := quiet_load(call)) is not None:
            return as_http(await self.grpc(load, deadline=deadline))
        return await super().http(call, deadline=deadline)
