"""Landing a folder: at once or not at all, and what a bad disk does to a pull."""

import os
import subprocess
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from penstock.models import model_folder as landing
from penstock.models.catalogue import CatalogueEntry, PullFailed
from penstock.models.model_folder import replace_folder, staging_folder
from penstock.models.pull import pull
from tests.models.conftest import CONTENT, ModelServer
from tests.models.test_pull import left_in_repository, quiet


def folder_with(path: Path, text: str) -> Path:
    """A folder of one file."""
    path.mkdir()
    (path / "file").write_text(text)
    return path


@pytest.fixture(params=["exchange", "two steps"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to replace a folder; the second is for systems without renameat2."""
    if request.param == "two steps":
        monkeypatch.setattr(landing, "_exchange", lambda one, other: False)
    return str(request.param)


def test_land_on_nothing_moves_the_folder(tmp_path: Path) -> None:
    """The first landing is a plain rename."""
    target = tmp_path / "target"
    replace_folder(folder_with(tmp_path / "staged", "new"), target)
    assert (target / "file").read_text() == "new"
    assert not (tmp_path / "staged").exists()


def test_land_on_a_folder_hands_the_old_one_back(way: str, tmp_path: Path) -> None:
    """The new content is in place, the old one where the new one was staged."""
    target, staged = folder_with(tmp_path / "target", "old"), folder_with(tmp_path / "staged", "new")
    replace_folder(staged, target)
    assert (target / "file").read_text() == "new"
    assert (staged / "file").read_text() == "old"
    assert sorted(os.listdir(tmp_path)) == ["staged", "target"]


def test_land_that_fails_half_way_puts_the_old_folder_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without renameat2, a second step that fails undoes the first."""
    target, staged = folder_with(tmp_path / "target", "old"), folder_with(tmp_path / "staged", "new")
    monkeypatch.setattr(landing, "_exchange", lambda one, other: False)
    rename = Path.rename

    def failing(self: Path, to: Path) -> Path:
        if self == staged:
            raise OSError(28, "No space left on device")
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", failing)
    with pytest.raises(OSError, match="No space left"):
        replace_folder(staged, target)
    assert (target / "file").read_text() == "old"


def test_staging_folder_leaves_those_of_models_with_longer_names(tmp_path: Path) -> None:
    """Another process may fill the folder of `x.v2` at this moment; what a killed one left of `x` goes."""
    left = tmp_path / "staging" / "x.abcd1234"
    left.mkdir(parents=True)
    with staging_folder(tmp_path / "staging", "x.v2") as other, staging_folder(tmp_path / "staging", "x"):
        assert other.is_dir()
        assert not left.exists()


def test_staging_folder_after_an_error_is_gone(tmp_path: Path) -> None:
    """Whatever happens inside, nothing stays."""

    def fail_inside() -> None:
        with staging_folder(tmp_path / "staging", "x") as staged:
            (staged / "file").write_text("")
            raise RuntimeError("inside")

    with pytest.raises(RuntimeError, match="inside"):
        fail_inside()
    assert os.listdir(tmp_path / "staging") == []


@pytest.fixture
def mounted(tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Makes file systems of 512 KiB, empty; skips where they cannot be mounted."""
    folders: list[Path] = []

    def mount(name: str) -> Path:
        folder = tmp_path / name
        folder.mkdir(parents=True, exist_ok=True)
        command = ["mount", "-t", "tmpfs", "-o", "size=512k", "tmpfs", str(folder)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode != 0:
            pytest.skip(f"a small file system cannot be mounted here: {done.stderr.strip()}")
        folders.append(folder)
        return folder

    yield mount
    for folder in reversed(folders):
        subprocess.run(["umount", str(folder)], check=True)


def test_pull_into_a_read_only_home_says_what_to_do(
    entry: CatalogueEntry, mounted: Callable[[str], Path], model_server: ModelServer
) -> None:
    """A home on a read-only file system is refused in one sentence, before anything is downloaded."""
    home = mounted("home")
    subprocess.run(["mount", "-o", "remount,ro", str(home)], check=True)
    with pytest.raises(
        PullFailed, match=r"cannot be written \(Read-only file system\): make .*home writable or choose"
    ):
        pull(entry, source=None, home=home, progress=quiet)
    assert model_server.requests == []


def test_pull_where_the_home_is_a_file_says_what_to_do(entry: CatalogueEntry, tmp_path: Path) -> None:
    """A home that cannot be a folder is refused in one sentence."""
    home = tmp_path / "home"
    home.write_text("")
    with pytest.raises(PullFailed, match=r"home/downloads cannot be written \(Not a directory\)"):
        pull(entry, source=None, home=home, progress=quiet)


def test_pull_into_a_repository_on_another_file_system_is_refused(
    entry: CatalogueEntry, mounted: Callable[[str], Path], tmp_path: Path
) -> None:
    """Where landing at once is impossible nothing lands, and the sentence says how to mount it."""
    repository = mounted("home/models")
    with pytest.raises(PullFailed, match=r"on two file systems, so nothing can land at once: mount .*home as a whole"):
        pull(entry, source=None, home=tmp_path / "home", progress=quiet)
    assert os.listdir(repository) == []


@pytest.mark.parametrize("is_remote", [True, False], ids=["http", "file"])
def test_pull_onto_a_full_disk_gives_the_room_back(
    is_remote: bool, entry: CatalogueEntry, mounted: Callable[[str], Path], tmp_path: Path
) -> None:
    """A full disk is one sentence with the figure; neither a model nor a partial download keeps the disk full."""
    small_disk = mounted("small")
    file = tmp_path / "FastestDet.onnx"
    file.write_bytes(CONTENT)
    with pytest.raises(PullFailed, match=r"the disk of .* is full: free 0\.7 MB or choose another with PENSTOCK_HOME"):
        pull(entry, source=None if is_remote else file, home=small_disk, progress=quiet)
    assert left_in_repository(small_disk) == []
    assert os.listdir(small_disk / "downloads") == ["fastestdet.lock"]
    (small_disk / "filler").write_bytes(bytes(os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_bsize))
    with pytest.raises(PullFailed, match=r"the disk of .* is full: free 0\.7 MB"):  # not even the labels fit
        pull(entry, source=None, home=small_disk, progress=quiet)


def test_replace_folder_never_shows_a_gap_to_a_reader(tmp_path: Path) -> None:
    """A reader that opens the file again and again, during twenty replacements, always finds it."""
    target = folder_with(tmp_path / "target", "0")
    is_over = threading.Event()
    failures: list[OSError] = []

    def read() -> None:
        while not is_over.is_set():
            try:
                (target / "file").read_text()
            except OSError as error:
                failures.append(error)

    reader = threading.Thread(target=read)
    reader.start()
    for number in range(20):
        with staging_folder(tmp_path / "staging", "x") as staged:
            (staged / "file").write_text(str(number))
            replace_folder(staged, target)
    is_over.set()
    reader.join()
    assert failures == []
