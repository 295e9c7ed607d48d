"""GET /v1/system, its settings and findings, GET /v1/logs and GET /v1/audit."""

from datetime import UTC, datetime

from fastapi import APIRouter
from starlette.requests import Request
from starlette.responses import Response

from penstock.gateway.rest.image_query import query_pairs
from penstock.gateway.rest.openapi import ERRORS, JSON, errors, operation, parameter, reference
from penstock.gateway.rest.request import run_until_disconnect
from penstock.gateway.rest.responses import error_response, json_response
from penstock.gateway.rest.routes import HotRoute, caller_of
from penstock.gateway.system.reports import MAX_LINES, SystemReports, log_time
from penstock.log_file import LEVELS, LogFilter, LogPosition
from penstock.protocol.errors import InvalidRequest
from penstock.protocol.identity import Role
from penstock.protocol.request_checks import quoted
from penstock.protocol.system_reports import AuditReport, FindingsReport, LogReport, SettingsReport, SystemReport

router = APIRouter(route_class=HotRoute, tags=["system"], responses=ERRORS)
DEFAULT_LINES = 200
MAX_TEXT = 200
NO_AUDIT_LOG = "no audit log is written; start with --audit-log FILE or PENSTOCK_AUDIT_LOG"
_LIMIT = parameter(
    "query", "limit", f"Number of lines. By default {DEFAULT_LINES}.", type="integer", minimum=1, maximum=MAX_LINES
)
_LOG_QUERY = (
    parameter("query", "level", "Least severe level to return. By default debug.", enum=list(LEVELS)),
    parameter("query", "since", "A time in ISO 8601, or a duration before now: 30s, 10m, 2h, 1d.", type="string"),
    parameter("query", "text", "Text that a line contains; case-insensitive.", type="string", maxLength=MAX_TEXT),
    parameter("query", "after", "`next` of an earlier response: returns the lines after it.", type="string"),
    _LIMIT,
)


@operation(
    router,
    "GET",
    "/v1/system",
    role=Role.READ,
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(SystemReport)}}}},
)
async def system(request: Request) -> Response:
    """The state of the stack.

    Engine, models, queues, processes, GPUs and the last errors. Fields of errors are returned to the role admin only.
    """
    has_details = Role.ADMIN in caller_of(request).roles
    report = _reports(request).system(has_details=has_details)
    return json_response(await run_until_disconnect(request.scope, request.receive, report))


@operation(
    router,
    "GET",
    "/v1/system/config",
    role=Role.ADMIN,
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(SettingsReport)}}}},
)
async def system_config(request: Request) -> Response:
    """Effective settings.

    The value, default and origin of each setting. Secrets are hidden.
    """
    return json_response(_reports(request).settings())


@operation(
    router,
    "GET",
    "/v1/system/findings",
    role=Role.ADMIN,
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(FindingsReport)}}}},
)
async def system_findings(request: Request) -> Response:
    """Findings of `penstock doctor`.

    Checks of the machine and the models, with fixes. Checks take some seconds and run at most every 30 s.
    """
    return json_response(await run_until_disconnect(request.scope, request.receive, _reports(request).findings()))


@operation(
    router,
    "GET",
    "/v1/logs",
    role=Role.ADMIN,
    query=_LOG_QUERY,
    response_class=Response,
    responses={200: {"content": {JSON: {"schema": reference(LogReport)}}}},
)
async def logs(request: Request) -> Response:
    """Log lines of all processes.

    The newest lines, or the lines after a position; oldest first. The log is limited to 8 MiB.
    """
    pairs = dict(_query(request, ("level", "since", "text", "after", "limit")))
    wanted = LogFilter(_level(pairs.get("level", LEVELS[0])), _since(pairs.get("since", "")), _text(pairs))
    work = _reports(request).logs(
        wanted, _position(pairs.get("after")), _limit(pairs), client=caller_of(request).client
    )
    page = await run_until_disconnect(request.scope, request.receive, work)
    return json_response(LogReport(list(page.lines), str(page.next)))


@operation(
    router,
    "GET",
    "/v1/audit",
    role=Role.ADMIN,
    query=(_LIMIT,),
    response_class=Response,
    responses=errors(404) | {200: {"content": {JSON: {"schema": reference(AuditReport)}}}},
)
async def audit(request: Request) -> Response:
    """The newest lines of the audit log.

    404 if the gateway writes no audit log.
    """
    limit = _limit(dict(_query(request, ("limit",))))
    work = _reports(request).audit(limit, client=caller_of(request).client)
    report = await run_until_disconnect(request.scope, request.receive, work)
    return error_response(NO_AUDIT_LOG, 404) if report is None else json_response(report)


def _reports(request: Request) -> SystemReports:
    reports: SystemReports = request.app.state.services.system
    return reports


def _query(request: Request, allowed: tuple[str, ...]) -> list[tuple[str, str]]:
    query: bytes = request.scope["query_string"]
    return query_pairs(query, allowed) if query else []


def _level(text: str) -> str:
    if text not in LEVELS:
        raise InvalidRequest(f"level is {quoted(text)}; it must be one of {', '.join(LEVELS)}")
    return text


def _since(text: str) -> str:
    return log_time(text, datetime.now(UTC)) if text else ""


def _text(pairs: dict[str, str]) -> str:
    text = pairs.get("text", "")
    if len(text) > MAX_TEXT:
        raise InvalidRequest(f"text has {len(text)} characters (limit {MAX_TEXT})")
    return text


def _position(text: str | None) -> LogPosition | None:
    try:
        return LogPosition.parse(text) if text is not None else None
    except ValueError as error:
        raise InvalidRequest(f"after: {error}") from None


def _limit(pairs: dict[str, str]) -> int:
    text = pairs.get("limit", str(DEFAULT_LINES))
    if not (text.isascii() and text.isdecimal() and len(text) <= len(str(MAX_LINES)) and 1 <= int(text) <= MAX_LINES):
        raise InvalidRequest(f"limit is {quoted(text)}; it must be a number from 1 to {MAX_LINES}")
    return int(text)
