"""Average precision of the shipped model on held-out scenes: `python -m deploy.models.street.evaluate`."""

import argparse
import dataclasses
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt
import onnxruntime

from deploy.models.street.scene import SCENARIOS, make_scene
from deploy.models.street.stage import LABELS, FrameTruth, print_line
from penstock.engines.config_pbtxt import read_config
from penstock.protocol.inference import InferResponse, tensor_from_numpy
from penstock.protocol.vision_results import Detections
from penstock.vision.accuracy import AveragePrecision, Truth, average_precision
from penstock.vision.card import card_from_config
from penstock.vision.decode import DecodedImage
from penstock.vision.preprocess import prepare
from penstock.vision.results import parse

FOLDER = Path(__file__).resolve().parents[3] / "model_repository" / "street"
_BATCH = 16


class StreetDetector:
    """One ONNX Runtime session over a model's folder. onnx: another file of the same model in place of its own."""

    def __init__(self, folder: Path = FOLDER, onnx: Path | None = None, *, threads: int = 1) -> None:
        config = read_config(folder / "config.pbtxt")
        card = card_from_config(config)
        if card is None:
            raise ValueError(f"{folder / 'config.pbtxt'} does not say how the model sees images")
        self.card = card
        self._name = config.name
        self._outputs = [output.name for output in config.outputs]
        options = onnxruntime.SessionOptions()
        options.intra_op_num_threads = threads
        self._session = onnxruntime.InferenceSession(
            onnx or folder / "1" / "model.onnx", options, providers=["CPUExecutionProvider"]
        )

    def find(self, pictures: Sequence[npt.NDArray[np.uint8]]) -> list[Detections]:
        """What is in each picture, (H, W, 3) BGR; boxes in its own pixels, best first, scores over the card's."""
        found: list[Detections] = []
        for start in range(0, len(pictures), _BATCH):
            found += self._find_batch(pictures[start : start + _BATCH])
        return found

    def _find_batch(self, pictures: Sequence[npt.NDArray[np.uint8]]) -> list[Detections]:
        prepared = [
            prepare(DecodedImage(picture, picture.shape[1], picture.shape[0]), self.card.prepare_spec)
            for picture in pictures
        ]
        answers = self._session.run(self._outputs, {self.card.input_name: np.stack([array for array, _ in prepared])})
        tensors = tuple(tensor_from_numpy(*pair) for pair in zip(self._outputs, answers, strict=True))
        response = InferResponse(self._name, "1", tensors)
        found = []
        for row, (_, geometry) in enumerate(prepared):
            result = parse(self.card, response, row, geometry)
            if not isinstance(result, Detections):
                raise TypeError(f"model {self._name!r} is no detector")
            found.append(result)
        return found


HELD_OUT_SEED = 3
LEAST_SCORE = 0.05
REASONABLE_VISIBLE, REASONABLE_HEIGHT = 0.65, 1 / 20


@dataclass(frozen=True, slots=True)
class Judged:
    """One scene: its scenario, its height in pixels, what it shows and what was found."""

    scenario: str
    height: int
    frame: FrameTruth
    found: Detections


def judge(seed: int, count: int, *, size: tuple[int, int] = (640, 360), onnx: Path | None = None) -> list[Judged]:
    """The seed's first scenes, count by scenario, and what the model finds in them."""
    cv2.setNumThreads(1)
    detector = StreetDetector(onnx=onnx)
    options = dataclasses.replace(detector.card.layout_options, pre_cluster_threshold=LEAST_SCORE)
    detector.card = dataclasses.replace(detector.card, layout_options=options)
    judged = []
    for number in range(count):
        for scenario in SCENARIOS:
            picture, truth = make_scene(seed, number, size=size, scenario=scenario)
            judged.append(Judged(scenario, size[1], truth, detector.find([picture])[0]))
    return judged


def truth_of(frame: FrameTruth) -> Truth:
    """The renderer's truth as the evaluation takes it."""
    return Truth(frame.xyxy, frame.class_id, frame.is_ignored)


def reasonable_truth_of(scene: Judged) -> Truth:
    """Less strict, after CityPersons' "reasonable" set: what is hidden or small beyond that is ignored too."""
    frame = scene.frame
    is_low = frame.xyxy[:, 3] - frame.xyxy[:, 1] < REASONABLE_HEIGHT * scene.height
    is_hidden = frame.visible < REASONABLE_VISIBLE
    return Truth(frame.xyxy, frame.class_id, frame.is_ignored | is_low | is_hidden)


def precision_of(scenes: Sequence[Judged], truth_of_scene: Callable[[Judged], Truth] | None = None) -> AveragePrecision:
    """At an IoU of 0.5, over the three classes. truth_of_scene: what counts; the renderer's own rule without it."""
    truth = [truth_of(scene.frame) if truth_of_scene is None else truth_of_scene(scene) for scene in scenes]
    return average_precision(truth, [scene.found for scene in scenes], class_count=len(LABELS))


def _row(name: str, scenes: Sequence[Judged], truth_of_scene: Callable[[Judged], Truth] | None = None) -> str:
    result = precision_of(scenes, truth_of_scene)
    by_class = "  ".join("     -" if value is None else f"{value:6.4f}" for value in result.by_class)
    truth = [truth_of(scene.frame) if truth_of_scene is None else truth_of_scene(scene) for scene in scenes]
    counted = sum(int((~boxes.ignored).sum()) for boxes in truth)
    return f"{name:10} {len(scenes):6} {counted:7} {result.mean:8.4f}   {by_class}"


def main() -> None:
    """Prints a table: all scenarios together, each, and all without what is small or half hidden."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=HELD_OUT_SEED)
    parser.add_argument("--scenes", type=int, default=120, help="of each scenario")
    parser.add_argument("--size", default="640x360")
    parser.add_argument("--onnx", type=Path, help="another file than the shipped one")
    chosen = parser.parse_args()
    width, height = (int(side) for side in chosen.size.split("x"))
    started = time.perf_counter()
    scenes = judge(chosen.seed, chosen.scenes, size=(width, height), onnx=chosen.onnx)
    print_line(f"seed {chosen.seed}, {chosen.size}, mAP@0.5; {time.perf_counter() - started:.0f} s")
    print_line(f"{'':10} {'scenes':>6} {'objects':>7} {'all':>8}   " + "  ".join(f"{label:>6.6}" for label in LABELS))
    print_line(_row("all", scenes))
    for scenario in SCENARIOS:
        print_line(_row(scenario, [scene for scene in scenes if scene.scenario == scenario]))
    print_line(_row("reasonable", scenes, reasonable_truth_of))


if __name__ == "__main__":
    main()
