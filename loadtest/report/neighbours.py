"""Whether something else kept the server's machine busy: a figure that was measured beside it is not the server's."""

from loadtest.report.wording import number
from loadtest.results import PhaseResult, Run

WORTH_SAYING_CORES = 0.3


def neighbours(run: Run) -> str:
    """One sentence where programs other than server and generator took cores in a judged phase, else empty.

    Only where the server runs on this machine; the worst judged phase is told.
    """
    judged = [phase for phase in run.phases if phase.is_judged] if run.is_local else []
    cores, phase = max(((_others(one, run.machine.cores), one.phase) for one in judged), default=(0.0, ""))
    if cores < WORTH_SAYING_CORES:
        return ""
    return (
        f"While {phase} ran, other programs kept {number(cores)} of the machine's {run.machine.cores} cores busy: "
        "on a quieter machine the figures would be better"
    )


def _others(phase: PhaseResult, cores: int) -> float:
    """Busy cores that neither the server's processes nor the drivers account for, as a mean over the phase."""
    read = [
        (second.machine_cpu * cores, second.server_cpu)
        for second in phase.timeline
        if second.machine_cpu is not None and second.server_cpu is not None
    ]
    if not read:
        return 0.0
    elsewhere = sum(busy - served for busy, served in read) / len(read)
    return elsewhere - phase.health.cpu * phase.health.processes
