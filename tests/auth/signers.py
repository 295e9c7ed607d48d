"""Tokens for the tests: who signs them, and how."""

import time
from dataclasses import dataclass, field
from pathlib import Path

import jwt
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from penstock.gateway.auth.access_file import read_access_file
from penstock.gateway.auth.tokens import JwksKeys, TokenVerifier

SHARED = "shared-secret-of-the-tests-0123456789"
Claims = dict[str, object]


def claims(**changed: object) -> Claims:
    """What a good token says; None leaves a claim out."""
    usual: Claims = {"sub": "alice", "aud": "penstock", "exp": time.time() + 600, "roles": ["infer"]}
    return {name: value for name, value in (usual | changed).items() if value is not None}


@dataclass
class Signer:
    """An issuer with a key of its own."""

    key_id: str = "one"
    private: rsa.RSAPrivateKey = field(default_factory=lambda: rsa.generate_private_key(65537, 2048))

    def token(self, **changed: object) -> str:
        """A token that only its public key verifies."""
        return jwt.encode(claims(**changed), self.private, "RS256", {"kid": self.key_id})

    @property
    def pem(self) -> bytes:
        """The public key."""
        return self.private.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)

    @property
    def jwk(self) -> dict[str, object]:
        """The same, as it stands in a key set."""
        shown = jwt.algorithms.RSAAlgorithm.to_jwk(self.private.public_key(), as_dict=True)
        return {**shown, "kid": self.key_id, "alg": "RS256", "use": "sig"}


def shared_token(**changed: object) -> str:
    """A token signed with the shared secret."""
    return jwt.encode(claims(**changed), SHARED, "HS256")


def verifier(folder: Path, text: str, jwks: JwksKeys | None = None) -> TokenVerifier:
    """By an access file with these lines under [tokens]."""
    path = folder / "access.toml"
    path.write_text('[tokens]\naudience = "penstock"\n' + text)
    rules = read_access_file(path).tokens
    assert rules is not None
    return TokenVerifier(rules, jwks)
