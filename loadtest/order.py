"""What one run is to do: the scenario as it will be run, who is asked, and how the generator is set up."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from loadtest.clients.client import Endpoint
from loadtest.report.live_view import LiveView
from loadtest.results import PhaseResult, Side
from loadtest.scenario import Scenario

MAX_IN_FLIGHT = 4096


@dataclass(frozen=True, slots=True, kw_only=True)
class Order:
    """A run as it was asked for. folder: where records.jsonl and run.json go; it is there.

    beside: the server to compare with, phase by phase. metrics_url, prometheus_url: empty where none was named.
    server_hardware: what the user says the target runs on. command: as it was typed.
    """

    scenario: Scenario
    target: Endpoint
    folder: Path
    beside: Endpoint | None = None
    rounds: int = 1
    seed: int = 1
    processes: int = 1
    max_in_flight: int = MAX_IN_FLIGHT
    images: str = ""
    metrics_url: str = ""
    prometheus_url: str = ""
    server_hardware: str = ""
    command: str = ""

    @property
    def endpoints(self) -> dict[Side, Endpoint]:
        """Who is asked, by side."""
        sides = {Side.TARGET: self.target}
        return sides if self.beside is None else sides | {Side.BESIDE: self.beside}

    @property
    def models(self) -> tuple[str, ...]:
        """The models that are asked, each once, in the scenario's order."""
        return tuple(dict.fromkeys(ask.model for ask in self.scenario.requests))

    def sides_of_round(self, number: int) -> Sequence[Side]:
        """In which order the sides are asked: who is first changes from round to round."""
        sides = list(self.endpoints)
        return sides if number % 2 else sides[::-1]


class Watch(Protocol):
    """Is told of a run as it goes. Never slow: the run waits for it."""

    def note(self, sentence: str) -> None:
        """Something that the reader should know, once."""
        ...

    def show(self, view: LiveView) -> None:
        """How the phase stands, twice a second."""
        ...

    def phase_done(self, result: PhaseResult) -> None:
        """A phase has its figures."""
        ...
