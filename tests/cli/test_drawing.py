"""`penstock infer --draw`: the drawings are written to the files that were named."""

from pathlib import Path

import cv2
import pytest

from penstock.vision.drawing import color_of
from tests.cli.conftest import Call, StandIn, jpeg


def infer_and_draw(penstock: Call, stand_in: StandIn, draw: Path, *pictures: Path) -> str:
    """Runs the command; its exit code and standard error."""
    answer = penstock("infer", "people", *pictures, "--draw", draw, "--url", stand_in.url)
    return f"{answer.exit_code} {answer.stderr}"


@pytest.fixture
def photos(tmp_path: Path) -> list[Path]:
    """Two pictures of one name in two folders, and a third."""
    files = [tmp_path / name for name in ("a/photo.jpg", "b/photo.jpg", "b/photo-2.jpg")]
    for file in files:
        file.parent.mkdir(exist_ok=True)
        file.write_bytes(jpeg())
    return files


def test_draw_one_picture_writes_the_file_that_was_named(
    penstock: Call, stand_in: StandIn, photos: list[Path], tmp_path: Path
) -> None:
    """The drawing has the picture's size and the boxes, in the format of its name."""
    out = tmp_path / "out.png"
    assert infer_and_draw(penstock, stand_in, out, photos[0]) == "0 "
    drawn = cv2.imread(str(out))
    assert drawn is not None
    assert drawn.shape == (100, 100, 3)
    assert tuple(drawn[60, 10]) == color_of(0)
    assert out.read_bytes().startswith(b"\x89PNG")


def test_draw_several_pictures_numbers_the_files(
    penstock: Call, stand_in: StandIn, photos: list[Path], tmp_path: Path
) -> None:
    """Named as one file, several drawings get numbers, and the command says which."""
    words = ("infer", "people", *photos[:2], "--draw", tmp_path / "out.jpg", "--url", stand_in.url)
    drawn = [f"drawn: {tmp_path / name}" for name in ("out-1.jpg", "out-2.jpg")]
    answer = penstock(*words)
    assert (answer.exit_code, answer.stderr) == (0, "")
    assert [line for line in answer.stdout.splitlines() if line.startswith("drawn")] == drawn
    answer = penstock(*words, "--json")
    assert (answer.stdout.count("\n"), answer.stderr.splitlines()) == (2, drawn)
    assert sorted(path.name for path in tmp_path.glob("out*")) == ["out-1.jpg", "out-2.jpg"]


def test_draw_into_a_folder_keeps_the_names_apart(
    penstock: Call, stand_in: StandIn, photos: list[Path], tmp_path: Path
) -> None:
    """Pictures of one name do not overwrite each other, nor one that has such a name; an unknown suffix gets .jpg."""
    photos.append(tmp_path / "scan.tmp")
    photos[-1].write_bytes(jpeg())
    assert infer_and_draw(penstock, stand_in, tmp_path / "out", *photos) == "0 "
    drawn = sorted(path.name for path in (tmp_path / "out").iterdir())
    assert drawn == ["photo-2-2.jpg", "photo-2.jpg", "photo.jpg", "scan.tmp.jpg"]


def test_draw_over_the_picture_itself_is_refused(penstock: Call, stand_in: StandIn, photos: list[Path]) -> None:
    """A picture is never overwritten by its drawing, and nothing is asked of the gateway before that is clear."""
    before = photos[0].read_bytes()
    said = infer_and_draw(penstock, stand_in, photos[0].parent, photos[0])
    assert said.startswith("2 penstock: --draw: ")
    assert "is one of the pictures themselves" in said
    assert photos[0].read_bytes() == before
    assert stand_in.asked == []


@pytest.mark.parametrize("name", ["out.xyz", "out.gif"])
def test_draw_into_an_unknown_format_is_refused(
    penstock: Call, stand_in: StandIn, photos: list[Path], tmp_path: Path, name: str
) -> None:
    """A file name without a supported suffix is rejected before any request is sent."""
    said = infer_and_draw(penstock, stand_in, tmp_path / name, photos[0])
    assert said == f"2 penstock: --draw: {name!r} is not a picture's name: end it with .jpg, .png or .webp\n"
    assert stand_in.asked == []


@pytest.mark.parametrize("name", ["absent/out.jpg", "absent/out", "file/out.jpg", "file"])
def test_draw_where_no_folder_is_names_it(
    penstock: Call, stand_in: StandIn, photos: list[Path], tmp_path: Path, name: str
) -> None:
    """A misspelt path is no wish for a tree of folders; nothing is made and nothing asked."""
    (tmp_path / "file").write_text("")
    said = infer_and_draw(penstock, stand_in, tmp_path / name, photos[0])
    assert said.startswith(
        f"2 penstock: --draw: {'' if name == 'file' else 'there is no folder '}{tmp_path / name.split('/')[0]}"
    )
    assert not (tmp_path / "absent").exists()
    assert stand_in.asked == []


def test_draw_that_cannot_be_written_is_one_sentence(
    penstock: Call, stand_in: StandIn, photos: list[Path], tmp_path: Path
) -> None:
    """It fails that picture after its result was printed, and is not called drawn."""
    (tmp_path / "out.jpg").mkdir()
    (tmp_path / "out.jpg" / "photo.jpg").mkdir()
    said = infer_and_draw(penstock, stand_in, tmp_path / "out.jpg", photos[0])
    assert said.startswith("1 penstock: ")
    assert "cannot be written" in said
    assert said.count("\n") == 1


def with_orientation(data: bytes, orientation: int) -> bytes:
    """The JPEG with an EXIF block that says how it is to be turned."""
    entry = b"\x01\x12\x00\x03\x00\x00\x00\x01" + orientation.to_bytes(2, "big") + b"\x00\x00"
    tiff = b"MM\x00\x2a\x00\x00\x00\x08\x00\x01" + entry + b"\x00\x00\x00\x00"
    block = b"Exif\x00\x00" + tiff
    return data[:2] + b"\xff\xe1" + (len(block) + 2).to_bytes(2, "big") + block + data[2:]


def test_draw_turned_picture_is_drawn_upright(penstock: Call, stand_in: StandIn, tmp_path: Path) -> None:
    """EXIF's orientation is applied first: boxes are in the pixels of the picture as a person sees it."""
    photo = tmp_path / "turned.jpg"
    photo.write_bytes(with_orientation(jpeg(width=200, height=100), 6))
    out = tmp_path / "out.png"
    assert infer_and_draw(penstock, stand_in, out, photo) == "0 "
    drawn = cv2.imread(str(out))
    assert drawn is not None
    assert drawn.shape == (200, 100, 3)
    assert tuple(drawn[60, 10]) == color_of(0)
