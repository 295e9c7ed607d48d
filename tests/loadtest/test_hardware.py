"""What figures belong to: this machine as it is, whose address is whose, and which card is which."""

import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest

from penstock_load import hardware
from penstock_load.hardware import ANY, Hardware, cpu_quota, describe, is_local, matches, read_machine
from penstock_load.results import Machine


def test_this_machine_says_what_it_is() -> None:
    """CPU, cores, memory, system and the versions of what measured are there; memory is not more than there is."""
    machine = read_machine()
    versions = dict(machine.versions)
    assert machine.cpu
    assert 1 <= machine.cores <= (psutil.cpu_count() or 1)
    assert 0 < machine.memory_gib <= psutil.virtual_memory().total / 2**30 + 0.1
    assert machine.system.startswith(sys.platform.capitalize())
    assert versions.keys() >= {"Python", "penstock", "aiohttp", "grpcio", "numpy"}
    assert describe(machine).endswith(f"{machine.cores} core{'s' * (machine.cores > 1)}")


def test_cards_are_asked_in_another_process_with_a_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    """What NVML answers are the machine's GPUs; a driver that never answers, or rubbish, leaves it without."""
    says: dict[str, str] = {
        '["Tesla V100-SXM2-16GB", "Tesla V100-SXM2-16GB"]': "2 × Tesla V100-SXM2-16GB, ",
        "no such thing": "",
    }
    for answer, words in says.items():
        command = (sys.executable, "-c", f"import sys; sys.stdout.write({answer!r})")
        monkeypatch.setattr(hardware, "_ASK_NVML", command)
        machine = read_machine()
        assert describe(machine) == f"{words}{describe(msgspec.structs.replace(machine, gpus=()))}"
    monkeypatch.setattr(hardware, "_ASK_NVML", (sys.executable, "-c", "import time; time.sleep(60)"))
    monkeypatch.setattr(hardware, "NVML_TIMEOUT_S", 0.05)
    assert read_machine().gpus == ()


def test_child_that_asks_nvml_answers_in_json() -> None:
    """The module, run as a program, prints the names as JSON: an empty list where no card is."""
    answer = subprocess.run(
        [sys.executable, "-m", "penstock_load.hardware"], capture_output=True, timeout=60, check=True
    ).stdout
    assert isinstance(msgspec.json.decode(answer, type=list[str]), list)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("http://127.0.0.1:8000", True),
        ("http://localhost:8000/", True),
        ("localhost:8001", True),
        ("http://[::1]:8000", True),
        ("http://0.0.0.0:8000", True),
        ("http://192.0.2.7:8000", False),
        ("gpu-box.example:8001", False),
        ("http://localhost.example:8000", False),
    ],
)
def test_address_is_this_machines_or_not(url: str, expected: bool) -> None:
    """Loopback is here, with or without a scheme; documentation's addresses and foreign names are not, unasked."""
    assert is_local(url) is expected


def test_own_address_of_an_interface_is_local(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address of one of this machine's interfaces is this machine."""
    one = psutil.net_if_addrs()["lo"][0]._replace(address="192.0.2.7")
    monkeypatch.setattr(psutil, "net_if_addrs", lambda: {"eth0": [one]})
    assert is_local("http://192.0.2.7:8000")
    assert not is_local("http://192.0.2.8:8000")


CARDS = [
    ("V100", "Tesla V100-SXM2-16GB", True),
    ("V100", "V100", True),
    ("V100", "1 × Tesla V100-PCIE-32GB, 16 cores", True),
    ("V100", "1x V100", True),
    ("V100", "v100 with 8 vCPUs", True),
    ("V100", "2 × Tesla V100-SXM2-16GB", False),
    ("V100", "8x V100", False),
    ("V100", "4 V100, 32 cores", False),
    ("V100", "V100 + V100", False),
    ("V100", "Tesla V100S-PCIE-32GB", False),
    ("V100", "GRID V100-8Q", False),
    ("P4", "Tesla P4", True),
    ("P4", "Tesla P40", False),
    ("P4", "NVIDIA L4", False),
    ("L4", "NVIDIA L40S", False),
    ("H200", "NVIDIA H200", True),
    ("H200", "NVIDIA GH200 480GB", False),
    ("H200", "NVIDIA H200 MIG 1g.18gb", False),
    ("A100", "NVIDIA A100-SXM4-80GB", True),
    ("A100", "NVIDIA A100-40C", False),
    ("V100", "AMD EPYC, 2 cores", False),
    ("V100", "", False),
]


@pytest.mark.parametrize(("wanted", "found", "expected"), CARDS)
def test_card_is_the_one_that_is_spoken_of(wanted: str, found: str, expected: bool) -> None:
    """One whole card of that name, however it is written; not a relative of it, nor two, nor a slice."""
    assert matches(Hardware(wanted), found) is expected


def test_cards_and_cores_of_a_machine_are_counted() -> None:
    """A machine's own list of cards and its cores count: one H200 with 16 cores is neither two nor one with 8."""
    wanted = Hardware("H200", 16)
    machine = Machine("Xeon", 16, 128.0, ("NVIDIA H200",), "Linux", ())
    assert matches(wanted, machine)
    assert not matches(wanted, msgspec.structs.replace(machine, gpus=("NVIDIA H200",) * 2))
    assert not matches(wanted, msgspec.structs.replace(machine, cores=8))
    assert matches(wanted, "NVIDIA H200, 16 cores")
    assert not matches(wanted, "NVIDIA H200")
    assert matches(Hardware(cores=2), "AMD EPYC, 2 cores")
    assert matches(ANY, "")


def test_described_machine_matches_as_the_machine_does() -> None:
    """What describe says of a machine is understood when it is given back as a declaration."""
    for cards in ((), ("Tesla V100-SXM2-16GB",), ("Tesla V100-SXM2-16GB",) * 4, ("Tesla P40", "NVIDIA H200")):
        machine = Machine("Intel(R) Xeon(R) Platinum 8480+", 16, 128.0, cards, "Linux", ())
        for wanted in (Hardware("V100"), Hardware("P4"), Hardware("H200", 16), Hardware(cores=16), Hardware(cores=8)):
            assert matches(wanted, machine) is matches(wanted, describe(machine))


def test_quota_of_a_cgroup_counts_as_cores(tmp_path: Path) -> None:
    """The least quota over the group and those above it, of either version of cgroups; none is no limit."""
    own = tmp_path / "cgroup"
    (tmp_path / "a" / "b").mkdir(parents=True)
    own.write_text("0::/a/b\n")
    assert cpu_quota(tmp_path, own) is None
    (tmp_path / "a" / "b" / "cpu.max").write_text("max 100000\n")
    (tmp_path / "a" / "cpu.max").write_text("150000 100000\n")
    assert cpu_quota(tmp_path, own) == 1.5
    (tmp_path / "cpu" / "c").mkdir(parents=True)
    (tmp_path / "cpu" / "c" / "cpu.cfs_quota_us").write_text("200000\n")
    (tmp_path / "cpu" / "c" / "cpu.cfs_period_us").write_text("100000\n")
    own.write_text("4:memory:/c\n1:cpu:/c\n0::/\n")
    assert cpu_quota(tmp_path, own) == 2.0
