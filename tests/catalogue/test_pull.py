"""Pulls from every kind of source, and what is left when they go wrong."""

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from server.catalogue import source as source_module
from server.catalogue.catalogue import CatalogueEntry
from server.catalogue.errors import PullFailed, WrongContent
from server.catalogue.pull import pull
from tests.catalogue.conftest import CONTENT, ModelServer, entry_of

MODEL = Path("models") / "fastestdet" / "1" / "model.onnx"


def quiet(done_bytes: int) -> None:
    """No progress wanted."""


def left_in_repository(home: Path) -> list[str]:
    """Whatever sits in the repository, and in the staging folder that must be empty too."""
    return sorted(os.listdir(home / "models")) + sorted(os.listdir(home / "staging"))


def write_as(name: str) -> Callable[[Path], Path]:
    """Puts CONTENT under that name in a folder and gives the folder."""

    def write(folder: Path) -> Path:
        (folder / name).write_bytes(CONTENT)
        return folder

    return write


SOURCES: dict[str, Callable[[Path], Path | str]] = {
    "folder with the file's own name": write_as("FastestDet.onnx"),
    "folder with the model's name": write_as("fastestdet.onnx"),
    "the file": lambda folder: write_as("any.bin")(folder) / "any.bin",
    "file address": lambda folder: (write_as("a b.onnx")(folder) / "a b.onnx").as_uri(),
    "file address of the folder": lambda folder: write_as("FastestDet.onnx")(folder).as_uri(),
}


@pytest.mark.parametrize("prepare", SOURCES.values(), ids=SOURCES.keys())
def test_pull_from_this_machine_lands_the_whole_folder(
    prepare: Callable[[Path], Path | str], entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """Folder, file and file:// are understood; the folder is complete, readable by others, and nothing else is left."""
    inputs = tmp_path / "inputs"
    inputs.mkdir()
    source = prepare(inputs)
    home = tmp_path / "home"
    folder = pull(entry, source=source, home=home, progress=quiet)
    assert folder == home / "models" / "fastestdet"
    assert (home / MODEL).read_bytes() == CONTENT
    assert sorted(os.listdir(folder)) == ["1", "MODEL.md", "config.pbtxt", "labels.txt"]
    assert os.listdir(folder / "1") == ["model.onnx"]
    assert folder.stat().st_mode & 0o755 == 0o755
    assert left_in_repository(home) == ["fastestdet"]
    assert os.listdir(home / "downloads") == ["fastestdet.lock"]
    assert model_server.requests == []


@pytest.mark.parametrize("kind", ["catalogue", "address", "address of a folder"])
def test_pull_over_http_reports_growing_progress(
    kind: str, entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """The catalogue's own address, another one, or a folder's; progress grows to the file's size."""
    source = {
        "catalogue": None,
        "address": model_server.url,
        "address of a folder": model_server.url.rpartition("/")[0],
    }
    given = source[kind]
    seen: list[int] = []
    pull(entry, source=given, home=tmp_path, progress=seen.append)
    assert (tmp_path / MODEL).read_bytes() == CONTENT
    assert seen == sorted(seen)
    assert seen[-1] == len(CONTENT)


WRONG = {
    "damaged": (CONTENT[:-1] + b"\0", "has SHA-256"),
    "short": (CONTENT[:1000], "has 1000 bytes, fastestdet as catalogued 700001"),
    "long": (CONTENT + b"!", "has 700002 bytes"),
    "empty": (b"", "has 0 bytes"),
}


@pytest.mark.parametrize(
    ("is_remote", "case"),
    [(False, case) for case in WRONG] + [(True, case) for case in ("damaged", "short", "long")],
)
def test_pull_wrong_file_leaves_nothing_behind(
    is_remote: bool, case: str, entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A file of another size or hash is refused in one sentence; no model, no partial download remains."""
    content, why = WRONG[case]
    model_server.content = content
    file = tmp_path / "FastestDet.onnx"
    file.write_bytes(content)
    home = tmp_path / "home"
    with pytest.raises(WrongContent, match=why):
        pull(entry, source=None if is_remote else file, home=home, progress=quiet)
    assert left_in_repository(home) == []
    assert os.listdir(home / "downloads") == ["fastestdet.lock"]


def test_pull_after_a_broken_connection_goes_on_where_it_stopped(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """What came before the break is kept outside the repository, and only the rest is asked for."""
    model_server.breaks_after = 300_000
    with pytest.raises(PullFailed, match="broke off after 300000 of 700001 bytes: run the same command again"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == []
    model_server.breaks_after = None
    seen: list[int] = []
    pull(entry, source=None, home=tmp_path, progress=seen.append)
    assert model_server.requests == ["", "bytes=300000-"]
    assert seen[0] > 300_000
    assert (tmp_path / MODEL).read_bytes() == CONTENT


def test_pull_where_the_server_cannot_resume_starts_again(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A server that ignores Range costs the first part once more, nothing else."""
    model_server.breaks_after = 300_000
    with pytest.raises(PullFailed):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    model_server.breaks_after, model_server.has_ranges = None, False
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert (tmp_path / MODEL).read_bytes() == CONTENT


@pytest.mark.parametrize(
    "leftover", [b"x" * 1000, b"x" * len(CONTENT), b"x" * (len(CONTENT) + 5)], ids=["part", "whole", "more"]
)
def test_pull_with_rubbish_in_the_partial_file_fetches_afresh(
    leftover: bytes, entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A partial file of other content, whatever its length, is found out by the hash and fetched again at once."""
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / f"{entry.sha256}.partial").write_bytes(leftover)
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert (tmp_path / MODEL).read_bytes() == CONTENT
    assert model_server.requests[-1] == ""


def test_pull_where_the_address_now_has_a_shorter_file_is_refused(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A partial file longer than what the server has now (416) is given up, and so is the server's file."""
    (tmp_path / "downloads").mkdir()
    (tmp_path / "downloads" / f"{entry.sha256}.partial").write_bytes(CONTENT[:5000])
    model_server.content = CONTENT[:1000]
    with pytest.raises(WrongContent, match="has 1000 bytes"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert os.listdir(tmp_path / "downloads") == ["fastestdet.lock"]


def test_pull_not_found_says_how_to_go_on(entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path) -> None:
    """An error status is passed on with the way out."""
    model_server.status, model_server.content = 404, b"gone"
    with pytest.raises(PullFailed, match="answered 404 Not Found: get the file by other means and give it with --from"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == []


def test_pull_silent_server_is_given_up(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A server that stops sending in mid-file is left after the silence limit; what came is kept for the next time."""
    monkeypatch.setattr(source_module, "SILENCE_TIMEOUT_S", 0.2)
    model_server.breaks_after, model_server.hold = 100_000, threading.Event()
    with pytest.raises(PullFailed, match=r"nothing came for 0\.2 s"):
        pull(entry, source=None, home=tmp_path, progress=quiet)
    assert (tmp_path / "downloads" / f"{entry.sha256}.partial").stat().st_size == 100_000
    assert left_in_repository(tmp_path) == []


def test_pull_nobody_listens_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A refused connection is one sentence."""
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    with pytest.raises(PullFailed, match=r"http://127\.0\.0\.1:9/x\.onnx cannot be reached"):
        pull(entry_of("http://127.0.0.1:9/x.onnx"), source=None, home=tmp_path, progress=quiet)


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder / "absent", "there is no .*/absent: give the folder that holds FastestDet.onnx"),
        (lambda folder: folder, "has neither FastestDet.onnx nor fastestdet.onnx: download http"),
    ],
    ids=["absent", "empty folder"],
)
def test_pull_from_a_place_without_the_file_says_what_is_missing(
    make: Callable[[Path], Path], why: str, entry: CatalogueEntry, tmp_path: Path
) -> None:
    """A wrong --from names the file that was looked for."""
    with pytest.raises(PullFailed, match=why):
        pull(entry, source=make(tmp_path), home=tmp_path / "home", progress=quiet)
    assert left_in_repository(tmp_path / "home") == []


def test_pull_again_renews_the_folder_without_a_download(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """A right model file is kept; what surrounds it is the catalogue's again, strays are gone."""
    folder = pull(entry, source=None, home=tmp_path, progress=quiet)
    (folder / "config.pbtxt").write_text("edited")
    (folder / "stray").write_text("")
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert len(model_server.requests) == 1
    assert (folder / "config.pbtxt").read_text() == (entry.folder / "config.pbtxt").read_text()
    assert not (folder / "stray").exists()
    assert (tmp_path / MODEL).read_bytes() == CONTENT


def test_pull_over_a_damaged_model_replaces_it(entry: CatalogueEntry, tmp_path: Path) -> None:
    """A model file that is not the catalogue's is fetched again."""
    pull(entry, source=None, home=tmp_path, progress=quiet)
    (tmp_path / MODEL).write_bytes(b"x" * len(CONTENT))
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert (tmp_path / MODEL).read_bytes() == CONTENT


def test_pull_removes_what_a_killed_pull_staged(entry: CatalogueEntry, tmp_path: Path) -> None:
    """Remains of a pull that was killed do not pile up."""
    remains = tmp_path / "staging" / "fastestdet.old1234"
    remains.mkdir(parents=True)
    (remains / "file").write_text("")
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == ["fastestdet"]


PULL_PROGRAM = """
import sys
from pathlib import Path
from server.catalogue.pull import pull
from tests.catalogue.conftest import entry_of
pull(entry_of(sys.argv[1]), source=None, home=Path(sys.argv[2]), progress=lambda done: None,
     on_wait=lambda: print("waiting", flush=True))
print("done", flush=True)
"""


def start_pull(url: str, home: Path) -> subprocess.Popen[str]:
    """A pull in a process of its own."""
    return subprocess.Popen([sys.executable, "-c", PULL_PROGRAM, url, str(home)], stdout=subprocess.PIPE, text=True)


def test_pull_twice_at_once_downloads_once(model_server: ModelServer, tmp_path: Path) -> None:
    """A second pull of the same model waits for the first, and finds its file."""
    model_server.breaks_after, model_server.hold = len(CONTENT) - 1, threading.Event()
    first = start_pull(model_server.url, tmp_path)
    assert model_server.is_holding.wait(20)
    second = start_pull(model_server.url, tmp_path)
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting\n"
    model_server.hold.set()
    assert first.communicate(timeout=20)[0] == "done\n"
    assert second.communicate(timeout=20)[0] == "done\n"
    assert len(model_server.requests) == 1
    assert left_in_repository(tmp_path) == ["fastestdet"]


def test_pull_beside_one_that_is_killed_takes_over(model_server: ModelServer, tmp_path: Path) -> None:
    """The lock of a killed pull is free at once; the one that waited goes on with what came."""
    model_server.breaks_after, model_server.hold = 600_000, threading.Event()
    first = start_pull(model_server.url, tmp_path)
    assert model_server.is_holding.wait(20)
    second = start_pull(model_server.url, tmp_path)
    assert second.stdout is not None
    assert second.stdout.readline() == "waiting\n"
    model_server.breaks_after = None
    first.kill()
    first.communicate()
    assert second.communicate(timeout=20)[0] == "done\n"
    assert (tmp_path / MODEL).read_bytes() == CONTENT


def test_pull_killed_in_mid_download_leaves_the_repository_clean(model_server: ModelServer, tmp_path: Path) -> None:
    """After SIGKILL nothing is in the repository, and the next pull asks only for what is missing."""
    model_server.breaks_after, model_server.hold = 600_000, threading.Event()
    victim = start_pull(model_server.url, tmp_path)
    assert model_server.is_holding.wait(20)
    partial = tmp_path / "downloads" / f"{entry_of('').sha256}.partial"
    victim.kill()
    victim.communicate()
    assert os.listdir(tmp_path / "models") == []
    there = partial.stat().st_size
    model_server.breaks_after = None
    pull(entry_of(model_server.url), source=None, home=tmp_path, progress=quiet)
    assert model_server.requests == ["", f"bytes={there}-" if there else ""]
    assert left_in_repository(tmp_path) == ["fastestdet"]
