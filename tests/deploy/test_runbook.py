"""What the runbook tells people to type exists: commands, containers, values, queries, links."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import typer
import yaml

from penstock.cli.main import build_app
from tests.deploy.metric_tables import MONITORING, known_metrics
from tests.deploy.promql import complaints
from tests.support.stack import CHECKOUT

CHART = CHECKOUT / "deploy" / "helm" / "penstock"
PAGES = sorted(MONITORING.glob("RUNBOOK*.md"))
PROGRAMS = ("kubectl", "helm", "docker", "curl", "penstock", "nvidia-smi", "dmesg")


def shown(page: Path) -> Iterator[str]:
    """Its indented lines."""
    yield from re.findall(r"^    (.+)$", page.read_text(), re.MULTILINE)


QUERIES = [line for page in PAGES for line in shown(page) if not line.startswith(PROGRAMS)]


@pytest.mark.parametrize("query", QUERIES)
def test_query_of_the_runbook_asks_for_what_exists(query: str) -> None:
    """It parses, and its metrics and labels are in the tables."""
    assert complaints(query, known_metrics()) == []


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_commands_of_the_runbook_are_commands_of_ours(page: Path) -> None:
    """Each `penstock …` is a command, with the options that it is given."""
    said = re.findall(r"(?:^    |`|-- |exec \w+ )penstock ((?:[a-z]+ ?)+)(.*?)(?:`|$)", page.read_text(), re.MULTILINE)
    assert said
    for words, rest in said:
        command = typer.main.get_command(build_app(words.split()))
        for word in words.split():
            command = command.get_command(typer.Context(command), word)  # type: ignore[attr-defined]  # of a group
            assert command is not None, words
        options = {option for parameter in command.params for option in parameter.opts}
        assert set(re.findall(r"--[a-z-]+", rest)) <= options, (words, rest)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_values_and_containers_of_the_runbook_are_the_charts(page: Path) -> None:
    """The steps name the value to change and the container to read."""
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    for path in re.findall(rf"(?:`|--set )((?:{'|'.join(values)})\.[A-Za-z.]+)[`=]", page.read_text()):
        found = values
        for part in path.split("."):
            assert part in found, path
            found = found[part]
    templates = "".join(file.read_text() for file in (CHART / "templates").rglob("*") if file.is_file())
    for container in set(re.findall(r" -c (\w+)", page.read_text())):
        assert re.search(rf"- name: {container}$", templates, re.MULTILINE), container
    for claim in set(re.findall(r"patch pvc (\w+)-POD", page.read_text())):
        assert re.search(rf"volumeClaimTemplates:\n(.*\n){{1,4}} +name: {claim}$", templates, re.MULTILINE), claim


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_compose_services_of_the_runbook_are_those_of_the_files(page: Path) -> None:
    """Each service whose log is read, that is asked or started anew is in a Compose file; so is each file there."""
    text = page.read_text()
    services = {
        name for file in CHECKOUT.glob("compose*.yaml") for name in yaml.safe_load(file.read_text())["services"]
    }
    said = re.findall(r"docker compose (?:logs --since 1h|exec|restart) ([\w-]+)", text)
    assert said
    assert set(said) <= services
    assert all((CHECKOUT / name).is_file() for name in re.findall(r"`(compose[\w.]*\.yaml)`", text))


@pytest.mark.parametrize("topology", ["bundled", "sidecar", "separate"])
def test_topologies_of_the_chart_are_in_the_runbooks_table(topology: str) -> None:
    """Each kind of deployment has its row: whose log is where."""
    rows = re.findall(rf"^\| chart, `topology: {topology}`.*\|$", (MONITORING / "RUNBOOK.md").read_text(), re.MULTILINE)
    assert len(rows) == 1
    enum = json.loads((CHART / "values.schema.json").read_text())["properties"]["topology"]["enum"]
    assert topology in enum


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_links_of_the_runbook_lead_somewhere(page: Path) -> None:
    """Each link is to a paragraph that is there."""
    for target in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        name, _, anchor = target.partition("#")
        other = page.parent / name if name else page
        titles = re.findall(r"^## (.+)$", other.read_text(), re.MULTILINE)
        assert not anchor or anchor in [title.lower() for title in titles], target
