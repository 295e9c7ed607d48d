"""JSON web tokens: verifies them, and fetches and caches the issuer's public keys."""

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable, Mapping
from urllib.parse import urlsplit

import jwt
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.rsa import RSAPublicKey

from penstock.gateway.auth.access_file import TokenRules
from penstock.logs import get_logger
from penstock.outbound import OutboundPolicy
from penstock.protocol.errors import AccessUnavailable, Unauthenticated
from penstock.protocol.identity import Identity, Role

FRESH_S = 300.0  # older keys are refreshed while they are used
USABLE_S = 3600.0  # older keys are not used
FETCH_RETRY_S = 10.0  # minimum time between two fetches
FETCH_TIMEOUT_S = 3.0
MAX_BYTES = 1 << 20
MIN_RSA_BITS = 2048  # RFC 7518, 3.3

# String members of a JSON Web Key that PyJWT reads (RFC 7517, 7518 and 8037).
_STRINGS = frozenset(("kty", "use", "alg", "kid", "crv", "x", "y", "n", "e", "d", "p", "q", "dp", "dq", "qi", "k"))
# Errors of PyJWT and cryptography for an unsupported or invalid key.
_UNUSABLE = (jwt.PyJWTError, ValueError, UnsupportedAlgorithm)

log = get_logger("access")
Fetch = Callable[[str], Awaitable[bytes]]


async def fetch_json(url: str, outbound: OutboundPolicy) -> bytes:
    """The document at the URL, without redirects. outbound: checks each IP address of the host. Raises OSError."""
    import aiohttp  # here because most gateways fetch no keys

    refused: list[str] = []

    def new_socket(where: aiohttp.AddrInfoType) -> socket.socket:
        family, kind, protocol, _, address = where
        if why := outbound.why_refused(urlsplit(url).hostname or "", str(address[0])):
            refused.append(why)
            raise OSError(why)
        return socket.socket(family, kind, protocol)

    try:
        async with (
            aiohttp.TCPConnector(socket_factory=new_socket) as connector,
            aiohttp.ClientSession(connector=connector, timeout=aiohttp.ClientTimeout(total=FETCH_TIMEOUT_S)) as session,
            session.get(url, allow_redirects=False) as answer,
        ):
            if answer.status != 200:
                raise OSError(f"it answered {answer.status}")
            body = bytearray()
            async for piece in answer.content.iter_any():
                body += piece
                if len(body) > MAX_BYTES:
                    raise OSError(f"its answer has more than {MAX_BYTES} bytes")
    except aiohttp.ClientError as error:
        raise OSError(refused[0] if refused else f"it cannot be fetched ({type(error).__name__})") from error
    except TimeoutError as error:
        raise OSError(f"it did not answer within {FETCH_TIMEOUT_S:g} s") from error
    return bytes(body)


class JwksKeys:
    """The key set at a URL, fetched when an unknown or old key is needed, at most once per FETCH_RETRY_S."""

    def __init__(self, url: str, *, fetch: Fetch, clock: Callable[[], float] = time.monotonic) -> None:
        self.url = url
        self._fetch = fetch
        self._clock = clock
        self._keys: Mapping[str | None, jwt.PyJWK] = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None
        self._last_try_failed = False
        self._fetching: asyncio.Task[None] | None = None

    async def key_for(self, key_id: str | None) -> jwt.PyJWK:
        """The key with this ID; without an ID, the only key. Raises Unauthenticated or AccessUnavailable."""
        key = self._known(key_id)
        if key is None or self._age_s() > FRESH_S:
            self._begin_fetch()
        if key is None and self._fetching is not None:
            await asyncio.shield(self._fetching)
            key = self._known(key_id)
        if key is not None:
            return key
        if self._last_try_failed or self._fetched_at is None:
            raise AccessUnavailable(
                "the keys that tokens are checked with cannot be had now; retry later", retry_after_s=FETCH_RETRY_S
            )
        raise Unauthenticated("the token is signed with a key that its issuer does not list; get a new one")

    async def aclose(self) -> None:
        """Cancels a running fetch."""
        if self._fetching is not None:
            self._fetching.cancel()
            await asyncio.wait({self._fetching})

    def _known(self, key_id: str | None) -> jwt.PyJWK | None:
        if self._age_s() > USABLE_S:
            return None
        if key_id is None:
            return next(iter(self._keys.values())) if len(self._keys) == 1 else None
        return self._keys.get(key_id)

    def _age_s(self) -> float:
        return float("inf") if self._fetched_at is None else self._clock() - self._fetched_at

    def _begin_fetch(self) -> None:
        if self._fetching is not None or (
            self._tried_at is not None and self._clock() - self._tried_at < FETCH_RETRY_S
        ):
            return
        self._tried_at = self._clock()
        self._fetching = asyncio.create_task(self._fetch_keys())

    async def _fetch_keys(self) -> None:
        try:
            keys = keys_of(await self._fetch(self.url))
        except (OSError, ValueError, RecursionError) as error:
            self._last_try_failed = True
            log.warning("the keys of tokens cannot be had", url=self.url, error=str(error), usable_s=self._usable_s())
        else:
            if self._last_try_failed or self._fetched_at is None:
                log.info("the keys of tokens are here", url=self.url, keys=len(keys))
            self._keys = keys
            self._fetched_at = self._clock()
            self._last_try_failed = False
        finally:
            self._fetching = None

    def _usable_s(self) -> int:
        """Seconds for which the cached keys remain usable."""
        return max(0, int(USABLE_S - self._age_s())) if self._keys else 0


def keys_of(document: bytes) -> dict[str | None, jwt.PyJWK]:
    """Keys of a JSON Web Key Set by key ID. Unusable keys are skipped and logged. Raises ValueError."""
    listed = json.loads(document)
    items = listed.get("keys") if isinstance(listed, dict) else None
    if not isinstance(items, list):
        raise ValueError("what came is no JSON web key set")
    keys: dict[str | None, jwt.PyJWK] = {}
    skipped: list[str] = []
    for number, item in enumerate(items, start=1):
        try:
            key = _key_of(item)
        except _UNUSABLE as error:
            skipped.append(f"key {number}: {str(error) or type(error).__name__}")
        else:
            keys[key.key_id] = key
    if skipped:
        log.warning("skipped unusable keys of the key set", skipped=len(skipped), first=skipped[0])
    if not keys:
        raise ValueError("none of the keys that came can be used")
    return keys


def _key_of(item: object) -> jwt.PyJWK:
    """Raises one of _UNUSABLE, also for members that are not strings, which PyJWT does not check."""
    if not isinstance(item, dict):
        raise ValueError("it is not a JSON object")
    for name in _STRINGS & item.keys():
        if item[name] is not None and not isinstance(item[name], str):
            raise ValueError(f"{name} is not a string")
    if item.get("alg") == "none":  # PyJWT accepts it and reads no key
        raise ValueError("its alg is none, which has no signature")
    if item.get("kty") == "oct" or "d" in item:
        raise ValueError("it is not a public key")
    key = jwt.PyJWK(item)
    if isinstance(key.key, RSAPublicKey) and key.key.key_size < MIN_RSA_BITS:
        raise ValueError(f"it has {key.key.key_size} bits; an RSA key has {MIN_RSA_BITS} or more")
    return key


SUBJECT_PREFIX = "token:"  # API key names have no colon
_MAX_SUBJECT = 200
_MAX_TOKEN = 16 << 10

# Messages by error class, nearest class first. They contain no part of the token.
_REASONS: Mapping[type[jwt.PyJWTError], str] = {
    jwt.ExpiredSignatureError: "the token has expired; get a new one",
    jwt.ImmatureSignatureError: "the token is not valid yet; check the clocks, or wait",
    jwt.InvalidAudienceError: "the token is not meant for this gateway; get one with its audience",
    jwt.InvalidIssuerError: "the token is not of the issuer that this gateway believes; get one of that issuer",
    jwt.MissingRequiredClaimError: "the token lacks one of the claims exp, sub and aud; get one that has them",
    jwt.InvalidSignatureError: "the token's signature is wrong; get a new one",
    jwt.InvalidAlgorithmError: "the token's algorithm is not one that this gateway believes; get another token",
    jwt.PyJWTError: "neither an API key nor a token that can be read; check what is sent",
}


class TokenVerifier:
    """Verifies tokens by the rules. jwks: the issuer's key set if the rules have a jwks_url."""

    def __init__(self, rules: TokenRules, jwks: JwksKeys | None) -> None:
        self._rules = rules
        self._jwks = jwks

    async def caller(self, token: str) -> Identity:
        """The token's client. Raises Unauthenticated; AccessUnavailable if it cannot be verified now."""
        try:
            claims = await self._claims(token)
        except jwt.PyJWTError as error:
            why = next(_REASONS[kind] for kind in type(error).__mro__ if kind in _REASONS)
            raise Unauthenticated(why) from None  # PyJWT's text may repeat a part of the token
        subject = claims["sub"]
        if not isinstance(subject, str) or not 0 < len(subject) <= _MAX_SUBJECT or not subject.isprintable():
            raise Unauthenticated(f"the token's subject is not a text of 1 to {_MAX_SUBJECT} printable characters")
        return Identity(SUBJECT_PREFIX + subject, roles=self._roles(claims), quota=self._rules.quota)

    async def _claims(self, token: str) -> Mapping[str, object]:
        if len(token) > _MAX_TOKEN:
            raise jwt.DecodeError
        rules = self._rules
        header = jwt.get_unverified_header(token)
        if header.get("alg") not in rules.algorithms:
            raise jwt.InvalidAlgorithmError
        key: jwt.PyJWK | bytes = rules.verifying_key
        if self._jwks is not None:
            key = await self._jwks.key_for(header.get("kid"))
        claims: Mapping[str, object] = jwt.decode(
            token,
            key,
            algorithms=list(rules.algorithms),
            audience=rules.audience,
            issuer=rules.issuer,
            leeway=rules.leeway_s,
            options={"require": ["exp", "sub", "aud"]},
        )
        return claims

    def _roles(self, claims: Mapping[str, object]) -> frozenset[Role]:
        """The roles in the claim, without unknown ones; the default roles without the claim."""
        claim = claims.get(self._rules.roles_claim)
        if claim is None:
            return self._rules.usual_roles
        names = claim.split() if isinstance(claim, str) else claim if isinstance(claim, list) else []
        return frozenset(role for role in Role if role.value in names)
