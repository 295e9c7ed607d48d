"""GET /: redirects to the console, or returns a page that says how to start it."""

from dataclasses import dataclass
from html import escape

from starlette.responses import HTMLResponse, RedirectResponse, Response

from penstock.network import host_and_port
from penstock.port_policy import Headers, parse_host

_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Penstock</title>
<h1>Penstock</h1>
<p>The gateway is running. The console is not: {why}.</p>
<p>Start it with <code>penstock console --gateway-url {url}</code>.</p>
<p><a href="/docs">API documentation</a></p>
</html>
"""


@dataclass(frozen=True, slots=True)
class HomePage:
    """The response to GET /.

    console_url: target of the redirect; if empty, the request's host with console_port. console_port: None if this
    gateway has no console.
    """

    console_url: str = ""
    console_port: int | None = None

    def answer(self, scheme: str, headers: Headers) -> Response:
        """scheme: http or https. headers: of the request, names in lower case."""
        host = next((value for name, value in headers if name == b"host"), b"")
        authority = parse_host(host)
        if self.console_url:
            return RedirectResponse(self.console_url, 307, {"cache-control": "no-store"})
        if self.console_port is not None and authority is not None:
            url = f"{scheme}://{host_and_port(authority.name, self.console_port)}/"
            return RedirectResponse(url, 307, {"cache-control": "no-store"})
        why = "it is switched off (--console off)" if self.console_port is None else "the request has no valid Host"
        own = f"{scheme}://{host.decode('latin-1')}" if authority is not None else "URL"
        page = _PAGE.format(why=why, url=escape(own))
        return HTMLResponse(page, 200, {"content-security-policy": _POLICY, "cache-control": "no-store"})
