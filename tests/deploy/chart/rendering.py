"""The chart as the real Helm engine renders it, without a cluster; all that is known of its Python API is here.

The engine is a library of 85 MB: imported where it is used, so that only the worker of these tests loads it (0.3 s).
"""

import json
import re
from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

CHART = Path(__file__).resolve().parents[3] / "deploy" / "helm" / "penstock"
RELEASE, NAMESPACE = "penstock", "ml"
OLDEST_KUBERNETES = "v1.29.0"
WARNING = 2  # of lint's severities: 0 unknown, 1 info, 2 warning, 3 error

Values = Mapping[str, Any]
Document = dict[str, Any]


class Refused(Exception):
    """The chart takes no such values. The message is what a user of `helm install` reads."""


class _Loader(yaml.CSafeLoader):
    """YAML as the API server takes it: a key given twice is a mistake."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Hashable, Any]:
        keys = [key.value for key, _ in node.value]
        twice = {key for key in keys if keys.count(key) > 1}
        if twice:
            raise yaml.constructor.ConstructorError(None, None, f"{sorted(twice)} given twice", node.start_mark)
        return super().construct_mapping(node, deep)


@dataclass(frozen=True, slots=True)
class Rendered:
    """objects: in the order of their files. notes: what the user reads after the installation. texts: by file."""

    objects: tuple[Document, ...]
    notes: str
    texts: Mapping[str, str]

    def of_kind(self, *kinds: str) -> list[Document]:
        """The objects of these kinds."""
        return [each for each in self.objects if each["kind"] in kinds]


def render(
    values: Values,
    *,
    kube_version: str = OLDEST_KUBERNETES,
    release: str = RELEASE,
    namespace: str = NAMESPACE,
    chart: Path = CHART,
) -> Rendered:
    """What `helm install` sends with these values over the chart's own. Raises Refused with the chart's message."""
    import helm_python
    from helm_python import _native  # the engine takes a Kubernetes version, its Python wrapper does not hand one on

    options = {"name": release, "namespace": namespace, "kube_version": kube_version}
    with helm_python.Chart.load(chart) as loaded:
        try:
            answer = _native.call_string("helm_render", loaded._raw(), json.dumps(values), json.dumps(options))
        except (helm_python.HelmValuesError, helm_python.HelmRenderError) as error:
            raise Refused(_said(str(error))) from error
    texts = {name.partition("/templates/")[2]: text for name, text in json.loads(answer).items()}
    notes = texts.pop("NOTES.txt", "")
    manifests = {name: text for name, text in sorted(texts.items()) if not name.endswith(".tpl")}
    return Rendered(tuple(_documents(manifests)), notes, manifests)


def lint(values: Values, *, chart: Path = CHART) -> list[str]:
    """What `helm lint --strict` warns of or calls an error."""
    import helm_python

    report = helm_python.lint(chart, dict(values), strict=True, namespace=NAMESPACE, kube_version=OLDEST_KUBERNETES)
    found = [f"{each['path']}: {each['error']}" for each in report["messages"] if each["severity"] >= WARNING]
    return found + list(report["errors"])


def package(destination: Path, *, chart: Path = CHART) -> Path:
    """The archive that `helm package` writes into the folder."""
    import helm_python

    return Path(helm_python.package(chart, destination=destination))


def _documents(texts: Mapping[str, str]) -> Iterator[Document]:
    for name, text in texts.items():
        for document in yaml.load_all(text, _Loader):  # a SafeLoader, made stricter
            if document is None:
                continue
            if not isinstance(document, dict) or not {"apiVersion", "kind", "metadata"} <= document.keys():
                raise AssertionError(f"{name}: not an object of Kubernetes: {document!r}")
            yield document


def _said(message: str) -> str:
    """Helm's message without where in a template it was raised."""
    return re.sub(r"execution error at \([^)]*\): ", "", message).strip()
