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


def test_folder_that_others_can_write_to_is_refused(tmp_path: Path) -> None:
    """A compiled program is code."""
    tmp_path.chmod(0o777)
    with pytest.raises(OSError, match="can be written by other users"):
        opened(tmp_path, "one", [])


def test_programs_used_longest_ago_are_removed(tmp_path: Path) -> None:
    """Until the rest fits; what a killed process left is removed too, and a lock without a file."""
    made: list[str] = []
    for number, key in enumerate(("old", "newer", "newest")):
        opened(tmp_path, key, made)
        os.utime(tmp_path / f"{key}.compiled.pt2", (number, number))
    abandoned, lock = tmp_path / "new-abandoned", tmp_path / "gone.lock"
    abandoned.mkdir()
    lock.touch()
    for path in (abandoned, lock):
        os.utime(path, (1, 1))
    evict(tmp_path, tmp_path / "newest.compiled.pt2", max_bytes=len("newest") + len("newer"))
    assert sorted(path.name for path in tmp_path.glob("*.pt2")) == ["newer.compiled.pt2", "newest.compiled.pt2"]
    assert not abandoned.exists()
    assert not lock.exists()


def test_process_that_waits_too_long_for_another_says_so(tmp_path: Path) -> None:
    """It is a sentence, with the file of the lock."""
    with package_cache._locked(tmp_path / "one.lock"):  # noqa: SIM117  in order
        with (
            pytest.raises(OSError, match=r"another process has .*one\.lock"),
            package_cache._locked(tmp_path / "one.lock", timeout_s=0.0),
        ):
            pass


def test_folder_is_the_users_or_the_given_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the variable, else in the user's cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", "/cache")
    assert cache_folder() == Path("/cache/penstock/programs")
    monkeypatch.setenv(FOLDER_VARIABLE, "/programs")
    assert cache_folder() == Path("/programs")
