"""Doors for the tests of the gates, and the keys that open them."""

from server.access.audit import NO_AUDIT, AuditLog
from server.access.door import AccessOptions, Door
from server.access.keys import ApiKey, digest_of
from server.access.quotas import Quotas
from server.core.caller import Quota, Role

KEYS = {role: f"pk-secret-of-the-tests-{role}" for role in Role}
ONCE = "pk-secret-of-the-tests-once-an-hour"
STRANGER = "pk-secret-that-nobody-knows"


def door(*anonymous: Role, audit: AuditLog = NO_AUDIT) -> Door:
    """A key for each role, and one that may infer once an hour. anonymous: what may be done without."""
    keys = [ApiKey(role.value, digest_of(secret), frozenset((role,))) for role, secret in KEYS.items()]
    keys.append(ApiKey("once", digest_of(ONCE), frozenset((Role.INFER,)), Quota(1, 3600.0, 1.0)))
    quotas = Quotas(max_requests=8, max_bytes=1 << 20)
    return Door(AccessOptions(None, tuple(keys), frozenset(anonymous)), quotas, audit=audit)
