"""Pulls from every kind of source, and what is left when they go wrong."""

import os
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.models.catalogue import CatalogueEntry, PullFailed, WrongContent
from penstock.models.pull import STALE_AFTER_S, pull
from tests.models.conftest import CONTENT, ModelServer, entry_of

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


def model_folder(folder: Path) -> Path:
    """A whole model folder, as another machine's home has it."""
    (folder / "fastestdet" / "1").mkdir(parents=True)
    (folder / "fastestdet" / "config.pbtxt").write_text("edited by the user")
    (folder / "fastestdet" / "1" / "model.onnx").write_bytes(CONTENT)
    return folder / "fastestdet"


def two_files(folder: Path) -> Path:
    """A folder with another file under the first name that is looked for, and the right one under the second."""
    (folder / "FastestDet.onnx").write_bytes(CONTENT[:9])
    return write_as("fastestdet.onnx")(folder)


SOURCES: dict[str, Callable[[Path], Path | str]] = {
    "folder with the file's own name": write_as("FastestDet.onnx"),
    "folder with the model's name": write_as("fastestdet.onnx"),
    "the file": lambda folder: write_as("any.bin")(folder) / "any.bin",
    "whole model folder": model_folder,
    "repository": lambda folder: model_folder(folder).parent,
    "folder of a wrong file and a right one": two_files,
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
    folder = pull(entry, source=source, home=home, progress=quiet).folder
    assert folder == home / "models" / "fastestdet"
    assert (home / MODEL).read_bytes() == CONTENT
    assert sorted(os.listdir(folder)) == sorted(["1", *os.listdir(entry.folder)])
    assert os.listdir(folder / "1") == ["model.onnx"]
    assert folder.stat().st_mode & 0o755 == 0o755
    assert left_in_repository(home) == ["fastestdet"]
    assert os.listdir(home / "downloads") == ["fastestdet.lock"]
    assert model_server.requests == []


@pytest.mark.parametrize(
    ("given", "path"),
    [
        (None, "/weights/FastestDet.onnx"),
        ("/mirror/any.bin", "/mirror/any.bin"),
        ("/mirror/", "/mirror/FastestDet.onnx"),
        ("/mirror/?token=a", "/mirror/FastestDet.onnx?token=a"),
        ("/Gewächs 1%2B2/", "/Gew%C3%A4chs%201%2B2/FastestDet.onnx"),
    ],
    ids=["catalogue", "address", "address of a folder", "address of a folder with a query", "as a person writes it"],
)
def test_pull_over_http_reports_growing_progress(
    given: str | None, path: str, entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """The catalogue's own address, another one, or a folder's; progress grows to the file's size."""
    seen: list[int] = []
    source = None if given is None else model_server.url.removesuffix("/weights/FastestDet.onnx") + given
    pull(entry, source=source, home=tmp_path, progress=seen.append)
    assert (tmp_path / MODEL).read_bytes() == CONTENT
    assert model_server.paths == [path]
    assert seen == sorted(seen)
    assert seen[-1] == len(CONTENT)


WRONG = {
    "damaged": (CONTENT[:-1] + b"\0", "has SHA-256"),
    "short": (CONTENT[:1000], "has 1000 bytes, fastestdet as catalogued 700001"),
    "long": (CONTENT + b"!", "has 700002 bytes"),
    "empty": (b"", "has 0 bytes"),
}


@pytest.mark.parametrize(
    ("is_remote", "case"), [(False, case) for case in WRONG] + [(True, case) for case in ("damaged", "short", "long")]
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


@pytest.mark.parametrize(
    ("make", "why"),
    [
        (lambda folder: folder / "absent", "there is no .*/absent: give the folder that holds FastestDet.onnx"),
        (lambda folder: folder, "has neither FastestDet.onnx, fastestdet.onnx, 1/model.onnx nor .*: download http"),
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


def test_pull_again_keeps_changed_and_added_files(
    entry: CatalogueEntry, model_server: ModelServer, tmp_path: Path
) -> None:
    """An edited config.pbtxt, recorded answers, further versions and files: kept, and what differs is named."""
    folder = pull(entry, source=None, home=tmp_path, progress=quiet).folder
    (folder / "config.pbtxt").write_text("edited")
    (folder / "MODEL.md").write_text("old")
    (folder / "golden.json").write_text("recorded here")
    (folder / "notes.txt").write_text("mine")
    (folder / "2").mkdir()
    (folder / "2" / "model.onnx").write_text("mine")
    pulled = pull(entry, source=None, home=tmp_path, progress=quiet)
    assert pulled.preserved == ("config.pbtxt", "golden.json")
    assert len(model_server.requests) == 1, "a right model file is not fetched again"
    assert (tmp_path / MODEL).read_bytes() == CONTENT
    assert (folder / "config.pbtxt").read_text() == "edited"
    assert (folder / "MODEL.md").read_text() == (entry.folder / "MODEL.md").read_text()
    assert (folder / "golden.json").read_text() == "recorded here"
    assert (folder / "notes.txt").read_text() == "mine"
    assert (folder / "2" / "model.onnx").read_text() == "mine"
    assert left_in_repository(tmp_path) == ["fastestdet"]


def test_pull_after_an_edited_file_was_removed_brings_the_catalogues_back(
    entry: CatalogueEntry, tmp_path: Path
) -> None:
    """The remedy that the command names works."""
    folder = pull(entry, source=None, home=tmp_path, progress=quiet).folder
    (folder / "config.pbtxt").unlink()
    assert pull(entry, source=None, home=tmp_path, progress=quiet).preserved == ()
    assert (folder / "config.pbtxt").read_text() == (entry.folder / "config.pbtxt").read_text()


def test_pull_sweeps_what_was_left_for_a_week(entry: CatalogueEntry, tmp_path: Path) -> None:
    """Partial downloads of any model and remains of killed pulls do not stay for ever; fresh ones and locks do."""
    old = [tmp_path / "downloads" / name for name in ("a.partial", "b.copy")] + [tmp_path / "staging" / "resnet50.x"]
    fresh = [tmp_path / "downloads" / "c.partial", tmp_path / "downloads" / "resnet50.lock"]
    for path in [*old, *fresh]:
        path.parent.mkdir(exist_ok=True)
        path.write_text("")
    week_ago = time.time() - STALE_AFTER_S - 60
    for path in [*old, fresh[1]]:
        os.utime(path, (week_ago, week_ago))
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert not any(path.exists() for path in old)
    assert all(path.exists() for path in fresh)


@pytest.mark.parametrize(
    ("source", "why"),
    [
        ("s3://bucket/models", "s3://bucket/models cannot be read from here: give a folder, a file, or a file://"),
        ("file://elsewhere/models", "file://elsewhere/models cannot be read from here"),
        ("http://[::1/x", "is no address"),
        ("http://127.0.0.1:port/x", "cannot be reached .*port"),
        ("http:///x", "cannot be reached"),
        ("http://127.0.0.1:99999/x", "cannot be reached"),
        ("http://127.0.0.1:9/a b.onnx", "cannot be reached"),
        ("~no-such-user/models", "names a user that this machine does not know"),
    ],
)
def test_pull_from_what_is_no_place_is_one_sentence(
    source: str, why: str, entry: CatalogueEntry, tmp_path: Path
) -> None:
    """Whatever is written after --from, the answer is a sentence that names it."""
    with pytest.raises(PullFailed, match=why):
        pull(entry, source=source, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == []


def test_pull_of_a_git_lfs_pointer_says_how_to_get_the_file(entry: CatalogueEntry, tmp_path: Path) -> None:
    """A clone without Git LFS holds notes of 130 bytes under the files' names."""
    (tmp_path / "FastestDet.onnx").write_text(
        "version https://git-lfs.github.com/spec/v1\noid sha256:31cb\nsize 998169\n"
    )
    with pytest.raises(WrongContent, match="is the note that Git LFS left in the file's place: run `git lfs pull`"):
        pull(entry, source=tmp_path, home=tmp_path / "home", progress=quiet)


def test_pull_onto_a_link_or_a_file_replaces_it(entry: CatalogueEntry, tmp_path: Path) -> None:
    """What stands under the model's name but is no folder goes; what a link points at stays."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    target = tmp_path / "models" / "fastestdet"
    target.parent.mkdir()
    for put in (lambda: target.symlink_to(elsewhere), lambda: target.write_text("")):
        put()
        pull(entry, source=None, home=tmp_path, progress=quiet)
        assert (tmp_path / MODEL).read_bytes() == CONTENT
        assert left_in_repository(tmp_path) == ["fastestdet"]
        assert elsewhere.is_dir()
        shutil.rmtree(target)


def test_pull_removes_what_a_killed_pull_staged(entry: CatalogueEntry, tmp_path: Path) -> None:
    """Remains of a pull that was killed do not pile up."""
    remains = tmp_path / "staging" / "fastestdet.old12345"
    remains.mkdir(parents=True)
    (remains / "file").write_text("")
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert left_in_repository(tmp_path) == ["fastestdet"]


PULL_PROGRAM = """
import sys
from pathlib import Path
from penstock.models.pull import STALE_AFTER_S, pull
from tests.models.conftest import entry_of
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
    waits = threading.Event()
    entry = entry_of(model_server.url)
    with ThreadPoolExecutor(2) as pool:  # the lock is of an open file, so it holds between threads, too
        first = pool.submit(pull, entry, source=None, home=tmp_path, progress=quiet)
        assert model_server.is_holding.wait(20)
        second = pool.submit(pull, entry, source=None, home=tmp_path, progress=quiet, on_wait=waits.set)
        assert waits.wait(20)
        model_server.hold.set()
        assert first.result(20).folder == second.result(20).folder
        assert [one.result().was_present for one in (first, second)] == [False, True]
    assert len(model_server.requests) == 1
    assert left_in_repository(tmp_path) == ["fastestdet"]


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


def test_pull_over_a_damaged_model_replaces_it(entry: CatalogueEntry, tmp_path: Path) -> None:
    """A model file that is not the catalogue's is fetched again."""
    pull(entry, source=None, home=tmp_path, progress=quiet)
    (tmp_path / MODEL).write_bytes(b"x" * len(CONTENT))
    pull(entry, source=None, home=tmp_path, progress=quiet)
    assert (tmp_path / MODEL).read_bytes() == CONTENT
