"""Which tokens are believed, and what they let their subject do."""

import base64
import contextlib
import json
import time
from pathlib import Path

import jwt
import pytest

from penstock.gateway.auth.tokens import TokenVerifier
from penstock.protocol.errors import Unauthenticated
from penstock.protocol.identity import Role
from tests.auth.signers import SHARED, Signer, claims, shared_token, verifier

# Seconds since 1970, far from any day on which the tests run: a parameter is made long before its test.
YEAR_2001, YEAR_2100 = 978_307_200, 4_102_444_800


@pytest.fixture
def shared(tmp_path: Path) -> TokenVerifier:
    """Believes the shared secret's tokens of one issuer."""
    (tmp_path / "secret").write_text(SHARED)
    return verifier(tmp_path, 'secret_file = "secret"\nissuer = "us"\nroles = ["read"]\nrate = "5/second"\n')


@pytest.fixture(scope="module")
def signer() -> Signer:
    return Signer()


async def test_token_speaks_for_its_subject(shared: TokenVerifier) -> None:
    """Named so that no API key's name can be mistaken for it, with the file's rate."""
    caller = await shared.caller(shared_token(iss="us"))
    assert (caller.key_name, caller.roles) == ("token:alice", {Role.INFER})
    assert caller.quota is not None
    assert caller.quota.rate == 5


@pytest.mark.parametrize(
    ("said", "roles"),
    [
        (["infer", "admin"], {Role.INFER, Role.ADMIN}),
        ("read infer openid", {Role.READ, Role.INFER}),
        (None, {Role.READ}),
        ([], set()),
        (["root", 7], set()),
        (7, set()),
        ({"infer": True}, set()),
    ],
)
async def test_roles_are_what_the_claim_says(shared: TokenVerifier, said: object, roles: set[Role]) -> None:
    """A list or words; what means something elsewhere means nothing here; without the claim, the file's."""
    assert (await shared.caller(shared_token(iss="us", roles=said))).roles == roles


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"exp": YEAR_2001}, "has expired"),
        ({"nbf": YEAR_2100}, "not valid yet"),
        ({"aud": "others"}, "not meant for this gateway"),
        ({"aud": None}, "lacks one of the claims"),
        ({"exp": None}, "lacks one of the claims"),
        ({"sub": None}, "lacks one of the claims"),
        ({"iss": "them"}, "not of the issuer"),
        ({"iss": None}, "lacks one of the claims|not of the issuer"),
        ({"sub": ""}, "subject is not a text"),
        ({"sub": "a\nb"}, "subject is not a text"),
        ({"sub": "a" * 201}, "subject is not a text"),
    ],
)
async def test_token_with_wrong_claims_is_refused_with_the_reason(
    shared: TokenVerifier, changed: dict[str, object], why: str
) -> None:
    """The reason says what to do, and never a word of the token."""
    token = shared_token(**({"iss": "us"} | changed))
    with pytest.raises(Unauthenticated, match=why) as refused:
        await shared.caller(token)
    assert all(piece not in refused.value.message for piece in token.split("."))


async def test_clocks_may_differ_by_the_leeway(shared: TokenVerifier) -> None:
    """A token that expired ten seconds ago by our clock still counts; DESIGN's skew is not an attack."""
    await shared.caller(shared_token(iss="us", exp=time.time() - 10, nbf=time.time() + 10))


def encoded(piece: bytes) -> str:
    return base64.urlsafe_b64encode(piece).rstrip(b"=").decode()


def unsigned(**changed: object) -> str:
    head = base64.urlsafe_b64encode(json.dumps({"alg": "none", "typ": "JWT"}).encode()).rstrip(b"=").decode()
    body = base64.urlsafe_b64encode(json.dumps(claims(**changed)).encode()).rstrip(b"=").decode()
    return f"{head}.{body}."


async def test_forged_tokens_are_refused(shared: TokenVerifier, tmp_path: Path, signer: Signer) -> None:
    """Not signed, signed by another, changed afterwards, not a token, or megabytes of one."""
    good = shared_token(iss="us")
    head, body, signature = good.split(".")
    other_body = shared_token(iss="us", roles=["admin"]).split(".")[1]
    forged = [
        unsigned(iss="us"),
        jwt.encode(claims(iss="us"), "another-secret-0123456789-0123456789", "HS256"),
        signer.token(iss="us"),
        f"{head}.{other_body}.{signature}",
        f"{head}.{body}.",
        "a.b.c",
        "..",
        "é.é.é",
        good + "x" * 100_000,
    ]
    heads = (b"[" * 9000, b'{"alg":' + b"1" * 5000 + b"}", b'{"alg":["HS256"]}', b'{"alg":"HS256","kid":7}', b"7")
    forged += [f"{encoded(piece)}.{body}.{signature}" for piece in heads]
    for token in forged:
        with pytest.raises(Unauthenticated):
            await shared.caller(token)


JSON_VALUES = (
    *(None, True, 0, -1, 1.5, float("inf"), float("nan"), 1e308, 10**4000, "", "x", "é", "\ud800", "9" * 5000),
    *([], ["x"], [[]], [{}], {}, {"a": []}),
)


def signed(header: object, said: object) -> str:
    """A token with a valid signature whose two parts are any JSON."""
    message = f"{encoded(json.dumps(header).encode())}.{encoded(json.dumps(said).encode())}"
    algorithm = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    return f"{message}.{encoded(algorithm.sign(message.encode(), SHARED.encode()))}"


async def test_token_with_any_field_of_any_type_is_taken_or_refused(shared: TokenVerifier) -> None:
    """Any header field or claim of any JSON type gives a client or 401, also with a valid signature."""
    header, said = {"alg": "HS256", "typ": "JWT"}, claims(iss="us")
    assert (await shared.caller(signed(header, said))).key_name == "token:alice"
    names = ("alg", "typ", "kid", "crit", "b64", "jku", "jwk", "x5c", "x5u", "cty", "zip", "enc")
    odd = [(header | {name: value}, said) for name in names for value in JSON_VALUES]
    odd += [(header, said | {n: value}) for n in (*said, "nbf", "iat", "jti") for value in JSON_VALUES]
    odd += [pair for value in JSON_VALUES for pair in ((value, said), (header, value))]
    for pair in odd:
        with contextlib.suppress(Unauthenticated):
            assert (await shared.caller(signed(*pair))).key_name.startswith("token:"), pair


async def test_public_key_is_no_shared_secret(tmp_path: Path, signer: Signer) -> None:
    """A token signed by HS256 with the public key, which anybody has, opens nothing; its own does."""
    (tmp_path / "key.pem").write_bytes(signer.pem)
    public = verifier(tmp_path, 'public_key_file = "key.pem"\n')
    assert (await public.caller(signer.token())).key_name == "token:alice"
    head = base64.urlsafe_b64encode(b'{"alg":"HS256","typ":"JWT"}').rstrip(b"=")
    body = base64.urlsafe_b64encode(json.dumps(claims()).encode()).rstrip(b"=")
    algorithm = jwt.algorithms.HMACAlgorithm(jwt.algorithms.HMACAlgorithm.SHA256)
    signature = base64.urlsafe_b64encode(algorithm.sign(head + b"." + body, signer.pem)).rstrip(b"=")
    with pytest.raises(Unauthenticated, match="algorithm"):
        await public.caller(b".".join((head, body, signature)).decode())
