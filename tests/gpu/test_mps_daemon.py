"""The MPS daemon as a child, and as a foreign one: started, given its limits, asked, ended, and found again."""

import asyncio
import contextlib
import logging
import os
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from penstock.engines.run_directory import ENGINE_ID_VARIABLE, reap
from penstock.engines.triton import launch as triton_launch
from penstock.gpu.mps.control import MpsControl, MpsError, MpsOptions, ServerState
from penstock.gpu.mps.daemon import STALE_FILES, DaemonProcess, ForeignDaemon, OwnDaemon, start_background
from tests.gpu.mps_programs import programs

MARK = "0123456789ab"


class Place:
    """A folder with the programs, and the daemons that were made in it."""

    def __init__(self, folder: Path) -> None:
        self.program = str(programs(folder / "bin") / "nvidia-cuda-mps-control")
        self.pipes = folder / "pipes"
        self.log: list[tuple[int, str, dict[str, object]]] = []
        self.made: list[OwnDaemon] = []

    def daemon(self, *, sick: str = "", **options: object) -> OwnDaemon:
        environ = {"PATH": os.defpath, ENGINE_ID_VARIABLE: MARK, "FAKE_MPS_SICK": sick}
        bond = (sys.executable, "-I", "-S", triton_launch.__file__, str(os.getpid()))
        hold = DaemonProcess(
            self.program, bond=bond, environ=environ, clear=lambda child: reap(MARK, child_pid=child), card_count=2
        )
        daemon = OwnDaemon(MpsOptions(self.pipes, **options), hold, emit=self.emit)  # type: ignore[arg-type]
        self.made.append(daemon)
        return daemon

    def emit(self, level: int, event: str, **fields: object) -> None:
        self.log.append((level, event, fields))

    @property
    def said(self) -> list[str]:
        return (self.pipes / "logs" / "said").read_text().splitlines()

    @property
    def left(self) -> list[str]:
        return [name for name in STALE_FILES if (self.pipes / name).exists()]


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    """Nothing of it runs afterwards."""
    where = Place(tmp_path)
    yield where
    for daemon in where.made:
        await daemon.stop()


async def test_daemon_started_answers_has_its_limits_and_stop_leaves_nothing(place: Place) -> None:
    """Limits are set by command, where a wrong one is refused aloud, for every card; quit is asked for at the end."""
    daemon = place.daemon(active_thread_percentage=50, pinned_memory="4G")
    await daemon.start()
    pid = daemon.pid
    assert pid is not None
    assert place.said[0] == "environment {}"
    assert place.said[2:5] == [
        "set_default_active_thread_percentage 50",
        "set_default_device_pinned_mem_limit 0 4G",
        "set_default_device_pinned_mem_limit 1 4G",
    ]
    assert (await daemon.status()).is_up
    await daemon.stop()
    assert place.said[-1] == "quit -t 5"
    assert (place.left, daemon.pid) == ([], None)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    assert "has ended" in (await daemon.status()).reason


async def test_daemon_that_is_killed_is_seen_at_once_and_starts_over_what_it_left(place: Place) -> None:
    """Its socket's file stays; the next start removes it. Its end is reported without a look."""
    daemon = place.daemon()
    reported = asyncio.Event()
    daemon.trouble = reported.set
    await daemon.start()
    assert daemon.pid is not None
    os.kill(daemon.pid, signal.SIGKILL)
    await asyncio.wait_for(reported.wait(), 5)
    status = await daemon.status()
    assert (status.is_up, status.is_silent) == (False, False)
    assert "control" in place.left
    await daemon.stop()
    await daemon.start()
    assert (await daemon.status()).is_up


async def test_daemon_that_dies_at_once_is_reported_and_not_waited_for(place: Place) -> None:
    """Its lines are in the log above."""
    with pytest.raises(MpsError, match="ended at once"):
        await asyncio.wait_for(place.daemon(sick="dead").start(), 5)


async def test_daemon_that_refuses_a_limit_does_not_stay(place: Place) -> None:
    """Clients without their limit are worse than none."""
    with pytest.raises(MpsError, match="refuses 'set_default_device_pinned_mem_limit 7 1G': no such device"):
        await place.daemon(pinned_memory="7=1G").start()
    assert place.left == []


async def deaf(place: Place, monkeypatch: pytest.MonkeyPatch, *, term_s: float) -> tuple[OwnDaemon, int]:
    """One that runs and hears neither quit nor SIGTERM, for which term_s is waited; and its process."""
    monkeypatch.setattr("penstock.gpu.mps.daemon._TERM_S", term_s)
    daemon = place.daemon(sick="deaf", quit_s=0)
    await daemon.start()
    assert daemon.pid is not None
    return daemon, daemon.pid


async def test_daemon_that_hears_no_signal_is_ended_all_the_same(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither quit nor SIGTERM: it is killed."""
    daemon, pid = await deaf(place, monkeypatch, term_s=0.2)
    await daemon.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_daemon_that_nothing_ends_is_left_after_seconds(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that hangs in the driver: a stop of the stack does not wait for it."""
    daemon, pid = await deaf(place, monkeypatch, term_s=0.1)
    with monkeypatch.context() as patch:
        patch.setattr(f"{__name__}.reap", lambda *_, **__: None)
        patch.setattr(asyncio.subprocess.Process, "kill", lambda _: None)
        async with asyncio.timeout(60):
            await daemon.stop()
        os.kill(pid, 0)
    with contextlib.suppress(ProcessLookupError):  # once it has ended
        async with asyncio.timeout(60):
            while True:
                os.kill(pid, signal.SIGKILL)
                await asyncio.sleep(0.01)


async def test_daemon_in_the_background_that_does_not_get_there_is_given_up(place: Place, tmp_path: Path) -> None:
    """`-d` returns when the daemon runs; where the driver hangs it does not."""
    program = tmp_path / "hangs"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    async with asyncio.timeout(60):
        with pytest.raises(MpsError, match="does not return within"):
            await start_background(MpsOptions(place.pipes, start_s=0.1), str(program), os.environ, 1)


async def test_second_daemon_in_the_same_folder_is_refused(place: Place) -> None:
    """The first one's files are not touched."""
    first = place.daemon()
    await first.start()
    with pytest.raises(MpsError, match=r"runs in .* already"):
        await place.daemon().start()
    assert (await first.status()).is_up


async def test_folder_with_too_long_a_path_is_refused(tmp_path: Path) -> None:
    """A Unix socket's path has 107 bytes; NVIDIA's daemon would say less."""
    where = Place(tmp_path)
    where.pipes = tmp_path / ("x" * 90)
    with pytest.raises(MpsError, match="too long a path"):
        await where.daemon().start()


async def test_servers_and_clients_are_reported_as_the_daemon_lists_them(place: Place) -> None:
    """Those that live; a fault is a fault until the last client has gone."""
    daemon = place.daemon()
    await daemon.start()
    assert (await daemon.status()).servers == ()
    (place.pipes / "clients").write_text(f"{os.getpid()}\n{os.getppid()}\n")
    (place.pipes / "state").write_text("FAULT")
    status = await daemon.status()
    assert [(server.state, server.clients) for server in status.servers] == [
        (ServerState.FAULT, (os.getpid(), os.getppid()))
    ]
    assert status.clients == {os.getpid(), os.getppid()}
    (place.pipes / "clients").write_text("")
    assert [server.state for server in (await daemon.status()).servers] == [ServerState.ACTIVE]


async def test_daemon_that_refuses_a_list_of_no_servers_is_up(place: Place) -> None:
    """Whichever way it says that it has none."""
    daemon = place.daemon(sick="listless")
    await daemon.start()
    status = await daemon.status()
    assert (status.is_up, status.servers) == (True, ())


def busy_from(control: MpsControl, pipes: Path, question: int, times: int) -> list[str]:
    """From that question of a status on the daemon turns so many away; the questions, as they come."""
    ask, asked = control.ask, []

    async def ask_beside_others(command: str) -> str:
        if len(asked) == question:
            (pipes / "busy").write_text(str(times))
        asked.append(command)
        return await ask(command)

    control.ask = ask_beside_others  # type: ignore[method-assign]
    return asked


async def test_daemon_that_answers_another_program_is_asked_again(place: Place) -> None:
    """It turns a question away while it answers another program: its server and clients are reported all the same."""
    daemon = place.daemon()
    await daemon.start()
    (place.pipes / "clients").write_text(str(os.getpid()))
    asked = busy_from(daemon.control, place.pipes, 2, 3)
    status = await daemon.status()
    assert (status.is_up, status.clients) == (True, {os.getpid()})
    assert ((place.pipes / "busy").read_text(), len(asked)) == ("0", 3)


async def test_daemon_that_others_ask_without_a_pause_is_silent(place: Place) -> None:
    """Nothing is known then: a status without servers or clients would have every client restarted."""
    await place.daemon().start()
    (place.pipes / "clients").write_text(str(os.getpid()))
    control = MpsControl(place.pipes, program=place.program, environ={"PATH": os.defpath}, answer_s=2.0)
    busy_from(control, place.pipes, 2, 100_000)
    status = await control.status()
    (place.pipes / "busy").unlink()
    assert (status.is_up, status.is_silent) == (False, True)
    assert "others ask it without a pause" in status.reason


async def test_line_of_trouble_in_its_log_is_reported_at_once(place: Place) -> None:
    """So that a fault is looked at before the next look's turn; what our own questions leave there is not shown."""
    daemon = place.daemon()
    reported = asyncio.Event()
    daemon.trouble = reported.set
    await daemon.start()
    await daemon.control.threads()
    assert not reported.is_set()
    await daemon.control.ask("stumble")
    await asyncio.wait_for(reported.wait(), 5)
    lines = [(level, fields["line"]) for level, event, fields in place.log if event == "MPS says"]
    assert [level for level, line in lines if "exception" in str(line)] == [logging.WARNING]
    assert not any("get_default" in str(line) for _, line in lines)


async def test_daemon_of_another_protocol_is_refused_with_what_to_set(place: Place) -> None:
    """Drivers that know a third protocol speak it on request only; this one was asked to. At once."""
    async with asyncio.timeout(30):
        with pytest.raises(MpsError, match="CUDA_MPS_PROTOCOL_VERSION=2"):
            await place.daemon(sick="foreign", start_s=60.0).start()


async def test_daemon_that_does_not_answer_is_silent_not_gone(place: Place) -> None:
    """It listens; the caller waits no longer than it said."""
    daemon = place.daemon()
    await daemon.start()
    assert daemon.pid is not None
    os.kill(daemon.pid, signal.SIGSTOP)
    status = await MpsControl(place.pipes, program=place.program, answer_s=0.2).status()
    os.kill(daemon.pid, signal.SIGCONT)
    assert (status.is_up, status.is_silent, "does not answer" in status.reason) == (False, True, True)


async def test_foreign_daemon_is_waited_for_and_never_ended(place: Place) -> None:
    """A sidecar may come later than its clients; without one there is a sentence, after the time."""
    options = MpsOptions(place.pipes)
    with pytest.raises(MpsError, match="no MPS daemon listens in"):
        await ForeignDaemon(options, program=place.program, wait_s=0.1).start()
    waited = asyncio.create_task(ForeignDaemon(options, program=place.program, wait_s=10.0).start())
    own = place.daemon()
    await own.start()
    await asyncio.wait_for(waited, 5)
    foreign = ForeignDaemon(options, program=place.program)
    await foreign.stop()
    assert (await foreign.status()).is_up


def test_clients_of_a_daemon_that_is_shown_some_cards_are_not_filtered_twice() -> None:
    """Its cards have new numbers, from 0 on; by UUID they have the same name for both."""
    options = MpsOptions(Path("/run/mps"))
    assert "CUDA_VISIBLE_DEVICES" not in options.client_environ({"CUDA_VISIBLE_DEVICES": "2,3"})
    by_name = {"CUDA_VISIBLE_DEVICES": "GPU-3b1a"}
    assert options.client_environ(by_name) == by_name | options.env_vars()
    inherited = {"CUDA_MPS_ACTIVE_THREAD_PERCENTAGE": "7", "CUDA_MPS_PROTOCOL_VERSION": "3", "A": "1"}
    assert options.daemon_environ(inherited) == {"A": "1", "CUDA_MPS_PROTOCOL_VERSION": "2"} | options.env_vars()
