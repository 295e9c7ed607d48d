"""Who asks over HTTP."""

from starlette.requests import Request

from server.core.caller import Caller


def caller_of(request: Request) -> Caller:
    """Whoever sent the request."""
    return Caller(address=request.client.host if request.client else "")
