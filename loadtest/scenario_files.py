"""Scenarios as files: finds, reads and checks them. What is wrong is one sentence with the file and the place."""

import difflib
import math
import re
from collections.abc import Iterator
from pathlib import Path

import msgspec

from loadtest.scenario import Arrivals, Ask, Kind, Phase, Scenario, Shape, Unit

FOLDER = Path(__file__).parent / "scenarios"
_RATES: dict[Shape, tuple[str, ...]] = {
    Shape.CONSTANT: ("rate",),
    Shape.POISSON: ("rate",),
    Shape.RAMP: ("rate", "to_rate"),
    Shape.STEP: ("rates",),
    Shape.BURST: ("rate", "to_rate", "every_s", "burst_s"),
    Shape.REPLAY: ("file", "speed"),
}
_MAY_BE_ZERO = {(Shape.RAMP, "rate"), (Shape.RAMP, "to_rate"), (Shape.BURST, "rate")}
_FIELDS = {field for noun in (Arrivals, Ask, Phase, Scenario) for field in noun.__struct_encode_fields__}
_CHOICES = {"shape": Shape, "unit": Unit, "kind": Kind}


class ScenarioError(ValueError):
    """A scenario that there is not, or that cannot be run. The text is one sentence."""


def scenario_names() -> tuple[str, ...]:
    """The shipped scenarios, by name."""
    return tuple(sorted(path.stem for path in FOLDER.glob("*.toml")))


def read_scenario(name_or_path: str) -> Scenario:
    """The shipped scenario of that name, or the file. Raises ScenarioError."""
    shipped = FOLDER / f"{name_or_path}.toml"
    path = shipped if name_or_path in scenario_names() else Path(name_or_path)
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ScenarioError(_not_there(name_or_path, error)) from None
    try:
        scenario = msgspec.toml.decode(text, type=Scenario)
    except msgspec.DecodeError as error:  # not TOML, or not a scenario
        raise ScenarioError(f"{path}: {_with_suggestion(str(error))}") from None
    if complaint := next(_complaints(scenario), None):
        raise ScenarioError(f"{path}: {complaint}")
    return scenario


def _not_there(name: str, error: Exception) -> str:
    if name.endswith(".toml") or "/" in name:
        return f"scenario {name} cannot be read: {error}"
    near = difflib.get_close_matches(name, scenario_names(), 1)
    hint = f"; did you mean {near[0]}?" if near else f": there are {', '.join(scenario_names())}, or a .toml of yours"
    return f"no scenario {name!r}{hint}"


def _with_suggestion(message: str) -> str:
    """msgspec's words, and what it was to be: the nearest, else all that there are."""
    if table := re.search(r"Expected `array`, got `object` - at `\$\.(request|phase)`", message):
        return f"{message}; there may be several, so write [[{table[1]}]]"
    found = re.search(r"[`'](\w[\w-]*)[`']", message)
    chosen = re.search(r"enum value .*\.(\w+)`$", message)
    words = [str(choice) for choice in _CHOICES[chosen[1]]] if chosen else sorted(_FIELDS)
    near = difflib.get_close_matches(found[1], words, 1) if found else []
    if near:
        return f"{message}; did you mean {near[0]}?"
    return f"{message}; there are {', '.join(words)}" if chosen else message


def _complaints(scenario: Scenario) -> Iterator[str]:
    if not (0 < scenario.slo_p99_ms < math.inf and 0 < scenario.timeout_s < math.inf):
        yield "slo_p99_ms and timeout_s are finite and above 0"
    if not scenario.requests or not scenario.phases:
        yield "a scenario has at least one [[request]] and one [[phase]]"
    for ask in scenario.requests:
        yield from _complaints_of_ask(ask)
    names = [phase.name for phase in scenario.phases]
    if len(set(names)) < len(names):
        yield f"phases have names of their own, not {', '.join(names)}"
    is_video = [ask.kind is Kind.VIDEO for ask in scenario.requests]
    if scenario.is_video != any(is_video) or (any(is_video) and (len(is_video) > 1 or len(scenario.phases) > 1)):
        yield "a request of kind video goes with one phase that counts streams, and with nothing else"
    if not any(phase.is_judged for phase in scenario.phases):
        yield "no phase is_judged, so there would be nothing to judge"
    has_capacity = False
    for phase in scenario.phases:
        yield from (f"phase {phase.name!r}: {words}" for words in _complaints_of_phase(phase, has_capacity))
        has_capacity = has_capacity or phase.is_capacity


def _complaints_of_ask(ask: Ask) -> Iterator[str]:
    if not 0 < ask.share < math.inf or ask.batch < 1 or any(size < 1 for size in (*ask.sizes, *ask.picture_px)):
        yield f"request {ask.label!r}: share is above 0, batch, sizes and picture_px are 1 or more"


def _complaints_of_phase(phase: Phase, has_capacity: bool) -> Iterator[str]:
    if sum((phase.arrivals is not None, phase.callers > 0, phase.reloads > 0, phase.streams > 0)) != 1:
        yield "it has either arrivals, or callers, or reloads, or streams"
    is_timed = not phase.reloads and not (phase.arrivals and phase.arrivals.shape is Shape.REPLAY)
    if not 0 <= phase.seconds < math.inf or (is_timed and phase.seconds == 0):
        yield f"seconds = {phase.seconds:g} is no length"
    if phase.is_capacity and not phase.callers:
        yield "the capacity is found by callers, not by arrivals"
    if phase.arrivals:
        yield from _complaints_of_arrivals(phase.arrivals)
        if phase.arrivals.unit is Unit.OF_CAPACITY and not has_capacity:
            yield 'unit = "of_capacity" needs an earlier phase with is_capacity = true'


def _complaints_of_arrivals(arrivals: Arrivals) -> Iterator[str]:
    takes = _RATES[arrivals.shape]
    for name in sorted({name for names in _RATES.values() for name in names}):
        value, is_given = getattr(arrivals, name), getattr(arrivals, name) != getattr(Arrivals(shape=Shape.STEP), name)
        if is_given and name not in takes:
            yield f"shape {arrivals.shape} takes {', '.join(takes)}, not {name}"
        elif name in takes and not value and (arrivals.shape, name) not in _MAY_BE_ZERO:
            yield f"shape {arrivals.shape} needs {name}"
        elif isinstance(value, int | float) and not 0 <= value < math.inf:
            yield f"{name} = {value} is no finite number from 0"
        elif isinstance(value, tuple) and not all(0 < rate < math.inf for rate in value):
            yield f"{name} = {value} is not above 0"
    if arrivals.shape is Shape.RAMP and not arrivals.rate + arrivals.to_rate:
        yield "a ramp from 0 to 0 sends nothing"
    if arrivals.shape is Shape.BURST and arrivals.burst_s >= arrivals.every_s > 0:
        yield f"a burst of {arrivals.burst_s:g} s does not fit into every {arrivals.every_s:g} s"
