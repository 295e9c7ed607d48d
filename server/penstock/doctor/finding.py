"""A finding: subject, severity, text and advice. Also the settings that the probes need, and the findings on them."""

import os
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from pathlib import Path

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Severity(StrEnum):
    """NOTE: works, and could be better. WARNING: will hurt under load or on some models. PROBLEM: `penstock up` cannot
    serve before it is mended."""

    OK = "ok"
    NOTE = "note"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True, slots=True)
class Finding:
    """id: stable, `subject.what`. found: with its value, for a person. advice: one sentence with the command, or ""."""

    id: str
    status: Severity
    found: str
    advice: str = ""

    @property
    def subject(self) -> str:
        """What was looked at: the part of the id before the dot."""
        return self.id.partition(".")[0]


def can_serve(findings: Sequence[Finding]) -> bool:
    """Whether nothing keeps `penstock up` from serving."""
    return all(finding.status is not Severity.PROBLEM for finding in findings)


def shown_bytes(count: int) -> str:
    """ "24.0 GiB", "64 MiB"."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / KIB:.0f} KiB"


@dataclass(frozen=True, slots=True)
class StackPlan:
    """ports: flag → port, 0 for one that the system picks. engine: auto, triton, embedded or a URL.

    engine_environment: of Triton's wheel. home: where pulled models are. temp: where the run directory will be.
    """

    host: str
    ports: dict[str, int]
    engine: str
    engine_environment: Path
    home: Path
    repositories: tuple[Path, ...]
    max_inflight_requests: int
    max_inflight_bytes: int
    temp: Path = field(default_factory=lambda: Path(tempfile.gettempdir()))

    @property
    def run_base(self) -> Path:
        """The folder of this user's run directories."""
        return self.temp / f"penstock-{os.getuid()}"


def settings_findings(mistake: str, given: Sequence[str]) -> list[Finding]:
    """mistake: the reader's sentence, "" where all is well. given: the variables and the file that say something."""
    if mistake:
        what, separator, fix = mistake.rpartition("; ")
        found, advice = (
            (what, fix) if separator else (mistake, "correct or unset it; `penstock up --help` lists what there is")
        )
        return [Finding("settings.values", Severity.PROBLEM, found, advice)]
    return [Finding("settings.values", Severity.OK, f"given: {', '.join(given)}" if given else "all by default")]
