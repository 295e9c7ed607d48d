"""What a run is made of: pieces, each a part of a round, in a file of its own, so that a run that was cut goes on."""

import json
import random
from collections.abc import Iterable, Iterator, Mapping, Sequence
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
    """In order: of each camera NVDEC alone, then at once what is held against it; cameras in an order drawn."""
    for number in rounds:
        drawn = list(cameras)
        random.Random(number).shuffle(drawn)
        yield from (Piece(part, camera, number) for camera in drawn for part in OF_EVERY_CAMERA if part in parts)
        for part in (one for one in PARTS if one in parts and one not in OF_EVERY_CAMERA):
            if part not in ONCE or number == min(rounds):
                yield Piece(part, cameras[0], number)


def left_of(pieces: Iterable[Piece], folder: "Folder") -> list[Piece]:
    """Those that are to be measured. NVDEC alone is so again where the streams held against it are: in the same run."""
    pieces = list(pieces)
    streams = {(one.camera, one.number) for one in pieces if one.part == "streams" and not folder.has(one)}
    return [
        one for one in pieces if not folder.has(one) or (one.part == "nvdec" and (one.camera, one.number) in streams)
    ]


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

    def full_at(self) -> int:
        """The most decoders at which a search found the card full, of any camera; 0 where none did."""
        return max((int(one["found"].get("full_at", 0)) for one in self.all()), default=0)

    def found(self, part: str, camera: str, number: int) -> dict[str, Any] | None:
        """Of that round, else of the last other round that has it."""
        rounds = {one["round"]: one["found"] for one in self.all() if (one["part"], one["camera"]) == (part, camera)}
        return rounds.get(number) or (rounds[max(rounds)] if rounds else None)
