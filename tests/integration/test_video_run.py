"""`penstock video run` with the shipped models: its own engine, a gateway elsewhere, and every way to its end."""

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.gateway.auth.api_keys import new_secret
from tests.integration.embedded_stack import NO_TRITON
from tests.integration.video_runs import (
    Place,
    begun,
    first_frames,
    lines,
    new_place,
    one_sentence,
    pictures_of,
    run,
    start_stack_at,
    tracked,
    two_ports,
    write_street,
)
from tests.support.stack import RunningStack, stop_stack
from tests.support.waiting import wait_for

pytestmark = pytest.mark.xdist_group("video-own-engine")


@pytest.fixture
def lonely(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """Where no stack runs."""
    return new_place(tmp_path_factory.mktemp("l"))


def assert_nothing_left(place: Place, engines: list[str]) -> None:
    """No process, no run directory and no shared memory of the place's engines."""
    wait_for(lambda: not place.traces(), 30, f"nothing is left behind: {place.traces()}")
    assert not [path.name for path in Path("/dev/shm").iterdir() if any(engine in path.name for engine in engines)]


def written_bytes(path: Path) -> int:
    """0 where there is no file."""
    return path.stat().st_size if path.exists() else 0


@pytest.fixture(scope="module")
def clip(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Eight pictures of a street: in so short a time that who is in the last one has hardly moved."""
    path = tmp_path_factory.mktemp("clip") / "clip.mp4"
    write_street(path, 38, 8 / 30, 30.0)
    return path


def test_people_of_a_clip_are_found_without_any_download(lonely: Place, shared_dir: Path, tmp_path: Path) -> None:
    """By an engine of the command's own, started by it on free ports and gone with it."""
    source = first_frames(tmp_path / "walk.avi", shared_dir / "media" / "vtest.avi", 4)
    with begun(lonely, "--source", source, "--model", "people", "--out", tmp_path / "out") as running:
        running.api_url()
        engines = lonely.engines()
        assert running.process.wait(60) == 0, running.text
    objects = lines(tmp_path / "out" / "objects.jsonl")
    assert len(objects) == len(pictures_of(tmp_path / "out" / "annotated.mp4")) == 4
    assert {row["label"] for line in objects for row in line["objects"]} == {"person"}
    assert max(len(line["objects"]) for line in objects) >= 3
    assert_nothing_left(lonely, engines)


def test_ctrl_c_leaves_whole_files_and_nothing_else(lonely: Place, clip: Path, tmp_path: Path) -> None:
    """Exit code 130; the annotated clip has a picture for every line, and no line is cut.

    The clip was played several times: no identity is of two of them.
    """
    words = ("--source", clip, "--loop", "--model", "street", "--engine", "embedded", "--out", tmp_path / "out")
    with begun(lonely, *words) as running:
        running.api_url()
        wait_for(lambda: written_bytes(tmp_path / "out" / "objects.jsonl") > 15_000, 40, "frames are written")
        running.process.send_signal(signal.SIGINT)
        assert running.process.wait(40) == 130, running.text
    assert "stopping: what was decoded is finished" in running.text
    assert "Traceback" not in running.text
    objects = lines(tmp_path / "out" / "objects.jsonl")
    assert [line["frame_num"] for line in objects] == list(range(len(objects)))
    assert len(pictures_of(tmp_path / "out" / "annotated.mp4")) == len(objects)
    identities = {(line["segment"], row["track_id"]) for line in objects for row in tracked(line)}
    assert len(identities) == len({track_id for _, track_id in identities}) > 5
    assert {segment for segment, _ in identities} >= {0, 1}
    assert_nothing_left(lonely, [])


def test_killed_run_takes_its_engine_with_it(lonely: Place, clip: Path, tmp_path: Path) -> None:
    """Engine, gateway and decode process go, their folder and their shared memory, too; what was written plays."""
    words = ("--source", clip, "--loop", "--model", "street", "--engine", "triton", "--out", tmp_path / "out")
    with begun(lonely, *words) as running:
        running.api_url()
        engines = lonely.engines()
        assert engines
        wait_for(lambda: written_bytes(tmp_path / "out" / "annotated.mp4") > 200_000, 40, "a fragment is written")
        running.process.kill()
        running.process.wait(20)
    assert_nothing_left(lonely, engines)
    assert len(pictures_of(tmp_path / "out" / "annotated.mp4")) > 5


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[RunningStack, str]]:
    """The embedded engine behind a key, on ports that follow each other, and the key."""
    key = new_secret()
    place = new_place(tmp_path_factory.mktemp("g"))
    ports = [
        word for flag, port in zip(("http", "grpc"), two_ports(), strict=True) for word in (f"--{flag}-port", port)
    ]
    words = ("--engine", "embedded", "--models", "street,identity_fp32", *ports)
    stack = start_stack_at(place, *words, PENSTOCK_API_KEYS=f"camera:infer+read:{key}", **NO_TRITON)
    yield stack, key
    assert stop_stack(stack) == 0, "".join(stack.log[-30:])


def test_gateway_elsewhere_infers_for_a_program_with_its_key(
    lonely: Place, guarded: tuple[RunningStack, str], clip: Path, tmp_path: Path
) -> None:
    """By gRPC, with all frames; no engine is started here."""
    stack, key = guarded
    words = ("--source", clip, "--model", "street", "--url", stack.http_url, "--out", tmp_path / "out")
    ended = run(lonely, *words, PENSTOCK_API_KEY=key)
    assert ended.code == 0, ended.err
    objects = lines(tmp_path / "out" / "objects.jsonl")
    assert [line["is_inferred"] for line in objects] == [True] * 8
    assert max(len(line["objects"]) for line in objects) >= 3
    assert not list(lonely.temp.glob("penstock-*/run-*"))
    assert key not in ended.out + ended.err


def test_gateway_that_wants_a_key_says_so(lonely: Place, guarded: tuple[RunningStack, str], clip: Path) -> None:
    """One sentence that names the variable, and exit code 1; a wrong key is not repeated."""
    words = ("--source", clip, "--model", "street", "--url", guarded[0].http_url)
    ended = run(lonely, *words, PENSTOCK_API_KEY="not-the-key")
    assert ended.code == 1
    assert one_sentence(ended), ended.err
    assert "PENSTOCK_API_KEY" in ended.err
    assert "not-the-key" not in ended.err
