"""The picture that `people` and `fastestdet` are checked with: three people who are drawn, so that it is ours to give.

    python -m deploy.models.drawn_people golden.jpg

Both find all three, FastestDet at 0.92 each. The colours are strong, so that red and blue in each other's place show:
two of FastestDet's scores fall by 0.014 and 0.027 then, where golden.json allows 0.01.
"""

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import cv2
import numpy as np
import numpy.typing as npt

Picture = npt.NDArray[np.uint8]
Color = tuple[int, int, int]  # blue, green, red

WIDTH, HEIGHT, GROUND_Y = 384, 288, 200
SKY, GRASS, SHOE, HAIR = (215, 170, 110), (70, 150, 90), (25, 25, 25), (20, 30, 60)


@dataclass(frozen=True, slots=True)
class Person:
    """Someone who faces us. centre_x, top, height: pixels; the body's own measures are in hundredths of the height."""

    centre_x: int
    top: int
    height: int
    coat: Color
    trousers: Color
    skin: Color

    def at(self, x: float, y: float) -> tuple[int, int]:
        scale = self.height / 100
        return round(self.centre_x + x * scale), round(self.top + y * scale)

    def size(self, hundredths: float) -> int:
        return int(hundredths * self.height / 100)


PEOPLE = (
    Person(90, 70, 150, coat=(30, 30, 190), trousers=(120, 60, 30), skin=(130, 165, 220)),
    Person(200, 90, 130, coat=(190, 80, 20), trousers=(40, 40, 40), skin=(110, 145, 205)),
    Person(310, 60, 160, coat=(40, 170, 220), trousers=(60, 30, 90), skin=(90, 125, 180)),
)


def draw() -> Picture:
    """(288, 384, 3) BGR."""
    picture = np.full((HEIGHT, WIDTH, 3), SKY, np.uint8)
    picture[GROUND_Y:] = GRASS
    for person in PEOPLE:
        _draw_limbs(picture, person)
        _draw_body(picture, person)
    return np.asarray(cv2.GaussianBlur(picture, (3, 3), 0), np.uint8)


def _draw_limbs(picture: Picture, person: Person) -> None:
    for side in (-1, 1):
        leg = [(1, 48), (13, 48), (11, 97), (4, 97)]
        arm = [(11, 19), (16, 21), (20, 52), (15, 53)]
        _fill(picture, person, [(side * x, y) for x, y in leg], person.trousers)
        shoe = (person.size(6), person.size(2.5))
        cv2.ellipse(picture, person.at(side * 8, 98), shoe, 0, 0, 360, SHOE, -1, cv2.LINE_AA)
        _fill(picture, person, [(side * x, y) for x, y in arm], person.coat)
        cv2.circle(picture, person.at(side * 17.5, 54), person.size(3), person.skin, -1, cv2.LINE_AA)


def _draw_body(picture: Picture, person: Person) -> None:
    coat = [(-8, 17), (8, 17), (15, 21), (13, 52), (-13, 52), (-15, 21)]
    _fill(picture, person, coat, person.coat)
    cv2.rectangle(picture, person.at(-3, 13), person.at(3, 19), person.skin, -1)
    face, hair = (person.size(6), person.size(8)), (person.size(6.5), person.size(6))
    cv2.ellipse(picture, person.at(0, 8), face, 0, 0, 360, person.skin, -1, cv2.LINE_AA)
    cv2.ellipse(picture, person.at(0, 5), hair, 0, 180, 360, HAIR, -1, cv2.LINE_AA)


def _fill(picture: Picture, person: Person, corners: Sequence[tuple[float, float]], color: Color) -> None:
    points = np.array([person.at(x, y) for x, y in corners], np.int32)
    cv2.fillConvexPoly(picture, points, color, cv2.LINE_AA)


def main() -> None:
    """Writes the file that is named on the command line."""
    is_encoded, encoded = cv2.imencode(".jpg", draw(), [cv2.IMWRITE_JPEG_QUALITY, 85])
    if not is_encoded:
        raise SystemExit("OpenCV could not encode the picture")
    Path(sys.argv[1]).write_bytes(encoded.tobytes())


if __name__ == "__main__":
    main()
