"""What a load test answers to: the rows of targets.toml, or of a file of yours; a mistake is one sentence."""

import difflib
import math
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping
from enum import StrEnum
from pathlib import Path

import msgspec

from penstock_load.hardware import ANY, Hardware
from penstock_load.measure import measures
from penstock_load.scenario import Scenario, scenario_names

SHIPPED = Path(__file__).parent / "targets.toml"
NOTHING_MEASURES_IT = "none"
ELSEWHERE = ("batcher-replay", NOTHING_MEASURES_IT)  # another program's, and facts
BENCH = "bench "  # "bench peers": `python -m loadtest.bench.peers`
FACT = "fact"
ERRORS_OF_SLO = 0.01  # an SLO that speaks of 99 % of the requests
UNITS: Mapping[str, str] = measures.UNITS | {
    # what other programs measure
    "p99_ratio": "ratio",  # to the best rival's
    "limit_share": "share",  # of the harmonic limit of the stages, each measured alone in the same run
    "raw_share": "share",  # of the same engine without a server around it, in the same run
    **{f"fused_by_plain_{part}_{batch}": "ratio" for part in ("raw", "served") for batch in (1, 8, 64)},
    "image_gpu_by_cpu": "ratio",  # /image with the model on the GPU by on the CPU
    "top1_cuda_fp32": "share",  # of pictures with the CPU's top class
    "top1_cuda_fp16": "share",
    "iou_p01_cuda_fp32": "share",  # 1st percentile of the IoU with the CPU's boxes, of the worst model
    "iou_p01_cuda_fp16": "share",
    "box_share_cuda_fp32": "share",  # of boxes that overlap the CPU's by 0.98, of the worst model
    "box_share_cuda_fp16": "share",
    "likeness_min_cuda_fp32": "share",  # least cosine with the CPU's vectors
    "likeness_min_cuda_fp16": "share",
    "nvdec_share": "share",  # of NVDEC alone, in the same run
    "best_share": "share",  # of the best aggregate over all numbers of streams
    "jain": "index",  # of fairness, over what each stream got
    "streams_held": "streams",  # played as cameras, within the SLO
    "streams_per_core": "streams",  # the same by the cores of the machine
    "streams_720p30_h264": "streams",
    "streams_1080p30_h264": "streams",
    "streams_1080p30_hevc": "streams",
    "streams_1080p30_detector": "streams",
    "streams_1080p30_detector_tracked": "streams",  # every third frame inferred
    "mps_ratio": "ratio",  # to the same clients without MPS
    "mps_ratio_8": "ratio",  # with 8 clients
    "mps_ratio_16": "ratio",
    "mps_ratio_8_plain": "ratio",  # without cuDNN's fused calls
    "mps_ratio_16_plain": "ratio",
    "batching_over_mps": "ratio",  # to the same clients with MPS alone, threads limited
    "batching_over_mps_8": "ratio",  # not limited, with 8 clients
    "batching_over_mps_16": "ratio",
    "shared_over_mps_8": "ratio",  # the same, with one process that runs the program
    "shared_over_mps_16": "ratio",
    "sentences_per_s": "sentences/s",  # batched in the best way that was tried
    "sentences_4_per_s": "sentences/s",  # asked in fours, one such request after the other
    FACT: "",
}
_MEANINGS = {measure.name: measure.meaning for measure in measures.MEASURES}


class TargetsError(ValueError):
    """A file of targets that cannot be read or says what no target can. The text is one sentence."""


class Comparison(StrEnum):
    """On which side of the figure is good; a quoted figure is shown beside ours and never judged."""

    AT_LEAST = "at_least"
    AT_MOST = "at_most"
    QUOTED = "quoted"


class Origin(StrEnum):
    """Whose figure: the 2017 ones that the project was created from, today's references, or our own."""

    FIGURES_OF_2017 = "2017"
    REFERENCE = "reference"
    OWN = "own"


class Provenance(StrEnum):
    """How the figure came about: read somewhere, measured by us, or chosen as what we promise."""

    CITED = "cited"
    MEASURED = "measured"
    CHOSEN = "chosen"


class Target(msgspec.Struct, frozen=True, kw_only=True):
    """One documented figure. figure: the floor; None: a fact without one. goal: what we would like. models: globs.

    slo_p99_ms: the row speaks of rates under that SLO only. from_memory: the condition is widely reported, but its
    primary page was not at hand.
    """

    id: str
    title: str
    scenarios: tuple[str, ...]
    measure: str
    unit: str
    comparison: Comparison
    figure: float | None
    goal: float | None = None
    hardware: Hardware = ANY
    models: tuple[str, ...] = ()
    slo_p99_ms: float | None = None
    origin: Origin = Origin.OWN
    standing: Provenance = Provenance.CHOSEN
    from_memory: bool = False
    source: str = ""
    conditions: str = ""

    @property
    def wanted(self) -> str:
        """The figure in words: "at least 140/s"; a fact without a figure is its title."""
        return self.title if self.figure is None else requirement_text(self.comparison, self.figure, self.unit)


_KINDS = {
    "str": "a text",
    "str | null": "a text",
    "str | array": "a text or a list of texts",
    "str | object": '"any" or a table',
    "int": "a number",
    "float": "a number",
    "float | null": "a number",
    "bool": "true or false",
}
_CHOICES: Mapping[str, tuple[str, ...]] = {
    "comparison": tuple(Comparison),
    "origin": tuple(Origin),
    "standing": tuple(Provenance),
}


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A [[target]] as it is written."""

    id: str
    scenario: str | tuple[str, ...]
    measure: str
    comparison: Comparison
    figure: float | None = None
    title: str = ""
    unit: str | None = None
    goal: float | None = None
    hardware: str | Hardware = "any"
    model: str | tuple[str, ...] = ()
    slo_p99_ms: float | None = None
    origin: Origin = Origin.OWN
    standing: Provenance = Provenance.CHOSEN
    from_memory: bool = False
    source: str = ""
    conditions: str = ""


def read_targets(path: Path | None = None, *, also: Collection[str] = ()) -> tuple[Target, ...]:
    """The rows of the file (without one: of the shipped file), in its order. also: names of scenarios of one's own.

    Raises TargetsError with the file, the line and the id.
    """
    path = path or SHIPPED
    try:
        text = path.read_text(encoding="utf-8")
        table = tomllib.loads(text)
    except OSError as error:
        raise TargetsError(
            f"{path}: cannot be read ({error.strerror}); give a TOML file of [[target]] tables"
        ) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise TargetsError(f"{path}: not valid TOML: {error}") from None
    rows = table.pop("target", [])
    if table or not isinstance(rows, list) or not rows:
        wrong = f"unknown table {next(iter(table))!r}" if table else "no target"
        raise TargetsError(f"{path}: {wrong}; a file of targets is a list of [[target]] tables")
    places = _places(path, text, rows)
    targets = tuple(_target(row, place, also) for row, place in zip(rows, places, strict=True))
    _require_own_ids(targets, places)
    return targets


def scenario_targets(targets: Iterable[Target], scenario: str) -> tuple[Target, ...]:
    """The rows that speak of the scenario."""
    return tuple(target for target in targets if scenario in target.scenarios)


def slo_targets(
    scenario: Scenario, *, documented: Iterable[Target], min_rate_per_s: float | None = None
) -> tuple[Target, ...]:
    """The rows that come with a scenario: its own SLO, whatever --slo-p99-ms made of it, and the rate of --min-rate.

    documented: its other rows. Where none of them limits errors, which are in no percentile, the SLO does: 1 % is
    what it leaves of the requests.
    """
    rows = []
    if any(phase.is_judged and not phase.reloads and not phase.streams for phase in scenario.phases):
        rows.append(_own("slo", scenario, "p99_ms", Comparison.AT_MOST, scenario.slo_p99_ms))
        if not any(map(_limits_errors, documented)):
            rows.append(_own("slo-errors", scenario, "error_share", Comparison.AT_MOST, ERRORS_OF_SLO))
    if min_rate_per_s is not None:
        rows.append(_own("min-rate", scenario, "ok_per_s", Comparison.AT_LEAST, min_rate_per_s))
    return tuple(rows)


def _limits_errors(target: Target) -> bool:
    """Whether it does on any hardware, with any model."""
    is_always = target.hardware == ANY and not target.models and target.slo_p99_ms is None
    return is_always and target.measure in ("error_share", "failure_share") and target.comparison is Comparison.AT_MOST


def _own(name: str, scenario: Scenario, measure: str, comparison: Comparison, figure: float) -> Target:
    return Target(
        id=name,
        title="p99 latency" if name == "slo" else meaning_of(measure),
        scenarios=(scenario.name,),
        measure=measure,
        unit=UNITS[measure],
        comparison=comparison,
        figure=figure,
        source=f"slo_p99_ms of {scenario.name}" if name.startswith("slo") else f"--{name}",
    )


def meaning_of(measure: str) -> str:
    """What the measure is, for a person; its name where another program measures it."""
    return _MEANINGS.get(measure, measure)


def requirement_text(comparison: str, figure: float, unit: str) -> str:
    """What a target asks for, "at least 140/s"; of a quoted one the figure alone."""
    words = with_unit(figure, unit)
    return words if comparison == Comparison.QUOTED else f"{comparison.replace('_', ' ')} {words}"


def with_unit(value: float, unit: str, *, unlike: float | None = None) -> str:
    """The figure as people read it, "5,707/s", "12.3 ms": three digits or the whole part; shares and ratios are bare.

    unlike: another figure, from which this one is to look different if it is.
    """
    text = _digits(value, 3)
    for digits in range(4, 9):
        if unlike is None or unlike == value or text != _digits(unlike, digits - 1):
            break
        text = _digits(value, digits)
    gap = "" if unit in ("share", "ratio", "") or unit.startswith("/") else " "
    return text + gap + (unit if gap or unit.startswith("/") else "")


def _digits(value: float, digits: int) -> str:
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    places = max(digits - 1 - math.floor(math.log10(abs(value))), 0)
    text = f"{value:,.{places}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text


def _places(path: Path, text: str, rows: list[object]) -> list[str]:
    """Where each row is: file, line and id, as far as they are known."""
    lines = [number for number, line in enumerate(text.splitlines(), 1) if re.match(r"\s*\[\[\s*target\s*\]\]", line)]
    places = []
    for number, row in enumerate(rows):
        line = f":{lines[number]}" if len(lines) == len(rows) else ""
        name = row.get("id", number + 1) if isinstance(row, dict) else number + 1
        places.append(f"{path}{line}: target {name!r}")
    return places


def _target(row: object, place: str, also: Collection[str]) -> Target:
    try:
        read = msgspec.convert(row, _Row)
    except msgspec.ValidationError as error:
        raise TargetsError(f"{place}: {_with_suggestion(str(error))}") from None
    if complaint := next(_complaints(read, also), None):
        raise TargetsError(f"{place}: {complaint}")
    values = {name: getattr(read, name) for name in Target.__struct_fields__ if name in _Row.__struct_fields__}
    return Target(
        **values
        | {
            "title": read.title or meaning_of(read.measure),
            "unit": UNITS[read.measure] if read.unit is None else read.unit,
            "hardware": read.hardware if isinstance(read.hardware, Hardware) else ANY,
            "source": read.source or place.partition(":")[0],
        },
        scenarios=_several(read.scenario),
        models=_several(read.model),
    )


def _several(value: str | tuple[str, ...]) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else value


def _complaints(row: _Row, also: Collection[str]) -> Iterator[str]:
    if not re.fullmatch(r"[a-z0-9][a-z0-9.-]*", row.id):
        yield "an id is small letters, digits, dots and hyphens"
    if row.measure not in UNITS:
        yield f"unknown measure {row.measure!r}{_near(row.measure, UNITS)}"
    for name in _several(row.scenario):
        if name not in (*scenario_names(), *ELSEWHERE, *also) and not name.startswith(BENCH):
            yield f"unknown scenario {name!r}{_near(name, (*scenario_names(), *ELSEWHERE, *also))}"
    if not row.scenario:
        yield 'scenario is empty; give one, several in brackets, or "none" for a fact'
    is_fact = row.measure == FACT or NOTHING_MEASURES_IT in _several(row.scenario)
    if is_fact and row.comparison is not Comparison.QUOTED:
        yield f"nothing measures it, so its comparison can only be quoted, not {row.comparison}"
    if isinstance(row.hardware, str) and row.hardware != "any":
        yield f'hardware = {row.hardware!r} is neither "any" nor a table such as {{ gpu = "V100", cores = 16 }}'
    yield from _complaints_of_figures(row)


def _complaints_of_figures(row: _Row) -> Iterator[str]:
    if row.figure is None and row.comparison is not Comparison.QUOTED:
        yield "it has no figure to compare with"
    for name, value in (("figure", row.figure), ("goal", row.goal), ("slo_p99_ms", row.slo_p99_ms)):
        if value is not None and not 0 <= value < math.inf:
            yield f"{name} = {value} is no finite number from 0"
    if row.goal is not None and row.figure is not None:
        if row.comparison is Comparison.QUOTED:
            yield "a quoted figure has no goal"
        is_least = row.comparison is Comparison.AT_LEAST
        if row.goal < row.figure if is_least else row.goal > row.figure:
            yield f"goal = {row.goal:g} is worse than figure = {row.figure:g}, {row.comparison.replace('_', ' ')}"


def _with_suggestion(message: str) -> str:
    """msgspec's complaint in our words, with the name that was probably meant."""
    words = re.sub("`(.+?)`", lambda quoted: _KINDS.get(quoted[1], quoted[1]), message)
    what, _, where = words.partition(" - at $.")
    if what.startswith("Object contains unknown field "):
        name = what.rpartition(" ")[2]
        fields = (Hardware if where == "hardware" else _Row).__struct_fields__
        return f"unknown field {name!r}{_near(name, fields)}"
    if what.startswith("Invalid enum value "):
        choice = what.rpartition(" ")[2].strip("'")
        return f"{where} cannot be {choice!r}{_near(choice, _CHOICES[where])}"
    if where:
        return f"{where}: {what[0].lower()}{what[1:]}"
    return what.replace("Object missing required field", "it lacks the field")


def _near(name: str, names: Iterable[str]) -> str:
    names = list(names)
    near = difflib.get_close_matches(name, names, 1)
    return f"; did you mean {near[0]}?" if near else f"; there are {', '.join(names)}"


def _require_own_ids(targets: tuple[Target, ...], places: list[str]) -> None:
    seen: dict[str, str] = {}
    for target, place in zip(targets, places, strict=True):
        if target.id in seen:
            raise TargetsError(f"{place}: the id stands twice; the first is {seen[target.id].partition(': ')[0]}")
        seen[target.id] = place
