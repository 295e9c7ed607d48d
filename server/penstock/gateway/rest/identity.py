"""GET /v1/identity: who the client is, and what it may do."""

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.rest import schemas
from penstock.gateway.rest.openapi import ERRORS, operation
from penstock.gateway.rest.responses import json_response
from penstock.gateway.rest.routes import HotRoute, caller_of
from penstock.protocol.identity import ANY_CLIENT

router = APIRouter(route_class=HotRoute, tags=["system"], responses=ERRORS)


@operation(router, "GET", "/v1/identity", role=ANY_CLIENT, response_model=schemas.ClientIdentity)
async def identity(request: Request) -> Response:
    """The client's name and roles.

    The name of the API key, or `token:SUBJECT`, or `certificate:SUBJECT`; null for a client without a key, whose roles
    are those of anonymous clients. 401 for an unknown key. A client without a key that may do nothing gets an empty
    list.
    """
    caller = caller_of(request)
    return json_response({"client": caller.key_name or None, "roles": sorted(caller.roles)})
