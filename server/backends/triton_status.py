"""What is told of a supervised engine."""

from dataclasses import dataclass
from enum import StrEnum


class EngineState(StrEnum):
    """starting: for the first time. restarting: down, or coming back. failed and stopped are final."""

    STARTING = "starting"
    RUNNING = "running"
    RESTARTING = "restarting"
    FAILED = "failed"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """reason: one line on why it is in that state. restarts: starts after the first. pid: None while there is none."""

    state: EngineState
    reason: str = ""
    restarts: int = 0
    pid: int | None = None
