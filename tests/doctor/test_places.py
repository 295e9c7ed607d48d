"""/dev/shm, disk and ports: what is full, read-only, left over or taken."""

import fcntl
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.doctor import engine as ports
from penstock.doctor import storage as disk
from penstock.doctor import storage as shared_memory
from penstock.doctor.engine import Holder, PortFacts
from penstock.doctor.finding import Finding, Severity
from penstock.doctor.storage import DiskFacts, FolderFacts, Leftover, RepositoryFacts, SharedMemoryFacts, find_leftovers
from tests.doctor.machines import GIB, pick, plan

MIB = 1 << 20
ROOMY = SharedMemoryFacts(8 * GIB, 8 * GIB, True, "", ())
FOLDER = FolderFacts(Path("/srv/penstock"), True, 50 * GIB, True)
DISK = DiskFacts(FOLDER, FOLDER, (RepositoryFacts(Path("/models"), ("people",)),))
ID, OTHER = "0123456789ab", "ba9876543210"


@pytest.mark.parametrize(
    ("facts", "status", "advice"),
    [
        (ROOMY, Severity.OK, ""),
        (replace(ROOMY, size_bytes=64 * MIB, free_bytes=64 * MIB), Severity.WARNING, "remount"),
        (
            replace(ROOMY, size_bytes=64 * MIB, free_bytes=9 * MIB, in_container="docker"),
            Severity.WARNING,
            "--shm-size",
        ),
        (replace(ROOMY, size_bytes=64 * MIB, free_bytes=9 * MIB, needs_it=False), Severity.NOTE, "64 MiB"),
        (replace(ROOMY, free_bytes=100), Severity.PROBLEM, "empty it"),
        (replace(ROOMY, free_bytes=100, needs_it=False), Severity.NOTE, "empty it"),
        (replace(ROOMY, is_writable=False), Severity.PROBLEM, "mount"),
        (replace(ROOMY, size_bytes=0, free_bytes=0), Severity.PROBLEM, "mount"),
    ],
)
def test_shared_memory_room_is_what_tritons_models_need(
    facts: SharedMemoryFacts, status: Severity, advice: str
) -> None:
    """A container's 64 MiB is a warning, none at all a problem, and only where a Triton is to run here."""
    finding = pick(shared_memory.shared_memory_findings(facts), "shm.room")
    assert (finding.status, advice in finding.advice) == (status, True)


@pytest.mark.parametrize(
    ("leftovers", "status", "advice"),
    [
        ((), Severity.OK, ""),
        ((Leftover(ID, 2, 2 * MIB, True),), Severity.NOTE, "the next `penstock up`"),
        (
            (Leftover(ID, 2, 2 * MIB, True), Leftover(OTHER, 1, 1, False)),
            Severity.WARNING,
            f"rm /dev/shm/penstock_{OTHER}_*",
        ),
    ],
)
def test_shared_memory_leftovers_name_who_clears_them(
    leftovers: tuple[Leftover, ...], status: Severity, advice: str
) -> None:
    """What the next start finds is a note; what it will not find is a warning with the command."""
    finding = pick(shared_memory.shared_memory_findings(replace(ROOMY, leftovers=leftovers)), "shm.leftovers")
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
        (DISK, "disk.home", Severity.OK, "50.0 GiB free for /srv/penstock"),
        (replace(DISK, home=replace(FOLDER, exists=False)), "disk.home", Severity.OK, "not made yet"),
        (replace(DISK, home=replace(FOLDER, is_writable=False)), "disk.home", Severity.WARNING, "cannot be written"),
        (replace(DISK, home=replace(FOLDER, free_bytes=MIB)), "disk.home", Severity.WARNING, "1 MiB free"),
        (DISK, "disk.temp", Severity.OK, "50.0 GiB"),
        (
            replace(DISK, run_base=replace(FOLDER, is_writable=False)),
            "disk.temp",
            Severity.PROBLEM,
            "cannot be written",
        ),
        (replace(DISK, run_base=replace(FOLDER, is_shared=True)), "disk.temp", Severity.PROBLEM, "another user"),
        (replace(DISK, run_base=replace(FOLDER, is_noexec=True)), "disk.temp", Severity.PROBLEM, "noexec"),
        (replace(DISK, run_base=replace(FOLDER, is_noexec=True), needs_exec=False), "disk.temp", Severity.OK, "free"),
        (replace(DISK, run_base=replace(FOLDER, free_bytes=MIB)), "disk.temp", Severity.WARNING, "1 MiB"),
        (DISK, "disk.models", Severity.OK, "people"),
        (replace(DISK, repositories=()), "disk.models", Severity.NOTE, "no model yet"),
        (
            replace(DISK, repositories=(RepositoryFacts(Path("/x"), None),)),
            "disk.models",
            Severity.PROBLEM,
            "/x cannot",
        ),
        (replace(DISK, repositories=2 * DISK.repositories), "disk.models", Severity.PROBLEM, "people stands in two"),
    ],
)
def test_disk_each_problem_has_its_own_finding(facts: DiskFacts, name: str, status: Severity, words: str) -> None:
    """What keeps a start from working is a problem, what keeps models from being pulled a warning."""
    finding = pick(disk.disk_findings(facts), name)
    assert (finding.status, words in finding.found) == (status, True)
    assert bool(finding.advice) is (status is not Severity.OK)


def test_folder_facts_missing_folder_speaks_of_its_parent(tmp_path: Path) -> None:
    """Nothing is made by looking; a folder that others may write to is shared."""
    facts = disk.folder_facts(tmp_path / "a" / "b")
    assert (facts.exists, facts.is_writable, facts.is_shared) == (False, True, False)
    assert list(tmp_path.iterdir()) == []
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    assert disk.folder_facts(open_to_all).is_shared


OURS, THEIRS = Holder(7, "python -m penstock.gateway", True), Holder(8, "nginx", False)


@pytest.mark.parametrize(
    ("facts", "expected"),
    [
        (PortFacts("http-port", "127.0.0.1", 8000), ("ports.free", Severity.OK, "free: 8000")),
        (PortFacts("http-port", "127.0.0.1", 8000, "EADDRINUSE", OURS), ("ports.ours", Severity.OK, "a penstock runs")),
        (PortFacts("http-port", "127.0.0.1", 8000, "EADDRINUSE", THEIRS), ("ports.http", Severity.PROBLEM, "nginx (p")),
        (PortFacts("engine-grpc-port", "::1", 9001, "EADDRINUSE"), ("ports.engine_grpc", Severity.PROBLEM, "only roo")),
        (PortFacts("video", "127.0.0.1", 8010, "EADDRINUSE", THEIRS), ("ports.video", Severity.NOTE, "nginx")),
        (PortFacts("video", "127.0.0.1", 8010, "EACCES"), ("ports.video", Severity.NOTE, "8010 cannot be")),
        (PortFacts("video", "127.0.0.1", 8010), ("ports.free", Severity.OK, "8010 (for penstock video)")),
        (PortFacts("http-port", "127.0.0.1", 80, "EACCES"), ("ports.http", Severity.PROBLEM, "root only")),
        (PortFacts("http-port", "10.9.9.9", 80, "EADDRNOTAVAIL"), ("ports.http", Severity.PROBLEM, "not an address")),
        (PortFacts("http-port", "127.0.0.1", 80, "ENOBUFS"), ("ports.http", Severity.PROBLEM, "ENOBUFS")),
    ],
)  # fmt: skip
def test_ports_each_state_has_its_own_finding(facts: PortFacts, expected: tuple[str, Severity, str]) -> None:
    """Free, ours, another process's, not allowed, not this machine's."""
    (finding,) = ports.port_findings((facts,))
    assert (finding.id, finding.status, expected[2] in finding.found) == (*expected[:2], True)


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    """A process that listens."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        yield taken


def test_ports_video_program_is_listed_once(tmp_path: Path) -> None:
    """`penstock up --video` uses the port of `penstock video run`."""
    for wanted in ({}, {"video-port": ports.VIDEO_PORT}):
        assert [one.port for one in ports.probe_ports(plan(tmp_path, ports=wanted))] == [ports.VIDEO_PORT]


def test_ports_probe_taken_port_names_the_process(tmp_path: Path, listener: socket.socket) -> None:
    """The process that listens is named with its id; an engine's ports matter only where it has a process."""
    port = listener.getsockname()[1]
    facts = ports.probe_ports(plan(tmp_path, ports={"http-port": port, "grpc-port": 0, "engine-http-port": port}))
    finding: Finding = pick(ports.port_findings(facts), "ports.http")
    assert [one.flag for one in facts] == ["http-port", ports.VIDEO]
    assert (finding.status, f"{port} is taken by " in finding.found) == (Severity.PROBLEM, True)
    assert facts[0].holder is not None
    assert not facts[0].holder.is_ours


def test_port_of_the_stacks_video_program_is_no_finding(tmp_path: Path) -> None:
    """A process that listens and has a stack's run directory as argument belongs to `penstock up`."""
    listen = (
        "import socket, sys; one = socket.create_server(('127.0.0.1', 0));"
        "print(one.getsockname()[1], flush=True); sys.stdin.read()"
    )
    command = [sys.executable, "-P", "-c", listen, "video", "beside", f"/run/penstock/run-{ID}", "/srv/video.yaml"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        port = int(child.stdout.readline())
        findings = ports.port_findings(ports.probe_ports(plan(tmp_path, ports={"video-port": port})))
        child.communicate()
    assert f" {port}" in pick(findings, "ports.ours").found
