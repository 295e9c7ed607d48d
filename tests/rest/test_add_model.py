"""A model's file as a request: how it is received, and what is left of it."""

import asyncio
import errno
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from penstock.cli.model_flags import ModelFlags
from penstock.gateway.in_flight import InFlightLimiter, InFlightLimits
from penstock.gateway.model_command import ModelProcessLimits, ModelProcessOptions
from penstock.gateway.model_uploads import MAX_UPLOADS, ModelUploads
from penstock.gateway.rest import add_model, request
from penstock.gateway.rest.app import create_app
from penstock.gateway.rest.limits import RestOptions
from penstock.gateway.rest.routes import ForwardedIdentity
from penstock.gateway.rest.streaming import CoreRoute
from penstock.gateway.workers.core_relay import HTTP_SOCKET, CoreRelay
from penstock.models.add import CannotAdd, check_name
from penstock.protocol.errors import InvalidRequest
from tests.auth.listeners import KEYS, door
from tests.rest.harness import Client, Front, Reply, described_by, request_bytes
from tests.rest.test_body import memory_within
from tests.support.add_stub import STUB

ADD = "/v2/repository/models/{}/add"
FILE = b"the bytes of a model" * 10
LIMITS = RestOptions(max_model_bytes=1 << 20)


def adding_front(
    tmp_path: Path, limits: RestOptions = LIMITS, add_limits: ModelProcessLimits | None = None, **given: Any
) -> Front:
    """Adds models to tmp_path, with the stand-in for the command."""
    uploads = ModelUploads(tmp_path, (tmp_path / "shipped", tmp_path / "models"))
    options = ModelProcessOptions(command=STUB, limits=add_limits or ModelProcessLimits())
    return Front(limits=limits, uploads=uploads, add_options=options, **given)


def left_in(home: Path) -> list[str]:
    """What lies in the staging folder."""
    return sorted(path.name for path in (home / "staging").iterdir()) if (home / "staging").exists() else []


def is_empty(home: Path) -> bool:
    return not list(home.iterdir())


def text_of(reply: Reply) -> str:
    return str(json.loads(reply.body)["error"])


async def until(condition: Callable[[], bool]) -> None:
    """Waits for what another task or process does."""
    async with asyncio.timeout(20):
        while not condition():
            await asyncio.sleep(0.01)


async def test_file_becomes_a_model_and_is_loaded(tmp_path: Path) -> None:
    """The command gets the body's bytes, alone in their folder; the answer is its report, with the engine's state."""
    front = adding_front(tmp_path)
    reply = await front.ask("POST", ADD.format("ppe"), FILE)
    assert (reply.status, json.loads(reply.body)) == (
        200,
        {
            "name": "ppe",
            "layout": "yolox",
            "max_batch_size": 8,
            "batches": "proven",
            "evidence": ["2 labels, by labels"],
            "warnings": ["the file is odd"],
            "state": "READY",
            "placement_reason": "",
        },
    )
    folder = tmp_path / "models" / "ppe"
    assert (folder / "model.onnx").read_bytes() == FILE
    assert json.loads((folder / "beside.json").read_text()) == ["ppe.onnx"]
    assert (front.plane.added, left_in(tmp_path)) == (["ppe"], [])


async def test_query_parameters_are_the_commands_flags(tmp_path: Path) -> None:
    """Each as one argument, whatever is in it. labels is always a list, never a file of the gateway's machine."""
    front = adding_front(tmp_path)
    query = "input_size=640x480&labels=%2Fetc%2Fpasswd&mean=1,2,3&keypoint_names=--home%3D/&parameter=a=b&parameter=c=d"
    assert (await front.ask("POST", f"{ADD.format('m')}?{query}", FILE)).status == 200
    arguments = json.loads((tmp_path / "models" / "m" / "arguments.json").read_text())
    assert arguments[5:11] == [
        "--input-size=640x480",
        "--labels=/etc/passwd;",
        "--mean=1,2,3",
        "--keypoint-names=--home=/",
        "--parameter=a=b",
        "--parameter=c=d",
    ]
    assert {"--json", "--no-load", f"--home={tmp_path}", "--name=m"} < set(arguments)
    assert not {"--allow-model-code", "--replace"} & set(arguments)


def test_every_flag_of_the_command_is_a_query_parameter() -> None:
    """All but those that name a file of the gateway's machine, which a client must not."""
    names = {each.name for each in fields(ModelFlags) if "Path" not in str(each.type)}
    assert set(add_model.QUERY) == names | {"on", "precision", "replace", "upload"}


@pytest.mark.parametrize(
    ("query", "said"),
    [
        ("layot=yolox", "did you mean 'layout'? allowed: layout, input_size"),
        ("home=/tmp", "unknown query parameter 'home'"),
        ("origin=x", "unknown query parameter 'origin'"),
        ("layout=a&layout=b", "'layout' is given twice"),
        ("layout=", "give it a value"),
        ("labels=a%00b", "give it a value"),
        ("replace=yes", "it must be 0 or 1"),
    ],
)
async def test_query_that_is_wrong_is_refused_before_the_body(tmp_path: Path, query: str, said: str) -> None:
    """400 names the parameter; nothing is written."""
    reply = await adding_front(tmp_path).ask("POST", f"{ADD.format('m')}?{query}", FILE)
    assert reply.status == 400
    assert said in text_of(reply)
    assert is_empty(tmp_path)


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a%2Fb", "-x", ".x", "x%20y", "x;y", "x" * 101, "%C3%A4"])
async def test_name_that_is_no_models_name_is_refused(tmp_path: Path, name: str) -> None:
    """By the same rule as the command's."""
    reply = await adding_front(tmp_path).ask("POST", ADD.format(name), FILE)
    assert reply.status == 400
    assert is_empty(tmp_path)


@pytest.mark.parametrize("name", ["a", "A.b-c_1", "7", "x" * 100, "x" * 101, "", "a b", "-a", "_a", "a/b", "a\n", "ä"])
def test_names_are_those_of_the_command(tmp_path: Path, name: str) -> None:
    """What one takes, the other takes."""
    uploads = ModelUploads(tmp_path, ())
    try:
        check_name(name)
    except CannotAdd:
        with pytest.raises(InvalidRequest):
            uploads.check(name, may_replace=False)
    else:
        uploads.check(name, may_replace=False)


async def test_name_that_is_taken_is_refused_before_the_body(tmp_path: Path) -> None:
    """replace=1 replaces a model of PENSTOCK_HOME, and of no other repository."""
    for taken in ("models/mine", "shipped/theirs"):
        (tmp_path / taken).mkdir(parents=True)
    front = adding_front(tmp_path)
    assert text_of(await front.ask("POST", ADD.format("mine"), FILE)).endswith(
        "choose another name; replace=1 replaces a model that was added"
    )
    for query in ("", "?replace=1"):
        assert text_of(await front.ask("POST", ADD.format("theirs") + query, FILE)).endswith("choose another name")
    assert (await front.ask("POST", f"{ADD.format('mine')}?replace=1", FILE)).status == 200
    assert (tmp_path / "models" / "mine" / "model.onnx").exists()


@pytest.mark.parametrize(
    ("body", "header", "status", "said"),
    [
        (FILE, (b"content-encoding", b"gzip"), 400, "send the ONNX file uncompressed"),
        (FILE, (b"content-encoding", b"br"), 400, "send the ONNX file uncompressed"),
        (FILE, (b"content-type", b"multipart/form-data; boundary=x"), 415, "send the ONNX file itself as the body"),
        (b"", (b"x-a", b"b"), 400, "the body is empty"),
    ],
)
async def test_body_that_is_no_plain_file_is_refused(
    tmp_path: Path, body: bytes, header: tuple[bytes, bytes], status: int, said: str
) -> None:
    """A compressed body could be a zip bomb, and a form is no file."""
    reply = await adding_front(tmp_path).ask("POST", ADD.format("m"), body, (header,))
    assert reply.status == status
    assert said in text_of(reply)
    assert left_in(tmp_path) == []


async def test_body_declared_with_10_gb_is_refused_unread(tmp_path: Path) -> None:
    """413 by Content-Length alone."""
    async with adding_front(tmp_path).served() as port, Client.connected(port) as client:
        await client.send(f"POST {ADD.format('m')} HTTP/1.1\r\nHost: test\r\n".encode())
        await client.send(b"Content-Length: 10000000000\r\n\r\n")
        reply = await client.reply()
    assert (reply.status, reply.headers["connection"]) == (413, "close")
    assert "raise max_model_bytes" in text_of(reply)
    assert is_empty(tmp_path)


async def test_body_in_chunks_is_refused_at_the_limit(tmp_path: Path) -> None:
    """413, and what had come is removed."""
    async with adding_front(tmp_path).served() as port, Client.connected(port) as client:
        await client.send(f"POST {ADD.format('m')} HTTP/1.1\r\nHost: test\r\n".encode())
        await client.send(b"Transfer-Encoding: chunked\r\n\r\n" + (b"40000\r\n" + bytes(1 << 18) + b"\r\n") * 5)
        assert (await client.reply()).status == 413
    assert left_in(tmp_path) == []


async def test_large_body_needs_little_memory_and_no_share_of_what_is_received(tmp_path: Path) -> None:
    """32 MiB go to disk a piece at a time, though all bodies together may have 2 MiB in memory."""
    front = adding_front(tmp_path, RestOptions(max_model_bytes=64 << 20))
    front.plane.admission = InFlightLimiter(InFlightLimits(1024, 2 << 20))
    async with front.served() as port, Client.connected(port) as client:
        await client.send(f"POST {ADD.format('m')} HTTP/1.1\r\nHost: test\r\n".encode())
        await client.send(b"Content-Length: %d\r\n\r\n" % (32 << 20))
        piece = bytes(1 << 20)
        with memory_within(8 << 20):
            for _ in range(32):
                await client.send(piece)
            assert (await client.reply()).status == 200
    assert (tmp_path / "models" / "m" / "model.onnx").stat().st_size == 32 << 20
    assert front.plane.admission.statistics().receiving_bytes == 0


async def test_slow_client_has_time_in_proportion_to_what_it_has_sent(tmp_path: Path) -> None:
    """0.2 s, and half a second for 5,000 bytes at 10,000 a second; then 408, and nothing is left."""
    limits = RestOptions(body_timeout_s=0.2, min_upload_bytes_per_s=10_000)
    async with adding_front(tmp_path, limits).served() as port, Client.connected(port) as client:
        await client.send(request_bytes("POST", ADD.format("m"), bytes(9_000))[:-4_000])
        reply = await client.reply()
    assert reply.status == 408
    assert text_of(reply) == ("5000 bytes of the body arrived within 0.7 s; send at least 10000 bytes a second")
    assert left_in(tmp_path) == []


async def test_client_that_leaves_in_the_middle_of_its_body_leaves_nothing(tmp_path: Path) -> None:
    """The file is removed, and nothing is added."""
    front = adding_front(tmp_path)
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", ADD.format("m"), FILE)[:-10])
            await until(lambda: len(left_in(tmp_path)) == 1)
        await until(lambda: left_in(tmp_path) == [])
    assert front.plane.added == []


async def test_client_that_leaves_while_its_model_is_made_ends_the_process(tmp_path: Path) -> None:
    """The folder that the process had begun goes, too."""
    front = adding_front(tmp_path)
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", f"{ADD.format('m')}?layout=hang", FILE))
            await until(lambda: any(name.startswith("m.") for name in left_in(tmp_path)))
        await until(lambda: left_in(tmp_path) == [])
    assert not (tmp_path / "models").exists()


async def test_client_that_leaves_during_the_load_does_not_stop_it(tmp_path: Path) -> None:
    """As with POST …/load: the engine would not stop, and the outcome must be known."""
    front = adding_front(tmp_path)
    front.plane.holds = True
    async with front.served() as port:
        async with Client.connected(port) as client:
            await client.send(request_bytes("POST", ADD.format("m"), FILE))
            await front.plane.entered.wait()
        front.plane.released.set()
        await until(lambda: left_in(tmp_path) == [])
    assert (tmp_path / "models" / "m" / "model.onnx").exists()
    assert not front.plane.cancelled.is_set()


async def test_more_uploads_than_may_wait_are_refused_before_the_body(tmp_path: Path) -> None:
    """503 with Retry-After; the next one is taken when a place is free."""
    front = adding_front(tmp_path)
    front.plane.holds = True
    running = [asyncio.create_task(front.ask("POST", ADD.format(f"m{n}"), FILE)) for n in range(MAX_UPLOADS)]
    await front.plane.entered.wait()
    reply = await front.ask("POST", ADD.format("last"), FILE)
    assert reply.status == 503
    assert 10 <= int(reply.headers["retry-after"]) <= 15
    front.plane.released.set()
    assert {(await each).status for each in running} == {200}
    assert (await front.ask("POST", ADD.format("last"), FILE)).status == 200


async def test_disk_without_room_for_the_file_is_507(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the size that the client declares, and when a write fails."""
    front = adding_front(tmp_path)
    usage = shutil.disk_usage(tmp_path)._replace(free=10)
    with monkeypatch.context() as small:
        small.setattr(shutil, "disk_usage", lambda _: usage)
        reply = await front.ask("POST", ADD.format("m"), FILE)
    assert (reply.status, "10 bytes free and the model 200" in text_of(reply)) == (507, True)

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(request, "_write", full)
    reply = await front.ask("POST", ADD.format("m"), FILE)
    assert (reply.status, "is full: free some room" in text_of(reply)) == (507, True)
    assert left_in(tmp_path) == []


async def test_home_that_cannot_be_written_is_501(tmp_path: Path) -> None:
    """With the reason and PENSTOCK_HOME as the remedy."""
    (tmp_path / "staging").write_text("a file")
    reply = await adding_front(tmp_path).ask("POST", ADD.format("m"), FILE)
    assert (reply.status, "PENSTOCK_HOME" in text_of(reply)) == (501, True)


async def test_leftovers_of_a_killed_gateway_are_swept_and_running_uploads_are_not(tmp_path: Path) -> None:
    """A folder whose lock is free belongs to a process that is gone."""
    dead = tmp_path / "staging" / "upload-dead"
    (dead / "model").mkdir(parents=True)
    (dead / "lock").touch()
    (dead / "model" / "m.onnx").write_bytes(FILE)
    front = adding_front(tmp_path)
    with ModelUploads(tmp_path, ()).file("other") as running:
        running.write_bytes(FILE)
        assert (await front.ask("POST", ADD.format("m"), FILE)).status == 200
        assert left_in(tmp_path) == [running.parent.parent.name]
        assert running.read_bytes() == FILE
    assert left_in(tmp_path) == []


async def test_engine_with_a_repository_of_its_own_takes_no_models(tmp_path: Path) -> None:
    """400 with the reason, before the body."""
    uploads = ModelUploads(tmp_path, (), refusal="the engine has a repository of its own")
    reply = await Front(uploads=uploads).ask("POST", ADD.format("m"), FILE)
    assert (reply.status, text_of(reply)) == (400, "the engine has a repository of its own")


async def test_role_admin_is_needed_before_the_body(tmp_path: Path) -> None:
    """Other keys get 403, and none 401; MODEL.md can say whose key it was."""
    front = adding_front(tmp_path, door=door())
    statuses = {}
    for role, key in {**KEYS, None: ""}.items():
        headers = ((b"x-api-key", key.encode()),) if key else ()
        statuses[role] = (await front.ask("POST", ADD.format("m"), FILE, headers)).status
    assert statuses == {"infer": 403, "read": 403, "admin": 200, None: 401}
    arguments = json.loads((tmp_path / "models" / "m" / "arguments.json").read_text())
    assert any(each.startswith("--origin=sent to the gateway by admin (upload-") for each in arguments)


async def test_core_adds_what_a_worker_has_received(tmp_path: Path) -> None:
    """The worker names its file by a key; a key that is none is refused."""
    front = adding_front(tmp_path, gate=ForwardedIdentity())
    with ModelUploads(tmp_path, ()).file("m") as file:
        file.write_bytes(FILE)
        key = file.parent.parent.name.encode()
        for wrong in (b"", b"..", key + b"/../" + key, b"upload-none"):
            assert (await front.ask("POST", ADD.format("m"), b"", ((b"x-penstock-upload", wrong),))).status == 400
        reply = await front.ask("POST", ADD.format("m"), b"", ((b"x-penstock-upload", key),))
        assert reply.status == 200
        assert file.exists(), "the worker removes it"
    assert (tmp_path / "models" / "m" / "model.onnx").read_bytes() == FILE


async def test_worker_receives_the_file_and_passes_its_key_on(tmp_path: Path) -> None:
    """The core gets path, query and key, none of the client's headers, and no body; its answer goes back."""
    heads: list[str] = []
    files: list[bytes] = []
    ended = asyncio.Event()

    async def core(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append((await reader.readuntil(b"\r\n\r\n")).decode())
        key = heads[0].partition("x-penstock-upload: ")[2].partition("\r\n")[0]
        files.append((tmp_path / "staging" / key / "model" / "m.onnx").read_bytes())
        writer.write(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 15\r\n\r\n" + b'{"error":"odd"}')
        await reader.read()
        writer.close()
        await writer.wait_closed()
        ended.set()

    server = await asyncio.start_unix_server(core, str(tmp_path / HTTP_SOCKET))
    relay, front = CoreRelay(tmp_path, max_connections=4), Front()
    plane: Any = front.plane
    recorder: Any = front.recorder
    route = CoreRoute(relay, has_engine=False, uploads=ModelUploads(tmp_path, ()))
    front.app = create_app(plane, LIMITS, recorder, core_route=route)
    try:
        headers = ((b"x-penstock-upload", b"another"), (b"x-other", b"1"))
        reply = await front.ask("POST", f"{ADD.format('m')}?layout=yolox", FILE, headers)
    finally:
        await relay.aclose()
        server.close()
        await ended.wait()
    assert (reply.status, reply.body) == (400, b'{"error":"odd"}')
    assert files == [FILE]
    assert heads[0].startswith(f"POST {ADD.format('m')}?layout=yolox HTTP/1.1\r\n")
    assert not {"another", "x-other"} & set(heads[0].split())
    assert "content-length: 0" in heads[0].lower()
    assert left_in(tmp_path) == []


async def test_client_cannot_name_an_upload(tmp_path: Path) -> None:
    """The worker's header means nothing to a gateway without workers."""
    front = adding_front(tmp_path)
    with ModelUploads(tmp_path, ()).file("m") as file:
        file.write_bytes(b"of another client")
        key = file.parent.parent.name.encode()
        assert (await front.ask("POST", ADD.format("m"), FILE, ((b"x-penstock-upload", key),))).status == 200
    assert (tmp_path / "models" / "m" / "model.onnx").read_bytes() == FILE


def test_description_has_the_body_the_parameters_and_the_role() -> None:
    """Generators of clients find all of them."""
    described = described_by(Front())["paths"]["/v2/repository/models/{model}/add"]["post"]
    assert described["requestBody"]["content"] == {"application/octet-stream": {}}
    assert {each["name"] for each in described["parameters"]} == {"model", *add_model.QUERY}
    assert {"ApiKey": ["admin"]} in described["security"]
    assert {"200", "400", "408", "413", "415", "503", "507"} < set(described["responses"])
