"""Which picture files a command line means, what they are, and where their drawn twins go."""

from collections.abc import Sequence
from itertools import chain, count
from pathlib import Path

from penstock.engines.torch_serving.picture_header import sniff

SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp"})


class NoPictures(Exception):
    """A path of the command line has no picture. The text is for a person."""


def pictures_of(path: Path) -> list[Path]:
    """The file itself, or the pictures that a folder holds (not its sub-folders), by name. Raises NoPictures."""
    try:
        return _pictures_of(path)
    except OSError as error:
        raise NoPictures(f"{path} cannot be read ({error.strerror}): let this user read it") from error


def _pictures_of(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise NoPictures(f"there is no file or folder {path}: check the name")
    found = sorted(item for item in path.iterdir() if item.suffix.lower() in SUFFIXES and item.is_file())
    if not found:
        raise NoPictures(f"the folder {path} holds no pictures ({', '.join(sorted(SUFFIXES))})")
    return found


def content_type_of(data: bytes) -> str:
    """The media type by the first bytes; application/octet-stream, which the gateway refuses, for all others."""
    found = sniff(data)
    return "application/octet-stream" if found is None else f"image/{found}"


def drawn_paths(draw: Path, pictures: Sequence[Path]) -> list[Path]:
    """Where each picture's drawing goes, all different.

    draw: a folder (there is one, or the name has no suffix): the pictures' own names in it; else a file: itself for one
    picture, NAME-1.jpg, NAME-2.jpg and so on for several.
    """
    if means_folder(draw):
        return [draw / name for name in _distinct_names(pictures)]
    if len(pictures) == 1:
        return [draw]
    return [draw.with_stem(f"{draw.stem}-{number}") for number in range(1, len(pictures) + 1)]


def means_folder(draw: Path) -> bool:
    """Whether the drawings go into it and not to it: there is such a folder, or the name has no suffix."""
    return draw.is_dir() or not draw.suffix


def _distinct_names(pictures: Sequence[Path]) -> list[str]:
    """The pictures' names; those of other folders that are the same get a number, those of no known format .jpg."""
    names: list[str] = []
    for path in pictures:
        is_known = path.suffix.lower() in SUFFIXES
        stem, suffix = (path.stem, path.suffix) if is_known else (path.name, ".jpg")
        candidates = chain([f"{stem}{suffix}"], (f"{stem}-{number}{suffix}" for number in count(2)))
        names.append(next(name for name in candidates if name not in names))
    return names
