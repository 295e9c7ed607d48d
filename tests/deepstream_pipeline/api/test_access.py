"""Keys and roles on the control API: those of the gateway's access file."""

import time
from pathlib import Path

import pytest
import typer

from penstock.gateway.auth.api_keys import digest_of
from penstock.protocol.identity import Role
from penstock_video.api.options import ApiOptions
from penstock_video.cli.access import SecurityFlags, security_of
from tests.deepstream_pipeline.api.asking import JSON, ask
from tests.deepstream_pipeline.api.pipeline import FakePipeline, one_key, serving

KEY, OTHER = "a-key-that-is-long", "another-key-that-is-long"
DOOR = {"uri": "rtsp://camera.example/1", "source_id": "door"}
REQUESTS = [
    ("GET", "/v1/streams", None, Role.READ),
    ("GET", "/v1/streams/door/rules", None, Role.READ),
    ("GET", "/v1/streams/door/preview.jpg", None, Role.READ),
    ("GET", "/metrics", None, Role.READ),
    ("GET", "/api/v1/stream/get-stream-info", None, Role.READ),
    ("POST", "/v1/streams", DOOR, Role.ADMIN),
    ("PUT", "/v1/streams/door/rules", {}, Role.ADMIN),
    ("POST", "/v1/streams/door/pause", None, Role.ADMIN),
    ("DELETE", "/v1/streams/door", None, Role.ADMIN),
    ("POST", "/api/v1/stream/remove", {}, Role.ADMIN),
]


def file_of(path: Path, **keys: tuple[str, str]) -> Path:
    """An access file; keys: name, with secret and roles."""
    tables = (
        f"[keys.{name}]\nsha256 = '{digest_of(secret)}'\nroles = {roles}" for name, (secret, roles) in keys.items()
    )
    path.write_text("\n".join(tables))
    return path


@pytest.mark.parametrize("role", list(Role))
def test_request_needs_its_role_and_no_other(role: Role) -> None:
    """GET needs `read`, a change `admin`; the answer names the key and the role that it lacks."""
    with serving(FakePipeline(), ApiOptions(port=0, access=one_key(KEY, role, name="wall"))) as api:
        for method, path, body, needed in REQUESTS:
            answer = ask(api.url, method, path, body, {**JSON, "x-api-key": KEY})
            assert (answer.status == 403) is (role is not needed), (method, path, answer.body)
            if role is not needed:
                assert f"'wall' lacks the role {needed}" in answer.error


def test_anonymous_client_has_the_roles_that_were_given(tmp_path: Path) -> None:
    """Without a key a client may read where --anonymous says so; a change needs a key, and health needs none."""
    file = file_of(tmp_path / "access.toml", ops=(KEY, '["admin"]'))
    access = security_of(SecurityFlags(access_file=file, anonymous="read"), {}).access
    with serving(FakePipeline(), ApiOptions(port=0, access=access)) as api:
        assert ask(api.url, "GET", "/v1/streams").status == 200
        assert ask(api.url, "POST", "/v1/streams", DOOR).status == 401
        assert ask(api.url, "POST", "/v1/streams", DOOR, {**JSON, "x-api-key": KEY}).status == 201
        assert ask(api.url, "GET", "/health/live").status == 200


def test_all_places_of_keys_count_together(tmp_path: Path) -> None:
    """The file's keys, PENSTOCK_API_KEYS and PENSTOCK_VIDEO_API_KEY are all known; the last has all roles."""
    file = file_of(tmp_path / "access.toml", wall=("file-" + KEY, '["read"]'))
    environ = {"PENSTOCK_API_KEYS": f"list:read:list-{KEY}-list", "PENSTOCK_VIDEO_API_KEY": KEY}
    access = security_of(SecurityFlags(access_file=file), environ).access
    with serving(FakePipeline(), ApiOptions(port=0, access=access)) as api:
        for key in (f"file-{KEY}", f"list-{KEY}-list", KEY):
            assert ask(api.url, "GET", "/v1/streams", headers={"x-api-key": key}).status == 200
        assert ask(api.url, "POST", "/v1/streams", DOOR, {**JSON, "x-api-key": KEY}).status == 201
        two = {"x-api-key": KEY, "authorization": f"Bearer file-{KEY}"}
        assert "two different keys" in ask(api.url, "GET", "/v1/streams", headers=two).error


def test_changed_file_counts_for_the_next_request(tmp_path: Path) -> None:
    """A key that is added to the file is known within seconds, and one that is taken out is not."""
    file = file_of(tmp_path / "access.toml", wall=(KEY, '["read"]'))
    with serving(
        FakePipeline(), ApiOptions(port=0, access=security_of(SecurityFlags(access_file=file), {}).access)
    ) as api:
        assert ask(api.url, "GET", "/v1/streams", headers={"x-api-key": KEY}).status == 200
        file_of(file, other=(OTHER, '["read"]'))
        until = time.monotonic() + 20.0
        while ask(api.url, "GET", "/v1/streams", headers={"x-api-key": OTHER}).status != 200:
            assert time.monotonic() < until
        assert ask(api.url, "GET", "/v1/streams", headers={"x-api-key": KEY}).status == 401


@pytest.mark.parametrize(
    ("flags", "environ", "text"),
    [
        ({"access_file": Path("none.toml")}, {}, "none.toml: cannot be read"),
        ({"anonymous": "write"}, {}, "--anonymous 'write'"),
        ({"tls_cert": Path("a.pem")}, {}, "TLS needs both"),
        ({}, {"PENSTOCK_API_KEYS": "a:read:short"}, "PENSTOCK_API_KEYS: key number 1"),
        ({}, {"PENSTOCK_VIDEO_API_KEY": " x"}, "cannot be sent in a header"),
        ({}, {"PENSTOCK_VIDEO_API_KEY": "schl\xfcssel"}, "cannot be sent in a header"),
    ],
)
def test_unusable_value_ends_the_command_with_its_fault(
    flags: dict[str, object], environ: dict[str, str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit code 2 and one sentence, which never has the secret."""
    with pytest.raises(typer.Exit) as ended:
        security_of(SecurityFlags(**flags), environ)  # type: ignore[arg-type]
    assert ended.value.exit_code == 2
    said = capsys.readouterr().err
    assert text in said
    assert "schl" not in said


@pytest.mark.parametrize("anonymous", [None, ",".join(Role)])
def test_without_keys_every_client_has_all_roles(anonymous: str | None) -> None:
    """Nothing is checked then, and an address that others reach is refused at the start."""
    assert security_of(SecurityFlags(anonymous=anonymous), {}).access is None
