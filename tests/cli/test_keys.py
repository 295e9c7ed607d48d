"""`penstock keys new`: a key is shown once, its hash is kept; and commands that show a key to the gateway."""

import os
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from penstock.cli.main import build_app
from penstock.gateway.auth.access_file import read_access_file
from penstock.gateway.auth.authenticator import Authenticator, AuthOptions
from penstock.gateway.auth.rate_limiter import RateLimiter
from penstock.protocol.identity import Quota, Role
from penstock_load.cli.options import command_line, endpoint_or_fail, identified
from tests.cli.conftest import StandIn


def keys(*words: str) -> tuple[int, str, str]:
    answer = CliRunner().invoke(build_app(["keys"]), ["keys", "new", *words])
    return answer.exit_code, answer.stdout, answer.stderr


async def test_made_key_opens_a_door_of_its_file_and_is_kept_nowhere(tmp_path: Path) -> None:
    """Standard output has the key and nothing else; the file has its hash, and is its user's alone."""
    file = tmp_path / "access.toml"
    code, shown, errors = keys("camera", "--file", str(file), "--rate", "5/second", "--share", "0.25")
    assert (code, shown.count("\n")) == (0, 1)
    secret = shown.strip()
    assert secret not in file.read_text() + errors
    assert file.stat().st_mode & 0o777 == 0o600
    door = Authenticator(AuthOptions(file), RateLimiter(max_requests=1, max_bytes=1))
    caller = await door.admit([secret], Role.INFER)
    assert (caller.key_name, caller.roles, caller.quota) == ("camera", {Role.INFER}, Quota(5, 1.0, 0.25))


def test_roles_are_given_with_commas_or_one_by_one(tmp_path: Path) -> None:
    """As --anonymous takes them; what is no role is refused with what is."""
    file = tmp_path / "access.toml"
    assert keys("bob", "--file", str(file), "--role", "infer,read", "--role", "admin")[0] == 0
    assert read_access_file(file).keys[0].roles == set(Role)
    code, shown, errors = keys("eve", "--file", str(file), "--role", "infer,admn")
    assert (code, shown) == (2, "")
    assert "'admn' is not a valid Role); there are infer, read and admin" in errors


def test_second_key_goes_behind_the_first_and_what_stood_there_stays(tmp_path: Path) -> None:
    """Comments too, and the file's mode; a name is taken once."""
    file = tmp_path / "access.toml"
    keys("a.b", "--file", str(file))
    file.write_text("# ours\n" + file.read_text())
    file.chmod(0o640)
    assert keys("ops", "--file", str(file), "--role", "read", "--role", "admin")[0] == 0
    assert file.read_text().startswith("# ours\n")
    assert file.stat().st_mode & 0o777 == 0o640
    assert [(key.name, sorted(key.roles)) for key in read_access_file(file).keys] == [
        ("a.b", ["infer"]),
        ("ops", ["admin", "read"]),
    ]
    before = file.read_bytes()
    code, shown, errors = keys("ops", "--file", str(file))
    assert (code, shown) == (2, "")
    assert f"{file} has a key 'ops'; choose another name" in errors
    assert file.read_bytes() == before
    assert list(tmp_path.iterdir()) == [file]


def test_file_that_a_gateway_of_another_user_reads_stays_that_users(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Mode 644 as made for a container, and owner and group, before it takes the old file's place."""
    file = tmp_path / "access.toml"
    keys("first", "--file", str(file))
    file.chmod(0o644)
    given: list[tuple[bool, int, int]] = []
    stat = file.stat()
    monkeypatch.setattr(
        os, "chown", lambda path, user, group: given.append((Path(path) != file, user, group)), raising=True
    )
    assert keys("second", "--file", str(file))[0] == 0
    assert file.stat().st_mode & 0o777 == 0o644
    assert given == [(True, stat.st_uid, stat.st_gid)]


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_file_of_the_containers_user_stays_that_users_where_root_adds_a_key(tmp_path: Path) -> None:
    """So a gateway of user 10001 can still read a file that only its user may read."""
    file = tmp_path / "access.toml"
    keys("first", "--file", str(file))
    os.chown(file, 10001, 10001)
    assert keys("second", "--file", str(file))[0] == 0
    stat = file.stat()
    assert (stat.st_uid, stat.st_gid, stat.st_mode & 0o777) == (10001, 10001, 0o600)


def test_owner_that_cannot_be_kept_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The key is made all the same; whose the file is now, and what a gateway of another user needs, stands below."""

    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    file = tmp_path / "access.toml"
    keys("first", "--file", str(file))
    monkeypatch.setattr(os, "chown", refuse)
    code, shown, errors = keys("second", "--file", str(file))
    assert (code, shown.count("\n")) == (0, 1)
    assert f"{file} is yours now" in errors
    assert [key.name for key in read_access_file(file).keys] == ["first", "second"]


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        (("a b",), "a key is named 'a b'"),
        (("a", "--rate", "often"), "rate of the key 'a' is 'often'"),
        (("a", "--rate", '1/second"\n[x]'), "rate of the key 'a' is"),
        (("a", "--share", "2"), "share of the key 'a' is 2"),
        (("a", "--role", "root"), "root"),
    ],
)
def test_key_that_cannot_be_is_refused_and_nothing_is_written(
    tmp_path: Path, words: tuple[str, ...], complaint: str
) -> None:
    """Exit code 2, one sentence, no file."""
    code, shown, errors = keys(*words, "--file", str(tmp_path / "access.toml"))
    assert (code, shown) == (2, "")
    assert complaint in errors
    assert list(tmp_path.iterdir()) == []


def test_file_in_the_help_is_one_that_can_be_read(tmp_path: Path) -> None:
    """What a person copies from --help works, but for the ellipsis."""
    shown = CliRunner().invoke(build_app(["keys"]), ["keys", "new", "--help"]).stdout
    lines = [line.strip() for line in shown.splitlines()]
    example = "\n".join(lines[lines.index('[keys."camera"]') :])
    example = example[: example.index("roles_claim")].replace("…", "0" * 64, 1)
    assert set(tomllib.loads(example)) == {"keys", "tokens"}
    file = tmp_path / "access.toml"
    file.write_text(example)
    rules = read_access_file(file)
    assert rules.tokens is not None
    assert rules.keys[0].name == "camera"


def test_commands_show_the_key_that_they_are_given(stand_in: StandIn) -> None:
    """The key comes from the flag or the variable; if it is missing or wrong, the error says how to give one."""
    stand_in.key = "right"
    load = ["models", "load", "m", "--url", stand_in.url]
    runner, app = CliRunner(), build_app(["models"])
    refused = runner.invoke(app, load)
    wrong = runner.invoke(app, [*load, "--api-key", "wrong"])
    by_flag = runner.invoke(app, [*load, "--api-key", "right"])
    by_variable = runner.invoke(app, load, env={"PENSTOCK_API_KEY": "right"})
    assert [answer.exit_code for answer in (refused, wrong, by_flag, by_variable)] == [1, 1, 0, 0]
    advice = "give a valid key with --api-key or PENSTOCK_API_KEY"
    assert f"requires an API key: {advice}" in refused.stderr
    assert f"refused the API key (the API key is unknown): {advice}" in wrong.stderr


def test_report_of_a_load_test_does_not_repeat_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever way it was written."""
    for words in (["--api-key", "pk-secret"], ["--api-key=pk-secret"], ["--header", "x-api-key: pk-secret"]):
        monkeypatch.setattr("sys.argv", ["penstock", "load", "run", "image-steady", *words, "--rate", "5"])
        command = command_line()
        assert "pk-secret" not in command
        assert re.search(r"--rate 5$", command)
        assert len(shlex.split(command)) == 5 + len(words) + 1


def test_load_test_shows_the_key_unless_a_header_says_who_asks() -> None:
    """And it goes to the server under test as a header of every request."""
    assert identified((), "k") == ("x-api-key: k",)
    assert identified(("a: b",), "k") == ("a: b", "x-api-key: k")
    assert identified(("Authorization: Bearer x",), "k") == ("Authorization: Bearer x",)
    assert identified(("a: b",), "") == ("a: b",)
    endpoint = endpoint_or_fail("http://h:1", flag="--target", headers=identified((), "k"))
    assert endpoint.headers == (("x-api-key", "k"),)


def test_first_key_goes_into_a_file_that_has_none(tmp_path: Path) -> None:
    """As a gateway may have been started with."""
    file = tmp_path / "access.toml"
    file.write_text("# ours\n")
    assert keys("first", "--file", str(file))[0] == 0
    assert file.read_text().startswith("# ours\n")
    assert [key.name for key in read_access_file(file).keys] == ["first"]
