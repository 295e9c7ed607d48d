"""`penstock models optimize` beside a stack that runs here: the INT8 twin is served by the real Triton at once."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import cv2
import numpy as np
import pytest

from penstock.cli.gateway_client import GatewayClient
from penstock.models.optimize.agreement import detection_agreement
from penstock.protocol.image_answer import ImageResult
from penstock.protocol.vision_results import Detections
from tests.support.stack import CHECKOUT, RunningStack

pytestmark = [pytest.mark.xdist_group("stack"), pytest.mark.long]

NAME = "fastestdet-int8"
FRAMES, STEP = 16, 45


@pytest.fixture
def frames(shared_dir: Path, tmp_path: Path) -> list[Path]:
    """Frames of a street with people, as JPEGs."""
    capture = cv2.VideoCapture(str(shared_dir / "media" / "vtest.avi"))
    paths = [tmp_path / "frames" / f"{number:03d}.jpg" for number in range(FRAMES)]
    paths[0].parent.mkdir()
    for number, path in enumerate(paths):
        capture.set(cv2.CAP_PROP_POS_FRAMES, number * STEP)
        assert cv2.imwrite(str(path), capture.read()[1])
    return paths


@pytest.fixture
def gateway(stack: RunningStack) -> Iterator[GatewayClient]:
    """The running gateway; what the test adds to its models is gone afterwards."""
    gateway = GatewayClient(stack.http_url)
    yield gateway
    gateway.unload(NAME)
    shutil.rmtree(stack.home / "models" / NAME)


def detections(result: ImageResult) -> Detections:
    """As the core's nouns, for the comparison."""
    found = result.detections or ()
    return Detections(
        np.array([item.xyxy for item in found], np.float32).reshape(-1, 4),
        np.array([item.score for item in found], np.float32),
        np.array([item.class_id for item in found], np.int64),
    )


def test_optimized_model_is_served_beside_the_float_one(
    stack: RunningStack, gateway: GatewayClient, frames: list[Path]
) -> None:
    """Calibrated on every second frame, loaded without a restart; on the others the served pair agrees as reported."""
    words = ["models", "optimize", "fastestdet", "--int8", "--json", "--url", stack.http_url]
    done = subprocess.run(
        [sys.executable, "-m", "penstock.cli.main", *words, "--calibrate", str(frames[0].parent)],
        cwd=CHECKOUT, env=os.environ | {"PENSTOCK_HOME": str(stack.home)}, capture_output=True, text=True, timeout=100,
        check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert f"{NAME} is loaded at" in report["gateway"]
    pairs: list[list[Detections]] = [[], []]
    for path in frames[1::2]:
        for name, found in zip(("fastestdet", NAME), pairs, strict=True):
            (result,) = gateway.infer_image(name, path.read_bytes(), "image/jpeg").results
            found.append(detections(result))
    served = detection_agreement(pairs[0], pairs[1])
    assert served.float_boxes == report["judgement"]["agreement"]["float_boxes"] > 40
    assert served.share == pytest.approx(report["judgement"]["agreement"]["share"], abs=0.05)
    assert served.share >= 0.75  # 0.80 without VNNI, where INT8 products saturate
