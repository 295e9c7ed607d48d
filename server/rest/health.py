"""Whether this process lives, and whether to send it requests."""

from starlette.requests import Request
from starlette.responses import Response

from server.core.retry_after import spread_whole_s
from server.dataplane import DataPlane
from server.rest.errors import json_response


class HealthEndpoints:
    """With a JSON body, which KServe's client reads and Triton's ignores."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def live(self, _: Request) -> Response:
        return json_response({"live": True})

    async def ready(self, _: Request) -> Response:
        readiness = self._plane.readiness()
        if readiness.is_ready:
            return json_response({"ready": True})
        content = {"ready": False, "reason": readiness.reason, "error": f"not ready: {readiness.reason}"}
        return json_response(content, 503, {"Retry-After": str(spread_whole_s(1.0))})
