"""What follows from a source's address: its policy, and what nobody may read in the texts about it."""

from urllib.parse import unquote, urlsplit

from deepstream_pipeline.decode.uri import is_live, redacted
from deepstream_pipeline.errors import SourceNotAllowed
from deepstream_pipeline.types import DropPolicy, SourceConfig

_MOST_LETTERS = 400


def seems_live(uri: str) -> bool:
    """As the address has it; False for one that cannot be a source at all, which its process will say."""
    try:
        return is_live(uri)
    except SourceNotAllowed:
        return False


def policy_of(config: SourceConfig) -> DropPolicy:
    """What its configuration says, else what fits its kind."""
    if config.policy is not None:
        return config.policy
    drops = config.is_realtime or seems_live(config.uri)
    return DropPolicy.DROP_OLDEST if drops else DropPolicy.BLOCK


class Secrets:
    """The user and password of one address."""

    def __init__(self, uri: str) -> None:
        try:
            parts = urlsplit(uri)
            userinfo, password = parts.netloc.rpartition("@")[0], parts.password or ""
        except ValueError:
            userinfo = password = ""
        hidden = {uri: redacted(uri), f"{userinfo}@": "***@", unquote(password): "***", password: "***"}
        self._hidden = {secret: shown for secret, shown in hidden.items() if len(secret) > 1 and secret != shown}

    def hidden_in(self, text: str) -> str:
        """A text that others wrote, as one printable line without them, cut to a length that a log can have."""
        for secret, shown in self._hidden.items():
            text = text.replace(secret, shown)
        return "".join(letter if letter.isprintable() else " " for letter in text[:_MOST_LETTERS])
