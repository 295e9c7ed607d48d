"""Findings (subject, severity, text and advice), and the settings that the probes need."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

from penstock.gpu.cards import ALL

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Severity(StrEnum):
    """Severity of a finding."""

    OK = "ok"
    NOTE = "note"  # works, and could be better
    WARNING = "warning"  # causes problems under load or with some models
    PROBLEM = "problem"  # `penstock up` cannot serve


@dataclass(frozen=True, slots=True)
class Finding:
    """id: stable, `subject.what`. found: text with the value. advice: one sentence with the command, or empty."""

    id: str
    status: Severity
    found: str
    advice: str = ""

    @property
    def subject(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]


def can_serve(findings: Sequence[Finding]) -> bool:
    """Whether no finding prevents `penstock up` from serving."""
    return all(finding.status is not Severity.PROBLEM for finding in findings)


def shown_bytes(count: int) -> str:
    """ "24.0 GiB", "64 MiB"."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / KIB:.0f} KiB"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """Settings of `penstock up` for the probes."""

    host: str
    ports: dict[str, int]  # by flag; 0: chosen by the system
    engine: str  # auto, triton, embedded or a URL
    engine_environment: Path  # of Triton's wheel
    home: Path  # folder of pulled models
    repositories: tuple[Path, ...]
    max_inflight_requests: int
    max_inflight_bytes: int
    gpus: str = ALL
    temp: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))

    @property
    def run_base(self) -> Path:
        """The folder of this user's run directories."""
        return self.temp / f"penstock-{os.getuid()}"


def settings_findings(mistake: str, given: Sequence[str]) -> list[Finding]:
    """Findings on the settings. mistake: the error text, or empty. given: the variables and files with values."""
    if mistake:
        what, separator, fix = mistake.rpartition("; ")
        found, advice = (
            (what, fix) if separator else (mistake, "correct or unset it; `penstock up --help` lists what there is")
        )
        return [Finding("settings.values", Severity.PROBLEM, found, advice)]
    return [Finding("settings.values", Severity.OK, f"given: {', '.join(given)}" if given else "all by default")]
