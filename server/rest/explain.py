"""GET …/explain: how a model's batches are formed, and how that went."""

from urllib.parse import unquote

from starlette.requests import Request
from starlette.responses import Response

from server.batching.explanation import Explained, explained, is_asked_by
from server.core.relay import InferHead
from server.dataplane import DataPlane, ImageResponse
from server.rest.calls import model_of
from server.rest.disconnect import run_until_disconnect
from server.rest.errors import json_response
from server.rest.gate import caller_of


class ExplainEndpoint:
    """Ours, beside v2's: the queue, the fit, the batches, and what Triton would need to form them."""

    def __init__(self, plane: DataPlane) -> None:
        self._plane = plane

    async def __call__(self, request: Request) -> Response:
        model_name = unquote(model_of(request).model_name)
        work = self._plane.explain_model(model_name, caller_of(request))
        return json_response(await run_until_disconnect(request.scope, request.receive, work))


def told_of_images(plane: DataPlane, request: Request, response: ImageResponse) -> list[Explained]:
    """What a request of images is told of their batches: nothing where it did not ask, one entry an image where the
    gateway formed them, one for all where it did not.
    """
    if not is_asked_by(request.scope["headers"]):
        return []
    told = [explained(explanation) for explanation in response.explanations]
    return told or [plane.not_formed(InferHead(response.model_name, response.model_version))]
