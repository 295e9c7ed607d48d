"""Keys from a URL: cached, changed, and what happens while the URL does not answer."""

import asyncio
import base64
import contextlib
import itertools
import json
import re
import socket
from collections.abc import Callable
from functools import partial
from http.server import BaseHTTPRequestHandler
from ipaddress import ip_address
from pathlib import Path

import jwt
import pytest
import structlog
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from penstock.gateway.auth.tokens import (
    FETCH_RETRY_S,
    FRESH_S,
    MAX_BYTES,
    USABLE_S,
    JwksKeys,
    TokenVerifier,
    fetch_json,
    keys_of,
)
from penstock.gateway.composition import compose_authenticator
from penstock.gateway.settings_sources import read_settings
from penstock.outbound import OutboundPolicy
from penstock.protocol.errors import AccessUnavailable, Unauthenticated
from penstock.protocol.identity import Role
from tests.auth.signers import SHARED, Signer, claims, verifier
from tests.support.web_server import serving

URL = "https://issuer.example/keys"


class Provider:
    """An issuer's address, by hand: what it answers, how often it was asked, what time it is."""

    def __init__(self, *signers: Signer) -> None:
        self.signers = list(signers)
        self.is_down = False
        self.asked = 0
        self.now = 1000.0
        self.gate = asyncio.Event()
        self.gate.set()
        self.keys = JwksKeys(URL, fetch=self.fetch, clock=lambda: self.now)

    async def fetch(self, url: str) -> bytes:
        assert url == URL
        self.asked += 1
        await self.gate.wait()
        if self.is_down:
            raise OSError("it cannot be asked")
        return json.dumps({"keys": [signer.jwk for signer in self.signers]}).encode()

    async def settled(self) -> None:
        """Once a fetch that runs beside the requests has ended."""
        for _ in range(3):
            await asyncio.sleep(0)


@pytest.fixture(scope="module")
def signers() -> tuple[Signer, Signer]:
    return Signer("one"), Signer("two")


async def test_tokens_are_checked_with_the_keys_of_the_address(tmp_path: Path, signers: tuple[Signer, Signer]) -> None:
    """Fetched once for any number of tokens, by the key that each names; another issuer's are refused."""
    one, two = signers
    provider = Provider(one, two)
    tokens = verifier(tmp_path, f'jwks_url = "{URL}"\n', provider.keys)
    for _ in range(3):
        assert (await tokens.caller(one.token())).key_name == "token:alice"
        assert (await tokens.caller(two.token(sub="bob"))).key_name == "token:bob"
    with pytest.raises(Unauthenticated, match="signature is wrong"):
        await tokens.caller(Signer("one").token())
    assert provider.asked == 1


async def test_many_tokens_at_once_ask_once(signers: tuple[Signer, Signer]) -> None:
    """They wait for the same answer."""
    provider = Provider(*signers)
    provider.gate.clear()
    waiting = [asyncio.create_task(provider.keys.key_for("one")) for _ in range(50)]
    await provider.settled()
    provider.gate.set()
    assert len(set(map(id, await asyncio.gather(*waiting)))) == 1
    assert provider.asked == 1


async def test_one_waiting_request_that_leaves_takes_no_other_with_it(signers: tuple[Signer, Signer]) -> None:
    """Its cancel ends its own wait, and not the fetch."""
    provider = Provider(*signers)
    provider.gate.clear()
    leaves, stays = (asyncio.create_task(provider.keys.key_for("one")) for _ in range(2))
    await provider.settled()
    leaves.cancel()
    await provider.settled()
    provider.gate.set()
    assert (await stays).key_id == "one"
    assert leaves.cancelled()


async def test_address_down_keys_serve_until_they_expire_and_then_no_token_is_accepted(
    signers: tuple[Signer, Signer],
) -> None:
    """Cached keys serve for an hour, with a warning; afterwards 503, and 200 again when the address is back."""
    provider = Provider(*signers)
    await provider.keys.key_for("one")
    provider.is_down = True
    with structlog.testing.capture_logs() as logged:
        for age_s in (FRESH_S + 1, USABLE_S / 2, USABLE_S):
            provider.now = 1000.0 + age_s
            assert (await provider.keys.key_for("one")).key_id == "one"
            await provider.settled()
    assert {line["event"] for line in logged} == {"the keys of tokens cannot be had"}
    assert [line["usable_s"] for line in logged] == [USABLE_S - FRESH_S - 1, USABLE_S / 2, 0]
    provider.now = 1000.0 + USABLE_S + FETCH_RETRY_S
    with pytest.raises(AccessUnavailable, match="cannot be had now; retry later"):
        await provider.keys.key_for("one")
    provider.is_down, provider.now = False, provider.now + FETCH_RETRY_S
    assert (await provider.keys.key_for("one")).key_id == "one"


async def test_address_down_from_the_start_is_unavailable_and_not_asked_by_every_request(
    signers: tuple[Signer, Signer],
) -> None:
    """503 for each, one try every ten seconds."""
    provider = Provider(*signers)
    provider.is_down = True
    for _ in range(20):
        with pytest.raises(AccessUnavailable):
            await provider.keys.key_for("one")
    assert provider.asked == 1
    provider.now += FETCH_RETRY_S
    with pytest.raises(AccessUnavailable):
        await provider.keys.key_for("one")
    assert provider.asked == 2


async def test_new_key_of_the_issuer_is_found_and_an_old_one_forgotten(signers: tuple[Signer, Signer]) -> None:
    """A token of an unknown key has the keys fetched again, though not by every such token."""
    one, two = signers
    provider = Provider(one)
    await provider.keys.key_for("one")
    provider.signers, provider.now = [two], provider.now + FETCH_RETRY_S
    assert (await provider.keys.key_for("two")).key_id == "two"
    for _ in range(20):
        with pytest.raises(Unauthenticated, match="a key that its issuer does not list"):
            await provider.keys.key_for("one")
    assert provider.asked == 2


async def test_keys_are_asked_for_again_beside_the_requests(signers: tuple[Signer, Signer]) -> None:
    """A token whose key is known does not wait for it."""
    provider = Provider(*signers)
    await provider.keys.key_for("one")
    provider.now += FRESH_S + 1
    provider.gate.clear()
    assert (await provider.keys.key_for("one")).key_id == "one"
    await provider.settled()
    assert provider.asked == 2
    await provider.keys.aclose()


async def test_token_without_a_key_id_goes_with_the_only_key(signers: tuple[Signer, Signer]) -> None:
    """With two it could be either, and is refused."""
    assert (await Provider(signers[0]).keys.key_for(None)).key_id == "one"
    with pytest.raises(Unauthenticated):
        await Provider(*signers).keys.key_for(None)


@pytest.mark.parametrize("document", [b"", b"[]", b"7", b'{"keys":7}', b'{"keys":[]}', b'{"keys":[7,{"kty":"odd"}]}'])
def test_document_that_is_no_key_set_is_reported(document: bytes) -> None:
    """ValueError, whatever came."""
    with pytest.raises(ValueError, match=r"."):
        keys_of(document)


def test_keys_of_unknown_kinds_are_left_out(signers: tuple[Signer, Signer]) -> None:
    """An issuer may have some that we cannot use."""
    document = {"keys": [{"kty": "quantum", "kid": "q"}, signers[0].jwk]}
    assert list(keys_of(json.dumps(document).encode())) == ["one"]


JSON_VALUES = (
    *(None, True, 0, 1.5, float("inf"), 10**4000, "", "é", "\ud800", "AQ", "A" * 1000),
    *(["RS256"], [[]], {"a": 1}, "ES384", "HS256", "none", "EC", "P-384"),
)
MEMBERS = (
    *("kty", "use", "alg", "kid", "key_ops", "x5c", "x5t", "x5u", "crv"),
    *("x", "y", "n", "e", "d", "p", "q", "dp", "dq", "qi", "oth", "k"),
)


def jwks_of_each_kind(signer: Signer) -> dict[str, dict[str, object]]:
    """Keys by algorithm; the last one is a private key, which an issuer should not publish."""
    curve = jwt.algorithms.ECAlgorithm.to_jwk(ec.generate_private_key(ec.SECP256R1()).public_key(), as_dict=True)
    edwards = jwt.algorithms.OKPAlgorithm.to_jwk(ed25519.Ed25519PrivateKey.generate().public_key(), as_dict=True)
    private = jwt.algorithms.RSAAlgorithm.to_jwk(signer.private, as_dict=True)
    return {
        "RS256": signer.jwk,
        "ES256": curve,
        "EdDSA": edwards,
        "HS256": {"kty": "oct", "k": "AAAA"},
        "PS256": private,
    }


@pytest.mark.parametrize("algorithm", ["RS256", "ES256", "EdDSA", "HS256", "PS256"])
async def test_key_with_any_member_of_any_type_costs_the_other_keys_nothing(
    tmp_path: Path, signers: tuple[Signer, Signer], algorithm: str
) -> None:
    """With any member of any JSON type, the other key's tokens are accepted and the bad key's get 401, not an error."""
    good, odd = signers
    base = jwks_of_each_kind(odd)[algorithm] | {"kid": "odd", "alg": algorithm}
    text = f'jwks_url = "{URL}"\nalgorithms = ["RS256", "PS256", "ES256", "ES384", "EdDSA"]\n'
    rules = verifier(tmp_path, text)._rules
    tokens = [jwt.encode(claims(), odd.private, name, {"kid": "odd"}) for name in ("RS256", "PS256")]
    tokens.append(re.sub(r"^[^.]*", base64.urlsafe_b64encode(b'{"alg":"ES256","kid":"odd"}').decode(), tokens[0]))
    good_token = good.token()
    for member, value in itertools.product(MEMBERS, JSON_VALUES):
        document = json.dumps({"keys": [base | {member: value}, value, good.jwk]}).encode()
        verifying = TokenVerifier(rules, JwksKeys(URL, fetch=partial(_answer, document)))
        assert (await verifying.caller(good_token)).key_name == "token:alice", (member, value)
        for token in tokens:
            with contextlib.suppress(Unauthenticated):
                await verifying.caller(token)


async def _answer(document: bytes, _: str) -> bytes:
    return document


@pytest.mark.parametrize("kind", ["secret", "private", "short"])
def test_key_that_is_not_a_long_public_one_is_skipped(signers: tuple[Signer, Signer], kind: str) -> None:
    """A shared secret, a private key and an RSA key below 2048 bits verify no token."""
    short = Signer("two", rsa.generate_private_key(65537, 1024))
    jwk = {
        "secret": {"kty": "oct", "k": "AAAA", "kid": "two"},
        "private": jwt.algorithms.RSAAlgorithm.to_jwk(signers[1].private, as_dict=True) | {"kid": "two"},
        "short": short.jwk,
    }[kind]
    assert list(keys_of(json.dumps({"keys": [jwk, signers[0].jwk]}).encode())) == ["one"]


def test_key_that_is_skipped_is_logged_with_the_reason(signers: tuple[Signer, Signer]) -> None:
    """One line is logged for a key set, however many of its keys are invalid."""
    document = {"keys": [signers[0].jwk, *[signers[1].jwk | {"alg": ["RS256"]}] * 50]}
    with structlog.testing.capture_logs() as logged:
        assert list(keys_of(json.dumps(document).encode())) == ["one"]
    assert [(line["log_level"], line["skipped"], line["first"]) for line in logged] == [
        ("warning", 50, "key 2: alg is not a string")
    ]


def answering(status: int, body: bytes, **headers: str) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            for name, value in headers.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            try:
                self.wfile.write(body)
            except ConnectionError:
                return

        def log_message(self, *_: object) -> None: ...

    return Handler


@pytest.mark.parametrize(
    ("handler", "complaint"),
    [
        (lambda: answering(500, b"no"), "it answered 500"),
        (lambda: answering(302, b"", Location="http://127.0.0.1:1/"), "it answered 302"),
        (lambda: answering(200, bytes(MAX_BYTES + 1)), f"more than {MAX_BYTES} bytes"),
    ],
)
async def test_address_that_answers_something_else_is_reported(
    handler: Callable[[], type[BaseHTTPRequestHandler]], complaint: str
) -> None:
    """OSError with the reason; a redirect is not followed, and a long answer not read to its end."""
    with serving(handler()) as url, pytest.raises(OSError, match=complaint):
        await fetch_json(url, OutboundPolicy())


def loopback_is_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    """127.0.0.1 acts as the metadata service; issuer.example resolves to it."""
    look_up = socket.getaddrinfo

    def fake(host: str, *more: object, **named: object) -> object:
        return look_up("127.0.0.1" if host == "issuer.example" else host, *more, **named)  # type: ignore[arg-type]

    monkeypatch.setattr("penstock.outbound.METADATA", {ip_address("127.0.0.1")})
    monkeypatch.setattr("socket.getaddrinfo", fake)


@pytest.mark.parametrize("host", ["127.0.0.1", "issuer.example"])
async def test_metadata_service_is_not_asked_for_keys_unless_it_is_allowed(
    host: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused by address and by a name that resolves to it; the error says what to do."""
    loopback_is_metadata(monkeypatch)
    asked: list[str] = []

    class Service(answering(200, b"{}")):  # type: ignore[misc]
        def do_GET(self) -> None:
            asked.append(self.path)
            super().do_GET()

    with serving(Service) as base:
        url = base.replace("127.0.0.1", host) + "/keys"
        with pytest.raises(OSError, match=r"metadata service; to allow .*--allow-outbound 127\.0\.0\.1") as refused:
            await fetch_json(url, OutboundPolicy((host,) if host == "issuer.example" else ()))
        assert str(refused.value).startswith(host)
        assert asked == []
        assert await fetch_json(url, OutboundPolicy(("127.0.0.1",))) == b"{}"


@pytest.mark.parametrize(("allowed", "error"), [((), AccessUnavailable), (("127.0.0.1",), Unauthenticated)])
async def test_gateway_asks_a_metadata_service_for_keys_only_where_it_is_allowed(
    allowed: tuple[str, ...],
    error: type[Exception],
    tmp_path: Path,
    signers: tuple[Signer, Signer],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With complete settings: 503 without the key set; with it, 401 for a key that is not in it."""
    loopback_is_metadata(monkeypatch)
    file = tmp_path / "access.toml"
    with serving(answering(200, json.dumps({"keys": [signers[1].jwk]}).encode())) as url:
        file.write_text(f'[tokens]\naudience = "penstock"\njwks_url = "{url}/keys"\n')
        door = compose_authenticator(read_settings({"access_file": file, "allow_outbound": allowed}, environ={}))
        assert door is not None
        with pytest.raises(error):
            await door.admit([signers[0].token()], Role.INFER)
        await door.aclose()


async def test_shared_secret_in_a_key_set_signs_nothing(tmp_path: Path, signers: tuple[Signer, Signer]) -> None:
    """Even where the set lists it: the algorithms of secrets do not go with an address."""
    provider = Provider(*signers)
    tokens = verifier(tmp_path, f'jwks_url = "{URL}"\n', provider.keys)
    with pytest.raises(Unauthenticated, match="algorithm"):
        await tokens.caller(jwt.encode(claims(), SHARED, "HS256", {"kid": "one"}))
