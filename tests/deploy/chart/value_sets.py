"""The sets of values that the chart is held to: the chart's presets, and files of values over them."""

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from tests.deploy.chart.rendering import CHART, Rendered, render

PRESETS = CHART / "presets"
VALUES = Path(__file__).parent / "values"


def merged(below: Mapping[str, Any], above: Mapping[str, Any]) -> dict[str, Any]:
    """Two files of values as Helm merges them: maps by key, all else replaced."""
    result = dict(below)
    for key, value in above.items():
        under = result.get(key)
        both = isinstance(under, Mapping) and isinstance(value, Mapping)
        result[key] = merged(under, value) if both else value
    return result


def read(path: Path) -> dict[str, Any]:
    """A file of values."""
    return yaml.safe_load(path.read_text()) or {}


def preset(name: str) -> dict[str, Any]:
    """A preset of the chart."""
    return read(PRESETS / f"{name}.yaml")


def _presets_under(path: Path) -> Iterator[str]:
    """The presets that a file of values is laid over: named in its first line, `# over: p4 mps`."""
    first = path.read_text().partition("\n")[0]
    if first.startswith("# over:"):
        yield from first.removeprefix("# over:").split()


def _read_set(path: Path) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for name in _presets_under(path):
        values = merged(values, preset(name))
    return merged(values, read(path))


SETS: dict[str, dict[str, Any]] = {path.stem: _read_set(path) for path in sorted(VALUES.glob("*.yaml"))}
NAMES = tuple(SETS)


@cache
def rendered(name: str) -> Rendered:
    """The set, rendered once a process."""
    return render(SETS[name])
