"""The pieces of a run, one JSON file each, so that a run that was cut can be continued."""

import json
import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GOOGLENET, YOLOX = "googlenet-torch-uint8-random", "yolox-s-top-torch-random"


@dataclass(frozen=True, slots=True)
class StreamLoad:
    """What happens to the frames of streams. interval: frames between two inferred ones, which are tracked. in_time:
    share of the answers that must come within the bound. cameras: of clips.CAMERAS; empty for all. goal: streams, 0 for
    the camera's. measure: the targets' name of it, empty for the camera's. programs: video programs; fewer make larger
    batches."""

    model: str
    interval: int = 0
    in_time: float = 0.99
    cameras: tuple[str, ...] = ()
    goal: int = 0
    measure: str = ""
    programs: int = 6


_FULL_HD = ("h264-1080p",)
LOADS = {
    "streams": StreamLoad(GOOGLENET),
    "detector": StreamLoad(YOLOX, 0, 0.95, _FULL_HD, 50, "streams_1080p30_detector", 3),
    "tracked": StreamLoad(YOLOX, 2, 0.95, _FULL_HD, 100, "streams_1080p30_detector_tracked", 3),
}
PARTS = ("nvdec", *LOADS)
Body = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class BenchPiece:
    """part: of PARTS. camera: of clips.CAMERAS. number: of the round, from 1."""

    part: str
    camera: str
    number: int

    @property
    def name(self) -> str:
        """Of its file, and for people."""
        return f"{self.part}-{self.camera}-{self.number}"


def pieces_of(parts: Sequence[str], cameras: Sequence[str], rounds: Sequence[int]) -> list[BenchPiece]:
    """In order: for each camera NVDEC alone, then the streams compared with it; cameras in random order."""
    found = []
    for number in rounds:
        drawn = random.Random(number).sample(list(cameras), len(cameras))
        found += [
            BenchPiece(part, camera, number)
            for camera in drawn
            for part in PARTS
            if part in parts and _has(part, camera)
        ]
    return found


def _has(part: str, camera: str) -> bool:
    cameras = LOADS[part].cameras if part in LOADS else ()
    return not cameras or camera in cameras


class Folder:
    """The measured pieces."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def left_of(self, pieces: Iterable[BenchPiece]) -> list[BenchPiece]:
        """The pieces to measure. NVDEC alone is repeated if the streams compared with it are still to be measured."""
        pieces = list(pieces)
        missing = {one for one in pieces if not self.has(one)}
        of_streams = {(one.camera, one.number) for one in missing if one.part in LOADS}
        return [
            one for one in pieces if one in missing or (one.part == "nvdec" and (one.camera, one.number) in of_streams)
        ]

    def has(self, piece: BenchPiece) -> bool:
        """Whether it was measured."""
        return self._path(piece).is_file()

    def write(self, piece: BenchPiece, found: Mapping[str, Any], conditions: Mapping[str, str]) -> None:
        """Whole or not at all. Raises OSError."""
        self._out.mkdir(parents=True, exist_ok=True)
        body = {"part": piece.part, "camera": piece.camera, "round": piece.number, "conditions": dict(conditions)}
        new = self._path(piece).with_suffix(".new")
        new.write_text(json.dumps(body | {"found": dict(found)}, indent=1) + "\n")
        new.replace(self._path(piece))

    def all(self) -> list[dict[str, Any]]:
        """Every piece, by part, camera and round. Other files are ignored. Raises OSError."""
        found = []
        for path in sorted(self._out.glob("*.json")):
            try:
                body = json.loads(path.read_text())
            except ValueError:
                continue
            if isinstance(body, dict) and body.get("part") in PARTS and {"camera", "round", "found"} <= body.keys():
                found.append(body)
        return sorted(found, key=lambda one: (PARTS.index(one["part"]), one["camera"], one["round"]))

    def full_at(self) -> int:
        """The most decoders at which a search found the card full, of any camera; 0 if none did."""
        return max((int(one["found"].get("full_at", 0)) for one in self.all()), default=0)

    def found(self, part: str, camera: str, number: int) -> dict[str, Any] | None:
        """Of that round, else of the last round that has it."""
        rounds = {one["round"]: one["found"] for one in self.all() if (one["part"], one["camera"]) == (part, camera)}
        return rounds.get(number) or (rounds[max(rounds)] if rounds else None)

    def _path(self, piece: BenchPiece) -> Path:
        return self._out / f"{piece.name}.json"
