"""/dev/shm, disk and ports: what is full, read-only, left over or taken."""

import fcntl
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from server.doctor import disk, ports, shared_memory
from server.doctor.disk import DiskFacts, FolderFacts, RepositoryFacts
from server.doctor.finding import Finding, Status
from server.doctor.ports import Holder, PortFacts
from server.doctor.shared_memory import Leftover, SharedMemoryFacts, find_leftovers
from tests.doctor.machines import GIB, pick, plan

MIB = 1 << 20
ROOMY = SharedMemoryFacts(8 * GIB, 8 * GIB, True, "", ())
FOLDER = FolderFacts(Path("/srv/penstock"), True, 50 * GIB, True)
DISK = DiskFacts(FOLDER, FOLDER, (RepositoryFacts(Path("/models"), ("people",)),))
ID, OTHER = "0123456789ab", "ba9876543210"


@pytest.mark.parametrize(
    ("facts", "status", "advice"),
    [
        (ROOMY, Status.OK, ""),
        (replace(ROOMY, size_bytes=64 * MIB, free_bytes=64 * MIB), Status.WARNING, "remount"),
        (replace(ROOMY, size_bytes=64 * MIB, free_bytes=9 * MIB, in_container="docker"), Status.WARNING, "--shm-size"),
        (replace(ROOMY, size_bytes=64 * MIB, free_bytes=9 * MIB, needs_it=False), Status.NOTE, "64 MiB"),
        (replace(ROOMY, free_bytes=100), Status.PROBLEM, "empty it"),
        (replace(ROOMY, free_bytes=100, needs_it=False), Status.NOTE, "empty it"),
        (replace(ROOMY, is_writable=False), Status.PROBLEM, "mount"),
        (replace(ROOMY, size_bytes=0, free_bytes=0), Status.PROBLEM, "mount"),
    ],
)
def test_shared_memory_room_is_what_tritons_models_need(facts: SharedMemoryFacts, status: Status, advice: str) -> None:
    """A container's 64 MiB is a warning, none at all a problem, and only where a Triton is to run here."""
    finding = pick(shared_memory.findings_of(facts), "shm.room")
    assert (finding.status, advice in finding.advice) == (status, True)


@pytest.mark.parametrize(
    ("leftovers", "status", "advice"),
    [
        ((), Status.OK, ""),
        ((Leftover(ID, 2, 2 * MIB, True),), Status.NOTE, "the next `penstock up`"),
        (
            (Leftover(ID, 2, 2 * MIB, True), Leftover(OTHER, 1, 1, False)),
            Status.WARNING,
            f"rm /dev/shm/penstock_{OTHER}_*",
        ),
    ],
)
def test_shared_memory_leftovers_name_who_clears_them(
    leftovers: tuple[Leftover, ...], status: Status, advice: str
) -> None:
    """What the next start finds is a note; what it will not find is a warning with the command."""
    finding = pick(shared_memory.findings_of(replace(ROOMY, leftovers=leftovers)), "shm.leftovers")
    assert (finding.status, advice in finding.advice) == (status, True)


def test_find_leftovers_spares_a_stack_that_runs(tmp_path: Path) -> None:
    """Regions of a locked run directory are its owner's; once the lock is gone they are left over; others' are not."""
    (tmp_path / "shm").mkdir()
    for name in (f"penstock_{ID}_a", f"penstock_{ID}_b", f"penstock_{OTHER}_a", "penstock_notes", "psm_x"):
        (tmp_path / "shm" / name).write_bytes(bytes(10))
    run = tmp_path / "base" / f"run-{ID}"
    run.mkdir(parents=True)
    gone = Leftover(OTHER, 1, 10, will_be_cleared=False)
    with (run / "owner").open("w") as owner:
        fcntl.flock(owner, fcntl.LOCK_EX)
        assert find_leftovers(tmp_path / "shm", tmp_path / "base") == (gone,)
    assert find_leftovers(tmp_path / "shm", tmp_path / "base") == (Leftover(ID, 2, 20, will_be_cleared=True), gone)
    assert (run / "owner").exists()


@pytest.mark.parametrize(
    ("facts", "name", "status", "words"),
    [
        (DISK, "disk.home", Status.OK, "50.0 GiB free for /srv/penstock"),
        (replace(DISK, home=replace(FOLDER, exists=False)), "disk.home", Status.OK, "not made yet"),
        (replace(DISK, home=replace(FOLDER, is_writable=False)), "disk.home", Status.WARNING, "cannot be written"),
        (replace(DISK, home=replace(FOLDER, free_bytes=MIB)), "disk.home", Status.WARNING, "1 MiB free"),
        (DISK, "disk.temp", Status.OK, "50.0 GiB"),
        (replace(DISK, run_base=replace(FOLDER, is_writable=False)), "disk.temp", Status.PROBLEM, "cannot be written"),
        (replace(DISK, run_base=replace(FOLDER, is_shared=True)), "disk.temp", Status.PROBLEM, "somebody else"),
        (replace(DISK, run_base=replace(FOLDER, is_noexec=True)), "disk.temp", Status.PROBLEM, "noexec"),
        (replace(DISK, run_base=replace(FOLDER, is_noexec=True), needs_exec=False), "disk.temp", Status.OK, "free"),
        (replace(DISK, run_base=replace(FOLDER, free_bytes=MIB)), "disk.temp", Status.WARNING, "1 MiB"),
        (DISK, "disk.models", Status.OK, "people"),
        (replace(DISK, repositories=()), "disk.models", Status.NOTE, "no model yet"),
        (replace(DISK, repositories=(RepositoryFacts(Path("/x"), None),)), "disk.models", Status.PROBLEM, "/x cannot"),
        (replace(DISK, repositories=2 * DISK.repositories), "disk.models", Status.PROBLEM, "people stands in two"),
    ],
)
def test_disk_each_trouble_is_told_apart(facts: DiskFacts, name: str, status: Status, words: str) -> None:
    """What keeps a start from working is a problem, what keeps models from being pulled a warning."""
    finding = pick(disk.findings_of(facts), name)
    assert (finding.status, words in finding.found) == (status, True)
    assert bool(finding.advice) is (status is not Status.OK)


def test_folder_facts_missing_folder_speaks_of_its_parent(tmp_path: Path) -> None:
    """Nothing is made by looking; a folder that others may write to is shared."""
    facts = disk.folder_facts(tmp_path / "a" / "b")
    assert (facts.exists, facts.is_writable, facts.is_shared) == (False, True, False)
    assert list(tmp_path.iterdir()) == []
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert disk.folder_facts(open_to_all).is_shared


OURS, THEIRS = Holder(7, "python -m server", True), Holder(8, "nginx", False)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (PortFacts("http-port", "127.0.0.1", 8000), ("ports.free", Status.OK, "free: 8000")),
        (PortFacts("http-port", "127.0.0.1", 8000, "EADDRINUSE", OURS), ("ports.ours", Status.OK, "a penstock runs")),
        (PortFacts("http-port", "127.0.0.1", 8000, "EADDRINUSE", THEIRS), ("ports.http", Status.PROBLEM, "nginx (pro")),
        (PortFacts("engine-grpc-port", "::1", 9001, "EADDRINUSE"), ("ports.engine_grpc", Status.PROBLEM, "only root")),
        (PortFacts("video", "127.0.0.1", 8010, "EADDRINUSE", THEIRS), ("ports.video", Status.NOTE, "nginx")),
        (PortFacts("video", "127.0.0.1", 8010, "EACCES"), ("ports.video", Status.NOTE, "8010 cannot be")),
        (PortFacts("video", "127.0.0.1", 8010), ("ports.free", Status.OK, "8010 (for penstock video)")),
        (PortFacts("http-port", "127.0.0.1", 80, "EACCES"), ("ports.http", Status.PROBLEM, "root only")),
        (PortFacts("http-port", "10.9.9.9", 80, "EADDRNOTAVAIL"), ("ports.http", Status.PROBLEM, "not an address")),
        (PortFacts("http-port", "127.0.0.1", 80, "ENOBUFS"), ("ports.http", Status.PROBLEM, "ENOBUFS")),
    ],
)  # fmt: skip
def test_ports_each_state_is_told_apart(facts: PortFacts, expected: tuple[str, Status, str]) -> None:
    """Free, ours, somebody's, not allowed, not this machine's."""
    (finding,) = ports.findings_of((facts,))
    assert (finding.id, finding.status, expected[2] in finding.found) == (*expected[:2], True)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """Somebody who listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


def test_ports_probe_taken_port_names_the_process(tmp_path: Path, listener: socket.socket) -> None:
    """The process that listens is named with its id; an engine's ports matter only where it has a process."""
    port = listener.getsockname()[1]
    facts = ports.probe(plan(tmp_path, ports={"http-port": port, "grpc-port": 0, "engine-http-port": port}))
    finding: Finding = pick(ports.findings_of(facts), "ports.http")
    assert [one.flag for one in facts] == ["http-port", ports.VIDEO]
    assert (finding.status, f"{port} is taken by " in finding.found) == (Status.PROBLEM, True)
    assert facts[0].holder is not None
    assert not facts[0].holder.is_ours
