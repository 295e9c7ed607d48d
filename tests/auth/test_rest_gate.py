"""Keys over HTTP: checked before the body, never forwarded, and the role that each endpoint needs."""

import asyncio
import json

import pytest
import structlog

from penstock.gateway.rest.app import create_app
from penstock.gateway.rest.routes import ForwardedIdentity, RequestAuthentication
from penstock.port_policy import BrowserPolicy
from penstock.protocol.call import HttpAnswer
from penstock.protocol.errors import OriginNotAllowed
from penstock.protocol.identity import Role
from tests.auth.listeners import KEYS, ONCE, STRANGER, door
from tests.rest.harness import VALID_INFER, Client, Front, Headers, described_by

INFER = "/v2/models/ident/infer"


def bearer(secret: str) -> Headers:
    return ((b"authorization", f"Bearer {secret}".encode()),)


def api_key(secret: str) -> Headers:
    return ((b"x-api-key", secret.encode()),)


@pytest.fixture
def front() -> Front:
    return Front(door=door())


@pytest.mark.parametrize("headers", [bearer(KEYS[Role.INFER]), api_key(KEYS[Role.INFER])])
async def test_key_lets_its_request_through_and_stays_behind(front: Front, headers: Headers) -> None:
    """Either header; the engine gets neither, and every other header as it came."""
    others = ((b"traceparent", b"00-1-2-01"), (b"x-mine", b"1"))
    reply = await front.ask("POST", INFER, VALID_INFER, (*headers, *others))
    assert reply.status == 200
    (_, _, call, _) = front.plane.relayed[0]
    assert call.headers == others


async def test_scheme_is_read_as_http_has_it(front: Front) -> None:
    """Its case does not matter, and the same key in both headers is one."""
    headers = ((b"authorization", f"bEARER  {KEYS[Role.INFER]} ".encode()), *api_key(KEYS[Role.INFER]))
    assert (await front.ask("POST", INFER, VALID_INFER, headers)).status == 200


@pytest.mark.parametrize(
    ("headers", "status", "text"),
    [
        ((), 401, "this needs an API key with the role infer"),
        (api_key(STRANGER), 401, "the API key is unknown"),
        (api_key(""), 401, "the API key is unknown"),
        (bearer(""), 401, "`authorization` is not `Bearer …`"),
        (((b"authorization", b"Basic cGstc2VjcmV0"),), 401, "`authorization` is not `Bearer …`"),
        ((*bearer(KEYS[Role.INFER]), *api_key(STRANGER)), 401, "two different keys are sent"),
        (((b"x-api-key", b"\xff\xfe"),), 401, "the API key is unknown"),
        (api_key(KEYS[Role.READ]), 403, "'read' lacks the role infer"),
    ],
)
async def test_request_that_may_not_is_refused_counted_and_logged_without_a_key(
    front: Front, headers: Headers, status: int, text: str
) -> None:
    """401 says how to show a key; nothing of one is in the answer or the log."""
    with structlog.testing.capture_logs() as logged:
        reply = await front.ask("POST", INFER, VALID_INFER, headers)
    assert (reply.status, reply.headers.get("www-authenticate")) == (status, "Bearer" if status == 401 else None)
    assert text in json.loads(reply.body)["error"]
    assert front.plane.relayed == []
    assert front.recorder.reasons == ["unauthenticated" if status == 401 else "permission_denied"]
    assert front.recorder.done == [("ident", "http", str(status))]
    assert "pk-secret" not in reply.body.decode() + str(logged)
    assert [line["event"] for line in logged] == ["request refused"]


@pytest.mark.parametrize("framing", ["Content-Length: 1000000", "Transfer-Encoding: chunked"])
async def test_request_without_a_key_is_refused_before_its_body(front: Front, framing: str) -> None:
    """The answer is there while not a byte of the body has been sent, and no 100 Continue asks for one."""
    async with front.served() as port, Client.connected(port) as client:
        await client.send(f"POST {INFER} HTTP/1.1\r\nHost: t\r\nExpect: 100-continue\r\n{framing}\r\n\r\n".encode())
        first = await client.reader.readline()
    assert first.startswith(b"HTTP/1.1 401 ")


async def test_every_operation_needs_the_role_that_the_description_says(front: Front) -> None:
    """With a key of that role, or of one that does as well, it passes the gate; others are refused, 403; none, 401."""
    front.plane.answer = HttpAnswer(200, (), b'{"name":"x","version":"1","extensions":[]}')
    for template, operations in described_by(front, open_to=frozenset())["paths"].items():
        path = template.format(model="ident", version="1", repository="r", region="r", run="0")
        for method, operation in operations.items():
            allowed = {role for way in operation["security"] for roles in way.values() for role in roles}
            assert bool(allowed) == (not path.startswith(("/v2/health/", "/v1/identity"))), path
            assert ((await front.ask(method.upper(), path)).status == 401) == bool(allowed), path
            for role, secret in KEYS.items():
                reply = await front.ask(method.upper(), path, b"", api_key(secret))
                assert (reply.status == 403) == bool(allowed and role not in allowed), (method, path, role)
                assert reply.status != 401, path


async def test_who_may_infer_may_ask_whether_a_model_is_ready(front: Front) -> None:
    """As clients do before they infer; of its metadata a key needs the role read."""
    for path in ("/v2/models/ident/ready", "/v2/models/ident/versions/1/ready"):
        assert (await front.ask("GET", path, b"", api_key(KEYS[Role.INFER]))).status == 200
        assert (await front.ask("GET", path, b"", api_key(KEYS[Role.ADMIN]))).status == 403
    assert (await front.ask("GET", "/v2/models/ident", b"", api_key(KEYS[Role.INFER]))).status == 403


async def test_what_is_open_without_a_key_is_open_and_the_rest_is_not() -> None:
    """The waived roles are those of a caller without a key, and the description says so."""
    front = Front(door=door(Role.READ))
    assert (await front.ask("GET", "/v2/models/ident")).status == 200
    assert (await front.ask("POST", INFER, VALID_INFER)).status == 401
    described = json.loads((await front.ask("GET", "/openapi.json")).body)["paths"]
    assert {} in described["/v2/models/{model}"]["get"]["security"]
    assert {} not in described["/v2/models/{model}/infer"]["post"]["security"]


async def test_core_describes_what_its_workers_want_a_key_for() -> None:
    """A core trusts its workers, which check keys; its description still says which operations need one."""
    front = Front()
    gate = ForwardedIdentity(frozenset({Role.READ}))
    front.app = create_app(front.plane, front.limits, front.recorder, gate=gate)  # type: ignore[arg-type]
    described = json.loads((await front.ask("GET", "/openapi.json")).body)["paths"]
    assert {} in described["/v2/models/{model}"]["get"]["security"]
    assert {} not in described["/v2/models/{model}/infer"]["post"]["security"]


async def test_unknown_path_is_404_and_wrong_method_405_without_a_key(front: Front) -> None:
    """What does not exist needs no key."""
    assert (await front.ask("GET", "/v3")).status == 404
    assert (await front.ask("DELETE", INFER)).status == 405


async def test_used_up_rate_is_429_before_the_body_and_says_when(front: Front) -> None:
    """Retry-After in whole seconds; the others go on."""
    assert front.door is not None
    caller = await front.door.admit([ONCE], Role.INFER)
    front.door.quotas.take(caller, front.door.now())
    reply = await front.ask("POST", INFER, VALID_INFER, api_key(ONCE))
    assert (reply.status, reply.headers["retry-after"]) == (429, "3600")
    assert "'once' has sent its 1 requests per 3600 s" in json.loads(reply.body)["error"]
    assert (await front.ask("POST", INFER, VALID_INFER, api_key(KEYS[Role.INFER]))).status == 200


async def test_slow_bodies_of_one_key_fill_its_own_share_only(front: Front) -> None:
    """The second body over the share is 429 while it comes; another key's goes through; all is given back."""
    assert front.door is not None
    quotas = front.door.quotas
    head = "POST {} HTTP/1.1\r\nHost: t\r\nx-api-key: {}\r\nContent-Length: {}\r\n\r\n"
    half = 300_000  # of a share of 524,288 bytes
    infer, admin = KEYS[Role.INFER], KEYS[Role.ADMIN]
    async with front.served() as port, Client.connected(port) as first, Client.connected(port) as second:
        await first.send(head.format(INFER, infer, 2 * half).encode() + bytes(half))
        async with asyncio.timeout(30):
            while quotas.receiving_bytes() < half:
                await asyncio.sleep(0.01)
            await second.send(head.format(INFER, infer, 2 * half).encode() + bytes(half))
            refused = await second.reply()
            assert (refused.status, refused.headers["retry-after"]) == (429, "1")
            assert "bytes of bodies on their way (its share is 524288)" in json.loads(refused.body)["error"]
            async with Client.connected(port) as other:
                load = "/v2/repository/models/ident/load"
                await other.send(head.format(load, admin, 2).encode() + b"{}")
                assert (await other.reply()).status == 200
            await first.close()
            while quotas.receiving_bytes():
                await asyncio.sleep(0.01)


async def test_client_learns_its_name_and_roles() -> None:
    """Of a key: its own. Without one: the anonymous roles. An unknown key: 401."""
    front = Front(door=door(Role.READ))
    for role, secret in KEYS.items():
        reply = await front.ask("GET", "/v1/identity", b"", api_key(secret))
        assert json.loads(reply.body) == {"client": role, "roles": [role]}
    assert json.loads((await front.ask("GET", "/v1/identity")).body) == {"client": None, "roles": ["read"]}
    assert (await front.ask("GET", "/v1/identity", b"", api_key("x" * 40))).status == 401


async def test_gateway_without_keys_is_not_opened_to_other_machines_by_a_console() -> None:
    """A console that listens on all addresses sends its browser's address, which health checks ignore."""
    gate = RequestAuthentication(None, BrowserPolicy())
    scope = {"method": "GET", "path": "/v1/system", "headers": [(b"x-penstock-client-address", b"203.0.113.9")]}
    await gate.admit(scope, None)
    with pytest.raises(OriginNotAllowed, match=r"203\.0\.113\.9"):
        await gate.admit(scope, Role.READ)
    await RequestAuthentication(door(Role.READ), BrowserPolicy()).admit(scope, Role.READ)
