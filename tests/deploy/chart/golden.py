"""The golden files of the chart: each set of values as it was last looked at.

python -m tests.deploy.chart.golden     # writes them anew; then read `git diff tests/golden/chart`
"""

import copy
from pathlib import Path

import yaml

from tests.deploy.chart.rendering import Document, Rendered
from tests.deploy.chart.value_sets import NAMES, rendered

GOLDEN = Path(__file__).resolve().parents[2] / "golden" / "chart"


class _Dumper(yaml.SafeDumper):
    """Readable YAML: no anchors, long texts as they stand."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else None)


_Dumper.add_representer(str, _text)


def golden_path(name: str) -> Path:
    """Where the set's golden file is."""
    return GOLDEN / f"{name}.yaml"


def golden_text(result: Rendered) -> str:
    """Every object, without what deploy/monitoring's own files hold, and the notes printed after the installation."""
    objects = [_without_files(each) for each in result.objects]
    text = yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=120, allow_unicode=True, explicit_start=True)
    return text + "".join(f"# {line}".rstrip() + "\n" for line in ["---", *result.notes.strip().splitlines()])


def _without_files(document: Document) -> Document:
    """The rules and dashboards stand in deploy/monitoring; a golden file says only which."""
    short = copy.deepcopy(document)
    if document["kind"] == "PrometheusRule":
        short["spec"]["groups"] = [group["name"] for group in document["spec"]["groups"]]
    if document["kind"] == "ConfigMap" and all(name.endswith(".json") for name in document.get("data", {"": ""})):
        short["data"] = dict.fromkeys(document["data"], "(deploy/monitoring/dashboards)")
    return short


def main() -> None:
    """Writes all of them, and removes those of sets that are no more."""
    GOLDEN.mkdir(parents=True, exist_ok=True)
    for path in GOLDEN.glob("*.yaml"):
        if path.stem not in NAMES:
            path.unlink()
    for name in NAMES:
        golden_path(name).write_text(golden_text(rendered(name)))


if __name__ == "__main__":
    main()
