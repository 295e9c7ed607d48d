"""Reads the access file (TOML): API keys, token rules and certificates with their roles and quotas."""

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import msgspec

from penstock.gateway.auth.api_keys import (
    ApiKey,
    ApiKeyRing,
    InvalidApiKey,
    check_digest,
    check_key_name,
    check_secret,
    roles_of,
)
from penstock.network import is_loopback
from penstock.protocol.identity import Quota, Role

SECRET_ALGORITHMS = frozenset(("HS256", "HS384", "HS512"))
PUBLIC_KEY_ALGORITHMS = frozenset(
    ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
)
DEFAULT_ALGORITHMS = ("RS256", "ES256")
_MIN_JWT_SECRET_BYTES = 32  # HS256 has a hash of 32 bytes


class AccessFileError(Exception):
    """The access file cannot be read or used. The message never contains a secret."""


class EmptyAccessFile(AccessFileError):
    """The access file is valid and grants nothing."""


@dataclass(frozen=True, slots=True)
class TokenRules:
    """Which JSON web tokens are accepted. verifying_key: secret or PEM. usual_roles: of tokens without roles_claim."""

    audience: str
    issuer: str | None
    algorithms: tuple[str, ...]
    verifying_key: bytes
    jwks_url: str
    roles_claim: str
    usual_roles: frozenset[Role]
    quota: Quota | None
    leeway_s: float


@dataclass(frozen=True, slots=True)
class Grant:
    """Roles and quota of a client certificate. quota: None for the default."""

    roles: frozenset[Role] = frozenset()
    quota: Quota | None = None


@dataclass(frozen=True, slots=True)
class CertificateRules:
    """Grants by certificate subject (RFC 4514), and the grant of all other certificates."""

    subjects: Mapping[str, Grant]
    others: Grant

    def grant_of(self, subject: str) -> Grant:
        """The grant of a verified certificate."""
        return self.subjects.get(subject, self.others)


@dataclass(frozen=True, slots=True)
class AccessRules:
    """Content of an access file."""

    keys: tuple[ApiKey, ...] = ()
    tokens: TokenRules | None = None
    certificates: CertificateRules | None = None


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    roles: list[str]
    sha256: str = ""
    key: str = ""
    rate: str = ""
    share: float | None = None


class _Tokens(msgspec.Struct, forbid_unknown_fields=True):
    audience: str
    issuer: str | None = None
    algorithms: list[str] | None = None
    secret_file: str = ""
    public_key_file: str = ""
    jwks_url: str = ""
    roles_claim: str = "roles"
    roles: list[str] = []
    rate: str = ""
    share: float | None = None
    leeway_s: float = 30.0


class _Grant(msgspec.Struct, forbid_unknown_fields=True):
    roles: list[str]
    rate: str = ""
    share: float | None = None


class _Certificates(msgspec.Struct, forbid_unknown_fields=True):
    roles: list[str] = []
    rate: str = ""
    share: float | None = None
    subjects: dict[str, _Grant] = {}


class _File(msgspec.Struct, forbid_unknown_fields=True):
    keys: dict[str, _Key] = {}
    tokens: _Tokens | None = None
    certificates: _Certificates | None = None


def read_access_file(path: Path) -> AccessRules:
    """The checked content of the file. Raises AccessFileError."""
    try:
        return _rules_of(path)
    except OSError as error:
        location = error.filename or path
        raise AccessFileError(
            f"{location}: cannot be read ({error.strerror}); give a file that this user may read"
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise AccessFileError(f"{path}: not valid TOML: {error}") from None
    except msgspec.ValidationError as error:
        raise AccessFileError(f"{path}: {error}; `penstock keys new --help` shows what one looks like") from None
    except InvalidApiKey as error:
        raise AccessFileError(f"{path}: {error}") from error


def _rules_of(path: Path) -> AccessRules:
    file = msgspec.convert(tomllib.loads(path.read_text()), _File)
    keys = tuple(_api_key(name, key) for name, key in file.keys.items())
    ApiKeyRing(keys)  # rejects duplicate secrets
    tokens = _token_rules(file.tokens, path.parent) if file.tokens is not None else None
    certificates = _certificate_rules(file.certificates) if file.certificates is not None else None
    if not keys and tokens is None and certificates is None:
        raise EmptyAccessFile(
            f"{path}: it has no keys, no [tokens] and no [certificates]; `penstock keys new NAME --file …` adds a key"
        )
    return AccessRules(keys, tokens, certificates)


def _certificate_rules(certificates: _Certificates) -> CertificateRules:
    grants = {
        subject: _grant(f"[certificates.subjects.{subject!r}]", grant.roles, grant.rate, grant.share)
        for subject, grant in certificates.subjects.items()
    }
    others = _grant("[certificates]", certificates.roles, certificates.rate, certificates.share)
    return CertificateRules(grants, others)


def _grant(where: str, roles: list[str], rate: str, share: float | None) -> Grant:
    return Grant(roles_of(where, roles) if roles else frozenset(), _quota(where, rate, share))


def _api_key(name: str, key: _Key) -> ApiKey:
    check_key_name(name)
    if bool(key.key) == bool(key.sha256):
        raise InvalidApiKey(f"the key {name!r} needs one of sha256 and key; `penstock keys new` makes one with sha256")
    digest = check_secret(name, key.key) if key.key else check_digest(name, key.sha256.lower())
    return ApiKey(name, digest, roles_of(name, key.roles), _quota(f"the key {name!r}", key.rate, key.share))


def _quota(subject: str, rate: str, share: float | None) -> Quota | None:
    """None for the default quota. With a rate alone, the share is 0, which means the default."""
    if not rate and share is None:
        return None
    if share is not None and not 0 < share <= 1:
        raise InvalidApiKey(f"share of {subject} is {share:g}; it is over 0 and at most 1")
    count, period_s = _rate(subject, rate) if rate else (0, 1.0)
    return Quota(count, period_s, share or 0.0)


def _rate(subject: str, text: str) -> tuple[int, float]:
    """Requests and period in seconds, from a text such as "100/second" or "10 per 5 minutes"."""
    # Imported here because it is slow. Its counter is not used, because it reads the wall clock.
    from limits import parse

    try:
        rate = parse(text)
    except ValueError as error:
        raise InvalidApiKey(
            f'rate of {subject} is {text[:80]!r}; write it as "100/second" or "10 per 5 minutes"'
        ) from error
    if rate.amount < 1:
        raise InvalidApiKey(f"rate of {subject} is {text[:80]!r}, which allows nothing; leave the key out instead")
    return rate.amount, float(rate.get_expiry())


def _token_rules(tokens: _Tokens, folder: Path) -> TokenRules:
    given = [name for name in ("secret_file", "public_key_file", "jwks_url") if getattr(tokens, name)]
    if len(given) != 1:
        raise InvalidApiKey("[tokens] needs exactly one of secret_file, public_key_file and jwks_url")
    is_shared = bool(tokens.secret_file)
    algorithms = tuple(tokens.algorithms or (("HS256",) if is_shared else DEFAULT_ALGORITHMS))
    wrong = sorted(set(algorithms) - (SECRET_ALGORITHMS if is_shared else PUBLIC_KEY_ALGORITHMS))
    if wrong:
        raise InvalidApiKey(f"[tokens] algorithms has {wrong[0]!r}, which does not go with {given[0]}; leave it out")
    if tokens.jwks_url:
        _check_url(tokens.jwks_url)
    return TokenRules(
        audience=tokens.audience,
        issuer=tokens.issuer,
        algorithms=algorithms,
        verifying_key=_verifying_key(tokens, folder),
        jwks_url=tokens.jwks_url,
        roles_claim=tokens.roles_claim,
        usual_roles=roles_of("[tokens]", tokens.roles) if tokens.roles else frozenset(),
        quota=_quota("[tokens]", tokens.rate, tokens.share),
        leeway_s=tokens.leeway_s,
    )


def _verifying_key(tokens: _Tokens, folder: Path) -> bytes:
    """The key's bytes. A relative path starts at the access file's folder."""
    if tokens.jwks_url:
        return b""
    content = (folder / (tokens.secret_file or tokens.public_key_file)).read_bytes()
    if tokens.public_key_file:
        _check_public_key(content)
        return content
    secret = content.strip()
    if len(secret) < _MIN_JWT_SECRET_BYTES:
        raise InvalidApiKey(
            f"[tokens] secret_file holds {len(secret)} bytes; a secret has {_MIN_JWT_SECRET_BYTES} or more"
        )
    return secret


def _check_public_key(content: bytes) -> None:
    from cryptography.hazmat.primitives.serialization import load_pem_public_key

    try:
        load_pem_public_key(content)
    except ValueError:
        raise InvalidApiKey(
            "[tokens] public_key_file holds no public key as PEM; give one (never the private one)"
        ) from None


def _check_url(url: str) -> None:
    """Requires https, except on loopback: an attacker who replaces the keys in transit could sign tokens."""
    parts = urlsplit(url)
    if parts.scheme == "https" and parts.hostname:
        return
    if parts.scheme == "http" and parts.hostname and is_loopback(parts.hostname):
        return
    raise InvalidApiKey(f"[tokens] jwks_url is {url!r}; give an https:// address (http:// on loopback only)")
