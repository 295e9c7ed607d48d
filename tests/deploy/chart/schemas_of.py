"""What Kubernetes' own schemas, or ours of its operators' objects, have against an object."""

import json
from functools import cache
from importlib.util import find_spec
from pathlib import Path

import jsonschema_rs
from packaging.version import Version

from tests.deploy.chart.rendering import Document

OWN = Path(__file__).parent / "schemas"
DEFINITIONS = "_definitions.json"
OLDEST = (1, 29)
SPEC = find_spec("kubernetes_validate")  # its schemas alone: what it imports takes 2 s of CPU
assert SPEC is not None
assert SPEC.origin
SCHEMAS = Path(SPEC.origin).parent / "kubernetes-json-schema"
_THERE = sorted(Version(path.name[1:].partition("-")[0]) for path in SCHEMAS.glob("v*-local-strict"))
VERSIONS = tuple(str(version) for version in _THERE if version.release[:2] >= OLDEST)


def faults(document: Document, version: str) -> tuple[str, ...]:
    """What the schema of that Kubernetes has against it: the field, and why."""
    return _faults(json.dumps(document, sort_keys=True), version)


@cache
def _faults(text: str, version: str) -> tuple[str, ...]:
    document = json.loads(text)
    validator = _validator(document["apiVersion"], document["kind"], version)
    if validator is None:
        return (
            f"{document['kind']} of {document['apiVersion']} is unknown to Kubernetes {version}, and to {OWN.name}/",
        )
    return tuple(f"{_json_path(each.instance_path)}: {each.message[:300]}" for each in validator.iter_errors(document))


@cache
def _validator(api_version: str, kind: str, version: str) -> jsonschema_rs.Draft202012Validator | None:
    """kubernetes_validate reads its megabytes anew at each call; this is the same, once."""
    own = OWN / f"{kind}.json"
    if own.is_file():
        return jsonschema_rs.Draft202012Validator(json.loads(own.read_text()))
    group, _, of_group = api_version.rpartition("/")
    file = f"{kind}-{group.partition('.')[0]}-{of_group}" if group else f"{kind}-{of_group}"
    folder = SCHEMAS / f"v{version}-local-strict"
    schema = folder / f"{file.lower()}.json"
    if not schema.is_file():
        return None
    return jsonschema_rs.Draft202012Validator(json.loads(schema.read_text()), registry=_registry(folder))


@cache
def _registry(folder: Path) -> jsonschema_rs.Registry:
    return jsonschema_rs.Registry([(DEFINITIONS, json.loads((folder / DEFINITIONS).read_text()))])


def _json_path(path: list[str | int]) -> str:
    return "$" + "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path)
