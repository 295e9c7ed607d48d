"""Access to the control API: keys, TLS and audit log, from flags and environment of `penstock video run`."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from penstock.cli.terminal import fail
from penstock.gateway.audit import AuditLog, AuditLogError
from penstock.gateway.auth.access_file import AccessFileError, EmptyAccessFile, read_access_file
from penstock.gateway.auth.api_keys import (
    MIN_SECRET,
    ApiKey,
    InvalidApiKey,
    digest_of,
    key_of_hashed,
    read_key_list,
    roles_of,
)
from penstock.gateway.auth.authenticator import CERTIFICATE_PREFIX, Authenticator, AuthOptions
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.gateway.settings_checks import require_tls_pair
from penstock.gateway.settings_sources import KEYS_VARIABLE
from penstock.logs import get_logger
from penstock.protocol.identity import ALL_ROLES, Role
from penstock.tls import Certificates, CurrentTls, TlsFileError, subject_of
from penstock_video.api.options import KEY_VARIABLE, ApiParts, ApiRefused, Audit
from penstock_video.errors import ChangeNotSaved
from penstock_video.settings.loader import Flags
from penstock_video.settings.models import ApiSettings
from penstock_video.settings.saving import SettingsFile

OWN_KEY = "api-key"  # name of the key in KEY_VARIABLE
NO_ROLE = "none"
_NOT_IN_FILE = {"--source": "sources", "--rules": "rules", "--line": "lines", "--zone": "zones"}
_REQUESTS, _BODY_BYTES = 256, 256 << 20  # limits in flight that no client reaches: connections are limited first

log = get_logger("video")


@dataclass(frozen=True, slots=True)
class SecurityFlags:
    """Flags of the control API; None if not given.

    anonymous: roles of clients without a key, comma-separated. keys: of a stack, in addition to the environment's.
    """

    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_client_ca: Path | None = None
    audit_log: Path | None = None
    access_file: Path | None = None
    anonymous: str | None = None
    keys: tuple[ApiKey, ...] = ()


def security_of(flags: SecurityFlags, environ: Mapping[str, str]) -> ApiParts:
    """Ends the command with exit code 2 and the reason if a file or value is invalid."""
    try:
        return ApiParts(
            access=_access(flags, environ),
            tls=_tls(flags.tls_cert, flags.tls_key, flags.tls_client_ca),
            audit=_audit(flags.audit_log),
        )
    except (AccessFileError, ApiRefused, AuditLogError, TlsFileError, ValueError) as error:
        fail(str(error), code=2)


def saver_of(config: Path | None, flags: Flags, environ: Mapping[str, str]) -> SettingsFile:
    """Writes changes to the settings file. Ends the command with exit code 2 if flags conflict with the file."""
    given = [name for name, value in _NOT_IN_FILE.items() if getattr(flags, value)]
    if config is None or given:
        what = f"{', '.join(given)} would not be in it; move it there" if given else "none is given"
        fail(f"--save-changes writes to the settings file (CONFIG.yaml), and {what}", code=2)
    try:
        return SettingsFile(config, dict(environ), flags)
    except ChangeNotSaved as error:
        fail(error.message, code=2)


def warn_of_short_key(settings: ApiSettings, environ: Mapping[str, str]) -> None:
    """Logs a warning for a short key on an address that other machines can reach."""
    key = environ.get(KEY_VARIABLE, "")
    if settings.is_enabled and 0 < len(key) < MIN_SECRET and not settings.is_local:
        warning = "the control API's key is short, and others can reach it: it can be guessed"
        log.warning(warning, variable=KEY_VARIABLE, characters=len(key), needed=MIN_SECRET)


def _tls(certificate: Path | None, key: Path | None, client_ca: Path | None) -> CurrentTls | None:
    """None without TLS. Raises ValueError, TlsFileError."""
    require_tls_pair(certificate, key, client_ca)
    certificates = Certificates.of(certificate, key, client_ca)
    return certificates.context if certificates is not None else None


def _audit(file: Path | None) -> Audit | None:
    """None without an audit log. Raises AuditLogError."""
    if file is None:
        return None
    return Audit(AuditLog(file).record, lambda certificate: CERTIFICATE_PREFIX + subject_of(certificate))


def _access(flags: SecurityFlags, environ: Mapping[str, str]) -> Authenticator | None:
    """None if every client has all roles. Raises AccessFileError, ApiRefused, InvalidApiKey."""
    keys = (*flags.keys, *_listed_keys(environ), *_own_key(environ))
    file, anonymous = flags.access_file, _roles(flags.anonymous)
    if not keys and file is None and anonymous in (None, ALL_ROLES):
        return None
    if file is not None:
        try:
            read_access_file(file)
        except EmptyAccessFile as error:
            log.warning(f"no client has a key: {error}")
    limiter = RateLimiter(max_requests=_REQUESTS, max_bytes=_BODY_BYTES)
    return Authenticator(AuthOptions(file, keys, anonymous or frozenset()), limiter)


def _listed_keys(environ: Mapping[str, str]) -> tuple[ApiKey, ...]:
    try:
        return tuple(map(key_of_hashed, read_key_list(environ.get(KEYS_VARIABLE, ""))))
    except InvalidApiKey as error:
        raise InvalidApiKey(f"{KEYS_VARIABLE}: {error}") from None


def _own_key(environ: Mapping[str, str]) -> tuple[ApiKey, ...]:
    """The key for this API only, which has all roles. Raises ApiRefused."""
    key = environ.get(KEY_VARIABLE, "")
    if key != key.strip() or not key.isascii():
        raise ApiRefused("the control API's key cannot be sent in a header; use letters and digits, without blanks")
    return (ApiKey(OWN_KEY, digest_of(key), ALL_ROLES),) if key else ()


def _roles(text: str | None) -> frozenset[Role] | None:
    """Roles in --anonymous; None if it was not given. Raises InvalidApiKey for an unknown role."""
    names = [name for name in (text or "").split(",") if name.strip()]
    if text is None or names == [NO_ROLE]:
        return None if text is None else frozenset()
    try:
        return roles_of("anonymous", map(str.strip, names))
    except InvalidApiKey as error:
        raise InvalidApiKey(f"--anonymous {text!r}: {error}") from None
