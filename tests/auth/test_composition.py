"""Who needs a key, by the settings: the one place where that is decided, and what the start refuses."""

from pathlib import Path

import pytest
from structlog.testing import capture_logs

from penstock.gateway.auth.api_keys import new_secret
from penstock.gateway.composition import compose_authenticator
from penstock.gateway.settings import Settings
from penstock.gateway.settings_sources import SettingsError, read_settings
from penstock.gateway.stack.startup import CannotStart, check_access
from penstock.protocol.identity import Role

SECRET = new_secret()
KEYS = {"PENSTOCK_API_KEYS": f"ops:admin:{SECRET}"}
OPEN, CLOSED = frozenset(Role), frozenset[Role]()


def settings(environ: dict[str, str], **flags: object) -> Settings:
    return read_settings(flags, environ=environ)


@pytest.mark.parametrize(
    ("environ", "flags", "roles"),
    [
        ({}, {}, None),
        ({}, {"anonymous": ("infer", "read", "admin")}, None),
        ({}, {"anonymous": ("infer", "read")}, {Role.INFER, Role.READ}),
        ({}, {"anonymous": ("none",)}, CLOSED),
        (KEYS, {}, CLOSED),
        (KEYS, {"anonymous": ("read",)}, {Role.READ}),
        (KEYS, {"anonymous": ("infer", "read", "admin")}, OPEN),
        ({"PENSTOCK_ANONYMOUS": "infer"}, {}, {Role.INFER}),
        ({"PENSTOCK_ANONYMOUS": ""}, {}, CLOSED),
        ({"PENSTOCK_API_KEYS": ""}, {}, None),
    ],
)
def test_authenticator_exists_if_a_client_lacks_a_role(
    environ: dict[str, str], flags: dict[str, object], roles: frozenset[Role] | None
) -> None:
    """None if anonymous clients have all roles; with keys, only the anonymous roles stay open."""
    door = compose_authenticator(settings(environ, **flags))
    assert (door and door.open_to) == roles


@pytest.mark.parametrize(
    ("host", "environ", "anonymous", "starts"),
    [
        ("127.0.0.1", {}, None, True),
        ("127.0.0.53", {}, None, True),
        ("::1", {}, None, True),
        ("localhost", {}, None, True),
        ("0.0.0.0", {}, None, False),
        ("::", {}, None, False),
        ("10.1.2.3", {}, None, False),
        ("gateway.example", {}, None, False),
        ("", {}, None, False),
        ("0.0.0.0", KEYS, None, True),
        ("0.0.0.0", {}, ("infer", "read"), True),
        ("0.0.0.0", KEYS, ("none",), True),
    ],
)
def test_start_beyond_loopback_needs_keys_or_a_word_on_who_may(
    host: str, environ: dict[str, str], anonymous: tuple[str, ...] | None, *, starts: bool
) -> None:
    """Anonymous remote clients have all roles only if that was configured."""
    chosen = settings(environ, host=host, anonymous=anonymous)
    if starts:
        check_access(chosen)
        return
    with pytest.raises(CannotStart, match="there are no API keys: make one with `penstock keys new NAME --file"):
        check_access(chosen)


@pytest.mark.parametrize("environ", [{}, {"PENSTOCK_API_KEYS": ""}, {"PENSTOCK_API_KEY": SECRET}])
@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0"])
def test_start_without_any_permitted_client_is_refused(host: str, environ: dict[str, str]) -> None:
    """No role without a key, and no keys: the sentence names the variable that is one letter from the clients'."""
    with pytest.raises(
        CannotStart, match=r"no client may do anything: .*set PENSTOCK_API_KEYS to NAME:ROLE\+ROLE:SECRET"
    ):
        check_access(settings(environ | {"PENSTOCK_ANONYMOUS": "none"}, host=host))


def test_start_with_an_empty_access_file_warns_since_keys_may_come_later(tmp_path: Path) -> None:
    """It admits no client; a file that is no access file is refused."""
    file = tmp_path / "access.toml"
    file.write_text("# none yet\n")
    with capture_logs() as logs:
        check_access(settings({}, access_file=file, anonymous=("none",), host="0.0.0.0"))
    assert [(entry["log_level"], "it has no keys" in entry["event"]) for entry in logs] == [("warning", True)]
    file.write_text("[keys")
    with pytest.raises(CannotStart, match="not valid TOML"):
        check_access(settings({}, access_file=file))


def test_key_of_the_environment_may_not_stand_in_the_file_too(tmp_path: Path) -> None:
    """By name or by secret: said before anything starts."""
    file = tmp_path / "access.toml"
    file.write_text(f'[keys.other]\nkey = "{SECRET}"\nroles = ["infer"]\n')
    with pytest.raises(CannotStart, match="'ops' and 'other' have the same secret") as refused:
        check_access(settings(KEYS, access_file=file))
    assert SECRET not in str(refused.value)


def test_keys_are_in_the_settings_as_hashes_and_not_in_the_settings_file(tmp_path: Path) -> None:
    """What the gateway's process is handed opens nothing; a TOML of settings with keys is refused, unread."""
    assert SECRET not in settings(KEYS).model_dump_json() + repr(settings(KEYS))
    file = tmp_path / "penstock.toml"
    file.write_text(f'grace_s = 1.0\napi_keys = ["ops:admin:{SECRET}"]\n')
    with pytest.raises(SettingsError, match=f"{file}:2: put API keys into a separate file, and set access_file to it"):
        read_settings({}, environ={}, file=file)
