"""Scenes and clips as files: `python -m deploy.models.street.render --scenes 500 --seed 7 --out DIR`.

DIR gets 000000.jpg … and annotations.json, in COCO's format; what is ignored (see MODEL.md of the model `street`) is
`iscrowd` there. With --clip FILE.mp4, FILE.json beside it tells boxes and tracks of every frame, the line, and who
crosses it when.
"""

import argparse
import re
from pathlib import Path

import cv2

from deploy.models.street.clip import write_clip
from deploy.models.street.evaluate import truth_of
from deploy.models.street.scene import SCENARIOS, make_scene
from deploy.models.street.stage import LABELS, Progress
from penstock.vision.accuracy import Truth, write_annotations

_NAMES = "[0-9]" * 6 + ".jpg"
_SIZE = re.compile(r"([1-9][0-9]{1,3})x([1-9][0-9]{1,3})")
_QUALITY = 95  # what the drawn camera's own JPEG did to the picture is in it already


def write_scenes(folder: Path, count: int, seed: int, *, size: tuple[int, int], scenarios: tuple[str, ...]) -> None:
    """count pictures, the scenarios in turn, and their annotations.json. size: (width, height).

    Pictures of an earlier call go: annotations.json would not know them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for earlier in folder.glob(_NAMES):
        earlier.unlink()
    truth: dict[str, Truth] = {}
    progress = Progress(count, "scenes")
    for number in range(count):
        picture, seen = make_scene(seed, number, size=size, scenario=scenarios[number % len(scenarios)])
        name = f"{number:06d}.jpg"
        cv2.imwrite(str(folder / name), picture, [cv2.IMWRITE_JPEG_QUALITY, _QUALITY])
        truth[name] = truth_of(seen)
        progress.reached(number + 1)
    write_annotations(folder, truth, labels=LABELS, sizes=dict.fromkeys(truth, size))


def main() -> None:
    """Renders as the command line says."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--size", default="640x360")
    parser.add_argument("--scenario", choices=SCENARIOS, help="one only; without it all in turn, clips plain")
    parser.add_argument("--scenes", type=int, help="how many pictures; needs --out")
    parser.add_argument("--out", type=Path, help="the folder for them")
    parser.add_argument("--clip", type=Path, help="FILE.mp4: a video instead, with FILE.json beside it")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--fps", type=float, default=15.0)
    chosen = parser.parse_args()
    sides = _SIZE.fullmatch(chosen.size)
    if sides is None:
        parser.error(f"--size is {chosen.size!r}; it looks like 640x360")
    if chosen.scenes is not None and chosen.scenes < 1:
        parser.error(f"--scenes is {chosen.scenes}; it must be 1 or more")
    if (chosen.clip is None) == (chosen.scenes is None or chosen.out is None):
        parser.error("say --scenes N --out DIR, or --clip FILE.mp4, one of the two")
    width, height = int(sides[1]), int(sides[2])
    if chosen.clip is not None:
        scenario = chosen.scenario or "plain"
        write_clip(chosen.clip, chosen.seed, chosen.seconds, chosen.fps, size=(width, height), scenario=scenario)
    else:
        scenarios = (chosen.scenario,) if chosen.scenario else SCENARIOS
        write_scenes(chosen.out, chosen.scenes, chosen.seed, size=(width, height), scenarios=scenarios)


if __name__ == "__main__":
    main()
