"""The bench of peers: the vision they share is ours, servers come and go whole, figures add up."""

import json
import os
import re
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import psutil
import pytest

from loadtest.bench.closed_loop import Repetition
from loadtest.bench.peers import contenders as environments
from loadtest.bench.peers import measuring
from loadtest.bench.peers.__main__ import ENVIRONMENTS, OursFailed, format_rows, main, pictures_of, rows_of, run_rounds
from loadtest.bench.peers.contenders import (
    CONTENDERS,
    Contender,
    FoundObject,
    NotPrepared,
    ServedModel,
    ServerAddress,
    difference,
    prepare,
    read_model,
)
from loadtest.bench.peers.measuring import PeerFigures, PeerLoad, audition, check
from loadtest.bench.peers.servers.detector import Card, Detector
from loadtest.bench.wire import BadAnswer, BenchRequest
from penstock.engines.config_pbtxt import read_config
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import decode
from penstock.vision.preprocess import prepare as prepare_ours
from penstock.vision.results import parse

CHECKOUT = Path(__file__).resolve().parents[2]
FASTESTDET = CHECKOUT / "server" / "penstock" / "models" / "folders" / "fastestdet" / "config.pbtxt"


@pytest.fixture(scope="module")
def street() -> ServedModel:
    return read_model("street")


@pytest.fixture(scope="module")
def pictures() -> tuple[bytes, ...]:
    return pictures_of(None)[:4]


def card_of(config: Path) -> VisionCard:
    card = card_from_config(read_config(config))
    assert card is not None
    return card


def ours(card: VisionCard, outputs: dict[str, np.ndarray], jpeg: bytes) -> list[FoundObject]:
    """The gateway's own way from a network's outputs, the batch axis on, to boxes."""
    _, geometry = prepare_ours(decode(jpeg, card.prepare_spec.color), card.prepare_spec)
    tensors = tuple(tensor_from_numpy(name, array) for name, array in outputs.items())
    result = parse(card, InferResponse("m", "1", tensors), 0, geometry)
    assert isinstance(result, Detections)
    rows = zip(result.xyxy.tolist(), result.class_id.tolist(), result.score.tolist(), strict=True)
    return [FoundObject(tuple(xyxy), class_id, score) for xyxy, class_id, score in rows]


def theirs(answer: dict) -> list[FoundObject]:
    return [FoundObject(tuple(one["xyxy"]), one["class_id"], one["score"]) for one in answer["detections"]]


def our_boxes(model: ServedModel, jpeg: bytes) -> list[FoundObject]:
    card = card_of(model.folder / "config.pbtxt")
    array, _ = prepare_ours(decode(jpeg, card.prepare_spec.color), card.prepare_spec)
    session = onnxruntime.InferenceSession(model.card.file, providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    values = session.run(names, {card.input_name: array[np.newaxis]})
    return ours(card, dict(zip(names, values, strict=True)), jpeg)


def jpeg_of(width: int, height: int) -> bytes:
    pixels = cv2.resize(np.random.default_rng(3).integers(0, 256, (9, 12, 3), np.uint8), (width, height))
    return cv2.imencode(".jpg", pixels)[1].tobytes()


@pytest.mark.parametrize("size", [(640, 480), (512, 288), (1, 300)])
def test_the_peers_input_is_the_gateways_to_the_last_bit(street: ServedModel, size: tuple[int, int]) -> None:
    """What the network sees behind a peer is what it sees behind us, whatever the picture's proportions."""
    jpeg = jpeg_of(*size)
    spec = card_of(street.folder / "config.pbtxt").prepare_spec
    expected, _ = prepare_ours(decode(jpeg, spec.color), spec)
    np.testing.assert_array_equal(Detector(street.card).prepare(jpeg).array, expected)


def test_the_peers_boxes_are_the_gateways(street: ServedModel, pictures: tuple[bytes, ...]) -> None:
    """A batch of pictures through the shared detector gives the boxes of penstock.vision, and there are some."""
    answers = Detector(street.card).detect_many(pictures)
    expected = [our_boxes(street, jpeg) for jpeg in pictures]
    check(expected, [theirs(answer) for answer in answers], name="x", score_threshold=street.card.score_threshold)
    assert min(len(boxes) for boxes in expected) > 0


def test_fastestdets_boxes_are_the_gateways(street: ServedModel) -> None:
    """The other parser, on outputs made from a seed: its weights are not in the repository."""
    card, jpeg = card_of(FASTESTDET), jpeg_of(640, 480)
    output = np.random.default_rng(5).random((1, 85, 22, 22), np.float32) ** 0.25
    made = Card(
        **{
            **{name: getattr(street.card, name) for name in Card.__slots__},
            "outputs": card.layout_options.output_names,
            "width": 352,
            "height": 352,
            "keeps_aspect": False,
            "parser": "fastestdet",
            "score_threshold": card.layout_options.pre_cluster_threshold,
            "iou_threshold": card.layout_options.nms_iou_threshold,
        }
    )
    detector = Detector(made)
    found = theirs(detector._parse([output], 0, detector.prepare(jpeg)))
    expected = ours(card, {card.layout_options.output_names[0]: output}, jpeg)
    assert len(expected) > 20
    assert difference(expected, found, score_threshold=made.score_threshold) == ""


@pytest.mark.long
async def test_the_fastapi_peer_really_serves(street: ServedModel, pictures: tuple[bytes, ...]) -> None:
    """Started as the bench starts it, with its workers, it answers our boxes and leaves no process behind."""
    contender = next(one for one in CONTENDERS if one.name == "fastapi")
    boxes, rate = await audition(contender, street, PeerLoad(pictures, 4, 0.5, 0.5, 2))
    expected = [our_boxes(street, jpeg) for jpeg in pictures]
    check(expected, boxes, name="fastapi", score_threshold=street.card.score_threshold)
    assert rate > 0
    assert not [p for p in psutil.Process().children(recursive=True) if "fastapi_server.py" in " ".join(p.cmdline())]


SERVER = """
    import http.server, sys, time
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        def do_POST(self):
            self.rfile.read(int(self.headers["content-length"]))
            time.sleep(0.002)
            body = sys.argv[2].encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            if self.close_connection:
                self.send_header("connection", "close")
            self.end_headers()
            self.wfile.write(body)
        def log_message(self, *_): pass
    http.server.ThreadingHTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def stand_in(name: str, code: str = SERVER, *, left: float = 10.0) -> Contender:
    """A server of a few lines that answers one box to everything."""
    answer = json.dumps({"xyxy": [left, 10.0, 60.0, 60.0], "class_id": 0, "score": 0.9})

    def command(place: ServerAddress) -> list[str]:
        return [sys.executable, "-c", textwrap.dedent(code), str(place.port), answer]

    def read(body: bytes) -> list[FoundObject]:
        one = json.loads(body)
        return [FoundObject(tuple(one["xyxy"]), one["class_id"], one["score"])]

    return Contender(name, command, lambda jpeg, model: BenchRequest("/", {}, jpeg), read)


async def test_rounds_leave_out_who_fails_and_who_answers_otherwise(street: ServedModel) -> None:
    """The others are measured in every round, and each one that is left out has its sentence; without ours none is."""
    dead = "print('no port for me'); raise SystemExit(3)"
    contenders = [stand_in("ours"), stand_in("same"), stand_in("other", left=12.0), stand_in("dead", dead)]
    said: list[str] = []
    rounds = await run_rounds(contenders, street, PeerLoad((b"x",), 2, 0.3, 0.3, 3, 40.0), count=2, say=said.append)
    assert rounds.light_rate == 40.0
    assert {name: len(measured) for name, measured in rounds.measured.items()} == {"ours": 2, "same": 2}
    one = rounds.measured["same"][0]
    assert one.closed.count > 0
    assert one.light.count > 0
    assert one.rss_mib > one.pss_mib > 0
    other, gone = rounds.left_out
    assert other.startswith(
        "other is no peer, because it answers otherwise to picture 0: it does not find FoundObject("
    )
    assert gone == "dead ended with 3 while it started; its log ends:\nno port for me"
    with pytest.raises(OursFailed, match="dead ended with 3 while it started"):
        await run_rounds(contenders[:2:-1], street, PeerLoad((b"x",), 2, 0.2, 0.2, 0), count=1, say=said.append)


async def test_server_that_is_not_ready_in_time_says_what_it_lacked(
    street: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error has the last reason, before the end of the log."""
    monkeypatch.setattr(measuring, "READY_TIMEOUT_S", 0.0)
    mute = stand_in("mute", "import time; time.sleep(60)")
    with pytest.raises(BadAnswer, match=r"^mute was not ready within 0 s: / was not answered: .*; its log ends"):
        await audition(mute, street, PeerLoad((b"x",), 2, 0.2, 0.2, 0))


@pytest.mark.long
@pytest.mark.parametrize("sign", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_ends_the_server_that_is_up(tmp_path: Path, sign: signal.Signals) -> None:
    """The program stops with 130 and one word, and what it had started is gone."""
    command = [sys.executable, "-m", "loadtest.bench.peers", "run", "--peers", "fastapi", "--rounds", "1"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    program = subprocess.Popen(
        command, cwd=CHECKOUT, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    until = time.monotonic() + 60
    while not list(tmp_path.glob("peer-*/output.log")) and time.monotonic() < until:
        time.sleep(0.05)
    started = psutil.Process(program.pid).children(recursive=True)
    program.send_signal(sign)
    _, errors = program.communicate(timeout=60)
    assert program.returncode == 130
    assert errors.splitlines()[-1] == "peers: stopped"
    assert started
    assert not [process for process in started if process.is_running()]
    assert not list(tmp_path.glob("peer-*"))


BOX = FoundObject((10.0, 10.0, 110.0, 110.0), 0, 0.9)


@pytest.mark.parametrize(
    ("their_box", "is_same"),
    [
        (BOX, True),
        (FoundObject((10.2, 10.0, 110.0, 110.0), 0, 0.905), True),
        (FoundObject((12.0, 10.0, 110.0, 110.0), 0, 0.9), False),
        (FoundObject(BOX.xyxy, 1, 0.9), False),
        (FoundObject(BOX.xyxy, 0, 0.85), False),
    ],
)
def test_boxes_are_the_same_within_what_is_allowed(their_box: FoundObject, is_same: bool) -> None:
    """IoU 0.99, the class, a score within 0.01."""
    assert (difference([BOX], [their_box], score_threshold=0.3) == "") is is_same


def test_a_box_too_many_counts_unless_it_is_at_the_threshold() -> None:
    """Rounding may push a box over the threshold or under it, on either side; no other box may be alone."""
    edge, clear = FoundObject((200, 200, 300, 300), 0, 0.305), FoundObject((200, 200, 300, 300), 0, 0.5)
    assert difference([BOX, edge], [BOX], score_threshold=0.3) == ""
    assert difference([BOX], [edge, BOX], score_threshold=0.3) == ""
    assert difference([BOX, clear], [BOX], score_threshold=0.3).startswith("it does not find FoundObject(xyxy=(200")
    assert difference([BOX], [BOX, clear], score_threshold=0.3).startswith("it finds FoundObject(xyxy=(200")


def measured(rate: float, ms: float, pss: float = 100.0) -> PeerFigures:
    return PeerFigures(
        Repetition(rate, ms, 2 * ms, 100), Repetition(10.0, ms / 2, ms, 50), 4 * ms, 0.5, 2 * pss, pss, 3
    )  # fmt: skip


def test_the_table_divides_ours_by_theirs_within_a_round() -> None:
    """Ratios are of the same round, then spread."""
    rounds = {"ours": [measured(100, 10), measured(300, 20)], "x": [measured(50, 20), measured(100, 20, pss=50.0)]}
    mine, other = rows_of(rounds, ours="ours", versions={"x": "1.2"})
    assert str(mine["rate_ratio"]) == "1.00 (1.00-1.00)"
    assert str(other["rate_ratio"]) == "2.50 (2.00-3.00)"
    assert str(other["light_p99_ratio"]) == "0.75 (0.50-1.00)"
    assert str(other["pss_ratio"]) == "1.50 (1.00-2.00)"
    text = format_rows([mine, other], ours="ours")
    assert re.search(r"^x 1\.2 +75\.00 \(50\.00-100\.00\) +20\.00 \(20\.00-20\.00\) +40\.00 ", text, re.MULTILINE)
    assert re.search(r"^x +2\.50 \(2\.00-3\.00\) ", text, re.MULTILINE)


def test_a_peer_without_its_environment_is_a_sentence(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """run says what to run first; prepare says what could not be built."""
    monkeypatch.setattr(environments, "ENVIRONMENTS", tmp_path)
    assert main(["run", "--peers", "litserve"]) == 1
    assert capsys.readouterr().err.startswith("peers: litserve has no environment yet")
    monkeypatch.setattr(environments, "UV", tmp_path / "uv")
    with pytest.raises(NotPrepared, match=r"^litserve: .*uv cannot be run \(No such file or directory\)"):
        prepare("litserve", lambda line: None)


@pytest.mark.parametrize("name", ENVIRONMENTS)
def test_a_peers_lock_holds_our_decoder_network_and_arrays(name: str) -> None:
    """OpenCV, ONNX Runtime and numpy are the versions of base.txt, so that servers are compared and not those."""

    def pins(lock: str) -> set[str]:
        text = (CHECKOUT / "requirements" / lock).read_text()
        return set(re.findall(r"^((?:numpy|onnxruntime|opencv-python-headless)==[^\s;]+)", text, re.MULTILINE))

    assert pins(f"peers/{name}.txt") == pins("base.txt")
    assert len(pins("base.txt")) >= 3


@pytest.mark.long
@pytest.mark.timeout(1800)
def test_every_peer_is_built_and_measured_for_a_round(tmp_path: Path) -> None:
    """From the locks to the table: each of them serves our boxes."""
    try:
        for name in ENVIRONMENTS:
            prepare(name, lambda line: None)
    except NotPrepared as error:
        pytest.skip(str(error))
    arguments = ["run", "--rounds", "1", "--seconds", "2", "--warm-up", "1", "--json", str(tmp_path / "peers.json")]
    assert main(arguments) == 0
    [result] = json.loads((tmp_path / "peers.json").read_text())["results"]
    assert [row["name"] for row in result["rows"]] == [one.name for one in CONTENDERS]
    assert all(row["rate"]["median"] > 0 for row in result["rows"])
