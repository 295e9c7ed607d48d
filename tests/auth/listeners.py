"""Doors for the tests of the gates, and the keys that open them."""

from penstock.gateway.audit import NO_AUDIT, AuditLog
from penstock.gateway.auth.api_keys import ApiKey, digest_of
from penstock.gateway.auth.authenticator import Authenticator, AuthOptions
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.protocol.identity import Quota, Role

KEYS = {role: f"pk-secret-of-the-tests-{role}" for role in Role}
ONCE = "pk-secret-of-the-tests-once-an-hour"
STRANGER = "pk-secret-that-is-unknown"


def door(*anonymous: Role, audit: AuditLog = NO_AUDIT) -> Authenticator:
    """A key for each role, and one that may infer once an hour. anonymous: what may be done without."""
    keys = [ApiKey(role.value, digest_of(secret), frozenset((role,))) for role, secret in KEYS.items()]
    keys.append(ApiKey("once", digest_of(ONCE), frozenset((Role.INFER,)), Quota(1, 3600.0, 1.0)))
    quotas = RateLimiter(max_requests=8, max_bytes=1 << 20)
    return Authenticator(AuthOptions(None, tuple(keys), frozenset(anonymous)), quotas, audit=audit)
