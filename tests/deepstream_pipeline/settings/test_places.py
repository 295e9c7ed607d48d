"""Which files a source's uri refers to."""

from pathlib import Path

import pytest

from penstock_video.decode.uri import FILE_SUFFIXES
from penstock_video.settings.sources import InvalidSourceUri, expanded_uris


def names(uri: str, folder: Path) -> list[str]:
    return [Path(one).name for one in expanded_uris(uri, folder)]


def test_folder_holds_every_file_that_opens_when_it_is_named(tmp_path: Path) -> None:
    """A folder's sources are the files with a suffix of video files, in upper or lower case."""
    for suffix in FILE_SUFFIXES:
        (tmp_path / f"clip-{suffix[1:]}{suffix.upper()}").touch()
    (tmp_path / "notes.txt").touch()
    assert len(names(".", tmp_path)) == len(FILE_SUFFIXES)
    assert {".dav", ".mxf", ".ivf", ".obu", ".asf", ".ogg"} <= set(FILE_SUFFIXES)


@pytest.mark.parametrize("folder", ["site [1]", "a*b", "what?", "plain"])
def test_name_of_the_settings_folder_is_no_pattern(tmp_path: Path, folder: str) -> None:
    """A relative pattern is searched only in that folder, even if the folder's name has pattern characters."""
    for one in (folder, "site 1", "a-b", "whats"):
        (tmp_path / one).mkdir(exist_ok=True)
        (tmp_path / one / "clip-1.mp4").touch()
    found = expanded_uris("clip*.mp4", tmp_path / folder)
    assert found == (str(tmp_path / folder / "clip-1.mp4"),)


def test_pattern_passes_over_folders_that_it_matches(tmp_path: Path) -> None:
    """A folder with a name like a video file is not a source."""
    (tmp_path / "clip-1.mp4").touch()
    (tmp_path / "clip-2.mp4").mkdir()
    assert names("clip*.mp4", tmp_path) == ["clip-1.mp4"]
    with pytest.raises(InvalidSourceUri, match="no video file matches"):
        expanded_uris("*-2.mp4", tmp_path)
