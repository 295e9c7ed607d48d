"""The door: who stands there, what they may do, and what happens when the file of keys changes."""

import os
from pathlib import Path

import pytest
import structlog

from penstock.gateway.auth.api_keys import ApiKey, digest_of, new_secret
from penstock.gateway.auth.authenticator import Authenticator, AuthOptions
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.protocol.errors import AccessUnavailable, PermissionDenied, QuotaExceeded, Unauthenticated
from penstock.protocol.identity import Quota, Role
from tests.auth.signers import SHARED, shared_token

CAMERA, OPS = new_secret(), new_secret()


def key_text(name: str, secret: str, *roles: str, more: str = "") -> str:
    words = ", ".join(f'"{role}"' for role in roles)
    return f'[keys.{name}]\nsha256 = "{digest_of(secret)}"\nroles = [{words}]\n{more}\n'


def door(options: AuthOptions) -> Authenticator:
    return Authenticator(options, RateLimiter(max_requests=10, max_bytes=1000), clock=lambda: 100.0)


def file_door(folder: Path, text: str, **options: frozenset[Role]) -> tuple[Authenticator, Path]:
    path = folder / "access.toml"
    path.write_text(text)
    return door(AuthOptions(path, **options)), path


def rewrite(path: Path, text: str) -> None:
    """In place of the old one, as an editor or Kubernetes does."""
    new = path.with_suffix(".new")
    new.write_text(text)
    os.replace(new, path)


async def test_key_lets_in_whom_it_names_for_what_its_roles_say(tmp_path: Path) -> None:
    """401 for a stranger, 403 for a known caller without the role; the sentence says what would help."""
    ours, _ = file_door(tmp_path, key_text("camera", CAMERA, "infer") + key_text("ops", OPS, "admin", "read"))
    caller = await ours.admit([CAMERA], Role.INFER)
    assert (caller.key_name, caller.owner, caller.roles) == ("camera", "key camera", {Role.INFER})
    with pytest.raises(PermissionDenied, match=r"'camera' lacks the role admin, which this needs \(it has: infer\)"):
        await ours.admit([CAMERA], Role.ADMIN)
    with pytest.raises(PermissionDenied, match=r"it has: admin, read"):
        await ours.admit([OPS], Role.INFER)
    with pytest.raises(Unauthenticated, match="the API key is unknown; send `Authorization: Bearer"):
        await ours.admit([new_secret()], Role.INFER)
    with pytest.raises(Unauthenticated, match="this needs an API key with the role infer; send"):
        await ours.admit([], Role.INFER)


async def test_another_role_that_does_as_well_lets_in_for_this_once(tmp_path: Path) -> None:
    """And the caller then has the role that was asked for."""
    ours, _ = file_door(tmp_path, key_text("camera", CAMERA, "infer") + key_text("ops", OPS, "admin"))
    assert Role.READ in (await ours.admit([CAMERA], Role.READ, or_role=Role.INFER)).roles
    assert (await ours.admit([CAMERA], Role.INFER)).roles == {Role.INFER}
    with pytest.raises(PermissionDenied, match="'ops' lacks the role read"):
        await ours.admit([OPS], Role.READ, or_role=Role.INFER)


async def test_without_keys_no_client_needs_one() -> None:
    """What was not waived is refused with what the operator can do: a client cannot help it."""
    ours = Authenticator(
        AuthOptions(anonymous=frozenset((Role.INFER,))), RateLimiter(max_requests=8, max_bytes=1 << 20)
    )
    with pytest.raises(PermissionDenied, match=r"the role admin.*no API keys.*--access-file, or admin in --anonymous"):
        await ours.admit([], Role.ADMIN)


async def test_same_key_twice_is_one_and_two_keys_are_none(tmp_path: Path) -> None:
    """The same key in both headers is accepted; two different ones are ambiguous."""
    ours, _ = file_door(tmp_path, key_text("camera", CAMERA, "infer") + key_text("ops", OPS, "admin"))
    await ours.admit([CAMERA, CAMERA], Role.INFER)
    with pytest.raises(Unauthenticated, match="two different keys are sent; send one"):
        await ours.admit([CAMERA, OPS], Role.INFER)


async def test_anonymous_caller_may_what_was_waived_and_a_wrong_key_is_no_anonymous_caller(tmp_path: Path) -> None:
    """A client that sends a key is identified by it."""
    ours, _ = file_door(tmp_path, key_text("ops", OPS, "admin"), anonymous=frozenset((Role.INFER,)))
    caller = await ours.admit([], Role.INFER)
    assert (caller.key_name, caller.roles) == ("", {Role.INFER})
    with pytest.raises(Unauthenticated):
        await ours.admit([], Role.ADMIN)
    with pytest.raises(Unauthenticated):
        await ours.admit([new_secret()], Role.INFER)


async def test_usual_share_is_half_among_many_and_all_for_a_single_key(tmp_path: Path) -> None:
    """Unless the file says another."""
    ours, path = file_door(tmp_path, key_text("camera", CAMERA, "infer"))
    assert (await ours.admit([CAMERA], Role.INFER)).quota == Quota(share=1.0)
    rewrite(path, key_text("camera", CAMERA, "infer") + key_text("ops", OPS, "infer", more='rate = "1/second"'))
    await ours.reload_if_changed()
    assert (await ours.admit([CAMERA], Role.INFER)).quota == Quota(share=0.5)
    assert (await ours.admit([OPS], Role.INFER)).quota == Quota(1, 1.0, 0.5)


async def test_empty_bucket_is_rejected_by_the_authenticator(tmp_path: Path) -> None:
    """Before the body of the request is read."""
    ours, _ = file_door(tmp_path, key_text("camera", CAMERA, "infer", more='rate = "1/minute"'))
    caller = await ours.admit([CAMERA], Role.INFER)
    ours.quotas.take(caller, 100.0)
    with pytest.raises(QuotaExceeded) as refused:
        await ours.admit([CAMERA], Role.INFER)
    assert refused.value.retry_after_s == pytest.approx(60.0)


async def test_changed_file_counts_from_then_on(tmp_path: Path) -> None:
    """A key that is gone opens nothing, a new one does; the log says how many there are, and none of them."""
    ours, path = file_door(tmp_path, key_text("camera", CAMERA, "infer"))
    rewrite(path, key_text("ops", OPS, "infer"))
    with structlog.testing.capture_logs() as logged:
        await ours.reload_if_changed()
        await ours.reload_if_changed()
    assert [(line["event"], line["log_level"], line["keys"]) for line in logged] == [("access file loaded", "info", 1)]
    await ours.admit([OPS], Role.INFER)
    with pytest.raises(Unauthenticated):
        await ours.admit([CAMERA], Role.INFER)


@pytest.mark.parametrize("content", ["[keys", "", key_text("a b", OPS, "infer"), None])
async def test_broken_file_keeps_the_old_keys_and_is_logged_once(tmp_path: Path, content: str | None) -> None:
    """Also where it is gone; when it is mended it counts."""
    ours, path = file_door(tmp_path, key_text("camera", CAMERA, "infer"))
    if content is None:
        path.unlink()
    else:
        rewrite(path, content)
    with structlog.testing.capture_logs() as logged:
        for _ in range(3):
            await ours.reload_if_changed()
    assert [(line["log_level"], line["event"], line["kept"]) for line in logged] == [
        ("error", "access file not reloaded", "the previous keys stay in use")
    ]
    assert ours.failed_reads == 1
    await ours.admit([CAMERA], Role.INFER)
    rewrite(path, key_text("ops", OPS, "infer"))
    await ours.reload_if_changed()
    await ours.admit([OPS], Role.INFER)


async def test_file_without_a_key_from_the_start_lets_others_in_and_then_its_first(tmp_path: Path) -> None:
    """The environment's keys open meanwhile, strangers are refused as such, and nothing failed to be read."""
    file = tmp_path / "access.toml"
    file.write_text("")
    ours = door(AuthOptions(file, (ApiKey("ops", digest_of(OPS), frozenset(Role)),)))
    assert (await ours.admit([OPS], Role.ADMIN)).key_name == "ops"
    with pytest.raises(Unauthenticated):
        await ours.admit(["stranger" * 4], Role.INFER)
    assert ours.failed_reads == 0
    rewrite(file, key_text("camera", CAMERA, "infer"))
    await ours.reload_if_changed()
    assert (await ours.admit([CAMERA], Role.INFER)).key_name == "camera"


async def test_file_broken_from_the_start_admits_no_key(tmp_path: Path) -> None:
    """503 and not 200, nor a 401 that would have people throw good keys away; mended, it counts."""
    ours, path = file_door(tmp_path, "[keys", anonymous=frozenset((Role.READ,)))
    with pytest.raises(AccessUnavailable, match="the keys cannot be read now"):
        await ours.admit([CAMERA], Role.INFER)
    await ours.admit([], Role.READ)
    rewrite(path, key_text("camera", CAMERA, "infer"))
    await ours.reload_if_changed()
    await ours.admit([CAMERA], Role.INFER)


async def test_keys_of_the_environment_stay_whatever_the_file_says(tmp_path: Path) -> None:
    """Both count together, and a name stands in one of them only."""
    path = tmp_path / "access.toml"
    path.write_text(key_text("camera", CAMERA, "infer"))
    ours = door(AuthOptions(path, (ApiKey("ops", digest_of(OPS), frozenset(Role)),)))
    assert ours.key_count == 2
    rewrite(path, key_text("ops", CAMERA, "infer"))
    await ours.reload_if_changed()
    assert ours.failed_reads == 1
    for secret in (CAMERA, OPS):
        await ours.admit([secret], Role.INFER)


async def test_token_stands_beside_keys(tmp_path: Path) -> None:
    """What is no known key and looks like a token is asked as one; requests of all tokens are one row of the metric."""
    (tmp_path / "secret").write_text(SHARED)
    text = key_text("camera", CAMERA, "infer") + '[tokens]\naudience = "penstock"\nsecret_file = "secret"\n'
    ours, _ = file_door(tmp_path, text)
    alice, bob = [await ours.admit([shared_token(sub=name)], Role.INFER) for name in ("alice", "bob")]
    assert (alice.key_name, alice.quota) == ("token:alice", Quota(share=0.5))
    for caller in (alice, bob, await ours.admit([CAMERA], Role.INFER)):
        ours.quotas.enter(caller, 1)
    assert ours.in_flight() == {("tokens",): 2, ("camera",): 1}
    with pytest.raises(PermissionDenied):
        await ours.admit([shared_token()], Role.ADMIN)
