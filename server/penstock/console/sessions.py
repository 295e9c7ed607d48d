"""Browser sessions: store the API key entered at login; it never leaves this process. Sans-IO: `now` is a parameter."""

import secrets
from collections import OrderedDict
from dataclasses import dataclass, field

COOKIE = "penstock_console"
MAX_SESSIONS = 1024
IDLE_S = 12 * 3600.0
_TOKEN_BYTES = 32


@dataclass(slots=True)
class _Session:
    api_key: str = field(repr=False)
    used_at: float


class Sessions:
    """API keys by session token. Beyond MAX_SESSIONS the least recently used session ends."""

    def __init__(self) -> None:
        self._by_token: OrderedDict[str, _Session] = OrderedDict()

    def __len__(self) -> int:
        return len(self._by_token)

    def begin(self, api_key: str, now: float) -> str:
        """Starts a session and returns its token. now: monotonic seconds."""
        while len(self._by_token) >= MAX_SESSIONS:
            self._by_token.popitem(last=False)
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self._by_token[token] = _Session(api_key, now)
        return token

    def key_of(self, token: str, now: float) -> str:
        """The session's API key, or "" if the token is unknown or was unused for IDLE_S. Restarts the idle time."""
        session = self._by_token.get(token)
        if session is None:
            return ""
        if now - session.used_at > IDLE_S:
            del self._by_token[token]
            return ""
        session.used_at = now
        self._by_token.move_to_end(token)
        return session.api_key

    def end(self, token: str) -> None:
        """Ends the session, if it exists."""
        self._by_token.pop(token, None)
