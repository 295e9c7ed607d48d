"""The image route: what it takes, and the bytes that it answers."""

import contextlib
import gzip
import json
import threading
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.rest import image
from penstock.gateway.rest.image import images_of
from penstock.gateway.rest.limits import RestOptions
from penstock.protocol.errors import InvalidRequest, UnsupportedMedia
from penstock.protocol.inference import BatchTrace, CloseReason, Timings
from penstock.protocol.vision_results import Classes, Detections
from penstock.vision.results import ImageRequest, ImageResponse
from tests.rest.harness import Front

GOLDEN = Path(__file__).parent.parent / "golden" / "rest"
IMAGE = "/v2/models/ident/image"
JPEG = b"\xff\xd8\xff\xe0 not really \r\n--a"
MULTIPART = "multipart/form-data; boundary=b"
LIMITS = RestOptions(max_parts=3)


def part(content: bytes, content_type: str = "image/jpeg", disposition: str = 'name="f"; filename="a.jpg"') -> bytes:
    typed = f"Content-Type: {content_type}\r\n" if content_type else ""
    return f"--b\r\nContent-Disposition: form-data; {disposition}\r\n{typed}\r\n".encode() + content + b"\r\n"


def parts(*each: bytes) -> bytes:
    return b"".join(each) + b"--b--\r\n"


@pytest.mark.parametrize(
    "content_type",
    ["image/jpeg", "IMAGE/PNG; q=1", "image/anything", "application/octet-stream", "application/x-www-form-urlencoded"],
)
async def test_image_body_of_any_image_type_reaches_the_plane(front: Front, content_type: str) -> None:
    """The image's own first bytes decide later; unsaid types are taken too."""
    headers = ((b"content-type", content_type.encode()), (b"x-request-timeout-ms", b"500"))
    before = time.monotonic()
    assert (await front.ask("POST", "/v2/models/ident/versions/2/image", JPEG, headers)).status == 200
    request = front.plane.images[0]
    assert request.deadline is not None
    assert before < request.deadline <= time.monotonic() + 0.5
    assert request == ImageRequest("ident", "2", (JPEG,), request.deadline)
    assert front.recorder.done == [("ident", "http", "200")]


async def test_image_without_a_content_type_is_taken(front: Front) -> None:
    """And has no deadline of its own."""
    assert (await front.ask("POST", IMAGE, JPEG)).status == 200
    assert front.plane.images == [ImageRequest("ident", "", (JPEG,), None)]


async def test_image_body_that_is_compressed_reaches_the_plane_plain(front: Front) -> None:
    """There is no engine behind that would decompress it."""
    await front.ask("POST", IMAGE, gzip.compress(JPEG), ((b"content-encoding", b"gzip"),))
    assert front.plane.images[0].images == (JPEG,)


async def test_image_request_id_comes_back(front: Front) -> None:
    """The header x-request-id is the answer's id."""
    reply = await front.ask("POST", IMAGE, JPEG, ((b"x-request-id", b"r-1"),))
    assert front.plane.images[0].id == "r-1"
    assert json.loads(reply.body)["id"] == "r-1"


@pytest.mark.parametrize(
    "content_type", ["text/plain", "application/json; charset=utf-8", "video/mp4", "multipart/mixed"]
)
async def test_image_of_another_media_type_is_refused(front: Front, content_type: str) -> None:
    """415 with a sentence that says what is taken."""
    reply = await front.ask("POST", IMAGE, JPEG, ((b"content-type", content_type.encode()),))
    assert reply.status == 415
    assert "send image/jpeg" in json.loads(reply.body)["error"]
    assert front.plane.images == []


async def test_image_empty_body_is_refused(front: Front) -> None:
    """Zero bytes are no image."""
    reply = await front.ask("POST", IMAGE)
    assert (reply.status, reply.body) == (400, b'{"error":"the body is empty; send an image"}')


async def test_multipart_files_arrive_in_order(front: Front) -> None:
    """One request of several images; contents may look like boundaries."""
    body = parts(part(JPEG), part(b"second", ""), part(b"", "application/octet-stream"))
    reply = await front.ask("POST", IMAGE, body, ((b"content-type", MULTIPART.encode()),))
    assert reply.status == 200
    assert front.plane.images[0].images == (JPEG, b"second", b"")


async def test_long_multipart_is_parsed_in_a_thread(front: Front, monkeypatch: pytest.MonkeyPatch) -> None:
    """64 MiB of line ends take seconds, while other requests are served. A single picture needs no parser."""
    is_own: list[bool] = []

    def images_in_thread(*_: object) -> tuple[bytes, ...]:
        is_own.append(threading.current_thread() is not threading.main_thread())
        return (JPEG,)

    monkeypatch.setattr(image, "images_of", images_in_thread)
    for size_bytes, media_type in ((1 << 10, MULTIPART), (2 << 20, MULTIPART), (2 << 20, "image/jpeg")):
        headers = ((b"content-type", media_type.encode()),)
        assert (await front.ask("POST", IMAGE, bytes(size_bytes), headers)).status == 200
    assert is_own == [False, True, False]


@pytest.mark.parametrize(
    ("body", "content_type", "said"),
    [
        (parts(), MULTIPART, "no parts"),
        (b"", MULTIPART, "last boundary is missing"),
        (b"junk", MULTIPART, "malformed multipart"),
        (part(JPEG), MULTIPART, "last boundary is missing"),
        (parts(part(JPEG))[:-20], MULTIPART, "last boundary is missing"),
        (parts(part(JPEG)), "multipart/form-data", "without a boundary"),
        (parts(part(JPEG)), "multipart/form-data; boundary=" + "b" * 300, "malformed multipart"),
        (parts(part(JPEG), part(b"5", "", 'name="threshold"')), MULTIPART, "part 2 ('threshold')"),
        (parts(part(JPEG, "", "")), MULTIPART, "part 1 ('')"),
        (b"--b\r\n\r\nx\r\n--b--\r\n", MULTIPART, "part 1 ('') of the multipart body is a form field"),
        (parts(*[part(b"x")] * 4), MULTIPART, "more than 3 parts"),
    ],
)
def test_multipart_that_is_malformed_says_what_is_wrong(body: bytes, content_type: str, said: str) -> None:
    """Broken framing, parts without a file, too many parts."""
    with pytest.raises(InvalidRequest) as refused:
        images_of(body, content_type, LIMITS)
    assert said in str(refused.value)


@pytest.mark.parametrize("disposition", ['name="image"', 'name="image"; filename=""', "", 'filename="a.jpg"'])
@pytest.mark.parametrize("content_type", ["image/jpeg", "image/webp; q=1", "application/octet-stream"])
def test_multipart_part_with_a_content_type_is_a_picture_with_or_without_a_filename(
    disposition: str, content_type: str
) -> None:
    """A client library may omit the filename of a part that has a content-type."""
    body = parts(part(JPEG, content_type, disposition), part(b"second", content_type, disposition))
    assert images_of(body, MULTIPART, LIMITS) == (JPEG, b"second")


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("treshold=0.9", ["treshold"]),
        ("threshold=abc", ["threshold"]),
        ("topk=0&x=1", ["topk", "x"]),
        ("flag", ["flag"]),
        ("empty=", ["empty"]),
        ("%74opk=1", ["topk"]),
        ("&", ["&"]),
    ],
)
async def test_image_with_an_unknown_query_parameter_is_refused_by_its_name(
    front: Front, query: str, names: list[str]
) -> None:
    """A misspelt parameter must not be ignored: the client would think that it had an effect."""
    reply = await front.ask("POST", f"{IMAGE}?{query}", JPEG)
    assert reply.status == 400
    assert [name for name in names if repr(name) not in json.loads(reply.body)["error"]] == []
    assert front.plane.images == []


def test_multipart_part_of_another_media_type_is_refused_by_number() -> None:
    """A text file among the images."""
    with pytest.raises(UnsupportedMedia, match="part 2 is 'text/plain'"):
        images_of(parts(part(JPEG), part(b"x", "text/plain")), MULTIPART, LIMITS)


@given(
    st.lists(st.sampled_from([b"--b", b"\r\n", b"--", part(b"x"), b"Content-Disposition", b": ", b"\xff", b"--b--"]))
)
def test_multipart_of_any_pieces_is_images_or_an_invalid_request(pieces: list[bytes]) -> None:
    """Nothing else is raised, whatever the framing."""
    with contextlib.suppress(InvalidRequest):
        assert images_of(b"".join(pieces), MULTIPART, LIMITS)


def response_of(*results: Detections | Classes) -> ImageResponse:
    timings = Timings(0.0123456, 0.004, 0.0001, 0.0204, 0.0000504, 7)
    return ImageResponse("people", "1", results, ("background", "person", ""), timings, 0.0376)


@pytest.mark.parametrize(
    ("golden", "response"),
    [
        (
            "image_detections.json",
            response_of(
                Detections(
                    np.array([[10.12345, 20.5, 110, 220.25], [0, 0, 1, 1], [1, 2, 3, 4]], np.float32),
                    np.array([0.91, 0.5, 0.25], np.float32),
                    np.array([1, 2, 7], np.int64),
                ),
                Detections(np.zeros((0, 4), np.float32), np.zeros(0, np.float32), np.zeros(0, np.int64)),
            ),
        ),
        ("image_classes.json", response_of(Classes(np.array([0.75, 0.1], np.float32), np.array([0, 9], np.int64)))),
    ],
)
async def test_image_answer_is_the_golden_file(front: Front, golden: str, response: ImageResponse) -> None:
    """Byte for byte: labels fall back to the class's number, milliseconds have three decimals."""
    front.plane.image_answer = response
    reply = await front.ask("POST", IMAGE, JPEG)
    assert reply.headers["content-type"] == "application/json"
    assert reply.body == (GOLDEN / golden).read_bytes().rstrip(b"\n")


async def test_image_answer_explains_its_batches_to_who_asks(front: Front) -> None:
    """One entry an image of those whose batches the gateway formed; else one that says who owns the batches."""
    asks = ((b"x-penstock-explain", b"1"),)
    silent = json.loads((await front.ask("POST", "/v2/models/ident/image", b"\xff\xd8\xff")).body)
    assert "explain" not in silent
    passed = json.loads((await front.ask("POST", "/v2/models/ident/image", b"\xff\xd8\xff", asks)).body)
    assert [(entry["owner"], "batch" in entry) for entry in passed["explain"]] == [("triton", False)]
    one = BatchTrace("ident", 1.0, 0.001, 0.004, 7, 2, 3, CloseReason.FULL, 0, 2, 1)
    front.plane.image_answer = replace(front.plane.image_answer, explanations=(one, one))
    formed = json.loads((await front.ask("POST", "/v2/models/ident/image", b"\xff\xd8\xff", asks)).body)
    entries = [(entry["owner"], entry["batch_rows"], entry["closed_by"]) for entry in formed["explain"]]
    assert entries == [("gateway", 3, "full")] * 2


async def test_model_explains_its_batches(front: Front) -> None:
    """The page of a model is JSON, with the options that hold."""
    page = json.loads((await front.ask("GET", "/v2/models/ident/explain")).body)
    assert (page["model"], page["owner"], page["options"]["max_queue_size"]) == ("ident", "gateway", 1024)
