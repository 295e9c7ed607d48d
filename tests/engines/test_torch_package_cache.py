"""The folder of compiled programs: made once, shared, bounded, and no one else's."""

import os
import threading
from pathlib import Path

import pytest

from penstock.engines.torch_serving import package_cache
from penstock.engines.torch_serving.package_cache import FOLDER_VARIABLE, cache_folder, evict, package_of


def opened(folder: Path, key: str, made: list[str], said: list[str] | None = None) -> bytes:
    """The file's content. made: gets the key if it had to be made."""

    def make(path: Path) -> None:
        made.append(key)
        path.write_bytes(key.encode())

    with package_of(folder, key, make, (said if said is not None else []).append) as package:
        return package.read_bytes()


def file_of(folder: Path, key: str) -> Path:
    """The compiled file of that key."""
    (file,) = folder.glob(f"{key}.*.compiled.pt2")
    return file


def test_program_is_compiled_once_and_said_once(tmp_path: Path) -> None:
    """The second opening takes the file; another key is another file."""
    made: list[str] = []
    said: list[str] = []
    assert [opened(tmp_path / "cache", key, made, said) for key in ("one", "one", "two")] == [b"one", b"one", b"two"]
    assert (made, len(said)) == (["one", "two"], 2)
    assert "AOTInductor, once" in said[0]
    assert (tmp_path / "cache").stat().st_mode & 0o777 == 0o700


def test_instances_that_start_together_compile_once(tmp_path: Path) -> None:
    """The others wait for the one that has begun."""
    made: list[str] = []
    threads = [threading.Thread(target=opened, args=(tmp_path, "one", made)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert made == ["one"]


def test_failed_compilation_leaves_nothing(tmp_path: Path) -> None:
    """And the next one tries again."""

    def fail(path: Path) -> None:
        path.write_bytes(b"half")
        raise RuntimeError("no C++ compiler")

    with pytest.raises(RuntimeError, match="no C"), package_of(tmp_path, "one", fail, print):
        pass
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    assert opened(tmp_path, "one", []) == b"one"


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_folder_that_others_can_write_to_is_refused(tmp_path: Path, mode: int) -> None:
    """A compiled program is code."""
    tmp_path.chmod(mode)
    with pytest.raises(OSError, match="can be written by other users"):
        opened(tmp_path, "one", [])


def test_folder_that_others_can_replace_is_refused(tmp_path: Path) -> None:
    """Also behind a link; a folder such as /tmp, in which each user can remove only own files, is accepted."""
    (tmp_path / "open").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "open" / "cache")
    (tmp_path / "open").chmod(0o777)
    for folder in (tmp_path / "open" / "cache", tmp_path / "link"):
        with pytest.raises(OSError, match=r"/open can be written by other users, so they can replace"):
            opened(folder, "one", [])
    (tmp_path / "open").chmod(0o1777)
    assert opened(tmp_path / "link", "one", []) == b"one"


@pytest.mark.parametrize("what", ["damaged", "empty", "link", "hard link", "writable", "other name"])
def test_file_that_is_not_as_it_was_made_is_made_again(tmp_path: Path, what: str) -> None:
    """Another user may have put it there before a chmod, or a disk may have lost its end."""
    made: list[str] = []
    cache = tmp_path / "cache"
    opened(cache, "one", made)
    file = file_of(cache, "one")
    if what in ("damaged", "empty"):
        file.write_bytes(b"evil" if what == "damaged" else b"")
    elif what == "link":
        file.rename(tmp_path / "elsewhere")
        file.symlink_to(tmp_path / "elsewhere")
    elif what == "hard link":
        (tmp_path / "elsewhere").hardlink_to(file)
    elif what == "writable":
        file.chmod(0o666)
    else:
        file.rename(cache / f"one.{'0' * 32}.compiled.pt2")
    assert opened(cache, "one", made) == b"one"
    assert made == ["one", "one"]
    assert opened(cache, "one", made) == b"one"
    assert len(made) == 2


def test_programs_used_longest_ago_are_removed(tmp_path: Path) -> None:
    """Until the rest fits; what a killed process left is removed too, and a lock without a file."""
    made: list[str] = []
    for number, key in enumerate(("old", "newer", "newest")):
        opened(tmp_path, key, made)
        os.utime(file_of(tmp_path, key), (number, number))
    abandoned, lock = tmp_path / "new-abandoned", tmp_path / "gone.lock"
    abandoned.mkdir()
    lock.touch()
    for path in (abandoned, lock):
        os.utime(path, (1, 1))
    evict(tmp_path, file_of(tmp_path, "newest"), max_bytes=len("newest") + len("newer"))
    assert sorted(path.name.split(".")[0] for path in tmp_path.glob("*.pt2")) == ["newer", "newest"]
    assert not abandoned.exists()
    assert not lock.exists()


def test_process_that_waits_too_long_for_another_says_so(tmp_path: Path) -> None:
    """It is a sentence, with the file of the lock."""
    with package_cache._locked(tmp_path / "one.lock"):  # noqa: SIM117  in order
        with (
            pytest.raises(OSError, match=r"another process has used .*one\.lock"),
            package_cache._locked(tmp_path / "one.lock", timeout_s=0.0),
        ):
            pass


def test_folder_is_the_users_or_the_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable, else in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/penstock/programs")
    monkeypatch.setenv(FOLDER_VARIABLE, "/programs")
    assert cache_folder() == Path("/programs")
