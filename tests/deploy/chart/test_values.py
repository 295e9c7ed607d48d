"""values.yaml, its schema and its table say the same; presets and settings are what the programs know."""

import json
from collections.abc import Iterator, Mapping
from typing import Any

import jsonschema_rs
import pytest
import yaml

from deploy.helm.readme import CHART, read_values, table, with_table
from penstock.gateway.settings import Settings
from tests.deploy.chart.rendering import render
from tests.deploy.chart.value_sets import PRESETS, SETS, merged, preset

pytestmark = pytest.mark.xdist_group("chart")

VALUES = CHART / "values.yaml"
SAID_BY_THE_CHART = {  # settings that follow from other values, or that make no sense in a pod
    *("allow_client_shm", "client_shm_lease_s", "trace_file"),
    "engine_header_file",  # for an external Triton; the chart mounts no Secret for it
    "gpus",  # the chart's Triton has the cards of its resources
    *("mps", "mps_directory", "mps_active_thread_percentage", "mps_pinned_memory"),  # of a Triton that is started here
    *("tls_cert", "tls_key", "tls_client_ca"),  # the chart mounts no such files: an Ingress terminates TLS
    *("allowed_host", "host", "http_port", "grpc_port", "metrics_port", "engine", "engine_grpc", "engine_http_port"),
    *("engine_grpc_port", "engine_metrics_port", "engine_environment", "access_file", "api_keys", "anonymous"),
    *("tls_cert", "tls_key", "tls_client_ca"),  # a cluster's Ingress or service mesh encrypts
    "load_target",  # the gateway's image has no load test
    *("console", "console_port", "console_url", "video_url"),  # the console is a pod of its own
    *("video", "video_config", "video_port"),  # so is the video program
    *("home", "model_repository", "models", "batching", "drain_delay_s", "grace_s", "log_format", "log_level"),
}
FREE = (  # maps whose keys are the user's, or Kubernetes'
    *("gateway.batching", "gateway.settings", "video.config"),
    *("requests", "limits", "annotations", "podAnnotations", "podLabels", "nodeSelector", "affinity", "labels"),
)


def keys(value: Any, prefix: str = "") -> Iterator[str]:
    """Every key of a map of maps, with dots; those of free maps not."""
    for key, below in value.items():
        yield f"{prefix}{key}"
        if isinstance(below, dict) and not f"{prefix}{key}".endswith(FREE):
            yield from keys(below, f"{prefix}{key}.")


def schema_keys(schema: dict[str, Any], root: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Every property that the schema knows, with dots; those of free maps not."""
    if "$ref" in schema:
        schema = {**root["$defs" if "$defs" in root else "definitions"][schema["$ref"].rpartition("/")[2]], **schema}
    for key, below in schema.get("properties", {}).items():
        yield f"{prefix}{key}"
        if not f"{prefix}{key}".endswith(FREE):
            yield from schema_keys(below, root, f"{prefix}{key}.")


@pytest.fixture
def schema() -> dict[str, Any]:
    """values.schema.json."""
    loaded: dict[str, Any] = json.loads((CHART / "values.schema.json").read_text())
    return loaded


def test_schema_and_values_have_the_same_keys(schema: dict[str, Any]) -> None:
    """Every value has a rule, and every rule a default that the table shows. `global` is Helm's own."""
    claims = {f"{each}.resources.claims" for each in ("gateway", "triton", "video")}  # Kubernetes', and of no default
    known = set(schema_keys(schema, schema)) - {"global"} - claims
    assert known == set(keys(yaml.safe_load(VALUES.read_text())))


def closed(schema: dict[str, Any], path: str = "") -> Iterator[str]:
    """The objects of the schema that would take an unknown key."""
    if schema.get("type") == "object" and "properties" in schema and schema.get("additionalProperties", True) is True:
        yield path or "(the root)"
    for word, below in schema.items():
        if isinstance(below, dict) and word != "global":
            yield from closed(below, f"{path}.{word}")


def test_schema_is_closed_at_every_level(schema: dict[str, Any]) -> None:
    """An object with named properties takes no others, so that a misspelt value is refused."""
    assert list(closed(schema)) == []


def test_settings_of_the_gateway_are_all_that_up_takes_and_the_chart_does_not_say(schema: dict[str, Any]) -> None:
    """gateway.settings knows the names of server/penstock/gateway/settings.py but those that other values say:
    neither more nor less.
    """
    settings = schema["properties"]["gateway"]["properties"]["settings"]
    if "$ref" in settings:
        settings = schema["$defs"][settings["$ref"].rpartition("/")[2]]
    assert set(settings["properties"]) == set(Settings.model_fields) - SAID_BY_THE_CHART


@pytest.mark.parametrize("name", sorted(path.stem for path in PRESETS.glob("*.yaml")))
def test_preset_says_only_values_that_exist(name: str) -> None:
    """A preset is a file for --values: of the chart's own keys, with a comment that says for what."""
    assert set(keys(preset(name))) <= set(keys(yaml.safe_load(VALUES.read_text())))
    assert (PRESETS / f"{name}.yaml").read_text().startswith("#")


def test_table_of_values_is_what_values_yaml_says() -> None:
    """VALUES.md is made, not written: after a change of values.yaml, python -m deploy.helm.readme."""
    page = (CHART / "VALUES.md").read_text()
    assert with_table(page, read_values(VALUES.read_text())) == page


def test_table_has_keys_defaults_and_comments() -> None:
    """A key's comment is what stands right above it; a list in it is shown as one; a flow map is one default."""
    text = """\
# What
# it is.
#   one   the first
#   two   the second
a: one

b:
  # Of b.
  c: {d: 1}
  e: []
# A group.
g:
  h: x | y
"""
    assert [(each.key, each.default, each.comment) for each in read_values(text)] == [
        ("a", '"one"', "What it is.<br>`one`: the first<br>`two`: the second"),
        ("b.c", '{"d": 1}', "Of b."),
        ("b.e", "[]", ""),
        ("g", "", "A group."),
        ("g.h", '"x | y"', ""),
    ]
    assert '| `g.h` | `"x \\| y"` |  |' in table(read_values(text))


def test_values_explain_themselves() -> None:
    """Every value has a comment of its own, or is a field of Kubernetes' and says so."""
    rows = [line for line in table(read_values(VALUES.read_text())).splitlines() if line.startswith("| `")]
    assert [row for row in rows if row.endswith("|  |")] == []


def test_schema_is_one_and_takes_the_defaults(schema: dict[str, Any]) -> None:
    """The schema keeps its own draft's rules, and another validator than Helm's takes the chart's values by it, too."""
    jsonschema_rs.meta.validate(schema)
    jsonschema_rs.validate(schema, yaml.safe_load(VALUES.read_text()))


@pytest.mark.parametrize("name", ["cpu", "mps-own"])
def test_pull_secrets_are_taken_as_names_and_as_a_pod_has_them(name: str) -> None:
    """Both ways of writing them say the same to every pod, the DaemonSet's too."""

    def texts(secrets: list[object]) -> Mapping[str, str]:
        return render(merged(SETS[name], {"image": {"pullSecrets": secrets}})).texts

    assert texts(["a", {"name": "b"}]) == texts(["a", "b"]) != texts([])


@pytest.mark.parametrize("over", [{"source": "pvc", "pvc": {"claimName": "m"}}, SETS["everything"]["models"]])
def test_models_folder_may_begin_with_a_slash(over: dict[str, Any]) -> None:
    """The folder is in the claim or the repository, however it is written."""

    def texts(path: str) -> Mapping[str, str]:
        values = merged(SETS["t4"], {"models": over, "networkPolicy": {"egress": [{"ports": [{"port": 443}]}]}})
        return render(merged(values, {"models": {over["source"]: {"path": path}}})).texts

    assert texts("/a/repo") == texts("a/repo") != texts("")
