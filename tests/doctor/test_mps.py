"""MPS: not applicable, missing, stopped, running, of another user; and its client limits."""

from dataclasses import replace

import msgspec
import pytest

from penstock.doctor import mps
from penstock.doctor.finding import Severity
from penstock.doctor.mps import MpsFacts
from penstock.gpu.mps.limits import client_limit
from penstock.gpu.nvml import NvmlOutcome, NvmlReading
from tests.doctor.machines import H100, P4, V100, pick, reading

STOPPED = MpsFacts("/usr/bin/nvidia-cuda-mps-control", "/tmp/nvidia-mps", has_pipe=False, daemon_uids=(), uid=1000)


@pytest.mark.parametrize(
    ("facts", "status", "words"),
    [
        (replace(STOPPED, control=""), Severity.NOTE, "not on PATH"),
        (STOPPED, Severity.NOTE, "take turns"),
        (replace(STOPPED, has_pipe=True, daemon_uids=(1000,)), Severity.OK, "running in /tmp/nvidia-mps"),
        (replace(STOPPED, has_pipe=True, daemon_uids=(0,)), Severity.OK, "running"),
        (replace(STOPPED, has_pipe=True), Severity.OK, "not visible from here"),
        (replace(STOPPED, has_pipe=True, daemon_uids=(1001,)), Severity.WARNING, "one user at a time"),
        (replace(STOPPED, daemon_uids=(1000,)), Severity.WARNING, "its pipe is not in"),
    ],
)
def test_mps_service_each_state_has_its_own_finding(facts: MpsFacts, status: Severity, words: str) -> None:
    """Whether it is here, runs, and runs for us; advice wherever it is not well."""
    finding = pick(mps.mps_findings(facts, reading(H100)), "mps.service")
    assert (finding.status, words in finding.found) == (status, True)
    assert bool(finding.advice) is (status is not Severity.OK)


def test_mps_without_a_gpu_has_nothing_to_share() -> None:
    """Without a card nothing is said of daemons and limits."""
    findings = mps.mps_findings(STOPPED, NvmlReading(NvmlOutcome.NO_LIBRARY))
    assert [(one.status, one.found) for one in findings] == [(Severity.OK, "no NVIDIA GPU to share")]


@pytest.mark.parametrize(
    ("capability", "cuda", "limit"),
    [((6, 1), (13, 1), 16), ((7, 0), (12, 9), 48), ((9, 0), (13, 0), 48), ((9, 0), (13, 1), 60), ((10, 0), None, 48)],
)
def test_client_limit_follows_generation_and_driver(
    capability: tuple[int, int], cuda: tuple[int, int] | None, limit: int
) -> None:
    """16 before Volta, 48 since, 60 with a driver of CUDA 13.1."""
    assert client_limit(capability, cuda) == limit


def test_mps_mixed_generations_cannot_share_it() -> None:
    """A card from before Volta beside one after: MPS serves one kind."""
    finding = pick(mps.mps_findings(STOPPED, reading(P4, V100)), "mps.clients")
    assert (finding.status, "not both" in finding.advice) == (Severity.NOTE, True)


def test_mps_exclusive_mode_without_it_is_a_warning() -> None:
    """An exclusive card serves one process: a warning without MPS, nothing with it."""
    exclusive = reading(msgspec.structs.replace(H100, compute_mode="EXCLUSIVE_PROCESS"))
    assert pick(mps.mps_findings(STOPPED, exclusive), "mps.mode").status is Severity.WARNING
    running = replace(STOPPED, has_pipe=True, daemon_uids=(1000,))
    assert "mps.mode" not in [one.id for one in mps.mps_findings(running, exclusive)]
