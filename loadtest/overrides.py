"""What a command line changes in a scenario. Pure: a scenario in, another out."""

import math
from collections.abc import Callable

import msgspec

from loadtest.scenario import Arrivals, Phase, Scenario, Shape, Unit
from loadtest.scenario_files import ScenarioError

_STEADY = (Shape.CONSTANT, Shape.POISSON)


def with_model(scenario: Scenario, model: str) -> Scenario:
    """The same requests to that model, whatever each asked before."""
    asks = tuple(msgspec.structs.replace(ask, model=model) for ask in scenario.requests)
    return msgspec.structs.replace(scenario, requests=asks)


def with_duration(scenario: Scenario, seconds: float) -> Scenario:
    """The judged phases last that long. Raises ScenarioError where they count something else."""
    _require(seconds, "--duration")

    def last(phase: Phase) -> Phase:
        if phase.reloads:
            raise ScenarioError(f"{scenario.name} counts reloads ({phase.reloads}), so --duration does not apply to it")
        return msgspec.structs.replace(phase, seconds=seconds)

    return _with_judged(scenario, last)


def with_rate(scenario: Scenario, rate_per_s: float) -> Scenario:
    """The judged phases ask so many requests a second, and nothing asks by shares of the capacity any more.

    So a question such as "is p99 within 60 ms at 20 a second?" loads the server with no more than that. Raises
    ScenarioError where the judged rate is no single one.
    """
    _require(rate_per_s, "--rate")

    def paced(phase: Phase) -> Phase:
        if phase.arrivals is None or phase.arrivals.shape not in _STEADY:
            shape = phase.arrivals.shape if phase.arrivals else "callers or reloads"
            raise ScenarioError(f"--rate is for constant and poisson arrivals; {scenario.name} has {shape}")
        return msgspec.structs.replace(phase, arrivals=Arrivals(shape=phase.arrivals.shape, rate=rate_per_s))

    return _without_shares(_with_judged(scenario, paced))


def with_stream(scenario: Scenario, uri: str) -> Scenario:
    """Each stream plays that URI. Raises ScenarioError where the scenario has none, or none is known."""
    if uri and not scenario.is_video:
        raise ScenarioError(f"--stream is for scenarios of streams; {scenario.name} has none")
    asks = tuple(msgspec.structs.replace(ask, uri=uri or ask.uri) for ask in scenario.requests)
    if scenario.is_video and not all(ask.uri for ask in asks):
        raise ScenarioError(f"{scenario.name} needs --stream URI: a file or camera that the video program can open")
    return msgspec.structs.replace(scenario, requests=asks)


def with_replay(scenario: Scenario, recording: str, *, speed: float = 1.0) -> Scenario:
    """The judged phases send when the recording says, and nothing asks by shares of the capacity any more.

    A phase ends with the recording, or after --duration.
    """
    _require(speed, "--speed")

    def replayed(phase: Phase) -> Phase:
        arrivals = Arrivals(shape=Shape.REPLAY, file=recording, speed=speed)
        return msgspec.structs.replace(phase, arrivals=arrivals, callers=0, reloads=0, seconds=0.0)

    return _without_shares(_with_judged(scenario, replayed))


def with_slo(scenario: Scenario, slo_p99_ms: float) -> Scenario:
    """The same load under another SLO."""
    _require(slo_p99_ms, "--slo-p99-ms")
    return msgspec.structs.replace(scenario, slo_p99_ms=slo_p99_ms)


def _without_shares(scenario: Scenario) -> Scenario:
    """Without the phases that find the capacity and those that ask by it, if no judged phase does."""
    judged = [phase for phase in scenario.phases if phase.is_judged]
    if any(_is_share(phase) for phase in judged):
        return scenario
    kept = [phase for phase in scenario.phases if phase.is_judged or not (phase.is_capacity or _is_share(phase))]
    return msgspec.structs.replace(scenario, phases=tuple(kept))


def _is_share(phase: Phase) -> bool:
    return phase.arrivals is not None and phase.arrivals.unit is Unit.OF_CAPACITY


def _with_judged(scenario: Scenario, change: Callable[[Phase], Phase]) -> Scenario:
    phases = tuple(change(phase) if phase.is_judged else phase for phase in scenario.phases)
    return msgspec.structs.replace(scenario, phases=phases)


def _require(value: float, flag: str) -> None:
    if not 0 < value < math.inf:
        raise ScenarioError(f"{flag} {value:g}: a finite number above 0 is needed")
