"""Files and names of the checkout before 2026-11-28 still work, and docs/upgrade.md names modules that exist."""

import ast
import re
import tomllib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from typer.testing import CliRunner

from penstock.cli.main import build_app, commands
from penstock.engines.config_pbtxt import read_config
from penstock.gateway.auth.access_file import read_access_file
from penstock.gateway.settings import Settings
from penstock.metric_table import METRICS
from penstock.protocol.identity import ALL_ROLES, Role
from penstock.vision.card import card_from_config
from penstock_video.metrics import TABLE as VIDEO_METRICS
from penstock_video.settings.loader import Surroundings, read_rules, read_settings
from penstock_video.settings.sources import rules_of
from tests.deploy.chart.rendering import CHART, render
from tests.deploy.chart.value_sets import merged
from tests.support.stack import CHECKOUT

pytestmark = pytest.mark.xdist_group("chart")

FIXTURES = Path(__file__).parent / "fixtures"
VALUES = FIXTURES / "values"
PAGE = CHECKOUT / "docs" / "upgrade.md"
PROGRAMS = {"penstock": "server", "penstock_video": "deepstream_pipeline", "penstock_load": "loadtest"}
IMAGE_MODELS = {"fastestdet", "googlenet", "googlenet-int8", "mnist", "mobilenetv2", "people"} | {
    *("resnet50", "resnet50-int8", "squeezenet", "street")
}
ENVIRON = {"DOOR_PASSWORD": "a", "MQTT_PASSWORD": "b", "KAFKA_PASSWORD": "c"}
VIDEO_SOURCES = {"cameras": ["door", "yard"], "clips": ["a", "b"], "replicas": ["camera-11"], "container": []}
REMOVED_FLAGS = [("penstock models optimize", "--tensorrt")]


def files(folder: str, pattern: str) -> list[Path]:
    """The fixtures of a kind."""
    return sorted((FIXTURES / folder).glob(pattern))


@cache
def names() -> dict[str, Any]:
    """The public names of the former checkout."""
    return tomllib.loads((FIXTURES / "names.toml").read_text())


@pytest.mark.parametrize("path", files("models", "*/config.pbtxt"), ids=lambda path: path.parent.name)
def test_former_config_pbtxt_loads(path: Path) -> None:
    """A former config.pbtxt is read, and its picture parameters are accepted."""
    config = read_config(path)
    assert config.name == path.parent.name
    assert (card_from_config(config) is not None) == (config.name in IMAGE_MODELS)


@pytest.mark.parametrize("name", VIDEO_SOURCES)
def test_former_video_settings_load(tmp_path: Path, name: str) -> None:
    """A former settings file of the video program is read with the sources that it names."""
    file = tmp_path / f"{name}.yaml"
    file.write_bytes((FIXTURES / "video" / f"{name}.yaml").read_bytes())
    (tmp_path / "clips").mkdir()
    for clip in ("a.mp4", "b.mp4"):
        (tmp_path / "clips" / clip).touch()
    shards = {"PENSTOCK_SHARDS": "3"} if name == "replicas" else {}
    settings = read_settings(file, surroundings=Surroundings(ENVIRON | shards, "video-0"))
    assert [source.config.source_id for source in settings.sources] == VIDEO_SOURCES[name]
    assert settings.sinks


def test_former_analytics_rules_load() -> None:
    """A former file of analytics rules is read."""
    rules = rules_of(read_rules(FIXTURES / "video" / "rules.yaml", ()), ("person",))
    assert [rule.name for rule in rules.line_crossing] == ["Pavement"]
    assert [rule.name for rule in rules.roi_filtering] == ["Lawn"]


def test_video_fixtures_each_have_a_test() -> None:
    """Every former settings file of the video program is loaded by a test."""
    assert {path.stem for path in files("video", "*")} == {*VIDEO_SOURCES, "rules"}


def test_former_access_file_loads() -> None:
    """A former access file is read with all keys, roles and quotas, with its tokens and its certificates."""
    rules = read_access_file(FIXTURES / "access" / "access.toml")
    assert {key.name: set(key.roles) for key in rules.keys} == {
        "camera": {Role.INFER},
        "prometheus": {Role.READ},
        "ops": set(ALL_ROLES),
        "plain": {Role.INFER},
    }
    assert [key.name for key in rules.keys if key.quota is not None] == ["camera"]
    assert rules.tokens is not None
    assert rules.certificates is not None
    assert set(rules.certificates.subjects) == {"CN=ops,O=acme"}


def read_values(path: Path) -> dict[str, Any]:
    """A former file of chart values over the former presets that its first line names."""
    first = path.read_text().partition("\n")[0]
    values: dict[str, Any] = {}
    for preset in first.removeprefix("# over:").split() if first.startswith("# over:") else ():
        values = merged(values, read_values(VALUES / "presets" / f"{preset}.yaml"))
    return merged(values, yaml.safe_load(path.read_text()) or {})


def keys_of(value: Any, prefix: str = "") -> Iterator[str]:
    """All keys of nested maps, joined by dots."""
    for key, below in value.items() if isinstance(value, dict) else ():
        yield f"{prefix}{key}"
        yield from keys_of(below, f"{prefix}{key}.")


@pytest.mark.parametrize("path", files("values", "**/*.yaml"), ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_former_chart_values_render(path: Path) -> None:
    """The chart renders with a former file of values; its schema accepts each key."""
    assert render(read_values(path)).objects


def test_former_chart_values_all_exist() -> None:
    """No key of the former values.yaml is missing in the present one."""
    present = set(keys_of(yaml.safe_load((CHART / "values.yaml").read_text())))
    assert set(keys_of(read_values(VALUES / "values.yaml"))) - present == set()


def test_former_settings_all_exist() -> None:
    """Each former setting, and so its flag and its variable, exists."""
    assert set(names()["settings"]) - set(Settings.model_fields) == set()


def test_former_metrics_all_exist() -> None:
    """Each former metric of the gateway and of the video program exists."""
    assert set(names()["gateway_metrics"]) - {metric.name for metric in METRICS} == set()
    assert set(names()["video_metrics"]) - {metric.name for metric in VIDEO_METRICS} == set()


def flags_of(command: Any, path: str) -> Iterator[tuple[str, str]]:
    """The flags of a command and of the commands below it."""
    yield path, ""
    for parameter in command.params:
        yield from ((path, flag) for flag in (*parameter.opts, *parameter.secondary_opts))
    for name, below in getattr(command, "commands", {}).items():
        yield from flags_of(below, f"{path} {name}")


@pytest.mark.parametrize("name", sorted({path.split()[1] for path in names()["commands"]}))
def test_former_flags_all_exist(name: str) -> None:
    """Each former command has its former flags, or refuses them with a sentence."""
    root: Any = typer.main.get_command(build_app((name,)))
    present = set(flags_of(root.commands[name], f"penstock {name}"))
    former_flags = {path: flags for path, flags in names()["commands"].items() if path.split()[1] == name}
    former = {(path, flag) for path, flags in former_flags.items() for flag in ("", *flags)}
    assert former
    assert former - present == set()


@pytest.mark.parametrize(("path", "flag"), REMOVED_FLAGS)
def test_removed_flags_are_refused_with_what_to_use_instead(path: str, flag: str) -> None:
    """A removed flag gives one sentence, whatever else is given; docs/upgrade.md lists it."""
    words = path.split()[1:]
    done = CliRunner().invoke(build_app(words), [*words, "street", flag])
    assert done.exit_code == 2
    assert re.fullmatch(rf"penstock: {flag} was removed: .* use .*\n", done.stderr)
    assert f"`{path} {flag}`" in PAGE.read_text()


def test_former_commands_all_exist() -> None:
    """No former command is missing."""
    assert {path.split()[1] for path in names()["commands"]} - set(commands()) == set()


def path_of(module: str) -> Path:
    """The module's file, or its package's folder, which may be absent."""
    path = CHECKOUT / PROGRAMS.get(module.partition(".")[0], "") / module.replace(".", "/")
    return path if path.is_dir() else path.with_suffix(".py")


@cache
def names_in(path: Path) -> set[str]:
    """The names that a module defines anywhere."""
    found: set[str] = set()
    for node in ast.walk(ast.parse((path / "__init__.py" if path.is_dir() else path).read_text())):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            found.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def rows(section: str) -> list[list[str]]:
    """The cells of the tables in a section of docs/upgrade.md, without heads."""
    text = PAGE.read_text().partition(f"\n## {section}\n")[2].partition("\n## ")[0]
    lines = re.findall(r"^\|(.+)\|$", text, re.MULTILINE)
    cells = [[cell.strip() for cell in line.split("|")] for line in lines]
    heads = {number for number, row in enumerate(cells) if set(row[0]) == {"-"}}
    return [row for number, row in enumerate(cells) if number not in heads and number + 1 not in heads]


def test_upgrade_page_names_modules_that_exist() -> None:
    """Each new module in docs/upgrade.md exists with each renamed name, and each former module is gone."""
    found = rows("All modules")
    assert len(found) > 700
    for former, new, renamed in found:
        path = path_of(re.sub(r"^deleted: .*?(`[\w.]+`).*", r"\1", new).strip("`"))
        assert path.exists(), f"docs/upgrade.md: {new} (formerly {former}) does not exist: correct the row"
        missing = set(re.findall(r"→ `(\w+)`", renamed)) - names_in(path)
        assert not missing, f"docs/upgrade.md: {new} (formerly {former}) has no {sorted(missing)}: correct the row"
        assert not path_of(former.strip("`")).is_file(), f"docs/upgrade.md: {former} exists"


def test_upgrade_page_names_packages_and_files_that_exist() -> None:
    """Each new package, file and folder in docs/upgrade.md exists."""
    modules = {name for row in rows("Packages") for name in re.findall(r"`([a-z_.]+)`", row[1])}
    assert [name for name in sorted(modules) if not path_of(name).exists()] == []
    files_named = [row[1].strip("`") for row in rows("Files and container paths")]
    folders = [row[2].strip("`") for row in rows("Packages")]
    present = [name for name in files_named + folders if not name.startswith("deleted: ")]
    assert [name for name in present if not (CHECKOUT / name).exists()] == []


def test_upgrade_page_names_programs_that_can_be_started() -> None:
    """Each new `python -m` command in docs/upgrade.md names a module that runs as a program."""
    modules = {name for row in rows("Programs started with Python") for name in re.findall(r"-m ([\w.]+)", row[1])}
    assert modules
    for module in sorted(modules):
        path = path_of(module)
        program = path / "__main__.py" if path.is_dir() else path
        assert program.is_file(), module
        assert path.is_dir() or '__name__ == "__main__"' in program.read_text(), module
