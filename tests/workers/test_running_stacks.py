"""Running stacks of this user, and paths to their sockets."""

import json
import os
import socket
from pathlib import Path

import pytest

from penstock.engines.run_directory import claim_run_directory
from penstock.gateway.workers import running_stacks as running
from penstock.gateway.workers.running_stacks import (
    MAX_PATH_BYTES,
    PROGRAM,
    RunningStack,
    closest_stacks,
    publish_stack,
    reachable_folder,
    running_stacks,
    stack_at,
)


@pytest.fixture
def base(tmp_path: Path) -> Path:
    folder = tmp_path / "penstock"
    folder.mkdir(mode=0o700)
    return folder


def test_stack_is_found_from_its_word_until_its_end(base: Path) -> None:
    """Not while it starts; and no more once its run directory is gone."""
    run_dir, _ = claim_run_directory(base)
    assert running_stacks(base) == ()
    addresses = ("http://127.0.0.1:8000", "127.0.0.1:8001")
    publish_stack(run_dir.path, *addresses, "/run/mps", base)
    (found,) = running_stacks(base)
    assert found == RunningStack(run_dir.path, *addresses, os.getpid(), "/run/mps", str(base), PROGRAM)
    run_dir.release()
    assert running_stacks(base) == ()


def test_file_of_an_older_penstock_is_read(base: Path) -> None:
    """Without a home and a checkout; a stack of this home is then closer than it, as than one of another home."""
    with claim_run_directory(base)[0] as older, claim_run_directory(base)[0] as own:
        publish_stack(older.path, "http://127.0.0.1:8000", "127.0.0.1:8001")
        file = older.path / "running.json"
        fields = json.loads(file.read_text())
        del fields["home"], fields["program"]
        file.write_text(json.dumps(fields))
        (found,) = running_stacks(base)
        assert (found.home, found.program, found.label) == ("", "", "http://127.0.0.1:8000")
        publish_stack(own.path, "http://127.0.0.1:9000", "127.0.0.1:9001", home=base)
        assert [stack.run_dir for stack in closest_stacks(running_stacks(base), base)] == [own.path]
        assert closest_stacks((found,), base) == (found,)
        assert closest_stacks((), base) == ()


def test_stack_is_found_by_its_port_on_this_host_only(base: Path) -> None:
    """Another host's port 8000 is another's."""
    with claim_run_directory(base)[0] as one, claim_run_directory(base)[0] as other:
        publish_stack(one.path, "http://127.0.0.1:8000", "127.0.0.1:8001")
        publish_stack(other.path, "http://127.0.0.1:9100", "127.0.0.1:9101")
        assert len(running_stacks(base)) == 2
        found = stack_at("http://localhost:9100", base)
        assert found is not None
        assert found.run_dir == other.path
        assert stack_at("http://10.0.0.1:8000", base) is None
        assert stack_at("http://127.0.0.1:8002", base) is None


def test_stack_behind_a_link_is_no_stack(base: Path, tmp_path: Path) -> None:
    """The link's owner may change its target to another stack, which would get the pictures."""
    with claim_run_directory(base)[0] as run_dir:
        publish_stack(run_dir.path, "http://127.0.0.1:8000", "127.0.0.1:8001")
        (tmp_path / "link").symlink_to(base)
        assert running_stacks(base)
        assert running_stacks(tmp_path / "link") == ()


def test_what_a_killed_stack_left_is_no_stack(base: Path) -> None:
    """Its folder stays until the next start; its lock is free."""
    run_dir, _ = claim_run_directory(base)
    publish_stack(run_dir.path, "http://127.0.0.1:8000", "127.0.0.1:8001")
    os.close(run_dir._lock)
    assert (run_dir.path / "running.json").exists()
    assert running_stacks(base) == ()


def test_stack_of_another_version_is_not_joined(base: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its records are others; it is reached by its ports, as from another host."""
    with claim_run_directory(base)[0] as run_dir:
        monkeypatch.setattr(running, "PROTOCOL", running.PROTOCOL + 1)
        publish_stack(run_dir.path, "http://127.0.0.1:8000", "127.0.0.1:8001")
        assert len(running_stacks(base)) == 1
        monkeypatch.undo()
        assert running_stacks(base) == ()


@pytest.mark.parametrize("text", [b"", b"{}", b"\xff", b'{"http_url": 1}', b"[" * 10_000])
def test_file_that_says_nothing_is_passed_over(base: Path, text: bytes) -> None:
    """The other stacks are found."""
    with claim_run_directory(base)[0] as broken, claim_run_directory(base)[0] as whole:
        (broken.path / "running.json").write_bytes(text)
        publish_stack(whole.path, "http://127.0.0.1:8000", "127.0.0.1:8001")
        assert [stack.run_dir for stack in running_stacks(base)] == [whole.path]


def test_folder_that_others_may_write_is_not_believed(base: Path) -> None:
    """Who connects to a socket there would hand another user his pictures."""
    with claim_run_directory(base)[0] as run_dir:
        publish_stack(run_dir.path, "http://127.0.0.1:8000", "127.0.0.1:8001")
        base.chmod(0o777)
        assert running_stacks(base) == ()
    assert running_stacks(base / "absent") == ()


def test_socket_in_a_folder_with_a_long_name_is_reached_by_another_process(tmp_path: Path) -> None:
    """Each process has a short way of its own to the same socket; a short name is itself."""
    short = Path("/" + "x" * (MAX_PATH_BYTES - 40))
    assert reachable_folder(short) is short
    folder = tmp_path / ("long" * 40)
    folder.mkdir()
    one, other = reachable_folder(folder), reachable_folder(folder)
    assert one != other
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as client:
        listener.bind(str(one / "core-batch.sock"))
        listener.listen()
        client.connect(str(other / "core-batch.sock"))
    assert (folder / "core-batch.sock").is_socket()
    for path in (one, other):
        os.close(int(path.name))
