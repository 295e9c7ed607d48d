"""The audit log: one JSON line for each refused authentication over both protocols, without secrets."""

import json
import re
import stat
import threading
from collections.abc import Iterator
from contextlib import closing
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import grpc
import pytest
import structlog
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from penstock.gateway.audit import MAX_TEXT, AuditLog, AuditLogError, format_line
from penstock.protocol.identity import Role
from tests.auth.listeners import KEYS, STRANGER, door
from tests.grpc.harness import SERVICE, infer_message, serving
from tests.rest.harness import VALID_INFER, Front

INFER = "/v2/models/ident/infer"
NOW = datetime(2026, 11, 27, 7, 0, 0, 123456, UTC)


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "audit.jsonl"


@pytest.fixture
def log(file: Path) -> Iterator[AuditLog]:
    with closing(AuditLog(file)) as opened:
        yield opened


def lines_of(file: Path) -> list[dict[str, Any]]:
    """All lines, parsed."""
    text = file.read_text()
    assert not text or text.endswith("\n")
    return [json.loads(line) for line in text.split("\n")[:-1]]


def test_line_has_time_client_address_action_target_and_outcome() -> None:
    """The fields are in this order; the time is in UTC, and unknown values are null."""
    assert format_line("ops", "10.0.0.7", "load", "street", "ok", now=NOW) == (
        '{"time": "2026-11-27T07:00:00.123Z", "client": "ops", "address": "10.0.0.7", "action": "load", '
        '"target": "street", "outcome": "ok"}'
    )
    anonymous = json.loads(format_line("", "", "load", "street", "ok", now=NOW))
    assert (anonymous["client"], anonymous["address"]) == (None, None)


@given(st.tuples(*[st.text(st.characters(), max_size=2 * MAX_TEXT)] * 5))
def test_field_of_any_text_gives_one_bounded_line(fields: tuple[str, ...]) -> None:
    """Line ends of every kind and quotes are escaped, so that a client cannot forge a line."""
    line = format_line(*fields, now=NOW)
    assert line.splitlines() == [line]
    assert line.isascii()
    assert len(line) < 20 * 1024
    target = json.loads(line)["target"]
    assert target == fields[3] or (len(target) == MAX_TEXT and target.endswith("…"))


def test_file_is_created_for_its_user_alone_and_appended_to(file: Path, log: AuditLog) -> None:
    """A new file has mode 0600; an existing file's lines and mode are not changed."""
    log.record("a", "", "load", "m", "ok")
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.chmod(0o640)
    with closing(AuditLog(file)) as later:
        later.record("b", "", "load", "m", "ok")
    assert [line["client"] for line in lines_of(file)] == ["a", "b"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o640


def test_file_that_was_renamed_or_deleted_is_created_again(file: Path, log: AuditLog) -> None:
    """After a rotation as by logrotate no line is lost, new lines go to the new file, and it has mode 0600."""
    old = file.with_suffix(".1")
    log.record("a", "", "load", "m", "ok")
    file.rename(old)
    log.record("b", "", "load", "m", "ok")
    assert [line["client"] for line in lines_of(old)] == ["a"]
    assert [line["client"] for line in lines_of(file)] == ["b"]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    file.unlink()
    log.record("c", "", "load", "m", "ok")
    assert [line["client"] for line in lines_of(file)] == ["c"]


def test_several_writers_write_whole_lines(file: Path) -> None:
    """Four writers, like worker processes, write 400 long lines; none is broken or lost."""

    def write(name: str) -> None:
        with closing(AuditLog(file)) as log:
            for _ in range(100):
                log.record(name, "10.0.0.7", "access", "POST /" + "é\n" * MAX_TEXT, "unauthenticated")

    threads = [threading.Thread(target=write, args=(str(number),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(line["client"] for line in lines_of(file)) == sorted("0123" * 100)


def test_line_that_cannot_be_written_goes_to_the_log_and_fails_no_request(tmp_path: Path) -> None:
    """If the file's folder was deleted, the request is served and the line is in the program's log."""
    folder = tmp_path / "logs"
    folder.mkdir()
    with closing(AuditLog(folder / "audit.jsonl")) as log, structlog.testing.capture_logs() as logged:
        (folder / "audit.jsonl").unlink()
        folder.rmdir()
        log.record("ops", "", "load", "street", "ok")
    assert [json.loads(entry["line"])["target"] for entry in logged] == ["street"]


def test_file_that_cannot_be_opened_is_refused_with_the_fix(tmp_path: Path) -> None:
    """The start fails with one sentence."""
    with pytest.raises(AuditLogError, match=re.escape("cannot be opened (No such file or directory); name a file")):
        AuditLog(tmp_path / "nowhere" / "audit.jsonl")


HTTP_REFUSALS = [
    ((), None, "unauthenticated"),
    (((b"x-api-key", STRANGER.encode()),), None, "unauthenticated"),
    (((b"authorization", b"Basic cGstc2VjcmV0"),), None, "unauthenticated"),
    (((b"x-api-key", KEYS[Role.READ].encode()),), "read", "permission_denied"),
]


@pytest.mark.parametrize(("headers", "client", "outcome"), HTTP_REFUSALS)
async def test_refused_http_request_gives_one_line(
    file: Path, log: AuditLog, headers: tuple[tuple[bytes, bytes], ...], client: str | None, outcome: str
) -> None:
    """The line has the client, its address and the path without the query."""
    front = Front(door=door(audit=log))
    await front.ask("POST", f"{INFER}?token=pk-secret", VALID_INFER, headers)
    (line,) = lines_of(file)
    assert line.pop("time").endswith("Z")
    target = {"action": "access", "target": f"POST {INFER}", "outcome": outcome}
    assert line == {"client": client, "address": "127.0.0.1", **target}


@pytest.mark.parametrize(("headers", "client", "outcome"), HTTP_REFUSALS)
async def test_refused_grpc_call_gives_the_same_line(
    file: Path, log: AuditLog, headers: tuple[tuple[bytes, bytes], ...], client: str | None, outcome: str
) -> None:
    """The line has the gRPC method in place of the path."""
    metadata = tuple((name.decode(), value.decode()) for name, value in headers)
    async with serving(door=door(audit=log)) as front:
        with pytest.raises(grpc.aio.AioRpcError):
            await front.call("ModelInfer", infer_message(), metadata=metadata)
    (line,) = lines_of(file)
    assert line.pop("time").endswith("Z")
    target = {"action": "access", "target": f"{SERVICE}ModelInfer", "outcome": outcome}
    assert line == {"client": client, "address": "127.0.0.1", **target}


async def test_request_that_is_let_in_and_no_admin_action_gives_no_line(file: Path, log: AuditLog) -> None:
    """Inference, reads, health checks and other refusals write no line, over both protocols."""
    front = Front(door=door(audit=log))
    await front.ask("POST", INFER, VALID_INFER, ((b"x-api-key", KEYS[Role.INFER].encode()),))
    await front.ask("GET", "/v2/models/ident", b"", ((b"x-api-key", KEYS[Role.READ].encode()),))
    await front.ask("GET", "/v2/health/ready")
    await front.ask("GET", "/v3")
    async with serving(door=door(audit=log)) as running:
        await running.call("ModelInfer", infer_message(), metadata=(("x-api-key", KEYS[Role.INFER]),))
        await running.call("ServerLive")
    assert lines_of(file) == []


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=60)
@given(
    secret=st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=12, max_size=64),
    header=st.sampled_from([b"x-api-key", b"authorization", b"cookie", b"x-other", b"proxy-authorization"]),
    value=st.sampled_from(["SECRET", "Bearer SECRET", "Basic SECRET", "bearer  SECRET\r\n", "SECRET\n{}"]),
)
async def test_no_part_of_a_header_or_query_is_in_the_log(
    file: Path, log: AuditLog, secret: str, header: bytes, value: str
) -> None:
    """A refused client's key, in any header or in the query, gives one line that does not contain it."""
    earlier = len(lines_of(file))
    front, query = Front(door=door(audit=log)), "".join(f"%{ord(character):02x}" for character in secret)
    headers = ((header, value.replace("SECRET", secret).encode()),)
    reply = await front.ask("POST", f"{INFER}?key={query}", VALID_INFER, headers)
    assert reply.status == 401
    (line,) = lines_of(file)[earlier:]
    assert secret not in " ".join(filter(None, line.values()))
