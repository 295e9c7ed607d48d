"""Models of the catalogue, pulled from the real files beside the checkout: freed batches, and what they answer."""

import hashlib
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import cv2
import numpy as np
import onnxruntime
import pytest

from penstock.engines.config_pbtxt import read_config
from penstock.engines.embedded.engine import EmbeddedEngine
from penstock.models.added_folder import proof_rows
from penstock.models.batch_axis import prove_rows, session_run
from penstock.models.catalogue import PullFailed, read_catalogue
from penstock.models.pull import pull
from penstock.protocol.inference import InferRequest, tensor_from_numpy
from penstock.protocol.vision_results import Detections, Embedding, VisionResult
from penstock.vision.card import VisionCard, card_from_config
from penstock.vision.decode import decode
from penstock.vision.image_tasks import size_tensors
from penstock.vision.preprocess import prepare
from penstock.vision.results import parse
from tests.support.plain_detections import PlainBox, plain_iou

CATALOGUE = read_catalogue()
FILES = {
    "yolox-nano": "yolox_nano.onnx",
    "deimv2-atto": "deimv2_atto.onnx",
    "ultraface": "ultraface_rfb320.onnx",
    "osnet-x0-25": "osnet_x0_25_msmt17.onnx",
}
FREED = [name for name in FILES if CATALOGUE[name].freed_sha256]
PHOTOS = ("astronaut", "chelsea", "coffee")
PERSON, CAT, CUP, TABLE = 0, 15, 41, 60
# Of ../shared/media/SOURCES.md and, for the face, of UltraFace's MODEL.md: the boxes that must be there.
STATED: Mapping[str, Sequence[Sequence[PlainBox]]] = {
    "yolox-nano": (
        [PlainBox(11, 20, 369, 507, PERSON, 0.925)],
        [PlainBox(0, 0, 449, 300, CAT, 0.629)],
        [PlainBox(162, 16, 421, 296, CUP, 0.894), PlainBox(0, 0, 598, 399, TABLE, 0.747)],
    ),
    "deimv2-atto": (
        [PlainBox(7, 15, 367, 507, PERSON, 0.861)],
        [PlainBox(2, 1, 417, 295, CAT, 0.669)],
        [PlainBox(0, 0, 599, 395, TABLE, 0.810), PlainBox(172, 16, 411, 295, CUP, 0.741)],
    ),
    "ultraface": ([PlainBox(179, 62, 270, 173, 0, 1.0)], [], []),
}


def quiet(done_bytes: int) -> None:
    """No progress wanted."""


@pytest.fixture(scope="module")
def home(shared_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A home with the models of FILES."""
    home = tmp_path_factory.mktemp("home")
    for name, file in FILES.items():
        pull(CATALOGUE[name], source=shared_dir / "models" / file, home=home, progress=quiet)
    return home


@pytest.fixture
async def engine(home: Path) -> AsyncIterator[EmbeddedEngine]:
    engine = EmbeddedEngine((home / "models",))
    yield engine
    await engine.aclose()


def card_of(folder: Path) -> VisionCard:
    card = card_from_config(read_config(folder / "config.pbtxt"))
    assert card is not None
    return card


async def answers(engine: EmbeddedEngine, home: Path, name: str, pictures: Sequence[bytes]) -> list[VisionResult]:
    """The results of all pictures, which go to the engine as one batch."""
    card = card_of(home / "models" / name)
    arrays, geometries = zip(
        *(prepare(decode(picture, card.prepare_spec.color), card.prepare_spec) for picture in pictures), strict=True
    )
    tensors = (
        tensor_from_numpy(card.input_name, np.stack(arrays)),
        *size_tensors(card, geometries, has_batch_axis=True),
    )
    response = await engine.infer(InferRequest(name, tensors))
    return [parse(card, response, row, geometry) for row, geometry in enumerate(geometries)]


@pytest.fixture
def photos(shared_dir: Path) -> list[bytes]:
    return [(shared_dir / "media" / f"{name}.jpg").read_bytes() for name in PHOTOS]


@pytest.mark.parametrize("name", STATED)
async def test_pulled_detector_finds_in_a_batch_of_three_photos_what_is_stated(
    name: str, engine: EmbeddedEngine, home: Path, photos: list[bytes]
) -> None:
    """Three photos in one call: each stated box is found, within 0.01 of its score and with an IoU of 0.95."""
    await engine.load(name)
    results = await answers(engine, home, name, photos)
    for result, stated in zip(results, STATED[name], strict=True):
        assert isinstance(result, Detections)
        found = [
            PlainBox(*map(float, xyxy), class_id=int(class_id), score=float(score))
            for xyxy, class_id, score in zip(result.xyxy, result.class_id, result.score, strict=True)
        ]
        for box in stated:
            same = [other for other in found if other.class_id == box.class_id]
            best = max(same, key=lambda other: plain_iou(other, box))
            assert plain_iou(best, box) >= 0.95
            assert best.score == pytest.approx(box.score, abs=0.01)


async def test_pulled_yolox_nano_finds_nothing_else(engine: EmbeddedEngine, home: Path, photos: list[bytes]) -> None:
    """At its threshold the default detector reports the four objects that the photos show, and no more."""
    await engine.load("yolox-nano")
    results = await answers(engine, home, "yolox-nano", photos)
    assert [len(result.score) for result in results if isinstance(result, Detections)] == [1, 1, 2]


async def test_pulled_osnet_knows_a_mirrored_picture_again(
    engine: EmbeddedEngine, home: Path, photos: list[bytes]
) -> None:
    """Its vectors have length 1, and a picture is nearer to its mirror image than to other pictures."""
    await engine.load("osnet-x0-25")
    pixels = cv2.imdecode(np.frombuffer(photos[0], np.uint8), cv2.IMREAD_COLOR)
    mirrored = cv2.imencode(".png", pixels[:, ::-1])[1].tobytes()
    results = await answers(engine, home, "osnet-x0-25", [*photos, mirrored])
    vectors = np.stack([result.vector for result in results if isinstance(result, Embedding)])
    assert vectors.shape == (4, 512)
    np.testing.assert_allclose(np.linalg.norm(vectors, axis=1), 1.0, atol=1e-5)
    cosines = vectors[3] @ vectors[:3].T
    assert cosines[0] > 0.8 > cosines[1:].max()


@pytest.mark.parametrize("name", FREED)
def test_pulled_model_with_a_freed_batch_is_the_catalogues(name: str, home: Path) -> None:
    """The rewritten file has the catalogue's hash, and different pictures in a batch equal the same ones alone."""
    file = home / "models" / name / "1" / "model.onnx"
    assert hashlib.sha256(file.read_bytes()).hexdigest() == CATALOGUE[name].freed_sha256
    session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])
    proof = prove_rows(session_run(session), proof_rows(card_of(file.parents[1])), is_quantised=False)
    assert proof.is_proven, proof.why


def test_pull_of_a_freed_model_again_needs_no_source(home: Path, tmp_path: Path) -> None:
    """The file in place is recognised by the hash of the freed file, so nothing is fetched."""
    folder = pull(CATALOGUE["yolox-nano"], source=tmp_path, home=home, progress=quiet).folder
    assert (folder / "1" / "model.onnx").stat().st_size == 3_648_580


def test_pull_whose_freed_file_has_another_hash_changes_nothing(shared_dir: Path, tmp_path: Path) -> None:
    """A file that was rewritten differently is not installed, and the message says what to do."""
    entry = replace(CATALOGUE["yolox-nano"], freed_sha256="0" * 64)
    with pytest.raises(PullFailed, match=r"with a free batch has SHA-256 f2c89b6606ff…, .* 000000000000…: install the"):
        pull(entry, source=shared_dir / "models", home=tmp_path, progress=quiet)
    assert list((tmp_path / "models").iterdir()) == []
    assert list((tmp_path / "staging").iterdir()) == []
