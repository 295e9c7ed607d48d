"""The door: who stands there, and may they do that?"""

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from server.access.audit import NO_AUDIT, AuditLog
from server.access.keys import ApiKey, KeyRefused, KeyRing
from server.access.quotas import Quotas, with_share
from server.access.rules import (
    AccessFileError,
    AccessRules,
    CertificateRules,
    Grant,
    NoKeysYet,
    read_access_file,
)
from server.core.caller import Caller, Quota, Role
from server.core.errors import AccessUnavailable, InferenceError, PermissionDenied, Unauthenticated
from server.core.outbound import Outbound
from server.logs import get_logger

if TYPE_CHECKING:  # they import cryptography, which API keys do not need
    from server.access.jwks import JwksKeys
    from server.access.tokens import TokenVerifier

LOOK_INTERVAL_S = 1.0
CERTIFICATE_PREFIX = "certificate:"  # before a certificate's subject; no API key's name has a colon
SHARE_OF_ONE_AMONG_MANY = 0.5
_HOW = "send `Authorization: Bearer …` or `x-api-key: …`"

log = get_logger("access")
Signature = tuple[int, int, int]


@dataclass(frozen=True, slots=True)
class AccessOptions:
    """API keys, and roles of anonymous clients. allowed_outbound: see Outbound; for the key set of tokens."""

    file: Path | None = None
    keys: tuple[ApiKey, ...] = ()
    anonymous: frozenset[Role] = frozenset()
    allowed_outbound: tuple[str, ...] = ()


class Door:
    """Lets callers in by their key or token. The keys of its file are read again when the file changes."""

    def __init__(
        self,
        options: AccessOptions,
        quotas: Quotas,
        *,
        audit: AuditLog = NO_AUDIT,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.quotas = quotas
        self._audit = audit
        self.failed_reads = 0
        self._options = options
        self.now = clock
        self._ring: KeyRing | None = None
        self._usual = Quota()
        self._verifier: TokenVerifier | None = None
        self._certificates: CertificateRules | None = None
        self._jwks: JwksKeys | None = None
        self._signature: Signature | None = None
        if options.file is None:
            self._take(AccessRules())
        else:
            self._read(options.file)

    @property
    def open_to(self) -> frozenset[Role]:
        """What may be done without a key."""
        return self._options.anonymous

    @property
    def key_count(self) -> int:
        """API keys that open this door now."""
        return len(self._ring) if self._ring is not None else 0

    def in_flight(self) -> dict[tuple[str, ...], float]:
        """Requests in flight by the key's name; tokens, certificates and anonymous clients count as one each."""
        counts: dict[tuple[str, ...], float] = {}
        for name, count in self.quotas.in_flight().items():
            kind, colon, _ = name.partition(":")
            label = (f"{kind}s" if colon else name or "none",)
            counts[label] = counts.get(label, 0) + count
        return counts

    async def admit(
        self,
        credentials: Iterable[str],
        role: Role,
        *,
        or_role: Role | None = None,
        certificate: str = "",
        needs_key: bool = False,
    ) -> Caller:
        """The client that presents these keys or tokens, else this certificate, else an anonymous one.

        certificate: the subject of its verified client certificate, "" for none.
        needs_key: whether the roles of anonymous clients do not count.
        or_role: a role that does as well; whoever is let in by it has the other one, too, for what is asked now.
        Raises Unauthenticated, PermissionDenied, QuotaExceeded, and AccessUnavailable where nobody can tell now.
        """
        presented = set(credentials)
        if len(presented) > 1:
            raise Unauthenticated("two different keys are sent; send one")
        anonymous = frozenset[Role]() if needs_key else self._options.anonymous
        caller = await self._caller(presented.pop()) if presented else self._without_key(certificate, anonymous)
        if role not in caller.roles:
            if or_role not in caller.roles:
                raise self._denied(caller, role)
            caller = replace(caller, roles=caller.roles | {role})
        self.quotas.look(caller, self.now())
        return caller

    def note_refused(self, error: InferenceError, address: str, target: str, *, certificate: str = "") -> None:
        """Writes a refused authentication to the audit log; ignores other errors.

        target: the method and path. certificate: as in `admit`.
        """
        if isinstance(error, Unauthenticated | PermissionDenied):
            client = error.client or (CERTIFICATE_PREFIX + certificate if certificate else "")
            self._audit.record(client, address, "access", target, error.reason)

    async def run(self) -> None:
        """Reads the file again whenever it has changed; for ever."""
        while self._options.file is not None:
            await asyncio.sleep(LOOK_INTERVAL_S)
            await self.look_again()

    async def look_again(self) -> None:
        """Reads the file again where it has changed; a broken one leaves the keys as they are, and is told of once."""
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
        """Ends what runs."""
        if self._jwks is not None:
            await self._jwks.aclose()

    async def _caller(self, credential: str) -> Caller:
        if self._ring is None:
            raise AccessUnavailable("the keys cannot be read now; the gateway's log says why", retry_after_s=5.0)
        key = self._ring.find(credential)
        if key is not None:
            return Caller(key.name, roles=key.roles, quota=key.quota)
        if self._verifier is not None and credential.count(".") == 2:
            return await self._verifier.caller(credential)
        raise Unauthenticated(f"the API key is unknown; {_HOW} with one that this gateway knows")

    def _denied(self, caller: Caller, role: Role) -> Exception:
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
        return Unauthenticated(f"this needs an API key with the role {role}; {_HOW}")

    def _without_key(self, certificate: str, anonymous: frozenset[Role]) -> Caller:
        """An anonymous client, or that of a client certificate, which also has the roles of anonymous clients."""
        if not certificate:
            return Caller(roles=anonymous, quota=self._usual)
        grant = self._certificates.grant_of(certificate) if self._certificates is not None else Grant()
        roles = grant.roles | anonymous
        return Caller(CERTIFICATE_PREFIX + certificate, roles=roles, quota=with_share(grant.quota, self._usual))

    def _read(self, file: Path) -> None:
        self._signature = _signature_of(file)
        try:
            self._take(read_access_file(file))
        except NoKeysYet:
            self._take(AccessRules())
        except AccessFileError as error:
            self._complain(error)

    def _complain(self, error: AccessFileError) -> None:
        self.failed_reads += 1
        kept = "the previous keys stay in use" if self._ring is not None else "no keys until the file is fixed"
        log.error("access file not reloaded", error=str(error), kept=kept)

    def _take(self, rules: AccessRules) -> None:
        """Raises AccessFileError where a key is in the file and elsewhere, too."""
        keys = (*self._options.keys, *rules.keys)
        is_alone = len(keys) <= 1 and not (rules.tokens or rules.certificates or self._options.anonymous)
        usual = Quota(share=1.0 if is_alone else SHARE_OF_ONE_AMONG_MANY)
        try:
            ring = KeyRing(replace(key, quota=with_share(key.quota, usual)) for key in keys)
        except KeyRefused as error:
            raise AccessFileError(f"{error} (PENSTOCK_API_KEYS and the access file count together)") from error
        self._verifier = self._verifier_of(rules, usual)
        self._certificates = rules.certificates
        self._usual = usual
        self._ring = ring
        log.info("access file loaded", keys=len(ring), takes_tokens=rules.tokens is not None)

    def _verifier_of(self, rules: AccessRules, usual: Quota) -> "TokenVerifier | None":
        if rules.tokens is None:
            return None
        from server.access.jwks import JwksKeys, fetch_json
        from server.access.tokens import TokenVerifier

        if not rules.tokens.jwks_url:
            self._jwks = None
        elif self._jwks is None or self._jwks.url != rules.tokens.jwks_url:
            fetch = partial(fetch_json, outbound=Outbound(self._options.allowed_outbound))
            self._jwks = JwksKeys(rules.tokens.jwks_url, fetch=fetch, clock=self.now)
        return TokenVerifier(replace(rules.tokens, quota=with_share(rules.tokens.quota, usual)), self._jwks)


def _signature_of(file: Path) -> Signature | None:
    """What changes with the file; None where it is not there."""
    try:
        status = file.stat()
    except OSError:
        return None
    return status.st_mtime_ns, status.st_size, status.st_ino
