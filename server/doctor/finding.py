"""One thing that was looked at: what it is, whether it is well, and what to do."""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30


class Status(StrEnum):
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
    status: Status
    found: str
    advice: str = ""

    @property
    def subject(self) -> str:
        """What was looked at: the part of the id before the dot."""
        return self.id.partition(".")[0]


def can_serve(findings: Sequence[Finding]) -> bool:
    """Whether nothing keeps `penstock up` from serving."""
    return all(finding.status is not Status.PROBLEM for finding in findings)


def shown_bytes(count: int) -> str:
    """ "24.0 GiB", "64 MiB"."""
    if count >= GIB:
        return f"{count / GIB:.1f} GiB"
    return f"{count / MIB:.0f} MiB" if count >= MIB else f"{count / KIB:.0f} KiB"
