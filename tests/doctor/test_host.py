"""CPU, memory, operating system, limits and settings: one table a subject."""

from dataclasses import replace
from pathlib import Path

import pytest

from penstock.doctor import finding as configuration
from penstock.doctor import host
from penstock.doctor import host as cgroup
from penstock.doctor import host as limits
from penstock.doctor import host as memory
from penstock.doctor import host as processor
from penstock.doctor.finding import Severity, shown_bytes
from penstock.doctor.host import HostFacts, LimitFacts, MemoryFacts, ProcessorFacts
from tests.doctor.machines import GIB, pick

CPU = ProcessorFacts("AMD EPYC", 8, 8, 8, None, ("avx2", "avx512f", "avx512_vnni"))
HOST = HostFacts("Debian 12", "6.1", "x86_64", (2, 36), (3, 11, 7), "", 2, needs_triton=False)
MEMORY = MemoryFacts(16 * GIB, 12 * GIB, None, 0, 0, inflight_bytes=GIB)
LIMITS = LimitFacts((4096, 4096), (4096, 4096), (0, 0), (8 << 20, -1), 512, has_gpu=False)


@pytest.mark.parametrize(
    ("flags", "status", "words"),
    [
        (("avx2", "avx512f", "avx512_vnni"), Severity.OK, "AVX512-VNNI, AVX-512, AVX2: INT8 pays"),
        (("avx2", "avx_vnni"), Severity.OK, "AVX-VNNI"),
        (("amx_int8", "avx512_vnni", "avx512f"), Severity.OK, "AMX"),
        (("asimd", "asimddp"), Severity.OK, "dot product"),
        (("avx2", "avx512f"), Severity.NOTE, "without VNNI"),
        (("asimd",), Severity.NOTE, "NEON"),
        (("sse4_2",), Severity.WARNING, "neither"),
    ],
)
def test_cpu_flags_say_whether_int8_pays(flags: tuple[str, ...], status: Severity, words: str) -> None:
    """INT8 pays with a dot product instruction, and hardly without."""
    finding = pick(processor.processor_findings(replace(CPU, flags=flags)), "cpu.int8")
    assert (finding.status, words in finding.found) == (status, True)


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (CPU, Severity.OK, "8 of 8 cores"),
        (replace(CPU, affinity=4, usable=4), Severity.OK, "4 of 8 cores (affinity)"),
        (replace(CPU, quota=1.5, usable=1), Severity.NOTE, "1 of 8 cores (the cgroup's quota is 1.5)"),
    ],
)
def test_cpu_cores_are_those_that_we_may_use(facts: ProcessorFacts, status: Severity, words: str) -> None:
    """The count is what affinity and quota leave, and says which of them it was."""
    finding = pick(processor.processor_findings(facts), "cpu.cores")
    assert (finding.status, words in finding.found) == (status, True)


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (MEMORY, Severity.OK, "12.0 GiB of 16.0 GiB available"),
        (replace(MEMORY, limit_bytes=4 * GIB), Severity.OK, "the cgroup allows 4.0 GiB"),
        (replace(MEMORY, limit_bytes=GIB), Severity.WARNING, "in flight alone may hold 1.0 GiB"),
        (replace(MEMORY, available_bytes=GIB), Severity.WARNING, "1.0 GiB of 16.0 GiB available"),
    ],
)
def test_memory_must_hold_the_requests_in_flight(facts: MemoryFacts, status: Severity, words: str) -> None:
    """Too little for what the gateway may let in is a warning with the setting that lets in less."""
    finding = pick(memory.memory_findings(facts), "memory.size")
    assert (finding.status, words in finding.found) == (status, True)
    assert ("PENSTOCK_MAX_INFLIGHT_BYTES" in finding.advice) is (status is Severity.WARNING)


def test_memory_swapping_machine_is_a_note() -> None:
    """A machine that has swapped out much says so; one with an idle swap does not."""
    full = replace(MEMORY, swap_bytes=2 * GIB, swap_used_bytes=GIB)
    assert pick(memory.memory_findings(full), "memory.swap").status is Severity.NOTE
    assert pick(memory.memory_findings(replace(full, swap_used_bytes=1)), "memory.swap").status is Severity.OK


@pytest.mark.parametrize(
    ("facts", "name", "status", "words"),
    [
        (HOST, "host.system", Severity.OK, "glibc 2.36"),
        (replace(HOST, glibc=(2, 31)), "host.system", Severity.NOTE, "needs glibc 2.35"),
        (replace(HOST, glibc=None), "host.system", Severity.NOTE, "another C library"),
        (replace(HOST, machine="aarch64"), "host.system", Severity.NOTE, "runs on x86-64"),
        (replace(HOST, machine="aarch64", needs_triton=True), "host.system", Severity.WARNING, "runs on x86-64"),
        (HOST, "host.python", Severity.OK, "3.11.7"),
        (replace(HOST, python=(3, 12, 3)), "host.python", Severity.OK, "3.12.3"),
        (replace(HOST, python=(3, 13, 0)), "host.python", Severity.NOTE, "numpy 1.26"),
        (replace(HOST, container="docker", cgroup_version=1), "host.container", Severity.OK, "docker, cgroup v1"),
        (replace(HOST, cgroup_version=0), "host.container", Severity.OK, "no container, no cgroup"),
    ],
)
def test_host_is_held_against_what_tritons_wheel_needs(
    facts: HostFacts, name: str, status: Severity, words: str
) -> None:
    """A platform that Triton's wheel does not run on is a note, a Python that nothing runs on a problem."""
    finding = pick(host.host_findings(facts), name)
    assert (finding.status, words in finding.found) == (status, True)
    assert bool(finding.advice) is (status is not Severity.OK)


@pytest.mark.parametrize(
    ("facts", "name", "status", "advice"),
    [
        (LIMITS, "limits.files", Severity.OK, ""),
        (replace(LIMITS, files=(-1, -1)), "limits.files", Severity.OK, ""),
        (replace(LIMITS, files=(1024, 4096)), "limits.files", Severity.OK, ""),
        (replace(LIMITS, files=(1024, 1024)), "limits.files", Severity.WARNING, "PENSTOCK_MAX_INFLIGHT_REQUESTS=384"),
        (replace(LIMITS, tasks=(100, 100)), "limits.tasks", Severity.WARNING, "ulimit -u"),
        (LIMITS, "limits.core", Severity.OK, ""),
        (LIMITS, "limits.locked", Severity.OK, ""),
        (replace(LIMITS, has_gpu=True), "limits.locked", Severity.NOTE, "memlock=-1"),
        (replace(LIMITS, has_gpu=True, locked=(-1, -1)), "limits.locked", Severity.OK, ""),
    ],
)
def test_limits_are_held_against_what_the_settings_let_in(
    facts: LimitFacts, name: str, status: Severity, advice: str
) -> None:
    """Files enough for the requests in flight, and the command where there are not."""
    finding = pick(limits.limit_findings(facts), name)
    assert (finding.status, advice in finding.advice) == (status, True)


@pytest.mark.parametrize(
    ("mistake", "found", "advice"),
    [
        (
            "PENSTOCK_A: unknown setting 'a'; did you mean PENSTOCK_B?",
            "unknown setting 'a'",
            "did you mean PENSTOCK_B?",
        ),
        ("PENSTOCK_HTTP_PORT is 'x': it should be a whole number", "a whole number", "penstock up --help"),
    ],
)
def test_settings_mistake_is_a_problem_with_its_fix(mistake: str, found: str, advice: str) -> None:
    """The reader's sentence is what was found, and its second half what to do."""
    (finding,) = configuration.settings_findings(mistake, [])
    assert (finding.status, found in finding.found, advice in finding.advice) == (Severity.PROBLEM, True, True)


def test_settings_names_what_was_given() -> None:
    """What is not by default is named."""
    assert configuration.settings_findings("", ["PENSTOCK_HOME"])[0].found == "given: PENSTOCK_HOME"
    assert configuration.settings_findings("", [])[0].found == "all by default"


@pytest.mark.parametrize(
    ("files", "own", "limit"),
    [
        ({"memory.max": "max\n"}, "0::/\n", None),
        ({"a/b/memory.max": "max\n", "a/memory.max": "1073741824\n"}, "0::/a/b\n", GIB),
        ({"memory/memory.limit_in_bytes": "9223372036854771712\n"}, "4:memory:/\n", None),
        ({"memory/x/memory.limit_in_bytes": f"{2 * GIB}\n"}, "5:cpu:/y\n4:memory:/x\n", 2 * GIB),
        ({}, "", None),
    ],
)
def test_cgroup_memory_limit_is_the_smallest_above_us(
    tmp_path: Path, files: dict[str, str], own: str, limit: int | None
) -> None:
    """Both versions, nested or at the root of a container, limited or not."""
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(text)
    (tmp_path / "own").write_text(own)
    assert cgroup.memory_limit_bytes(tmp_path / "root", tmp_path / "own") == limit


def test_shown_bytes_has_a_unit_that_fits() -> None:
    """KiB, MiB, GiB."""
    assert [shown_bytes(count) for count in (512 << 10, 64 << 20, 3 << 29)] == ["512 KiB", "64 MiB", "1.5 GiB"]
