"""Attacks on the console's port: tricks with paths, methods and headers, slow clients, APIs that hang, logins."""

import asyncio
import contextlib
import json

import pytest
import structlog
from aiohttp import web

from penstock.console import proxy
from penstock.console.main import checked_api_url
from penstock.console.sessions import COOKIE
from tests.console.harness import KEY, FakeGateway, served_console
from tests.support.waiting import until

FORWARDED = "/gateway/v2/models/x"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ("GET http://evil.example/gateway/v2 HTTP/1.1\nHost: {host}", 400),
        ("GET /gateway/v2 HTTP/1.1\nHost: {host}\nHost: evil.example", 400),
        ("GET /gateway/v2 HTTP/1.1\nHost: evil.example", 421),
        ("GET /gateway/v2 HTTP/1.1\nHost: {host}\nAccept: a\n x-api-key: b", 400),
        ("GET /gateway/v2 HTTP/1.1\nHost: {host}\nAccept: a\x00b", 400),
        ("GET /gateway/v2/\xff HTTP/1.1\nHost: {host}", 400),
        ("GET /gateway/v2/..%2f..%2fmetrics HTTP/1.1\nHost: {host}", 404),
        ("GET /gateway/v2/%2e%2e%2fmetrics HTTP/1.1\nHost: {host}", 404),
        ("GET /gateway/v2/..%5cmetrics HTTP/1.1\nHost: {host}", 404),
        ("GET /gateway/v2/..\\metrics HTTP/1.1\nHost: {host}", 404),
        ("CONNECT /gateway/v2/x HTTP/1.1\nHost: {host}", 405),
        ("TRACE /gateway/v2/x HTTP/1.1\nHost: {host}", 405),
        ("PURGE /gateway/v2/x HTTP/1.1\nHost: {host}", 405),
        ("OPTIONS * HTTP/1.1\nHost: {host}", 405),
        ("POST /gateway/v2/x HTTP/1.1\nHost: {host}\nContent-Length: 4\nTransfer-Encoding: chunked", 400),
        ("POST /gateway/v2/x HTTP/1.1\nHost: {host}\nContent-Length: 4\nContent-Length: 5", 400),
        ("POST /gateway/v2/x HTTP/1.1\nHost: {host}\nTransfer-Encoding: xchunked", 400),
        ("GET /gateway/v2 HTTP/1.1\nHost: {host}\nAccept: " + "a" * 70_000, 431),
    ],
)
async def test_ambiguous_request_is_not_forwarded(head: str, status: int) -> None:
    """The console rejects it with one response."""
    async with served_console() as browser:
        reader, writer = await browser.send(head)
        line = await asyncio.wait_for(reader.readline(), 10)
        writer.close()
        assert line.split()[1] == str(status).encode()
        assert browser.gateway.asked == []


async def test_offer_to_upgrade_is_served_as_http() -> None:
    """A websocket handshake does not open a tunnel to an API."""
    async with served_console() as browser:
        offer = "Connection: Upgrade\nUpgrade: websocket\nSec-WebSocket-Key: dGhlIHNhbXBsZSBub25jZQ=="
        reader, writer = await browser.send(f"GET {FORWARDED} HTTP/1.1\nHost: {{host}}\n{offer}")
        assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"200"
        writer.close()
        assert not {"upgrade", "connection", "sec-websocket-key"} & set(browser.gateway.asked[-1][2])


async def test_headers_between_our_own_processes_are_not_forwarded() -> None:
    """A browser can ask for the explanation of its batch; every other header of Penstock ends at the console, which
    adds the browser's address."""
    async with served_console() as browser:
        sent = {
            "x_penstock_load_key": "k",
            "x_penstock_upload": "f",
            "x_penstock_caller": "{}",
            "x_forwarded_for": "::1",
        }
        own = {"x_penstock_explain": "1", "x_penstock_client_address": "203.0.113.9"}
        await browser.ask("GET", FORWARDED, **own, **sent)
        received = browser.gateway.asked[-1][2]
        assert received["x-penstock-explain"] == "1"
        assert received["x-penstock-client-address"] == "127.0.0.1"
        assert not {name.replace("_", "-") for name in sent} & set(received)


async def test_call_ends_when_its_browser_leaves_a_gateway_that_hangs() -> None:
    """Disconnected browsers do not use up the call limit of the console."""
    hanging = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        await hanging.wait()
        return web.Response()

    async with served_console() as browser:
        browser.gateway.answers["/v2/models/x"] = hang
        body = "POST", b"{}", "\nContent-Type: application/json\nContent-Length: 2"
        for method, content, more in (("GET", b"", ""), body):
            _, writer = await browser.send(f"{method} {FORWARDED} HTTP/1.1\nHost: {{host}}{more}", content)
            await until(lambda: browser.proxy.call_count == 1)
            writer.close()
            await until(lambda: browser.proxy.call_count == 0)
        hanging.set()


async def test_one_address_cannot_take_all_calls_nor_one_api_those_of_the_other(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The 503 response names the limit, and calls to the video program still work."""
    monkeypatch.setattr(proxy, "MAX_CALLS_OF_ADDRESS", 2)
    hanging = asyncio.Event()

    async def hang(_: web.Request) -> web.StreamResponse:
        await hanging.wait()
        return web.Response()

    async with served_console() as browser:
        browser.gateway.answers["/v2/models/x"] = hang
        opened = [await browser.send(f"GET {FORWARDED} HTTP/1.1\nHost: {{host}}") for _ in range(2)]
        await until(lambda: browser.proxy.call_count == 2)
        status, _, body = await browser.ask("GET", "/gateway/v2/models/y")
        assert (status, "limit 2" in json.loads(body)["error"]) == (503, True)
        assert (await browser.ask("GET", "/video/v1/streams"))[0] == 502
        hanging.set()
        for _, writer in opened:
            writer.close()


async def test_endless_answer_waits_for_its_reader() -> None:
    """A browser that does not read holds back the API: the console buffers little."""
    sent, blocked = 0, asyncio.Event()

    async def endless(request: web.Request) -> web.StreamResponse:
        nonlocal sent
        answer = web.StreamResponse()
        await answer.prepare(request)
        with contextlib.suppress(TimeoutError):
            while sent < 256 << 20:
                async with asyncio.timeout(0.5):
                    await answer.write(bytes(1 << 16))
                sent += 1 << 16
        blocked.set()
        return answer

    async with served_console() as browser:
        browser.gateway.answers["/v2/models/x"] = endless
        _, writer = await browser.send(f"GET {FORWARDED} HTTP/1.1\nHost: {{host}}")
        await asyncio.wait_for(blocked.wait(), 30)
        assert sent < 64 << 20  # the buffers of four sockets
        writer.close()
        await until(lambda: browser.proxy.call_count == 0)


async def test_endless_body_ends_with_the_refusal_of_the_api() -> None:
    """The API answers before the end of the body: the console closes the connection, and reads no more."""

    class Refusing(FakeGateway):
        async def answer(self, _: web.Request) -> web.StreamResponse:
            return web.json_response({"error": "too large"}, status=413)

    async with served_console(Refusing()) as browser:
        head = "Content-Type: application/json\nTransfer-Encoding: chunked"
        for path in (FORWARDED, "/gateway/no-api", "/no-page"):
            reader, writer = await browser.send(f"POST {path} HTTP/1.1\nHost: {{host}}\n{head}", b"3\r\nabc\r\n")
            answer = await asyncio.wait_for(reader.read(), 10)
            assert answer.split()[1] in (b"413", b"404", b"405")
            assert b"connection: close" in answer.lower()
            writer.close()


async def test_login_whose_body_does_not_arrive_ends() -> None:
    """A login whose body is late gets 408."""
    async with served_console(session_body_s=0.05) as browser:
        head = "POST /session HTTP/1.1\nHost: {host}\nContent-Type: application/json\nContent-Length: 20"
        reader, writer = await browser.send(head, b'{"api')
        assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"408"
        writer.close()


async def test_refused_login_is_logged_with_its_address_and_without_the_key() -> None:
    """The gateway's audit log has the console's address only."""
    async with served_console() as browser:
        with structlog.testing.capture_logs() as logged:
            assert await browser.log_in("another-key") == 401
        (line,) = logged
        assert (line["event"], line["address"], line["status"]) == ("login rejected", "127.0.0.1", 401)
        assert "another-key" not in str(line)


async def test_session_token_that_was_planted_is_not_used() -> None:
    """A login makes a token of its own, so no other site can fix a session."""
    async with served_console() as browser:
        body = json.dumps({"api_key": KEY}).encode()
        planted = {"cookie": f"{COOKIE}=planted", "content_type": "application/json"}
        _, headers, _ = await browser.ask("POST", "/session", body=body, **planted)
        assert "planted" not in headers["set-cookie"]
        reader, writer = await browser.send(f"GET {FORWARDED} HTTP/1.1\nHost: {{host}}\nCookie: {COOKIE}=planted")
        assert (await asyncio.wait_for(reader.readline(), 10)).split()[1] == b"200"
        writer.close()
        assert "x-api-key" not in browser.gateway.asked[-1][2]


async def test_cookie_over_tls_cannot_come_from_another_host() -> None:
    """Browsers take a __Host- cookie over TLS only, and from no sibling domain."""
    async with served_console(has_tls=True) as browser:
        body = json.dumps({"api_key": KEY}).encode()
        _, headers, _ = await browser.ask("POST", "/session", body=body, content_type="application/json")
        cookie = headers["set-cookie"]
        assert cookie.startswith(f"__Host-{COOKIE}=")
        assert {"secure", "httponly", "samesite=strict", "path=/"} <= set(cookie.lower().split("; "))
        assert "domain" not in cookie.lower()


@pytest.mark.parametrize(
    "url",
    [
        *("http://user:secret@127.0.0.1:8010", "file:///etc/passwd", "javascript:1", "http://", "http://h:x"),
        *("http://h:8010/?secret", "http://h:8010/#secret", "http://h\nsecret", ""),
    ],
)
def test_address_of_an_api_has_no_password_that_browsers_could_see(url: str) -> None:
    """It is shown to every browser when the API does not answer."""
    with pytest.raises(ValueError, match=r"^--video-url must be http://HOST:PORT") as refused:
        checked_api_url("--video-url", url)
    assert "secret" not in str(refused.value)
    assert checked_api_url("--video-url", "https://[::1]:8010/") == "https://[::1]:8010"
