"""The console's static files (HTML, CSS, ES modules), read once at start, and their security headers."""

import hashlib
import mimetypes
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.resources import files
from importlib.resources.abc import Traversable

SECURITY_HEADERS = {
    "content-security-policy": "; ".join(
        (
            "default-src 'none'",
            "script-src 'self'",
            "style-src 'self'",
            "img-src 'self' blob: data:",
            "media-src 'self' blob:",
            "connect-src 'self'",
            "frame-src 'self'",
            "manifest-src 'self'",
            "form-action 'none'",
            "base-uri 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",  # assigning a string to innerHTML throws TypeError
            "trusted-types 'none'",
        )
    ),
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "permissions-policy": "camera=(self), microphone=(), geolocation=()",
}
_TYPES = {".js": "text/javascript", ".css": "text/css", ".svg": "image/svg+xml", ".html": "text/html"}
INDEX = "index.html"


@dataclass(frozen=True, slots=True)
class StaticFile:
    """A static file. etag: derived from the content."""

    content: bytes
    media_type: str
    etag: str


def read_static_files() -> Mapping[str, StaticFile]:
    """All static files by path relative to `static`, such as "pages/models.js"."""
    return dict(_read(files("penstock.console") / "static", ""))


def _read(folder: Traversable, prefix: str) -> list[tuple[str, StaticFile]]:
    found: list[tuple[str, StaticFile]] = []
    for entry in folder.iterdir():
        path = f"{prefix}{entry.name}"
        if entry.is_dir():
            found += _read(entry, f"{path}/")
            continue
        content = entry.read_bytes()
        suffix = path[path.rfind(".") :]
        kind = _TYPES.get(suffix) or mimetypes.guess_type(path)[0] or "application/octet-stream"
        found.append((path, StaticFile(content, kind, f'"{hashlib.sha256(content).hexdigest()[:20]}"')))
    return found
