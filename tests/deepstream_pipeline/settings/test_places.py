"""Which files a source's uri stands for."""

from pathlib import Path

import pytest

from deepstream_pipeline.decode.uri import FILE_SUFFIXES
from deepstream_pipeline.settings.places import PlaceRefused, places


def names(uri: str, folder: Path) -> list[str]:
    return [Path(one).name for one in places(uri, folder)]


def test_folder_holds_every_file_that_opens_when_it_is_named(tmp_path: Path) -> None:
    """Whatever suffix makes an address a file makes a file of a folder a source, in any case of letters."""
    for suffix in FILE_SUFFIXES:
        (tmp_path / f"clip-{suffix[1:]}{suffix.upper()}").touch()
    (tmp_path / "notes.txt").touch()
    assert len(names(".", tmp_path)) == len(FILE_SUFFIXES)
    assert {".dav", ".mxf", ".ivf", ".obu", ".asf", ".ogg"} <= set(FILE_SUFFIXES)


@pytest.mark.parametrize("folder", ["site [1]", "a*b", "what?", "plain"])
def test_name_of_the_settings_folder_is_no_pattern(tmp_path: Path, folder: str) -> None:
    """A relative pattern is looked for in that folder alone, whatever characters its name has."""
    for one in (folder, "site 1", "a-b", "whats"):
        (tmp_path / one).mkdir(exist_ok=True)
        (tmp_path / one / "clip-1.mp4").touch()
    found = places("clip*.mp4", tmp_path / folder)
    assert found == (str(tmp_path / folder / "clip-1.mp4"),)


def test_pattern_passes_over_folders_that_it_matches(tmp_path: Path) -> None:
    """A folder whose name looks like a video file is none."""
    (tmp_path / "clip-1.mp4").touch()
    (tmp_path / "clip-2.mp4").mkdir()
    assert names("clip*.mp4", tmp_path) == ["clip-1.mp4"]
    with pytest.raises(PlaceRefused, match="no video file is named like"):
        places("*-2.mp4", tmp_path)
