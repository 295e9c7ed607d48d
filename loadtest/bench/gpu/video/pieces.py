"""What a run is made of: pieces, each a part of a round, in a file of its own, so that a run that was cut goes on."""

import json
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

PARTS = ("nvdec", "streams", "hand-over", "cpu", "faults")
OF_EVERY_CAMERA = ("nvdec", "streams")
ONCE = ("faults",)  # in the first of the rounds


@dataclass(frozen=True, slots=True)
class Piece:
    """part: of PARTS. camera: of clips.CAMERAS. number: of the round, from 1."""

    part: str
    camera: str
    number: int

    @property
    def name(self) -> str:
        """Of its file, and for people."""
        return f"{self.part}-{self.camera}-{self.number}"

    def path(self, out: Path) -> Path:
        """Where it is kept."""
        return out / f"{self.name}.json"


def pieces_of(parts: Sequence[str], cameras: Sequence[str], rounds: Sequence[int]) -> Iterator[Piece]:
    """In order: NVDEC alone first in each round, since what is held is held against it; cameras in an order drawn."""
    for number in rounds:
        for part in (one for one in PARTS if one in parts):
            if part in ONCE and number != min(rounds):
                continue
            of_part = list(cameras if part in OF_EVERY_CAMERA else cameras[:1])
            random.Random(number).shuffle(of_part)
            for camera in of_part:
                yield Piece(part, camera, number)


class Folder:
    """The pieces that are there."""

    def __init__(self, out: Path) -> None:
        self._out = out

    def has(self, piece: Piece) -> bool:
        """Whether it was measured."""
        return piece.path(self._out).is_file()

    def write(self, piece: Piece, found: Mapping[str, Any], conditions: Mapping[str, str]) -> None:
        """Whole or not at all. Raises OSError."""
        self._out.mkdir(parents=True, exist_ok=True)
        body = {"part": piece.part, "camera": piece.camera, "round": piece.number, "conditions": dict(conditions)}
        new = piece.path(self._out).with_suffix(".new")
        new.write_text(json.dumps(body | {"found": dict(found)}, indent=1) + "\n")
        new.replace(piece.path(self._out))

    def all(self) -> list[dict[str, Any]]:
        """Every piece, by part, camera and round. A file that is none is left alone. Raises OSError."""
        found = []
        for path in sorted(self._out.glob("*.json")):
            try:
                body = json.loads(path.read_text())
            except ValueError:
                continue
            if isinstance(body, dict) and {"part", "camera", "round", "found"} <= body.keys():
                found.append(body)
        order = {part: place for place, part in enumerate(PARTS)}
        return sorted(found, key=lambda one: (order.get(one["part"], len(order)), one["camera"], one["round"]))

    def found(self, part: str, camera: str, number: int) -> dict[str, Any] | None:
        """Of that round, else of the last other round that has it."""
        rounds = {one["round"]: one["found"] for one in self.all() if (one["part"], one["camera"]) == (part, camera)}
        return rounds.get(number) or (rounds[max(rounds)] if rounds else None)
