"""Authenticates clients by API key, token or certificate, and checks their roles."""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.gateway.audit import NO_AUDIT, AuditLog
from penstock.gateway.auth.access_file import (
    AccessFileError,
    AccessRules,
    CertificateRules,
    EmptyAccessFile,
    Grant,
    read_access_file,
)
from penstock.gateway.auth.api_keys import ApiKey, ApiKeyRing, InvalidApiKey
from penstock.gateway.auth.rate_limiter import RateLimiter, with_default_share
from penstock.logs import get_logger
from penstock.outbound import OutboundPolicy
from penstock.protocol.errors import AccessUnavailable, InferenceError, PermissionDenied, Unauthenticated
from penstock.protocol.identity import ANY_CLIENT, Identity, Needed, Quota, Role

if TYPE_CHECKING:
    from penstock.gateway.auth.tokens import JwksKeys, TokenVerifier


CHECK_INTERVAL_S = 1.0
CERTIFICATE_PREFIX = "certificate:"  # of certificate subjects; API key names have no colon
DEFAULT_SHARE = 0.5
_SEND_KEY_HINT = "send `Authorization: Bearer …` or `x-api-key: …`"

log = get_logger("access")
FileSignature = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AuthOptions:
    """API keys, and roles of anonymous clients. allowed_outbound: see OutboundPolicy; for the tokens' key set."""

    file: Path | None = None
    keys: tuple[ApiKey, ...] = ()
    anonymous: frozenset[Role] = frozenset()
    allowed_outbound: tuple[str, ...] = ()


class Authenticator:
    """Authenticates clients by API key, token or certificate. Reloads its file when it changes."""

    def __init__(
        self,
        options: AuthOptions,
        quotas: RateLimiter,
        *,
        audit: AuditLog = NO_AUDIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quotas = quotas
        self._audit = audit
        self.failed_reads = 0
        self._options = options
        self.now = clock
        self._ring: ApiKeyRing | None = None
        self._usual = Quota()
        self._verifier: TokenVerifier | None = None
        self._certificates: CertificateRules | None = None
        self._jwks: JwksKeys | None = None
        self._signature: FileSignature | None = None
        if options.file is None:
            self._take(AccessRules())
        else:
            self._read(options.file)

    @property
    def open_to(self) -> frozenset[Role]:
        """Roles of anonymous clients."""
        return self._options.anonymous

    @property
    def key_count(self) -> int:
        return len(self._ring) if self._ring is not None else 0

    def in_flight(self) -> dict[tuple[str, ...], float]:
        """Requests in flight by key name; tokens, certificates and anonymous clients count as one each."""
        counts: dict[tuple[str, ...], float] = {}
        for name, count in self.quotas.in_flight().items():
            kind, colon, _ = name.partition(":")
            label = (f"{kind}s" if colon else name or "none",)
            counts[label] = counts.get(label, 0) + count
        return counts

    async def admit(
        self,
        credentials: Iterable[str],
        role: Needed,
        *,
        or_role: Role | None = None,
        certificate: str = "",
        needs_key: bool = False,
    ) -> Identity:
        """The client with these keys or tokens, else with this certificate subject, else anonymous.

        needs_key: anonymous roles do not count. or_role: also admits, as `role`. Raises Unauthenticated,
        PermissionDenied, QuotaExceeded, AccessUnavailable.
        """
        presented = set(credentials)
        if len(presented) > 1:
            raise Unauthenticated("two different keys are sent; send one")
        anonymous = frozenset[Role]() if needs_key else self._options.anonymous
        caller = await self._caller(presented.pop()) if presented else self._without_key(certificate, anonymous)
        if role != ANY_CLIENT and role not in caller.roles:
            if or_role not in caller.roles:
                raise self._denied(caller, role)
            caller = replace(caller, roles=caller.roles | {role})
        self.quotas.check_rate(caller, self.now())
        return caller

    def note_refused(self, error: InferenceError, address: str, target: str, *, certificate: str = "") -> None:
        """Writes a refused authentication to the audit log; ignores other errors. target: method and path."""
        if isinstance(error, Unauthenticated | PermissionDenied):
            client = error.client or (CERTIFICATE_PREFIX + certificate if certificate else "")
            self._audit.record(client, address, "access", target, error.reason)

    async def run(self) -> None:
        """Reloads the file whenever it changes, until cancelled."""
        while self._options.file is not None:
            await asyncio.sleep(CHECK_INTERVAL_S)
            await self.reload_if_changed()

    async def reload_if_changed(self) -> None:
        """Reloads the file if it changed. If it is invalid, the old keys stay in use and one error is logged."""
        file = self._options.file
        if file is None:
            return
        signature = await asyncio.to_thread(_signature_of, file)
        if signature == self._signature:
            return
        self._signature = signature
        try:
            self._take(await asyncio.to_thread(read_access_file, file))
        except AccessFileError as error:
            self._complain(error)

    async def aclose(self) -> None:
        """Cancels a running fetch of keys."""
        if self._jwks is not None:
            await self._jwks.aclose()

    async def _caller(self, credential: str) -> Identity:
        if self._ring is None:
            raise AccessUnavailable("the keys cannot be read now; the gateway's log says why", retry_after_s=5.0)
        key = self._ring.find(credential)
        if key is not None:
            return Identity(key.name, roles=key.roles, quota=key.quota)
        if self._verifier is not None and credential.count(".") == 2:
            return await self._verifier.caller(credential)
        raise Unauthenticated(f"the API key is unknown; {_SEND_KEY_HINT} with one that this gateway knows")

    def _denied(self, caller: Identity, role: Role) -> Exception:
        if caller.key_name:
            roles = ", ".join(sorted(caller.roles)) or "none"
            return PermissionDenied(
                f"{caller.key_name!r} lacks the role {role}, which this needs (it has: {roles}); use another key",
                client=caller.key_name,
            )
        if self._verifier is None and self._ring is not None and not self.key_count:
            return PermissionDenied(
                f"this needs the role {role}, and the gateway has no API keys; start it with --access-file, or {role} "
                "in --anonymous"
            )
        return Unauthenticated(f"this needs an API key with the role {role}; {_SEND_KEY_HINT}")

    def _without_key(self, certificate: str, anonymous: frozenset[Role]) -> Identity:
        """An anonymous client, or that of the certificate, which also has the anonymous roles."""
        if not certificate:
            return Identity(roles=anonymous, quota=self._usual)
        grant = self._certificates.grant_of(certificate) if self._certificates is not None else Grant()
        roles = grant.roles | anonymous
        return Identity(
            CERTIFICATE_PREFIX + certificate, roles=roles, quota=with_default_share(grant.quota, self._usual)
        )

    def _read(self, file: Path) -> None:
        self._signature = _signature_of(file)
        try:
            self._take(read_access_file(file))
        except EmptyAccessFile:
            self._take(AccessRules())
        except AccessFileError as error:
            self._complain(error)

    def _complain(self, error: AccessFileError) -> None:
        self.failed_reads += 1
        consequence = "the previous keys stay in use" if self._ring is not None else "no keys until the file is fixed"
        log.error("access file not reloaded", error=str(error), kept=consequence)

    def _take(self, rules: AccessRules) -> None:
        """Raises AccessFileError if a key is in the file and in PENSTOCK_API_KEYS."""
        keys = (*self._options.keys, *rules.keys)
        is_alone = len(keys) <= 1 and not (rules.tokens or rules.certificates or self._options.anonymous)
        usual = Quota(share=1.0 if is_alone else DEFAULT_SHARE)
        try:
            ring = ApiKeyRing(replace(key, quota=with_default_share(key.quota, usual)) for key in keys)
        except InvalidApiKey as error:
            raise AccessFileError(f"{error} (PENSTOCK_API_KEYS and the access file count together)") from error
        self._verifier = self._verifier_of(rules, usual)
        self._certificates = rules.certificates
        self._usual = usual
        self._ring = ring
        log.info("access file loaded", keys=len(ring), takes_tokens=rules.tokens is not None)

    def _verifier_of(self, rules: AccessRules, usual: Quota) -> "TokenVerifier | None":
        if rules.tokens is None:
            return None
        from penstock.gateway.auth.tokens import JwksKeys, TokenVerifier, fetch_json

        if not rules.tokens.jwks_url:
            self._jwks = None
        elif self._jwks is None or self._jwks.url != rules.tokens.jwks_url:
            fetch = partial(fetch_json, outbound=OutboundPolicy(self._options.allowed_outbound))
            self._jwks = JwksKeys(rules.tokens.jwks_url, fetch=fetch, clock=self.now)
        return TokenVerifier(replace(rules.tokens, quota=with_default_share(rules.tokens.quota, usual)), self._jwks)


def _signature_of(file: Path) -> FileSignature | None:
    """Modification time, size and inode; None if the file does not exist."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
