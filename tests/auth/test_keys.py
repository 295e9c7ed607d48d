"""API keys: created, stored as hashes, found by their secret, and never shown."""

import pytest

from penstock.gateway.auth.api_keys import (
    ApiKey,
    ApiKeyRing,
    InvalidApiKey,
    check_secret,
    digest_of,
    key_of_hashed,
    new_secret,
    read_key_list,
)
from penstock.protocol.identity import Role

INFER = frozenset((Role.INFER,))


def test_key_is_found_by_its_secret_only() -> None:
    """Neither a piece of the secret, nor its hash, nor the name opens anything."""
    secret = new_secret()
    key = ApiKey("camera", digest_of(secret), INFER)
    ring = ApiKeyRing([key, ApiKey("other", digest_of(new_secret()), INFER)])
    assert ring.find(secret) is key
    for wrong in (secret[:-1], secret + "x", secret.upper(), key.digest, "camera", "", "\udcff"):
        assert ring.find(wrong) is None


def test_made_secrets_differ_and_are_taken() -> None:
    """256 random bits each, and strong by the rule for keys that people bring."""
    secrets = {new_secret() for _ in range(100)}
    assert len(secrets) == 100
    assert all(check_secret("name", secret) == digest_of(secret) for secret in secrets)


@pytest.mark.parametrize("secret", ["", "short", "a" * 19, "with space " + "a" * 20, "ü" * 24, "line\n" + "a" * 24])
def test_weak_secret_is_refused_without_being_shown(secret: str) -> None:
    """Too short, or nothing that a header carries."""
    with pytest.raises(InvalidApiKey, match="the secret of the key 'camera' is too weak") as refused:
        check_secret("camera", secret)
    assert not secret or secret not in str(refused.value)


def test_keys_that_are_ambiguous_are_refused() -> None:
    """A name stands once, and a secret too."""
    one, other = digest_of(new_secret()), digest_of(new_secret())
    with pytest.raises(InvalidApiKey, match="'a' is there twice"):
        ApiKeyRing([ApiKey("a", one, INFER), ApiKey("a", other, INFER)])
    with pytest.raises(InvalidApiKey, match="'a' and 'b' have the same secret"):
        ApiKeyRing([ApiKey("a", one, INFER), ApiKey("b", one, INFER)])


def test_list_of_keys_keeps_hashes_only() -> None:
    """What the environment has becomes keys, and its secrets end there; a colon may stand in one."""
    camera, ops = new_secret(), new_secret() + ":x"
    entries = read_key_list(f" camera:infer:{camera},ops:infer+read+admin:{ops}\n")
    assert camera not in str(entries)
    assert ops not in str(entries)
    ring = ApiKeyRing(map(key_of_hashed, entries))
    assert ring.find(camera) == ApiKey("camera", digest_of(camera), INFER)
    found = ring.find(ops)
    assert found is not None
    assert found.roles == frozenset(Role)


@pytest.mark.parametrize(
    "entry", ["{secret}", "{secret}:infer", "a:{secret}:infer", "a::{secret}", "a b:infer:{secret}", "a:root:{secret}"]
)
def test_muddled_list_is_refused_by_number_since_any_part_may_be_the_secret(entry: str) -> None:
    """The sentence says which entry and what one looks like."""
    secret = new_secret()
    text = f"good:infer:{new_secret()} " + entry.format(secret=secret)
    with pytest.raises(InvalidApiKey, match="key number 2 is not NAME:ROLE") as refused:
        read_key_list(text)
    assert secret not in str(refused.value)
    assert refused.value.__cause__ is None
