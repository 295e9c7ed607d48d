"""JSON web tokens: whether one is to be believed, and what its subject may do."""

from collections.abc import Mapping

import jwt

from server.access.jwks import JwksKeys
from server.access.rules import TokenRules
from server.core.caller import Caller, Role
from server.core.errors import Unauthenticated

SUBJECT_PREFIX = "token:"  # no API key's name has a colon
_LONGEST_SUBJECT = 200
_LONGEST_TOKEN = 16 << 10

# What is wrong with a token, said without a word of it; the nearest class counts.
_WHY: Mapping[type[jwt.PyJWTError], str] = {
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
    """Believes tokens by the rules. jwks: where the keys come from an address."""

    def __init__(self, rules: TokenRules, jwks: JwksKeys | None) -> None:
        self._rules = rules
        self._jwks = jwks

    async def caller(self, token: str) -> Caller:
        """Whom the token speaks for. Raises Unauthenticated, and AccessUnavailable where it cannot be checked now."""
        try:
            claims = await self._claims(token)
        except jwt.PyJWTError as error:
            why = next(_WHY[kind] for kind in type(error).__mro__ if kind in _WHY)
            raise Unauthenticated(why) from None  # its text may repeat a piece of the token
        subject = claims["sub"]
        if not isinstance(subject, str) or not 0 < len(subject) <= _LONGEST_SUBJECT or not subject.isprintable():
            raise Unauthenticated(f"the token's subject is not a text of 1 to {_LONGEST_SUBJECT} printable characters")
        return Caller(SUBJECT_PREFIX + subject, roles=self._roles(claims), quota=self._rules.quota)

    async def _claims(self, token: str) -> Mapping[str, object]:
        if len(token) > _LONGEST_TOKEN:
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
        """The claim's, without the words that stand for something elsewhere; the usual ones where it is absent."""
        said = claims.get(self._rules.roles_claim)
        if said is None:
            return self._rules.usual_roles
        words = said.split() if isinstance(said, str) else said if isinstance(said, list) else []
        return frozenset(role for role in Role if role.value in words)
