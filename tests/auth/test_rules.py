"""The access file: what it may contain, and how mistakes in it are reported."""

from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric import rsa
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

from penstock.gateway.auth.access_file import AccessFileError, read_access_file
from penstock.gateway.auth.api_keys import digest_of
from penstock.protocol.identity import Quota, Role

SECRET = "a-key-of-its-own-0123456789"  # the same in each process of a run: it stands in test names
KEY = f'[keys.camera]\nkey = "{SECRET}"\nroles = ["infer"]\n'
TOKENS = '[tokens]\naudience = "penstock"\n'


def written(folder: Path, text: str) -> Path:
    path = folder / "access.toml"
    path.write_text(text)
    return path


@pytest.fixture(scope="module")
def rsa_key() -> rsa.RSAPrivateKey:
    return rsa.generate_private_key(65537, 2048)


def test_file_of_keys_says_who_may_do_what_and_how_much(tmp_path: Path) -> None:
    """A key by its hash or in the clear, its roles, its rate in words, its share."""
    text = KEY + f'rate = "10 per 5 minutes"\n[keys.ops]\nsha256 = "{digest_of("x" * 20)}"\nroles = ["read", "admin"]\n'
    camera, ops = read_access_file(written(tmp_path, text + "share = 0.25\n")).keys
    assert (camera.name, camera.digest, camera.roles) == ("camera", digest_of(SECRET), {Role.INFER})
    assert camera.quota == Quota(10, 300.0, 0.0)
    assert (ops.digest, ops.roles, ops.quota) == (digest_of("x" * 20), {Role.READ, Role.ADMIN}, Quota(0, 1.0, 0.25))


def test_file_of_tokens_finds_its_secret_beside_it(tmp_path: Path) -> None:
    """Paths are relative to the file; a shared secret goes with HS256 unless said."""
    (tmp_path / "secret").write_text("s" * 40 + "\n")
    rules = read_access_file(written(tmp_path, TOKENS + 'secret_file = "secret"\nroles = ["infer"]\n')).tokens
    assert rules is not None
    assert (rules.verifying_key, rules.algorithms, rules.usual_roles) == (b"s" * 40, ("HS256",), {Role.INFER})


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "it has no keys"),
        ("keys = [", "not valid TOML"),
        (KEY + "rights = 1\n", "unknown field `rights`"),
        ('[keys.camera]\nkey = "short"\nroles = ["infer"]\n', "the secret of the key 'camera' is too weak"),
        ('[keys.camera]\nroles = ["infer"]\n', "'camera' needs one of sha256 and key"),
        (KEY + 'sha256 = "00"\n', "'camera' needs one of sha256 and key"),
        ('[keys.camera]\nsha256 = "00"\nroles = ["infer"]\n', "is not 64 hexadecimal digits"),
        (f'[keys."a b"]\nkey = "{SECRET}"\nroles = ["infer"]\n', "a key is named 'a b'; use 1 to 64 letters"),
        (KEY.replace("infer", "root"), "'camera' has an unknown role"),
        (KEY.replace('"infer"', ""), "'camera' has no role"),
        (KEY + KEY.replace("camera", "other"), "'camera' and 'other' have the same secret"),
        (KEY + 'rate = "often"\n', "rate of the key 'camera' is 'often'; write it as \"100/second\""),
        (KEY + 'rate = "0/second"\n', "allows nothing"),
        (KEY + "share = 0\n", "share of the key 'camera' is 0; it is over 0 and at most 1"),
        (KEY + "share = 1.5\n", "share of the key 'camera' is 1.5"),
        (TOKENS, "exactly one of secret_file, public_key_file and jwks_url"),
        (TOKENS + 'secret_file = "s"\njwks_url = "https://h/"\n', "exactly one of secret_file"),
        (TOKENS + 'secret_file = "short"\n', "secret_file holds 5 bytes; a secret has 32 or more"),
        (TOKENS + 'secret_file = "absent"\n', "absent: cannot be read"),
        (TOKENS + 'public_key_file = "short"\n', "holds no public key as PEM"),
        (TOKENS + 'public_key_file = "private"\n', "holds no public key as PEM"),
        (TOKENS + 'jwks_url = "http://elsewhere/keys"\n', "give an https:// address"),
        (TOKENS + 'jwks_url = "file:///etc/passwd"\n', "give an https:// address"),
        (TOKENS + 'jwks_url = "https://h/"\nalgorithms = ["HS256"]\n', "'HS256', which does not go with jwks_url"),
        (TOKENS + 'jwks_url = "https://h/"\nalgorithms = ["none"]\n', "'none', which does not go with jwks_url"),
        (TOKENS + 'secret_file = "s"\nalgorithms = ["RS256"]\n', "'RS256', which does not go with secret_file"),
        ('[tokens]\njwks_url = "https://h/"\n', "missing required field `audience`"),
    ],
)
def test_mistake_in_the_file_is_reported_in_one_sentence_without_a_secret(
    tmp_path: Path, rsa_key: rsa.RSAPrivateKey, text: str, complaint: str
) -> None:
    """Where it is, what is wrong, what to write instead."""
    (tmp_path / "short").write_text("short")
    (tmp_path / "s").write_text("s" * 40)
    (tmp_path / "private").write_bytes(rsa_key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    with pytest.raises(AccessFileError) as refused:
        read_access_file(written(tmp_path, text))
    assert complaint in str(refused.value)
    assert str(tmp_path) in str(refused.value)
    assert SECRET not in str(refused.value)
    assert "\n" not in str(refused.value)


def test_file_that_is_missing_is_reported_by_its_name(tmp_path: Path) -> None:
    """With the system's reason."""
    with pytest.raises(AccessFileError, match=r"nowhere.toml: cannot be read \(No such file or directory\)"):
        read_access_file(tmp_path / "nowhere.toml")


def test_public_key_is_taken_as_pem(tmp_path: Path, rsa_key: rsa.RSAPrivateKey) -> None:
    """With the algorithms that go with one."""
    public = rsa_key.public_key()
    (tmp_path / "key.pem").write_bytes(public.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))
    rules = read_access_file(written(tmp_path, TOKENS + 'public_key_file = "key.pem"\n')).tokens
    assert rules is not None
    assert rules.algorithms == ("RS256", "ES256")
