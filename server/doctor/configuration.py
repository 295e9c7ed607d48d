"""The settings: read as `penstock up` reads them."""

from collections.abc import Sequence

from server.doctor.finding import Finding, Status


def findings_of(mistake: str, given: Sequence[str]) -> list[Finding]:
    """mistake: the reader's sentence, "" where all is well. given: the variables and the file that say something."""
    if mistake:
        what, separator, fix = mistake.rpartition("; ")
        found, advice = (
            (what, fix) if separator else (mistake, "correct or unset it; `penstock up --help` lists what there is")
        )
        return [Finding("settings.values", Status.PROBLEM, found, advice)]
    return [Finding("settings.values", Status.OK, f"given: {', '.join(given)}" if given else "all by default")]
