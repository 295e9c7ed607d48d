"""GET /: leads a browser to the console, or says how to start it."""

from dataclasses import dataclass
from html import escape

from starlette.responses import HTMLResponse, RedirectResponse, Response

from penstock.network import host_and_port
from penstock.port_policy import Headers, parse_host

_POLICY = "default-src 'none'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>Penstock</title>
<h1>Penstock</h1>
<p>The gateway runs. Its console does not: {why}.</p>
<p>To start it: <code>penstock console --gateway-url {url}</code>.</p>
<p><a href="/docs">The API that this gateway serves</a></p>
</html>
"""


@dataclass(frozen=True, slots=True)
class HomePage:
    """What `/` answers.

    console_url: where it redirects to; empty for console_port of the host that the browser used. console_port: None
    if this gateway has no console.
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
        why = "it was started without one (--console off)" if self.console_port is None else "the request names no host"
        own = f"{scheme}://{host.decode('latin-1')}" if authority is not None else "URL"
        page = _PAGE.format(why=why, url=escape(own))
        return HTMLResponse(page, 200, {"content-security-policy": _POLICY, "cache-control": "no-store"})
