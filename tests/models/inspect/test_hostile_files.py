"""Damaged and malicious files: one sentence each, in bounded memory and time; the caller's process is never touched."""

import json
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.models.inspect.facts import UnreadableModel
from penstock.models.inspect.inspection import Limits, Verdict, inspect_file
from tests.models.inspect.hostile_files import MADE, MEMORY_BYTES, convolution, damages
from tests.support.stack import CHECKOUT

LIMITS = Limits(memory_bytes=MEMORY_BYTES, cpu_s=4, wall_s=60)


def ending(path: Path) -> str:
    """The verdict, or the sentence."""
    try:
        found = inspect_file(path, limits=LIMITS)
    except UnreadableModel as error:
        return str(error)
    return found.verdict


@pytest.mark.parametrize("name", MADE)
def test_a_malicious_file_is_one_sentence(tmp_path: Path, name: str) -> None:
    """Nothing is served, and no line break, traceback or empty reason comes back."""
    path = tmp_path / "model.onnx"
    path.write_bytes(MADE[name]())
    ended = ending(path)
    assert ended != Verdict.SERVABLE
    assert ended
    assert "\n" not in ended
    assert "Traceback" not in ended
    assert "ended with 1" not in ended, "an exception was not foreseen"


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        ("cycle", "cycle"),
        ("external file above", "not below its folder"),
        ("external absolute file", "not below its folder"),
        ("endless loop", "CPU time"),
        ("no input", "no inputs"),
    ],
)
def test_the_sentence_names_the_fault(tmp_path: Path, name: str, sentence: str) -> None:
    """What is wrong is said, with the file's path."""
    path = tmp_path / "model.onnx"
    path.write_bytes(MADE[name]())
    ended = ending(path)
    assert sentence in ended
    assert str(path) in ended


def test_a_name_that_is_no_text_is_refused(tmp_path: Path) -> None:
    """No message holds such a name, so the sentence shows it escaped."""
    path = tmp_path / os.fsdecode(b"model\xff.onnx")
    path.write_bytes(b"x")
    with pytest.raises(UnreadableModel, match=r"udcff.* is not UTF-8 text"):
        inspect_file(path)


def test_an_unforeseen_error_is_a_sentence_with_its_kind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not the advice to give the process more memory."""
    found = tmp_path / "parse"
    found.mkdir()
    (found / "sitecustomize.py").write_text(
        "import penstock.models.inspect.metadata as metadata\n"
        "def broken(_):\n    raise ZeroDivisionError('of\\na test')\n"
        "metadata.metadata_of = broken\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(found), prepend=os.pathsep)
    path = tmp_path / "model.onnx"
    path.write_bytes(convolution())
    with pytest.raises(UnreadableModel, match=r"^.* cannot be inspected: ZeroDivisionError: of a test$"):
        inspect_file(path)


def test_a_slow_inspection_is_stopped(tmp_path: Path) -> None:
    """The wall clock is bounded, too."""
    path = tmp_path / "model.onnx"
    path.write_bytes(MADE["endless loop"]())
    with pytest.raises(UnreadableModel, match=r"was not inspected in 1 s"):
        inspect_file(path, limits=Limits(cpu_s=60, wall_s=1.0))


def test_damaged_files_end_in_a_sentence(tmp_path: Path) -> None:
    """Files cut and damaged at random, each through the real child process."""
    path = tmp_path / "model.onnx"
    for data in damages(12, random.randrange(1 << 30), tmp_path):
        path.write_bytes(data)
        ended = ending(path)
        assert ended
        assert "ended with 1" not in ended, "an exception was not foreseen"


@pytest.mark.parametrize("count", [200, pytest.param(10_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])])
def test_many_damaged_files_are_bounded(count: int) -> None:
    """No exception that was not foreseen, and no more memory than the limit."""
    seed = random.randrange(1 << 30)
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-m", "tests.models.inspect.hostile_files", str(count), str(seed)],
        cwd=CHECKOUT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    found = json.loads(done.stdout.splitlines()[-1])
    assert sum(found["outcomes"].values()) == count
    assert "exception" not in found["outcomes"], (seed, found, done.stderr[-3000:])
    assert found["most_mib"] < MEMORY_BYTES >> 20
