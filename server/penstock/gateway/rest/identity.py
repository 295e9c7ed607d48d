"""GET /v1/identity: name and roles of the client."""

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

    The name is that of the API key, `token:SUBJECT` or `certificate:SUBJECT`. It is null for an anonymous client, whose
    roles may be an empty list. 401 for an unknown key.
    """
    caller = caller_of(request)
    return json_response({"client": caller.key_name or None, "roles": sorted(caller.roles)})
