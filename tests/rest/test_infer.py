"""The infer route, apart from the scan itself."""

import json
import time

import pytest

from penstock.protocol.call import HttpAnswer, InferHead
from penstock.protocol.errors import InvalidRequest
from tests.rest.harness import JSON, VALID_INFER, Front

INFER = "/v2/models/ident/infer"
LENGTH = b"inference-header-content-length"


async def test_infer_relays_the_bytes_and_counts_the_request(front: Front) -> None:
    """Body and answer are untouched."""
    front.plane.answer = HttpAnswer(200, JSON, b'{"outputs":[]}')
    reply = await front.ask("POST", INFER, VALID_INFER, JSON)
    assert (reply.status, reply.body) == (200, b'{"outputs":[]}')
    assert front.plane.relayed[0][2].body == VALID_INFER
    assert front.recorder.done == [("ident", "http", "200")]
    assert front.recorder.reasons == []


async def test_infer_of_an_unknown_model_is_counted_without_its_name(front: Front) -> None:
    """The engine's 404 comes back as it is; clients cannot grow the metrics."""
    front.plane.answer = HttpAnswer(404, JSON, b'{"error":"Request for unknown model"}')
    reply = await front.ask("POST", "/v2/models/random-7/infer", VALID_INFER)
    assert (reply.status, reply.body) == (404, b'{"error":"Request for unknown model"}')
    assert front.recorder.done == [("unknown", "http", "404")]


@pytest.mark.parametrize(
    ("value", "body", "status"),
    [
        (b"0", b"\x00\x01rawbytes", 200),
        (b"none", b"\x00\x01rawbytes", 200),
        (b"", b"\x00\x01rawbytes", 200),
        (b"70", VALID_INFER, 200),
        (b"70x", VALID_INFER, 200),
        (b" 70", VALID_INFER, 200),
        (b"-1", VALID_INFER, 400),
        (b"71", VALID_INFER, 400),
        (b"4294967296", VALID_INFER, 400),
        (b"9" * 5000, VALID_INFER, 400),
        (b"69", VALID_INFER, 400),
    ],
)
async def test_infer_reads_the_header_length_as_triton_does(
    front: Front, value: bytes, body: bytes, status: int
) -> None:
    """A leading number; 0 where there is none, which means raw binary; outside the body 400."""
    assert len(VALID_INFER) == 70
    assert (await front.ask("POST", INFER, body, ((LENGTH, value),))).status == status
    assert len(front.plane.relayed) == (status == 200)


async def test_infer_with_an_empty_body_is_raw_binary(front: Front) -> None:
    """Relayed, not refused as empty JSON."""
    assert (await front.ask("POST", INFER)).status == 200


@pytest.mark.parametrize("name", [LENGTH, b"content-encoding", b"x-request-timeout-ms"])
async def test_infer_with_a_header_given_twice_is_refused(front: Front, name: bytes) -> None:
    """Gateway and engine could take different ones."""
    reply = await front.ask("POST", INFER, VALID_INFER, ((name, b"70"), (name, b"0")))
    assert reply.status == 400
    assert name.decode() in json.loads(reply.body)["error"]


async def test_infer_of_an_unsupported_encoding_is_not_supported(front: Front) -> None:
    """501, the code that Triton gives."""
    assert (await front.ask("POST", INFER, VALID_INFER, ((b"content-encoding", b"br"),))).status == 501


async def test_infer_asking_for_classes_is_checked_against_the_model(front: Front) -> None:
    """Classes of a BYTES output end Triton 2.51: the plane refuses, nothing is relayed."""
    body = json.dumps(
        {"inputs": [], "outputs": [{"name": "words", "parameters": {"classification": 2}}, {"name": "y"}]}
    ).encode()
    assert (await front.ask("POST", INFER, body)).status == 200
    front.plane.error = InvalidRequest("output 'words' is BYTES")
    assert (await front.ask("POST", INFER, body)).status == 400
    assert front.plane.classified == [("words",), ("words",)]
    assert len(front.plane.relayed) == 1


@pytest.mark.parametrize(
    ("text", "status"),
    [
        (b"Unable to parse 'data': attempt to access JSON non-number as double", 400),
        (b"failed to parse the request JSON buffer: Invalid value. at 0", 400),
        (b"Unable to set 'x': attempt to access JSON non-string as string", 400),
        (b"model failed: Unable to parse", 500),
    ],
)
async def test_infer_that_the_engine_cannot_read_is_the_clients_error(front: Front, text: bytes, status: int) -> None:
    """Triton says 500 to JSON of the wrong type; its text stays, the code becomes 400."""
    front.plane.answer = HttpAnswer(500, JSON, b'{"error":"' + text + b'"}')
    reply = await front.ask("POST", INFER, VALID_INFER)
    assert (reply.status, reply.body) == (status, front.plane.answer.body)


def with_timeout(timeout_us: int) -> bytes:
    return json.dumps({"inputs": [], "parameters": {"timeout": timeout_us}}).encode()


@pytest.mark.parametrize(
    ("header_ms", "timeout_us", "expected_s"),
    [
        (b"250", 0, 0.25),
        (b"0.5", 0, 0.0005),
        (b"+1.", 0, 0.001),
        (b"", 400_000, 0.4),
        (b"250", 400_000, 0.25),
        (b"500", 400_000, 0.4),
        (b"99999999999999999999", 0, 3600.0),
        (b"", 10**15, 3600.0),
    ],
)
async def test_infer_deadline_is_the_earlier_of_header_and_parameter(
    front: Front, header_ms: bytes, timeout_us: int, expected_s: float
) -> None:
    """Counted from the body's last byte, an hour at most; the parameter's 0 means none."""
    headers = ((b"x-request-timeout-ms", header_ms),) if header_ms else ()
    before = time.monotonic()
    await front.ask("POST", INFER, with_timeout(timeout_us), headers)
    _, head, _, deadline = front.plane.relayed[0]
    assert head == InferHead("ident", "", "", timeout_us)
    assert deadline is not None
    assert before + expected_s <= deadline <= time.monotonic() + expected_s


@pytest.mark.parametrize(
    ("value", "status"),
    [(b"0", 504), (b"-5", 504), (b"0.0", 504), (b"soon", 400), (b"nan", 400), (b"inf", 400), (b"1_0", 400)],
)
@pytest.mark.parametrize("suffix", ["infer", "image"])
async def test_deadline_that_cannot_be_kept_is_refused_at_once(
    front: Front, value: bytes, status: int, suffix: str
) -> None:
    """No time left: 504 without a call; no number: 400."""
    reply = await front.ask("POST", f"/v2/models/ident/{suffix}", VALID_INFER, ((b"x-request-timeout-ms", value),))
    assert reply.status == status
    assert front.plane.relayed == []
    assert front.plane.images == []
