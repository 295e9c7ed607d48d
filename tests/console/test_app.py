"""The console's HTTP application: files, sessions, forwarded calls, and requests from other sites."""

import json

import pytest
from aiohttp import web

from penstock.console.app import MAX_SESSION_BODY_BYTES
from penstock.console.sessions import COOKIE
from tests.console.harness import KEY, served_console


async def test_every_file_forbids_foreign_and_inline_code() -> None:
    """The policy allows the own origin only, and has no unsafe-… keyword."""
    async with served_console() as browser:
        for path in ("/", "/app.js", "/console.css", "/models", "/favicon.svg"):
            status, headers, _ = await browser.ask("GET", path)
            policy = headers["content-security-policy"]
            assert status == 200
            assert "unsafe-" not in policy
            assert "http" not in policy
            assert "default-src 'none'" in policy
            assert "require-trusted-types-for 'script'" in policy
            assert headers["x-content-type-options"] == "nosniff"


async def test_policy_opens_the_webcam_and_pictures_of_the_page_only() -> None:
    """Pages of the console may use a webcam, but no microphone; pictures come from the console or the page itself."""
    async with served_console() as browser:
        _, headers, _ = await browser.ask("GET", "/try")
        assert headers["permissions-policy"] == "camera=(self), microphone=(), geolocation=()"
        assert "img-src 'self' blob: data:;" in headers["content-security-policy"]
        assert "connect-src 'self';" in headers["content-security-policy"]


async def test_address_of_the_gateway_is_known_to_pages() -> None:
    """A page shows requests that name the gateway."""
    async with served_console() as browser:
        status, _, body = await browser.ask("GET", "/addresses")
        assert status == 200
        known = json.loads(body)
        assert known["gateway"].startswith("http://127.0.0.1:")
        assert known["program"] == "penstock"


async def test_page_of_any_name_is_the_index_and_a_missing_file_is_404() -> None:
    """Paths of pages return index.html; a missing file is 404."""
    async with served_console() as browser:
        index = (await browser.ask("GET", "/"))[2]
        for path in ("/streams/gate", "/models/people-1.5", "/load/../../etc/x.js"):
            assert (await browser.ask("GET", path))[2] == index
        status, _, body = await browser.ask("GET", "/no-such.js")
        assert (status, json.loads(body)["error"]) == (404, "the console has no file 'no-such.js'")


async def test_file_that_did_not_change_is_not_sent_again() -> None:
    """A request with a current ETag gets 304 without a body."""
    async with served_console() as browser:
        _, headers, _ = await browser.ask("GET", "/app.js")
        status, _, body = await browser.ask("GET", "/app.js", if_none_match=headers["etag"])
        assert (status, body) == (304, b"")


async def test_key_of_a_session_goes_to_the_gateway_and_never_to_the_browser() -> None:
    """After a login each forwarded call has the key; the cookie is not the key and not readable by scripts."""
    async with served_console() as browser:
        body = json.dumps({"api_key": KEY}).encode()
        status, headers, answer = await browser.ask("POST", "/session", body=body, content_type="application/json")
        assert status == 204
        assert KEY not in str(headers)
        assert answer == b""
        cookie = headers["set-cookie"].lower()
        assert "httponly" in cookie
        assert "samesite=strict" in cookie
        await browser.ask("GET", "/gateway/v2/models/x?a=%2Fb")
        method, path, sent, _ = browser.gateway.asked[-1]
        assert (method, path, sent["x-api-key"]) == ("GET", "/v2/models/x?a=%2Fb", KEY)
        assert "cookie" not in sent
        await browser.ask("DELETE", "/session")
        await browser.ask("GET", "/gateway/v2/models/x")
        assert "x-api-key" not in browser.gateway.asked[-1][2]


async def test_unknown_key_starts_no_session() -> None:
    """The browser gets the gateway's error and no cookie."""
    async with served_console() as browser:
        assert await browser.log_in("another-key") == 401
        assert not list(browser.session.cookie_jar)


@pytest.mark.parametrize("body", [b"", b"[]", b'{"api_key": 1}', b'{"api_key": " "}', b'{"api_key": "a\\nb"}', b"\xff"])
async def test_login_with_a_malformed_body_is_rejected(body: bytes) -> None:
    """The response is 400 with an error, and the gateway is not called."""
    async with served_console() as browser:
        status, _, answer = await browser.ask("POST", "/session", body=body, content_type="application/json")
        assert status == 400
        assert json.loads(answer)["error"]
        assert browser.gateway.asked == []


async def test_login_with_a_long_body_is_rejected() -> None:
    """A body over the limit gets 413."""
    async with served_console() as browser:
        body = json.dumps({"api_key": "a" * MAX_SESSION_BODY_BYTES}).encode()
        status, _, _ = await browser.ask("POST", "/session", body=body, content_type="application/json")
        assert status == 413


@pytest.mark.parametrize(
    "path",
    [
        *("/gateway/metrics", "/gateway/v2/../metrics", "/gateway/v2/%2e%2e/metrics", "/gateway/", "/gateway/v20/x"),
        *("/gateway//v2/x", "/gateway/v2/..", "/video/", "/video/page", "/gateway/docs"),
    ],
)
async def test_path_outside_of_the_apis_is_not_forwarded(path: str) -> None:
    """Only paths of the documented APIs are forwarded."""
    async with served_console() as browser:
        status, _, _ = await browser.ask("GET", path)
        assert status == 404
        assert browser.gateway.asked == []


async def test_headers_that_name_a_caller_or_a_key_are_not_forwarded() -> None:
    """A browser cannot set the identity, the key or the cookie of a forwarded call."""
    async with served_console() as browser:
        sent = {
            "x_penstock_caller": "{}",
            "x_api_key": KEY,
            "authorization": f"Bearer {KEY}",
            "x_forwarded_for": "1.2.3.4",
        }
        await browser.ask("GET", "/gateway/v2/models/x", **sent)
        assert not {"x-penstock-caller", "x-api-key", "authorization", "x-forwarded-for"} & set(
            browser.gateway.asked[-1][2]
        )


async def test_body_and_answer_are_forwarded_as_they_are() -> None:
    """A body of 900 kB is forwarded completely, with its content type."""
    async with served_console() as browser:
        body = b"x" * 900_000
        path = "/gateway/v2/repository/models/a/add"
        status, _, answer = await browser.ask("POST", path, body=body, content_type="application/octet-stream")
        assert status == 200
        assert json.loads(answer)["body_bytes"] == len(body)
        assert browser.gateway.asked[-1][2]["content-type"] == "application/octet-stream"


async def test_answer_of_an_api_cannot_run_code_or_set_cookies_in_the_console() -> None:
    """HTML from an API is sandboxed, and its cookies and policies are removed."""

    def hostile(_: web.Request) -> web.Response:
        headers = {"set-cookie": f"{COOKIE}=x", "content-security-policy": "default-src *", "refresh": "0; url=//x"}
        return web.Response(body=b"<script>alert(1)</script>", headers=headers, content_type="text/html")

    async with served_console() as browser:
        browser.gateway.answers["/v1/load/runs/1/report"] = hostile
        _, headers, _ = await browser.ask("GET", "/gateway/v1/load/runs/1/report")
        assert "sandbox" in headers["content-security-policy"]
        assert "default-src 'none'" in headers["content-security-policy"]
        assert not {"set-cookie", "refresh"} & set(headers)


async def test_redirect_of_an_api_is_not_followed() -> None:
    """The API key is sent to the configured address only."""

    def redirect(_: web.Request) -> web.Response:
        return web.Response(status=307, headers={"location": "http://192.0.2.1/"})

    async with served_console() as browser:
        browser.gateway.answers["/v2/models/x"] = redirect
        assert (await browser.ask("GET", "/gateway/v2/models/x"))[0] == 307


async def test_stopped_video_program_is_502_with_the_command_that_starts_it() -> None:
    """The error names the command when nothing listens on the video program's port."""
    async with served_console() as browser:
        status, _, body = await browser.ask("GET", "/video/v1/streams")
        assert status == 502
        assert "start it with `penstock up --video`" in json.loads(body)["error"]


async def test_page_of_another_origin_can_neither_log_in_nor_change_anything() -> None:
    """Another site's Origin or Sec-Fetch-Site gets 403, a foreign Host 421, and a form 415."""
    async with served_console() as browser:
        body, kind = b'{"api_key": "x"}', "application/json"
        post = "POST", "/gateway/v2/repository/models/a/unload"
        assert (await browser.ask(*post, body=body, content_type=kind, origin="http://evil.example"))[0] == 403
        assert (await browser.ask(*post, body=body, content_type=kind, sec_fetch_site="cross-site"))[0] == 403
        assert (await browser.ask("POST", "/session", body=body, content_type=kind, origin="null"))[0] == 403
        assert (await browser.ask("GET", "/", host="evil.example"))[0] == 421
        own = browser.url
        assert (await browser.ask(*post, body=b"a=b", content_type="text/plain", origin=own))[0] == 415
        assert browser.gateway.asked == []


async def test_name_of_the_server_that_is_allowed_is_served() -> None:
    """A host name of --allowed-host is accepted."""
    async with served_console(allowed_hosts=("console.example",)) as browser:
        assert (await browser.ask("GET", "/", host="console.example"))[0] == 200


async def test_roles_of_the_consoles_certificate_are_not_given_to_browsers() -> None:
    """A console with a client certificate forwards calls only with the key of a session."""
    async with served_console(needs_key=True) as browser:
        assert (await browser.ask("GET", "/gateway/v2/models/x"))[0] == 401
        assert browser.gateway.asked == []
        assert await browser.log_in() == 204
        assert (await browser.ask("GET", "/gateway/v2/models/x"))[0] == 200


async def test_other_methods_are_405() -> None:
    """Files accept GET and HEAD only, and /session POST and DELETE only."""
    async with served_console() as browser:
        assert (await browser.ask("POST", "/", body=b"x", content_type="application/json"))[0] == 405
        assert (await browser.ask("PUT", "/session", body=b"x", content_type="application/json"))[0] == 405
