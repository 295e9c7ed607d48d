"""API keys: request headers, creation, hashing and look-up. Sans-IO."""

import hashlib
import hmac
import re
import secrets
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from penstock.protocol.errors import Unauthenticated
from penstock.protocol.identity import Quota, Role

API_KEY, AUTHORIZATION = "x-api-key", "authorization"
CREDENTIAL_NAMES = frozenset((API_KEY, AUTHORIZATION))
_BEARER = "bearer"


def credentials_of(headers: Iterable[tuple[str, str]]) -> Iterator[str]:
    """Every key or token in the headers, which have lower-case names. Raises Unauthenticated for another scheme."""
    for name, value in headers:
        if name == API_KEY:
            yield value.strip()
        elif name == AUTHORIZATION:
            scheme, _, credential = value.strip().partition(" ")
            if scheme.lower() != _BEARER or not credential.strip():
                raise Unauthenticated("`authorization` is not `Bearer …`; send the API key or token that way")
            yield credential.strip()


MIN_SECRET = 20  # characters; `new_secret` makes 46
_PREFIX = "pk-"
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._@-]{0,63}")
_DIGEST = re.compile(r"[0-9a-f]{64}")


class InvalidApiKey(ValueError):
    """Invalid key. The message never contains the secret."""


@dataclass(frozen=True, slots=True)
class ApiKey:
    """A stored key. digest: SHA-256 of the secret in hexadecimal. quota: None for the default."""

    name: str
    digest: str
    roles: frozenset[Role]
    quota: Quota | None = None


def new_secret() -> str:
    """A random secret of 256 bits, safe in headers, URLs and shells."""
    return _PREFIX + secrets.token_urlsafe(32)


def digest_of(secret: str) -> str:
    """SHA-256 of the secret. One round suffices for long random secrets."""
    return hashlib.sha256(secret.encode("utf-8", "surrogateescape")).hexdigest()


class ApiKeyRing:
    """API keys, looked up by SHA-256, so that response times reveal nothing about a secret."""

    def __init__(self, keys: Iterable[ApiKey]) -> None:
        """Raises InvalidApiKey if two keys share a name or a secret."""
        self._by_digest: dict[str, ApiKey] = {}
        names: set[str] = set()
        for key in keys:
            if key.name in names:
                raise InvalidApiKey(f"the key {key.name!r} is there twice; give each its own name")
            if key.digest in self._by_digest:
                other = self._by_digest[key.digest].name
                raise InvalidApiKey(f"the keys {other!r} and {key.name!r} have the same secret; give each its own")
            names.add(key.name)
            self._by_digest[key.digest] = key

    def __len__(self) -> int:
        return len(self._by_digest)

    def find(self, secret: str) -> ApiKey | None:
        digest = digest_of(secret)
        key = self._by_digest.get(digest)
        return key if key is not None and hmac.compare_digest(key.digest, digest) else None


def check_key_name(name: str) -> str:
    """The name. Raises InvalidApiKey if it is ambiguous in logs or metrics."""
    if _NAME.fullmatch(name) is None:
        raise InvalidApiKey(f"a key is named {name[:80]!r}; use 1 to 64 letters, digits, and . _ @ - after the first")
    return name


def check_digest(name: str, digest: str) -> str:
    """The digest. Raises InvalidApiKey if it is malformed."""
    if _DIGEST.fullmatch(digest) is None:
        raise InvalidApiKey(f"sha256 of the key {name!r} is not 64 hexadecimal digits; `penstock keys new` makes one")
    return digest


def check_secret(name: str, secret: str) -> str:
    """The secret's digest. Raises InvalidApiKey if it is easy to guess or invalid in a header."""
    if len(secret) < MIN_SECRET or not secret.isascii() or not secret.isprintable() or " " in secret:
        raise InvalidApiKey(
            f"the secret of the key {name!r} is too weak: it needs {MIN_SECRET} printable ASCII characters without "
            "spaces; `penstock keys new` makes one"
        )
    return digest_of(secret)


def read_key_list(text: str) -> tuple[str, ...]:
    """NAME:ROLE+ROLE:DIGEST of each NAME:ROLE+ROLE:SECRET entry. Raises InvalidApiKey without parts of the entry."""
    hashed = []
    for number, entry in enumerate(text.replace(",", " ").split(), start=1):
        name, roles, secret = (*entry.split(":", 2), "", "")[:3]
        try:
            roles_of(check_key_name(name), roles.split("+"))
            hashed.append(f"{name}:{roles}:{check_secret(name, secret)}")
        except InvalidApiKey:
            raise InvalidApiKey(
                f"key number {number} is not NAME:ROLE+ROLE:SECRET, with roles out of infer, read and admin and a "
                f"secret of {MIN_SECRET} characters or more; `penstock keys new` makes one"
            ) from None
    return tuple(hashed)


def key_of_hashed(entry: str) -> ApiKey:
    """The key of an entry from `read_key_list`."""
    name, roles, digest = entry.split(":")
    return ApiKey(check_key_name(name), check_digest(name, digest), roles_of(name, roles.split("+")))


def roles_of(name: str, names: Iterable[str]) -> frozenset[Role]:
    """The roles with these names. Raises InvalidApiKey for an unknown role, and without roles."""
    try:
        roles = frozenset(map(Role, names))
    except ValueError as error:
        raise InvalidApiKey(
            f"the key {name!r} has an unknown role ({error}); there are infer, read and admin"
        ) from error
    if not roles:
        raise InvalidApiKey(f"the key {name!r} has no role; give it infer, read or admin")
    return roles
