"""API keys: how one is made, kept as a hash, and found again."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable
from dataclasses import dataclass

from server.core.caller import Quota, Role

LEAST_SECRET = 20  # characters; a made one has 46
_PREFIX = "pk-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class KeyRefused(ValueError):
    """A key cannot be taken as it is written. The message never holds the secret."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A key as it is kept. digest: SHA-256 of the secret, 64 hexadecimal digits. quota: None for the usual one."""

    name: str
    digest: str
    roles: frozenset[Role]
    quota: Quota | None = None


def new_secret() -> str:
    """A secret of 256 random bits, safe in a header, a URL and a shell."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """What is kept of a secret: it is long and random, so one round of SHA-256 hides it."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class KeyRing:
    """The known keys, found by their secret.

    The table is looked up by the SHA-256 of what was presented, and what was found is compared in constant time: how
    long an answer takes tells nothing of a key, since nobody can steer a hash towards one that they do not know.
    """

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Raises KeyRefused where two keys share a name or a secret."""
        self._by_digest: dict[str, ApiKey] = {}
        names: set[str] = set()
        for key in keys:
            if key.name in names:
                raise KeyRefused(f"the key {key.name!r} is there twice; give each its own name")
            if key.digest in self._by_digest:
                other = self._by_digest[key.digest].name
                raise KeyRefused(f"the keys {other!r} and {key.name!r} have the same secret; give each its own")
            names.add(key.name)
            self._by_digest[key.digest] = key

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, secret: str) -> ApiKey | None:
        """The key with this secret."""
        digest = digest_of(secret)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def checked_name(name: str) -> str:
    """The name. Raises KeyRefused for one that could be mistaken in a log, a metric or a list of keys."""
    if _NAME.fullmatch(name) is None:
        raise KeyRefused(f"a key is named {name[:80]!r}; use 1 to 64 letters, digits, and . _ @ - after the first")
    return name


def checked_digest(name: str, digest: str) -> str:
    """The digest. Raises KeyRefused where it is none."""
    if _DIGEST.fullmatch(digest) is None:
        raise KeyRefused(f"sha256 of the key {name!r} is not 64 hexadecimal digits; `penstock keys new` makes one")
    return digest


def checked_secret(name: str, secret: str) -> str:
    """The secret's digest. Raises KeyRefused for one that can be guessed or that no header can carry."""
    if len(secret) < LEAST_SECRET or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise KeyRefused(
            f"the secret of the key {name!r} is too weak: it needs {LEAST_SECRET} printable ASCII characters without "
            "spaces; `penstock keys new` makes one"
        )
    return digest_of(secret)


def read_key_list(text: str) -> tuple[str, ...]:
    """NAME:ROLE+ROLE:SECRET entries, between spaces or commas, as NAME:ROLE+ROLE:DIGEST: the secrets end here.

    Raises KeyRefused by the entry's number, since any part of a muddled one may be the secret.
    """
    hashed = []
    for place, entry in enumerate(text.replace(",", " ").split(), start=1):
        name, roles, secret = (*entry.split(":", 2), "", "")[:3]
        try:
            roles_of(checked_name(name), roles.split("+"))
            hashed.append(f"{name}:{roles}:{checked_secret(name, secret)}")
        except KeyRefused:
            raise KeyRefused(
                f"key number {place} is not NAME:ROLE+ROLE:SECRET, with roles out of infer, read and admin and a "
                f"secret of {LEAST_SECRET} characters or more; `penstock keys new` makes one"
            ) from None
    return tuple(hashed)


def key_of_hashed(entry: str) -> ApiKey:
    """The key of one of `read_key_list`'s entries."""
    name, roles, digest = entry.split(":")
    return ApiKey(checked_name(name), checked_digest(name, digest), roles_of(name, roles.split("+")))


def roles_of(name: str, words: Iterable[str]) -> frozenset[Role]:
    """The roles by their words. Raises KeyRefused for an unknown one, and where there is none."""
    try:
        roles = frozenset(map(Role, words))
    except ValueError as error:
        raise KeyRefused(f"the key {name!r} has an unknown role ({error}); there are infer, read and admin") from error
    if not roles:
        raise KeyRefused(f"the key {name!r} has no role; give it infer, read or admin")
    return roles
