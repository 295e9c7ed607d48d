"""How many clients fit on a card, what each may have, and which processes hold one."""

import os
from pathlib import Path

import pytest

from penstock.gpu.mps.control import ServerState, pids_of, state_of
from penstock.gpu.mps.limits import (
    ModelClients,
    client_limit,
    memory_by_card,
    memory_limit_error,
    read_percentage,
    too_many_clients,
    unlimited,
)
from penstock.gpu.mps.supervisor import any_exists, processes_using_gpu, processes_with_mark
from penstock.gpu.nvml import GpuDevice, NvmlOutcome, NvmlReading


def cards(*capabilities: tuple[int, int], cuda: tuple[int, int] = (13, 0)) -> NvmlReading:
    """A machine with such cards."""
    found = tuple(
        GpuDevice(i, f"card {major}.{minor}", (major, minor), 1, 0) for i, (major, minor) in enumerate(capabilities)
    )
    return NvmlReading(NvmlOutcome.ANSWERED, cuda=cuda, cards=found)


@pytest.mark.parametrize(
    ("capability", "cuda", "limit"),
    [((6, 1), (13, 1), 16), ((7, 0), (12, 4), 48), ((9, 0), (13, 0), 48), ((9, 0), (13, 1), 60), ((9, 0), None, 48)],
)
def test_client_limit_goes_by_card_and_driver(
    capability: tuple[int, int], cuda: tuple[int, int] | None, limit: int
) -> None:
    """16 before Volta, 48 from it on, 60 from CUDA 13.1 on."""
    assert client_limit(capability, cuda) == limit


def test_instances_that_fit_with_tritons_own_context_are_no_trouble() -> None:
    """47 and one are 48; no model on the card is no trouble either."""
    assert too_many_clients([ModelClients("a", 40), ModelClients("b", 7)], cards((9, 0))) == ""
    assert too_many_clients([], cards((9, 0))) == ""


def test_one_instance_too_many_is_reported_with_the_largest_model_and_a_remedy() -> None:
    """One sentence: how many, on which card, out of how many, and whose."""
    said = too_many_clients([ModelClients("a", 40), ModelClients("b", 8)], cards((9, 0)))
    assert "49 MPS clients on GPU 0, 48 model instances and Triton's own" in said
    assert "more than the 48" in said
    assert "'a' (40)" in said
    assert too_many_clients([ModelClients("a", 48)], cards((9, 0), cuda=(13, 1))) == ""
    assert "51 MPS clients" in too_many_clients([ModelClients("a", 25), ModelClients("a", 25)], cards((9, 0)))


def test_instances_on_other_cards_do_not_count_on_this_one() -> None:
    """A group that names its cards is on these; one that names none is on each."""
    named = [ModelClients("a", 30, (0,)), ModelClients("b", 30, (1,))]
    assert too_many_clients(named, cards((9, 0), (9, 0))) == ""
    assert "GPU 1" in too_many_clients([*named, ModelClients("c", 20, (1,))], cards((9, 0), (9, 0)))
    assert "GPU 0" in too_many_clients([*named, ModelClients("c", 20)], cards((9, 0), (9, 0)))


def test_cards_before_volta_limit_no_client() -> None:
    """Reported by name; newer ones do."""
    assert unlimited(cards((7, 0), (9, 0)).cards) == ""
    assert "GPU 1 (card 6.1) is older than Volta" in unlimited(cards((7, 0), (6, 1)).cards)


@pytest.mark.parametrize(
    ("text", "limits"),
    [("", {}), ("4G", {0: "4G", 1: "4G"}), ("0=4G, 1=512M", {0: "4G", 1: "512M"}), ("4G,1=2G", {0: "4G", 1: "2G"})],
)
def test_memory_limits_are_for_every_card_or_for_those_named(text: str, limits: dict[int, str]) -> None:
    """Of two cards."""
    assert memory_limit_error(text) == ""
    assert memory_by_card(text, 2) == limits


@pytest.mark.parametrize("said", ["much", "101", -1, None, "nan"])
def test_share_of_the_threads_that_is_none_is_refused(said: object) -> None:
    """With what it takes: as a file, a variable or a flag have it."""
    assert [read_percentage(taken) for taken in ("auto", "12.5", 50, 0)] == ["auto", 12.5, 50.0, 0.0]
    with pytest.raises(ValueError, match="it takes a percentage up to 100"):
        read_percentage(said)


@pytest.mark.parametrize("text", ["0", "4 GB", "4T", "0=", "=4G", "4G;2G", "-4G"])
def test_memory_limit_that_the_daemon_would_not_take_is_refused(text: str) -> None:
    """Before anything starts."""
    assert "use 4G" in memory_limit_error(text)


@pytest.mark.parametrize(
    ("answer", "state"),
    [
        ("ACTIVE", ServerState.ACTIVE), ("Server status: FAULT\n", ServerState.FAULT),
        ("INITIALIZING", ServerState.INITIALIZING), ("", ServerState.UNKNOWN), ("no default", ServerState.UNKNOWN),
    ],
)  # fmt: skip
def test_servers_state_is_read_out_of_what_the_daemon_says(answer: str, state: ServerState) -> None:
    """The word counts, whatever stands around it; drivers that do not know the question say none."""
    assert state_of(answer) is state


def test_process_ids_are_the_lines_that_are_numbers() -> None:
    """One a line, twice for two contexts; words are none."""
    assert pids_of("12\n 13 \n13\nServer 14\n\n") == (12, 13, 13)


def process(proc: Path, pid: int, environ: bytes, *files: str) -> None:
    """One of a false /proc, with these files open."""
    (proc / str(pid) / "fd").mkdir(parents=True)
    (proc / str(pid) / "environ").write_bytes(environ)
    for number, target in enumerate(files):
        os.symlink(target, proc / str(pid) / "fd" / str(number))


def test_processes_of_an_engine_are_known_by_its_mark_and_those_on_a_card_by_cudas_file(tmp_path: Path) -> None:
    """NVML opens the cards' files, too; the mark is a whole entry of the environment."""
    process(tmp_path, 10, b"A=1\0MARK=x\0", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm")
    process(tmp_path, 11, b"MARK=x\0", "/dev/nvidiactl", "/dev/nvidia0", "/dev/nvidia-uvm-tools")
    process(tmp_path, 12, b"MARK=xy\0", "/dev/nvidia-uvm")
    (tmp_path / "13").mkdir()  # it has just ended
    (tmp_path / "meminfo").touch()
    ours = processes_with_mark("MARK=x", tmp_path)
    assert ours == {10, 11}
    assert processes_using_gpu(ours | {13}, tmp_path) == {10}
    assert any_exists(frozenset(), tmp_path)
    assert any_exists(frozenset({10, 99}), tmp_path)
    assert not any_exists(frozenset({98, 99}), tmp_path)
