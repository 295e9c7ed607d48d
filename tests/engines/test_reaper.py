"""What a killed engine leaves is removed; nothing else is touched."""

import contextlib
import mmap
import os
import stat
import subprocess
import sys
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from penstock.engines import run_directory as reaper
from penstock.engines.run_directory import (
    ENGINE_ID_VARIABLE,
    RunDirectoryRefused,
    claim_run_directory,
    reap,
    region_prefix,
)

CHECKOUT = Path(__file__).resolve().parents[2]
MAPS_A_REGION = """
import mmap, sys
with open(sys.argv[1], "r+b") as file:
    region = mmap.mmap(file.fileno(), 0)
    print("mapped", flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def engine_id() -> str:
    """An id that no other test has."""
    return uuid.uuid4().hex[:12]


@contextlib.contextmanager
def shared_region(name: str) -> Iterator[Path]:
    """A page of shared memory of that name."""
    path = Path("/dev/shm", name)
    path.write_bytes(b"\0" * mmap.PAGESIZE)
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def marked_process(engine_id: str, region: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process that carries the mark and maps the region."""
    process = subprocess.Popen(
        [sys.executable, "-I", "-S", "-c", MAPS_A_REGION, str(region)],
        env={ENGINE_ID_VARIABLE: engine_id},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    with process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"mapped\n"
            yield process
        finally:
            process.kill()


def test_reap_kills_the_marked_and_removes_their_regions(engine_id: str) -> None:
    """By the name that we gave, or by a stub's map where a backend named it; a client's own region stays."""
    stub_name = f"triton_other_backend_shm_region_{uuid.uuid4()}"
    with (
        shared_region(f"{region_prefix(engine_id)}{uuid.uuid4()}") as named,
        shared_region(stub_name) as by_map,
        shared_region(f"client-{engine_id}") as of_client,
        marked_process(engine_id, by_map) as process,
        marked_process(engine_id, of_client) as second,
    ):
        left = reap(engine_id)
        assert set(left.killed) == {process.pid, second.pid}
        assert set(left.regions) == {named.name, stub_name}
        assert left.survivors == ()
        assert not named.exists()
        assert not by_map.exists()
        assert of_client.exists()


def test_reap_leaves_another_engine_alone(engine_id: str) -> None:
    """A foreign Triton's processes and regions, ours-like or with Triton's own names, stay as they are."""
    other_id = uuid.uuid4().hex[:12]
    with (
        shared_region(f"{region_prefix(other_id)}{uuid.uuid4()}") as other_named,
        shared_region(f"triton_python_backend_shm_region_{uuid.uuid4()}") as foreign,
        marked_process(other_id, foreign) as process,
    ):
        assert reap(engine_id) == reaper.Reaped()
        assert process.poll() is None
        assert other_named.exists()
        assert foreign.exists()


def test_claim_gives_a_private_folder_and_release_removes_it(tmp_path: Path) -> None:
    """The folder is the user's alone, named by its engine, and gone when it is given back."""
    run_dir, swept = claim_run_directory(tmp_path / "base")
    assert swept == ()
    assert run_dir.path.name == f"run-{run_dir.engine_id}"
    assert stat.S_IMODE(run_dir.path.stat().st_mode) == 0o700
    assert (run_dir.path / "owner").read_text() == f"{os.getpid()}\n"
    run_dir.release()
    run_dir.release()
    assert not run_dir.path.exists()


def test_claim_beside_a_living_owner_touches_nothing_of_it(tmp_path: Path) -> None:
    """Two stacks of one user run side by side."""
    first, _ = claim_run_directory(tmp_path)
    with first, shared_region(f"{region_prefix(first.engine_id)}x") as region:
        second, swept = claim_run_directory(tmp_path)
        with second:
            assert swept == ()
            assert first.path.is_dir()
            assert region.exists()


def test_claim_after_a_killed_owner_clears_up_behind_it(tmp_path: Path) -> None:
    """kill -9 leaves process, region and folder; the next start finds all three by the folder's name."""
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from penstock.engines.run_directory import claim_run_directory\n"
        "run, _ = claim_run_directory(Path(sys.argv[1])); print(run.engine_id, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)], cwd=CHECKOUT, capture_output=True, text=True, check=False
    )
    engine_id = done.stdout.strip()
    with shared_region(f"{region_prefix(engine_id)}x") as region, marked_process(engine_id, region) as survivor:
        run_dir, (left,) = claim_run_directory(tmp_path)
        with run_dir:
            assert left.killed == (survivor.pid,)
            assert left.regions == (region.name,)
            assert [path.name for path in tmp_path.glob("run-*")] == [run_dir.path.name]


def test_sweep_leaves_folders_that_it_does_not_know(tmp_path: Path) -> None:
    """Only what has our name is ours."""
    for name in ("keep", "run-", "run-nothexatall", "run-0123456789ab-copy"):
        (tmp_path / name).mkdir()
    run_dir, reaped = claim_run_directory(tmp_path)
    run_dir.release()
    assert reaped == ()
    assert all((tmp_path / name).is_dir() for name in ("keep", "run-", "run-nothexatall", "run-0123456789ab-copy"))


def test_claim_in_a_folder_that_others_may_write_is_refused(tmp_path: Path) -> None:
    """Programs run from there: a folder that anybody may change is not used."""
    base = tmp_path / "base"
    base.mkdir()
    base.chmod(0o777)
    with pytest.raises(RunDirectoryRefused, match="chmod 700"):
        claim_run_directory(base)


def test_claim_through_a_link_is_refused(tmp_path: Path) -> None:
    """In a folder for temporary files another user may have created the link, and may change its target later."""
    ours = tmp_path / "ours"
    ours.mkdir(mode=0o700)
    (tmp_path / "base").symlink_to(ours)
    with pytest.raises(RunDirectoryRefused, match="not a symbolic link"):
        claim_run_directory(tmp_path / "base")
    assert list(ours.iterdir()) == []


def test_claim_where_no_folder_can_be_made_is_refused(tmp_path: Path) -> None:
    """One line instead of a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(RunDirectoryRefused, match="cannot hold run directories"):
        claim_run_directory(tmp_path / "file" / "base")
