"""A lock's file lies where no one else can have put it, or there is none."""

import fcntl
import os
import stat
import tempfile
from contextlib import suppress
from pathlib import Path

import pytest

from penstock_video.sources.core_pinning import open_lock

NAME = "a.lock"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """In which they lie; not made yet."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path / f"penstock-{os.getuid()}"


def opened_files() -> set[str]:
    """Their paths, of all that this process has open now."""
    found = set()
    for descriptor in os.listdir("/proc/self/fd"):
        with suppress(FileNotFoundError):  # of another thread, or of this look
            found.add(os.readlink(f"/proc/self/fd/{descriptor}"))
    return found


def is_opened() -> bool:
    """Whether there is a lock to be had; it is given back."""
    descriptor = open_lock(NAME)
    if descriptor is None:
        return False
    fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(descriptor)
    return True


def test_file_is_this_users_alone_and_nothing_a_program_inherits(folder: Path) -> None:
    """With the folder that was made for it; opened anew it is the same one, and the folder is not left open."""
    first, second = open_lock(NAME), open_lock(NAME)
    assert first is not None
    assert second is not None
    assert str(folder) not in opened_files()
    assert os.path.sameopenfile(first, second)
    assert os.path.samestat(os.fstat(first), (folder / NAME).stat())
    assert not os.get_inheritable(first)
    assert [stat.S_IMODE(path.stat().st_mode) for path in (folder, folder / NAME)] == [0o700, 0o600]
    os.close(first)
    os.close(second)


@pytest.mark.parametrize("mode", [0o720, 0o702, 0o777, 0o1777])
def test_folder_in_which_others_may_write_has_no_lock(folder: Path, mode: int) -> None:
    """They could hold it for ever, or put a link there; it is left as it is."""
    folder.mkdir()
    folder.chmod(mode)
    assert not is_opened()
    assert list(folder.iterdir()) == []
    folder.chmod(0o755)
    assert is_opened()


def test_folder_of_another_user_has_no_lock(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever process made it first, under this user's number."""
    owner = os.getuid()
    assert is_opened()
    monkeypatch.setattr(os, "getuid", lambda: owner + 1)
    folder.rename(folder.with_name(f"penstock-{owner + 1}"))
    assert not is_opened()


def test_link_in_the_folders_place_or_the_files_is_not_followed(folder: Path) -> None:
    """Though it leads to what is this user's; a file in the folder's place is none either."""
    elsewhere = folder.with_name("elsewhere")
    elsewhere.mkdir(mode=0o700)
    folder.symlink_to(elsewhere)
    assert not is_opened()
    assert list(elsewhere.iterdir()) == []
    folder.unlink()
    folder.write_text("")
    assert not is_opened()
    folder.unlink()
    folder.mkdir(mode=0o700)
    (folder / NAME).symlink_to(elsewhere / NAME)
    assert not is_opened()
    assert list(elsewhere.iterdir()) == []


def test_nowhere_to_lie_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    """A read-only container."""

    def none() -> str:
        raise FileNotFoundError("No usable temporary directory found")

    monkeypatch.setattr(tempfile, "gettempdir", none)
    assert not is_opened()
