"""CORS headers for the pages that --cors-origin names."""

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

_EXPOSED = ("Retry-After", "Inference-Header-Content-Length", "Content-Length")


def with_cors(app: ASGIApp, origins: tuple[str, ...]) -> ASGIApp:
    """The app with CORS for these origins: it answers preflights, and pages of the origins can read responses.

    Cookies and Basic credentials are not allowed: pages send a key as a header.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=("GET", "POST", "PUT", "DELETE"),
        allow_headers=("*",),
        allow_private_network=True,
        expose_headers=_EXPOSED,
    )
