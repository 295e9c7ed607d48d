"""Scenarios: what is requested, how often and for how long. Reads and validates scenario files; command-line
overrides.
"""

import difflib
import math
import re
from collections.abc import Callable, Iterator
from enum import StrEnum
from pathlib import Path

import msgspec


class Kind(StrEnum):
    """How a request travels. IMAGE: an encoded picture over HTTP; VIDEO: a camera's stream, which the video program
    reads; the others: v2 tensors."""

    IMAGE = "image"
    REST = "rest"
    GRPC = "grpc"
    GRPC_STREAM = "grpc-stream"
    VIDEO = "video"


class Shape(StrEnum):
    """How arrivals are spread over a phase."""

    CONSTANT = "constant"
    POISSON = "poisson"
    RAMP = "ramp"
    STEP = "step"
    BURST = "burst"
    REPLAY = "replay"


class Unit(StrEnum):
    """What a rate counts in: requests a second, or shares of the capacity that this run found."""

    PER_S = "per_s"
    OF_CAPACITY = "of_capacity"


class RequestSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """One kind of request. share: its weight among the scenario's requests.

    sizes: of a tensor's free dimensions after the batch, in order; shorter lists repeat their last; none: 256.
    picture_px: width and height of generated pictures. uri: of a video, as the video program is to open it.
    """

    kind: Kind
    model: str
    share: float = 1.0
    batch: int = 1
    sizes: tuple[int, ...] = ()
    picture_px: tuple[int, int] = (640, 480)
    uri: str = ""

    @property
    def label(self) -> str:
        """How tables and records name it."""
        return f"{self.kind} {self.model}"


class Arrivals(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """When requests are sent, whatever the answers do.

    rate: of constant and poisson, where a ramp begins, between bursts. to_rate: where a ramp ends, the rate in a
    burst. rates: of equally long steps. every_s, burst_s: a burst begins every so often and lasts so long.
    file: a replay's recording (records.jsonl of a run, or one time in seconds a line); speed: 2 is twice as fast.
    """

    shape: Shape
    unit: Unit = Unit.PER_S
    rate: float = 0.0
    to_rate: float = 0.0
    rates: tuple[float, ...] = ()
    every_s: float = 0.0
    burst_s: float = 0.0
    file: str = ""
    speed: float = 1.0


class Phase(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stretch of a run: an open loop (arrivals), a closed one (callers), reloads of the model (reloads), or a search
    for how many video streams keep the SLO (streams: at most), each number tried for `seconds`.

    is_judged: its figures count for the verdict. is_capacity: its rate of good answers is this run's capacity.
    """

    name: str
    seconds: float = 0.0
    arrivals: Arrivals | None = None
    callers: int = 0
    reloads: int = 0
    streams: int = 0
    is_judged: bool = False
    is_capacity: bool = False


class Scenario(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A load test as data. slo_p99_ms: the latency that 99 % of the requests are to keep; goodput counts by it."""

    name: str
    about: str
    requests: tuple[RequestSpec, ...] = msgspec.field(name="request")
    phases: tuple[Phase, ...] = msgspec.field(name="phase")
    slo_p99_ms: float = 100.0
    timeout_s: float = 10.0

    @property
    def is_video(self) -> bool:
        """Whether it is a search for a number of streams, of the video program."""
        return any(phase.streams for phase in self.phases)


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
_FIELDS = {field for noun in (Arrivals, RequestSpec, Phase, Scenario) for field in noun.__struct_encode_fields__}
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
        yield from _complaints_of_request(ask)
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


def _complaints_of_request(ask: RequestSpec) -> Iterator[str]:
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
